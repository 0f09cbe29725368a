//! The limiter: limits, a store and a clock in one handle.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::clock::{Clock, ManualClock, SystemClock};
use crate::decision::{AskedBy, Decision, Denied};
use crate::error::InvalidLimit;
use crate::key::Key;
use crate::limit::{Limit, LimitId};
use crate::reservation::{Reservation, Settlement};
use crate::store::memory::{Asked, MemoryStore};
use crate::units::Timestamp;

/// Memory for keys unless told otherwise: 512 MiB, room for some twenty million keys of a token bucket. It is
/// not taken before it is needed.
const DEFAULT_MAX_MEMORY: usize = 512 << 20;
/// Limits in one limiter: each takes 8 to 64 KiB before it has a single key, more with hundreds of segments.
const MAX_LIMITS: usize = 10_000;

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
    store: MemoryStore,
    clock: Clock,
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

type AllAsked = SmallVec<[Asked; 8]>;

impl Limiter {
    /// A limiter with one limit, a memory of 512 MiB at most and the system's clock.
    #[must_use]
    pub fn new(limit: Limit) -> Self {
        let built = Self::builder().limit(limit).build();
        built.expect("one valid limit fits the default memory")
    }

    /// A limiter with several limits, or with settings of its own.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder { limits: Vec::new(), max_memory: DEFAULT_MAX_MEMORY, clock: None }
    }

    /// Takes one unit of the key from every limit, or from none.
    #[inline]
    pub fn check<'k>(&self, key: impl Into<Key<'k>>) -> Decision {
        self.check_n(key, 1)
    }

    /// Takes `cost` units of the key from every limit, or from none.
    #[inline]
    pub fn check_n<'k>(&self, key: impl Into<Key<'k>>, cost: u64) -> Decision {
        let inner = &*self.0;
        if let [_] = &*inner.limits {
            let fingerprint = inner.store.fingerprint(key.into());
            // The processor reads its counter once all that went before is done, so not after a cache miss.
            let now = self.now();
            let asked = Asked { limit: LimitId(0), fingerprint, cost };
            return inner.store.decide_one(&inner.limits, asked, now);
        }
        self.check_several(key.into(), cost)
    }

    #[inline(never)]
    fn check_several(&self, key: Key<'_>, cost: u64) -> Decision {
        self.0.store.decide(&self.0.limits, &self.ask_all(key, cost), self.now())
    }

    /// What is left for the key, taking nothing.
    pub fn peek<'k>(&self, key: impl Into<Key<'k>>) -> Decision {
        self.look_n(key.into(), 0)
    }

    /// What [`Limiter::check_n`] would say, taking nothing.
    pub(crate) fn look_n(&self, key: Key<'_>, cost: u64) -> Decision {
        self.0.store.look(&self.0.limits, &self.ask_all(key, cost), self.now())
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
    pub fn decide_now(&self, hits: &[Hit<'_>]) -> Decision {
        let (inner, now) = (&*self.0, self.now());
        let decision = inner.store.decide(&inner.limits, &self.ask_hits(hits), now);
        Decision { asked: AskedBy::Hits, ..decision }
    }

    fn ask_hits(&self, hits: &[Hit<'_>]) -> AllAsked {
        let mut all = AllAsked::new();
        for hit in hits {
            let fingerprint = self.0.store.fingerprint(hit.key);
            // The same key twice asks for the sum.
            match all.iter_mut().find(|one| one.limit == hit.limit && one.fingerprint == fingerprint) {
                Some(same) => same.cost = same.cost.saturating_add(hit.cost),
                None => all.push(Asked { limit: hit.limit, fingerprint, cost: hit.cost }),
            }
        }
        all
    }

    /// Forgets all that the key has spent.
    pub fn reset<'k>(&self, key: impl Into<Key<'k>>) {
        for asked in self.ask_all(key.into(), 0) {
            self.0.store.reset(&self.0.limits, asked.limit, asked.fingerprint);
        }
    }

    /// Gives back what an allowed decision of [`check`](Self::check) on this key took. For decisions of
    /// [`decide_now`](Self::decide_now) there is [`refund_hits`](Self::refund_hits); here they give nothing.
    ///
    /// Only what is still owed comes back, so that quota is never minted: a window gives back while the charge
    /// still counts in it; a bucket gives back what has not been refilled since; a queue gives back nothing,
    /// because others were already told when to leave. Refund a decision once, and not after a
    /// [`reset`](Self::reset), which gave it back already.
    pub fn refund<'k>(&self, key: impl Into<Key<'k>>, decision: &Decision) {
        if decision.is_allowed() && decision.asked == AskedBy::Key {
            self.give_back(&self.ask_all(key.into(), decision.cost()), decision.at());
        }
    }

    /// Gives back what an allowed decision on these hits took, as [`Limiter::refund`] does.
    pub fn refund_hits(&self, hits: &[Hit<'_>], decision: &Decision) {
        if decision.is_allowed() && decision.asked == AskedBy::Hits {
            self.give_back(&self.ask_hits(hits), decision.at());
        }
    }

    /// Takes an estimate now, for a cost that is known only afterwards: see [`Limiter::settle`]. A reservation
    /// that is not settled in time keeps what it took.
    ///
    /// # Errors
    ///
    /// The denial, when the estimate does not fit.
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
        estimate: u64,
        expires_after: Duration,
    ) -> Result<Reservation, Denied> {
        let now = self.now();
        let asked = self.ask_all(key.into(), estimate);
        let decision = self.0.store.decide(&self.0.limits, &asked, now);
        if !decision.is_allowed() {
            return Err(Denied(decision));
        }
        Ok(Reservation { asked, decision, expires_at: now.saturating_add(expires_after) })
    }

    /// Brings a reservation to its actual cost: gives back what was too much, as far as [`Limiter::refund`]
    /// would, or takes what was too little, as far as there is any.
    pub fn settle(&self, reservation: Reservation, actual: u64) -> Settlement {
        let Reservation { mut asked, decision, expires_at } = reservation;
        if self.now() >= expires_at {
            return Settlement::Expired;
        }
        let reserved = decision.cost();
        if actual <= reserved {
            asked.iter_mut().for_each(|one| one.cost = reserved - actual);
            self.give_back(&asked, decision.at());
            return Settlement::Settled;
        }
        let missing = asked.iter().map(|one| self.take_up_to(*one, actual - reserved)).max();
        match missing.unwrap_or(0) {
            0 => Settlement::Settled,
            missing => Settlement::Short { missing },
        }
    }

    /// Takes what there is of a cost that has been spent already, and says how much there was not.
    fn take_up_to(&self, asked: Asked, cost: u64) -> u64 {
        let inner = &*self.0;
        loop {
            let now = self.now();
            let left = inner.store.look(&inner.limits, &[Asked { cost: 0, ..asked }], now).remaining().min(cost);
            let taken = inner.store.decide(&inner.limits, &[Asked { cost: left, ..asked }], now);
            // Someone else may have taken some meanwhile; each time round there is less to take, so it ends.
            if taken.is_allowed() {
                return cost - left;
            }
        }
    }

    fn give_back(&self, asked: &[Asked], charged_at: Timestamp) {
        let now = self.now();
        for one in asked {
            self.0.store.refund(&self.0.limits, *one, charged_at, now);
        }
    }

    /// The limit of that name.
    #[must_use]
    pub fn id(&self, name: &str) -> Option<LimitId> {
        let index = self.0.limits.iter().position(|limit| limit.name() == name)?;
        u32::try_from(index).ok().map(LimitId)
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

    /// All limits, in the order they were given.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits
    }

    /// Bytes taken for keys so far, of those allowed.
    #[must_use]
    pub fn memory_used(&self) -> usize {
        self.0.store.memory_used()
    }

    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    #[inline]
    fn ask_all(&self, key: Key<'_>, cost: u64) -> AllAsked {
        let fingerprint = self.0.store.fingerprint(key);
        let limits = 0..self.0.limits.len() as u32;
        limits.map(|index| Asked { limit: LimitId(index), fingerprint, cost }).collect()
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Limiter").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}

/// Puts a [`Limiter`] together.
#[derive(Clone, Debug)]
#[must_use]
pub struct LimiterBuilder {
    limits: Vec<Limit>,
    max_memory: usize,
    clock: Option<ManualClock>,
}

impl LimiterBuilder {
    /// Adds a limit. Names must differ.
    pub fn limit(mut self, limit: Limit) -> Self {
        self.limits.push(limit);
        self
    }

    /// Bounds the memory for keys, in bytes, for all limits together. A token bucket's key takes 23 to 46 bytes.
    ///
    /// When it is full of keys that are not at rest, those are judged as before, and keys that find no room
    /// share what one key may have, bucket by bucket. So an attack with invented keys takes no more memory and
    /// nothing from those who are there; honest newcomers are judged too strictly until it has aged out. A table
    /// grows by doubling, so up to half of the bound may stay unused.
    pub fn max_memory(mut self, bytes: usize) -> Self {
        self.max_memory = bytes;
        self
    }

    /// Tells the time by hand.
    pub fn clock(mut self, clock: ManualClock) -> Self {
        self.clock = Some(clock);
        self
    }

    /// The limiter.
    ///
    /// # Errors
    ///
    /// When there is no limit or more than 10 000, when two have the same name, or when the memory is too
    /// little for the first keys of each.
    pub fn build(self) -> Result<Limiter, InvalidLimit> {
        if self.limits.is_empty() {
            return Err(InvalidLimit::new("limits", "there is no limit".into(), "add one"));
        }
        if self.limits.len() > MAX_LIMITS {
            let problem = format!("{} limits are more than 10000", self.limits.len());
            return Err(InvalidLimit::new("limits", problem, "count by key rather than by limit"));
        }
        let mut names: Vec<&str> = self.limits.iter().map(Limit::name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let problem = format!("two limits are named `{}`", twice[0]);
            return Err(InvalidLimit::new("name", problem, "give each limit a name of its own"));
        }
        let store = MemoryStore::new(&self.limits, self.max_memory)?;
        let clock = self.clock.map_or_else(|| Clock::System(SystemClock::new()), Clock::Manual);
        Ok(Limiter(Arc::new(Inner { limits: self.limits.into(), store, clock })))
    }
}
