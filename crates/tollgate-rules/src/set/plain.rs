//! The fields that most rules need to count a request, in one cache line each.
//!
//! A rule is large, and of a thousand rules, those that match a request are rarely in a cache. So the fields that a
//! rule without exceptions needs are kept apart, and rules with the same key share its parts.
//!
//! [`PerAddress`] is the most common rule set: one limit per client address, and nothing else.

use std::sync::Arc;

use super::{Compiled, Exceptions, Index, Known, LimitId, RuleHit, RuleSet, Shortcut};
use crate::client::TrustedProxies;
use crate::key_part::Source;
use crate::normal::address::IpGroup;
use crate::rule::{Cost, CostSource, Mode};
use crate::{KeyPart, Request};

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
    /// Whether a request may have several keys: readings of its path, or names of its client.
    pub(super) may_have_several_keys: bool,
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
            may_have_several_keys: rule.key.iter().any(|part| part.may_read_path() || part.may_have_two_names()),
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

/// The only rule of a set, if it counts every request by the peer address, at a constant cost, and is not settled by
/// responses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerAddress {
    pub(crate) limit: LimitId,
    pub(crate) group: IpGroup,
    pub(crate) cost: u64,
}

impl PerAddress {
    pub(super) fn of(
        rules: &[Compiled],
        index: &Index,
        shortcuts: &[Shortcut],
        proxies: &TrustedProxies,
    ) -> Option<Self> {
        // A shortcut holds for the requests that the index finds, which must be all requests.
        let ([compiled], [shortcut], Some(_)) = (rules, shortcuts, index.all_always()) else { return None };
        let rule = &compiled.rule;
        let is_for_all = shortcut.known == Known::Everything && shortcut.exceptions == Exceptions::None;
        let is_plain = rule.mode == Mode::Enforced && !rule.is_in_flight() && compiled.ban.is_none();
        // The fast path counts and does nothing else.
        #[cfg(feature = "file")]
        if rule.observer.is_some() {
            return None;
        }
        if !is_for_all || !is_plain || rule.response_settlement.is_needed() || !proxies.is_empty() {
            return None;
        }
        match (&*rule.key, &rule.cost.0) {
            ([part], CostSource::Constant(cost)) => match part.0 {
                Source::Ip(group) => Some(Self { limit: compiled.limit, group, cost: *cost }),
                _ => None,
            },
            _ => None,
        }
    }
}

impl RuleSet {
    /// Returns the rule, if the address of a request is all that the rules need.
    #[inline]
    pub(crate) fn per_address(&self) -> Option<PerAddress> {
        self.0.per_address
    }
}

#[cfg(test)]
mod tests {
    use tollgate::{FixedWindow, Limit, MINUTE};

    use super::*;
    use crate::{Rule, RuleSet};

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
