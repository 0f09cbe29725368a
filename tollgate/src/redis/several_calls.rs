//! Requests whose keys need several script calls, because they are on several stores or in several slots of a cluster:
//! all of them are charged, or none.
//!
//! The calls are made at the same time, and each decides its own hits, all or nothing. If one of them denies, the
//! others give their units back.
//!
//! A server that fails affects only its own limits, whose failure policies decide. The verdicts of the other calls
//! stand.

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::denials::Times;
use super::fallback::reported;
use super::requests::Generations;
use super::script::{KeyState, ScriptHit, ScriptHits, ScriptReply, ScriptRequest};
use super::{Receipt, RedisHit, RedisHits, RedisLimiter, Shared, StoreError};
use crate::algorithm::portable::Before;
use crate::decision::{Decision, Source, Verdict};
use crate::units::Timestamp;

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
        // If a call denies, the request is denied, and nothing must be taken from this process's memory.
        let by_policy = (!denies && !failed.is_empty()).then(|| limiter.by_policy(&mut failed));
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
    pub(super) async fn take_in_several_calls(
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
            let Some(HitReply { at, verdict, .. }) = reply else { continue };
            let times = Times { sent_at, received_at, generation: *generation };
            self.remember_denial(&hit.script_hit, &KeyState::Verdict(*verdict), *at, times);
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
                let reply = shared.send_and_wait(deadline, ScriptRequest::Take(script_hits.clone())).await;
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
