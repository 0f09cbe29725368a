//! Reservations, for costs that are known only afterwards.

use smallvec::SmallVec;

use super::Limiter;
use crate::decision::Decision;
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
#[cfg(feature = "file")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReservedCharge {
    pub(crate) limit: String,
    pub(crate) variant: Option<String>,
    /// The key as its store identifies it.
    pub(crate) key: Vec<u8>,
    pub(crate) units: u64,
    pub(crate) at: u64,
}

/// The result of settling a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settlement {
    /// The key was charged the actual cost.
    Settled,
    /// The actual cost exceeded the remaining quota: the key has nothing left.
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

#[cfg(feature = "rules")]
impl Settlement {
    /// Returns the worse of two results, for a request with several limits.
    pub(crate) fn worse(self, other: Self) -> Self {
        let weight = |settlement: &Self| match settlement {
            Self::AlreadySettled => 0,
            Self::Settled => 1,
            Self::Short { missing } => missing.saturating_add(1),
            Self::Expired | Self::Unreachable => u64::MAX,
        };
        if weight(&other) > weight(&self) { other } else { self }
    }
}
