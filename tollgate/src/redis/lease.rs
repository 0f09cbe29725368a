//! The lease of one key: the slices of its quota that this process holds, and the demand by which they are sized.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::Semaphore;

use super::node::jittered;
use super::script::ScriptHit;
use crate::algorithm::portable::Before;
use crate::units::Timestamp;

/// A slice is at most this part of the quota, so that one node does not take all.
pub(super) const SHARE: u64 = 4;
/// When the store has less than a node requests, the node tries again after this part of a horizon, and after twice as
/// long each time, up to [`MAX_DOUBLINGS`] times. Units that become available meanwhile are then fetched together, not
/// one by one. The longest pause is four fifths of a horizon, so a bucket, which holds four horizons' refill at least,
/// never fills up.
const FIRST_PAUSE: u64 = 10;
const MAX_DOUBLINGS: u32 = 3;
/// A slice covers this part of a horizon's demand. Covering less than a horizon, it is spent before it expires.
const COVERED: (u64, u64) = (7, 8);
/// The next slice is requested when less than this part of a horizon's demand is left.
const LOW: u64 = 4;
/// Maximum number of costs to try in one call, without the smallest.
const MAX_CHOICES: usize = 14;

/// The lease of one key. Times are by this process's clock, except where noted.
pub(super) struct Lease {
    pub(super) hit: ScriptHit,
    /// Oldest first.
    grants: SmallVec<[Grant; 2]>,
    horizon: u64,
    /// When the current horizon began, the units requested in it, and those of the horizon before.
    since: Timestamp,
    demand: u64,
    demand_before: u64,
    /// A cost that the store had no units for, or granted less than requested, and the time before which no slice is
    /// requested.
    exhausted: Option<(u64, Timestamp)>,
    /// Consecutive renewals that brought less than requested, and the units of the last of them.
    shortages: u32,
    last_short: u64,
    /// Closed when the renewal ends.
    renewing: Option<Arc<Semaphore>>,
    /// Counts resets of the key. A charge from before a reset no longer exists.
    resets: u64,
    /// The latest reset received since the renewal began, by the store's clock. A slice that was charged before it is
    /// not used.
    reset_at: Timestamp,
    /// The latest time, by the store's clock, at which the key was found to owe units. Nothing is spent from a slice that
    /// was charged before it.
    owed_at: Timestamp,
    /// Requests that hold units while their other limits decide.
    holders: usize,
    /// Units left at the store when it last granted a slice, and when the quota would be full again.
    store_left: u64,
    full_at: Timestamp,
    /// Set when the limit has changed: nothing is spent from this lease any more.
    withdrawn: bool,
}

/// A slice as the store granted it.
#[derive(Clone, Copy)]
pub(super) struct Grant {
    pub(super) units: u64,
    pub(super) left: u64,
    pub(super) until: Timestamp,
    /// When it was charged, by the store's clock.
    pub(super) at: Timestamp,
    /// The debt of the key before the charge.
    pub(super) before: Before,
    /// The connection on which it was charged, if that was certain.
    pub(super) connection: Option<u64>,
}

impl Grant {
    fn can_spend(&self, cost: u64, now: Timestamp) -> bool {
        self.until > now && self.left >= cost
    }
}

/// The store's reply to a renewal.
pub(super) struct Granted {
    pub(super) grant: Grant,
    /// Units left at the store after the charge, and when the quota would be full again.
    pub(super) store_left: u64,
    pub(super) full_at: Timestamp,
}

/// The size of a slice to request: the most units, and the fewest that are useful.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceRequest {
    pub(super) most: u64,
    pub(super) least: u64,
    /// The units of the last renewal, if it brought less than requested. About as many are likely to be available.
    expected: u64,
}

impl SliceRequest {
    /// Returns the costs to try, the largest first: halves of the most, and finer steps around the expected number.
    pub(super) fn choices(self) -> SmallVec<[u64; 16]> {
        let halves = std::iter::successors(Some(self.most), |units| Some(units / 2));
        let near = [self.expected / 4 * 7, self.expected / 4 * 5, self.expected, self.expected / 4 * 3];
        let mut choices: SmallVec<[u64; 16]> = halves.take(MAX_CHOICES - near.len()).chain(near).collect();
        choices.retain(|units| (self.least + 1..=self.most).contains(units));
        choices.sort_unstable_by(|one, other| other.cmp(one));
        choices.dedup();
        choices.push(self.least);
        choices
    }
}

/// Units that a request took from a slice and may still give back, because its other limits have not decided yet.
#[derive(Clone, Copy, Debug)]
#[must_use = "held units are either kept or given back"]
pub(super) struct SliceUnits {
    /// When the slice was charged, which identifies it, and until when it may be spent.
    at: Timestamp,
    until: Timestamp,
    before: Before,
    connection: Option<u64>,
    resets: u64,
}

impl SliceUnits {
    /// Returns when the slice was charged, by the store's clock, and the debt of the key before that.
    pub(super) fn charge(&self) -> (Timestamp, Before) {
        (self.at, self.before)
    }

    /// Returns the connection on which the slice was charged, if that was certain.
    pub(super) fn connection(&self) -> Option<u64> {
        self.connection
    }
}

/// The unspent rest of a slice that expired.
pub(super) struct Leftover {
    pub(super) hit: ScriptHit,
    pub(super) at: Timestamp,
    pub(super) before: Before,
    /// The connection on which the slice was charged, if that was certain.
    pub(super) connection: Option<u64>,
}

impl Lease {
    pub(super) fn new(hit: ScriptHit, horizon: u64, now: Timestamp) -> Self {
        Self {
            hit,
            grants: SmallVec::new(),
            horizon,
            since: now,
            demand: 0,
            demand_before: 0,
            exhausted: None,
            shortages: 0,
            last_short: 0,
            renewing: None,
            resets: 0,
            reset_at: Timestamp::EPOCH,
            owed_at: Timestamp::EPOCH,
            holders: 0,
            store_left: 0,
            full_at: now,
            withdrawn: false,
        }
    }

    pub(super) fn is_withdrawn(&self) -> bool {
        self.withdrawn
    }

    pub(super) fn renewal(&self) -> Option<&Arc<Semaphore>> {
        self.renewing.as_ref()
    }

    /// Returns whether a slice has enough units.
    pub(super) fn can_spend(&self, cost: u64, now: Timestamp) -> bool {
        self.grants.iter().any(|grant| grant.can_spend(cost, now))
    }

    /// Returns the units left in each slice that may still be spent.
    pub(super) fn units_held(&self, now: Timestamp) -> impl Iterator<Item = u64> {
        self.grants.iter().filter(move |grant| grant.can_spend(1, now)).map(|grant| grant.left)
    }

    /// Takes units from a slice, if one has enough.
    pub(super) fn spend(&mut self, cost: u64, now: Timestamp) -> Option<SliceUnits> {
        let grant = self.grants.iter_mut().find(|grant| grant.can_spend(cost, now))?;
        grant.left -= cost;
        let Grant { at, until, before, connection, .. } = *grant;
        Some(SliceUnits { at, until, before, connection, resets: self.resets })
    }

    /// Counts a request that holds units. The lease is kept until it releases them.
    pub(super) fn hold(&mut self) {
        self.holders += 1;
    }

    /// Ends a hold: the request keeps its units.
    pub(super) fn keep(&mut self) {
        self.holders = self.holders.saturating_sub(1);
    }

    /// Puts held units back into their slice. If that has expired, they are returned to the store with the next sweep.
    pub(super) fn give_back(&mut self, units: u64, held: SliceUnits) {
        self.holders = self.holders.saturating_sub(1);
        self.demand = self.demand.saturating_sub(units);
        match self.grants.iter_mut().find(|grant| grant.at == held.at) {
            Some(grant) => grant.left += units,
            // The slice was dropped by a reset.
            None if held.resets != self.resets => {}
            None => {
                let until = if self.withdrawn { Timestamp::EPOCH } else { held.until };
                let SliceUnits { at, before, connection, .. } = held;
                self.grants.push(Grant { units, left: units, until, at, before, connection });
            }
        }
    }

    /// Puts the units of a request that was admitted back into their slice. Returns false if nothing is spent from that
    /// slice any more: then they belong to the store. After a reset they are dropped.
    pub(super) fn refund(&mut self, units: u64, held: SliceUnits, now: Timestamp) -> bool {
        let grant = self.grants.iter_mut().find(|grant| grant.at == held.at && grant.until > now);
        match grant {
            Some(grant) => grant.left += units,
            None if held.resets != self.resets => {}
            None => return false,
        }
        true
    }

    /// Adds a slice, and ends the renewal: requests that wait for it try again. `short` is a cost for which the store
    /// has no units, or soon will have none, with the time of its reply.
    pub(super) fn renewed(&mut self, granted: Option<Granted>, short: Option<(u64, Timestamp)>) {
        let units = granted.as_ref().map_or(0, |granted| granted.grant.units);
        if let Some(Granted { mut grant, store_left, full_at }) = granted
            && grant.at > self.reset_at
        {
            if self.withdrawn || grant.at <= self.owed_at {
                grant.until = Timestamp::EPOCH;
            }
            self.grants.push(grant);
            (self.store_left, self.full_at) = (store_left, full_at);
        }
        if short.is_some() {
            self.shortages = (self.shortages + 1).min(MAX_DOUBLINGS + 1);
            self.last_short = units;
        } else if units > 0 {
            (self.shortages, self.last_short) = (0, 0);
        }
        self.exhausted = short.map(|(cost, at)| (cost, at.saturating_add(self.pause())));
        if let Some(renewal) = self.renewing.take() {
            renewal.close();
        }
    }

    /// Returns the pause after a shortage. Jitter keeps nodes from renewing at the same time.
    fn pause(&self) -> Duration {
        let pause = (self.horizon / FIRST_PAUSE) << self.shortages.saturating_sub(1);
        // Between half and one and a half of two thirds: up to the pause itself.
        jittered(Duration::from_micros(pause) * 2 / 3)
    }

    /// Removes slices that have expired, or all of them. Returns whether the lease is still in use.
    pub(super) fn sweep(&mut self, now: Timestamp, all: bool, leftovers: &mut Vec<Leftover>) -> bool {
        let Self { grants, hit, .. } = self;
        grants.retain(|grant| {
            let dead = all || grant.until <= now;
            if dead && grant.left > 0 {
                // The refill pays for the spent units first.
                let before = hit.terms.compiled.before_rest(grant.before, grant.units.saturating_sub(grant.left));
                let hit = ScriptHit { cost: grant.left, ..hit.clone() };
                leftovers.push(Leftover { hit, at: grant.at, before, connection: grant.connection });
            }
            !dead && grant.left > 0
        });
        self.count(0, now);
        let is_used = self.renewing.is_some() || self.holders > 0 || !self.grants.is_empty();
        is_used || (self.expected_demand() > 0 && !self.withdrawn)
    }

    /// Drops all slices. A slice that is being requested is kept.
    pub(super) fn drop_slices(&mut self) {
        self.drop_charged_until(Timestamp::MAX);
    }

    /// Drops the slices of a key that was reset at that time by the store's clock: the reset removed their charges. If
    /// the time is unknown, drops all of them, and the one that is being requested.
    pub(super) fn forget(&mut self, reset_at: Option<Timestamp>) {
        let reset_at = reset_at.unwrap_or(Timestamp::MAX);
        self.reset_at = self.reset_at.max(reset_at);
        self.drop_charged_until(reset_at);
    }

    /// Keeps the slices for spending, but never gives their rest back: a reset may have been missed.
    pub(super) fn subscription_lost(&mut self) {
        self.grants.iter_mut().for_each(|grant| grant.connection = None);
        self.reset_at = Timestamp::MAX;
        self.resets += 1;
    }

    fn drop_charged_until(&mut self, reset_at: Timestamp) {
        self.grants.retain(|grant| grant.at > reset_at);
        self.exhausted = None;
        (self.shortages, self.last_short) = (0, 0);
        self.resets += 1;
    }

    /// Ends all spending from this lease. The next sweep gives the rest back.
    pub(super) fn withdraw(&mut self) {
        self.withdrawn = true;
        self.grants.iter_mut().for_each(|grant| grant.until = Timestamp::EPOCH);
    }

    /// Ends spending from the slices of a key that owes units since that time, by the store's clock. The next sweep gives
    /// their rest back.
    pub(super) fn owes_since(&mut self, at: Timestamp) {
        self.owed_at = self.owed_at.max(at);
        let spent_before = self.grants.iter_mut().filter(|grant| grant.at <= at);
        spent_before.for_each(|grant| grant.until = Timestamp::EPOCH);
    }

    /// Counts requested units as demand.
    pub(super) fn count(&mut self, units: u64, now: Timestamp) {
        let passed = now.as_micros().saturating_sub(self.since.as_micros());
        if passed >= self.horizon {
            self.demand_before = if passed >= 2 * self.horizon { 0 } else { self.demand };
            (self.demand, self.since) = (0, now);
        }
        self.demand = self.demand.saturating_add(units);
    }

    /// Returns how long no slice is requested for this cost, in microseconds.
    pub(super) fn exhausted_for(&self, cost: u64, now: Timestamp) -> u64 {
        match self.exhausted {
            Some((refused, until)) if cost >= refused => until.as_micros().saturating_sub(now.as_micros()),
            _ => 0,
        }
    }

    /// Returns the units that a horizon is likely to need.
    pub(super) fn expected_demand(&self) -> u64 {
        self.demand.max(self.demand_before)
    }

    pub(super) fn left(&self, now: Timestamp) -> u64 {
        self.grants.iter().filter(|grant| grant.until > now).map(|grant| grant.left).sum()
    }

    /// Returns whether the next slice should be requested before this one is spent.
    pub(super) fn is_low(&self, cost: u64, quota: u64, now: Timestamp) -> bool {
        self.left(now) < self.expected_demand().min(quota / SHARE) / LOW
            && self.renewing.is_none()
            && self.exhausted_for(cost, now) == 0
    }

    /// Returns the rest of the quota, here and at the store as of its last reply, and the time until the quota is full.
    pub(super) fn remaining(&self, now: Timestamp) -> (u64, u64) {
        let reset_after = self.full_at.as_micros().saturating_sub(now.as_micros());
        (self.left(now).saturating_add(self.store_left), reset_after)
    }

    pub(super) fn begin_renewing(&mut self, cost: u64, quota: u64, now: Timestamp) -> SliceRequest {
        self.renewing = Some(Arc::new(Semaphore::new(0)));
        // The slice will be charged after all resets received so far.
        self.reset_at = Timestamp::EPOCH;
        let (covered, of) = COVERED;
        let expected_demand = (self.expected_demand().saturating_mul(covered) / of).min(quota / SHARE);
        let most = expected_demand.saturating_sub(self.left(now)).max(cost);
        SliceRequest { most, least: cost, expected: self.last_short }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::script::Terms;
    use crate::{FixedWindow, HOUR, Limit};

    const NOW: Timestamp = Timestamp::EPOCH;

    fn lease() -> Lease {
        let limit = Limit::new("l", FixedWindow::new(100, HOUR)).unwrap();
        let terms = Arc::new(Terms::new(limit.compiled(), 100, Vec::new()));
        Lease::new(ScriptHit { terms, siblings: Arc::from([]), name: Arc::from(&b"key"[..]), cost: 1 }, 200_000, NOW)
    }

    /// A slice that was charged at that time by the store's clock.
    fn charged_at(micros: u64) -> Option<Granted> {
        let (at, until) = (Timestamp::from_micros(micros), Timestamp::MAX);
        let grant = Grant { units: 10, left: 10, until, at, before: Before(0, 0), connection: Some(1) };
        Some(Granted { grant, store_left: 0, full_at: NOW })
    }

    fn reset_at(micros: u64) -> Option<Timestamp> {
        Some(Timestamp::from_micros(micros))
    }

    #[test]
    fn a_reset_keeps_the_slice_that_was_charged_after_it() {
        // The slice is in flight when the key is reset, or is requested before the reset is confirmed.
        for is_answered_first in [true, false] {
            for (charged, is_kept) in [(29, false), (30, false), (31, true)] {
                let mut lease = lease();
                lease.drop_slices();
                let _ = lease.begin_renewing(1, 100, NOW);
                if is_answered_first {
                    lease.renewed(charged_at(charged), None);
                    lease.forget(reset_at(30));
                } else {
                    lease.forget(reset_at(30));
                    lease.renewed(charged_at(charged), None);
                }
                assert_eq!(lease.can_spend(1, NOW), is_kept, "charged at {charged}");
            }
        }
    }

    #[test]
    fn nothing_is_spent_from_slices_that_were_charged_before_a_debt() {
        let mut lease = lease();
        lease.renewed(charged_at(20), None);
        let _ = lease.begin_renewing(1, 100, NOW);
        lease.owes_since(Timestamp::from_micros(30));
        assert!(!lease.can_spend(1, NOW));
        // It was charged before the debt, and is received later.
        lease.renewed(charged_at(29), None);
        assert!(!lease.can_spend(1, NOW));
        let mut leftovers = Vec::new();
        let _ = lease.sweep(NOW, false, &mut leftovers);
        assert_eq!(leftovers.len(), 2, "both are given back");
        lease.renewed(charged_at(31), None);
        assert!(lease.can_spend(1, NOW));
    }

    #[test]
    fn a_reset_at_an_unknown_time_drops_the_slice_on_its_way() {
        let mut lease = lease();
        let _ = lease.begin_renewing(1, 100, NOW);
        lease.forget(None);
        lease.renewed(charged_at(50), None);
        assert!(!lease.can_spend(1, NOW));
        // The next one is charged after the reset, whatever the store's clock shows.
        let _ = lease.begin_renewing(1, 100, NOW);
        lease.renewed(charged_at(20), None);
        assert!(lease.can_spend(1, NOW));
    }

    #[test]
    fn units_held_across_a_reset_are_not_given_back_to_the_store() {
        let mut lease = lease();
        lease.renewed(charged_at(20), None);
        let held = lease.spend(1, NOW).unwrap();
        lease.forget(reset_at(30));
        lease.give_back(1, held);
        let mut leftovers = Vec::new();
        let _ = lease.sweep(NOW, true, &mut leftovers);
        assert!(leftovers.is_empty());
    }
}
