//! Checks of keys, plans, overrides, exemptions and blocks.

use std::collections::HashMap;

use tollgate_rules as rules;
use tollgate_rules::internal::config::{InvalidPart, MAX_KEY_PARTS, checks, counted};
use tollgate_rules::{Missing, PathReading};

use super::{FirstPositions, report};
use crate::forms::{Cidr, KeyPart, PlanSource};
use crate::node::Node;
use crate::problem::{Findings, Position, shown};
use crate::types::{LimitRule, ListRule, OneOrMany, OverrideRule};

pub(super) fn check(rule: &LimitRule, node: &Node, has_jwt: bool, reading: PathReading, findings: &mut Findings) {
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
    let keys = ListedKeys::of(rule, node, reading);
    let mut seen = FirstPositions::new();
    for (by, place) in rule.overrides.iter().zip(node.items("overrides")) {
        for_whom(rule, by, node, place, findings);
        let key = match (&by.key, place.get("key")) {
            (Some(key), Some(place)) => Some(keys.check(key, place, findings)),
            _ => None,
        };
        if let Some(first) = seen.duplicate_of((&by.plan, key), place.at) {
            findings.error(place.at, format!("duplicate override, first at {first}"), "remove one of them");
        }
    }
    lists(rule, node, &keys, findings);
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
        findings.error(
            place.key_at("plan"),
            checks::PLAN_MISSING,
            "add `plan: jwt:CLAIM` to the limit, or `plan: header:NAME` if clients cannot set that header",
        );
    }
}

fn key(rule: &LimitRule, node: &Node, has_jwt: bool, findings: &mut Findings) {
    let (Some(parts), Some(place)) = (&rule.key, node.get("key")) else {
        if node.get("missing").is_some() && !node.lost("key") {
            report(checks::missing_without_key(), node.key_at("missing"), findings);
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

/// Checks exemptions and blocks.
fn lists(rule: &LimitRule, node: &Node, keys: &ListedKeys<'_>, findings: &mut Findings) {
    let mut exempt: HashMap<Cidr, Position> = HashMap::new();
    let mut exempt_keys: HashMap<Vec<Vec<u8>>, Position> = HashMap::new();
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
            let normal = keys.check(key, item, findings);
            if section == "exempt" {
                exempt_keys.insert(normal, item.at);
            } else if let Some(first) = exempt_keys.get(&normal) {
                contradicts(&key.join(", "), *first, item.at, findings);
            }
        }
        if section == "exempt" && is_everybody(list) {
            let at = place.items("ips").first().map_or(place.at, |item| item.at);
            report(checks::every_address_exempt(), at, findings);
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

/// Checks the keys in lists and overrides of a limit.
struct ListedKeys<'f> {
    /// The parts of the limit's key, or `None` if they were rejected.
    parts: Option<Vec<rules::KeyPart>>,
    missing: Missing,
    reading: PathReading,
    rule: &'f LimitRule,
}

impl<'f> ListedKeys<'f> {
    fn of(rule: &'f LimitRule, node: &Node, reading: PathReading) -> Self {
        let parts = || rule.key.iter().flatten().map(Into::into).collect();
        Self { parts: (!node.lost("key")).then(parts), missing: rule.missing, reading, rule }
    }

    /// Checks that requests can have a key, and returns its normal form.
    fn check(&self, named: &OneOrMany<String>, place: &Node, findings: &mut Findings) -> Vec<Vec<u8>> {
        let raw = || named.iter().map(|value| value.clone().into_bytes()).collect();
        let Some(parts) = &self.parts else { return raw() };
        if parts.is_empty() {
            findings.error(place.at, "the limit has no key, so this key never matches", "add a `key` to the limit");
            return raw();
        }
        if parts.len() != named.len() {
            let (given, wanted) = (counted(named.len()), counted(parts.len()));
            let message = format!("this key has {given}, but the limit's key has {wanted}");
            let fix = match parts.len() {
                1 => "write one string".to_owned(),
                many => format!("write a list of {many} strings"),
            };
            findings.error(place.at, message, fix);
            return raw();
        }
        let values = parts.iter().zip(named.iter()).enumerate();
        let normal = values.map(|(index, (part, value))| {
            let at = place.item(index).at;
            match part.named(value.as_bytes(), self.missing, self.reading) {
                Ok(readings) => {
                    let group = String::from_utf8_lossy(readings[0].as_bytes()).into_owned();
                    if part.is_wider_than(value) {
                        self.warn_of_group(value, &group, at, findings);
                    }
                    group.into_bytes()
                }
                Err(InvalidPart { problem, fix }) => {
                    findings.error(at, problem, fix);
                    value.clone().into_bytes()
                }
            }
        });
        normal.collect()
    }

    /// Warns of one address that stands for a whole group.
    fn warn_of_group(&self, address: &str, group: &str, at: Position, findings: &mut Findings) {
        let message =
            format!("this key means all of {group}, which `{}` counts as one client", shown(self.rule.name.as_str()));
        let fix = format!("write {group}, or `key: ip/128` to count {} by itself", shown(address));
        findings.warning(at, message, fix);
    }
}
