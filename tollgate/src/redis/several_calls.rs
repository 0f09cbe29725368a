//! Requests whose keys need several script calls, because they are on several stores or in several slots of a cluster: all
//! of them are charged, or none.
//!
//! The calls are made at the same time, and each decides its own hits, all or nothing. If one of them denies, the others
//! give their units back.
//!
//! A server that fails concerns its own limits. Each of these limits answers by its failure policy, and the verdicts of the
//! calls that were answered stand.

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::asking::Marks;
use super::denials::Times;
use super::fallback::reported;
use super::script::{Answer, Ask, Asks, Question, Seen};
use super::{AllWanted, Receipt, RedisLimiter, Shared, StoreError, Wanted};
use crate::algorithm::portable::Before;
use crate::decision::{Decision, Source, Verdict};
use crate::units::Timestamp;

/// The answer of a call to one of its hits.
#[derive(Clone, Copy)]
struct Answered {
    /// By the clock of the server. The clocks of servers differ.
    at: Timestamp,
    verdict: Verdict,
    /// Whether the units were taken. A call that denies one of its hits takes nothing for the others.
    is_taken: bool,
    /// The debt of the key before the charge.
    before: Before,
}

/// The answer to each hit of a request; `None` where the call failed.
type AllAnswered = SmallVec<[Option<Answered>; 2]>;

impl Answered {
    /// Reads the answer of a call to each of its hits. Returns nothing if the call failed, or if the script and this program
    /// disagree about it.
    fn read(asks: &[Ask], answer: Result<Answer, StoreError>) -> SmallVec<[Self; 2]> {
        let Ok(answer) = answer else { return SmallVec::new() };
        let is_taken = answer.taken > 0;
        let read = |(ask, seen): (&Ask, &Seen)| Self {
            at: answer.at,
            verdict: seen.verdict(&ask.terms, answer.at, ask.cost),
            is_taken,
            before: ask.terms.compiled.before(seen.numbers(), answer.at.as_micros()),
        };
        let all: SmallVec<[Self; 2]> = asks.iter().zip(&answer.seen).map(read).collect();
        let agrees = all.len() == asks.len() && all.iter().all(|one| one.verdict.is_allowed()) == is_taken;
        if agrees { all } else { SmallVec::new() }
    }

    /// Gives back the units that were taken, if any were.
    async fn undo(self, ask: Ask, shared: &Shared) {
        if self.is_taken && ask.cost > 0 {
            // A server that cannot be reached any more keeps what it took: too strict, never too lax.
            let _ = shared.undo(ask, self.at, self.before).await;
        }
    }
}

/// The result of a request.
struct Taken {
    /// With their receipts.
    hits: AllWanted,
    answered: AllAnswered,
    /// The decision of the limits whose calls failed.
    by_policy: Option<Decision>,
}

impl Taken {
    /// Decides by the answers of all calls.
    fn new(limiter: &RedisLimiter, mut hits: AllWanted, answered: AllAnswered) -> Self {
        let denies = answered.iter().flatten().any(|one| !one.verdict.is_allowed());
        let by_hit = hits.iter_mut().zip(&answered);
        let mut failed: SmallVec<[&mut Wanted; 2]> =
            by_hit.filter_map(|(one, answered)| answered.is_none().then_some(one)).collect();
        // If a call denies, nothing else matters, and nothing is to be taken from this process's memory.
        let by_policy = (!denies && !failed.is_empty()).then(|| limiter.by_policy(&mut failed));
        drop(failed);
        let taken = Self { hits, answered, by_policy };
        if taken.is_allowed() { taken.with_receipts() } else { taken }
    }

    fn is_allowed(&self) -> bool {
        let is_answered = self.answered.iter().flatten().all(|one| one.verdict.is_allowed());
        is_answered && self.by_policy.is_none_or(|decision| decision.is_allowed())
    }

    fn with_receipts(mut self) -> Self {
        for (one, answered) in self.hits.iter_mut().zip(&self.answered) {
            if let Some(answered) = answered {
                one.receipt = Receipt::Store { at: answered.at };
            }
        }
        self
    }

    /// Gives back everything that was taken.
    fn undo<'l>(&self, limiter: &'l RedisLimiter) -> impl Future<Output = Vec<()>> + use<'l> {
        for one in &self.hits {
            if let Receipt::Local { at, wall_offset } = one.receipt {
                limiter.give_back_locally(one, at, wall_offset);
            }
        }
        let answered = self.hits.iter().zip(&self.answered);
        join_all(answered.filter_map(|(one, answered)| Some((*answered)?.undo(one.ask.clone(), &limiter.0.shared))))
    }
}

impl RedisLimiter {
    /// Takes from several servers or slots, and notes on each hit where that was.
    pub(super) async fn take_in_several_calls(
        &self,
        wanted: &mut AllWanted,
        marks: &Marks,
        deadline: Instant,
    ) -> Decision {
        let inner = &*self.0;
        let asked = inner.shared.clock.now_with_gaps();
        // In a task that outlives the caller: units that some calls took are given back also if the caller goes away.
        let (reply, taken) = oneshot::channel();
        tokio::spawn(take(self.clone(), wanted.clone(), deadline, reply));
        // The task replies by the deadline. It is dropped with the runtime alone.
        let Ok(taken) = taken.await else {
            return self.by_policy(&mut wanted.iter_mut().collect::<SmallVec<[&mut Wanted; 2]>>());
        };
        let answered = inner.shared.clock.now_with_gaps();
        *wanted = taken.hits;
        let mut most_restrictive: Option<Decision> = None;
        for ((one, answer), mark) in wanted.iter().zip(&taken.answered).zip(marks) {
            let Some(Answered { at, verdict, .. }) = answer else { continue };
            self.remember_denial(&one.ask, &Seen::Verdict(*verdict), *at, Times { asked, answered, mark: *mark });
            let decision = self.decision(one, *verdict, *at, Source::Store);
            most_restrictive = Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
        }
        match (most_restrictive, taken.by_policy) {
            (Some(decided), Some(by_policy)) => reported(decided, by_policy),
            (Some(decision), None) | (None, Some(decision)) => decision,
            (None, None) => Decision::without_limit(inner.shared.clock.wall()),
        }
    }
}

/// Makes all calls, and replies by the deadline. If the request is denied, or its caller is gone by then, units that were
/// taken are given back, and so are those that calls take after the deadline.
async fn take(limiter: RedisLimiter, hits: AllWanted, deadline: Instant, reply: oneshot::Sender<Taken>) {
    let shared = &*limiter.0.shared;
    let calls = shared.stores.calls(hits.iter().map(|one| &one.ask));
    let mut pending: FuturesUnordered<_> = calls
        .into_iter()
        .map(|call| {
            let asks: Asks = call.iter().map(|position| hits[*position].ask.clone()).collect();
            async move {
                let answer = shared.ask_to_the_end(deadline, Question::Take(asks.clone())).await;
                (call, Answered::read(&asks, answer), asks)
            }
        })
        .collect();
    let mut answered: AllAnswered = hits.iter().map(|_| None).collect();
    while let Ok(Some((call, answers, _))) = timeout_at(deadline, pending.next()).await {
        for (position, answer) in call.into_iter().zip(answers) {
            answered[position] = Some(answer);
        }
    }
    let taken = Taken::new(&limiter, hits, answered);
    if taken.is_allowed() {
        if let Err(unheard) = reply.send(taken) {
            unheard.undo(&limiter).await;
        }
    } else {
        let mut undoing = std::pin::pin!(taken.undo(&limiter));
        let is_undone = timeout_at(deadline, &mut undoing).await.is_ok();
        let _ = reply.send(taken);
        if !is_undone {
            undoing.await;
        }
    }
    while let Some((_, late, asks)) = pending.next().await {
        join_all(late.into_iter().zip(asks).map(|(answer, ask)| answer.undo(ask, shared))).await;
    }
}
