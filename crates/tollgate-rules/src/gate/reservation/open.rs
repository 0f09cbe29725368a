//! The open reservations of a store in memory: those that are neither settled nor expired.
//!
//! An id that is missing is settled. Nothing is forgotten: when the bound is reached, new reservations are refused.
//!
//! # Handing over
//!
//! Open reservations move to the process that continues after this one, and are settled in one of the two only:
//!
//! 1. This process *offers* the reservations that are open now, and writes the counts afterwards. So the counts contain
//!    the units of each of them. A reservation that is made later stays here.
//! 2. The new process keeps them, and settles none. A settlement waits there.
//! 3. Once the new process serves, this one *releases* those that it offered and has not settled in the meantime. From
//!    then on, it settles none of them.
//! 4. The new process *accepts* the ones that were released, and forgets the others. Their units stay taken.
//!
//! If the new process fails before 3, nothing has changed here. If a process fails between 3 and 4, the units stay taken:
//! no step lets both processes settle a reservation. A settlement between 1 and 3 is in the counts of this process only, like
//! every other request in that time: in the new one the estimate stays taken.
//!
//! At the end of a process, a file takes the place of the new process. The reservations are released when they are written,
//! and the next process accepts them when it reads them. A file that is written earlier contains none: a process that dies
//! could have settled them since.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use tollgate::Limit;
use tollgate::internal::{Charge, Held};

use super::{ReservationError, ReservationId};

/// The most open reservations: about 20 MiB.
pub(super) const MAX_OPEN: usize = 100_000;

#[derive(Default)]
pub(super) struct OpenReservations(Mutex<Open>);

#[derive(Default)]
struct Open {
    entries: HashMap<ReservationId, Entry, ahash::RandomState>,
    by_expiry: BTreeSet<(u64, ReservationId)>,
    /// The number of reservations that were made here. It gives each its order.
    made: u64,
    /// The reservations before this one are offered to another process.
    offered: u64,
    /// The reservations of processes before that were settled here. They are not more than those that were taken over.
    settled: HashSet<ReservationId, ahash::RandomState>,
    /// Whether the process before has not released its reservations yet.
    is_waiting: bool,
    waiting: Vec<Waker>,
}

struct Entry {
    expires_at: u64,
    progress: Progress,
    units: ReservedUnits,
}

enum Progress {
    /// Its units are being taken.
    Taking,
    /// It can be settled. It has this position among those that were made here.
    Made { order: u64 },
    /// It can be settled. It was made by the process with this position among those before.
    TakenOver { from: usize },
    /// The process with this position among those before has made it, and may still settle it.
    Offered { from: usize },
    /// It was released to another process.
    Released,
}

/// The units of a reservation, as long as it is open.
#[derive(Default)]
pub(super) struct ReservedUnits {
    /// The key that they were taken from, if a limit has counted them.
    pub(super) taken: Option<TakenUnits>,
    /// They are pending while this is held.
    pub(super) held: Option<Held>,
    /// Whether nothing of them can be given back: a process before has reset the key, or this one has not found them in its
    /// counts.
    pub(super) count_no_more: bool,
}

pub(super) struct TakenUnits {
    pub(super) limit: Limit,
    pub(super) fingerprint: u64,
    pub(super) charge: Charge,
}

impl ReservedUnits {
    /// Returns whether nothing of the units can be given back, for example after a reset of the key.
    pub(super) fn count_no_more(&self) -> bool {
        self.count_no_more || self.held.as_ref().is_some_and(|held| !held.is_open())
    }

    /// Ends the units. Returns whether they can be given back to the key that open charges identify like this: not if it was
    /// reset, or if its limit was removed for so long that its counts were dropped before it came back.
    pub(super) fn close(self, key: u64) -> bool {
        !self.count_no_more && self.held.is_none_or(|held| held.is_of(key) && held.close_all())
    }
}

impl Entry {
    /// Returns whether the entry can move to another process: whether its units are in the counts of a snapshot.
    fn can_move(&self, offered: u64) -> bool {
        match self.progress {
            Progress::Made { order } => order < offered,
            Progress::TakenOver { .. } => true,
            Progress::Taking | Progress::Offered { .. } | Progress::Released => false,
        }
    }
}

/// A reservation that was taken over from another process.
pub(super) struct Carried {
    pub(super) id: ReservationId,
    pub(super) expires_at: u64,
    pub(super) units: ReservedUnits,
}

/// Whether the process that writes a snapshot may still settle the reservations in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gate) enum Carrying {
    /// Until it releases them.
    Offered,
    /// Not any more.
    Released,
}

/// The first settlement of a reservation, or the reason that it cannot be settled.
pub(super) enum Claim {
    /// It is settled now.
    Claimed(ReservedUnits),
    /// It was settled before.
    Settled,
    /// It was not taken over from the process that made it.
    Unknown,
    /// It was released to another process.
    Released,
}

impl OpenReservations {
    /// Returns the reservations of processes before this one. If they are offered, [`accept`](Self::accept) follows.
    pub(super) fn taken_over(carrying: Carrying, carried: impl Iterator<Item = (usize, Carried)>) -> Self {
        let mut open = Open { is_waiting: carrying == Carrying::Offered, ..Open::default() };
        for (from, Carried { id, expires_at, units }) in carried {
            let progress = match carrying {
                Carrying::Offered => Progress::Offered { from },
                Carrying::Released => Progress::TakenOver { from },
            };
            open.entries.insert(id, Entry { expires_at, progress, units });
            open.by_expiry.insert((expires_at, id));
        }
        Self(Mutex::new(open))
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a reservation whose units are taken next.
    pub(super) fn add(&self, id: ReservationId, expires_at: u64, now: u64) -> Result<(), ReservationError> {
        let mut open = self.lock();
        while let Some((expires_at, expired)) = open.by_expiry.first().copied()
            && expires_at <= now
        {
            open.by_expiry.pop_first();
            open.entries.remove(&expired);
        }
        if open.entries.len() >= MAX_OPEN {
            return Err(ReservationError::TooMany);
        }
        open.entries.insert(id, Entry { expires_at, progress: Progress::Taking, units: ReservedUnits::default() });
        open.by_expiry.insert((expires_at, id));
        Ok(())
    }

    /// Records that the units of a reservation are taken. They are pending until it is settled or expires.
    pub(super) fn made(&self, id: ReservationId, units: ReservedUnits) {
        let mut open = self.lock();
        let order = open.made;
        open.made += 1;
        if let Some(entry) = open.entries.get_mut(&id) {
            (entry.progress, entry.units) = (Progress::Made { order }, units);
        }
    }

    /// Removes a reservation whose units were not taken, or were given back.
    pub(super) fn remove(&self, id: ReservationId) {
        let mut open = self.lock();
        if let Some(entry) = open.entries.remove(&id) {
            open.by_expiry.remove(&(entry.expires_at, id));
        }
    }

    /// Settles a reservation for the first caller only. `is_own` if this process made it.
    pub(super) fn claim(&self, id: ReservationId, is_own: bool) -> Claim {
        let mut open = self.lock();
        match open.entries.get(&id).map(|entry| &entry.progress) {
            None if is_own || open.settled.contains(&id) => return Claim::Settled,
            None | Some(Progress::Taking | Progress::Offered { .. }) => return Claim::Unknown,
            Some(Progress::Released) => return Claim::Released,
            Some(Progress::Made { .. } | Progress::TakenOver { .. }) => {}
        }
        if !is_own {
            open.settled.insert(id);
        }
        let Some(Entry { expires_at, units, .. }) = open.entries.remove(&id) else { return Claim::Settled };
        open.by_expiry.remove(&(expires_at, id));
        Claim::Claimed(units)
    }

    /// Calls `see` with each reservation that can be settled, and with the position of the process that made it if it is not
    /// this one. They are released now, or can be from now on.
    pub(super) fn carry(
        &self,
        carrying: Carrying,
        mut see: impl FnMut(Option<usize>, ReservationId, u64, &ReservedUnits),
    ) {
        let mut open = self.lock();
        open.offered = open.made;
        let Open { entries, offered, .. } = &mut *open;
        for (id, entry) in entries.iter_mut().filter(|(_, entry)| entry.can_move(*offered)) {
            let from = match entry.progress {
                Progress::TakenOver { from } => Some(from),
                _ => None,
            };
            entry.units.count_no_more = entry.units.count_no_more();
            see(from, *id, entry.expires_at, &entry.units);
            if carrying == Carrying::Released {
                (entry.progress, entry.units) = (Progress::Released, ReservedUnits::default());
            }
        }
    }

    /// Ends the reservations that were offered and not settled since. Returns their ids. One whose key was reset since stays, and
    /// gives nothing back: the new process may have the counts of after the reset.
    pub(super) fn release(&self) -> HashSet<ReservationId> {
        let mut open = self.lock();
        let offered = std::mem::take(&mut open.offered);
        let was_reset = |units: &ReservedUnits| !units.count_no_more && units.count_no_more();
        let can_move = |entry: &Entry| entry.can_move(offered) && !was_reset(&entry.units);
        let released = open.entries.iter_mut().filter(|(_, entry)| can_move(entry));
        let released = released.map(|(id, entry)| {
            (entry.progress, entry.units) = (Progress::Released, ReservedUnits::default());
            *id
        });
        released.collect()
    }

    /// Allows to settle the reservations with these ids, which the process before has released, and forgets its others.
    pub(super) fn accept(&self, released: &HashSet<ReservationId>) {
        let mut open = self.lock();
        let Open { entries, by_expiry, .. } = &mut *open;
        entries.retain(|id, entry| {
            let Progress::Offered { from } = entry.progress else { return true };
            if released.contains(id) {
                entry.progress = Progress::TakenOver { from };
                return true;
            }
            by_expiry.remove(&(entry.expires_at, *id));
            false
        });
        open.is_waiting = false;
        let waiting = std::mem::take(&mut open.waiting);
        drop(open);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until the process before has released its reservations.
    pub(super) async fn accepted(&self) {
        poll_fn(|context| {
            let mut open = self.lock();
            if !open.is_waiting {
                return Poll::Ready(());
            }
            if !open.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                open.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: usize) -> ReservationId {
        (number as u128).to_be_bytes()
    }

    fn make(open: &OpenReservations, number: usize) {
        assert_eq!(open.add(id(number), 100, 0), Ok(()));
        open.made(id(number), ReservedUnits::default());
    }

    #[derive(Debug, PartialEq, Eq)]
    enum Claimed {
        Now,
        Before,
        Unknown,
        Released,
    }

    impl OpenReservations {
        fn claimed(&self, number: usize, is_own: bool) -> Claimed {
            match self.claim(id(number), is_own) {
                Claim::Claimed(_) => Claimed::Now,
                Claim::Settled => Claimed::Before,
                Claim::Unknown => Claimed::Unknown,
                Claim::Released => Claimed::Released,
            }
        }
    }

    #[test]
    fn new_reservations_are_refused_when_too_many_are_open() {
        let open = OpenReservations::default();
        (0..MAX_OPEN).for_each(|number| make(&open, number));
        assert_eq!(open.add(id(MAX_OPEN), 100, 99), Err(ReservationError::TooMany));
        assert_eq!([open.claimed(5, true), open.claimed(5, true)], [Claimed::Now, Claimed::Before]);
        assert_eq!(open.add(id(MAX_OPEN), 200, 99), Ok(()));
        open.made(id(MAX_OPEN), ReservedUnits::default());
        assert_eq!(open.add(id(MAX_OPEN + 1), 200, 100), Ok(()), "the others have expired");
        assert_eq!([open.claimed(6, true), open.claimed(MAX_OPEN, true)], [Claimed::Before, Claimed::Now]);
    }

    #[test]
    fn only_reservations_that_were_offered_and_are_open_are_released() {
        let open = OpenReservations::default();
        [1, 2].into_iter().for_each(|number| make(&open, number));
        assert_eq!(open.add(id(3), 100, 0), Ok(()), "its units may be missing from the counts");
        let mut offered = HashSet::new();
        open.carry(Carrying::Offered, |_, id, _, _| _ = offered.insert(id));
        assert_eq!(offered, HashSet::from([id(1), id(2)]));
        open.made(id(3), ReservedUnits::default());
        make(&open, 4);
        assert_eq!(open.claimed(1, true), Claimed::Now);
        assert_eq!(open.release(), HashSet::from([id(2)]));
        assert_eq!([open.claimed(1, true), open.claimed(2, true)], [Claimed::Before, Claimed::Released]);
        assert_eq!([open.claimed(3, true), open.claimed(4, true)], [Claimed::Now, Claimed::Now]);
        assert!(open.release().is_empty());
    }

    #[test]
    fn a_reservation_is_not_settled_after_it_was_written_for_the_next_process() {
        let open = OpenReservations::default();
        make(&open, 1);
        let mut written = 0;
        open.carry(Carrying::Released, |_, _, _, _| written += 1);
        assert_eq!((written, open.claimed(1, true)), (1, Claimed::Released));
        open.carry(Carrying::Released, |_, _, _, _| panic!("it was written before"));
    }

    #[test]
    fn only_reservations_that_were_released_are_accepted() {
        let carried = |number| (0, Carried { id: id(number), expires_at: 100, units: ReservedUnits::default() });
        let open = OpenReservations::taken_over(Carrying::Offered, [1, 2].map(carried).into_iter());
        assert_eq!(open.claimed(1, false), Claimed::Unknown);
        open.carry(Carrying::Offered, |_, _, _, _| panic!("the process before may still settle it"));
        open.accept(&HashSet::from([id(1), id(9)]));
        assert_eq!([open.claimed(1, false), open.claimed(1, false)], [Claimed::Now, Claimed::Before]);
        assert_eq!([open.claimed(2, false), open.claimed(9, false)], [Claimed::Unknown, Claimed::Unknown]);
    }
}
