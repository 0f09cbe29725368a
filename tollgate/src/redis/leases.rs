//! Slices of a busy key's quota, taken in advance and spent here: see `algorithm/leased.rs` for why that admits
//! nothing too much.
//!
//! A key is leased once it is busy: a quiet one is decided by the store, one trip each. A slice is sized by what
//! was asked of the key lately, lives for a horizon counted by this node's clock from before it was asked for,
//! and is renewed before it runs out. What is left when it dies is given back. If this node dies, what it had
//! taken is missing until the limit itself gives it back: at most one slice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::{Notify, Semaphore};

use super::script::{Ask, Terms};
use crate::units::Timestamp;

/// Keys leased at once. Beyond that the store decides.
const MOST: usize = 16_384;
const SHARDS: usize = 16;
/// Units asked for within a horizon before a key is worth a slice.
const BUSY: u64 = 4;
/// A slice is at most this part of the quota, so that one node does not take all.
const SHARE: u64 = 4;
/// When the store has nothing, it is asked again after this part of a horizon: what comes back meanwhile is then
/// fetched at once, instead of unit by unit.
const DRY: u64 = 10;
/// How often the dead slices are looked for.
pub(super) const SWEEP_EVERY: Duration = Duration::from_millis(50);

/// Of each name, a lease for every set of numbers by which it is asked for: nearly always one.
type ByName = HashMap<Arc<[u8]>, SmallVec<[Lease; 1]>, ahash::RandomState>;

pub(super) struct Leases {
    shards: [Mutex<ByName>; SHARDS],
    hasher: ahash::RandomState,
    /// Rung when there is a lease where there was none, for the one who looks after them.
    taken: Notify,
}

/// What this node has of one key. Times are by its own clock, but for those of grants.
struct Lease {
    /// Oldest first.
    grants: SmallVec<[Grant; 2]>,
    ask: Ask,
    horizon: u64,
    /// Units asked for since then, and in the horizon before.
    since: Timestamp,
    demand: u64,
    demand_before: u64,
    /// The store had nothing for that cost: not asked again before then.
    dry: Option<(u64, Timestamp)>,
    /// Closed when the renewal ends.
    renewing: Option<Arc<Semaphore>>,
    /// How often the key was reset: what was charged before a reset is not there any more.
    resets: u64,
    /// The limit was changed: nothing of it is spent any more.
    withdrawn: bool,
}

struct Grant {
    left: u64,
    until: Timestamp,
    /// When it was charged, by the store's clock.
    at: Timestamp,
}

/// What to do with a request.
pub(super) enum Next {
    /// It was spent from a slice; so much is left. Renew it meanwhile if told how much to ask for.
    Spent { left: u64, renew: Option<Wish> },
    /// Ask the store for a slice.
    Renew(Wish),
    /// Someone is asking for one.
    Wait(Arc<Semaphore>),
    /// The store had nothing a moment ago; it is asked again in so many microseconds.
    Dry { wait: u64 },
    /// Let the store decide.
    Exact,
}

/// A slice to ask for: the most, and the least that helps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) most: u64,
    pub(super) least: u64,
    /// How often the key had been reset when it was wished for.
    pub(super) resets: u64,
}

impl Wish {
    /// What to try, the largest first.
    pub(super) fn choices(self) -> SmallVec<[u64; 8]> {
        let halves = std::iter::successors(Some(self.most), |units| Some(units / 2));
        let mut choices: SmallVec<[u64; 8]> = halves.take(7).take_while(|units| *units > self.least).collect();
        choices.push(self.least);
        choices
    }
}

/// What is left of a dead slice.
pub(super) struct Leftover {
    pub(super) ask: Ask,
    pub(super) at: Timestamp,
}

impl Leases {
    pub(super) fn new() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: ahash::RandomState::new(),
            taken: Notify::new(),
        }
    }

    fn shard(&self, name: &[u8]) -> MutexGuard<'_, ByName> {
        let shard = &self.shards[self.hasher.hash_one(name) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spends from a slice, or says what to do instead.
    pub(super) fn spend(&self, ask: &Ask, quota: u64, horizon: u64, now: Timestamp, first_try: bool) -> Next {
        let mut shard = self.shard(&ask.name);
        if find(&mut shard, ask).is_none() {
            if shard.len() >= MOST / SHARDS {
                return Next::Exact;
            }
            shard.entry(ask.name.clone()).or_default().push(Lease::new(ask.clone(), horizon, now));
            self.taken.notify_one();
        }
        let Some(lease) = find(&mut shard, ask).filter(|lease| !lease.withdrawn) else { return Next::Exact };
        if first_try {
            lease.count(ask.cost.min(quota), now);
        }
        if let Some(grant) = lease.grants.iter_mut().find(|grant| grant.until > now && grant.left >= ask.cost) {
            grant.left -= ask.cost;
            let left = lease.left(now);
            let low = left < lease.wanted().min(quota / SHARE) / 2
                && lease.renewing.is_none()
                && lease.dry_for(ask.cost, now) == 0;
            let renew = low.then(|| lease.begin_renewing(ask.cost, left, quota));
            return Next::Spent { left, renew };
        }
        if let Some(renewal) = &lease.renewing {
            return Next::Wait(renewal.clone());
        }
        if lease.wanted() < BUSY || ask.cost > quota / SHARE {
            return Next::Exact;
        }
        let wait = lease.dry_for(ask.cost, now);
        if wait > 0 {
            return Next::Dry { wait };
        }
        let left = lease.left(now);
        Next::Renew(lease.begin_renewing(ask.cost, left, quota))
    }

    /// A slice was granted: of so many units, charged at `at` by the store's clock, to be spent until then. Or
    /// it was not, not even so many units, as of a moment. Whatever came of it, those who wait look again.
    pub(super) fn renewed(
        &self,
        ask: &Ask,
        resets: u64,
        granted: Option<(u64, Timestamp, Timestamp)>,
        refused: Option<(u64, Timestamp)>,
    ) {
        let mut shard = self.shard(&ask.name);
        let Some(lease) = find(&mut shard, ask) else { return };
        if let Some((units, at, until)) = granted
            && lease.resets == resets
        {
            let until = if lease.withdrawn { Timestamp::EPOCH } else { until };
            lease.grants.push(Grant { left: units, until, at });
        }
        lease.dry = refused.map(|(cost, at)| (cost, Timestamp::from_micros(at.as_micros() + lease.horizon / DRY)));
        if let Some(renewal) = lease.renewing.take() {
            renewal.close();
        }
    }

    /// Takes away slices that are dead, and keys that have been quiet for long; says what is left of them.
    pub(super) fn sweep(&self, now: Timestamp, all: bool) -> Vec<Leftover> {
        let mut leftovers = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|_, leases| {
                leases.retain(|lease| lease.sweep(now, all, &mut leftovers));
                !leases.is_empty()
            });
        }
        leftovers
    }

    /// The renewals that are under way.
    pub(super) fn renewals(&self) -> Vec<Arc<Semaphore>> {
        let shards = self.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner));
        let renewals = |shard: MutexGuard<'_, ByName>| -> Vec<_> {
            shard.values().flatten().filter_map(|lease| lease.renewing.clone()).collect()
        };
        shards.flat_map(renewals).collect()
    }

    /// Forgets what it has of a key, for a reset: the store forgets the charges.
    pub(super) fn forget(&self, name: &[u8]) {
        for lease in self.shard(name).get_mut(name).into_iter().flatten() {
            lease.grants.clear();
            lease.dry = None;
            lease.resets += 1;
        }
    }

    /// Lets nothing be spent any more but by these terms. What is left comes back with the next sweep.
    pub(super) fn withdraw_unless(&self, kept: impl Fn(&Arc<Terms>) -> bool) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for lease in shard.values_mut().flatten().filter(|lease| !kept(&lease.ask.terms)) {
                lease.withdrawn = true;
                lease.grants.iter_mut().for_each(|grant| grant.until = Timestamp::EPOCH);
            }
        }
    }

    /// Waits until there are leases.
    pub(super) async fn taken(&self) {
        self.taken.notified().await;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).is_empty())
    }
}

/// The lease of a key by those terms.
fn find<'a>(shard: &'a mut ByName, ask: &Ask) -> Option<&'a mut Lease> {
    shard.get_mut(&ask.name)?.iter_mut().find(|lease| Arc::ptr_eq(&lease.ask.terms, &ask.terms))
}

impl Lease {
    fn new(ask: Ask, horizon: u64, now: Timestamp) -> Self {
        Self {
            grants: SmallVec::new(),
            ask,
            horizon,
            since: now,
            demand: 0,
            demand_before: 0,
            dry: None,
            renewing: None,
            resets: 0,
            withdrawn: false,
        }
    }

    /// Takes away slices that are dead; says whether there is anything left to look after.
    fn sweep(&mut self, now: Timestamp, all: bool, leftovers: &mut Vec<Leftover>) -> bool {
        let Self { grants, ask, .. } = self;
        grants.retain(|grant| {
            let dead = all || grant.until <= now;
            if dead && grant.left > 0 {
                leftovers.push(Leftover { ask: Ask { cost: grant.left, ..ask.clone() }, at: grant.at });
            }
            !dead && grant.left > 0
        });
        self.count(0, now);
        self.renewing.is_some() || !self.grants.is_empty() || (self.wanted() > 0 && !self.withdrawn)
    }

    fn count(&mut self, units: u64, now: Timestamp) {
        let passed = now.as_micros().saturating_sub(self.since.as_micros());
        if passed >= self.horizon {
            self.demand_before = if passed >= 2 * self.horizon { 0 } else { self.demand };
            (self.demand, self.since) = (0, now);
        }
        self.demand = self.demand.saturating_add(units);
    }

    /// How long not to ask the store for such a cost.
    fn dry_for(&self, cost: u64, now: Timestamp) -> u64 {
        match self.dry {
            Some((refused, until)) if cost >= refused => until.as_micros().saturating_sub(now.as_micros()),
            _ => 0,
        }
    }

    /// What a horizon is likely to ask for.
    fn wanted(&self) -> u64 {
        self.demand.max(self.demand_before)
    }

    fn left(&self, now: Timestamp) -> u64 {
        self.grants.iter().filter(|grant| grant.until > now).map(|grant| grant.left).sum()
    }

    fn begin_renewing(&mut self, cost: u64, left: u64, quota: u64) -> Wish {
        self.renewing = Some(Arc::new(Semaphore::new(0)));
        // A fifth more, because who is busy often gets busier.
        let wanted = self.wanted().saturating_add(self.wanted() / 5).min(quota / SHARE);
        Wish { most: wanted.saturating_sub(left).max(cost), least: cost, resets: self.resets }
    }
}
