//! Decisions: the result of checking limits.
//!
//! Deliberately not here: HTTP statuses and headers, which `http` derives from a decision.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::units::Timestamp;

/// The result of a check: whether the request is allowed, which limit decided, and the remaining quota.
///
/// If several limits were checked, the decision describes the limit that denied, or otherwise the one with the smallest
/// share of its quota left.
///
/// ```
/// use tollgate::{FixedWindow, Limit, Limiter, MINUTE, Source};
///
/// let limiter = Limiter::new(Limit::new("login", FixedWindow::new(1, MINUTE).from_first_request())?);
/// let allowed = limiter.check("ann");
/// assert_eq!((allowed.is_allowed(), allowed.remaining(), allowed.quota()), (true, 0, 1));
/// let denied = limiter.check("ann");
/// assert!(!denied.is_allowed());
/// assert!(denied.retry_after().is_some_and(|wait| wait <= MINUTE));
/// assert_eq!(denied.source(), Source::Store);
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Copy, Debug, Eq)]
pub struct Decision {
    #[doc(hidden)]
    pub limit: Option<LimitId>,
    #[doc(hidden)]
    pub quota: u64,
    #[doc(hidden)]
    pub cost: u64,
    /// Time of the decision on the clock of the limiter or store that decided. Refunds refer to it.
    #[doc(hidden)]
    pub at: Timestamp,
    /// Microseconds by which the wall clock was ahead of that clock.
    #[doc(hidden)]
    pub wall_offset: i64,
    /// Read it with [`Decision::source`], which knows about denials for lack of room.
    #[doc(hidden)]
    pub source: Source,
    #[doc(hidden)]
    pub verdict: Verdict,
}

/// Identifies a limit, variant or ban of a [`Limiter`](crate::Limiter): see [`Limiter::id`](crate::Limiter::id),
/// [`Limiter::variant`](crate::Limiter::variant) and [`Limiter::ban`](crate::Limiter::ban).
///
/// An id is valid in every limiter whose limits, variants and bans have the same names in the same order: so it stays
/// valid when [`Limiter::with_limits`](crate::Limiter::with_limits) changes numbers. Elsewhere it identifies nothing. A
/// hit with such an id is denied (see [`InvalidHits`]), so it never counts in another limit by mistake. Read ids again after
/// each `with_limits` that may add, remove or move limits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LimitId {
    position: u32,
    generation: Generation,
}

impl LimitId {
    #[doc(hidden)]
    #[inline]
    pub const fn new(position: u32, generation: Generation) -> Self {
        Self { position, generation }
    }

    /// Returns the id of the first limit, for stores without a limiter.
    #[cfg(test)]
    pub(crate) fn first() -> Self {
        Self::new(0, Generation::of_names("first"))
    }

    /// Returns the position among the limits of its generation.
    #[inline(always)]
    #[doc(hidden)]
    pub fn index(self) -> usize {
        self.position as usize
    }

    /// Returns whether this is an id of the limits of that generation.
    #[inline(always)]
    pub(crate) fn is_of(self, generation: Generation) -> bool {
        self.generation == generation
    }
}

impl std::fmt::Debug for LimitId {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("LimitId").field(&self.position).finish()
    }
}

/// Limits whose ids are valid together: those with the same names in the same order, or those of a rule set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation(NonZeroU32);

impl Generation {
    /// Set in a hash of names, and not in the number of a rule set.
    const OF_NAMES: u32 = 1 << 31;

    /// Begins a generation that no other limits have, until there have been two billion.
    pub fn begin() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        loop {
            if let Some(number) = NonZeroU32::new(NEXT.fetch_add(1, Ordering::Relaxed) & !Self::OF_NAMES) {
                return Self(number);
            }
        }
    }

    /// Returns the generation of limits with these names. Other names have it by chance, with a probability of one in two
    /// billion.
    pub(crate) fn of_names(names: impl Hash) -> Self {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(names);
        Self(NonZeroU32::new(hash as u32 | Self::OF_NAMES).unwrap_or(NonZeroU32::MAX))
    }
}

/// The mistake in the hits of a request, which is then denied without a check: see [`Decision::invalid_hits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidHits {
    /// A hit has an id that is not of the limiter's limits: of another limiter, or of limits that were replaced.
    UnknownLimit,
    /// Two hits are on different variants of a limit, with the same key.
    TwoVariants,
}

impl std::fmt::Display for InvalidHits {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::UnknownLimit => {
                "a hit has the id of another limiter, or of limits that were replaced: read ids from the limiter that \
                 checks the hit, and again after `with_limits`"
            }
            Self::TwoVariants => {
                "two hits are on different variants of a limit, with the same key: choose one variant for each key"
            }
        })
    }
}

impl std::error::Error for InvalidHits {}

/// A denial as an error, returned by [`Decision::into_result`], [`Limiter::reserve`](crate::Limiter::reserve) and by
/// waits that would take too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied(pub(crate) Decision);

impl Denied {
    /// Returns the decision that denied the request.
    pub fn decision(&self) -> &Decision {
        &self.0
    }
}

impl std::fmt::Display for Denied {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.verdict.admission {
            Admission::Allowed { .. } => {
                write!(
                    out,
                    "rate limited: the wait in the queue would be {:?}, longer than allowed: retry later or allow a longer wait",
                    self.0.delay()
                )
            }
            Admission::Denied { retry_after } | Admission::NoRoom { retry_after } => {
                write!(out, "rate limited: retry after {:?}", Duration::from_micros(retry_after))
            }
            Admission::Pending { retry_after } => {
                let wait = Duration::from_micros(retry_after);
                write!(out, "rate limited: reserved units may be given back, retry after {wait:?} at the latest")
            }
            Admission::Invalid(mistake) => write!(out, "invalid hits: {mistake}"),
            Admission::NeverFits => out.write_str("rate limited: the cost exceeds the whole quota: use a lower cost"),
        }
    }
}

impl std::error::Error for Denied {}

/// The part of a limiter that made a decision.
///
/// In-memory limiters decide by their store, and by a shared quota while memory lacks. The other sources belong to limits
/// that processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The store that holds the key.
    Store,
    /// The quota that keys without a count of their own share, because
    /// [`max_memory`](crate::LimiterBuilder::max_memory) is used up. Such a denial says nothing about the key: other
    /// keys may have spent that quota.
    SharedQuota,
    /// The denial cache of this process: a denial that still holds.
    DenialCache,
    /// A lease of this process: a slice of the quota taken in advance.
    Lease,
    /// Limits in this process's memory, while the store fails.
    Local,
    /// The failure policy, while the store fails: allowed or denied without counting.
    Policy,
}

/// The decision of one limit on one request, without names. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the request is allowed.
    pub admission: Admission,
    /// The units that are left.
    pub remaining: u64,
    /// The time until the whole quota is available.
    pub reset_after: u64,
}

/// Whether a request is allowed, and the wait otherwise. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Allowed after this delay, which is zero except in a queue.
    Allowed {
        /// The delay.
        delay: u64,
    },
    /// Denied. The same request is allowed after this wait, unless other requests arrive first.
    Denied {
        /// The wait.
        retry_after: u64,
    },
    /// Denied only because of units that are reserved and not settled yet. The same request is allowed after this wait
    /// at the latest, when they are given back or have come back otherwise.
    Pending {
        /// The wait.
        retry_after: u64,
    },
    /// Denied for lack of room: the key has no slot, and other keys without one have spent the quota that they share.
    /// So this is not evidence against the key.
    NoRoom {
        /// The wait.
        retry_after: u64,
    },
    /// Denied, because the cost exceeds the whole quota. Waiting does not help.
    NeverFits,
    /// Denied without a check. Waiting does not help.
    Invalid(InvalidHits),
}

/// The reason of a denial: see [`Decision::reason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DenialReason {
    /// The quota is spent.
    Limited,
    /// Units that are reserved and not settled yet leave too little. They may be given back.
    Pending,
    /// The key has no memory of its own, and other keys have spent the quota that it shares with them.
    NoRoom,
    /// The cost exceeds the whole quota. Waiting does not help.
    NeverFits,
    /// The hits of the request have a mistake: see [`Decision::invalid_hits`].
    Invalid,
}

/// Decisions by two rule sets can be equal, although the ids of their limits are not.
impl PartialEq for Decision {
    fn eq(&self, other: &Self) -> bool {
        let Self { limit, quota, cost, at, wall_offset, source, verdict } = *self;
        limit.map(LimitId::index) == other.limit.map(LimitId::index)
            && (quota, cost, at, wall_offset) == (other.quota, other.cost, other.at, other.wall_offset)
            && (source, verdict) == (other.source, other.verdict)
    }
}

impl Decision {
    /// Returns whether the request is allowed.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.verdict.is_allowed()
    }

    /// Returns the decision if the request is allowed, and the denial as an error otherwise, for use with `?`.
    ///
    /// ```
    /// use tollgate::{Denied, Limiter};
    ///
    /// fn send(limiter: &Limiter, user: u64) -> Result<(), Denied> {
    ///     limiter.check(user).into_result()?;
    ///     // … send it …
    ///     Ok(())
    /// }
    /// # use tollgate::{FixedWindow, Limit, MINUTE};
    /// # let limiter = Limiter::new(Limit::new("per-user", FixedWindow::new(1, MINUTE)).unwrap());
    /// # assert!(send(&limiter, 42).is_ok());
    /// assert_eq!(send(&limiter, 42).unwrap_err().decision().remaining(), 0);
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the denial if the request is denied.
    pub fn into_result(self) -> Result<Self, Denied> {
        if self.is_allowed() { Ok(self) } else { Err(Denied(self)) }
    }

    /// Returns the id of the limit that decided, or `None` if no limit was checked.
    /// [`Limiter::limit`](crate::Limiter::limit) returns its name and numbers.
    #[must_use]
    pub fn limit(&self) -> Option<LimitId> {
        self.limit
    }

    /// Returns the whole quota of that limit: its capacity, or its count per window.
    #[must_use]
    pub fn quota(&self) -> u64 {
        self.quota
    }

    /// Returns the units that are left after this decision.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.verdict.remaining
    }

    /// Returns the time until the whole quota is back, if no other requests arrive.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        Duration::from_micros(self.verdict.reset_after)
    }

    /// Returns the time after which a denied request is allowed, unless other requests arrive first.
    ///
    /// The time is exact: a client that waits this long is allowed, and one that waits a microsecond less is not. Only
    /// [pending](Self::is_pending) units may be given back sooner.
    /// `None` if the request was allowed, or if its cost exceeds the whole quota, so that waiting does not help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.verdict.admission {
            Admission::Denied { retry_after }
            | Admission::Pending { retry_after }
            | Admission::NoRoom { retry_after } => Some(Duration::from_micros(retry_after)),
            Admission::Allowed { .. } | Admission::NeverFits | Admission::Invalid(_) => None,
        }
    }

    /// Returns the reason of a denial, or `None` if the request was allowed.
    #[must_use]
    pub fn reason(&self) -> Option<DenialReason> {
        match self.verdict.admission {
            Admission::Allowed { .. } => None,
            Admission::Denied { .. } => Some(DenialReason::Limited),
            Admission::Pending { .. } => Some(DenialReason::Pending),
            Admission::NoRoom { .. } => Some(DenialReason::NoRoom),
            Admission::NeverFits => Some(DenialReason::NeverFits),
            Admission::Invalid(_) => Some(DenialReason::Invalid),
        }
    }

    /// Returns whether only units that are reserved and not settled yet deny the request. They may be given back, so
    /// the denial does not say that the key has used up its quota.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.reason() == Some(DenialReason::Pending)
    }

    /// Returns the mistake in the hits, if the request was denied because of one. No limit was checked then.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Hit, InvalidHits, Limit, Limiter, MINUTE};
    ///
    /// let limiter = Limiter::new(Limit::new("per-user", FixedWindow::new(10, MINUTE))?);
    /// let former_id = limiter.id("per-user").unwrap();
    /// let limiter = limiter.with_limits(vec![Limit::new("global", FixedWindow::new(10, MINUTE))?])?;
    /// let denied = limiter.decide_now(&[Hit::new(former_id, "ann")]);
    /// assert_eq!(denied.invalid_hits(), Some(InvalidHits::UnknownLimit));
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use]
    pub fn invalid_hits(&self) -> Option<InvalidHits> {
        match self.verdict.admission {
            Admission::Invalid(mistake) => Some(mistake),
            _ => None,
        }
    }

    /// Returns the delay before an allowed request may proceed. It is zero except for a leaky bucket with a
    /// [queue](crate::LeakyBucket::queue).
    #[must_use]
    pub fn delay(&self) -> Duration {
        Duration::from_micros(self.verdict.delay())
    }

    /// Returns the part of the limiter that decided. A denial by [`Source::Policy`] means that the store fails, not
    /// that a limit is exceeded.
    #[must_use]
    pub fn source(&self) -> Source {
        match self.source {
            Source::Store if self.lacks_room() => Source::SharedQuota,
            source => source,
        }
    }

    /// Returns whether the request was denied for lack of room: its key has no slot, so the denial says nothing about
    /// the key, and is no reason for a strike.
    #[doc(hidden)]
    #[inline]
    pub fn lacks_room(&self) -> bool {
        matches!(self.verdict.admission, Admission::NoRoom { .. })
    }

    /// Returns the cost of the request in units.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns the time of the decision, by the wall clock.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at.offset_by(self.wall_offset)
    }
}

impl Verdict {
    pub(crate) fn is_allowed(&self) -> bool {
        matches!(self.admission, Admission::Allowed { .. })
    }

    /// Returns the wait of a denied request, or `u64::MAX` if waiting does not help.
    pub(crate) fn wait(&self) -> u64 {
        match self.admission {
            Admission::Allowed { .. } => 0,
            Admission::Denied { retry_after }
            | Admission::Pending { retry_after }
            | Admission::NoRoom { retry_after } => retry_after,
            Admission::NeverFits | Admission::Invalid(_) => u64::MAX,
        }
    }

    /// Returns whether this verdict is reported instead of `first`, both on the same request: a denial, the longer wait
    /// of two denials, or otherwise the smaller share of the quota left. Each comes with its quota.
    #[inline]
    pub(crate) fn takes_precedence(&self, quota: u64, (first, firsts_quota): (&Self, u64)) -> bool {
        match (first.is_allowed(), self.is_allowed()) {
            (true, false) => true,
            (false, true) => false,
            (false, false) => self.wait() > first.wait(),
            (true, true) => {
                u128::from(self.remaining) * u128::from(firsts_quota) < u128::from(first.remaining) * u128::from(quota)
            }
        }
    }

    /// Returns the delay of an allowed request.
    #[inline]
    pub(crate) fn delay(&self) -> u64 {
        match self.admission {
            Admission::Allowed { delay } => delay,
            Admission::Denied { .. }
            | Admission::Pending { .. }
            | Admission::NoRoom { .. }
            | Admission::NeverFits
            | Admission::Invalid(_) => 0,
        }
    }

    /// Returns this verdict as that of words that several keys share: a denial is for lack of room.
    pub(crate) fn of_shared_words(self) -> Self {
        match self.admission {
            Admission::Denied { retry_after } => Self { admission: Admission::NoRoom { retry_after }, ..self },
            _ => self,
        }
    }

    /// Sets the delay of an allowed request. With several queues, the longest delay counts.
    #[inline]
    pub(crate) fn with_delay(mut self, longest: u64) -> Self {
        if let Admission::Allowed { delay } = &mut self.admission {
            *delay = longest;
        }
        self
    }
}

impl Decision {
    /// Returns the decision if no limit was checked: allowed.
    #[doc(hidden)]
    #[inline]
    pub fn without_limit(now: Timestamp) -> Self {
        let verdict = Verdict { admission: Admission::Allowed { delay: 0 }, remaining: u64::MAX, reset_after: 0 };
        Self { limit: None, quota: u64::MAX, cost: 0, at: now, wall_offset: 0, source: Source::Store, verdict }
    }

    /// Returns the denial of a request whose hits are not valid.
    #[cold]
    pub(crate) fn invalid(mistake: InvalidHits, cost: u64, now: Timestamp) -> Self {
        let verdict = Verdict { admission: Admission::Invalid(mistake), remaining: 0, reset_after: 0 };
        Self { quota: 0, cost, verdict, ..Self::without_limit(now) }
    }

    /// Returns this decision of a ban as one of the limit that the ban belongs to. While the ban lasts, nothing is left
    /// of the limit.
    #[doc(hidden)]
    #[inline]
    pub fn for_limit(self, limit: LimitId, quota: u64) -> Self {
        let remaining = if self.is_allowed() { quota } else { 0 };
        Self { limit: Some(limit), quota, verdict: Verdict { remaining, ..self.verdict }, ..self }
    }

    /// Returns the decision with these units, which were not taken after all.
    #[cfg(feature = "redis")]
    #[doc(hidden)]
    pub fn with_more_remaining(self, units: u64) -> Self {
        let remaining = self.verdict.remaining.saturating_add(units).min(self.quota);
        Self { verdict: Verdict { remaining, ..self.verdict }, ..self }
    }

    /// Returns the decision of one limit of a request that all its limits allow, with the delay of the request.
    pub(crate) fn allowed_after(self, delay: Duration) -> Self {
        let delay = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
        Self { verdict: Verdict { admission: Admission::Allowed { delay }, ..self.verdict }, ..self }
    }

    /// Returns the denial for the request whose strike starts a ban.
    #[doc(hidden)]
    pub fn denied_until_reset(self) -> Self {
        let admission = Admission::Denied { retry_after: self.verdict.reset_after };
        Self { verdict: Verdict { admission, ..self.verdict }, ..self }
    }

    /// Returns the denial of a check without cost, while its key owes units for this time.
    #[doc(hidden)]
    pub fn denied_for(self, wait: Duration) -> Self {
        let admission = Admission::Denied { retry_after: u64::try_from(wait.as_micros()).unwrap_or(u64::MAX) };
        Self { verdict: Verdict { admission, ..self.verdict }, ..self }
    }

    /// Returns the decision to report out of two on the same request: see [`Verdict::takes_precedence`].
    #[inline]
    #[doc(hidden)]
    pub fn most_restrictive(self, other: Self) -> Self {
        let delay = self.verdict.delay().max(other.verdict.delay());
        let is_others = other.verdict.takes_precedence(other.quota, (&self.verdict, self.quota));
        let most_restrictive = if is_others { other } else { self };
        Self { verdict: most_restrictive.verdict.with_delay(delay), ..most_restrictive }
    }
}

/// The decisions of a request to the store with combined hits.
pub struct CombinedDecision {
    /// Whether the units of all hits were taken.
    pub is_taken: bool,
    /// The longest delay of the hits.
    pub delay: Duration,
    /// The decision of each combined hit, where it is known.
    pub each: Vec<Option<Decision>>,
}

impl CombinedDecision {
    /// Returns the decisions of the hits at these positions.
    pub fn each_of(&self, positions: &[usize]) -> Vec<Option<Decision>> {
        positions.iter().map(|position| self.each.get(*position).copied().flatten()).collect()
    }

    /// Returns the decision of a check with hits at these positions.
    pub fn own_decision(&self, positions: &[usize], now: Timestamp) -> Decision {
        let each = positions.iter().filter_map(|position| *self.each.get(*position)?);
        match each.reduce(Decision::most_restrictive) {
            Some(own) if self.is_taken => own.allowed_after(self.delay),
            Some(own) => own,
            None => Decision::without_limit(now),
        }
    }
}
