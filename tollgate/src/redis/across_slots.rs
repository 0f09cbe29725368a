//! Requests whose keys are in several slots of a cluster: all of them are charged, or none.
//!
//! Each slot is asked by itself, and all at the same time. If one of them denies, the others get their units back.
//!
//! A server that fails concerns the limits of its own slots. Each of these limits answers by its failure policy, and the
//! verdicts of the slots that answered stand.

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::asking::Marks;
use super::denials::Times;
use super::fallback::reported;
use super::script::{Answer, Ask, Question, Seen};
use super::{AllWanted, Receipt, RedisLimiter, Shared, StoreError, Wanted};
use crate::algorithm::portable::Before;
use crate::decision::{Decision, Source, Verdict};
use crate::units::Timestamp;

/// The answer of one slot to one hit.
#[derive(Clone, Copy)]
struct FromSlot {
    /// By the slot's clock. The clocks of slots differ.
    at: Timestamp,
    verdict: Verdict,
    /// The debt of the key before the charge.
    before: Before,
}

impl FromSlot {
    /// Reads an answer. Returns `None` if there is none, or if the script and this program disagree about it.
    fn read(ask: &Ask, answer: Result<Answer, StoreError>) -> Option<Self> {
        let answer = answer.ok()?;
        let seen = answer.seen.first()?;
        let verdict = seen.verdict(&ask.terms, answer.at, ask.cost);
        let before = ask.terms.compiled.before(seen.numbers(), answer.at.as_micros());
        (verdict.is_allowed() == (answer.taken > 0)).then_some(Self { at: answer.at, verdict, before })
    }

    /// Gives back the units that the slot took, if it took any.
    async fn undo(self, ask: Ask, shared: &Shared) {
        if self.verdict.is_allowed() && ask.cost > 0 {
            // A slot that cannot be reached any more keeps what it took: too strict, never too lax.
            let _ = shared.undo(ask, self.at, self.before).await;
        }
    }
}

/// The result of a request across slots.
struct Taken {
    /// With their receipts.
    hits: AllWanted,
    /// The answer to each hit; `None` where the slot failed.
    slots: SmallVec<[Option<FromSlot>; 2]>,
    /// The decision of the limits whose slots failed.
    by_policy: Option<Decision>,
}

impl Taken {
    /// Decides by the answers of all slots.
    fn new(limiter: &RedisLimiter, mut hits: AllWanted, slots: SmallVec<[Option<FromSlot>; 2]>) -> Self {
        let denies = slots.iter().flatten().any(|slot| !slot.verdict.is_allowed());
        let by_hit = hits.iter_mut().zip(&slots);
        let mut failed: SmallVec<[&mut Wanted; 2]> =
            by_hit.filter_map(|(one, slot)| slot.is_none().then_some(one)).collect();
        // If a slot denies, nothing else matters, and nothing is to be taken from this process's memory.
        let by_policy = (!denies && !failed.is_empty()).then(|| limiter.by_policy(&mut failed));
        drop(failed);
        let taken = Self { hits, slots, by_policy };
        if taken.is_allowed() { taken.with_receipts() } else { taken }
    }

    fn is_allowed(&self) -> bool {
        let slots = self.slots.iter().flatten().all(|slot| slot.verdict.is_allowed());
        slots && self.by_policy.is_none_or(|decision| decision.is_allowed())
    }

    fn with_receipts(mut self) -> Self {
        for (one, slot) in self.hits.iter_mut().zip(&self.slots) {
            if let Some(slot) = slot {
                one.receipt = Receipt::Store { at: slot.at };
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
        let slots = self.hits.iter().zip(&self.slots);
        join_all(slots.filter_map(|(one, slot)| Some((*slot)?.undo(one.ask.clone(), &limiter.0.shared))))
    }
}

impl RedisLimiter {
    /// Takes from several slots of a cluster, and notes on each hit where that was.
    pub(super) async fn take_across_slots(&self, wanted: &mut AllWanted, marks: &Marks, deadline: Instant) -> Decision {
        let inner = &*self.0;
        let asked = inner.shared.clock.now_with_gaps();
        // In a task that outlives the caller: what some slots have taken is given back also if it goes away.
        let (reply, taken) = oneshot::channel();
        tokio::spawn(take(self.clone(), wanted.clone(), deadline, reply));
        // The task replies by the deadline. It is dropped with the runtime alone.
        let Ok(taken) = taken.await else {
            return self.by_policy(&mut wanted.iter_mut().collect::<SmallVec<[&mut Wanted; 2]>>());
        };
        let answered = inner.shared.clock.now_with_gaps();
        *wanted = taken.hits;
        let mut most_restrictive: Option<Decision> = None;
        for ((one, slot), mark) in wanted.iter().zip(&taken.slots).zip(marks) {
            let Some(FromSlot { at, verdict, .. }) = slot else { continue };
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

/// Asks all slots, and replies by the deadline. If the request is denied, or its caller is gone by then, what was taken is
/// given back, and so is what slots take after the deadline.
async fn take(limiter: RedisLimiter, hits: AllWanted, deadline: Instant, reply: oneshot::Sender<Taken>) {
    let shared = &*limiter.0.shared;
    let ask_slot = |(index, one): (usize, &Wanted)| {
        let ask = one.ask.clone();
        async move {
            let question = Question::Take(SmallVec::from_iter([ask.clone()]));
            (index, shared.ask_to_the_end(deadline, question).await, ask)
        }
    };
    let mut asking: FuturesUnordered<_> = hits.iter().enumerate().map(ask_slot).collect();
    let mut slots: SmallVec<[Option<FromSlot>; 2]> = hits.iter().map(|_| None).collect();
    while let Ok(Some((index, answer, ask))) = timeout_at(deadline, asking.next()).await {
        slots[index] = FromSlot::read(&ask, answer);
    }
    let taken = Taken::new(&limiter, hits, slots);
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
    while let Some((_, answer, ask)) = asking.next().await {
        if let Some(late) = FromSlot::read(&ask, answer) {
            late.undo(ask, shared).await;
        }
    }
}
