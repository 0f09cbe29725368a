//! The shape of a table after 100 windows in which every key is new.

use super::claim::HeldBuckets;
use super::table::{Layout, Table};
use super::{HashedHit, Mode};
use crate::algorithm::Compiled;
use crate::algorithm::fixed_window::ClockWindow;
use crate::budget::Budget;
use crate::decision::LimitId;
use crate::limit::Limit;
use crate::sync::Ordering;
use crate::{FixedWindow, MINUTE};

const START: u64 = 1_700_000_040_000_000;
const WINDOW: u64 = 60_000_000;
const WINDOWS: u64 = 100;

/// A limit per minute, with room for `buckets` buckets of seven keys.
struct Churn {
    limit: Limit,
    table: Table,
    now: u64,
    next_key: u64,
}

impl Churn {
    fn new(buckets: usize) -> Self {
        Self::with_quota(10, buckets)
    }

    fn with_quota(quota: u64, buckets: usize) -> Self {
        let limit = Limit::new("churn", FixedWindow::new(quota, MINUTE)).expect("a valid limit");
        let compiled = limit.compiled();
        let layout = Layout::new(compiled.words(), compiled.free_bits());
        let table = Table::new(layout, Budget::new(buckets * layout.stride() * 8)).expect("enough memory for a block");
        Self { limit, table, now: START, next_key: 0 }
    }

    fn algorithm(&self) -> &ClockWindow {
        let Compiled::ClockWindow(algorithm) = self.limit.compiled() else { unreachable!() };
        algorithm
    }

    fn takes(&self, fingerprint: u64) -> bool {
        let hit = HashedHit { limit: LimitId::first(), fingerprint, cost: 1 };
        self.table.decide(self.algorithm(), None, hit, self.now, Mode::Take).is_allowed()
    }

    fn left(&self, fingerprint: u64) -> u64 {
        let hit = HashedHit { limit: LimitId::first(), fingerprint, cost: 0 };
        self.table.decide(self.algorithm(), None, hit, self.now, Mode::Peek).remaining
    }

    /// Checks `keys` new keys, spread over a window, and returns the number of denials.
    fn run_window(&mut self, keys: u64) -> usize {
        self.now = self.now / WINDOW * WINDOW + WINDOW;
        let begin = self.now;
        let mut denied = 0;
        for index in 0..keys {
            self.now = begin + index * (WINDOW - 1) / keys;
            self.next_key += 1;
            denied += usize::from(!self.takes(fingerprint_of(self.next_key)));
        }
        denied
    }

    fn buckets(&self) -> usize {
        let (level, split) = self.table.extent();
        self.table.buckets_at(level) + split
    }

    fn bytes(&self) -> usize {
        self.table.budget.used()
    }

    /// Returns the number of buckets searched for a key without a slot: the mean and the maximum over all homes.
    fn lookups(&self) -> (f64, usize) {
        let lengths = (0..self.buckets()).map(|index| {
            let mut bucket = self.table.bucket(index);
            let mut length = 1;
            while length < self.table.run() && bucket.is_passed_by() {
                bucket = self.table.next_in_run(bucket);
                length += 1;
            }
            length
        });
        let (sum, most) = lengths.fold((0, 0), |(sum, most), length| (sum + length, most.max(length)));
        (sum as f64 / self.buckets() as f64, most)
    }
}

fn fingerprint_of(key: u64) -> u64 {
    let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed ^ mixed >> 32).max(1)
}

#[test]
fn memory_follows_live_keys_through_100_windows() {
    // Just too many for 128 buckets at four fifths, and well within 256.
    for keys in [725, 1_000] {
        let mut churn = Churn::new(1 << 20);
        for _ in 0..WINDOWS {
            assert_eq!(churn.run_window(keys), 0);
        }
        let live = churn.table.live_keys(churn.algorithm(), churn.now);
        let bytes_per_key = churn.bytes() as f64 / live as f64;
        assert!(bytes_per_key <= 46.0, "{bytes_per_key} bytes for each of {live} keys");
        let (mean, most) = churn.lookups();
        assert!(mean <= 3.0 && most <= 32, "{mean} buckets for each lookup, at most {most}");
    }
}

#[test]
fn lookups_stay_short_through_100_windows_at_the_cap() {
    let mut churn = Churn::new(128);
    // Four fifths of all slots.
    let keys = 128 * 7 * 4 / 5;
    for _ in 0..WINDOWS {
        assert_eq!(churn.run_window(keys), 0);
    }
    assert_eq!((churn.buckets(), churn.bytes()), (128, 128 * 128));
    let (mean, most) = churn.lookups();
    assert!(mean <= 3.0 && most <= 32, "{mean} buckets for each lookup, at most {most}");
}

/// For its size, the table gets as many invented keys as a store of 512 MiB gets in half an hour at 100,000 per second.
#[test]
fn invented_keys_at_the_cap_do_not_keep_new_keys_out() {
    let mut churn = Churn::with_quota(100, 64);
    let invented = 64 * 7 * 6;
    assert_eq!(churn.run_window(invented), 0);
    for key in 0..100 {
        let left = churn.left(fingerprint_of(churn.next_key + 1 + key));
        assert!(left > 50, "{left} units left");
    }
    assert!(churn.table.overflow.evicted.load(Ordering::Relaxed) > 0);
    assert_eq!(churn.table.overflow.denied.load(Ordering::Relaxed), 0);
    assert_eq!(churn.bytes(), 64 * 128);
}

/// Another thread unlocks its buckets one by one: the flag of the second may be unpublished when that of the first is
/// already published.
#[test]
fn a_sweep_keeps_a_flag_whose_successor_is_held() {
    let churn = Churn::new(64);
    let key = |home: u64, number: u64| number << 32 | home;
    for (home, number) in [5, 6].into_iter().flat_map(|home| (1..=7).map(move |number| (home, number))) {
        assert!(churn.takes(key(home, number)));
    }
    let furthest = key(5, 8);
    assert!(churn.takes(furthest));
    let second = churn.table.bucket(6);
    assert!(churn.table.bucket(5).is_passed_by() && second.is_passed_by());
    HeldBuckets::default().hold(second).expect("nobody else holds it").clear_passed_by();
    let mut holds = HeldBuckets::default();
    holds.hold(second).expect("nobody else holds it").mark_passed_by();
    while !churn.table.sweep(churn.algorithm(), churn.now, churn.buckets()) {}
    drop(holds);
    assert_eq!(churn.left(furthest), 9);
}

#[test]
fn a_new_key_does_not_pay_for_the_key_that_it_evicts() {
    let churn = Churn::with_quota(100, 64);
    let key = |home: u64, number: u64| number << 32 | home;
    for (home, number) in (0..64).flat_map(|home| (1..=7).map(move |number| (home, number))) {
        assert!((0..10).all(|_| churn.takes(key(home, number))));
    }
    // The last fifth of the keys is late.
    assert!(churn.takes(key(55, 8)));
    assert_eq!(churn.table.overflow.evicted.load(Ordering::Relaxed), 1);
    assert_eq!(churn.left(key(55, 8)), 99);
    assert_eq!(churn.left(key(55, 9)), 90, "it may be the evicted key");
}

/// Four fifths of the slots are taken before the table is full, and the keys in them stay whatever others spend.
#[test]
fn a_key_that_came_before_the_table_was_full_keeps_its_slot() {
    let mut churn = Churn::with_quota(100, 64);
    let slots = 64 * 7;
    let early: Vec<u64> = (1..=slots * 3 / 4).map(fingerprint_of).collect();
    assert!(early.iter().all(|key| churn.takes(*key)));
    churn.next_key = slots * 3 / 4;
    churn.now += 1;
    for _ in 0..slots * 40 {
        churn.next_key += 1;
        let _ = churn.takes(fingerprint_of(churn.next_key));
    }
    assert!(churn.table.overflow.evicted.load(Ordering::Relaxed) > slots);
    assert!(early.iter().all(|key| churn.left(*key) == 99));
    // The first keys that were late were evicted long ago.
    let late = (slots * 9 / 10..slots).map(|key| churn.left(fingerprint_of(key))).filter(|left| *left == 99).count();
    assert_eq!(late, 0);
}
