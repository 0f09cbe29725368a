//! The most common rule set: one limit per client address, and nothing else.

use super::{Compiled, Exceptions, Index, Known, RuleSet, Shortcut};
use crate::limit::LimitId;
use crate::rules::client::TrustedProxies;
use crate::rules::ip_group::IpGroup;
use crate::rules::key_part::Source;
use crate::rules::rule::{CostSource, Mode};

/// The only rule of a set, if it counts every request by the peer address, at a constant cost, and is not settled by
/// responses.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "tower"), expect(dead_code, reason = "only layers use it"))]
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
    #[cfg_attr(not(feature = "tower"), expect(dead_code, reason = "only layers use it"))]
    #[inline]
    pub(crate) fn per_address(&self) -> Option<PerAddress> {
        self.0.per_address
    }
}
