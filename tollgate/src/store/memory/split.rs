//! Growing by one bucket: half of a bucket's keys move to the bucket that many places up.

use smallvec::SmallVec;

use super::bucket::{Bucket, Busy, EMPTY};
use super::holds::{Holds, SlotRef};
use super::table::Table;
use crate::algorithm::{LimitAlgorithm, StateWords};
use crate::sync::Ordering;

type Seats<'a> = SmallVec<[SlotRef<'a>; 16]>;

impl Table {
    /// Splits bucket `index` of a table of that level, unless it is split already, and says how many slots that
    /// made free. Keys at rest are dropped on the way.
    pub(super) fn split<R: LimitAlgorithm>(
        &self,
        rules: &R,
        now: u64,
        index: usize,
        level: u32,
    ) -> Result<usize, Busy> {
        let mut holds = Holds::default();
        let (low, high) = (self.bucket(index), self.upper(index, level));
        // The low bucket is let go last: when it sends readers to the high one, that is ready for them.
        if holds.hold(low)?.level() != level {
            return Ok(0);
        }
        holds.hold(high)?;
        let movers = self.movers(rules, &mut holds, low, now, level)?;
        let seats = self.seats_above(rules, &mut holds, high, movers.len(), now)?;
        let freed = movers.len();
        for (from, to) in movers.into_iter().zip(seats) {
            self.clear_seat(rules, &mut holds, to);
            let (old, new) = (holds.cells(self, from), holds.cells(self, to));
            for index in 0..rules.words() {
                new.set(index, old.get(index));
                old.set(index, 0);
            }
            holds.hand_over(self, to, from.bucket.fingerprint(from.slot));
            self.leave(&mut holds, from);
            self.mark_passed_by(&mut holds, high, to.bucket)?;
        }
        rules.inherit(&self.shared(high), &self.shared(low));
        for bucket in [low, high] {
            holds.hold(bucket)?.set_level(level + 1);
            holds.write(bucket);
        }
        Ok(freed)
    }

    /// The keys at home in a held bucket that will be at home in the upper one, wherever in the run they are.
    fn movers<'a, R: LimitAlgorithm>(
        &'a self,
        rules: &R,
        holds: &mut Holds<'a>,
        low: Bucket<'a>,
        now: u64,
        level: u32,
    ) -> Result<Seats<'a>, Busy> {
        let mut movers = Seats::new();
        let mut bucket = low;
        for _ in 0..self.run() {
            let passed_by = holds.hold(bucket)?.is_passed_by();
            for slot in 0..self.layout.slots {
                let fingerprint = bucket.fingerprint(slot);
                if fingerprint == EMPTY || self.home_at(fingerprint, level) != low.index {
                    continue;
                }
                let moves = self.home_at(fingerprint, level + 1) != low.index;
                if !moves && !self.looks_idle(rules, bucket, slot, now) {
                    continue;
                }
                let seat = holds.seat(self, bucket, slot)?;
                if rules.is_idle(&holds.cells(self, seat), now) {
                    rules.clear(&holds.cells(self, seat));
                    self.leave(holds, seat);
                } else if moves {
                    movers.push(seat);
                } else {
                    holds.unseat(seat);
                }
            }
            if !passed_by {
                break;
            }
            bucket = self.next_in_run(bucket);
        }
        Ok(movers)
    }

    /// So many free slots in the run of a held bucket, nearest first; busy when there are not so many.
    fn seats_above<'a, R: LimitAlgorithm>(
        &'a self,
        rules: &R,
        holds: &mut Holds<'a>,
        high: Bucket<'a>,
        count: usize,
        now: u64,
    ) -> Result<Seats<'a>, Busy> {
        let mut seats = Seats::new();
        let mut bucket = high;
        for _ in 0..self.run() {
            holds.hold(bucket)?;
            for slot in self.free_slots(rules, bucket, now) {
                if seats.len() == count {
                    return Ok(seats);
                }
                seats.extend(self.seat_if_free(rules, holds, bucket, slot, now)?);
            }
            if seats.len() == count {
                return Ok(seats);
            }
            bucket = self.next_in_run(bucket);
        }
        Err(Busy::Held)
    }

    pub(super) fn leave<'a>(&'a self, holds: &mut Holds<'a>, seat: SlotRef<'a>) {
        holds.hand_over(self, seat, EMPTY);
        self.occupied.fetch_sub(1, Ordering::Relaxed);
    }
}
