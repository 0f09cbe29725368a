//! Costs that are known only afterwards.

use smallvec::SmallVec;

use crate::decision::Decision;
use crate::limiter::Limiter;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

/// What was taken and may be given back or corrected; see [`Limiter::reserve`](crate::Limiter::reserve).
///
/// It can be settled or refunded once, because that consumes it. Dropped, it stands: what was taken stays taken.
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
#[must_use = "what a reservation took stays taken until it is settled"]
pub struct Reservation {
    /// Whose limits took it: they may have been changed by the time it is settled.
    pub(crate) limiter: Limiter,
    pub(crate) hits: SmallVec<[HashedHit; 8]>,
    pub(crate) decision: Decision,
    pub(crate) expires_at: Timestamp,
}

impl Reservation {
    /// The decision that took it.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// When it is too late to settle, by the wall clock at the time of the reservation.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.expires_at.offset_by(self.decision.wall_offset)
    }
}

/// How a reservation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settlement {
    /// The key has been charged what the work cost.
    Settled,
    /// The work cost more than was left: the key is spent, and this much could not be taken.
    Short {
        /// Units that were spent but not charged.
        missing: u64,
    },
    /// It was settled before, and that stands.
    AlreadySettled,
    /// It came too late: the estimate stands.
    Expired,
    /// The store could not be reached in time: the estimate stands.
    Unreachable,
}

#[cfg(feature = "rules")]
impl Settlement {
    /// Of two limits that were settled, the one that is further from what it should be.
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
