//! Requests to Redis: consults the denial cache first, sends the script call, and caches denials from the reply.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use super::denials::{Denials, Known, Times};
use super::leases::Outlook;
use super::script::{KeyState, ScriptHit, ScriptHits, ScriptReply, ScriptRequest};
use super::stores::Call;
use super::worker::{Job, MAX_KEYS};
use super::{Receipt, RedisHit, RedisHits, RedisLimiter, Shared, StoreError};
use crate::algorithm::portable::Before;
use crate::decision::{Admission, Decision, Denied, Source};
use crate::key::Key;
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
        let reply = self.send_by(deadline, ScriptRequest::Take(script_hits)).await;
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
            self.remember_denial(&hit.script_hit, state, reply.at, times);
            if reply.taken > 0 && verdict.remaining < hit.script_hit.cost {
                self.remember_next(&hit.script_hit, state, reply.at, times);
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
    pub(crate) fn certain_denial(&self, hits: &RedisHits) -> Option<Decision> {
        let inner = &*self.0;
        let is_cached = |hit: &&RedisHit| inner.shared.stores.is_subscribed_for(&hit.script_hit);
        if !hits.iter().any(|hit| is_cached(&hit)) {
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

    /// Returns what [`check_n`](Self::check_n) would, and takes nothing.
    pub(crate) async fn peek_n(&self, key: Key<'_>, cost: u64) -> Result<Decision, StoreError> {
        self.peek_at(&self.hits_for_key(key, cost)).await
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
        hits: &RedisHits,
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
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.store_timeout
    }

    pub(super) async fn send(&self, request: ScriptRequest) -> Result<ScriptReply, StoreError> {
        self.send_by(self.deadline(), request).await
    }

    async fn send_by(&self, deadline: Instant, request: ScriptRequest) -> Result<ScriptReply, StoreError> {
        match timeout_at(deadline, self.send_and_wait(deadline, request)).await {
            Ok(reply) => reply,
            Err(_) => Err(StoreError::timed_out()),
        }
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
    pub(super) async fn send_and_wait(
        &self,
        deadline: Instant,
        request: ScriptRequest,
    ) -> Result<ScriptReply, StoreError> {
        if request.hits().len() > MAX_KEYS {
            return Err(StoreError::refused(&format!("a request has more than {MAX_KEYS} limits and keys")));
        }
        let store = request.hits().first().map_or(self.stores.default_store(), |hit| self.stores.of(hit));
        let (reply_to, reply) = oneshot::channel();
        store.topology.submit(Job { request, deadline, reply_to })?;
        match reply.await {
            Ok(reply) => reply,
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
