//! The open reservations of a process, so that each is settled once.
//!
//! A store in memory keeps the ids of reservations that are neither settled nor expired. An id that is missing is
//! settled. Nothing is forgotten: when the bound is reached, new reservations are refused.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use super::token::ReservationId;

/// The most open reservations: about 10 MiB.
const MAX_OPEN: usize = 100_000;

#[derive(Default)]
pub(super) struct OpenReservations(Mutex<Open>);

#[derive(Default)]
struct Open {
    expiries: HashMap<ReservationId, u64, ahash::RandomState>,
    by_expiry: BTreeSet<(u64, ReservationId)>,
}

impl OpenReservations {
    /// Adds a reservation. Returns `false` if there are too many.
    pub(super) fn add(&self, id: ReservationId, expires_at: u64, now: u64) -> bool {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((expires_at, expired)) = open.by_expiry.first().copied()
            && expires_at <= now
        {
            open.by_expiry.pop_first();
            open.expiries.remove(&expired);
        }
        if open.expiries.len() >= MAX_OPEN {
            return false;
        }
        open.expiries.insert(id, expires_at);
        open.by_expiry.insert((expires_at, id));
        true
    }

    /// Removes a reservation. Returns `true` to the first caller only.
    pub(super) fn remove(&self, id: ReservationId) -> bool {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match open.expiries.remove(&id) {
            Some(expires_at) => open.by_expiry.remove(&(expires_at, id)),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_reservations_are_refused_when_too_many_are_open() {
        let open = OpenReservations::default();
        let id = |number: usize| (number as u128).to_be_bytes();
        assert!((0..MAX_OPEN).all(|number| open.add(id(number), 100, 0)));
        assert!(!open.add(id(MAX_OPEN), 100, 99));
        assert!(open.remove(id(5)) && !open.remove(id(5)));
        assert!(open.add(id(MAX_OPEN), 200, 99));
        assert!(open.add(id(MAX_OPEN + 1), 200, 100), "the others have expired");
        assert!(!open.remove(id(6)) && open.remove(id(MAX_OPEN)));
    }
}
