//! The answer to a request.

use std::time::Duration;

use crate::limit::LimitId;
use crate::units::Timestamp;

/// What the limiter answers: whether the request may pass, which limit decided, and what is left of it.
///
/// When several limits were asked, the decision speaks of the one that denied, or else of the one with the
/// least share of its quota left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    pub(crate) limit: Option<LimitId>,
    pub(crate) quota: u64,
    pub(crate) cost: u64,
    /// In the time of the limiter or store that decided, by which charges are given back.
    pub(crate) at: Timestamp,
    /// How far the wall clock was ahead of that, in microseconds.
    pub(crate) wall_offset: i64,
    pub(crate) source: Source,
    pub(crate) verdict: Verdict,
}

/// A denial as an error: of [`Decision::into_result`], of [`Limiter::reserve`](crate::Limiter::reserve), and of waits
/// that would be too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied(pub(crate) Decision);

impl Denied {
    /// The decision that stands in the way.
    pub fn decision(&self) -> &Decision {
        &self.0
    }
}

impl std::fmt::Display for Denied {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.verdict.admission {
            Admission::Allowed { .. } => {
                write!(out, "rate limited: the turn in the queue comes after {:?}, which is too late", self.0.delay())
            }
            Admission::Denied { retry_after } => {
                write!(out, "rate limited: retry after {:?}", Duration::from_micros(retry_after))
            }
            Admission::NeverFits => out.write_str("rate limited: the cost exceeds the whole quota; ask for less"),
        }
    }
}

impl std::error::Error for Denied {}

/// Who answered: the store, or what stands between a limiter and a store that many share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The store that holds the key.
    Store,
    /// This node, which remembers a denial that is still certain.
    DenialCache,
    /// This node, out of a slice of the quota that it took in advance.
    Lease,
    /// This node's own memory, while the store fails.
    Local,
    /// The failure policy alone, while the store fails: allowed or denied without counting.
    Policy,
}

/// What one limit says of one request: the decision without the names. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) admission: Admission,
    pub(crate) remaining: u64,
    pub(crate) reset_after: u64,
}

/// Whether a request passes, and what waiting is worth. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It may leave after this delay; zero everywhere but in a queue.
    Allowed { delay: u64 },
    /// It would pass after this wait if nothing else arrived.
    Denied { retry_after: u64 },
    /// Its cost is above the whole quota: no wait helps.
    NeverFits,
}

impl Decision {
    /// Whether the request may pass.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.verdict.is_allowed()
    }

    /// Returns the decision if the request may pass, and the denial as an error if not, for use with `?`.
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
    /// When the request is denied.
    pub fn into_result(self) -> Result<Self, Denied> {
        if self.is_allowed() { Ok(self) } else { Err(Denied(self)) }
    }

    /// The limit that decided; `None` when no limit was asked. [`Limiter::limit`](crate::Limiter::limit) tells
    /// its name and numbers.
    #[must_use]
    pub fn limit(&self) -> Option<LimitId> {
        self.limit
    }

    /// The whole quota of that limit: its capacity, or its count per window.
    #[must_use]
    pub fn quota(&self) -> u64 {
        self.quota
    }

    /// The largest cost that would pass right now, after this decision.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.verdict.remaining
    }

    /// The time until the full quota is back, if nothing else arrives.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        Duration::from_micros(self.verdict.reset_after)
    }

    /// For a denied request, the time after which the same cost would pass if nothing else arrived: exact, so
    /// that a client that waits it passes, and one that waits a microsecond less does not.
    ///
    /// `None` for a request that was allowed, and for one whose cost is above the whole quota, which no wait
    /// can help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.verdict.admission {
            Admission::Denied { retry_after } => Some(Duration::from_micros(retry_after)),
            Admission::Allowed { .. } | Admission::NeverFits => None,
        }
    }

    /// How long an admitted request has to be held before it may leave: zero, but for a leaky bucket that
    /// queues.
    #[must_use]
    pub fn delay(&self) -> Duration {
        Duration::from_micros(self.verdict.delay())
    }

    /// Who answered. A denial by [`Source::Policy`] says that the store fails, not that a limit is spent.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// What was asked for.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// When it was decided, by the wall clock.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at.offset_by(self.wall_offset)
    }
}

impl Verdict {
    pub(crate) fn is_allowed(&self) -> bool {
        matches!(self.admission, Admission::Allowed { .. })
    }

    /// How long a denied request has to wait; forever if it can never fit.
    pub(crate) fn wait(&self) -> u64 {
        match self.admission {
            Admission::Allowed { .. } => 0,
            Admission::Denied { retry_after } => retry_after,
            Admission::NeverFits => u64::MAX,
        }
    }

    /// Whether of two verdicts on one request this one is to be reported, rather than one that came first: the denial,
    /// the longer wait of two denials, else the one with the least share of its quota left. Each comes with its quota.
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

    /// How long it has to be held if it is admitted.
    #[inline]
    pub(crate) fn delay(&self) -> u64 {
        match self.admission {
            Admission::Allowed { delay } => delay,
            Admission::Denied { .. } | Admission::NeverFits => 0,
        }
    }

    /// A request that several queues let in leaves when the slowest of them lets it go.
    #[inline]
    pub(crate) fn with_delay(mut self, longest: u64) -> Self {
        if let Admission::Allowed { delay } = &mut self.admission {
            *delay = longest;
        }
        self
    }
}

impl Decision {
    /// The answer when no limit was asked: nothing stands in the way.
    pub(crate) fn without_limit(now: Timestamp) -> Self {
        let verdict = Verdict { admission: Admission::Allowed { delay: 0 }, remaining: u64::MAX, reset_after: 0 };
        Self { limit: None, quota: u64::MAX, cost: 0, at: now, wall_offset: 0, source: Source::Store, verdict }
    }

    /// The same told of another limit, whose ban it is: while that lasts, nothing is left of the limit.
    #[cfg(feature = "rules")]
    pub(crate) fn for_limit(self, limit: LimitId, quota: u64) -> Self {
        let remaining = if self.is_allowed() { quota } else { 0 };
        Self { limit: Some(limit), quota, verdict: Verdict { remaining, ..self.verdict }, ..self }
    }

    /// The denial that the strike which brings a ban means for who was struck.
    #[cfg(feature = "rules")]
    pub(crate) fn denied_until_reset(self) -> Self {
        let admission = Admission::Denied { retry_after: self.verdict.reset_after };
        Self { verdict: Verdict { admission, ..self.verdict }, ..self }
    }

    /// Of two decisions on one request, the one to report; see [`Verdict::is_before`].
    #[inline]
    pub(crate) fn most_restrictive(self, other: Self) -> Self {
        let delay = self.verdict.delay().max(other.verdict.delay());
        let is_others = other.verdict.takes_precedence(other.quota, (&self.verdict, self.quota));
        let most_restrictive = if is_others { other } else { self };
        Self { verdict: most_restrictive.verdict.with_delay(delay), ..most_restrictive }
    }
}
