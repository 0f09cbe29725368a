//! The fields that most rules need to count a request, in one cache line each.
//!
//! A rule is large, and of a thousand rules, those that match a request are rarely in a cache. So the fields that a
//! rule without exceptions needs are kept apart, and rules with the same key share its parts.

use std::sync::Arc;

use super::{Compiled, LimitId, RuleHit};
use crate::rules::rule::{Cost, Mode};
use crate::rules::{KeyPart, Request};

/// Number of distinct keys that are compared with that of a rule. Sets with more of them share less.
const MAX_COMPARED_KEYS: usize = 16;

/// How a rule counts a matching request that is no exception.
#[repr(align(64))]
pub(super) struct PlainRule {
    pub(super) key: Arc<[KeyPart]>,
    /// `None` if the cost is not constant.
    cost: Option<u64>,
    limit: LimitId,
    ban: Option<LimitId>,
    mode: Mode,
    is_in_flight: bool,
}

impl PlainRule {
    /// Returns the plain parts of all rules, in their order.
    pub(super) fn of_all(rules: &[Compiled]) -> Box<[Self]> {
        let mut keys: Vec<Arc<[KeyPart]>> = Vec::new();
        let mut shared = |key: &[KeyPart]| {
            let is_same = |other: &&Arc<[KeyPart]>| {
                other.len() == key.len() && other.iter().zip(key).all(|(one, other)| one.is_same(other))
            };
            if let Some(same) = keys.iter().find(is_same) {
                return Arc::clone(same);
            }
            let key: Arc<[KeyPart]> = key.into();
            if keys.len() < MAX_COMPARED_KEYS {
                keys.push(Arc::clone(&key));
            }
            key
        };
        let plain = rules.iter().map(|Compiled { rule, limit, ban, .. }| Self {
            key: shared(&rule.key),
            cost: rule.cost.as_constant(),
            limit: *limit,
            ban: *ban,
            mode: rule.mode,
            is_in_flight: rule.is_in_flight(),
        });
        plain.collect()
    }

    /// Returns how the rule counts a request, or `None` if that needs the whole rule.
    #[inline(always)]
    pub(super) fn rule_hit(&self, number: u32, request: &Request<'_>) -> Option<RuleHit> {
        let Self { cost, limit, ban, mode, is_in_flight, .. } = *self;
        let cost = Cost::of_constant(cost?, request);
        Some(RuleHit { rule: number, limit, ban, cost, mode, is_in_flight })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Rule, RuleSet};
    use crate::{FixedWindow, Limit, MINUTE};

    #[test]
    fn a_plain_rule_is_one_cache_line() {
        assert_eq!(size_of::<PlainRule>(), 64);
    }

    #[test]
    fn rules_with_the_same_key_share_its_parts() {
        let rule = |name: &str, key: [KeyPart; 2]| {
            let rule = Rule::new(Limit::new(name, FixedWindow::new(5, MINUTE)).unwrap());
            key.into_iter().fold(rule, Rule::key)
        };
        let user = || [KeyPart::header("x-user"), KeyPart::path()];
        let other = [KeyPart::header("x-other"), KeyPart::path()];
        let custom = || [KeyPart::custom(|_| None), KeyPart::path()];
        let rules = RuleSet::builder()
            .rule(rule("a", user()))
            .rule(rule("b", user()))
            .rule(rule("c", other))
            .rule(rule("d", custom()))
            .rule(rule("e", custom()));
        let rules = rules.build().unwrap();
        let plain = &rules.0.plain;
        assert!(Arc::ptr_eq(&plain[0].key, &plain[1].key));
        assert!(!Arc::ptr_eq(&plain[0].key, &plain[2].key));
        assert!(!Arc::ptr_eq(&plain[3].key, &plain[4].key), "closures are never known to be equal");
    }
}
