//! Reports decided requests: the keys that are denied or nearly denied, and the rules that counted a request.
//!
//! Counting limited keys runs after the decision, and most requests only pass one comparison. The text of a key is built
//! once, when the key is counted for the first time: from the request, or on Redis from the name of the key there.
//!
//! Deliberately not here: tallies of the rules that counted a request. Tools keep their own.

use std::sync::Arc;

use tollgate::{Decision, LimitId, Source, Timestamp};
use tollgate_http::Refusal;

use super::joint_check::JointCheck;
use super::outcome::Outcome;
use super::store::Hits;
use super::{Gate, State};
use crate::limited_keys::{KeyTexts, LimitedKey, LimitedKeys, LimitedKind, LimitedRequest};
use crate::{Facts, FailedExpressions, KeyReadings, NamedKey, RuleMatch, RuleSet};

/// An allowed request is near the limit if less than the quota divided by this is left.
const NEAR_LIMIT_DIVISOR: u64 = 10;

impl Gate {
    /// Counts limited keys from now on, or no longer. Replacing the rules does not change that.
    #[doc(hidden)]
    pub fn count_limited(&self, keys: Option<Arc<LimitedKeys>>) {
        let _alone = self.0.changing.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let before = self.0.state.load();
        let state = State::after(&before, before.rules.clone(), before.store.clone());
        self.0.state.store(Arc::new(State { limited: keys, ..state }));
    }
}

impl Outcome {
    /// Counts the keys that this decision limits. `source` returns where their texts are.
    #[inline(always)]
    pub(super) fn count_limited<'c, 'k: 'c>(&self, source: impl FnOnce() -> KeySource<'c, 'k>) {
        if let Some(keys) = &self.state.limited
            && self.limits_key()
        {
            count(self, keys, &source());
        }
    }

    /// Counts the keys that a decision of Redis limits.
    #[cfg(feature = "redis")]
    pub(super) fn count_limited_on_redis(&self) {
        if let Some(keys) = &self.state.limited
            && self.limits_key()
        {
            count(self, keys, &KeySource::Hits);
        }
    }

    /// Returns the key by which [`limit`](Self::limit) counted the request, or `None` if it did not. On Redis, `facts`
    /// need not be those of the request.
    #[doc(hidden)]
    #[must_use]
    pub fn limit_key(&self, facts: &crate::Facts<'_>, texts: KeyTexts) -> Option<LimitedKey> {
        let limit = self.decision.as_ref()?.limit()?;
        let rule = self.state.rules.owner(limit);
        #[cfg(feature = "redis")]
        let named =
            Counted::find(&self.hits, limit).and_then(|counted| counted.name).map(tollgate::internal::redis::key_parts);
        #[cfg(not(feature = "redis"))]
        let named = None;
        let parts = named.or_else(|| self.state.rules.key_of(rule, facts))?;
        Some(LimitedKey::new(self.state.rules.name(rule), &parts, texts))
    }

    /// Returns `false` if no limit denies the request and none is near.
    #[inline(always)]
    fn limits_key(&self) -> bool {
        !self.is_allowed() || self.extras.is_some() || self.decision.as_ref().is_some_and(is_near)
    }
}

fn is_near(decision: &Decision) -> bool {
    decision.remaining().saturating_mul(NEAR_LIMIT_DIVISOR) < decision.quota()
}

/// Returns whether a decision says something about its key. The failure policy does not, and neither does a denial for lack
/// of room, for which a flood of invented keys would hide the keys that matter.
fn is_about_key(decision: &Decision) -> bool {
    decision.source() != Source::Policy && !decision.lacks_room()
}

/// The source of a key's text.
pub(super) enum KeySource<'c, 'k> {
    Check(JointCheck<'c>),
    Named(&'c NamedKey<'k>),
    /// The hits, which contain the names of the keys on Redis.
    #[cfg(feature = "redis")]
    Hits,
}

#[inline(never)]
fn count(outcome: &Outcome, keys: &LimitedKeys, source: &KeySource<'_, '_>) {
    let rules = &outcome.state.rules;
    if let Some(decision) = &outcome.decision
        && let Some(limit) = decision.limit()
        && is_about_key(decision)
    {
        let kind = match outcome.refusal() {
            None if is_near(decision) => Some(LimitedKind::NearLimit),
            Some(Refusal::Limited | Refusal::Banned { .. }) => Some(LimitedKind::Denied),
            _ => None,
        };
        let counted = Counted::find(&outcome.hits, limit);
        let full_key = outcome.extras.as_ref().and_then(|extras| extras.full_key);
        let counted = full_key.map(|key| Counted { fingerprint: Some(key), name: None }).or(counted);
        if let (Some(kind), Some(counted)) = (kind, counted) {
            counted.count(outcome, keys, (kind, rules.owner(limit)), decision, source);
        }
    }
    let Some(extras) = &outcome.extras else { return };
    for (index, (rule, decision)) in extras.shadow_decisions.iter().enumerate() {
        if decision.is_allowed() || !is_about_key(decision) {
            continue;
        }
        let counted = match extras.shadow_hits.get(index) {
            Some((_, hits)) => decision.limit().and_then(|limit| Counted::find(hits, limit)),
            // A limit on requests in flight, which has no hit.
            None => Some(Counted::default()),
        };
        if let Some(counted) = counted {
            counted.count(outcome, keys, (LimitedKind::ShadowDenied, *rule), decision, source);
        }
    }
}

/// The hit that a limit counted.
#[derive(Default)]
struct Counted<'h> {
    /// The hash of the key, if it is known.
    fingerprint: Option<u64>,
    /// The name of the key on Redis.
    name: Option<&'h [u8]>,
}

impl<'h> Counted<'h> {
    /// Returns the hit of a limit, unless it costs nothing, like that of a peek.
    fn find(hits: &'h Hits, limit: LimitId) -> Option<Self> {
        if let Some(hit) = hits.hashed().iter().find(|hit| hit.limit == limit) {
            return (hit.cost > 0).then_some(Self { fingerprint: Some(hit.fingerprint), name: None });
        }
        #[cfg(feature = "redis")]
        if let Some(hit) = hits.on_redis().iter().find(|hit| tollgate::internal::redis::cost(hit).0 == limit) {
            let name = Some(tollgate::internal::redis::key_name(hit));
            return (tollgate::internal::redis::cost(hit).1 > 0).then_some(Self { fingerprint: None, name });
        }
        None
    }

    fn count(
        &self,
        outcome: &Outcome,
        keys: &LimitedKeys,
        (kind, rule): (LimitedKind, u32),
        decision: &Decision,
        source: &KeySource<'_, '_>,
    ) {
        let parts = || match self.name {
            #[cfg(feature = "redis")]
            Some(name) => tollgate::internal::redis::key_parts(name),
            _ => key_parts(outcome, rule, source),
        };
        let fingerprint = match (self.fingerprint, self.name) {
            (Some(fingerprint), _) => fingerprint,
            (None, Some(name)) => keys.fingerprint(name),
            (None, None) => keys.fingerprint(parts().join("\0").as_bytes()),
        };
        let limit = outcome.state.rules.name(rule);
        let limit_hash = outcome.state.rules.name_hash(rule);
        let request = LimitedRequest { kind, limit, limit_hash, fingerprint, at: decision.at() };
        keys.add(&request, || LimitedKey::new(limit, &parts(), keys.texts()));
    }
}

/// Returns the parts of the key by which a rule counted the request.
fn key_parts(outcome: &Outcome, rule: u32, source: &KeySource<'_, '_>) -> Vec<String> {
    let rules = &outcome.state.rules;
    match source {
        KeySource::Check(JointCheck::Request(facts)) => rules.key_of(rule, facts).unwrap_or_default(),
        KeySource::Check(JointCheck::Named { rule, key, .. }) => {
            rules.named_key((*rule).into(), key).map_or_else(|_| Vec::new(), |key| key.readings().texts())
        }
        KeySource::Named(key) => key.readings().texts(),
        #[cfg(feature = "redis")]
        KeySource::Hits => Vec::new(),
    }
}

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
        let mut key = KeyReadings::default();
        match self.check_rule(rule, &request, &mut key) {
            RuleMatch::Hit(_) => Some(key.texts()),
            _ => None,
        }
    }
}

impl Gate {
    /// Returns the time that decisions are made at, which observers see.
    #[doc(hidden)]
    #[must_use]
    pub fn time(&self) -> Timestamp {
        let state = self.0.state.load();
        match state.store.in_memory() {
            Some(limiter) => limiter.now(),
            None => state.store.now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate::{FixedWindow, Limit, MINUTE};

    use super::*;
    use crate::limited_keys::TakenKeys;
    use crate::{Facts, Gate, KeyPart, Mode, Rule, RuleSet};

    fn rule(name: &str, limit: u64) -> Rule {
        Rule::new(Limit::new(name, FixedWindow::new(limit, MINUTE)).unwrap()).key(KeyPart::header("x-user-id"))
    }

    fn gate(rules: impl IntoIterator<Item = Rule>) -> (Gate, Arc<LimitedKeys>) {
        let rules = rules.into_iter().fold(RuleSet::builder(), |rules, rule| rules.rule(rule));
        let gate = Gate::in_memory(rules.build().unwrap()).unwrap();
        let keys = Arc::new(LimitedKeys::new(KeyTexts::Kept));
        gate.count_limited(Some(Arc::clone(&keys)));
        (gate, keys)
    }

    fn listed(taken: &TakenKeys) -> Vec<(String, LimitedKind, String, u64)> {
        let keys = taken.limits.iter().flat_map(|limit| {
            limit.keys.iter().map(|key| {
                let parts = key.key.parts.as_ref().unwrap();
                (limit.name.to_string(), key.kind, parts.join(","), key.count)
            })
        });
        let mut keys: Vec<_> = keys.collect();
        keys.sort();
        keys
    }

    #[test]
    fn denied_and_nearly_denied_keys_are_counted() {
        let (gate, keys) = gate([rule("per-user", 20), rule("shadow", 2).mode(Mode::Shadow)]);
        let headers =
            http::HeaderMap::from_iter([(http::HeaderName::from_static("x-user-id"), "ann".parse().unwrap())]);
        let facts = Facts::new("GET", "/").headers(&headers);
        for _ in 0..25 {
            drop(gate.decide_now(&facts));
        }
        assert_eq!(
            listed(&keys.take()),
            [
                ("per-user".into(), LimitedKind::Denied, "ann".into(), 5),
                ("per-user".into(), LimitedKind::NearLimit, "ann".into(), 2),
                ("shadow".into(), LimitedKind::ShadowDenied, "ann".into(), 23),
            ]
        );
    }

    #[tokio::test]
    async fn checks_by_name_count_and_peeks_do_not() {
        let (gate, keys) = gate([rule("one", 1), rule("two", 1)]);
        let check = |rule, cost| JointCheck::Named { rule, key: &[b"ann"], cost };
        for _ in 0..3 {
            drop(gate.check_by_name("one", &[b"ann"], 1));
            drop(gate.check_by_name("one", &[b"ann"], 0));
            drop(gate.check_together(&[check("one", 1), check("two", 2)]));
            drop(gate.reserve_by_name("two", &[b"ann"], 2, MINUTE).unwrap().await.unwrap());
        }
        assert_eq!(
            listed(&keys.take()),
            [
                ("one".into(), LimitedKind::Denied, "ann".into(), 5),
                ("one".into(), LimitedKind::NearLimit, "ann".into(), 1),
                ("two".into(), LimitedKind::Denied, "ann".into(), 6),
            ]
        );
    }

    #[test]
    fn counting_survives_new_rules_and_can_end() {
        let (gate, keys) = gate([rule("per-user", 1)]);
        gate.replace(RuleSet::builder().rule(rule("per-user", 1)).build().unwrap()).unwrap();
        for _ in 0..2 {
            drop(gate.check_by_name("per-user", &[b"ann"], 1));
        }
        assert_eq!(listed(&keys.take()).len(), 2);
        gate.count_limited(None);
        drop(gate.check_by_name("per-user", &[b"ann"], 1));
        assert!(keys.take().limits.is_empty());
    }

    fn per_ip(name: &str, limit: u64) -> Rule {
        Rule::new(Limit::new(name, FixedWindow::new(limit, MINUTE)).unwrap()).key(KeyPart::ip())
    }

    #[test]
    fn every_rule_that_counts_is_listed_with_its_key() {
        let rules =
            RuleSet::builder().rule(per_ip("a", 1)).rule(per_ip("shadow", 1).mode(Mode::Shadow)).rule(per_ip("b", 5));
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
