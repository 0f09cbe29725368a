//! Bans of single keys that an operator sets, in any limit.
//!
//! They are part of the immutable state of a gate, so a request finds them without a lock, and needs one comparison while
//! there are none. A request of a banned key is refused before any store is used: it takes nothing from any limit, and
//! rules in shadow mode do not count it. Bans stay when rules are replaced. Those of a limit that no rule has any more
//! wait for its return until they end.
//!
//! Deliberately not here: bans that limits set themselves ([`Rule::ban`](crate::Rule::ban)), and how nodes share
//! the bans of operators.

use std::collections::HashMap;
use std::time::Duration;

use smallvec::SmallVec;
use tollgate::internal::{Admission, Verdict};
use tollgate::{Decision, Key, LimitId, Timestamp};
use tollgate_http::Refusal;

use super::in_flight::InFlight;
use super::outcome::Outcome;
use super::{Gate, State};
use crate::{KeyError, Mode, OtherKeys, RuleHit, RuleSet, with_key};

/// A ban of a key that an operator set.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyBan {
    /// The name of the limit.
    pub limit: String,
    /// The parts of the key.
    pub key: Vec<String>,
    /// The time at which it was set, by the wall clock of the store.
    pub since: Timestamp,
    /// The end, by the same clock.
    pub until: Timestamp,
    /// The operator, as in the log.
    pub by: String,
}

/// The bans of operators, ready for requests.
pub(super) struct KeyBans {
    all: Vec<KeyBan>,
    /// The ends, by the number of the rule and the fingerprint of the key.
    ends: HashMap<(u32, u64), Timestamp, ahash::RandomState>,
}

/// A request whose key is banned.
pub(super) struct BannedHit {
    limit: LimitId,
    cost: u64,
    is_in_flight: bool,
    left: Duration,
}

impl KeyBans {
    /// Prepares bans for these rules. Returns `None` if there are none.
    pub(super) fn new(all: Vec<KeyBan>, rules: &RuleSet, in_flight: &InFlight) -> Option<Box<Self>> {
        if all.is_empty() {
            return None;
        }
        let mut ends = HashMap::default();
        for ban in &all {
            let key: SmallVec<[&[u8]; 3]> = ban.key.iter().map(String::as_bytes).collect();
            // The limit may be gone, or count by something else now.
            let Ok(key) = rules.named_key((&ban.limit).into(), &key) else { continue };
            let fingerprint = with_key(key.readings().counted(), |key| in_flight.fingerprint(key));
            let end = ends.entry((key.rule(), fingerprint)).or_insert(ban.until);
            *end = ban.until.max(*end);
        }
        Some(Box::new(Self { all, ends }))
    }

    pub(super) fn all(&self) -> &[KeyBan] {
        &self.all
    }

    /// Returns the end of the ban of a key, which may have passed.
    fn end(&self, rule: u32, fingerprint: u64) -> Option<Timestamp> {
        self.ends.get(&(rule, fingerprint)).copied()
    }
}

impl State {
    /// Returns the time for which a key is still banned by an operator.
    pub(super) fn banned_for(&self, rule: u32, key: Key<'_>) -> Option<Duration> {
        let end = self.bans.as_ref()?.end(rule, self.in_flight.fingerprint(key))?;
        let left = end.as_micros().saturating_sub(self.store.now().as_micros());
        (left > 0).then(|| Duration::from_micros(left))
    }

    /// Returns the ban of a hit, if an operator has banned its key. Rules in shadow mode refuse nothing.
    #[cold]
    #[inline(never)]
    pub(super) fn find_ban(&self, rule_hit: &RuleHit, key: Key<'_>, others: OtherKeys<'_, '_>) -> Option<BannedHit> {
        let RuleHit { rule, limit, cost, mode, is_in_flight, .. } = *rule_hit;
        if mode != Mode::Enforced {
            return None;
        }
        let others = others.all().filter_map(|other| with_key(other, |key| self.banned_for(rule, key)));
        let left = self.banned_for(rule, key).into_iter().chain(others).max()?;
        Some(BannedHit { limit, cost, is_in_flight, left })
    }
}

impl BannedHit {
    /// Returns the ban that lasts longer.
    pub(super) fn longer(self, other: Option<Self>) -> Self {
        match other {
            Some(other) if other.left > self.left => other,
            _ => self,
        }
    }
}

impl Outcome {
    /// Refuses a request whose key is banned, as a ban of the limit itself does.
    #[cold]
    #[inline(never)]
    pub(super) fn refuse_banned(&mut self, banned: &BannedHit) {
        let BannedHit { limit, cost, is_in_flight, left } = *banned;
        let State { rules, store, .. } = &*self.state;
        let quota = if is_in_flight { rules.max_in_flight(limit) } else { rules.quota(limit) };
        let micros = tollgate::internal::whole_micros(left);
        let verdict =
            Verdict { admission: Admission::Denied { retry_after: micros }, remaining: 0, reset_after: micros };
        let decision = Decision { limit: Some(limit), quota, cost, verdict, ..Decision::without_limit(store.now()) };
        self.decision = Some(decision);
        self.refuse(Refusal::Banned { retry_after: left });
    }
}

impl Gate {
    /// Returns the bans that operators have set, also those that have ended or whose limit no rule has.
    #[doc(hidden)]
    #[must_use]
    pub fn key_bans(&self) -> Vec<KeyBan> {
        self.0.state.load().bans.as_ref().map_or_else(Vec::new, |bans| bans.all().to_vec())
    }

    /// Replaces the bans that operators have set. Each request is decided entirely by the old ones or by the new ones.
    /// The number and the lengths of keys are the caller's to bound.
    #[doc(hidden)]
    pub fn set_key_bans(&self, bans: Vec<KeyBan>) {
        self.change(|before| {
            let state = State::after(before, before.rules.clone(), before.store.clone());
            let bans = KeyBans::new(bans, &state.rules, &state.in_flight);
            State { bans, ..state }
        });
    }

    /// Returns the parts of a key in the form in which the rule named `rule` counts them.
    ///
    /// # Errors
    ///
    /// If there is no such rule, or no request can have the key.
    #[doc(hidden)]
    pub fn normal_key(&self, rule: &str, key: &[String]) -> Result<Vec<String>, KeyError> {
        let parts: SmallVec<[&[u8]; 3]> = key.iter().map(String::as_bytes).collect();
        let state = self.0.state.load();
        let key = state.rules.named_key(rule.into(), &parts)?;
        Ok(key.readings().texts())
    }

    /// Returns whether there is a rule named `rule` that refuses requests: neither disabled nor in shadow mode.
    #[doc(hidden)]
    #[must_use]
    pub fn is_enforced(&self, rule: &str) -> bool {
        let rules = &self.0.state.load().rules;
        rules.number(rule).is_some_and(|number| rules.rule(number).mode == Mode::Enforced)
    }

    /// Returns the wall-clock time of the store, which ends bans.
    #[doc(hidden)]
    #[must_use]
    pub fn wall_time(&self) -> Timestamp {
        self.0.state.load().store.now()
    }
}

#[cfg(test)]
mod tests {
    use tollgate::{FixedWindow, Limit, Limiter, MINUTE, ManualClock};

    use super::*;
    use crate::{Check, Facts, KeyPart, Rule};

    fn rule(name: &str, limit: u64) -> Rule {
        Rule::new(Limit::new(name, FixedWindow::new(limit, MINUTE)).unwrap()).key(KeyPart::ip())
    }

    fn rules(rules: impl IntoIterator<Item = Rule>) -> RuleSet {
        rules.into_iter().fold(RuleSet::builder(), |builder, rule| builder.rule(rule)).build().unwrap()
    }

    fn ban(gate: &Gate, limit: &str, key: &str, lasts: Duration) {
        let since = gate.wall_time();
        let (limit, key, by) = (limit.to_owned(), vec![key.to_owned()], "local".to_owned());
        gate.set_key_bans(vec![KeyBan { limit, key, since, until: since.saturating_add(lasts), by }]);
    }

    fn facts() -> Facts<'static> {
        Facts::new("GET", "/").peer([192, 0, 2, 7].into())
    }

    #[test]
    fn banned_key_is_refused_and_takes_nothing() {
        let clock = ManualClock::at(Timestamp::from_secs(1_000_000));
        let all = rules([rule("a", 5), rule("b", 5)]);
        let gate = Gate::with_limiter(all, Limiter::builder().clock(clock.clone())).unwrap();
        ban(&gate, "b", "192.0.2.7", MINUTE);
        let outcome = gate.decide_now(&facts()).unwrap();
        assert_eq!(outcome.refusal(), Some(&Refusal::Banned { retry_after: MINUTE }));
        assert_eq!(outcome.limit(), Some("b"));
        assert!(gate.decide_now(&Facts::new("GET", "/").peer([192, 0, 2, 8].into())).unwrap().is_allowed());
        let named = gate.check_by_name("b", &[b"192.0.2.7"], 1).unwrap();
        assert!(matches!(named, Check::Ready(outcome) if !outcome.is_allowed()));
        clock.advance(MINUTE);
        let outcome = gate.decide_now(&facts()).unwrap();
        assert_eq!(outcome.decision().map(|decision| decision.remaining()), Some(4), "the ban took nothing");
    }

    #[test]
    fn bans_stay_when_rules_are_replaced_and_wait_for_their_limit() {
        let gate = Gate::in_memory(rules([rule("a", 5)])).unwrap();
        ban(&gate, "b", "192.0.2.7", MINUTE);
        assert!(gate.decide_now(&facts()).unwrap().is_allowed());
        gate.replace(rules([rule("b", 5), rule("a", 5)])).unwrap();
        assert!(!gate.decide_now(&facts()).unwrap().is_allowed());
        gate.set_key_bans(Vec::new());
        assert!(gate.decide_now(&facts()).unwrap().is_allowed() && gate.key_bans().is_empty());
    }

    #[test]
    fn shadow_rule_bans_nobody_and_a_limit_on_requests_in_flight_can() {
        let shadow = rule("a", 5).mode(Mode::Shadow);
        let in_flight = Rule::in_flight("slots", 2).unwrap().key(KeyPart::ip());
        let gate = Gate::in_memory(rules([shadow, in_flight])).unwrap();
        ban(&gate, "a", "192.0.2.7", MINUTE);
        assert!(gate.decide_now(&facts()).unwrap().is_allowed());
        ban(&gate, "slots", "192.0.2.7", MINUTE);
        let outcome = gate.decide_now(&facts()).unwrap();
        assert_eq!((outcome.limit(), outcome.is_allowed()), (Some("slots"), false));
    }

    /// An operator knows one of the two fingerprints of a certificate, and cannot tell which one is counted.
    #[test]
    fn ban_of_either_fingerprint_refuses_both_encodings_of_a_certificate() {
        use crate::{Certificate, CertificateField, Listing};

        let [smaller, larger] = ["0a", "fb"].map(|byte| byte.repeat(32));
        let certificates = [(&smaller, &larger), (&larger, &smaller)].map(|(sent, other)| {
            let mut certificate = Certificate::new(sent.as_str());
            certificate.other_fingerprint = Some(other.clone());
            certificate
        });
        let part = || KeyPart::certificate(CertificateField::Fingerprint);
        let limit = || Rule::new(Limit::new("a", FixedWindow::new(9, MINUTE)).unwrap());
        let with_path = |rule: Rule| rule.key(KeyPart::path()).key(part());
        let listing = || limit().key(part()).exempt(Listing::none().key(&[&"c".repeat(64)]));
        let in_flight = Rule::in_flight("a", 2).unwrap().key(part());
        let banned = [&*smaller, &*larger, &["FB"; 32].join(":")];
        for (rule, path) in
            [(limit().key(part()), None), (listing(), None), (in_flight, None), (with_path(limit()), Some("/x"))]
        {
            let gate = Gate::in_memory(rules([rule])).unwrap();
            for banned in banned {
                let key = path.into_iter().chain([banned]).map(str::to_owned).collect();
                let (since, by) = (gate.wall_time(), "local".to_owned());
                let until = since.saturating_add(MINUTE);
                gate.set_key_bans(vec![KeyBan { limit: "a".to_owned(), key, since, until, by }]);
                for certificate in &certificates {
                    // Both readings of a path are banned if one is.
                    for target in ["/x", "/x;y"] {
                        let outcome = gate.decide_now(&Facts::new("GET", target).certificate(certificate)).unwrap();
                        let is_banned = matches!(outcome.refusal(), Some(Refusal::Banned { .. }));
                        assert!(is_banned, "{banned} {target} {}", certificate.fingerprint);
                    }
                }
                let mut other = Certificate::new("c".repeat(64));
                other.other_fingerprint = Some("d".repeat(64));
                assert!(gate.decide_now(&Facts::new("GET", "/x").certificate(&other)).unwrap().is_allowed());
            }
        }
    }
}
