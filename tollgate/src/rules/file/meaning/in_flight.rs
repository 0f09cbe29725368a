//! Checks of `in_flight` limits, which have a number of requests and no settings of a rate.

use super::numbers;
use crate::rules::file::node::{Node, NodeKind};
use crate::rules::file::problem::Findings;
use crate::rules::file::types::{AlgorithmName, LimitRule};
use crate::rules::rule::check_in_flight;

/// The settings of a rate, other than the numbers of algorithms.
const OF_RATES: [&str; 8] = ["algorithm", "cost", "count", "settle", "ban", "consistency", "on_store_failure", "store"];

pub(super) fn check(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    of_rates(node, findings);
    number(rule.in_flight, node, findings);
    for (index, by) in rule.overrides.iter().enumerate() {
        let Some(place) = node.get("overrides").map(|overrides| overrides.item(index)) else { continue };
        of_rates(place, findings);
        number(by.in_flight, place, findings);
        if !place.mentions("in_flight") {
            numbers::changes_nothing(by, place, "in_flight", findings);
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

fn number(most: Option<u64>, place: &Node, findings: &mut Findings) {
    if let Some(Err(error)) = most.map(check_in_flight) {
        findings.error(place.value_at("in_flight"), error.problem(), error.fix());
    }
}
