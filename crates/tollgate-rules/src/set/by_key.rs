//! What the lists and overrides of a rule say about a key.
//!
//! A path may have several readings, and nobody but the service knows which one applies. So the strictest decides: a
//! request is blocked if one reading is, exempt if all are, and limited by the strictest numbers of all of them.
//!
//! A client with two fingerprints has two names, and a list or an override means it by either.

use tollgate::LimitId;

use super::{Compiled, RuleMatch, RuleSet};
use crate::Request;
use crate::named_key::{KeyError, KeyReadings, NamedKey};
use crate::rule::Mode;
use crate::set::{Refused, RuleHit};

/// What a rule says about a key.
pub(super) enum Treatment {
    Exempt,
    Blocked,
    /// The limit counts it.
    Counted(LimitId),
}

impl Compiled {
    /// Returns the limit for the plan of a request in the current reading of its path.
    fn plan_limit(&self, request: &Request<'_>) -> LimitId {
        let plan = self.rule.plan.as_ref().and_then(|plan| plan.of(request));
        let by_plan = plan.and_then(|plan| self.by_plan.get(std::str::from_utf8(plan.as_bytes()).ok()?).copied());
        by_plan.unwrap_or(self.limit)
    }
}

impl RuleSet {
    /// Returns what a rule says about the key of a request, and notes the limit of the request's plan.
    pub(super) fn treat(&self, compiled: &Compiled, key: &mut KeyReadings<'_>, request: &Request<'_>) -> Treatment {
        let mut plan = None;
        let treatment = self.treat_with(compiled, key, || {
            let first = compiled.plan_limit(request);
            plan = Some(first);
            match &compiled.rule.plan {
                Some(plan) if plan.may_read_path() => request
                    .for_other_readings(|| compiled.plan_limit(request))
                    .fold(first, |one, other| self.stricter(compiled, one, other)),
                _ => first,
            }
        });
        key.plan = plan;
        treatment
    }

    fn treat_with(&self, compiled: &Compiled, key: &KeyReadings<'_>, unlisted: impl FnOnce() -> LimitId) -> Treatment {
        if key.by_reading().all(|mut names| names.any(|key| compiled.exempt.get(key).is_some())) {
            return Treatment::Exempt;
        }
        if compiled.rule.mode == Mode::Enforced
            && key.by_reading().flatten().any(|key| compiled.blocked.get(key).is_some())
        {
            return Treatment::Blocked;
        }
        Treatment::Counted(self.limit_of(compiled, key, unlisted))
    }

    /// Returns the strictest limit of all readings of a key. Readings without an override have the limit `unlisted`.
    fn limit_of(&self, compiled: &Compiled, key: &KeyReadings<'_>, unlisted: impl FnOnce() -> LimitId) -> LimitId {
        let stricter = |one, other| self.stricter(compiled, one, other);
        let listed = || {
            let of_names = |key| compiled.by_key.get(key).copied();
            key.by_reading().map(move |names| names.filter_map(of_names).reduce(stricter))
        };
        let unlisted = listed().any(|limit| limit.is_none()).then(unlisted);
        unlisted.into_iter().chain(listed().flatten()).reduce(stricter).unwrap_or(compiled.limit)
    }

    /// Returns the limit with the lower numbers. If neither has, the one with the strictest numbers of the rule.
    fn stricter(&self, compiled: &Compiled, one: LimitId, other: LimitId) -> LimitId {
        if one == other {
            return one;
        }
        let limits = [one, other].map(|limit| self.0.limits.get(limit.index()));
        let [Some(numbers), Some(others)] = limits.map(|limit| limit.map(|limit| *limit.algorithm())) else {
            return if self.max_in_flight(one) <= self.max_in_flight(other) { one } else { other };
        };
        match numbers.strictest(others) {
            strictest if strictest == numbers => one,
            strictest if strictest == others => other,
            _ => compiled.strictest,
        }
    }

    /// Returns the limit of a plan that a caller names.
    pub(crate) fn named_plan(&self, number: u32, plan: &str) -> Result<LimitId, KeyError> {
        let Compiled { rule, by_plan, .. } = &self.0.rules[number as usize];
        by_plan.get(plan).copied().ok_or_else(|| {
            let mut plans: Vec<String> = by_plan.keys().map(|plan| plan.to_string()).collect();
            plans.sort_unstable();
            KeyError::UnknownPlan { rule: rule.name().to_owned(), plan: plan.to_owned(), plans }
        })
    }

    /// Checks a key of a rule.
    pub(crate) fn check_named(&self, key: &NamedKey<'_>, cost: u64) -> RuleMatch<'_> {
        let number = key.rule();
        let compiled = &self.0.rules[number as usize];
        let rule = &compiled.rule;
        if rule.mode == Mode::Disabled {
            return RuleMatch::Disabled;
        }
        let limit = match self.treat_with(compiled, key.readings(), || key.plan.unwrap_or(compiled.limit)) {
            Treatment::Exempt => return RuleMatch::Exempt,
            Treatment::Blocked => return RuleMatch::Refused(number, Refused::Blocked),
            Treatment::Counted(_) if rule.mode == Mode::Enforced && rule.blocked.is_everything() => {
                return RuleMatch::Refused(number, Refused::Blocked);
            }
            // The end of the request is unknown.
            Treatment::Counted(_) if rule.is_in_flight() => return RuleMatch::Exempt,
            Treatment::Counted(limit) => limit,
        };
        RuleMatch::Hit(RuleHit { rule: number, limit, ban: compiled.ban, cost, mode: rule.mode, is_in_flight: false })
    }

    /// Returns the limit that counts a key, and its ban. A disabled rule and a limit on requests in flight count nothing
    /// in a store.
    pub(crate) fn limits_of_key(&self, key: &NamedKey<'_>) -> (Option<LimitId>, Option<LimitId>) {
        let compiled = &self.0.rules[key.rule() as usize];
        if compiled.rule.mode == Mode::Disabled || compiled.rule.is_in_flight() {
            return (None, None);
        }
        (Some(self.limit_of(compiled, key.readings(), || key.plan.unwrap_or(compiled.limit))), compiled.ban)
    }

    /// Returns the limit on the requests in flight of a key.
    pub(crate) fn in_flight_limit_of_key(&self, key: &NamedKey<'_>) -> LimitId {
        let compiled = &self.0.rules[key.rule() as usize];
        self.limit_of(compiled, key.readings(), || key.plan.unwrap_or(compiled.limit))
    }
}
