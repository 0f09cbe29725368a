//! Reservations, for costs that are known only afterwards.

use smallvec::SmallVec;

use super::Limiter;
use crate::decision::Decision;
use crate::open_charges::Held;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

/// Units that were taken and can be corrected or given back: see [`Limiter::reserve`](crate::Limiter::reserve).
///
/// Settling or refunding consumes the reservation, so it happens at most once. If the reservation is dropped, the units
/// stay taken.
///
/// ```compile_fail,E0382
/// use tollgate::{FixedWindow, Limit, Limiter, MINUTE};
///
/// let limiter = Limiter::new(Limit::new("mails", FixedWindow::new(10, MINUTE)).unwrap());
/// let reservation = limiter.reserve("ann", 1, MINUTE).unwrap();
/// limiter.refund(reservation);
/// limiter.refund(reservation); // error: use of moved value
/// ```
#[derive(Debug)]
#[must_use = "the units of a reservation stay taken until it is settled"]
pub struct Reservation {
    /// The limiter that took the units. Its limits may have been replaced when the reservation is settled.
    pub(crate) limiter: Limiter,
    pub(crate) hits: SmallVec<[HashedHit; 8]>,
    pub(crate) decision: Decision,
    pub(crate) expires_at: Timestamp,
    /// The units are pending while this is held.
    pub(crate) open: Held,
}

impl Reservation {
    /// Returns the decision that took the units.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Returns the time from which it is too late to settle, by the wall clock at the time of the reservation.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.expires_at.offset_by(self.decision.wall_offset)
    }
}

/// Units that a reservation has taken from a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedCharge {
    /// The name of the limit.
    pub limit: String,
    /// The name of the variant that the units were taken from.
    pub variant: Option<String>,
    /// The key as its store identifies it.
    pub key: Vec<u8>,
    /// The units that were taken.
    pub units: u64,
    /// The time at which they were taken, in microseconds.
    pub at: u64,
}

/// The result of settling a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settlement {
    /// The key was charged the actual cost.
    Settled,
    /// The actual cost exceeded the remaining quota. The key was charged all of it, and owes the rest: it is denied until
    /// that has come back.
    Owed {
        /// Units that the key owes beyond its quota because of this settlement.
        units: u64,
    },
    /// A part of the actual cost could not be counted: the key counts 2^39 units, it would owe them for more than 35 years,
    /// there is no memory for them, or the units were never taken because the store had failed.
    Short {
        /// Units that were spent but not charged.
        missing: u64,
    },
    /// The reservation was settled before. Nothing changed.
    AlreadySettled,
    /// The reservation had expired: the estimate stays charged.
    Expired,
    /// The store could not be reached in time: the estimate stays charged.
    Unreachable,
}

impl Settlement {
    /// Returns the worse of two results, for a request with several limits.
    #[doc(hidden)]
    pub fn worse(self, other: Self) -> Self {
        let weight = |settlement: &Self| match settlement {
            Self::AlreadySettled => (0, 0),
            Self::Settled => (1, 0),
            Self::Owed { units } => (2, *units),
            Self::Short { missing } => (3, *missing),
            Self::Expired | Self::Unreachable => (4, 0),
        };
        if weight(&other) > weight(&self) { other } else { self }
    }
}

/// Limits of ten units per minute, and the time until a key that spends 500 of them at [`START`] owes nothing.
#[cfg(all(test, not(loom)))]
pub(crate) mod debts_of_490 {
    use std::time::Duration;

    use crate::units::{MINUTE, SECOND};
    use crate::{
        Algorithm, FixedWindow, LeakyBucket, Rate, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
    };

    /// A whole hour.
    pub(crate) const START: Timestamp = Timestamp::from_secs(1_700_000_040 - 1_700_000_040 % 3600);
    pub(crate) const MICRO: Duration = Duration::from_micros(1);

    pub(crate) fn limits() -> [(Algorithm, Duration); 9] {
        let rate = Rate::new(10, MINUTE);
        [
            (TokenBucket::new(10, rate).into(), 490 * 6 * SECOND),
            (TokenBucket::new(10, rate).interval().into(), 49 * MINUTE),
            (LeakyBucket::new(10, rate).into(), 490 * 6 * SECOND),
            (LeakyBucket::new(10, rate).queue(MINUTE).into(), 490 * 6 * SECOND),
            (FixedWindow::new(10, MINUTE).into(), MINUTE),
            (FixedWindow::new(10, MINUTE).from_first_request().into(), MINUTE),
            (SlidingWindowLog::new(10, MINUTE).into(), MINUTE),
            (SlidingWindowLog::new(10, MINUTE).count_denied().into(), MINUTE),
            // Less than 11 units of the segment of 20 seconds are left: 500 × 20 s × 44 / 1000 s.
            (SlidingWindowCounter::new(10, MINUTE).segments(3).into(), 79 * SECOND + SECOND * 14 / 25 + MICRO),
        ]
    }
}
