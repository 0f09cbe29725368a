//! Several checks that are decided all or nothing.
//!
//! The hits of all checks are combined into one request to the store. If it is denied, nothing is taken, and the outcome
//! of each check shows its own part: a denial, or the quota that is left.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

#[cfg(feature = "redis")]
use futures_util::future::{join, join_all};

use super::check::{CheckCollector, check_after_decision, check_store};
#[cfg(feature = "redis")]
use super::check::{Open, RemoteCheck, check_redis};
use super::outcome::{Outcome, PendingChecks};
#[cfg(feature = "file")]
use super::report::KeySource;
use tollgate::internal::{CombinedDecision, CombinedHits, HashedHits};
use tollgate::{Decision, Limiter};

#[cfg(feature = "redis")]
use super::store::Hits;
use super::store::{Store, StoreUnavailable};
use super::{Gate, State};
use tollgate::Timestamp;
#[cfg(feature = "redis")]
use tollgate::redis::RedisLimiter;

use crate::{Facts, KeyError, Phase};

/// One of several checks that are decided together: see [`Gate::check_together`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum JointCheck<'a> {
    /// Checks the rules that match a request.
    Request(&'a Facts<'a>),
    /// Checks a key of one rule, without matching a request.
    Named {
        /// The name of the rule.
        rule: &'a str,
        /// The parts of the key.
        key: &'a [&'a [u8]],
        /// The units to take.
        cost: u64,
    },
}

/// The result of [`Gate::check_together`]: outcomes, or a future of them.
#[must_use = "the requests are limited only if their outcomes are used"]
pub enum Checks {
    /// The outcomes. The store is in this process's memory, or no store was needed.
    Ready(Vec<Outcome>),
    /// A future of the outcomes. The store is on Redis.
    Pending(Pin<Box<dyn Future<Output = Vec<Outcome>> + Send>>),
}

impl Checks {
    /// Waits for the outcomes.
    pub async fn outcomes(self) -> Vec<Outcome> {
        match self {
            Self::Ready(outcomes) => outcomes,
            Self::Pending(outcomes) => outcomes.await,
        }
    }
}

/// A check whose hits are collected and not decided yet.
struct Collected {
    outcome: Outcome,
    pending: Option<Box<PendingChecks>>,
    /// Whether the check is denied while its key owes units. Such a check costs nothing.
    denied_if_owing: bool,
}

/// The position of the hit whose key owes units for longest, and that time.
type Owing = Option<(usize, Duration)>;

impl Gate {
    /// Checks several requests, or keys of rules, and takes the units of all of them or of none. Returns their outcomes
    /// in the same order.
    ///
    /// If one check is refused, nothing is taken by any, and the outcomes of the others show what they have left. Checks
    /// on the same limit and key are added up: if their sum is too large, each of them is denied. Limits on requests in
    /// flight do not apply, because the end of the requests is unknown.
    ///
    /// ```
    /// use tollgate_rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    /// use tollgate_rules::{Gate, JointCheck};
    ///
    /// let per_user = Rule::new(Limit::new("per-user", FixedWindow::new(5, MINUTE))?).key(KeyPart::header("x-user"));
    /// let per_team = Rule::new(Limit::new("per-team", FixedWindow::new(2, MINUTE))?).key(KeyPart::header("x-team"));
    /// let gate = Gate::in_memory(RuleSet::builder().rule(per_user).rule(per_team).build()?)?;
    /// let check = |rule, key, cost| JointCheck::Named { rule, key, cost };
    /// # let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    /// # runtime.block_on(async {
    /// let checks = [check("per-user", &[b"ann"], 1), check("per-team", &[b"blue"], 3)];
    /// let outcomes = gate.check_together(&checks).expect("both rules have such a key").outcomes().await;
    /// assert!(!outcomes[1].is_allowed());
    /// // Nothing was taken from ann.
    /// assert_eq!(outcomes[0].decision().map(|decision| decision.remaining()), Some(5));
    /// # });
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a rule that is named does not exist, or no request can have the key. Nothing is taken then.
    pub fn check_together(&self, checks: &[JointCheck<'_>]) -> Result<Checks, KeyError> {
        self.check_together_unless_owing(checks, |_| false)
    }

    /// Checks as [`check_together`](Self::check_together) does, but denies the checks at positions for which
    /// `denied_if_owing` is `true` while their key owes units. These checks cost nothing, and would pass otherwise.
    ///
    /// # Errors
    ///
    /// As for `check_together`.
    #[doc(hidden)]
    pub fn check_together_unless_owing(
        &self,
        checks: &[JointCheck<'_>],
        denied_if_owing: impl Fn(usize) -> bool,
    ) -> Result<Checks, KeyError> {
        let state = self.0.state.load_full();
        let mut collected = Vec::with_capacity(checks.len());
        for (position, check) in checks.iter().enumerate() {
            collected.push(Collected { denied_if_owing: denied_if_owing(position), ..Collected::of(&state, check)? });
        }
        if collected.len() > 1 || collected.iter().any(|one| one.denied_if_owing) {
            let decided = check_collected(&state.store, collected);
            #[cfg(feature = "file")]
            if let Checks::Ready(outcomes) = &decided {
                outcomes
                    .iter()
                    .zip(checks)
                    .for_each(|(outcome, check)| outcome.count_limited(|| KeySource::Check(*check)));
            }
            return Ok(decided);
        }
        let Some(Collected { mut outcome, pending, .. }) = collected.pop() else {
            return Ok(Checks::Ready(Vec::new()));
        };
        if !outcome.is_allowed() {
            return Ok(Checks::Ready(vec![outcome]));
        }
        Ok(match check_store(&mut outcome, pending) {
            None => {
                #[cfg(feature = "file")]
                checks.iter().for_each(|check| outcome.count_limited(|| KeySource::Check(*check)));
                Checks::Ready(vec![outcome])
            }
            Some(remote) => {
                let outcome = outcome.complete(remote);
                Checks::Pending(Box::pin(async move { vec![outcome.await] }))
            }
        })
    }
}

impl Gate {
    /// Charges the cost of a check in full, whatever is left, for work that was done: to every limit if
    /// `is_spent`, or otherwise to limits that count after the response. The check was denied and has taken nothing.
    ///
    /// Limits with other algorithms than fixed windows are charged only while the key owes nothing, unless they count after
    /// the response. Otherwise, denied requests would postpone the end of the denial without bound.
    ///
    /// # Errors
    ///
    /// If the rule that is named does not exist, or no request can have the key.
    #[doc(hidden)]
    pub fn charge_check(
        &self,
        check: &JointCheck<'_>,
        is_spent: bool,
    ) -> Result<impl Future<Output = ()> + Send + use<>, KeyError> {
        let state = self.0.state.load_full();
        let Collected { outcome, .. } = Collected::of(&state, check)?;
        Ok(async move {
            let rules = &state.rules;
            for (position, (limit, cost)) in outcome.hits.costs().enumerate().collect::<Vec<_>>() {
                let is_deferred = rules.is_deferred(rules.owner(limit));
                if cost == 0 || !(is_spent || is_deferred) {
                    continue;
                }
                let hit = outcome.hits.single(position);
                if !is_deferred && !rules.is_fixed_window(limit) {
                    let mut look = hit.clone();
                    look.set_cost(0, 0);
                    if state.store.owes(&look, |_| false).await.is_some() {
                        continue;
                    }
                }
                state.store.charge(&hit).await;
            }
        })
    }

    /// Gives the cost of a check back to its limits, as far as it still counts against their keys. The check need not
    /// have been made.
    ///
    /// In memory, the future is ready at once.
    ///
    /// # Errors
    ///
    /// If the rule that is named does not exist, or no request can have the key.
    pub fn refund_check(
        &self,
        check: &JointCheck<'_>,
    ) -> Result<impl Future<Output = Result<(), StoreUnavailable>> + Send + use<>, KeyError> {
        let state = self.0.state.load_full();
        let Collected { outcome, .. } = Collected::of(&state, check)?;
        Ok(async move { state.store.credit(&outcome.hits).await })
    }
}

impl Collected {
    /// Collects the hits of one check.
    fn of(state: &Arc<State>, check: &JointCheck<'_>) -> Result<Self, KeyError> {
        let mut outcome = Outcome::unlimited(state.clone());
        let pending = match check {
            JointCheck::Request(facts) => outcome.collect(facts),
            JointCheck::Named { rule, key, cost } => {
                outcome.collect_named(&state.rules.named_key((*rule).into(), key)?, *cost)
            }
        };
        // A request of a banned key takes nothing.
        if !outcome.is_allowed() {
            outcome.hits = state.store.no_hits();
        }
        Ok(Self { outcome, pending, denied_if_owing: false })
    }

    /// Does the same as [`owes`](Self::owes) in memory, where the future is ready at once.
    fn owes_now(&self) -> Owing {
        match pin!(self.owes()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(owing) => owing,
            Poll::Pending => None,
        }
    }

    /// Returns the hit whose key owes units for longest, and that time, if the check is denied because of it.
    async fn owes(&self) -> Owing {
        if !self.denied_if_owing || !self.outcome.is_allowed() {
            return None;
        }
        let State { rules, store, .. } = &*self.outcome.state;
        store.owes(&self.outcome.hits, |limit| rules.ban(rules.owner(limit)) == Some(limit)).await
    }
}

/// Returns the decision of a check with hits at these positions.
fn own_decision(combined: &CombinedDecision, own: &[usize], owing: Owing, now: Timestamp) -> Decision {
    let decision = combined.own_decision(own, now);
    match owing {
        Some((hit, wait)) => {
            let of_hit = own.get(hit).and_then(|position| *combined.each.get(*position)?);
            of_hit.unwrap_or(decision).denied_for(wait)
        }
        None => decision,
    }
}

impl Outcome {
    /// Collects the hits of a request, without permits for requests in flight.
    fn collect(&mut self, facts: &Facts<'_>) -> Option<Box<PendingChecks>> {
        let state = &*self.state.clone();
        let rules = &state.rules;
        let request = rules.request(facts);
        let mut collector = CheckCollector::new(state, &mut self.hits);
        let found = if rules.read_tokens() {
            let early = match rules.refuse_early() {
                true => rules
                    .find_in(Phase::WithoutToken, &request, &mut |hit, key, others| collector.add(hit, key, others)),
                false => Ok(()),
            };
            early.and_then(|()| {
                rules.find_in(Phase::WithToken, &request, &mut |hit, key, others| collector.add(hit, key, others))
            })
        } else {
            rules.find(&request, |rule_hit, key, others| collector.add(rule_hit, key, others))
        };
        let (mut pending, banned) = collector.finish();
        if let Some(pending) = &mut pending {
            pending.permits.clear();
            pending.in_flight.clear();
        }
        match found {
            Ok(()) => {
                if let Some(banned) = &banned {
                    self.refuse_banned(banned);
                }
                pending
            }
            Err((rule, refused)) => {
                self.hits = state.store.no_hits();
                self.refused_by(rule, refused);
                None
            }
        }
    }

    /// Marks every limit as settled if nothing was taken, so that nothing can be refunded.
    fn after_joint_decision(mut self, is_taken: bool) -> Self {
        if !is_taken {
            *self.settled.get_mut() = u32::MAX;
            for word in self.extras.iter_mut().flat_map(|extras| &mut extras.settled) {
                *word.get_mut() = u32::MAX;
            }
        }
        self
    }
}

/// Decides checks whose store is in memory.
fn check_in_memory(limiter: &Limiter, collected: Vec<Collected>) -> Vec<Outcome> {
    let (mut places, mut hits) = (Vec::new(), HashedHits::new());
    let of_all = collected.iter().flat_map(|one| one.outcome.hits.hashed().iter().copied());
    let variants = limiter.combine_hashed(of_all, &mut hits, |place| places.push(place));
    let positions: Vec<usize> = places.into_iter().map(|place| place.decision(hits.len())).collect();
    let hits = CombinedHits { hits, variants };
    let owing: Vec<Owing> = collected.iter().map(Collected::owes_now).collect();
    let is_allowed = owing.iter().all(Option::is_none) && collected.iter().all(|one| one.outcome.is_allowed());
    let combined = match is_allowed {
        true => limiter.decide_each(&hits),
        false => limiter.peek_each(&hits),
    };
    let mut next = 0;
    let complete = |(Collected { mut outcome, pending, .. }, owing): (Collected, Owing)| {
        let own = next..next + outcome.hits.len();
        next = own.end;
        if outcome.is_allowed() {
            let own = &positions[own];
            let decision = own_decision(&combined, own, owing, limiter.wall_now());
            // A store in memory leaves nothing to check.
            _ = check_after_decision(&mut outcome, pending, decision, &combined.each_of(own));
        }
        outcome.after_joint_decision(combined.is_taken)
    };
    collected.into_iter().zip(owing).map(complete).collect()
}

/// Decides several checks, all or nothing.
fn check_collected(store: &Store, collected: Vec<Collected>) -> Checks {
    match store {
        Store::Memory(limiter) => Checks::Ready(check_in_memory(limiter, collected)),
        #[cfg(feature = "redis")]
        Store::Redis(limiter) => Checks::Pending(Box::pin(check_redis_together(limiter.clone(), collected))),
    }
}

#[cfg(feature = "redis")]
async fn check_redis_together(limiter: RedisLimiter, collected: Vec<Collected>) -> Vec<Outcome> {
    let mut places = Vec::new();
    let prepared = collected.iter().flat_map(|one| one.outcome.hits.on_redis());
    let mut hits = RedisLimiter::combine_hits(prepared, |place| places.push(place));
    if let Some(one) = collected.first() {
        let rules = one.outcome.state.rules.clone();
        tollgate::internal::redis::take_from_store(&mut hits.hits, |limit| rules.may_change(rules.owner(limit)));
    }
    let positions: Vec<usize> = places.iter().map(|place| place.decision(hits.hits.len())).collect();
    let is_allowed = collected.iter().all(|one| one.outcome.is_allowed());
    let owes = join_all(collected.iter().map(Collected::owes));
    let costs_nothing = hits.hits.iter().all(|hit| tollgate::internal::redis::cost(hit).1 == 0);
    // A check that costs nothing can be made at the same time, in the same call.
    let (owing, decided) = match is_allowed && costs_nothing {
        true => {
            let (owing, decided) = join(owes, limiter.clone().decide_each(hits.clone())).await;
            (owing, Some(decided))
        }
        false => (owes.await, None),
    };
    let (combined, charged) = match (decided, is_allowed && owing.iter().all(Option::is_none)) {
        (Some(decided), _) => decided,
        (None, true) => limiter.clone().decide_each(hits).await,
        (None, false) if is_allowed => (limiter.peek_each(&hits).await, hits.hits),
        (None, false) => {
            // Nothing is taken. Known denials are reported, and count towards bans.
            let mut each: Vec<_> =
                hits.hits.iter().chain(&hits.variants).map(|hit| limiter.known_denial_of(hit)).collect();
            limiter.read_unknown(&hits.hits, &mut each).await;
            (CombinedDecision { is_taken: false, delay: Duration::ZERO, each }, hits.hits)
        }
    };
    let mut next = 0;
    let complete = collected.into_iter().zip(owing).map(|(Collected { mut outcome, pending, .. }, owing)| {
        let own = next..next + outcome.hits.len();
        next = own.end;
        let (places, own) = (&places[own.clone()], &positions[own]);
        if let Hits::Redis(hits) = &mut outcome.hits {
            tollgate::internal::redis::set_receipts(hits, &charged, places);
            tollgate::internal::redis::set_decided(hits, &combined.each_of(own));
        }
        let decided = outcome.is_allowed().then(|| own_decision(&combined, own, owing, limiter.now()));
        let limiter = limiter.clone();
        async move {
            let Some(decided) = decided else { return outcome };
            let remote = RemoteCheck { pending, ..RemoteCheck::new(&limiter, Open::Denied(decided)) };
            check_redis(outcome, remote).await
        }
    });
    let outcomes = join_all(complete).await;
    outcomes.into_iter().map(|outcome| outcome.after_joint_decision(combined.is_taken)).collect()
}
