//! All interleavings of two threads on a tiny table with up to three forced switches, by loom: `RUSTFLAGS="--cfg loom"
//! cargo test --release`.

use loom::sync::Arc;
use loom::thread;

use super::decide::FastPathMiss;
use super::multi_key::{Draft, write_all};
use super::table::{Layout, Table};
use super::{HashedHit, Mode};
use crate::algorithm::{Charge, Compiled, LimitAlgorithm};
use crate::budget::Budget;
use crate::decision::{LimitId, Verdict};
use crate::limit::Limit;
use crate::{FixedWindow, MINUTE, SlidingWindowCounter};

const NOW: u64 = 1_700_000_000_000_000;

/// A limit of one word, and its table: one block of `1 << block_bits` buckets of two slots.
struct Model {
    limit: Limit,
    table: Table,
}

impl Model {
    fn new(quota: u64, block_bits: u32, budget: usize) -> Self {
        Self::with_tags(quota, block_bits, budget, 2)
    }

    /// Creates a model with tags of `tag_bits` bits.
    fn with_tags(quota: u64, block_bits: u32, budget: usize, tag_bits: u32) -> Self {
        let limit = Limit::new("model", FixedWindow::new(quota, MINUTE)).unwrap();
        assert!(limit.compiled().free_bits() >= tag_bits);
        let table = Table::new(Layout::tiny(1, 2, block_bits, tag_bits), Budget::new(budget)).unwrap();
        Self { limit, table }
    }

    /// A full table that cannot grow: key 8 is at rest, key 9 has spent one unit.
    fn full(quota: u64, tag_bits: u32) -> Self {
        let model = Self::with_tags(quota, 0, 48, tag_bits);
        assert_eq!((model.takes(8), model.takes(9)), (1, 1));
        model.reset(8);
        model
    }

    fn reset(&self, fingerprint: u64) {
        let Compiled::ClockWindow(algorithm) = self.limit.compiled() else { unreachable!() };
        assert!(self.table.change(algorithm, None, fingerprint, NOW, |cells| algorithm.clear(cells)));
    }

    fn refund(&self, fingerprint: u64) {
        let Compiled::ClockWindow(algorithm) = self.limit.compiled() else { unreachable!() };
        let is_changed = self.table.change(algorithm, None, fingerprint, NOW, |cells| {
            if let Some(edit) = algorithm.refund(cells, NOW, Charge { at: NOW, cost: 1 }) {
                algorithm.apply(cells, edit);
            }
        });
        assert!(is_changed);
    }

    fn grow(&self) {
        let Compiled::ClockWindow(algorithm) = self.limit.compiled() else { unreachable!() };
        self.table.grow_now(algorithm, NOW);
    }

    fn check(&self, fingerprint: u64) -> Verdict {
        let Compiled::ClockWindow(algorithm) = self.limit.compiled() else { unreachable!() };
        let hit = HashedHit { limit: LimitId::first(), fingerprint, cost: 1 };
        self.table.decide(algorithm, None, hit, NOW, Mode::Take)
    }

    fn takes(&self, fingerprint: u64) -> u64 {
        u64::from(self.check(fingerprint).is_allowed())
    }

    fn left(&self, fingerprint: u64) -> u64 {
        let Compiled::ClockWindow(algorithm) = self.limit.compiled() else { unreachable!() };
        let hit = HashedHit { limit: LimitId::first(), fingerprint, cost: 0 };
        self.table.decide(algorithm, None, hit, NOW, Mode::Peek).remaining
    }

    /// Drafts taking one unit of a key, on the fast path for several keys.
    fn draft<'a>(&'a self, fingerprint: u64, draft: &mut Draft<'a>) -> Result<(), FastPathMiss> {
        let Compiled::ClockWindow(algorithm) = self.limit.compiled() else { unreachable!() };
        self.table.draft_now(algorithm, &HashedHit { limit: LimitId::first(), fingerprint, cost: 1 }, NOW, draft)
    }

    /// Returns the number of slots of the first block that have a fingerprint.
    fn slot_refs(&self, fingerprint: u64) -> usize {
        let buckets = (0..self.table.layout.block()).map(|index| self.table.bucket(index));
        buckets
            .map(|bucket| (0..self.table.layout.slots).filter(|slot| bucket.fingerprint(*slot) == fingerprint).count())
            .sum()
    }
}

/// Takes from key 8 of both models if both allow it. Returns whether they did, or gives up if another thread
/// interferes.
fn take_both(cold: &Model, hot: &Model) -> Result<bool, FastPathMiss> {
    let (mut others, mut last) = ([Draft::UNKNOWN], Draft::UNKNOWN);
    cold.draft(8, &mut others[0])?;
    if others[0].change.is_none() {
        return Ok(false);
    }
    write_all(&others, &mut last, |last| hot.draft(8, last))?;
    Ok(last.verdict.is_allowed())
}

fn check_all_orders(model: impl Fn() + Sync + Send + 'static) {
    // Threads spin on locks, so an unbounded search would never end. Three forced switches are enough.
    check_orders(3, model);
}

fn check_orders(forced_switches: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(forced_switches);
    builder.max_branches = 10_000;
    builder.check(model);
}

#[test]
fn loom_two_threads_on_one_key_take_exactly_what_there_is() {
    check_all_orders(|| {
        let model = Arc::new(Model::new(2, 0, 1 << 10));
        assert_eq!(model.takes(8), 1);
        let other = model.clone();
        let thread = thread::spawn(move || other.takes(8));
        let here = model.takes(8);
        assert_eq!(here + thread.join().unwrap(), 1);
        assert_eq!(model.left(8), 0);
    });
}

#[test]
fn loom_a_key_is_added_once() {
    check_all_orders(|| {
        let model = Arc::new(Model::new(1, 0, 1 << 10));
        let other = model.clone();
        let thread = thread::spawn(move || other.takes(8));
        let here = model.takes(8);
        assert_eq!(here + thread.join().unwrap(), 1);
        assert_eq!(model.slot_refs(8), 1);
    });
}

#[test]
fn loom_a_key_that_moves_to_another_bucket_loses_nothing() {
    check_all_orders(|| {
        let model = Arc::new(Model::new(2, 0, 1 << 10));
        // Moves from bucket 0 to bucket 1. A second key would make the table grow by itself.
        assert_eq!(model.takes(9), 1);
        let other = model.clone();
        let thread = thread::spawn(move || other.grow());
        let here = model.takes(9);
        thread.join().unwrap();
        assert_eq!(here, 1);
        assert_eq!(model.left(9), 0);
    });
}

/// Another key gets the slot of a key that has moved, and then has an equal word there.
#[test]
fn loom_a_late_decision_does_not_charge_the_slot_that_its_key_has_left() {
    check_all_orders(|| {
        let model = Arc::new(Model::new(3, 0, 1 << 10));
        assert_eq!(model.takes(9), 1);
        let other = model.clone();
        // Growth needs more than the stack that loom gives a thread.
        let thread = thread::Builder::new().stack_size(1 << 16);
        let thread = thread.spawn(move || {
            other.grow();
            other.takes(10)
        });
        let here = model.takes(9);
        assert_eq!(here + thread.unwrap().join().unwrap(), 2);
        assert_eq!([9, 10].map(|key| model.left(key)), [1, 2]);
        assert_eq!([9, 10].map(|key| model.slot_refs(key)), [0, 1], "in bucket 0");
    });
}

/// Another key gets the slot of a key at rest, and then is at rest with an equal state.
#[test]
fn loom_a_late_decision_does_not_charge_the_key_that_its_slot_was_given_to() {
    check_all_orders(|| {
        let model = Arc::new(Model::full(2, 2));
        let other = model.clone();
        let thread = thread::spawn(move || {
            let taken = other.takes(10);
            other.reset(10);
            taken
        });
        let here = model.takes(8);
        assert_eq!(here + thread.join().unwrap(), 2);
        assert_eq!([8, 9].map(|key| model.left(key)), [1, 1]);
    });
}

/// The slot has two more owners, so a tag of one bit has its old value again, and only the lap differs. One forced
/// switch, out of the late decision, is enough to show this; more take minutes.
#[test]
fn loom_a_late_decision_is_not_lost_when_the_tag_wraps_around() {
    check_orders(2, || {
        let model = Arc::new(Model::full(2, 1));
        let other = model.clone();
        let thread = thread::spawn(move || {
            for key in [10, 11] {
                assert_eq!(other.takes(key), 1);
                other.reset(key);
            }
        });
        assert_eq!(model.takes(8), 1);
        thread.join().unwrap();
        assert_eq!([8, 9].map(|key| model.left(key)), [1, 1]);
    });
}

#[test]
fn loom_a_refund_and_a_decision_are_both_counted() {
    check_all_orders(|| {
        let model = Arc::new(Model::new(3, 0, 1 << 10));
        assert_eq!((model.takes(8), model.takes(8)), (1, 1));
        let other = model.clone();
        let thread = thread::spawn(move || other.refund(8));
        assert_eq!(model.takes(8), 1);
        thread.join().unwrap();
        assert_eq!(model.left(8), 1);
    });
}

/// A refund that started before its key was evicted gives nothing to the key that has the slot now.
#[test]
fn loom_a_late_refund_gives_another_key_no_quota() {
    check_all_orders(|| {
        let model = Arc::new(Model::with_tags(2, 0, 48, 1));
        assert_eq!((model.takes(8), model.takes(9)), (1, 1));
        let other = model.clone();
        let thread = thread::spawn(move || {
            for key in [8, 10] {
                other.reset(key);
                assert_eq!(other.takes(key + 2), 1);
            }
        });
        model.refund(8);
        thread.join().unwrap();
        assert!(model.left(12) <= 1);
    });
}

#[test]
fn loom_one_key_alone_and_with_another_is_counted_exactly() {
    check_all_orders(|| {
        let models = [(); 2].map(|()| Arc::new(Model::new(3, 0, 1 << 10)));
        assert_eq!(models.each_ref().map(|model| model.takes(8)), [1, 1]);
        let [one, other] = models.clone();
        let thread = thread::spawn(move || take_both(&one, &other));
        assert_eq!(models[0].takes(8), 1);
        let both = u64::from(matches!(thread.join().unwrap(), Ok(true)));
        assert_eq!(models.map(|model| model.left(8)), [1 - both, 2 - both]);
    });
}

/// Another thread takes from the decisive key in the meantime. Only that word is decided again.
#[test]
fn loom_a_hot_key_with_a_cold_one_is_taken_from_at_the_second_try() {
    check_all_orders(|| {
        let (cold, hot) = (Model::new(3, 0, 1 << 10), Arc::new(Model::new(3, 0, 1 << 10)));
        assert_eq!([cold.takes(8), hot.takes(8)], [1, 1]);
        let other = hot.clone();
        let thread = thread::spawn(move || other.takes(8));
        assert!(matches!(take_both(&cold, &hot), Ok(true)));
        assert_eq!(thread.join().unwrap(), 1);
        assert_eq!([cold.left(8), hot.left(8)], [1, 0]);
    });
}

/// The last unit of the decisive key goes to another thread, perhaps after the other word has been sealed.
#[test]
fn loom_a_hot_key_that_denies_leaves_the_cold_one_untouched() {
    check_all_orders(|| {
        let [cold, hot] = [(); 2].map(|()| Arc::new(Model::new(2, 0, 1 << 10)));
        assert_eq!([cold.takes(8), hot.takes(8)], [1, 1]);
        let (other_cold, other_hot) = (cold.clone(), hot.clone());
        let thread = thread::spawn(move || (other_hot.takes(8), other_cold.left(8)));
        let both = matches!(take_both(&cold, &hot), Ok(true));
        let (exclusively, seen) = thread.join().unwrap();
        assert_eq!(u64::from(both) + exclusively, 1);
        // A denied request has no visible effect.
        assert_eq!([cold.left(8), hot.left(8)], [1 - u64::from(both), 0]);
        assert!(seen == 1 || both);
    });
}

#[test]
fn loom_new_keys_in_a_full_table_share_one_quota() {
    check_all_orders(|| {
        // No memory to grow: two keys have a slot, and the others share.
        let model = Arc::new(Model::new(1, 0, 48));
        assert_eq!((model.takes(8), model.takes(9)), (1, 1));
        let other = model.clone();
        let thread = thread::spawn(move || other.takes(10));
        let here = model.takes(11);
        assert_eq!(here + thread.join().unwrap(), 1);
        assert_eq!([8, 9, 10, 11].map(|key| model.slot_refs(key)), [1, 1, 0, 0]);
    });
}

/// Whichever key loses its slot, no key has more quota left than before.
#[test]
fn loom_an_evicted_key_gains_no_quota() {
    check_orders(2, || {
        // No memory to grow, and both keys have more than half of their quota left.
        let model = Arc::new(Model::new(6, 0, 48));
        assert_eq!((model.takes(8), model.takes(9)), (1, 1));
        let other = model.clone();
        let thread = thread::spawn(move || other.takes(10));
        assert_eq!((model.takes(8), thread.join().unwrap()), (1, 1));
        assert!(model.left(8) <= 4 && model.left(9) <= 5 && model.left(10) <= 5);
        assert_eq!(model.slot_refs(8) + model.slot_refs(9) + model.slot_refs(10), 2);
    });
}

#[test]
fn loom_two_threads_take_from_both_keys_or_from_none() {
    check_all_orders(|| {
        let models = [(); 2].map(|()| Arc::new(Model::new(2, 0, 1 << 10)));
        assert_eq!(models.each_ref().map(|model| model.takes(8)), [1, 1]);
        let [one, other] = models.clone();
        let thread = thread::spawn(move || take_both(&other, &one));
        let here = take_both(&models[0], &models[1]);
        let taken = [here, thread.join().unwrap()].into_iter().filter(|taken| matches!(taken, Ok(true))).count() as u64;
        // One unit was left of each. Two threads that interfere with each other may both give up.
        assert!(taken <= 1);
        assert_eq!(models.map(|model| model.left(8)), [1 - taken; 2]);
    });
}

#[test]
fn loom_no_thread_reads_a_half_written_state() {
    check_all_orders(|| {
        // Two words: the count of a segment is split across both.
        let limit = Limit::new("wide", SlidingWindowCounter::new(1 << 32, MINUTE)).unwrap();
        let Compiled::Counter(algorithm) = limit.compiled() else { unreachable!() };
        assert_eq!(algorithm.words(), 2);
        let table = Arc::new(Table::new(Layout::tiny(2, 2, 0, 0), Budget::new(1 << 10)).unwrap());
        fn check(
            table: &Table,
            algorithm: &crate::algorithm::sliding_window_counter::Counter,
            cost: u64,
            mode: Mode,
        ) -> Verdict {
            let hit = HashedHit { limit: LimitId::first(), fingerprint: 8, cost };
            table.decide(algorithm, None, hit, NOW, mode)
        }
        check(&table, algorithm, (1 << 31) - 1, Mode::Take);
        let (other, same) = (table.clone(), limit.clone());
        let thread = thread::spawn(move || {
            let Compiled::Counter(algorithm) = same.compiled() else { unreachable!() };
            check(&other, algorithm, 1 << 31, Mode::Take);
        });
        let left = check(&table, algorithm, 0, Mode::Peek).remaining;
        thread.join().unwrap();
        let before = (1_u64 << 32) - ((1 << 31) - 1);
        assert!(left == before || left == before - (1 << 31), "{left}");
    });
}
