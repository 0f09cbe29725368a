//! Checks of numbers: those of the algorithm, costs, overrides and bans.

use std::time::Duration;

use super::{in_flight, learn};
use crate::algorithm::MAX_QUOTA;
use crate::rules::file::node::{Node, NodeKind};
use crate::rules::file::problem::{Findings, Position, shown};
use crate::rules::file::shape::rate_text;
use crate::rules::file::types::{AlgorithmName, BanRule, ComputedCost, CostRule, LimitRule, Overflow, OverrideRule};
use crate::units::{MAX_SPAN, MIN_SPAN};

/// The keys that an override may have in addition to `plan` and `key`.
const OVERRIDABLE: [&str; 7] = ["limit", "window", "segments", "capacity", "refill", "leak", "max_wait"];

pub(super) fn check(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    if node.mentions("in_flight") {
        return in_flight::check(rule, node, findings);
    }
    if let (Some(ban), Some(node)) = (&rule.ban, node.get("ban")) {
        check_ban(*ban, node, findings);
    }
    match &rule.cost {
        Some(CostRule::Units(0)) => {
            let fix = "use 1 or more, or remove the limit";
            findings.error(node.value_at("cost"), "cost 0 counts nothing", fix);
        }
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
    learn::check(rule, node, findings);
    let base = match rule.limit() {
        Ok(limit) => {
            cost_fits(rule, limit.quota(), node, None, findings);
            None
        }
        Err(error) => {
            findings.error(node.value_at(error.field()), error.problem(), error.fix());
            Some(error)
        }
    };
    for (index, by) in rule.overrides.iter().enumerate() {
        let Some(place) = node.get("overrides").map(|overrides| overrides.item(index)) else { continue };
        override_numbers(rule, by, (node, place), findings);
        match rule.overridden(by) {
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
        None => {
            let message = format!("cost {cost} is above the {key} of {quota}, so no request ever passes");
            findings.error(limit.value_at("cost"), message, format!("lower the cost, or raise {key}"));
        }
        Some(over) => {
            let message = format!("{key} {quota} is below the cost of {cost}, so no request ever passes");
            findings.error(over.value_at(key), message, format!("raise {key} to {cost} or more"));
        }
    }
}

fn override_numbers(rule: &LimitRule, by: &OverrideRule, (limit, place): (&Node, &Node), findings: &mut Findings) {
    foreign(rule.algorithm, limit, place, findings);
    learn::check_override(by, place, findings);
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
pub(super) fn changes_nothing(by: &OverrideRule, place: &Node, may_change: &str, findings: &mut Findings) {
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
