//! Checks of numbers: those of the algorithm, in flight and learned ones, costs, overrides, bans, and the responses that
//! count.

use std::time::Duration;

use tollgate::internal::MAX_QUOTA;
use tollgate::{InvalidLimit, Limit, MAX_SPAN, MIN_SPAN};
use tollgate_rules::internal::config::{CountWhen, check_in_flight, checks};

use super::{FirstPositions, report};
use crate::node::{Node, NodeKind};
use crate::problem::{Findings, Position, shown};
use crate::shape::rate_text;
use crate::types::{
    AlgorithmName, BanRule, ComputedCost, CostRule, CountRule, CountedStatuses, LimitRule, Numbers, Overflow,
    OverrideRule, QuotaRule, RuleFile,
};

/// The keys that an override may have in addition to `plan` and `key`.
const OVERRIDABLE: [&str; 7] = ["limit", "window", "segments", "capacity", "refill", "leak", "max_wait"];

pub(super) fn check(rule: &LimitRule, file: &RuleFile, node: &Node, findings: &mut Findings) {
    answers(rule, node, findings);
    if node.mentions("in_flight") {
        return in_flight(rule, node, findings);
    }
    if let (Some(ban), Some(node)) = (&rule.ban, node.get("ban")) {
        check_ban(*ban, node, findings);
    }
    match &rule.cost {
        Some(CostRule::Units(cost)) => report(checks::constant_cost(*cost), node.value_at("cost"), findings),
        Some(CostRule::Computed(cost)) if cost.when_error == Some(0) => {
            let message = "when_error 0 lets a client pass for free by making the expression fail";
            findings.error(when_error_at(node), message, "use 1 or more");
        }
        _ => {}
    }
    // Without a valid algorithm, numbers cannot be checked.
    if node.lost("algorithm") {
        return;
    }
    foreign(rule.algorithm, node, node, findings);
    queue(rule, node, findings);
    learned(rule, node, findings);
    let base = match storable(rule.limit(), file) {
        Ok(limit) => {
            cost_fits(rule, limit.quota(), node, None, findings);
            None
        }
        Err(error) => {
            findings.error(node.value_at(error.field()), error.problem(), error.fix());
            Some(error)
        }
    };
    for (by, place) in rule.overrides.iter().zip(node.items("overrides")) {
        override_numbers(rule, by, (node, place), findings);
        match storable(rule.overridden(by), file) {
            Ok(limit) => cost_fits(rule, limit.quota(), node, Some(place), findings),
            // An error of the limit itself is reported there.
            Err(error)
                if base.as_ref().is_some_and(|base| base.field() == error.field())
                    && place.get(error.field()).is_none() => {}
            Err(error) => {
                let at = if place.get(error.field()).is_some() { place.value_at(error.field()) } else { place.at };
                findings.error(at, error.problem(), error.fix());
            }
        }
    }
}

/// Checks that the store of the file can hold a limit.
fn storable(limit: Result<Limit, InvalidLimit>, file: &RuleFile) -> Result<Limit, InvalidLimit> {
    let limit = limit?;
    #[cfg(feature = "redis")]
    if !file.store.is_memory() {
        limit.check_shared()?;
    }
    #[cfg(not(feature = "redis"))]
    let _ = file;
    Ok(limit)
}

/// Reports numbers that do not apply to the algorithm.
fn foreign(algorithm: AlgorithmName, limit: &Node, place: &Node, findings: &mut Findings) {
    let NodeKind::Map(map) = &place.kind else { return };
    let has = algorithm.keys();
    for entry in &map.entries {
        let key = entry.key.as_str();
        let owners: Vec<&str> =
            AlgorithmName::ALL.iter().filter(|name| name.keys().contains(&key)).map(|name| name.as_str()).collect();
        if owners.is_empty() || has.contains(&key) {
            continue;
        }
        let is_default = if limit.get("algorithm").is_none() { ", the default" } else { "" };
        let message =
            format!("`{key}` does not apply to {}{is_default}, which has {}", algorithm.as_str(), has.join(", "));
        // Without the key of its quota, the limit would have the default quota.
        let fix = match (owners.join("` or `algorithm: "), algorithm.quota_key()) {
            (owners, ours) if key == "limit" || key == "capacity" => {
                format!("write `{ours}` for {}, or use `algorithm: {owners}`", algorithm.as_str())
            }
            (owners, _) => match rate_of_window(algorithm, key, limit) {
                Some(rate) => format!("write {rate} instead, or use `algorithm: {owners}`"),
                None => format!("use `algorithm: {owners}`, or remove it"),
            },
        };
        findings.error(entry.key_at, message, fix);
    }
}

/// Returns the rate of a bucket that has a window. Without it, the limit would have the default rate.
fn rate_of_window(algorithm: AlgorithmName, key: &str, limit: &Node) -> Option<String> {
    let rate = match algorithm {
        AlgorithmName::TokenBucket => "refill",
        AlgorithmName::LeakyBucket => "leak",
        _ => return None,
    };
    if key != "window" || limit.mentions(rate) {
        return None;
    }
    let text = |key: &str| match &limit.get(key)?.kind {
        NodeKind::Scalar(scalar) => Some(scalar.text.as_str()),
        _ => None,
    };
    let count = text("limit").or_else(|| text("capacity"))?.parse().ok()?;
    rate_text(count, text("window")?).map(|value| format!("`{rate}: {value}`"))
}

fn queue(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    if rule.algorithm != AlgorithmName::LeakyBucket || node.lost("overflow") {
        return;
    }
    match rule.modes.overflow.unwrap_or_default() {
        Overflow::Reject => {
            if node.get("max_wait").is_some() {
                let message = "max_wait has no effect without a queue";
                findings.error(node.key_at("max_wait"), message, "add `overflow: queue`, or remove it");
            }
        }
        Overflow::Queue => {
            if !node.mentions("max_wait") {
                let message = "`overflow: queue` needs max_wait";
                findings.error(node.value_at("overflow"), message, "add `max_wait: 10s`");
            }
        }
    }
}

fn when_error_at(limit: &Node) -> Position {
    limit.get("cost").map_or(limit.at, |cost| cost.value_at("when_error"))
}

/// Reports a constant cost above the quota, which never passes.
fn cost_fits(rule: &LimitRule, quota: u64, limit: &Node, over: Option<&Node>, findings: &mut Findings) {
    let key = rule.algorithm.quota_key();
    let cost = match &rule.cost {
        Some(CostRule::Units(cost)) => *cost,
        // Overrides with a smaller quota are fine: a request for which the expression fails takes the whole of it.
        Some(CostRule::Computed(ComputedCost { when_error: Some(cost), .. })) if over.is_none() => {
            if *cost > quota && !limit.lost(key) {
                let message = format!("when_error {cost} is above the {key} of {quota}");
                findings.error(when_error_at(limit), message, format!("use {quota} or less"));
            }
            return;
        }
        _ => return,
    };
    if cost <= quota || limit.lost(key) || over.is_some_and(|over| over.get(key).is_none()) {
        return;
    }
    match over {
        None => report(checks::cost_fits(cost, quota, key), limit.value_at("cost"), findings),
        Some(over) => report(checks::override_fits(cost, quota, key), over.value_at(key), findings),
    }
}

fn override_numbers(rule: &LimitRule, by: &OverrideRule, (limit, place): (&Node, &Node), findings: &mut Findings) {
    foreign(rule.algorithm, limit, place, findings);
    learned_override(by, place, findings);
    if place.get("in_flight").is_some() {
        let message = "in_flight does not apply to an override of a rate";
        findings.error(place.key_at("in_flight"), message, "remove it, and add a limit with `in_flight`");
    }
    let may_change: Vec<&str> = rule.algorithm.keys().iter().copied().filter(|key| OVERRIDABLE.contains(key)).collect();
    if !OVERRIDABLE.iter().chain(&["in_flight"]).any(|key| place.mentions(key)) {
        changes_nothing(by, place, &format!("one of {}", may_change.join(", ")), findings);
    }
    let queues = rule.modes.overflow == Some(Overflow::Queue) || limit.lost("overflow");
    if rule.algorithm == AlgorithmName::LeakyBucket && !queues && place.get("max_wait").is_some() {
        let message = "max_wait has no effect without a queue";
        findings.error(place.key_at("max_wait"), message, "add `overflow: queue` to the limit, or remove it");
    }
}

/// Reports an override without a number that its limit has.
fn changes_nothing(by: &OverrideRule, place: &Node, may_change: &str, findings: &mut Findings) {
    let name = by.plan.as_deref().or(by.key.as_ref().and_then(|key| key.first().map(String::as_str)));
    let message = format!("the override for `{}` changes nothing", shown(name.unwrap_or_default()));
    findings.error(place.at, message, format!("add {may_change}"));
}

fn check_ban(ban: BanRule, node: &Node, findings: &mut Findings) {
    if ban.after == 0 {
        findings.error(node.value_at("after"), "after 0 bans every key at once", "use 1 or more, or remove the ban");
    }
    if ban.after > MAX_QUOTA {
        let message = format!("after {} is above {MAX_QUOTA} (2^32)", ban.after);
        findings.error(node.value_at("after"), message, format!("use {MAX_QUOTA} or less"));
    }
    for (key, span) in [("within", ban.within.duration()), ("for", ban.lasts.duration())] {
        if !(MIN_SPAN..=MAX_SPAN).contains(&span) {
            let message = format!(
                "`{key}` is {}",
                if span < Duration::from_secs(1) { "shorter than a millisecond" } else { "longer than 35 years" }
            );
            findings.error(node.value_at(key), message, "use a duration such as 10m");
        }
    }
}

/// The settings of a rate, other than the numbers of algorithms.
const OF_RATES: [&str; 8] = ["algorithm", "cost", "count", "settle", "ban", "consistency", "on_store_failure", "store"];

fn in_flight(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    of_rates(node, findings);
    in_flight_number(rule.in_flight, node, findings);
    for (by, place) in rule.overrides.iter().zip(node.items("overrides")) {
        of_rates(place, findings);
        in_flight_number(by.in_flight, place, findings);
        if !place.mentions("in_flight") {
            changes_nothing(by, place, "in_flight", findings);
        }
    }
}

fn of_rates(place: &Node, findings: &mut Findings) {
    let NodeKind::Map(map) = &place.kind else { return };
    for entry in &map.entries {
        let key = entry.key.as_str();
        let is_number = AlgorithmName::ALL.iter().any(|name| name.keys().contains(&key));
        if is_number || OF_RATES.contains(&key) {
            let message = format!("`{key}` does not apply to `in_flight`, which counts concurrent requests");
            findings.error(entry.key_at, message, "move it to another limit, or remove it");
        }
    }
}

fn in_flight_number(most: Option<u64>, place: &Node, findings: &mut Findings) {
    if let Some(Err(error)) = most.map(check_in_flight) {
        findings.error(place.value_at("in_flight"), error.problem(), error.fix());
    }
}

/// The most limits that learn. Each takes up to a megabyte.
const MAX_LEARNING: usize = 64;

/// Reports more limits that learn than there may be.
pub(super) fn check_learning(file: &RuleFile, root: &Node, findings: &mut Findings) {
    let learning = || file.limits.iter().enumerate().filter(|(_, rule)| rule.learn().is_some());
    if let Some((index, _)) = learning().nth(MAX_LEARNING) {
        let at = root.get("limits").map_or(root.at, |limits| limits.item(index).at);
        let message = format!("{} limits learn, more than {MAX_LEARNING}", learning().count());
        findings.error(at, message, "give the others fixed numbers");
    }
}

fn learned(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    let quota = rule.quota_name();
    let (Some(learn), Some(place)) = (rule.learn(), node.get(quota).and_then(|quota| quota.get("learn"))) else {
        return;
    };
    // `from` is checked as the quota of the limit.
    if learn.from > 0 && learn.to < learn.from {
        let message = format!("to {} is below from {}", learn.to, learn.from);
        findings.error(place.value_at("to"), message, format!("use {} or more", learn.from));
    }
    if learn.from > 0 && learn.to == learn.from {
        let message = format!("from and to are both {}, so the limit has nothing to learn", learn.to);
        findings.warning(place.value_at("to"), message, format!("raise `to`, or write `{quota}: {}`", learn.from));
    }
    if learn.to > MAX_QUOTA {
        let message = format!("to {} is above {MAX_QUOTA} (2^32)", learn.to);
        findings.error(place.value_at("to"), message, format!("use {MAX_QUOTA} or less"));
    }
    if learn.cover.cover().is_none() {
        let message = "cover is the share of clients that are never denied, from 0.000001 to 0.999999";
        findings.error(place.value_at("cover"), message, "use a share such as 0.999");
    }
    if rule.key.is_none() && !node.lost("key") {
        let message = "a limit without `key` has nothing to learn from, because all requests share one count";
        findings.error(place.at, message, format!("add `key`, or write a number for `{quota}`"));
    }
    let by_response = match &rule.count {
        Some(count) if !count.is_default() => Some(("count", count.when)),
        _ => rule.settle.as_ref().map(|_| ("settle", CountWhen::Arrival)),
    };
    if let Some((key, when)) = by_response {
        let message = match when {
            CountWhen::Arrival => {
                format!("`{key}` gives units back after the response, and learning counts them as demand")
            }
            CountWhen::After => {
                "`when: after` counts requests after their responses, and learning counts them when they \
                                 arrive"
                    .to_owned()
            }
        };
        findings.error(place.at, message, format!("write a number for `{quota}`, or remove `{key}`"));
    }
}

fn learned_override(by: &OverrideRule, place: &Node, findings: &mut Findings) {
    let Numbers { limit, capacity, .. } = by.numbers;
    for (key, quota) in [("limit", limit), ("capacity", capacity)] {
        if quota.and_then(QuotaRule::learn).is_some() {
            let message = format!("the `{key}` of an override cannot learn");
            findings.error(place.value_at(key), message, "write a number, or use a separate limit for these clients");
        }
    }
}

fn answers(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    if let Some(CountedStatuses::Listed(listed)) = rule.count.as_ref().map(|count| &count.statuses) {
        let items = match node.get("count") {
            Some(map) if map.get("statuses").is_some() => map.items("statuses"),
            _ => node.items("count"),
        };
        let mut seen = FirstPositions::new();
        for (status, item) in listed.iter().zip(items) {
            if let Some(first) = seen.duplicate_of(status, item.at) {
                findings.warning(item.at, format!("duplicate status, first at {first}"), "remove one of them");
            }
        }
    }
    let queues = rule.algorithm == AlgorithmName::LeakyBucket && rule.modes.overflow == Some(Overflow::Queue);
    let is_deferred = rule.count.as_ref().is_some_and(CountRule::is_after);
    if let Some(when) = node.get("count").filter(|_| queues && is_deferred) {
        return report(checks::after_with_queue(), when.key_at("when"), findings);
    }
    for key in ["count", "settle"] {
        if queues && node.get(key).is_some() {
            report(checks::no_effect_with_queue(key), node.key_at(key), findings);
        }
    }
}
