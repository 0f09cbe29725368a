//! Corrections after the decision: a request settled by its response or its actual cost, and keys refunded and reset by
//! name.
//!
//! The cost is taken when the request arrives, so that concurrent requests cannot exceed a limit together. The response
//! may then correct it.
//!
//! A change by name has no receipt of an earlier charge, so a refund gives back the newest charges of the key first.
//! [`Outcome::refund`] and reservations know their charge.

use std::task::{Context, Waker};

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use smallvec::SmallVec;
use tollgate::{Decision, Hit, Settlement};

use super::deferred::Charging;
use super::outcome::{Outcome, SelectedBy};
use super::store::{Hits, StoreUnavailable};
use super::{Gate, State};
use crate::{KeyError, NamedKey, NamedRule, with_key};

/// The actual cost of a request, as reported by its handler through the tower layer.
pub struct ReportedCost<'t> {
    /// The units that the request has cost.
    pub units: u64,
    /// Applies to this limit alone, or otherwise to all whose cost was an estimate.
    pub limit: Option<&'t str>,
}

/// Why a reported cost belongs to no limit. Later variants say more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CostMistake {
    /// No rule has an estimate that the cost could replace.
    NoEstimate,
    /// No rule has the name.
    UnknownLimit,
    /// The rule of this name did not match the request.
    NotMatched,
}

/// A hit to settle: its index, its actual cost, whether this is its first settlement, and its charge if it counts after the
/// response.
type Settling = (usize, u64, bool, Option<Charging>);

impl Outcome {
    /// Returns why a reported cost settles nothing, if that is a mistake of the handler. A client that is exempt, and a rule
    /// that is disabled, are no mistakes.
    #[doc(hidden)]
    pub fn mistake_in(&self, reported: &ReportedCost<'_>) -> Option<CostMistake> {
        let rules = &self.state.rules;
        let Some(name) = reported.limit else {
            return (!rules.have_estimates()).then_some(CostMistake::NoEstimate);
        };
        let Some(rule) = rules.rate_limit_named(name) else { return Some(CostMistake::UnknownLimit) };
        let enforced = self.hits.costs().map(|(limit, _)| rules.owner(limit));
        let shadow = self.all_shadow_decisions().iter().map(|(rule, _)| *rule);
        let is_matched = enforced.chain(shadow).any(|matched| matched == rule);
        (!is_matched && !rules.may_leave_out(rule)).then_some(CostMistake::NotMatched)
    }

    /// Settles the request at its actual cost. It applies to every rule whose cost is not the constant 1: surplus
    /// units are refunded, as far as they still count against the key, and missing units are counted in full: what is not
    /// left is owed.
    ///
    /// Each limit is settled once, by this method, [`settle_limit`](Self::settle_limit), [`refund`](Self::refund) or
    /// [`settle_response`](Self::settle_response). Later calls change nothing and return
    /// [`Settlement::AlreadySettled`].
    pub async fn settle(&self, actual: u64) -> Settlement {
        self.settle_each(|selected_by, rule| self.is_estimate(selected_by, rule).then_some(actual)).await
    }

    /// Settles the rule named `name` alone, whatever its cost was.
    pub async fn settle_limit(&self, name: &str, actual: u64) -> Settlement {
        self.settle_each(|_, rule| (self.state.rules.name(rule) == name).then_some(actual)).await
    }

    /// Refunds everything that the request took, as far as it still counts against its keys.
    pub async fn refund(&self) -> Settlement {
        let settled = self.settle_each(|_, _| Some(0)).await;
        self.cancel_deferred();
        settled
    }

    /// Returns `true` if a rule that counted the request depends on its response: see
    /// [`settle_response`](Self::settle_response).
    #[must_use]
    pub fn awaits_response(&self) -> bool {
        let rules = &self.state.rules;
        if !rules.await_responses() || !self.is_allowed() {
            return false;
        }
        let enforced = self.hits.costs().map(|(limit, _)| rules.owner(limit));
        let shadow = self.all_shadow_decisions().iter().map(|(rule, _)| *rule);
        enforced.chain(shadow).any(|rule| rules.awaits_response(rule))
    }

    /// Records the units that the response may give back as *pending* for at most `within`, until they are settled or the
    /// outcome is dropped. A denial that only pending units cause says so, and its `retry_after` is at most that long: see
    /// [`Decision::is_pending`]. Call it before the service is called, with the time after which the service is given up.
    pub fn hold_open(&mut self, within: Duration) {
        let rules = &self.state.rules;
        if !rules.have_changing_costs() {
            return;
        }
        let Some(decision) = self.decision.filter(Decision::is_allowed) else { return };
        let may_change = |limit| rules.may_change(rules.owner(limit)) && rules.ban(rules.owner(limit)) != Some(limit);
        if self.hits.costs().any(|(limit, cost)| cost > 0 && may_change(limit)) {
            let open = self.state.store.open(&self.hits, &decision, within, may_change);
            self.extras.get_or_insert_default().open = open;
        }
    }

    /// Ends a pending charge. Returns `false` if a reset of its key has ended it.
    fn close(&self, hit: usize) -> bool {
        let open = self.extras.as_ref().and_then(|extras| extras.open.as_ref());
        open.is_none_or(|open| open.close(hit))
    }

    /// Settles the request by its response. Rules that do not count this status
    /// ([`Rule::count`](crate::Rule::count)) refund what they took. Rules that read the cost from the response
    /// ([`Rule::settle_by`](crate::Rule::settle_by)) refund the difference, or count the missing units in full.
    ///
    /// Pass only the response of the service itself. Once it may have begun its work, an error that a proxy or a server
    /// sends in its place must not settle the request: a client can cause one, for example by breaking off its body, and
    /// would get its units back.
    ///
    /// Each limit is settled once, by the first call of this method, [`settle`](Self::settle) or
    /// [`refund`](Self::refund). If none is called, the estimated cost stays. In memory, this never waits.
    pub async fn settle_response(&self, status: StatusCode, headers: &HeaderMap) -> Settlement {
        self.settle_response_with(status, headers, None).await
    }

    /// Charges limits that count after the response, for a request whose service was called and has not responded.
    #[doc(hidden)]
    pub async fn settle_unanswered(&self) -> Settlement {
        self.settle_each(|_, rule| self.deferred_cost(rule)).await
    }

    /// Settles the request by its response and the cost that its handler reports. A status that does not count takes
    /// precedence, and so does the cost in a header.
    #[doc(hidden)]
    pub async fn settle_response_with(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        reported: Option<ReportedCost<'_>>,
    ) -> Settlement {
        if !self.is_allowed() {
            return Settlement::Settled;
        }
        let rules = &self.state.rules;
        let by_response = |rule| rules.response_settlement(rule).actual(status, headers);
        let reported = |selected_by, rule| {
            let reported = reported.as_ref()?;
            let concerned = match reported.limit {
                Some(name) => rules.name(rule) == name,
                None => self.is_estimate(selected_by, rule),
            };
            concerned.then_some(reported.units)
        };
        let deferred = |rule| self.deferred_cost(rule);
        let actual =
            |selected_by, rule| by_response(rule).or_else(|| reported(selected_by, rule)).or_else(|| deferred(rule));
        let mut worst = self.settle_each(actual).await;
        for (number, (rule, decision, hits)) in self.shadow_hits() {
            if let Some(actual) = actual(self.selected_by, rule) {
                let settled = self.settle_limits((hits, number), decision, |_| Some(actual)).await;
                worst = worst.worse(settled.unwrap_or(Settlement::Settled));
            }
        }
        worst
    }

    /// Refunds a request that never reached its service. In memory, the refund is done when this returns. On Redis, a
    /// task does it, because the caller is being dropped and cannot wait.
    #[doc(hidden)]
    pub fn refund_detached(self) {
        let mut refund = Box::pin(async move { self.refund().await });
        let is_pending = refund.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
        #[cfg(feature = "redis")]
        if is_pending && let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(refund);
        }
        #[cfg(not(feature = "redis"))]
        debug_assert!(!is_pending, "a store in memory never waits");
    }

    /// Returns the shadow rules that may be settled by the response, with their hits and the numbers of these.
    fn shadow_hits(&self) -> impl Iterator<Item = (usize, (u32, &Decision, &Hits))> {
        // Decisions are in the order of the hits; those on requests in flight follow.
        let all = self.extras.iter().flat_map(|extras| extras.shadow_hits.iter().zip(&extras.shadow_decisions));
        let all = all.map(|((rule, hits), (_, decision))| (*rule, decision, hits));
        (self.hits.len()..).zip(all).filter(|(_, (_, decision, _))| decision.is_allowed())
    }

    /// Settles each limit of `hits` at its actual cost, once. A limit whose cost is `None` is left unchanged. Returns
    /// `None` if all are. `first` is the number of the first of these limits among all of the request.
    async fn settle_limits(
        &self,
        (hits, first): (&Hits, usize),
        decision: &Decision,
        actual: impl Fn(u32) -> Option<u64>,
    ) -> Option<Settlement> {
        let rules = &self.state.rules;
        // Claim all before settling any, so that of two concurrent calls, one finds nothing to do.
        let to_settle: SmallVec<[Settling; 2]> = (0..)
            .zip(hits.costs())
            .filter_map(|(index, (limit, _))| {
                let rule = rules.owner(limit);
                // Bans take nothing, so there is nothing to refund.
                let actual = if rules.ban(rule) == Some(limit) { None } else { actual(rule) };
                let (actual, is_ours) = (actual?, self.claim_settlement(first + index));
                let charging = if is_ours { self.charge_deferred(first + index, actual) } else { None };
                Some((index, actual, is_ours, charging))
            })
            .collect();
        let mut worst: Option<Settlement> = None;
        let mut is_changed = false;
        for (index, actual, is_ours, charging) in to_settle {
            let settled = match (is_ours, charging) {
                (true, Some(charging)) => charging.await,
                (true, None) => {
                    let still_counts = !std::ptr::eq(hits, &self.hits) || self.close(index);
                    self.state.store.settle(hits, index, decision, actual, still_counts).await
                }
                (false, _) => Settlement::AlreadySettled,
            };
            is_changed |= is_ours && hits.costs().nth(index).is_some_and(|(_, cost)| cost != actual);
            worst = Some(worst.map_or(settled, |worst| worst.worse(settled)));
        }
        // Headers show the enforced limits.
        if is_changed && std::ptr::eq(hits, &self.hits) {
            self.look_again(hits, decision).await;
        }
        worst
    }

    /// Reads what is left after a settlement, for the headers.
    async fn look_again(&self, hits: &Hits, decision: &Decision) {
        let rules = &self.state.rules;
        let looks = hits.looks(|limit| rules.have_bans() && rules.ban(rules.owner(limit)) == Some(limit));
        if let Some(left) = self.state.store.peek(&looks).await.filter(|left| left.limit().is_some()) {
            // The request itself was allowed, and its delay is over.
            let left = Decision { source: decision.source, ..left };
            _ = self.settled_at.set(Box::new(left));
        }
    }

    /// Makes room for the settlement bits of more than 32 limits.
    #[cold]
    #[inline(never)]
    pub(super) fn track_settlements_of(&mut self, limits: usize) {
        let words = limits.div_ceil(u32::BITS as usize) - 1;
        self.extras.get_or_insert_default().settled = (0..words).map(|_| AtomicU32::new(0)).collect();
    }

    /// Returns `true` to the first caller only, which then settles this limit.
    fn claim_settlement(&self, number: usize) -> bool {
        let bits = u32::BITS as usize;
        let word = match (number / bits).checked_sub(1) {
            None => Some(&self.settled),
            Some(further) => self.extras.as_ref().and_then(|extras| extras.settled.get(further)),
        };
        let bit = 1 << (number % bits);
        word.is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0)
    }

    /// Returns `true` if the cost of a rule was an estimate.
    fn is_estimate(&self, selected_by: SelectedBy, rule: u32) -> bool {
        selected_by == SelectedBy::Name || self.state.rules.estimates(rule)
    }

    /// Settles each rule at its actual cost. `None` leaves a rule unchanged.
    async fn settle_each(&self, actual: impl Fn(SelectedBy, u32) -> Option<u64>) -> Settlement {
        let Some(decision) = self.decision.as_ref().filter(|decision| decision.is_allowed()) else {
            return Settlement::Settled;
        };
        let actual = |rule| actual(self.selected_by, rule);
        self.settle_limits((&self.hits, 0), decision, actual).await.unwrap_or(Settlement::Settled)
    }
}

/// A change of a key's state.
#[derive(Clone, Copy)]
enum Change {
    Refund { units: u64 },
    Reset,
    LiftBan,
}

/// A change that is not made until it is awaited: see [`Gate::refund_by_name`].
type Changing = Pin<Box<dyn Future<Output = Result<Outcome, StoreUnavailable>> + Send>>;

impl Gate {
    /// Gives `units` back to a key of the rule named `rule`, and returns the outcome of a check that costs nothing
    /// afterwards.
    ///
    /// No receipt says when the units were taken, so the newest charges are given back first:
    ///
    /// - A bucket gets the units back as tokens.
    /// - A fixed window gets them back in the current window.
    /// - A log loses its newest entries, a counter the counts of its newest segments. Units in the oldest segment of a
    ///   counter, which counts in part, are given back in part.
    /// - A queue gives back nothing, because later requests already have their delays.
    ///
    /// A key never has more than its whole quota. Refund only units that were taken: more would give back the units of
    /// other requests, and on Redis those that nodes hold in [leases](tollgate::Consistency::Leased). Bans stay.
    ///
    /// In memory, the future is ready at once.
    ///
    /// ```
    /// use tollgate_rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{FixedWindow, Limit, HOUR};
    /// use tollgate_rules::Gate;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let per_user = Rule::new(Limit::new("per-user", FixedWindow::new(10, HOUR))?).key(KeyPart::header("x-user-id"));
    /// let gate = Gate::in_memory(RuleSet::builder().rule(per_user).build()?)?;
    /// let taken = gate.check_by_name("per-user", &[b"ann"], 5).expect("the rule exists").outcome().await;
    /// assert!(taken.is_allowed());
    /// let refunded = gate.refund_by_name("per-user", &[b"ann"], 3).expect("the rule exists").await?;
    /// assert_eq!(refunded.decision().map(|decision| decision.remaining()), Some(8));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such rule or plan, or no request can have the key.
    pub fn refund_by_name<'a>(
        &self,
        rule: impl Into<NamedRule<'a>>,
        key: &[&[u8]],
        units: u64,
    ) -> Result<Changing, KeyError> {
        self.change_by_name(rule.into(), key, Change::Refund { units })
    }

    /// Gives a key of the rule named `rule` its whole quota back and lifts its ban, and returns the outcome of a check
    /// that costs nothing afterwards.
    ///
    /// A reset in memory has no effect on a key that was evicted for lack of memory if no slot is available; see
    /// [`Limiter::reset`](tollgate::Limiter::reset). In memory, the future is ready at once.
    ///
    /// # Errors
    ///
    /// If there is no such rule or plan, or no request can have the key.
    pub fn reset_by_name<'a>(&self, rule: impl Into<NamedRule<'a>>, key: &[&[u8]]) -> Result<Changing, KeyError> {
        self.change_by_name(rule.into(), key, Change::Reset)
    }

    /// Lifts the ban that a rule itself has set on a key, and does not change its quota. Otherwise as
    /// [`reset_by_name`](Self::reset_by_name).
    ///
    /// # Errors
    ///
    /// If there is no such rule, or no request can have the key.
    #[doc(hidden)]
    pub fn lift_ban_by_name(&self, rule: &str, key: &[&[u8]]) -> Result<Changing, KeyError> {
        self.change_by_name(rule.into(), key, Change::LiftBan)
    }

    fn change_by_name(&self, rule: NamedRule<'_>, key: &[&[u8]], change: Change) -> Result<Changing, KeyError> {
        let state = self.0.state.load_full();
        let key = state.rules.named_key(rule, key)?.into_owned();
        let hits = hits_on_key(&state, &key, change);
        Ok(Box::pin(async move {
            match change {
                Change::Refund { .. } => state.store.credit(&hits).await?,
                Change::Reset | Change::LiftBan => state.store.reset(&hits).await?,
            }
            let mut outcome = Outcome::unlimited(state);
            Ok(match outcome.check_named(&key, 0) {
                None => outcome,
                Some(remote) => outcome.complete(remote).await,
            })
        }))
    }
}

/// Returns the hits on a key of a rule, also if the key is exempt or blocked.
fn hits_on_key(state: &State, key: &NamedKey<'_>, change: Change) -> Hits {
    let State { rules, store, .. } = state;
    let (limit, ban) = rules.limits_of_key(key);
    let mut hits = store.no_hits();
    with_key(key.readings().counted(), |key| {
        if let Some(limit) = limit.filter(|_| !matches!(change, Change::LiftBan)) {
            let units = if let Change::Refund { units } = change { units } else { 0 };
            store.add_hit(&mut hits, Hit::new(limit, key).cost(units));
        }
        if let (Some(ban), Change::Reset | Change::LiftBan) = (ban, change) {
            store.add_hit(&mut hits, Hit::new(ban, key).cost(0));
        }
    });
    hits
}
