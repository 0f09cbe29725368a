//! Checks of `count` and `settle`: no status twice, and algorithms that can refund.

use super::FirstPositions;
use crate::rules::file::node::Node;
use crate::rules::file::problem::Findings;
use crate::rules::file::types::{AlgorithmName, CountRule, LimitRule, Overflow, StatusRule};

pub(super) fn check(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    if let (Some(CountRule::Listed(listed)), Some(list)) = (&rule.count, node.get("count")) {
        statuses(listed, list, findings);
    }
    let queues = rule.algorithm == AlgorithmName::LeakyBucket && rule.modes.overflow == Some(Overflow::Queue);
    for key in ["count", "settle"] {
        if queues && node.get(key).is_some() {
            let message = format!("`{key}` has no effect with `overflow: queue`, which gives nothing back");
            findings.error(node.key_at(key), message, "use `overflow: reject`, or remove it");
        }
    }
}

fn statuses(listed: &[StatusRule], list: &Node, findings: &mut Findings) {
    let mut seen = FirstPositions::new();
    for (index, one) in listed.iter().enumerate() {
        let at = list.item(index).at;
        if let Some(first) = seen.duplicate_of(one, at) {
            findings.warning(at, format!("duplicate status, first at {first}"), "remove one of them");
        }
    }
}
