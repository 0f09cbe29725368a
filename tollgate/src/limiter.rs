//! The in-memory limiter: limits, a store and a clock in one handle.
//!
//! Deliberately not here: which limits apply to a request, which `rules` decides, and limits shared between processes,
//! which `redis` has.

mod builder;
pub(crate) mod hashed;
pub(crate) mod reservation;
mod snapshot;
#[cfg(test)]
mod wall_clock_tests;

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

pub use self::builder::LimiterBuilder;
use self::reservation::{Reservation, Settlement};
pub use self::snapshot::{RestoreError, Restored};
use crate::algorithm::{Algorithm, Charge};
use crate::clock::TimeSource;
use crate::decision::{Admission, Decision, Denied, Generation, InvalidHits, LimitId, Verdict};
use crate::error::InvalidLimit;
use crate::key::Key;
use crate::limit::Limit;
use crate::limit_set::{self, Checked, LimitSet};
use crate::open_charges::{Held, OpenCharges};
use crate::store::memory::{Charged, HashedHit, MemoryStore, Occupancy, Overflow, Positions};
use crate::units::Timestamp;

/// A rate limiter in this process's memory, with one limit or several.
///
/// Clones are cheap and share all state: give one to each thread or task. To share limits between processes, use
/// `RedisLimiter`, which has the same methods; code that works with either is generic over
/// [`RateLimiter`](crate::RateLimiter).
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
    /// Number of limits that apply to every key. They come first; variants and bans follow, and only hits use those.
    base_count: usize,
    /// The generation of the ids.
    generation: Generation,
    store: MemoryStore,
    clock: TimeSource,
    /// Charges that may still be given back. Successors share them, as they share the keys.
    open: Arc<OpenCharges>,
}

/// One limit, one key and a cost to count: see [`Limiter::decide_now`].
#[derive(Clone, Copy, Debug)]
pub struct Hit<'a> {
    limit: LimitId,
    key: Key<'a>,
    cost: u64,
}

impl<'a> Hit<'a> {
    /// Creates a hit that costs one unit.
    pub fn new(limit: LimitId, key: impl Into<Key<'a>>) -> Self {
        Self { limit, key: key.into(), cost: 1 }
    }

    #[cfg(feature = "redis")]
    pub(crate) fn parts(&self) -> (LimitId, Key<'a>, u64) {
        (self.limit, self.key, self.cost)
    }

    /// Sets the cost in units. A cost of 0 takes nothing: it only checks that the limit is not exceeded.
    #[must_use]
    pub const fn cost(self, cost: u64) -> Self {
        Self { cost, ..self }
    }
}

/// The hits of a request.
pub type HashedHits = SmallVec<[HashedHit; 8]>;

/// The hits of several checks, of which no two are on the same limit and key.
#[derive(Clone)]
pub struct CombinedHits<Hits, Hit> {
    /// The hits that charge their keys.
    pub hits: Hits,
    /// The same keys in other variants of their limits, at the same cost. The keys are charged once, under the variant
    /// that was first among the hits, and must not exceed the numbers of the others.
    pub variants: Vec<Hit>,
}

/// The place of a hit among the combined ones.
#[derive(Clone, Copy)]
pub struct Place {
    /// The position of the hit that charges its key.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only receipts of Redis need it"))]
    pub(crate) hit: usize,
    /// The position among the variants, if the key is charged under another variant.
    variant: Option<usize>,
}

impl Place {
    pub(crate) fn new(hit: usize, variant: Option<usize>) -> Self {
        Self { hit, variant }
    }

    /// Returns the position of the decision, in the decisions of `hits` hits followed by those of the variants.
    #[doc(hidden)]
    #[inline]
    pub fn decision(self, hits: usize) -> usize {
        self.variant.map_or(self.hit, |variant| hits + variant)
    }
}

impl Limiter {
    /// Creates a limiter with one limit, the system's clock and at most 512 MiB of memory for keys.
    ///
    /// Memory is allocated as keys arrive. See [`LimiterBuilder::max_memory`] for other bounds.
    #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
    #[must_use]
    pub fn new(limit: Limit) -> Self {
        let built = Self::builder().limit(limit).build();
        built.expect("one valid limit fits the default memory")
    }

    /// Starts to build a limiter with several limits or other settings.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder::default()
    }

    /// Returns a limiter with other limits for the same keys, with the same clock and memory.
    ///
    /// This limiter keeps working, and both count together. So you can replace one by the other while other threads
    /// use it.
    ///
    /// Spent quota stays spent, in units, whatever was changed: quota, rate, window, segments or algorithm. The state
    /// of a key is converted when the key is next used:
    ///
    /// - A bucket keeps its debt, which is refilled at the new rate.
    /// - A window keeps its count, which counts in the new window that contains the time of the change. A window that
    ///   was opened by a key's first request keeps its start, if it is still open under the new length.
    /// - Log entries and counter segments keep their times.
    /// - Between different algorithms, everything that the old one still counts is spent at the time of the change.
    ///
    /// A key that has spent more than the new quota has nothing left until enough has been refilled, so a change never
    /// admits extra requests: `docs/algorithms.md` has the exact bound. If a limit is removed and added again under the
    /// same name while its keys still have spent quota, the keys keep their state. Limits with new names start with
    /// full quotas.
    ///
    /// The state of a former configuration takes memory, within the bound, until all of its keys have their whole quota
    /// back. After many changes in a row it is converted at once, which takes about a microsecond per key.
    ///
    /// A [reservation](Self::reserve) is settled with the limits that took it, whichever limiter settles it. If
    /// limits were added, removed or moved, read [ids](LimitId) again from the new limiter.
    ///
    /// # Errors
    ///
    /// The same as [`LimiterBuilder::build`]; nothing changes then. If the memory is full, new limits get room for
    /// their first keys beyond the bound.
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
        let Checked { mut limits, base_count, generation } = limits.into().checked()?;
        let (wall_offset, clock) = (inner.clock.wall_offset(), inner.clock.clone());
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&wall_offset));
        let (store, open) = (inner.store.successor(&mut limits, self.now())?, inner.open.clone());
        Ok(Self(Arc::new(Inner { limits: limits.into(), base_count, generation, store, clock, open })))
    }

    /// Returns a limiter with other limits and separate keys, with the same clock and memory.
    #[cfg(feature = "redis")]
    pub(crate) fn with_other_keys(&self, limits: LimitSet) -> Result<Self, InvalidLimit> {
        let inner = &*self.0;
        let Checked { mut limits, base_count, generation } = limits.checked()?;
        let (wall_offset, clock) = (inner.clock.wall_offset(), inner.clock.clone());
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&wall_offset));
        let (store, open) = (inner.store.with_other_keys(&mut limits, self.now())?, Arc::default());
        Ok(Self(Arc::new(Inner { limits: limits.into(), base_count, generation, store, clock, open })))
    }

    /// Takes one unit of the key from every limit, or from none.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, MINUTE};
    ///
    /// let limiter = Limiter::new(Limit::new("login", FixedWindow::new(5, MINUTE))?);
    /// let decision = limiter.check("user:42");
    /// assert!(decision.is_allowed());
    /// assert_eq!(decision.remaining(), 4);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[inline]
    #[must_use = "ignoring the decision limits nothing"]
    pub fn check<'k>(&self, key: impl Into<Key<'k>>) -> Decision {
        self.check_n(key, 1)
    }

    /// Takes `cost` units of the key from every limit, or from none.
    #[inline]
    #[must_use = "ignoring the decision limits nothing"]
    pub fn check_n<'k>(&self, key: impl Into<Key<'k>>, cost: u64) -> Decision {
        let inner = &*self.0;
        if let [_] = &*inner.limits {
            let fingerprint = inner.store.fingerprint(key.into());
            // Read the clock before the table: the processor waits for earlier loads to finish before it reads its
            // counter.
            let now = self.now();
            return self.decide_one(HashedHit { limit: LimitId::new(0, inner.generation), fingerprint, cost }, now);
        }
        self.check_several(key.into(), cost)
    }

    #[inline(never)]
    fn check_several(&self, key: Key<'_>, cost: u64) -> Decision {
        self.decide_hashed(&self.hash_for_every_limit(key, cost))
    }

    /// Returns the quota that is left for the key, taking nothing.
    #[must_use]
    pub fn peek<'k>(&self, key: impl Into<Key<'k>>) -> Decision {
        self.peek_n(key.into(), 0)
    }

    /// Returns what [`Limiter::check_n`] would decide, taking nothing.
    pub(crate) fn peek_n(&self, key: Key<'_>, cost: u64) -> Decision {
        self.peek_hits(&self.hash_for_every_limit(key, cost), self.now())
    }

    /// Takes the cost of every hit, or nothing. Hits may name different limits and different keys.
    ///
    /// It never waits and needs no async runtime. Hits on the same limit and key are added up. If a hit has the id of
    /// another limiter, or if two hits are on different variants of a limit with the same key, the request is denied
    /// without a check: see [`Decision::invalid_hits`].
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
    #[must_use = "ignoring the decision limits nothing"]
    pub fn decide_now(&self, hits: &[Hit<'_>]) -> Decision {
        let mut hashed = HashedHits::new();
        match self.hash_hits(hits, &mut hashed) {
            Ok(()) => self.decide_hashed(&hashed),
            Err(mistake) => self.deny_invalid(mistake, hits),
        }
    }

    /// Returns the denial of a request with a mistake in its hits.
    #[cold]
    fn deny_invalid(&self, mistake: InvalidHits, hits: &[Hit<'_>]) -> Decision {
        let cost = hits.iter().map(|hit| hit.cost).max().unwrap_or(0);
        self.with_wall_time(Decision::invalid(mistake, cost, self.now()))
    }

    /// Hashes the key of a hit. A caller that gathers several hits must not include the same key twice.
    #[inline]
    #[doc(hidden)]
    pub fn hash_hit(&self, hit: &Hit<'_>) -> HashedHit {
        debug_assert!(hit.limit.is_of(self.0.generation), "rules and their limiter have the same ids");
        HashedHit { limit: hit.limit, fingerprint: self.0.store.fingerprint(hit.key), cost: hit.cost }
    }

    /// Decides one hit.
    #[inline(always)]
    #[doc(hidden)]
    pub fn decide_one_hashed(&self, hit: HashedHit) -> Decision {
        // Read the clock before the table: the processor waits for earlier loads to finish before it reads its counter.
        let now = self.now();
        self.decide_one(hit, now)
    }

    #[inline(always)]
    fn decide_one(&self, hit: HashedHit, now: Timestamp) -> Decision {
        let inner = &*self.0;
        if !inner.open.is_empty() {
            return self.decide_with_open(&[hit], now);
        }
        match inner.store.decide_one_fast(&inner.limits, hit, now) {
            Some(decision) => self.with_wall_time(decision),
            None => self.decide_one_slow(hit, now),
        }
    }

    /// Writes the whole decision itself, so that the fast path keeps its own in registers until it writes it.
    #[inline(never)]
    fn decide_one_slow(&self, hit: HashedHit, now: Timestamp) -> Decision {
        let inner = &*self.0;
        self.with_wall_time(inner.store.decide_one_slow(&inner.limits, hit, now))
    }

    #[doc(hidden)]
    #[inline]
    pub fn decide_hashed(&self, hits: &[HashedHit]) -> Decision {
        let inner = &*self.0;
        if !inner.open.is_empty() {
            return self.decide_with_open(hits, self.now());
        }
        self.with_wall_time(inner.store.decide(&inner.limits, hits, self.now()))
    }

    /// Hashes the keys of hits into `into`, which must be empty.
    fn hash_hits(&self, hits: &[Hit<'_>], into: &mut HashedHits) -> Result<(), InvalidHits> {
        let Inner { store, generation, .. } = &*self.0;
        if hits.iter().any(|hit| !hit.limit.is_of(*generation)) {
            return Err(InvalidHits::UnknownLimit);
        }
        let hashed = hits.iter().map(|hit| {
            let fingerprint = store.fingerprint(hit.key);
            HashedHit { limit: hit.limit, fingerprint, cost: hit.cost }
        });
        let variants = self.combine_hashed(hashed, into, |_| ());
        if variants.is_empty() { Ok(()) } else { Err(InvalidHits::TwoVariants) }
    }

    /// Combines hits into `all`, which must be empty: two on the same key count as one, with the sum of the costs.
    /// Returns the hits on other variants, and reports the place of each hit: see [`CombinedHits`].
    #[doc(hidden)]
    pub fn combine_hashed(
        &self,
        hits: impl Iterator<Item = HashedHit>,
        all: &mut HashedHits,
        mut place_of_next: impl FnMut(Place),
    ) -> Vec<HashedHit> {
        let store = &self.0.store;
        let (mut positions, mut variants) = (Positions::default(), Vec::new());
        for hit in hits {
            let is_same = |one: &HashedHit| {
                one.fingerprint == hit.fingerprint && store.identity(one.limit) == store.identity(hit.limit)
            };
            match positions.of(all, is_same, || (hit.fingerprint, store.identity(hit.limit))) {
                Some(same) => {
                    all[same].cost = all[same].cost.saturating_add(hit.cost);
                    let variant =
                        (all[same].limit != hit.limit).then(|| position_of_variant(&mut variants, (same, hit)));
                    place_of_next(Place::new(same, variant));
                }
                None => {
                    all.push(hit);
                    positions.added(all, |one| (one.fingerprint, store.identity(one.limit)));
                    place_of_next(Place::new(all.len() - 1, None));
                }
            }
        }
        variants.into_iter().map(|(charged, hit)| HashedHit { cost: all[charged].cost, ..hit }).collect()
    }

    /// Gives the key its whole quota back, in every limit.
    ///
    /// A key that was evicted for lack of memory ([`Overflow`]) gets a slot and its whole quota, until it is evicted
    /// again. If all keys near it have spent half of their quota or more, no slot is available and the reset has no
    /// effect.
    pub fn reset<'k>(&self, key: impl Into<Key<'k>>) {
        let now = self.now();
        for hit in self.hash_for_every_limit(key.into(), 0) {
            self.reset_at(hit, now);
        }
    }

    /// Takes `cost` units now, as [`check_n`](Self::check_n) does, and returns a reservation to correct the cost later.
    ///
    /// Use it for work whose cost is known only afterwards ([`settle`](Self::settle)) or that may fail
    /// ([`refund`](Self::refund)). A reservation that is not settled within `expires_after` keeps the estimate.
    ///
    /// # Errors
    ///
    /// Returns the denial if the cost exceeds the remaining quota.
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

    /// Takes the cost of every hit, or nothing, and returns a reservation: see [`reserve`](Self::reserve).
    ///
    /// # Errors
    ///
    /// Returns the denial if the cost of a hit exceeds its remaining quota.
    pub fn reserve_hits(&self, hits: &[Hit<'_>], expires_after: Duration) -> Result<Reservation, Denied> {
        let mut hashed = HashedHits::new();
        match self.hash_hits(hits, &mut hashed) {
            Ok(()) => self.reserve_hashed(hashed, expires_after),
            Err(mistake) => Err(Denied(self.deny_invalid(mistake, hits))),
        }
    }

    fn reserve_hashed(&self, hits: HashedHits, expires_after: Duration) -> Result<Reservation, Denied> {
        let decision = self.decide_hashed(&hits);
        if !decision.is_allowed() {
            return Err(Denied(decision));
        }
        let expires_at = decision.at.saturating_add(expires_after);
        let open = self.open(&hits, &decision, expires_at);
        Ok(Reservation { limiter: self.clone(), hits, decision, expires_at, open })
    }

    /// Corrects a reservation to its actual cost.
    ///
    /// A lower cost gives back the difference, as far as [`refund`](Self::refund) would. A higher cost is counted in full,
    /// now: units beyond the remaining quota are owed, and the key is denied until they have come back. If the reservation
    /// has several hits, each is corrected to this cost. If the limits have changed since, the limits that took the
    /// reservation settle it.
    ///
    /// ```
    /// use tollgate::{Limit, Limiter, Rate, SECOND, MINUTE, Settlement, TokenBucket};
    ///
    /// let limiter = Limiter::new(Limit::new("rows", TokenBucket::new(1000, Rate::per_second(100)))?);
    /// let reservation = limiter.reserve("ann", 10, MINUTE).expect("10 of 1000 fit");
    /// // … the query returns 5,000 rows …
    /// assert_eq!(limiter.settle(reservation, 5000), Settlement::Owed { units: 4000 });
    /// let denied = limiter.check("ann");
    /// assert!(denied.retry_after().unwrap() > 39 * SECOND);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn settle(&self, reservation: Reservation, actual: u64) -> Settlement {
        let Reservation { limiter, hits, decision, expires_at, open } = reservation;
        if limiter.now() >= expires_at {
            return Settlement::Expired;
        }
        limiter.settle_hashed(&hits, (decision.at, decision.wall_offset), actual, |hit| open.close(hit))
    }

    /// Gives back the units of a reservation.
    ///
    /// Only units that are still owed are given back, so a refund never creates quota:
    ///
    /// - A window gives back the charge while it still counts.
    /// - A bucket gives back the part that has not been refilled since.
    /// - A queue gives back nothing, because later requests already have their delays.
    /// - If the wall clock was stepped since the reservation, nothing is given back.
    ///
    /// After a [`reset`](Self::reset) of the key, which has already given the units back, nothing is given back. If the key
    /// was evicted for lack of memory ([`Overflow`]), the charge is subtracted from the estimate for evicted keys, if a slot
    /// is free.
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

    /// Corrects the cost that hits took at `at` to the actual cost. `wall_offset` is that of their decision. A hit that does
    /// not count any more, because its key was reset, gives nothing back.
    #[doc(hidden)]
    pub fn settle_hashed(
        &self,
        hits: &[HashedHit],
        (at, wall_offset): (Timestamp, i64),
        actual: u64,
        still_counts: impl Fn(usize) -> bool,
    ) -> Settlement {
        let surplus = hits.iter().enumerate().filter(|(index, hit)| still_counts(*index) && hit.cost > actual);
        let surplus: HashedHits = surplus.map(|(_, hit)| HashedHit { cost: hit.cost - actual, ..*hit }).collect();
        self.give_back(&surplus, at, wall_offset);
        let now = self.now();
        let excess = hits.iter().filter(|hit| hit.cost < actual);
        let charged = excess.map(|hit| self.charge_at(HashedHit { cost: actual - hit.cost, ..*hit }, now));
        charged.fold(Settlement::Settled, Settlement::worse)
    }

    /// Charges units that were spent already, whatever is left.
    pub(crate) fn charge_at(&self, hit: HashedHit, now: Timestamp) -> Settlement {
        let Charged { counted, owed } = self.0.store.charge(&self.0.limits, hit, now);
        match (hit.cost - counted, owed) {
            (0, 0) => Settlement::Settled,
            (0, units) => Settlement::Owed { units },
            (missing, _) => Settlement::Short { missing },
        }
    }

    /// Returns whether the key of a hit has less than its whole quota.
    #[doc(hidden)]
    pub fn has_spent(&self, hit: HashedHit) -> bool {
        let state = self.peek_hits(&[HashedHit { cost: 0, ..hit }], self.now());
        state.remaining() < state.quota()
    }

    /// Returns the microseconds that the wall clock is ahead.
    #[doc(hidden)]
    #[inline]
    pub fn wall_offset(&self) -> i64 {
        self.0.clock.wall_offset_micros()
    }

    /// Gives back the units that a hit took at `at`. `wall_offset` is that of the decision.
    #[cfg(feature = "redis")]
    pub(crate) fn give_back_hit(&self, hit: Hit<'_>, at: Timestamp, wall_offset: i64) {
        self.give_back(&[self.hash_own(hit)], at, wall_offset);
    }

    /// Charges the cost of a hit, which was spent already, whatever is left.
    #[cfg(feature = "redis")]
    pub(crate) fn charge_hit(&self, hit: Hit<'_>) -> Settlement {
        self.charge_at(self.hash_own(hit), self.now())
    }

    /// Hashes the key of a hit on a limit of this limiter.
    #[cfg(feature = "redis")]
    fn hash_own(&self, Hit { limit, key, cost }: Hit<'_>) -> HashedHit {
        HashedHit { limit, fingerprint: self.0.store.fingerprint(key), cost }
    }

    /// Returns the decision on one hit, taking nothing.
    #[cfg(feature = "redis")]
    pub(crate) fn peek_hit(&self, hit: Hit<'_>) -> Decision {
        self.peek_hits(&[self.hash_own(hit)], self.now())
    }

    /// Gives the key of a hit its whole quota back, in the limit of the hit.
    #[cfg(feature = "redis")]
    pub(crate) fn reset_hit(&self, hit: Hit<'_>) {
        self.reset_at(self.hash_own(hit), self.now());
    }

    /// Gives a key its whole quota back. What was open before counts nothing any more.
    fn reset_at(&self, hit: HashedHit, now: Timestamp) {
        self.0.store.reset(&self.0.limits, hit.limit, hit.fingerprint, now);
        self.0.open.close_all(self.open_key(hit));
    }

    fn give_back(&self, hits: &[HashedHit], at: Timestamp, wall_offset: i64) {
        let now = self.now();
        // The wall clock was stepped since, so the windows of the charge are unknown.
        if wall_offset != self.0.clock.wall_offset_micros() {
            return;
        }
        for hit in hits {
            self.0.store.refund(&self.0.limits, *hit, at, now);
        }
    }

    /// Records the charges of an allowed decision as open until then, or until the result is dropped.
    #[doc(hidden)]
    #[inline]
    pub fn open(&self, hits: &[HashedHit], decision: &Decision, until: Timestamp) -> Held {
        self.open_at(hits, decision.at, until)
    }

    /// Records charges that were made at `at` as open.
    #[doc(hidden)]
    #[inline]
    pub fn open_at(&self, hits: &[HashedHit], at: Timestamp, until: Timestamp) -> Held {
        let at = at.as_micros();
        let open = |hit: &HashedHit| match hit.cost {
            0 => None,
            cost => self.0.open.open(self.open_key(*hit), Charge { at, cost }, until.as_micros()),
        };
        Held::new(&self.0.open, hits.iter().map(open))
    }

    /// Identifies a key of a limit among open charges. Variants of a limit share their keys.
    #[doc(hidden)]
    #[inline]
    pub fn open_key(&self, hit: HashedHit) -> u64 {
        let family = self.0.store.identity(hit.limit).unwrap_or_default() as u64;
        hit.fingerprint.rotate_left(32) ^ family.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Decides while charges are open, which a denial looks at. Apart from the decision without any, which stays in registers
    /// until it is written.
    #[cold]
    #[inline(never)]
    fn decide_with_open(&self, hits: &[HashedHit], now: Timestamp) -> Decision {
        let inner = &*self.0;
        // A limit that counts denied requests changes with the decision.
        let changes = |hit: &HashedHit| inner.limits[hit.limit.index()].compiled().counts_denied();
        let before: SmallVec<[Decision; 4]> = match hits {
            [_, _, ..] if hits.iter().any(changes) => hits.iter().map(|hit| self.peek_alone(*hit, now)).collect(),
            _ => SmallVec::new(),
        };
        self.finish(hits, inner.store.decide(&inner.limits, hits, now), &before)
    }

    fn peek_alone(&self, hit: HashedHit, now: Timestamp) -> Decision {
        self.with_wall_time(self.0.store.peek(&self.0.limits, &[hit], now))
    }

    /// Completes a decision of the store: a denial may be for pending units. `before` has the decisions of the single limits,
    /// unless they are still the same.
    fn finish(&self, hits: &[HashedHit], decision: Decision, before: &[Decision]) -> Decision {
        if decision.is_allowed() || self.0.open.is_empty() {
            return self.with_wall_time(decision);
        }
        self.without_open(hits, decision, before)
    }

    /// Returns the denial of a request, as pending if all limits that deny it would admit it without open charges.
    #[cold]
    #[inline(never)]
    fn without_open(&self, hits: &[HashedHit], denied: Decision, before: &[Decision]) -> Decision {
        let denied = self.with_wall_time(denied);
        let own = |(position, hit): (usize, &HashedHit)| match (hits, denied.limit) {
            ([_], _) => denied,
            (_, Some(limit)) if limit == hit.limit => denied,
            _ => before.get(position).copied().unwrap_or_else(|| self.peek_alone(*hit, denied.at)),
        };
        let each = hits.iter().enumerate().map(|(position, hit)| (hit, own((position, hit))));
        let denials = each.filter(|(_, own)| !own.is_allowed());
        let denials = denials.map(|(hit, own)| self.pending(*hit, own));
        denials.reduce(Decision::most_restrictive).unwrap_or(denied)
    }

    /// Returns the denial of a hit, as pending if the open charges of its key cause it. The wait ends with the deadline of
    /// the first ones that suffice.
    fn pending(&self, hit: HashedHit, denied: Decision) -> Decision {
        let Admission::Denied { retry_after } = denied.verdict.admission else { return denied };
        let open = self.0.open.of(self.open_key(hit), denied.at.as_micros());
        let charges: SmallVec<[Charge; 8]> = open.iter().map(|open| open.charge).collect();
        let admits = |count: usize| self.0.store.admits_without(&self.0.limits, hit, denied.at, &charges[..count]);
        if charges.is_empty() || !admits(charges.len()) {
            return denied;
        }
        let (mut too_few, mut enough) = (0, charges.len());
        while enough - too_few > 1 {
            let middle = too_few.midpoint(enough);
            if admits(middle) { enough = middle } else { too_few = middle }
        }
        let until = open[enough - 1].until.saturating_sub(denied.at.as_micros());
        let admission = Admission::Pending { retry_after: retry_after.min(until) };
        Decision { verdict: Verdict { admission, ..denied.verdict }, ..denied }
    }

    /// Returns the decision on these hits, taking nothing.
    fn peek_hits(&self, hits: &[HashedHit], now: Timestamp) -> Decision {
        self.finish(hits, self.0.store.peek(&self.0.limits, hits, now), &[])
    }

    /// Adds the wall clock's time to a decision of the store.
    #[inline(always)]
    fn with_wall_time(&self, mut decision: Decision) -> Decision {
        decision.wall_offset = self.0.clock.wall_offset_micros();
        decision
    }

    /// Returns the id of the limit of that name.
    #[must_use]
    pub fn id(&self, name: &str) -> Option<LimitId> {
        let index = self.limits().iter().position(|limit| limit.name() == name)?;
        u32::try_from(index).ok().map(|position| LimitId::new(position, self.0.generation))
    }

    /// Returns the id of a limit's variant, by the names of both: see [`LimitSet::variant`].
    ///
    /// ```
    /// use tollgate::{FixedWindow, Hit, Limit, Limiter, MINUTE};
    ///
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("per-user", FixedWindow::new(10, MINUTE))?)
    ///     .variant("gold", Limit::new("per-user", FixedWindow::new(1000, MINUTE))?)
    ///     .build()?;
    /// let gold = limiter.variant("per-user", "gold").expect("the limit has this variant");
    /// assert_eq!(limiter.decide_now(&[Hit::new(gold, "ann")]).quota(), 1000);
    /// assert_eq!(limiter.variant("per-user", "silver"), None);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use]
    pub fn variant(&self, limit: &str, variant: &str) -> Option<LimitId> {
        self.find_variant(|one| one.name() == limit && one.variant() == Some(variant))
    }

    /// Returns the id of the ban of that name: see [`LimitSet::ban`].
    #[must_use]
    pub fn ban(&self, name: &str) -> Option<LimitId> {
        self.find_variant(|one| one.name() == name && matches!(one.algorithm(), Algorithm::Ban(_)))
    }

    fn find_variant(&self, is_it: impl Fn(&Limit) -> bool) -> Option<LimitId> {
        self.variants().find(|id| is_it(&self.0.limits[id.index()]))
    }

    /// Returns the ids of all [`limits`](Self::limits), in the same order. With many limits, this is faster than
    /// [`id`](Self::id) for each of them.
    pub fn ids(&self) -> impl Iterator<Item = LimitId> + use<> {
        limit_set::ids(0..self.0.base_count, self.0.generation)
    }

    /// Returns the ids of all variants and bans, in the order in which they were added: see [`LimitSet`].
    pub fn variants(&self) -> impl Iterator<Item = LimitId> + use<> {
        limit_set::ids(self.0.base_count..self.0.limits.len(), self.0.generation)
    }

    /// Returns the limit of an id, such as [`Decision::limit`], or `None` if the id comes from another limiter.
    #[must_use]
    pub fn limit(&self, id: LimitId) -> Option<&Limit> {
        self.0.limits.get(id.index()).filter(|_| self.has(id))
    }

    /// Returns whether an id was read from this limiter.
    fn has(&self, id: LimitId) -> bool {
        id.is_of(self.0.generation)
    }

    /// Returns the limits that apply to every key, in the order in which they were added.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits[..self.0.base_count]
    }

    /// Returns the memory that this limiter and its successors share.
    #[cfg(feature = "redis")]
    pub(crate) fn budget(&self) -> crate::budget::Budget {
        self.0.store.budget()
    }

    /// Returns the largest quota that a limit of this name has or had, and the configurations that may have counted its
    /// keys.
    #[cfg(feature = "redis")]
    pub(crate) fn configurations(&self, limit: LimitId) -> (u64, Vec<crate::algorithm::Compiled>) {
        self.0.store.family(limit).map(crate::store::memory::Family::configurations).unwrap_or_default()
    }

    /// Returns how often a limit and its variants have lacked memory for their keys, since a limit of this name was
    /// configured. Raise [`max_memory`](LimiterBuilder::max_memory) if these counts rise. They are 0 for an id of
    /// another limiter.
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
        if self.has(limit) { self.0.store.overflow(limit) } else { Overflow::default() }
    }

    /// Returns the memory for the keys of a limit and its variants. It takes constant time;
    /// [`live_keys`](Self::live_keys) visits all keys, and leaves out those that have their whole quota. An id of another
    /// limiter has no memory.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, HOUR};
    ///
    /// let limiter = Limiter::new(Limit::new("per-user", FixedWindow::new(100, HOUR))?);
    /// assert!(limiter.check("ann").is_allowed());
    /// let occupancy = limiter.occupancy(limiter.id("per-user").unwrap());
    /// assert_eq!(occupancy.keys, 1);
    /// assert!(occupancy.slots > 1 && occupancy.bytes <= limiter.memory_used());
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use]
    pub fn occupancy(&self, limit: LimitId) -> Occupancy {
        if self.has(limit) { self.0.store.occupancy(limit) } else { Occupancy::default() }
    }

    /// Returns the bytes allocated for keys, out of [`max_memory`](LimiterBuilder::max_memory).
    #[must_use]
    pub fn memory_used(&self) -> usize {
        self.0.store.memory_used()
    }

    /// Returns the bound of the memory for keys, in bytes: see [`LimiterBuilder::max_memory`]. If the machine has less
    /// memory, it is lowered when an allocation fails.
    #[must_use]
    pub fn max_memory(&self) -> usize {
        self.0.store.max_memory()
    }

    /// Returns a limiter with smaller tables for the same limits and keys, or `None` if there is not much to gain.
    ///
    /// A burst of keys makes tables grow, and they stay large after the keys have their quota back. The library starts
    /// no thread, so call this now and then if you expect bursts.
    ///
    /// Replace this limiter by the new one, as after [`with_limits`](Self::with_limits). Both count together exactly in
    /// the meantime. The next call, on the new limiter, frees the larger tables once this limiter and all of its clones
    /// are dropped. A call takes about 100 microseconds, or about 100 milliseconds per million keys of the burst if
    /// there are tables to replace or free. Other threads keep deciding and are not slowed down.
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
        let Inner { base_count, generation, .. } = *inner;
        let (limits, clock, open) = (inner.limits.clone(), inner.clock.clone(), inner.open.clone());
        Some(Self(Arc::new(Inner { limits, base_count, generation, store, clock, open })))
    }

    /// Counts the keys of a limit that do not have their whole quota. Keys of its variants are included; keys that
    /// found no memory are not. An id of another limiter has none.
    ///
    /// It visits the whole table of the limit, which takes some milliseconds for a million keys. While other threads
    /// decide, the count is an estimate.
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
        if self.has(limit) { self.0.store.live_keys(&self.0.limits, limit, self.now()) } else { 0 }
    }

    #[inline(always)]
    #[doc(hidden)]
    pub fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    #[inline]
    fn hash_for_every_limit(&self, key: Key<'_>, cost: u64) -> HashedHits {
        let fingerprint = self.0.store.fingerprint(key);
        limit_set::ids(0..self.0.base_count, self.0.generation)
            .map(|limit| HashedHit { limit, fingerprint, cost })
            .collect()
    }
}

/// Returns the position of a hit among the variants, and adds it if it is new. Each comes with the position of the hit that
/// charges its key.
#[cold]
fn position_of_variant(variants: &mut Vec<(usize, HashedHit)>, (charged, hit): (usize, HashedHit)) -> usize {
    let is_same = |(other, one): &(usize, HashedHit)| (*other, one.limit) == (charged, hit.limit);
    variants.iter().position(is_same).unwrap_or_else(|| {
        variants.push((charged, hit));
        variants.len() - 1
    })
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Limiter").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}
