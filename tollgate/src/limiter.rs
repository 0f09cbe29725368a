//! The limiter: limits, a store and a clock in one handle.

mod builder;
#[cfg(feature = "rules")]
mod hashed;
mod snapshot;
#[cfg(test)]
mod wall_clock_tests;

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

pub use self::builder::LimiterBuilder;
#[cfg(feature = "rules")]
pub(crate) use self::hashed::{FewHits, hits_of_limit};
pub use self::snapshot::{RestoreError, Restored};
use crate::clock::TimeSource;
use crate::decision::{Decision, Denied};
use crate::error::InvalidLimit;
use crate::key::Key;
use crate::limit::{Limit, LimitId};
use crate::limit_set::{self, Checked, LimitSet};
use crate::reservation::{Reservation, Settlement};
use crate::store::memory::{HashedHit, MemoryStore, Overflow, Positions};
use crate::units::Timestamp;

/// Decides requests by one limit or by several, in this process's memory.
///
/// Cloning it is cheap, and clones share everything: give one to each thread or task.
///
/// ```
/// use tollgate::{Limit, Limiter, Rate, TokenBucket};
///
/// let limiter = Limiter::new(Limit::new("per-user", TokenBucket::new(10, Rate::per_second(1)))?);
/// let decision = limiter.check("user:42");
/// assert!(decision.is_allowed());
/// assert_eq!(decision.remaining(), 9);
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone)]
pub struct Limiter(Arc<Inner>);

struct Inner {
    limits: Box<[Limit]>,
    /// So many of them, the first ones, are asked for every key. The others are asked only by hits that name them.
    base_count: usize,
    store: MemoryStore,
    clock: TimeSource,
}

/// A question about one limit: this key, at this cost.
#[derive(Clone, Copy, Debug)]
pub struct Hit<'a> {
    limit: LimitId,
    key: Key<'a>,
    cost: u64,
}

impl<'a> Hit<'a> {
    /// One unit.
    pub fn new(limit: LimitId, key: impl Into<Key<'a>>) -> Self {
        Self { limit, key: key.into(), cost: 1 }
    }

    #[cfg(feature = "redis")]
    pub(crate) fn parts(&self) -> (LimitId, Key<'a>, u64) {
        (self.limit, self.key, self.cost)
    }

    /// So many units; 0 only looks.
    #[must_use]
    pub const fn cost(self, cost: u64) -> Self {
        Self { cost, ..self }
    }
}

type HashedHits = SmallVec<[HashedHit; 8]>;

impl Limiter {
    /// A limiter with one limit, a memory of 512 MiB at most and the system's clock.
    #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
    #[must_use]
    pub fn new(limit: Limit) -> Self {
        let built = Self::builder().limit(limit).build();
        built.expect("one valid limit fits the default memory")
    }

    /// A limiter with several limits, or with settings of its own.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder::default()
    }

    /// A limiter with other limits that goes on where this one is: the same keys, clock and memory. This one works on
    /// as before, and both count together, so that they can be exchanged while requests are decided.
    ///
    /// What a key has spent stays spent, in units, under the new numbers, whatever was changed: quota, rate, window,
    /// segments or algorithm. It is converted when the key is next used:
    ///
    /// - Of a bucket, what is owed survives, and comes back at the new rate.
    /// - Of a window, its count survives and counts in the new window that contains the moment of the change. A window
    ///   that a key's first request opened keeps its opening, if it is still open by the new length.
    /// - Entries of a log keep their moments, and the segments of a counter theirs.
    /// - Between algorithms, all that counts by the old one counts as spent at the moment of the change.
    ///
    /// A key that has spent more than the new quota has nothing left until enough has come back. So a change never
    /// admits more: `docs/algorithms.md` has the exact bound. A limit that is removed and comes back under its name
    /// before its keys are at rest finds them as they were. Limits of other names start anew.
    ///
    /// The state of a former configuration takes memory, within the bound, until all of its keys are at rest. After
    /// many changes in a row it is converted at once, which takes about a microsecond for each key.
    ///
    /// A [reservation](Self::reserve) is settled by the limits that took it, whichever limiter settles it.
    ///
    /// # Errors
    ///
    /// As [`LimiterBuilder::build`]. Then nothing has changed. When the memory is spent, new limits get room for their
    /// first keys beyond it.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, MINUTE};
    ///
    /// let limiter = Limiter::new(Limit::new("per-user", FixedWindow::new(10, MINUTE))?);
    /// assert_eq!(limiter.check_n("ann", 6).remaining(), 4);
    /// let limiter = limiter.with_limits(vec![Limit::new("per-user", FixedWindow::new(100, MINUTE))?])?;
    /// assert_eq!(limiter.peek("ann").remaining(), 94);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn with_limits(&self, limits: impl Into<LimitSet>) -> Result<Self, InvalidLimit> {
        let inner = &*self.0;
        let Checked { mut limits, base_count } = limits.into().checked()?;
        let wall_offset = inner.clock.wall_offset();
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&wall_offset));
        let store = inner.store.successor(&mut limits, self.now())?;
        Ok(Self(Arc::new(Inner { limits: limits.into(), base_count, store, clock: inner.clock.clone() })))
    }

    /// A limiter with other limits and keys of its own, within the same memory and by the same clock.
    #[cfg(feature = "redis")]
    pub(crate) fn with_other_keys(&self, limits: LimitSet) -> Result<Self, InvalidLimit> {
        let inner = &*self.0;
        let Checked { mut limits, base_count } = limits.checked()?;
        let wall_offset = inner.clock.wall_offset();
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&wall_offset));
        let store = inner.store.with_other_keys(&mut limits, self.now())?;
        Ok(Self(Arc::new(Inner { limits: limits.into(), base_count, store, clock: inner.clock.clone() })))
    }

    /// Takes one unit of the key from every limit, or from none.
    #[inline]
    #[must_use = "a decision that is not looked at limits nothing"]
    pub fn check<'k>(&self, key: impl Into<Key<'k>>) -> Decision {
        self.check_n(key, 1)
    }

    /// Takes `cost` units of the key from every limit, or from none.
    #[inline]
    #[must_use = "a decision that is not looked at limits nothing"]
    pub fn check_n<'k>(&self, key: impl Into<Key<'k>>, cost: u64) -> Decision {
        let inner = &*self.0;
        if let [_] = &*inner.limits {
            let fingerprint = inner.store.fingerprint(key.into());
            // The processor reads its counter once all that went before is done, so not after a cache miss.
            let now = self.now();
            let hit = HashedHit { limit: LimitId(0), fingerprint, cost };
            return self.with_wall_time(inner.store.decide_one(&inner.limits, hit, now));
        }
        self.check_several(key.into(), cost)
    }

    #[inline(never)]
    fn check_several(&self, key: Key<'_>, cost: u64) -> Decision {
        self.with_wall_time(self.0.store.decide(&self.0.limits, &self.hash_for_every_limit(key, cost), self.now()))
    }

    /// What is left for the key, taking nothing.
    #[must_use]
    pub fn peek<'k>(&self, key: impl Into<Key<'k>>) -> Decision {
        self.peek_n(key.into(), 0)
    }

    /// What [`Limiter::check_n`] would say, taking nothing.
    pub(crate) fn peek_n(&self, key: Key<'_>, cost: u64) -> Decision {
        self.with_wall_time(self.0.store.peek(&self.0.limits, &self.hash_for_every_limit(key, cost), self.now()))
    }

    /// Takes what every hit asks for, or nothing: the hits may name different limits and different keys. No
    /// runtime is needed, and it never waits.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Hit, Limit, Limiter, MINUTE};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("global", FixedWindow::new(10_000, MINUTE))?)
    ///     .limit(Limit::new("per-user", FixedWindow::new(100, MINUTE))?)
    ///     .build()?;
    /// let (global, per_user) = (limiter.id("global").unwrap(), limiter.id("per-user").unwrap());
    /// let decision = limiter.decide_now(&[Hit::new(global, ""), Hit::new(per_user, "ann").cost(60)]);
    /// assert!(decision.is_allowed());
    /// assert_eq!(decision.limit(), Some(per_user));
    /// assert_eq!(decision.remaining(), 40);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use = "a decision that is not looked at limits nothing"]
    pub fn decide_now(&self, hits: &[Hit<'_>]) -> Decision {
        self.decide_hashed(&self.hash_hits(hits))
    }

    pub(crate) fn decide_hashed(&self, hits: &[HashedHit]) -> Decision {
        let inner = &*self.0;
        self.with_wall_time(inner.store.decide(&inner.limits, hits, self.now()))
    }

    fn hash_hits(&self, hits: &[Hit<'_>]) -> HashedHits {
        let store = &self.0.store;
        let (mut all, mut positions) = (HashedHits::new(), Positions::default());
        for hit in hits {
            let fingerprint = store.fingerprint(hit.key);
            // The same key twice asks for the sum.
            let is_same = |one: &HashedHit| {
                one.fingerprint == fingerprint && store.identity(one.limit) == store.identity(hit.limit)
            };
            match positions.of(&all, is_same, || (fingerprint, store.identity(hit.limit))) {
                Some(same) => all[same].cost = all[same].cost.saturating_add(hit.cost),
                None => {
                    all.push(HashedHit { limit: hit.limit, fingerprint, cost: hit.cost });
                    positions.added(&all, |one| (one.fingerprint, store.identity(one.limit)));
                }
            }
        }
        all
    }

    /// Forgets all that the key has spent.
    ///
    /// A key that was evicted for want of memory ([`Overflow`]) has a slot again and its whole quota, until it is evicted
    /// again. If every key near it has spent half of its quota or more, there is no slot to be had, and the reset has no
    /// effect.
    pub fn reset<'k>(&self, key: impl Into<Key<'k>>) {
        let now = self.now();
        for hit in self.hash_for_every_limit(key.into(), 0) {
            self.0.store.reset(&self.0.limits, hit.limit, hit.fingerprint, now);
        }
    }

    /// Takes `cost` units now, as [`check_n`](Self::check_n) does, to be given back or corrected later: an estimate of a
    /// cost that is known only afterwards, or the cost of work that may fail. See [`settle`](Self::settle) and
    /// [`refund`](Self::refund). A reservation that is not settled in time keeps what it took.
    ///
    /// # Errors
    ///
    /// The denial, when the cost does not fit.
    ///
    /// ```
    /// use tollgate::{Limit, Limiter, SlidingWindowLog, MINUTE};
    ///
    /// let limiter = Limiter::new(Limit::new("tokens", SlidingWindowLog::new(1000, MINUTE))?);
    /// let reservation = limiter.reserve("ann", 800, MINUTE).expect("800 of 1000 fit");
    /// // … the work turns out to cost 300 …
    /// limiter.settle(reservation, 300);
    /// assert_eq!(limiter.peek("ann").remaining(), 700);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn reserve<'k>(
        &self,
        key: impl Into<Key<'k>>,
        cost: u64,
        expires_after: Duration,
    ) -> Result<Reservation, Denied> {
        self.reserve_hashed(self.hash_for_every_limit(key.into(), cost), expires_after)
    }

    /// Takes what every hit asks for, or nothing, to be given back or corrected later: see [`reserve`](Self::reserve).
    ///
    /// # Errors
    ///
    /// The denial, when one of them does not fit.
    pub fn reserve_hits(&self, hits: &[Hit<'_>], expires_after: Duration) -> Result<Reservation, Denied> {
        self.reserve_hashed(self.hash_hits(hits), expires_after)
    }

    fn reserve_hashed(&self, hits: HashedHits, expires_after: Duration) -> Result<Reservation, Denied> {
        let now = self.now();
        let decision = self.with_wall_time(self.0.store.decide(&self.0.limits, &hits, now));
        if !decision.is_allowed() {
            return Err(Denied(decision));
        }
        Ok(Reservation { limiter: self.clone(), hits, decision, expires_at: now.saturating_add(expires_after) })
    }

    /// Brings a reservation to its actual cost: gives back what was too much, as far as [`refund`](Self::refund) would, or
    /// takes what was too little, as far as there is any. Of several hits, each is brought to this cost. If the limits have
    /// changed since, it is settled by those that took it.
    pub fn settle(&self, reservation: Reservation, actual: u64) -> Settlement {
        let Reservation { limiter, hits, decision, expires_at } = reservation;
        if limiter.now() >= expires_at {
            return Settlement::Expired;
        }
        limiter.settle_hashed(&hits, &decision, actual)
    }

    /// Gives back what a reservation took.
    ///
    /// Only what is still owed comes back, so that quota is never minted: a window gives back while the charge
    /// still counts in it; a bucket gives back what has not been refilled since; a queue gives back nothing,
    /// because later requests were already given their delays. If the wall clock was stepped since, nothing comes
    /// back. Do not refund after a [`reset`](Self::reset), which gave it back already. To a key that was evicted for want of
    /// memory ([`Overflow`]) the charge is given back out of what it is taken to have spent, if there is a slot for it.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, MINUTE};
    ///
    /// # fn send() -> Result<(), &'static str> { Err("no route") }
    /// let limiter = Limiter::new(Limit::new("mails", FixedWindow::new(10, MINUTE))?);
    /// if let Ok(reservation) = limiter.reserve("ann", 1, MINUTE) {
    ///     if send().is_err() {
    ///         limiter.refund(reservation);
    ///     }
    /// }
    /// assert_eq!(limiter.peek("ann").remaining(), 10);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn refund(&self, reservation: Reservation) -> Settlement {
        self.settle(reservation, 0)
    }

    /// Brings what a decision has taken to its actual cost, as far as that can be.
    pub(crate) fn settle_hashed(&self, hits: &[HashedHit], decision: &Decision, actual: u64) -> Settlement {
        let owed = hits.iter().filter(|hit| hit.cost > actual);
        let owed: HashedHits = owed.map(|hit| HashedHit { cost: hit.cost - actual, ..*hit }).collect();
        self.give_back(&owed, decision.at, decision.wall_offset);
        let short = hits.iter().filter(|hit| hit.cost < actual);
        let missing = short.map(|hit| self.take_up_to(*hit, actual - hit.cost)).max();
        match missing.unwrap_or(0) {
            0 => Settlement::Settled,
            missing => Settlement::Short { missing },
        }
    }

    /// Takes what there is of a cost that has been spent already, and says how much there was not.
    fn take_up_to(&self, hit: HashedHit, cost: u64) -> u64 {
        let inner = &*self.0;
        let mut left =
            inner.store.peek(&inner.limits, &[HashedHit { cost: 0, ..hit }], self.now()).remaining().min(cost);
        while left > 0 {
            let taken = inner.store.decide(&inner.limits, &[HashedHit { cost: left, ..hit }], self.now());
            if taken.is_allowed() {
                break;
            }
            // Another thread has taken some meanwhile, or there is no memory for the key. Each attempt is for less.
            left = Some(taken.remaining()).filter(|remaining| *remaining < left).unwrap_or(0);
        }
        cost - left
    }

    /// Gives back what a hit took at that time, once. `wall_offset` is that of the decision.
    #[cfg(feature = "redis")]
    pub(crate) fn give_back_hit(&self, hit: Hit<'_>, at: Timestamp, wall_offset: i64) {
        self.give_back(&self.hash_hits(&[hit]), at, wall_offset);
    }

    fn give_back(&self, hits: &[HashedHit], at: Timestamp, wall_offset: i64) {
        let now = self.now();
        // The wall clock was stepped since: nobody knows in which windows the charge was made.
        if wall_offset != self.0.clock.wall_offset_micros() {
            return;
        }
        for hit in hits {
            self.0.store.refund(&self.0.limits, *hit, at, now);
        }
    }

    /// Adds the wall clock's time to a decision of the store.
    #[inline(always)]
    fn with_wall_time(&self, mut decision: Decision) -> Decision {
        decision.wall_offset = self.0.clock.wall_offset_micros();
        decision
    }

    /// The limit of that name.
    #[must_use]
    pub fn id(&self, name: &str) -> Option<LimitId> {
        let index = self.limits().iter().position(|limit| limit.name() == name)?;
        u32::try_from(index).ok().map(LimitId)
    }

    /// The variants and bans, in the order they were given: see [`LimitSet`].
    pub fn variants(&self) -> impl Iterator<Item = LimitId> + use<> {
        limit_set::ids(self.0.base_count..self.0.limits.len())
    }

    /// The limit a decision speaks of.
    ///
    /// # Panics
    ///
    /// If the id comes from another limiter that has more limits.
    #[must_use]
    pub fn limit(&self, id: LimitId) -> &Limit {
        &self.0.limits[id.index()]
    }

    /// The limits that are asked for every key, in the order they were given.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits[..self.0.base_count]
    }

    /// Returns the memory that this limiter and its successors share.
    #[cfg(feature = "redis")]
    pub(crate) fn budget(&self) -> crate::budget::Budget {
        self.0.store.budget()
    }

    /// The largest quota that a limit has or had under this name, and the configurations that its keys may have been
    /// counted by.
    #[cfg(feature = "redis")]
    pub(crate) fn configurations(&self, limit: LimitId) -> (u64, Vec<crate::algorithm::Compiled>) {
        self.0.store.family(limit).map(crate::store::memory::Family::configurations).unwrap_or_default()
    }

    /// Returns how often a limit has lacked memory for its keys since it was configured. Raise
    /// [`max_memory`](LimiterBuilder::max_memory) if these counts rise.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, HOUR};
    ///
    /// let limiter = Limiter::new(Limit::new("per-user", FixedWindow::new(100, HOUR))?);
    /// assert!(limiter.check("ann").is_allowed());
    /// let overflow = limiter.overflow(limiter.id("per-user").unwrap());
    /// assert_eq!((overflow.evicted, overflow.denied), (0, 0));
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use]
    pub fn overflow(&self, limit: LimitId) -> Overflow {
        self.0.store.overflow(limit)
    }

    /// Bytes taken for keys so far, of those allowed.
    #[must_use]
    pub fn memory_used(&self) -> usize {
        self.0.store.memory_used()
    }

    /// Returns a limiter with smaller tables for the same limits and keys, if most of the memory of this one is empty: a
    /// burst of keys makes tables grow, and keys that are at rest leave them empty. `None` if there is not much to gain.
    ///
    /// Put the new limiter in the place of this one, as after [`with_limits`](Self::with_limits). Both count together
    /// meanwhile, exactly. The memory of the larger tables is freed by the next call, on the new limiter, once this one
    /// and all of its clones are dropped. A call takes some 100 microseconds, or some 100 milliseconds for each million keys
    /// of the burst if there is something to replace or to free. Requests are decided meanwhile, and decisions do not pay for
    /// this. The library starts no thread, so call it now and then if you expect bursts.
    ///
    /// A table is replaced if one with room for twice its keys takes at most a quarter of its memory, and if the memory
    /// for both is within the bound.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, ManualClock, MINUTE, Timestamp};
    ///
    /// let clock = ManualClock::at(Timestamp::EPOCH);
    /// let limit = Limit::new("per-user", FixedWindow::new(10, MINUTE))?;
    /// let mut limiter = Limiter::builder().limit(limit).clock(clock.clone()).build()?;
    /// for user in 0..100_000_u32 {
    ///     assert!(limiter.check(&user.to_le_bytes()).is_allowed());
    /// }
    /// let used = limiter.memory_used();
    /// clock.advance(MINUTE);
    /// while let Some(smaller) = limiter.compacted() {
    ///     limiter = smaller;
    /// }
    /// assert!(limiter.memory_used() < used / 100);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use = "the memory is freed once the new limiter has taken the place of this one"]
    pub fn compacted(&self) -> Option<Self> {
        let inner = &*self.0;
        let store = inner.store.compacted(self.now())?;
        let (limits, clock) = (inner.limits.clone(), inner.clock.clone());
        Some(Self(Arc::new(Inner { limits, base_count: inner.base_count, store, clock })))
    }

    /// Counts the keys of a limit that have spent something that is not back yet. Keys of its variants count too; keys
    /// for which there was no memory do not.
    ///
    /// It visits the whole table of the limit, some milliseconds for a million keys. While other threads decide, it is
    /// an estimate.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, ManualClock, MINUTE, Timestamp};
    ///
    /// let clock = ManualClock::at(Timestamp::EPOCH);
    /// let limit = Limit::new("per-user", FixedWindow::new(10, MINUTE))?;
    /// let limiter = Limiter::builder().limit(limit).clock(clock.clone()).build()?;
    /// let per_user = limiter.id("per-user").unwrap();
    /// assert!(limiter.check("ann").is_allowed() && limiter.check("bob").is_allowed());
    /// assert_eq!(limiter.live_keys(per_user), 2);
    /// clock.advance(MINUTE);
    /// assert_eq!(limiter.live_keys(per_user), 0);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use]
    pub fn live_keys(&self, limit: LimitId) -> usize {
        self.0.store.live_keys(&self.0.limits, limit, self.now())
    }

    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    #[inline]
    fn hash_for_every_limit(&self, key: Key<'_>, cost: u64) -> HashedHits {
        let fingerprint = self.0.store.fingerprint(key);
        limit_set::ids(0..self.0.base_count).map(|limit| HashedHit { limit, fingerprint, cost }).collect()
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Limiter").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}
