//! Checks of keys, plans, overrides, exemptions and blocks.

use std::collections::HashMap;

use super::FirstPositions;
use crate::rules::file::forms::{Cidr, KeyPart, PlanSource};
use crate::rules::file::node::Node;
use crate::rules::file::problem::{Findings, Position, shown};
use crate::rules::file::types::{LimitRule, ListRule, OneOrMany, OverrideRule};
use crate::rules::set::MAX_KEY_PARTS;

pub(super) fn check(rule: &LimitRule, node: &Node, has_jwt: bool, findings: &mut Findings) {
    key(rule, node, has_jwt, findings);
    if let (Some(PlanSource(KeyPart::Jwt(_))), false) = (&rule.plan, has_jwt) {
        no_jwt(node.value_at("plan"), findings);
    }
    let has_plans = rule.overrides.iter().any(|by| by.plan.is_some());
    if rule.plan.is_some() && !has_plans && !node.lost("overrides") {
        let message = "`plan` has no effect, because no override is for a plan";
        findings.warning(node.key_at("plan"), message, "add `overrides` with a `plan`, or remove it");
    }
    if rule.ban.is_some() && !node.mentions("key") && !node.mentions("in_flight") {
        let message = "without a key, a ban refuses all clients at once";
        findings.warning(node.key_at("ban"), message, "add a `key`, such as `key: ip`");
    }
    let mut seen = FirstPositions::new();
    for (by, place) in rule.overrides.iter().zip(node.items("overrides")) {
        for_whom(rule, by, node, place, findings);
        if let Some(first) = seen.duplicate_of((&by.plan, by.key.as_deref()), place.at) {
            findings.error(place.at, format!("duplicate override, first at {first}"), "remove one of them");
        }
    }
    lists(rule, node, findings);
}

/// Checks that an override has a plan or a key.
fn for_whom(rule: &LimitRule, by: &OverrideRule, limit: &Node, place: &Node, findings: &mut Findings) {
    match (place.mentions("plan"), place.mentions("key")) {
        (false, false) => {
            findings.error(place.at, "this override has neither `plan` nor `key`", "add `plan: NAME` or `key: NAME`");
        }
        (true, true) => {
            let message = "this override has both `plan` and `key`";
            findings.error(place.key_at("key"), message, "write two overrides, one for each");
        }
        _ => {}
    }
    if by.plan.is_some() && rule.plan.is_none() && !limit.lost("plan") {
        let message = "this override never applies, because the limit has no `plan`";
        findings.error(
            place.key_at("plan"),
            message,
            "add `plan: jwt:CLAIM` to the limit, or `plan: header:NAME` if clients cannot set that header",
        );
    }
}

fn key(rule: &LimitRule, node: &Node, has_jwt: bool, findings: &mut Findings) {
    let (Some(parts), Some(place)) = (&rule.key, node.get("key")) else {
        if node.get("missing").is_some() && !node.lost("key") {
            let message = "`missing` has no effect without a key";
            findings.error(node.key_at("missing"), message, "add a `key`, or remove it");
        }
        return;
    };
    if parts.len() > MAX_KEY_PARTS {
        let message = format!("the key has {} parts, more than {MAX_KEY_PARTS}", parts.len());
        findings.error(place.at, message, format!("use {MAX_KEY_PARTS} parts or fewer"));
    }
    let mut seen = FirstPositions::new();
    for (part, item) in parts.iter().zip(node.items("key")) {
        let at = item.at;
        if let Some(first) = seen.duplicate_of(part, at) {
            findings.error(at, format!("duplicate key part, first at {first}"), "remove one of them");
        }
        if matches!(part, KeyPart::Jwt(_)) && !has_jwt {
            no_jwt(at, findings);
        }
    }
}

pub(super) fn no_jwt(at: Position, findings: &mut Findings) {
    let message = "tokens cannot be verified without a `jwt` section";
    findings.error(at, message, "add one, such as `jwt: { key_file: public.pem, algorithms: [RS256] }`");
}

/// Checks exemptions, blocks, and overrides for single keys.
fn lists(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    let mut exempt: HashMap<Cidr, Position> = HashMap::new();
    let mut exempt_keys: HashMap<&[String], Position> = HashMap::new();
    for (section, list) in [("exempt", &rule.exempt), ("blocked", &rule.blocked)] {
        let Some(place) = node.get(section) else { continue };
        for (network, item) in list.ips.iter().zip(place.items("ips")) {
            if section == "exempt" {
                exempt.insert(*network, item.at);
            } else if let Some(first) = exempt.get(network) {
                contradicts(&network.to_string(), *first, item.at, findings);
            }
        }
        for (key, item) in list.keys.iter().zip(place.items("keys")) {
            if section == "exempt" {
                exempt_keys.insert(key, item.at);
            } else if let Some(first) = exempt_keys.get(&**key) {
                contradicts(&key.join(", "), *first, item.at, findings);
            }
            single_key(rule, key, node, item.at, findings);
        }
        if section == "exempt" && is_everybody(list) {
            let message = "no request reaches this limit, because every address is exempt";
            let at = place.items("ips").first().map_or(place.at, |item| item.at);
            findings.error(at, message, "exempt fewer, or remove the limit");
        }
    }
    for (by, place) in rule.overrides.iter().zip(node.items("overrides")) {
        if let (Some(key), Some(place)) = (&by.key, place.get("key")) {
            single_key(rule, key, node, place.at, findings);
        }
    }
}

fn contradicts(what: &str, first: Position, at: Position, findings: &mut Findings) {
    let message = format!("`{}` is blocked here and exempt at {}:{}", shown(what), first.line, first.column);
    findings.error(at, message, "remove it from one of the lists");
}

/// Returns whether a list contains all IPv4 and all IPv6 addresses.
fn is_everybody(list: &ListRule) -> bool {
    let whole = |v4: bool| list.ips.iter().any(|ip| ip.net().prefix_len() == 0 && ip.net().addr().is_ipv4() == v4);
    whole(true) && whole(false)
}

fn counted(parts: usize) -> String {
    if parts == 1 { "1 part".to_owned() } else { format!("{parts} parts") }
}

/// Checks that a key has as many parts as the limit's key.
fn single_key(rule: &LimitRule, named: &OneOrMany<String>, node: &Node, at: Position, findings: &mut Findings) {
    if node.lost("key") {
        return;
    }
    let parts = rule.key.as_ref().map_or(0, |key| key.len());
    if parts == 0 {
        findings.error(at, "the limit has no key, so this key never matches", "add a `key` to the limit");
    } else if parts != named.len() {
        let message = format!("this key has {}, but the limit's key has {}", counted(named.len()), counted(parts));
        let fix = if parts == 1 { "write one string".to_owned() } else { format!("write a list of {parts} strings") };
        findings.error(at, message, fix);
    }
}
