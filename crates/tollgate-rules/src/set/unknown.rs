//! Requests of the decision service that no rule applies to, and plans that no rule knows: nearly always a misspelled name.

use super::{Mode, RuleMatch, RuleSet};
use crate::Facts;
use crate::named_key::KeyReadings;

/// A plan of a request that a rule has no numbers for.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPlan {
    /// The name of the rule.
    pub rule: String,
    pub plan: String,
}

impl RuleSet {
    /// Returns whether the decision service denies requests that no rule applies to, and unknown plans.
    #[doc(hidden)]
    #[must_use]
    pub fn denies_unknown(&self) -> bool {
        self.0.deny_unknown
    }

    /// Returns whether a rule has numbers for plans.
    #[doc(hidden)]
    #[must_use]
    pub fn have_plans(&self) -> bool {
        self.0.last_plans.is_some()
    }

    /// Returns whether a rule applies to a request, even if it does not count it, as an exemption does not.
    #[doc(hidden)]
    #[must_use]
    pub fn apply_to(&self, facts: &Facts<'_>) -> bool {
        let request = self.request(facts);
        (0..self.len()).any(|number| {
            let result = self.check_rule(number, &request, &mut KeyReadings::default());
            !matches!(result, RuleMatch::NotMatched(_) | RuleMatch::Disabled | RuleMatch::KeyMissing(_))
        })
    }

    /// Returns the first plan of a request that a rule has no numbers for, so that the rule's own numbers apply. A rule
    /// without any plans has none.
    #[doc(hidden)]
    #[must_use]
    pub fn unknown_plan(&self, facts: &Facts<'_>) -> Option<UnknownPlan> {
        if !self.have_plans() {
            return None;
        }
        let request = self.request(facts);
        (0..self.len()).find_map(|number| {
            let compiled = &self.0.rules[number as usize];
            let source = compiled.rule.plan.as_ref().filter(|_| !compiled.by_plan.is_empty())?;
            if compiled.rule.mode == Mode::Disabled {
                return None;
            }
            let mut key = KeyReadings::default();
            let RuleMatch::Hit(_) = self.check_rule(number, &request, &mut key) else { return None };
            let plan = source.of(&request)?;
            let plan = String::from_utf8_lossy(plan.as_bytes());
            let has_own_numbers = compiled.by_key.get(key.counted()).is_some();
            let is_known = has_own_numbers || compiled.by_plan.contains_key(&*plan);
            (!is_known).then(|| UnknownPlan { rule: compiled.rule.name().to_owned(), plan: plan.into_owned() })
        })
    }
}
