//! The minimum cost of any limiter. These are not limiters: they do not grow, remove keys or bound memory.

use std::hash::BuildHasher;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Contender, Path, Setup};
use crate::clock::Ticker;

/// The fastest keyed hash at hand.
type Hash = foldhash::fast::RandomState;

/// Hashes the key, and returns the decision that the path expects.
pub(super) struct HashOnly {
    hash: Hash,
    answer: bool,
}

impl HashOnly {
    pub(super) fn new(setup: Setup) -> Self {
        Self { hash: Hash::default(), answer: setup.path == Path::Allow }
    }
}

impl Contender for HashOnly {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        black_box(self.hash.hash_one(key.as_str()));
        self.answer
    }

    fn spend(&self, key: &String, _cost: u32) -> bool {
        self.decide(key)
    }
}

/// One 16-byte slot per key in a flat table, changed by compare-and-swap, with tollgate's clock: the least that
/// a shared, keyed decision can be made of.
pub(super) struct OneSlot {
    hash: Hash,
    clock: Ticker,
    slots: Vec<Slot>,
    shift: u32,
    burst_ns: u64,
    period_ns: u64,
}

#[derive(Default)]
#[repr(align(16))]
struct Slot {
    /// Zero while the slot is free.
    tag: AtomicU64,
    /// The theoretical arrival time of the generic cell rate algorithm.
    arrival_ns: AtomicU64,
}

impl OneSlot {
    pub(super) fn new(setup: Setup) -> Self {
        // Half full at most, as a table that never grows must be to stay at about one cache line per probe.
        let slots = (setup.keys * 2).next_power_of_two();
        let period_ns = u64::try_from(setup.path.period().as_nanos()).unwrap_or(u64::MAX);
        Self {
            hash: Hash::default(),
            clock: Ticker::new(),
            slots: (0..slots).map(|_| Slot::default()).collect(),
            shift: u64::BITS - slots.trailing_zeros(),
            burst_ns: period_ns * u64::from(setup.path.burst()),
            period_ns,
        }
    }

    #[inline]
    fn slot(&self, key: &str) -> &Slot {
        let hash = self.hash.hash_one(key);
        let tag = hash | 1;
        let mut place = (hash >> self.shift) as usize;
        loop {
            let slot = &self.slots[place];
            match slot.tag.load(Ordering::Relaxed) {
                found if found == tag => return slot,
                0 => match slot.tag.compare_exchange(0, tag, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => return slot,
                    Err(found) if found == tag => return slot,
                    Err(_) => {}
                },
                _ => {}
            }
            place = (place + 1) % self.slots.len();
        }
    }

    #[inline]
    fn take(&self, key: &str, cost: u64) -> bool {
        let now_ns = self.clock.nanos(0, self.clock.ticks());
        let slot = self.slot(key);
        let taken = slot.arrival_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |arrival_ns| {
            let next_ns = arrival_ns.max(now_ns) + cost * self.period_ns;
            (next_ns <= now_ns + self.burst_ns).then_some(next_ns)
        });
        taken.is_ok()
    }
}

impl Contender for OneSlot {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        self.take(key, 1)
    }

    fn spend(&self, key: &String, cost: u32) -> bool {
        self.take(key, u64::from(cost))
    }
}
