//! Requests to Redis: consults the denial cache first, sends the script call, and caches denials from the reply.
//!
//! A request whose keys are on several stores, or in several slots of a cluster, needs several script calls. They are
//! made at the same time, and each decides its own hits, all or nothing. If one of them denies, the others give their
//! units back.
//!
//! A server that fails affects only its own limits, whose failure policies decide. The verdicts of the other calls
//! stand.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use super::cluster::{Delivery, Job, MAX_KEYS, MAX_ORPHANS, Orphan, Unclaimed};
use super::denials::{Denials, Known, Times};
use super::fallback::reported;
use super::leases::Outlook;
use super::script::{KeyState, ScriptHit, ScriptHits, ScriptReply, ScriptRequest};
use super::stores::Call;
use super::{Receipt, RedisHit, RedisHits, RedisLimiter, Shared, StoreError};
use crate::algorithm::portable::Before;
use crate::decision::{Admission, Decision, Denied, Source, Verdict};
use crate::key::Key;
use crate::limit::OnStoreFailure;
use crate::units::Timestamp;

/// The [generation](Denials::generation) of each key before its request was sent.
pub(super) type Generations = SmallVec<[u64; 2]>;

impl RedisLimiter {
    /// Takes from all limits or from none, and writes the receipt of each hit.
    pub(super) async fn take(&self, hits: &mut RedisHits, cost: u64, deadline: Instant) -> Decision {
        let inner = &*self.0;
        let _refresh = match self.check_denial_cache(hits, deadline).await {
            Ok(refresh) => refresh,
            Err(denied) => {
                inner.shared.counts.cached_denials.fetch_add(1, Ordering::Relaxed);
                return denied.0;
            }
        };
        let sent_at = inner.shared.clock.now_with_gaps();
        let generations: Generations = hits.iter().map(|hit| inner.denials.generation(&hit.script_hit.name)).collect();
        let script_hits: ScriptHits = hits.iter().map(|hit| hit.script_hit.clone()).collect();
        if !inner.shared.stores.is_one_call(&script_hits) {
            return Decision { cost, ..self.take_in_several_calls(hits, &generations, deadline).await };
        }
        // A policy that allows the request, or counts it in memory, admits it although the reply is late.
        let is_denied_if_late = hits.iter().any(|hit| self.policy(hit) == OnStoreFailure::Deny);
        let unclaimed = if is_denied_if_late { Unclaimed::GiveBack } else { Unclaimed::GiveBackIfGone };
        let reply = inner.shared.send_unless_late(deadline, ScriptRequest::Take(script_hits), unclaimed).await;
        let received_at = inner.shared.clock.now_with_gaps();
        match reply.and_then(|reply| self.decided(hits, &reply, &generations, (sent_at, received_at))) {
            Ok(decision) => Decision { cost, ..decision },
            Err(_) => {
                let mut failed: SmallVec<[&mut RedisHit; 2]> = hits.iter_mut().collect();
                Decision { cost, ..self.by_policy(&mut failed) }
            }
        }
    }

    fn decided(
        &self,
        hits: &mut RedisHits,
        reply: &ScriptReply,
        generations: &Generations,
        (sent_at, received_at): (Timestamp, Timestamp),
    ) -> Result<Decision, StoreError> {
        let mut most_restrictive: Option<Decision> = None;
        for ((hit, state), generation) in hits.iter_mut().zip(&reply.states).zip(generations) {
            let verdict = state.verdict(&hit.script_hit.terms, reply.at, hit.script_hit.cost);
            let times = Times { sent_at, received_at, generation: *generation };
            if reply.taken > 0 && hit.script_hit.cost > 0 {
                let times = self.0.denials.charged(&hit.script_hit.name, times);
                if verdict.remaining < hit.script_hit.cost {
                    self.remember_next(&hit.script_hit, state, reply.at, times);
                }
            } else {
                self.remember_denial(&hit.script_hit, state, reply.at, times);
            }
            let decision = self.decision(hit, verdict, reply.at, Source::Store);
            hit.decided = Some(decision);
            most_restrictive = Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
        }
        let decision = most_restrictive.unwrap_or_else(|| Decision::without_limit(reply.at));
        if decision.is_allowed() != (reply.taken > 0) {
            return Err(StoreError::unavailable("the script and this program disagree about a decision"));
        }
        if decision.is_allowed() {
            hits.iter_mut().for_each(|hit| hit.receipt = Receipt::Store { at: reply.at });
        }
        Ok(decision)
    }

    /// Returns the denial, if the cache has one. When a cached denial has just expired, the first request refreshes it,
    /// and the others wait for the result. So a flood costs one round trip per `retry_after`, not one per task.
    async fn check_denial_cache(&self, hits: &RedisHits, deadline: Instant) -> Result<DenialRefresh<'_>, Denied> {
        let inner = &*self.0;
        let mut refresh = DenialRefresh { denials: &inner.denials, keys: SmallVec::new() };
        let is_cached = |hit: &&RedisHit| inner.shared.stores.is_subscribed_for(&hit.script_hit);
        if !hits.iter().any(|hit| is_cached(&hit)) {
            return Ok(refresh);
        }
        loop {
            let now = inner.shared.clock.now_with_gaps();
            let (mut denied, mut wait, mut too_soon) = (None::<Decision>, None, 0);
            for hit in hits.iter().filter(is_cached) {
                match inner.denials.known(&hit.script_hit, now) {
                    Known::Nothing => {}
                    Known::Denied(verdict, at) => {
                        let denial = self.decision(hit, verdict, at, Source::DenialCache);
                        denied = Some(denied.map_or(denial, |other| other.most_restrictive(denial)));
                    }
                    Known::Refresh(semaphore, wait) => {
                        refresh.keys.push((hit.script_hit.name.clone(), semaphore));
                        too_soon = too_soon.max(wait);
                    }
                    Known::Wait(semaphore) => wait = Some(semaphore),
                }
            }
            if let Some(denied) = denied {
                return Err(Denied(denied));
            }
            if too_soon > 0 {
                let then = Instant::now() + Duration::from_micros(too_soon);
                tokio::time::sleep_until(then.min(deadline)).await;
            }
            // A request that refreshes a denial does not wait for another refresh: two could wait for each other.
            let Some(wait) = wait.filter(|_| refresh.keys.is_empty()) else { return Ok(refresh) };
            if timeout_at(deadline, wait.acquire()).await.is_err() {
                return Ok(refresh);
            }
        }
    }

    /// Returns the denial of these hits if this node is certain of it, without a call to Redis.
    #[doc(hidden)]
    pub fn certain_denial(&self, hits: &RedisHits) -> Option<Decision> {
        let inner = &*self.0;
        let is_cached = |hit: &&RedisHit| inner.shared.stores.is_subscribed_for(&hit.script_hit);
        if !hits.iter().any(|hit| is_cached(&hit)) || hits.iter().any(|hit| self.may_be_open(hit)) {
            return None;
        }
        let now = inner.shared.clock.now_with_gaps();
        let denials = hits.iter().filter(is_cached).filter_map(|hit| {
            let exhausted = match self.lease_outlook(hit, now) {
                // A slice may have units while the store has none.
                Outlook::Open => return None,
                Outlook::Exhausted { wait } => Some(wait),
                Outlook::Exact => None,
            };
            let certain = inner.denials.certain(&hit.script_hit, now);
            let certain = certain.map(|(verdict, at)| self.decision(hit, verdict, at, Source::DenialCache));
            certain.or_else(|| Some(self.exhausted_denial(hit, exhausted?)))
        });
        let denied = denials.reduce(Decision::most_restrictive)?;
        if denied.source == Source::DenialCache {
            inner.shared.counts.cached_denials.fetch_add(1, Ordering::Relaxed);
        }
        Some(denied)
    }

    /// Returns the denial of one hit, if this process knows it without a call: from the denial cache, or from the local
    /// limits while the server of the key fails.
    #[doc(hidden)]
    pub fn known_denial_of(&self, hit: &RedisHit) -> Option<Decision> {
        let Shared { stores, clock, .. } = &*self.0.shared;
        if stores.of(&hit.script_hit).topology.has_failed_for(&hit.script_hit.name) {
            return self.local_decision(hit).filter(|own| !own.is_allowed());
        }
        if !stores.is_subscribed_for(&hit.script_hit) || self.may_be_open(hit) {
            return None;
        }
        let certain = self.0.denials.certain(&hit.script_hit, clock.now_with_gaps());
        certain.map(|(verdict, at)| self.decision(hit, verdict, at, Source::DenialCache))
    }

    /// Returns the decision of each hit by itself, and takes nothing. `None` where the store does not reply.
    pub(super) async fn peek_each_on_store(&self, hits: &[RedisHit]) -> Vec<Option<Decision>> {
        let mut each = vec![None; hits.len()];
        for (call, reply) in self.send_in_calls(hits, ScriptRequest::Peek).await {
            let Ok(reply) = reply else { continue };
            for (position, state) in call.into_iter().zip(&reply.states) {
                let hit = &hits[position];
                let verdict = state.verdict(&hit.script_hit.terms, reply.at, hit.script_hit.cost);
                each[position] = Some(self.decision(hit, verdict, reply.at, Source::Store));
            }
        }
        each
    }

    /// Returns what [`check_n`](Self::check_n) would, and takes nothing.
    pub(crate) async fn peek_n(&self, key: Key<'_>, cost: u64) -> Result<Decision, StoreError> {
        let (mut hits, deadline) = (self.hits_for_key(key, cost), self.deadline());
        let decision = self.peek_at(&hits).await?;
        Ok(self.finish(&mut hits, decision, deadline).await)
    }

    pub(super) async fn peek_at(&self, hits: &RedisHits) -> Result<Decision, StoreError> {
        let replies = self.send_in_calls(hits, ScriptRequest::Peek).await;
        let mut most_restrictive: Option<Decision> = None;
        for (call, reply) in replies {
            // Each server has its own clock.
            let reply = reply?;
            for (position, state) in call.into_iter().zip(&reply.states) {
                let hit = &hits[position];
                let verdict = state.verdict(&hit.script_hit.terms, reply.at, hit.script_hit.cost);
                let decision = self.decision(hit, verdict, reply.at, Source::Store);
                most_restrictive = Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
            }
        }
        Ok(most_restrictive.unwrap_or_else(|| Decision::without_limit(self.0.shared.clock.wall())))
    }

    /// Sends a request in as many calls as the keys need, and drops cached denials of the keys. The calls succeed or
    /// fail independently.
    pub(super) async fn send_each(
        &self,
        hits: &RedisHits,
        request: impl Fn(ScriptHits) -> ScriptRequest,
    ) -> Result<(), StoreError> {
        let replies = self.send_in_calls(hits, request).await;
        let result = replies.into_iter().try_for_each(|(_, reply)| reply.map(drop));
        // A denial that was decided before may have been cached in the meantime.
        for hit in hits {
            self.0.shared.denials.forget(&hit.script_hit.name);
        }
        result
    }

    /// Sends a request in as many calls as the keys need, all at the same time.
    async fn send_in_calls(
        &self,
        hits: &[RedisHit],
        request: impl Fn(ScriptHits) -> ScriptRequest,
    ) -> Vec<(Call, Result<ScriptReply, StoreError>)> {
        let deadline = self.deadline();
        let calls = self.0.shared.stores.calls(hits.iter().map(|hit| &hit.script_hit));
        let each = calls.into_iter().map(|call| {
            let request = request(call.iter().map(|position| hits[*position].script_hit.clone()).collect());
            async move { (call, self.send_by(deadline, request).await) }
        });
        join_all(each).await
    }

    pub(super) fn deadline(&self) -> Instant {
        self.0.shared.deadline()
    }

    pub(super) async fn send(&self, request: ScriptRequest) -> Result<ScriptReply, StoreError> {
        self.0.shared.send(request).await
    }

    async fn send_by(&self, deadline: Instant, request: ScriptRequest) -> Result<ScriptReply, StoreError> {
        self.0.shared.send_by(deadline, request).await
    }

    /// Caches the denial of the next hit, after this one took the last units.
    fn remember_next(&self, script_hit: &ScriptHit, state: &KeyState, at: Timestamp, times: Times) {
        if let KeyState::Numbers(numbers) = state {
            let next = script_hit.terms.compiled.verdict_after(numbers, at.as_micros(), script_hit.cost);
            self.remember_denial(script_hit, &KeyState::Verdict(next), at, times);
        }
    }

    pub(super) fn remember_denial(&self, script_hit: &ScriptHit, state: &KeyState, at: Timestamp, times: Times) {
        if let Admission::Denied { retry_after } = state.verdict(&script_hit.terms, at, script_hit.cost).admission
            && self.0.shared.stores.is_subscribed_for(script_hit)
            && script_hit.terms.keeps_denials()
        {
            self.0.denials.remember(script_hit, state, at, retry_after, times);
        }
    }
}

impl Shared {
    /// Returns the name of the key that keeps the time of a reset of this key for reservations, which units and no strikes
    /// have.
    pub(super) fn reset_marker(&self, hit: &ScriptHit) -> Option<Arc<[u8]>> {
        let name = || super::names::reset(&self.stores.of(hit).topology.names().of("reset:"), &hit.name);
        (!hit.terms.counts_strikes()).then(name)
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.store_timeout
    }

    pub(super) async fn send(&self, request: ScriptRequest) -> Result<ScriptReply, StoreError> {
        self.send_by(self.deadline(), request).await
    }

    async fn send_by(&self, deadline: Instant, request: ScriptRequest) -> Result<ScriptReply, StoreError> {
        self.send_unless_late(deadline, request, Unclaimed::Keep).await
    }

    async fn send_unless_late(
        &self,
        deadline: Instant,
        request: ScriptRequest,
        unclaimed: Unclaimed,
    ) -> Result<ScriptReply, StoreError> {
        let reply = timeout_at(deadline, self.send_and_wait(deadline, request, unclaimed)).await;
        reply.unwrap_or_else(|_| Err(StoreError::timed_out())).inspect_err(|error| {
            if error.is_timed_out() {
                self.counts.timeouts.fetch_add(1, Ordering::Relaxed);
            }
        })
    }

    /// Gives back the units that were taken at that time, as if they had never been taken, and drops cached denials of
    /// the key.
    pub(super) async fn undo(&self, script_hit: ScriptHit, at: Timestamp, before: Before) -> Result<(), StoreError> {
        let name = script_hit.name.clone();
        let result = self.send(ScriptRequest::Undo(script_hit, at, before)).await;
        self.denials.forget(&name);
        result.map(drop)
    }

    /// Sends a request unless the deadline passes first. Waits for the reply even after the deadline.
    async fn send_and_wait(
        &self,
        deadline: Instant,
        request: ScriptRequest,
        unclaimed: Unclaimed,
    ) -> Result<ScriptReply, StoreError> {
        if request.hits().len() > MAX_KEYS {
            return Err(StoreError::too_many_keys(&format!("a request has more than {MAX_KEYS} limits and keys")));
        }
        let store = request.hits().first().map_or(self.stores.default_store(), |hit| self.stores.of(hit));
        let (reply_to, reply) = oneshot::channel();
        store.topology.submit(Job { request, deadline, reply_to, unclaimed })?;
        match reply.await {
            Ok(reply) => reply.map(Delivery::accept),
            // The deadline passed while the request was queued, or the limiter is being dropped.
            Err(_) => Err(StoreError::timed_out()),
        }
    }
}

/// Refreshes expired denials, for which other requests wait. Dropping it ends the refresh, whatever the result.
struct DenialRefresh<'a> {
    denials: &'a Denials,
    keys: SmallVec<[Refresh; 1]>,
}

/// The name of a key, and the semaphore that is closed when its refresh ends.
type Refresh = (Arc<[u8]>, Arc<Semaphore>);

impl Drop for DenialRefresh<'_> {
    fn drop(&mut self) {
        for (name, refresh) in &self.keys {
            self.denials.end_refresh(name, refresh);
        }
    }
}

/// The reply of a call to one of its hits.
#[derive(Clone, Copy)]
struct HitReply {
    /// The time by the clock of the server. The clocks of servers differ.
    at: Timestamp,
    verdict: Verdict,
    /// Whether the units were taken. A call that denies one of its hits takes nothing for the others.
    is_taken: bool,
    /// The debt of the key before the charge.
    before: Before,
}

/// The reply to each hit of a request; `None` where the call failed.
type HitReplies = SmallVec<[Option<HitReply>; 2]>;

impl HitReply {
    /// Splits the reply of a call into the replies to its hits. Returns none if the call failed, or if the script and
    /// this program disagree about it.
    fn read(script_hits: &[ScriptHit], reply: Result<ScriptReply, StoreError>) -> SmallVec<[Self; 2]> {
        let Ok(reply) = reply else { return SmallVec::new() };
        let is_taken = reply.taken > 0;
        let read = |(script_hit, state): (&ScriptHit, &KeyState)| Self {
            at: reply.at,
            verdict: state.verdict(&script_hit.terms, reply.at, script_hit.cost),
            is_taken,
            before: script_hit.terms.compiled.before(state.numbers(), reply.at.as_micros()),
        };
        let all: SmallVec<[Self; 2]> = script_hits.iter().zip(&reply.states).map(read).collect();
        let agrees = all.len() == script_hits.len() && all.iter().all(|reply| reply.verdict.is_allowed()) == is_taken;
        if agrees { all } else { SmallVec::new() }
    }

    /// Gives back the units that were taken, if any were.
    async fn undo(self, script_hit: ScriptHit, shared: &Shared) {
        if self.is_taken && script_hit.cost > 0 {
            // If the server cannot be reached, the units stay taken: too strict, never too lax.
            let _ = shared.undo(script_hit, self.at, self.before).await;
        }
    }
}

/// The result of all calls of a request.
struct Taken {
    /// The hits, with their receipts if the request is allowed.
    hits: RedisHits,
    replies: HitReplies,
    /// The decision of the limits whose calls failed.
    by_policy: Option<Decision>,
}

impl Taken {
    /// Decides by the replies of all calls.
    fn new(limiter: &RedisLimiter, mut hits: RedisHits, replies: HitReplies) -> Self {
        let denies = replies.iter().flatten().any(|reply| !reply.verdict.is_allowed());
        let by_hit = hits.iter_mut().zip(&replies);
        let mut failed: SmallVec<[&mut RedisHit; 2]> =
            by_hit.filter_map(|(hit, reply)| reply.is_none().then_some(hit)).collect();
        let by_policy = (!denies && !failed.is_empty()).then(|| limiter.by_policy(&mut failed));
        if denies {
            // The request is denied, and nothing must be taken from this process's memory. Limits that would deny it
            // too may have bans that count it.
            failed.iter_mut().for_each(|hit| hit.decided = limiter.local_decision(hit));
        }
        drop(failed);
        let taken = Self { hits, replies, by_policy };
        if taken.is_allowed() { taken.with_receipts() } else { taken }
    }

    fn is_allowed(&self) -> bool {
        let all_allow = self.replies.iter().flatten().all(|reply| reply.verdict.is_allowed());
        all_allow && self.by_policy.is_none_or(|decision| decision.is_allowed())
    }

    fn with_receipts(mut self) -> Self {
        for (hit, reply) in self.hits.iter_mut().zip(&self.replies) {
            if let Some(reply) = reply {
                hit.receipt = Receipt::Store { at: reply.at };
            }
        }
        self
    }

    /// Gives back everything that was taken.
    fn undo<'l>(&self, limiter: &'l RedisLimiter) -> impl Future<Output = Vec<()>> + use<'l> {
        for hit in &self.hits {
            if let Receipt::Local { at, wall_offset } = hit.receipt {
                limiter.give_back_locally(hit, at, wall_offset);
            }
        }
        let replies = self.hits.iter().zip(&self.replies);
        join_all(replies.filter_map(|(hit, reply)| Some((*reply)?.undo(hit.script_hit.clone(), &limiter.0.shared))))
    }
}

impl RedisLimiter {
    /// Takes from several servers or slots, and writes the receipt of each hit.
    async fn take_in_several_calls(
        &self,
        hits: &mut RedisHits,
        generations: &Generations,
        deadline: Instant,
    ) -> Decision {
        let inner = &*self.0;
        let sent_at = inner.shared.clock.now_with_gaps();
        // In its own task, so that the units of a denied request are given back even if the caller is cancelled.
        let (reply_to, taken) = oneshot::channel();
        tokio::spawn(take(self.clone(), hits.clone(), deadline, reply_to));
        // The task replies by the deadline, unless the runtime shuts down.
        let Ok(taken) = taken.await else {
            return self.by_policy(&mut hits.iter_mut().collect::<SmallVec<[&mut RedisHit; 2]>>());
        };
        let received_at = inner.shared.clock.now_with_gaps();
        *hits = taken.hits;
        let mut most_restrictive: Option<Decision> = None;
        for ((hit, reply), generation) in hits.iter_mut().zip(&taken.replies).zip(generations) {
            let Some(HitReply { at, verdict, is_taken, .. }) = reply else { continue };
            let times = Times { sent_at, received_at, generation: *generation };
            if *is_taken && hit.script_hit.cost > 0 {
                inner.denials.charged(&hit.script_hit.name, times);
            } else {
                self.remember_denial(&hit.script_hit, &KeyState::Verdict(*verdict), *at, times);
            }
            let decision = self.decision(hit, *verdict, *at, Source::Store);
            hit.decided = Some(decision);
            most_restrictive = Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
        }
        match (most_restrictive, taken.by_policy) {
            (Some(decided), Some(by_policy)) => reported(decided, by_policy),
            (Some(decision), None) | (None, Some(decision)) => decision,
            (None, None) => Decision::without_limit(inner.shared.clock.wall()),
        }
    }
}

/// Makes all calls, and replies by the deadline. If the request is denied, or its caller was cancelled, gives back the
/// units that were taken. Units that calls take after the deadline are given back too.
async fn take(limiter: RedisLimiter, hits: RedisHits, deadline: Instant, reply_to: oneshot::Sender<Taken>) {
    let shared = &*limiter.0.shared;
    let calls = shared.stores.calls(hits.iter().map(|hit| &hit.script_hit));
    let mut pending: FuturesUnordered<_> = calls
        .into_iter()
        .map(|call| {
            let script_hits: ScriptHits = call.iter().map(|position| hits[*position].script_hit.clone()).collect();
            async move {
                // This task waits for all replies, and undoes them itself.
                let request = ScriptRequest::Take(script_hits.clone());
                let reply = shared.send_and_wait(deadline, request, Unclaimed::Keep).await;
                (call, HitReply::read(&script_hits, reply), script_hits)
            }
        })
        .collect();
    let mut replies: HitReplies = hits.iter().map(|_| None).collect();
    while let Ok(Some((call, of_call, _))) = timeout_at(deadline, pending.next()).await {
        for (position, reply) in call.into_iter().zip(of_call) {
            replies[position] = Some(reply);
        }
    }
    shared.counts.timeouts.fetch_add(pending.len() as u64, Ordering::Relaxed);
    let taken = Taken::new(&limiter, hits, replies);
    if taken.is_allowed() {
        if let Err(taken) = reply_to.send(taken) {
            taken.undo(&limiter).await;
        }
    } else {
        let mut undoing = std::pin::pin!(taken.undo(&limiter));
        let is_undone = timeout_at(deadline, &mut undoing).await.is_ok();
        let _ = reply_to.send(taken);
        if !is_undone {
            undoing.await;
        }
    }
    while let Some((_, late, script_hits)) = pending.next().await {
        join_all(late.into_iter().zip(script_hits).map(|(reply, script_hit)| reply.undo(script_hit, shared))).await;
    }
}

/// Gives back the units of replies that no caller received, until the limiter is dropped.
pub(super) async fn give_back_orphans(mut orphans: mpsc::Receiver<Orphan>, limiter: Weak<Shared>) {
    let mut received = Vec::new();
    while orphans.recv_many(&mut received, MAX_ORPHANS).await > 0 {
        let Some(shared) = limiter.upgrade() else { return };
        let replies = received
            .drain(..)
            .flat_map(|Orphan { hits, reply }| HitReply::read(&hits, Ok(reply)).into_iter().zip(hits));
        join_all(replies.map(|(reply, script_hit)| reply.undo(script_hit, &shared))).await;
    }
}
