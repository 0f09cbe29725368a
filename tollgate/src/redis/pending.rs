//! Denials that only pending units cause: see `open_charges.rs`.
//!
//! Each process knows the charges that it has open itself. Those of other processes count as spent, so a denial that they
//! cause is reported as any other.
//!
//! A denial of a key with open charges takes one more call, in which the script gives them back without writing anything.
//! So that a flood of denied requests does not double the calls, a process makes a bounded number of them in a second.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use super::cluster::MAX_WORK;
use super::denials::Denials;
use super::script::ScriptRequest;
use super::{Receipt, RedisHit, RedisHits, RedisLimiter};
use crate::algorithm::Charge;
use crate::algorithm::portable::Script;
use crate::decision::{Admission, Decision, LimitId, Source, Verdict};
use crate::open_charges::{Held, OpenCharge, OpenCharges};
use crate::sync::{AtomicU64, Ordering};
use crate::units::Timestamp;

/// The most open charges of a key that one call looks at: those that end first. Fewer if each is much work for Redis.
const MOST_CHARGES: usize = 64;

/// The most calls in a second that only describe a denial. Without a bound, a flood of denied requests would cost calls that
/// the denial cache is there to prevent.
const MAX_READS: u64 = 100;

/// Counts the reads of the current second.
#[derive(Default)]
pub(super) struct Reads(AtomicU64);

impl Reads {
    /// The bits of the count. The others have the second.
    const COUNT_BITS: u32 = 8;

    /// Counts a read. Returns `false` if there were too many in this second.
    pub(super) fn take(&self, now: Timestamp) -> bool {
        let second = (now.as_micros() / 1_000_000) << Self::COUNT_BITS;
        let counted = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| {
            let is_current = before >> Self::COUNT_BITS == second >> Self::COUNT_BITS;
            let count = if is_current { before - second } else { 0 };
            (count < MAX_READS).then_some(second + count + 1)
        });
        counted.is_ok()
    }
}

/// The open charges of this process, by the names of their keys.
#[derive(Clone)]
pub(super) struct Open {
    charges: Arc<OpenCharges>,
    /// Hashes the names.
    denials: Arc<Denials>,
}

impl Open {
    pub(super) fn new(denials: &Arc<Denials>) -> Self {
        Self { charges: Arc::default(), denials: denials.clone() }
    }

    fn of(&self, hit: &RedisHit, now: Timestamp) -> SmallVec<[OpenCharge; 8]> {
        self.charges.of(self.denials.fingerprint(&hit.script_hit.name), now.as_micros())
    }

    /// Ends the open charges of a key that was reset then, by the clock of the store: nothing of them counts any more.
    /// A reset by this process ends those before the mark, too: the clock may have stepped back.
    pub(super) fn reset(&self, name: &[u8], reset_at: Option<Timestamp>, mark: u64) {
        if !self.charges.is_empty() {
            let until = reset_at.map_or(u64::MAX, Timestamp::as_micros);
            self.charges.close_until(self.denials.fingerprint(name), until, mark);
        }
    }

    pub(super) fn mark(&self) -> u64 {
        self.charges.mark()
    }
}

impl RedisLimiter {
    /// Records the charges of limits that `may_change` as open, for as long or until the result is dropped.
    #[doc(hidden)]
    pub fn open(&self, hits: &[RedisHit], within: Duration, may_change: impl Fn(LimitId) -> bool) -> Held {
        let Open { charges, denials } = &self.0.shared.open;
        let open = |hit: &RedisHit| {
            let Receipt::Store { at } = hit.receipt else { return None };
            if hit.script_hit.cost == 0 || !may_change(hit.limit) {
                return None;
            }
            let charge = Charge { at: at.as_micros(), cost: hit.script_hit.cost };
            let until = at.saturating_add(within).as_micros();
            charges.open(denials.fingerprint(&hit.script_hit.name), charge, until)
        };
        Held::new(charges, hits.iter().map(open))
    }

    /// Returns whether charges of the key may be open.
    pub(super) fn may_be_open(&self, hit: &RedisHit) -> bool {
        let Open { charges, denials } = &self.0.shared.open;
        !charges.is_empty() && charges.has_any(denials.fingerprint(&hit.script_hit.name))
    }

    /// Completes a decision until the deadline: a denial may be for pending units.
    pub(super) async fn finish(&self, hits: &mut RedisHits, decision: Decision, deadline: Instant) -> Decision {
        let is_of_store = matches!(decision.source, Source::Store | Source::DenialCache);
        if decision.is_allowed() || !is_of_store || self.0.shared.open.charges.is_empty() {
            return decision;
        }
        let is_local = |hit: &RedisHit| hit.decided.is_some_and(|own| own.source == Source::Local);
        hits.iter_mut().for_each(|hit| hit.may_be_pending = self.may_be_open(hit) && !is_local(hit));
        if !hits.iter().any(|hit| hit.may_be_pending) || !self.0.shared.reads.take(self.0.shared.clock.wall()) {
            return decision;
        }
        timeout_at(deadline, Box::pin(self.without_open(hits, decision))).await.unwrap_or(decision)
    }

    /// Returns the denial of a request, as pending if all limits that deny it would admit it without open charges.
    async fn without_open(&self, hits: &mut RedisHits, denied: Decision) -> Decision {
        let own = |hit: &RedisHit| if denied.limit == Some(hit.limit) { Some(denied) } else { hit.decided };
        let mut each: SmallVec<[Option<Decision>; 2]> = hits.iter().map(own).collect();
        // A slice has admitted a hit that is leased, whatever is left on the store.
        if each.iter().zip(&*hits).any(|(own, hit)| own.is_none() && !self.is_leased(hit)) {
            let read = self.peek_each_on_store(hits).await;
            for ((own, read), hit) in each.iter_mut().zip(read).zip(&*hits) {
                *own = own.or(read.filter(|_| !self.is_leased(hit)));
            }
        }
        let each = hits.iter().zip(each).map(|(hit, own)| async move {
            match own {
                Some(own) if !own.is_allowed() => self.pending(hit, own).await,
                own => (own, hit.may_be_pending),
            }
        });
        let each = join_all(each).await;
        let mut reported: Option<Decision> = None;
        for (hit, (own, may_be_pending)) in hits.iter_mut().zip(each) {
            (hit.decided, hit.may_be_pending) = (own.or(hit.decided), may_be_pending);
            if let Some(own) = own.filter(|own| !own.is_allowed()) {
                reported = Some(reported.map_or(own, |other| other.most_restrictive(own)));
            }
        }
        reported.unwrap_or(denied)
    }

    /// Returns the denial of a hit, as pending if the open charges of its key cause it. The wait ends with the deadline of
    /// the first ones that suffice. Also returns whether the store did not reply.
    async fn pending(&self, hit: &RedisHit, denied: Decision) -> (Option<Decision>, bool) {
        let as_any_other = (Some(denied), false);
        let Admission::Denied { retry_after } = denied.verdict.admission else { return as_any_other };
        let open = self.0.shared.open.of(hit, denied.at);
        let work = 2 * hit.script_hit.terms.compiled.script_work(Script::Full);
        let most = (MAX_WORK / work).clamp(1, MOST_CHARGES);
        let charges: SmallVec<[Charge; 8]> = open.iter().take(most).map(|open| open.charge).collect();
        if charges.is_empty() {
            return as_any_other;
        }
        let mut hit = hit.clone();
        self.add_later_terms(&mut hit);
        let Ok(reply) = self.send(ScriptRequest::Without(hit.script_hit, charges)).await else {
            return (Some(denied), true);
        };
        let Some(last) = (reply.taken as usize).checked_sub(1).and_then(|last| open.get(last)) else {
            return as_any_other;
        };
        let until = last.until.saturating_sub(denied.at.as_micros());
        let admission = Admission::Pending { retry_after: retry_after.min(until) };
        (Some(Decision { verdict: Verdict { admission, ..denied.verdict }, ..denied }), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_a_second_are_bounded() {
        let reads = Reads::default();
        let at = |second: u64| Timestamp::from_micros(second * 1_000_000 + 999_999);
        let taken = |second| (0..2 * MAX_READS).filter(|_| reads.take(at(second))).count() as u64;
        assert_eq!([taken(7), taken(7), taken(8)], [MAX_READS, 0, MAX_READS]);
    }
}
