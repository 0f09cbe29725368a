//! Checks of quotas that learn.

use crate::algorithm::MAX_QUOTA;
use crate::rules::file::node::Node;
use crate::rules::file::problem::Findings;
use crate::rules::file::types::{CountName, CountRule, LimitRule, Numbers, OverrideRule, QuotaRule, RuleFile};

/// The most limits that learn. Each takes up to a megabyte.
const MAX_LEARNING: usize = 64;

/// Reports more limits that learn than there may be.
pub(super) fn check_count(file: &RuleFile, root: &Node, findings: &mut Findings) {
    let learning = || file.limits.iter().enumerate().filter(|(_, rule)| rule.learn().is_some());
    if let Some((index, _)) = learning().nth(MAX_LEARNING) {
        let at = root.get("limits").map_or(root.at, |limits| limits.item(index).at);
        let message = format!("{} limits learn, more than {MAX_LEARNING}", learning().count());
        findings.error(at, message, "give the others fixed numbers");
    }
}

pub(super) fn check(rule: &LimitRule, node: &Node, findings: &mut Findings) {
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
        None | Some(CountRule::Named(CountName::All)) => rule.settle.as_ref().map(|_| "settle"),
        Some(_) => Some("count"),
    };
    if let Some(key) = by_response {
        let message = format!("`{key}` gives units back after the response, and learning counts them as demand");
        findings.error(place.at, message, format!("write a number for `{quota}`, or remove `{key}`"));
    }
}

pub(super) fn check_override(by: &OverrideRule, place: &Node, findings: &mut Findings) {
    let Numbers { limit, capacity, .. } = by.numbers;
    for (key, quota) in [("limit", limit), ("capacity", capacity)] {
        if quota.and_then(QuotaRule::learn).is_some() {
            let message = format!("the `{key}` of an override cannot learn");
            findings.error(place.value_at(key), message, "write a number, or use a separate limit for these clients");
        }
    }
}
