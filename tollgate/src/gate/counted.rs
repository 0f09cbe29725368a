//! The rules that counted a request and the keys they counted it by, for tools that report on traffic.
//!
//! Deliberately not here: counting. Tools keep their own tallies.

use super::Outcome;
use crate::decision::Decision;
use crate::rules::{Facts, FailedExpressions, Piece, Pieces, RuleMatch, RuleSet};

/// A rule that counted a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CountedHit {
    /// The number of the rule, in the order of [`RuleSet::names`].
    pub rule: u32,
    /// A hash of the key, equal for equal keys of a store in memory.
    pub fingerprint: u64,
    /// How the rule counted.
    pub counted_as: CountedAs,
}

/// How a rule counted a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedAs {
    /// The rule is enforced, and decided together with the others.
    Enforced,
    /// The rule is in shadow mode and would allow the request.
    ShadowAllowed,
    /// The rule is in shadow mode and would deny the request.
    ShadowDenied,
}

impl Outcome {
    /// Returns the rules that counted the request on a store in memory. Bans are not listed. If a rule refused the
    /// request regardless of the remaining quota, none is.
    #[doc(hidden)]
    pub fn counted(&self) -> impl Iterator<Item = CountedHit> {
        let rules = &self.state.rules;
        let is_ban = |limit| rules.have_bans() && rules.ban(rules.owner(limit)) == Some(limit);
        let enforced = self.hits.hashed().iter().filter(|_| self.decision.is_some());
        let enforced = enforced.filter(move |hit| !is_ban(hit.limit)).map(|hit| CountedHit {
            rule: rules.owner(hit.limit),
            fingerprint: hit.fingerprint,
            counted_as: CountedAs::Enforced,
        });
        let shadow = self.extras.iter().flat_map(|extras| extras.shadow_hits.iter().zip(&extras.shadow_decisions));
        let shadow = shadow.filter_map(|((rule, hits), (_, decision))| {
            let counted_as = if decision.is_allowed() { CountedAs::ShadowAllowed } else { CountedAs::ShadowDenied };
            Some(CountedHit { rule: *rule, fingerprint: hits.hashed().first()?.fingerprint, counted_as })
        });
        enforced.chain(shadow)
    }

    /// Returns the number of the rule that [`limit`](Self::limit) names.
    #[doc(hidden)]
    #[must_use]
    pub fn deciding_rule(&self) -> Option<u32> {
        let decided_by = self.decision.as_ref().and_then(Decision::limit).map(|limit| self.state.rules.owner(limit));
        decided_by.or_else(|| self.extras.as_ref()?.refused_by)
    }
}

impl RuleSet {
    /// Returns the parts of the key by which a rule counts a request, or `None` if it does not count it.
    #[doc(hidden)]
    #[must_use]
    pub fn key_of(&self, rule: u32, facts: &Facts<'_>) -> Option<Vec<String>> {
        // Expressions that fail were counted when the request was decided.
        let failed = FailedExpressions::default();
        let request = self.request(facts).recording(&failed);
        let mut pieces = Pieces::new();
        let text = |piece: &Piece<'_>| String::from_utf8_lossy(piece.as_bytes()).into_owned();
        match self.check_rule(rule, &request, &mut pieces) {
            RuleMatch::Hit(_) => Some(pieces.iter().map(text).collect()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{KeyPart, Mode, Rule};
    use crate::{FixedWindow, Gate, Limit, MINUTE};

    fn rule(name: &str, limit: u64) -> Rule {
        Rule::new(Limit::new(name, FixedWindow::new(limit, MINUTE)).unwrap()).key(KeyPart::ip())
    }

    #[test]
    fn every_rule_that_counts_is_listed_with_its_key() {
        let rules = RuleSet::builder().rule(rule("a", 1)).rule(rule("shadow", 1).mode(Mode::Shadow)).rule(rule("b", 5));
        let gate = Gate::in_memory(rules.build().unwrap()).unwrap();
        let facts = Facts::new("GET", "/").peer([192, 0, 2, 7].into());
        let check = || gate.decide_now(&facts).unwrap();
        let listed = |outcome: &Outcome| -> Vec<(u32, CountedAs)> {
            outcome.counted().map(|hit| (hit.rule, hit.counted_as)).collect()
        };
        let first = check();
        assert_eq!(listed(&first), [(0, CountedAs::Enforced), (2, CountedAs::Enforced), (1, CountedAs::ShadowAllowed)]);
        let fingerprints: Vec<u64> = first.counted().map(|hit| hit.fingerprint).collect();
        assert!(fingerprints.iter().all(|fingerprint| *fingerprint == fingerprints[0]));
        let second = check();
        assert_eq!((second.is_allowed(), second.deciding_rule()), (false, Some(0)));
        assert_eq!(listed(&second)[2], (1, CountedAs::ShadowDenied));
        assert_eq!(gate.rules().key_of(0, &facts), Some(vec!["192.0.2.7".to_owned()]));
    }
}
