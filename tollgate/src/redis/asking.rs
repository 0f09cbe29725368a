//! How a question gets to Redis and its answer back: what is certain is not asked, what was learnt is remembered.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use super::denials::{Denials, Known, Times};
use super::leases::Outlook;
use super::script::{Answer, Ask, Asks, Question, Seen};
use super::stores::Call;
use super::worker::{Job, MAX_KEYS};
use super::{AllWanted, Receipt, RedisLimiter, Shared, StoreError, Wanted};
use crate::algorithm::portable::Before;
use crate::decision::{Admission, Decision, Denied, Source};
use crate::key::Key;
use crate::units::Timestamp;

/// What was given back before each was asked.
pub(super) type Marks = SmallVec<[u64; 2]>;

impl RedisLimiter {
    /// Takes from all limits or from none, and notes on each hit where that was.
    pub(super) async fn take(&self, wanted: &mut AllWanted, cost: u64, deadline: Instant) -> Decision {
        let inner = &*self.0;
        let _asking_for_all = match self.before_asking(wanted, deadline).await {
            Ok(asking) => asking,
            Err(denied) => {
                inner.shared.counts.cached_denials.fetch_add(1, Ordering::Relaxed);
                return denied.0;
            }
        };
        let asked = inner.shared.clock.now_with_gaps();
        let marks: Marks = wanted.iter().map(|one| inner.denials.mark(&one.ask.name)).collect();
        let asks: Asks = wanted.iter().map(|one| one.ask.clone()).collect();
        if !inner.shared.stores.is_one_call(&asks) {
            return Decision { cost, ..self.take_in_several_calls(wanted, &marks, deadline).await };
        }
        let answer = self.ask_by(deadline, Question::Take(asks)).await;
        let answered = inner.shared.clock.now_with_gaps();
        match answer.and_then(|answer| self.decided(wanted, &answer, &marks, (asked, answered))) {
            Ok(decision) => Decision { cost, ..decision },
            Err(_) => {
                let mut failed: SmallVec<[&mut Wanted; 2]> = wanted.iter_mut().collect();
                Decision { cost, ..self.by_policy(&mut failed) }
            }
        }
    }

    fn decided(
        &self,
        wanted: &mut AllWanted,
        answer: &Answer,
        marks: &Marks,
        (asked, answered): (Timestamp, Timestamp),
    ) -> Result<Decision, StoreError> {
        let mut most_restrictive: Option<Decision> = None;
        for ((one, seen), mark) in wanted.iter().zip(&answer.seen).zip(marks) {
            let verdict = seen.verdict(&one.ask.terms, answer.at, one.ask.cost);
            let times = Times { asked, answered, mark: *mark };
            self.remember_denial(&one.ask, seen, answer.at, times);
            if answer.taken > 0 && verdict.remaining < one.ask.cost {
                self.remember_next(&one.ask, seen, answer.at, times);
            }
            let decision = self.decision(one, verdict, answer.at, Source::Store);
            most_restrictive = Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
        }
        let decision = most_restrictive.unwrap_or_else(|| Decision::without_limit(answer.at));
        if decision.is_allowed() != (answer.taken > 0) {
            return Err(StoreError::unavailable("the script and this program disagree: are they of one version?"));
        }
        if decision.is_allowed() {
            wanted.iter_mut().for_each(|one| one.receipt = Receipt::Store { at: answer.at });
        }
        Ok(decision)
    }

    /// The denial, if it is certain. When one has just ended, the first to ask asks for all, and the others wait
    /// for what it finds: so a flood costs one trip per wait, not one per task.
    async fn before_asking(&self, wanted: &AllWanted, deadline: Instant) -> Result<AskingForAll<'_>, Denied> {
        let inner = &*self.0;
        let mut asking = AskingForAll { denials: &inner.denials, asking: SmallVec::new() };
        let is_remembered = |one: &&Wanted| inner.shared.stores.hears_resets_of(&one.ask);
        if !wanted.iter().any(|one| is_remembered(&one)) {
            return Ok(asking);
        }
        loop {
            let now = inner.shared.clock.now_with_gaps();
            let (mut denied, mut wait, mut too_soon) = (None::<Decision>, None, 0);
            for one in wanted.iter().filter(is_remembered) {
                match inner.denials.known(&one.ask, now) {
                    Known::Nothing => {}
                    Known::Denied(verdict, at) => {
                        let denial = self.decision(one, verdict, at, Source::DenialCache);
                        denied = Some(denied.map_or(denial, |other| other.most_restrictive(denial)));
                    }
                    Known::AskForAll(semaphore, wait) => {
                        asking.asking.push((one.ask.name.clone(), semaphore));
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
            // Who asks for others does not wait for others.
            let Some(wait) = wait.filter(|_| asking.asking.is_empty()) else { return Ok(asking) };
            if timeout_at(deadline, wait.acquire()).await.is_err() {
                return Ok(asking);
            }
        }
    }

    /// The denial of these hits, if this node is certain of it: Redis is not asked.
    pub(crate) fn certain_denial(&self, wanted: &AllWanted) -> Option<Decision> {
        let inner = &*self.0;
        let is_remembered = |one: &&Wanted| inner.shared.stores.hears_resets_of(&one.ask);
        if !wanted.iter().any(|one| is_remembered(&one)) {
            return None;
        }
        let now = inner.shared.clock.now_with_gaps();
        let denials = wanted.iter().filter(is_remembered).filter_map(|one| {
            let dry = match self.lease_outlook(one, now) {
                // A slice may have units while the store has none.
                Outlook::Open => return None,
                Outlook::Dry { wait } => Some(wait),
                Outlook::Exact => None,
            };
            let certain = inner.denials.certain(&one.ask, now);
            let certain = certain.map(|(verdict, at)| self.decision(one, verdict, at, Source::DenialCache));
            certain.or_else(|| Some(self.dry_denial(one, dry?)))
        });
        let denied = denials.reduce(Decision::most_restrictive)?;
        if denied.source == Source::DenialCache {
            inner.shared.counts.cached_denials.fetch_add(1, Ordering::Relaxed);
        }
        Some(denied)
    }

    /// Returns what [`check_n`](Self::check_n) would, and takes nothing.
    pub(crate) async fn peek_n(&self, key: Key<'_>, cost: u64) -> Result<Decision, StoreError> {
        self.look(&self.want_all(key, cost)).await
    }

    pub(super) async fn look(&self, wanted: &AllWanted) -> Result<Decision, StoreError> {
        let answers = self.ask_in_calls(wanted, Question::Look).await;
        let mut most_restrictive: Option<Decision> = None;
        for (call, answer) in answers {
            // Each server has its own clock.
            let answer = answer?;
            for (position, seen) in call.into_iter().zip(&answer.seen) {
                let one = &wanted[position];
                let verdict = seen.verdict(&one.ask.terms, answer.at, one.ask.cost);
                let decision = self.decision(one, verdict, answer.at, Source::Store);
                most_restrictive = Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
            }
        }
        Ok(most_restrictive.unwrap_or_else(|| Decision::without_limit(self.0.shared.clock.wall())))
    }

    /// Asks in as many calls as the keys need; nothing has to be all or nothing.
    pub(super) async fn ask_each(
        &self,
        wanted: &AllWanted,
        question: impl Fn(Asks) -> Question,
    ) -> Result<(), StoreError> {
        let answers = self.ask_in_calls(wanted, question).await;
        let outcome = answers.into_iter().try_for_each(|(_, answer)| answer.map(drop));
        // Also what was decided just before, and is remembered only now.
        for one in wanted {
            self.0.shared.denials.forget(&one.ask.name);
        }
        outcome
    }

    /// Asks in as many calls as the keys need, all at the same time.
    async fn ask_in_calls(
        &self,
        wanted: &AllWanted,
        question: impl Fn(Asks) -> Question,
    ) -> Vec<(Call, Result<Answer, StoreError>)> {
        let deadline = self.deadline();
        let calls = self.0.shared.stores.calls(wanted.iter().map(|one| &one.ask));
        let each = calls.into_iter().map(|call| {
            let question = question(call.iter().map(|position| wanted[*position].ask.clone()).collect());
            async move { (call, self.ask_by(deadline, question).await) }
        });
        join_all(each).await
    }

    pub(super) fn deadline(&self) -> Instant {
        self.0.shared.deadline()
    }

    pub(super) async fn ask(&self, question: Question) -> Result<Answer, StoreError> {
        self.0.shared.ask(question).await
    }

    async fn ask_by(&self, deadline: Instant, question: Question) -> Result<Answer, StoreError> {
        self.0.shared.ask_by(deadline, question).await
    }

    /// Who has just taken the last knows that the next is denied.
    fn remember_next(&self, ask: &Ask, seen: &Seen, at: Timestamp, times: Times) {
        if let Seen::Numbers(numbers) = seen {
            let next = ask.terms.compiled.verdict_after(numbers, at.as_micros(), ask.cost);
            self.remember_denial(ask, &Seen::Verdict(next), at, times);
        }
    }

    pub(super) fn remember_denial(&self, ask: &Ask, seen: &Seen, at: Timestamp, times: Times) {
        if let Admission::Denied { retry_after } = seen.verdict(&ask.terms, at, ask.cost).admission
            && self.0.shared.stores.hears_resets_of(ask)
            && ask.terms.keeps_denials()
        {
            self.0.denials.remember(ask, seen, at, retry_after, times);
        }
    }
}

impl Shared {
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.store_timeout
    }

    pub(super) async fn ask(&self, question: Question) -> Result<Answer, StoreError> {
        self.ask_by(self.deadline(), question).await
    }

    async fn ask_by(&self, deadline: Instant, question: Question) -> Result<Answer, StoreError> {
        match timeout_at(deadline, self.ask_to_the_end(deadline, question)).await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::too_late()),
        }
    }

    /// Gives back what was taken at that time, as if it had never been taken, and forgets denials that it caused.
    pub(super) async fn undo(&self, ask: Ask, at: Timestamp, before: Before) -> Result<(), StoreError> {
        let name = ask.name.clone();
        let outcome = self.ask(Question::Undo(ask, at, before)).await;
        self.denials.forget(&name);
        outcome.map(drop)
    }

    /// Asks by the deadline, and waits for an answer that comes later, too.
    pub(super) async fn ask_to_the_end(&self, deadline: Instant, question: Question) -> Result<Answer, StoreError> {
        if question.asks().len() > MAX_KEYS {
            return Err(StoreError::refused(&format!("a request may have {MAX_KEYS} limits and keys")));
        }
        let store = question.asks().first().map_or(self.stores.default_store(), |ask| self.stores.of(ask));
        let (reply, answer) = oneshot::channel();
        store.topology.submit(Job { question, deadline, reply })?;
        match answer.await {
            Ok(answer) => answer,
            // The deadline passed while it was waiting for a trip, or the limiter is being dropped.
            Err(_) => Err(StoreError::too_late()),
        }
    }
}

/// Asks for all who wait to know whether a denial has ended; ends however it ends.
struct AskingForAll<'a> {
    denials: &'a Denials,
    asking: SmallVec<[Asking; 1]>,
}

/// A name, and what those wait for who want to know of it.
type Asking = (Arc<[u8]>, Arc<Semaphore>);

impl Drop for AskingForAll<'_> {
    fn drop(&mut self) {
        for (name, asking) in &self.asking {
            self.denials.asked_for_all(name, asking);
        }
    }
}
