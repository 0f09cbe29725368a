//! Far more live keys than slots. Memory stays within its bound, no key gets more than its quota, and existing keys are
//! still served.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::START_US;
use tollgate::{
    Algorithm, FixedWindow, HOUR, LeakyBucket, Limit, Limiter, ManualClock, Rate, SlidingWindowCounter,
    SlidingWindowLog, Timestamp, TokenBucket,
};

const QUOTA: u64 = 10;
const MAX_MEMORY: usize = 32 * 1024;
/// A log has larger keys, and its first buckets alone take this much.
const MAX_MEMORY_OF_LOGS: usize = 72 * 1024;
/// A hundred times as many keys as fit in the memory, at 23 bytes each, the smallest size of a key; for a log at 64
/// bytes.
const ATTACKERS: u64 = 100 * (MAX_MEMORY as u64 / 23);
/// Longer than any state in these tests lasts.
const AGED_OUT: Duration = Duration::from_secs(24 * 60 * 60);

struct Siege {
    limiter: Limiter,
    clock: ManualClock,
    max_memory: usize,
}

impl Siege {
    fn of(algorithm: Algorithm) -> Self {
        let clock = ManualClock::at(Timestamp::from_micros(START_US));
        let limit = Limit::new("besieged", algorithm).expect("a valid limit");
        let max_memory =
            if matches!(algorithm, Algorithm::SlidingWindowLog(_)) { MAX_MEMORY_OF_LOGS } else { MAX_MEMORY };
        // A fixed seed: new keys that share a bucket also share a quota while it is full.
        let limiter = Limiter::builder().limit(limit).max_memory(max_memory).clock(clock.clone());
        let limiter = limiter.hash_seed([1, 2, 3, 4]).build();
        Self { limiter: limiter.expect("enough memory to begin with"), clock, max_memory }
    }

    /// Takes `cost` from the key of every attacker, in order. Calls `between` after every hundredth part of them.
    fn attack(&self, cost: u64, mut between: impl FnMut(u64)) {
        for percent in 0..100 {
            for attacker in percent * ATTACKERS / 100..(percent + 1) * ATTACKERS / 100 {
                let _ = self.limiter.check_n(&attacker.to_le_bytes(), cost);
            }
            between(percent);
            assert!(self.limiter.memory_used() <= self.max_memory, "{} bytes", self.limiter.memory_used());
        }
    }

    fn takes(&self, key: &str, requests: usize) -> usize {
        (0..requests).filter(|_| self.limiter.check(key).is_allowed()).count()
    }
}

fn a_denied_key_stays_denied(algorithm: Algorithm) {
    let siege = Siege::of(algorithm);
    assert_eq!(siege.takes("greedy", 20), 10);
    for cost in [1, QUOTA] {
        siege.attack(cost, |_| assert!(!siege.limiter.check("greedy").is_allowed()));
    }
    let denial = siege.limiter.check("greedy");
    siege.clock.advance(denial.retry_after().expect("it fits an empty bucket") - Duration::from_micros(1));
    assert!(!siege.limiter.check("greedy").is_allowed(), "a microsecond before its time");
}

/// Checks keys that existed before the attack, whatever they have spent, and are still in use. In one run the attackers first spend less than
/// these keys, to fill the table, and then more, to spend the shared quota; in the other run first more and then less.
fn honest_keys_are_served_exactly(algorithm: Algorithm) {
    let honest: Vec<String> = (0..20).map(|key| format!("honest {key}")).collect();
    for (costs, spent) in [([1, QUOTA], 6), ([QUOTA, 1], 1), ([1, QUOTA - 1], 1)] {
        let siege = Siege::of(algorithm);
        for key in &honest {
            assert_eq!(siege.takes(key, spent), spent);
        }
        let mut left = QUOTA - spent as u64;
        for cost in costs {
            siege.attack(cost, |percent| {
                if percent % 50 == 49 {
                    left -= 1;
                    for key in &honest {
                        let decision = siege.limiter.check(key);
                        assert!(decision.is_allowed(), "{key} at {percent} % of cost {cost} of {costs:?}");
                        assert_eq!(decision.remaining(), left, "{key} at {percent} % of cost {cost} of {costs:?}");
                    }
                }
            });
        }
        assert!(honest.iter().all(|key| !siege.limiter.check_n(key, left + 1).is_allowed()));
    }
}

fn nobody_is_over_admitted(algorithm: Algorithm) {
    const SAMPLES: u64 = 50;
    for cost in [1, 3] {
        let siege = Siege::of(algorithm);
        let mut admitted = vec![0; SAMPLES as usize];
        siege.attack(cost, |percent| {
            // Different samples send requests at different times, and most of them often.
            for sample in (0..SAMPLES).filter(|sample| (percent + sample) % 3 != 0) {
                let decision = siege.limiter.check_n(&format!("sample {sample}"), 1 + sample % 4);
                if decision.is_allowed() {
                    admitted[sample as usize] += decision.cost();
                }
            }
        });
        assert!(admitted.iter().all(|admitted| *admitted <= QUOTA), "{admitted:?}");
    }
}

fn all_are_served_again_after_it(algorithm: Algorithm) {
    let siege = Siege::of(algorithm);
    assert_eq!(siege.takes("greedy", 20), 10);
    siege.attack(QUOTA, |_| {});
    siege.clock.advance(AGED_OUT);
    for key in ["greedy", "honest", "stranger"] {
        let before = siege.limiter.peek(key);
        assert_eq!((before.remaining(), before.reset_after()), (QUOTA, Duration::ZERO), "{key}");
        assert_eq!(siege.takes(key, 20), 10, "{key}");
    }
    for attacker in 0..50_u64 {
        assert!(siege.limiter.check_n(&attacker.to_le_bytes(), QUOTA).is_allowed());
    }
    assert!(siege.limiter.memory_used() <= siege.max_memory);
}

/// The same attackers in four threads at once, each with repeated requests.
fn nobody_is_over_admitted_by_many_threads(algorithm: Algorithm) {
    let siege = Siege::of(algorithm);
    let admitted: Vec<AtomicU64> = (0..ATTACKERS / 10).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        for from in 0..4 {
            let (siege, admitted) = (&siege, &admitted);
            scope.spawn(move || {
                for step in 0..ATTACKERS / 2 {
                    let attacker = (step + from * ATTACKERS / 40) % (ATTACKERS / 10);
                    let decision = siege.limiter.check_n(&attacker.to_le_bytes(), 1 + (attacker + step) % 4);
                    if decision.is_allowed() {
                        admitted[attacker as usize].fetch_add(decision.cost(), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let most = admitted.iter().map(|admitted| admitted.load(Ordering::Relaxed)).max();
    // A key that comes back after it was evicted may be charged up to half of its quota.
    assert!(most.is_some_and(|most| most > QUOTA / 2 && most <= QUOTA), "{most:?}");
    assert!(siege.limiter.memory_used() <= siege.max_memory);
}

/// New keys of many threads get through a full table, also if no key can be evicted for them.
#[test]
fn new_keys_of_many_threads_do_not_wait_for_each_other() {
    const THREADS: u64 = 24;
    const KEYS: u64 = 400;
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let log = Limit::new("log", SlidingWindowLog::new(THREADS * KEYS, HOUR)).expect("valid");
    let limiter =
        Limiter::builder().limit(log).clock(clock).max_memory(MAX_MEMORY_OF_LOGS).build().expect("enough memory");
    let with_slots = (0..2_000_u64).filter(|key| limiter.check(&key.to_le_bytes()).is_allowed()).count();
    assert!(limiter.overflow(limiter.id("log").expect("the limit")).evicted == 0 && with_slots > 0);
    thread::scope(|scope| {
        for thread in 1..=THREADS {
            let limiter = &limiter;
            scope.spawn(move || {
                for key in 0..KEYS {
                    let _ = limiter.check(&(thread << 32 | key).to_le_bytes());
                }
            });
        }
    });
    assert!(limiter.memory_used() <= MAX_MEMORY_OF_LOGS);
}

/// More keys than slots, each of which spends one unit, leave at least half of the quota to a new key, for no longer than
/// the states of invented and new keys last.
fn new_keys_are_served(algorithm: Algorithm) {
    let siege = Siege::of(algorithm);
    let slots = MAX_MEMORY as u64 / 128 * 7;
    let decisions = (0..slots * 5 / 4).map(|attacker| siege.limiter.check(&attacker.to_le_bytes()));
    let last = decisions.map(|decision| decision.reset_after()).max();
    let new_keys: Vec<String> = (0..20).map(|key| format!("new {key}")).collect();
    for key in &new_keys {
        assert!(siege.limiter.peek(key).remaining() > QUOTA / 2, "{key}");
        assert_eq!(siege.takes(key, 5), 5, "{key}");
    }
    // New keys that found no slot share what they took with those that follow.
    let last = last.max(new_keys.iter().map(|key| siege.limiter.peek(key).reset_after()).max());
    siege.clock.advance(last.expect("there are attackers"));
    let fresh = (0..1000).map(|key| siege.limiter.peek(&format!("fresh {key}")).remaining());
    assert_eq!(fresh.min(), Some(QUOTA));
}

#[test]
fn new_keys_are_served_during_an_attack() {
    new_keys_are_served(TokenBucket::new(QUOTA, Rate::per_minute(1)).into());
    new_keys_are_served(TokenBucket::new(QUOTA, Rate::per_minute(1)).interval().into());
    new_keys_are_served(LeakyBucket::new(QUOTA, Rate::per_minute(1)).into());
    new_keys_are_served(FixedWindow::new(QUOTA, HOUR).into());
    new_keys_are_served(SlidingWindowCounter::new(QUOTA, HOUR).into());
}

/// Late keys that have spent 3 lose their slots to keys that spend 4, and share a floor of 4 with them. A refund or a
/// reset gives such a key a slot again, unless every late key near its bucket has spent half of its quota: then nothing
/// changes.
#[test]
fn evicted_keys_are_refunded_and_reset() {
    const FLOOR: u64 = 4;
    let siege = Siege::of(FixedWindow::new(QUOTA, HOUR).into());
    let slots = MAX_MEMORY as u64 / 128 * 7;
    let attack = |attackers: std::ops::Range<u64>| {
        for attacker in attackers {
            let _ = siege.limiter.check_n(&attacker.to_le_bytes(), FLOOR);
        }
    };
    attack(0..slots * 9 / 10);
    let keys = (0..100).map(|key| format!("late {key}"));
    let charged: Vec<_> = keys.map(|key| (siege.limiter.reserve(&key, 3, HOUR).expect("3 of 10 fit"), key)).collect();
    attack(slots * 9 / 10..slots * 5 / 4);
    let left = |key: &String| siege.limiter.peek(key).remaining();
    let evicted: Vec<_> = charged.into_iter().filter(|(_, key)| left(key) == QUOTA - FLOOR).collect();
    assert!(!evicted.is_empty());
    let mut has_slot = Vec::new();
    // Only a few, because each of them takes the slot of another key.
    for (reservation, key) in evicted.into_iter().take(5) {
        siege.limiter.refund(reservation);
        let after_refund = left(&key);
        siege.limiter.reset(&key);
        let after_reset = left(&key);
        has_slot.push(after_reset == QUOTA);
        let expected = if after_reset == QUOTA { [QUOTA - FLOOR + 3, QUOTA] } else { [QUOTA - FLOOR; 2] };
        assert_eq!([after_refund, after_reset], expected, "{key}");
    }
    assert!(has_slot.contains(&true), "{has_slot:?}");
    let overflow = siege.limiter.overflow(siege.limiter.id("besieged").expect("it is there"));
    assert!(overflow.evicted > 0);
}

/// Every request has a new key, so a denial can only be for lack of room. Keys with a quota of 2 are never evicted.
#[test]
fn denials_for_lack_of_room_are_counted_whatever_tables_a_limit_has() {
    let limit = |window| Limit::new("besieged", FixedWindow::new(2, window)).expect("a valid limit");
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let builder = || Limiter::builder().limit(limit(24 * HOUR)).max_memory(MAX_MEMORY).clock(clock.clone());
    let mut keys = 0_u64;
    let mut denied = |limiter: &Limiter| {
        let is_denied = |_: &u64| {
            keys += 1;
            !limiter.check(&keys.to_le_bytes()).is_allowed()
        };
        (0..ATTACKERS).filter(is_denied).count() as u64
    };
    let counted = |limiter: &Limiter| limiter.overflow(limiter.id("besieged").expect("the limit")).denied;
    let alone = builder().build().expect("valid");
    let with_plan = builder().variant("gold", limit(12 * HOUR)).build().expect("valid");
    for before in [alone, with_plan] {
        assert!(!before.check_n("too much", 3).is_allowed());
        assert_eq!(counted(&before), 0, "a cost above the quota is no lack of room");
        let first = denied(&before);
        assert!(first > ATTACKERS / 2, "{first}");
        assert_eq!(counted(&before), first);
        let reloaded = before.with_limits(vec![limit(12 * HOUR)]).expect("valid");
        let second = denied(&reloaded);
        assert!(second > ATTACKERS / 2, "{second}");
        assert_eq!(counted(&reloaded), first + second, "a reload keeps the counts");
    }
}

macro_rules! besieged {
    ($($name:ident: $algorithm:expr;)+) => {$(
        mod $name {
            use super::*;

            #[test]
            fn a_denied_key_stays_denied() {
                super::a_denied_key_stays_denied($algorithm.into());
            }

            #[test]
            fn honest_keys_are_served_exactly() {
                super::honest_keys_are_served_exactly($algorithm.into());
            }

            #[test]
            fn nobody_is_over_admitted() {
                super::nobody_is_over_admitted($algorithm.into());
            }

            #[test]
            fn nobody_is_over_admitted_by_many_threads() {
                super::nobody_is_over_admitted_by_many_threads($algorithm.into());
            }

            #[test]
            fn all_are_served_again_after_it() {
                super::all_are_served_again_after_it($algorithm.into());
            }
        }
    )+};
}

besieged! {
    token_bucket: TokenBucket::new(QUOTA, Rate::per_minute(1));
    token_bucket_interval: TokenBucket::new(QUOTA, Rate::per_minute(1)).interval();
    leaky_bucket: LeakyBucket::new(QUOTA, Rate::per_minute(1));
    leaky_queue: LeakyBucket::new(QUOTA, Rate::per_minute(1)).queue(HOUR);
    fixed_window: FixedWindow::new(QUOTA, HOUR);
    fixed_window_first_request: FixedWindow::new(QUOTA, HOUR).from_first_request();
    sliding_window_log: SlidingWindowLog::new(QUOTA, HOUR);
    sliding_window_log_count_denied: SlidingWindowLog::new(QUOTA, HOUR).count_denied();
    sliding_window_counter: SlidingWindowCounter::new(QUOTA, HOUR);
    sliding_window_counter_segments: SlidingWindowCounter::new(QUOTA, HOUR).segments(6);
}

/// Returns a crowded limiter in which a part of the shared quota is spent.
fn crowded_with_first_request_windows() -> Siege {
    let siege = Siege::of(FixedWindow::new(QUOTA, HOUR).from_first_request().into());
    for attacker in 0..MAX_MEMORY as u64 / 23 {
        let _ = siege.limiter.check(&attacker.to_le_bytes());
    }
    siege
}

/// Checks that new keys late in the shared window do not get a second window when that one ends.
fn strangers_keep_to_their_own_window(siege: &Siege) {
    let strangers = (0..2_000).map(|key| format!("stranger {key}"));
    let served: Vec<_> = strangers.filter(|key| siege.takes(key, 20) > 0).collect();
    assert!(!served.is_empty());
    siege.clock.advance(HOUR / 10);
    for key in served {
        assert!(!siege.limiter.check_n(&key, QUOTA).is_allowed(), "the window of {key} is a tenth over");
    }
}

#[test]
fn a_window_that_strangers_share_does_not_end_before_their_own() {
    let siege = crowded_with_first_request_windows();
    siege.clock.advance(HOUR * 9 / 10);
    strangers_keep_to_their_own_window(&siege);
}

#[test]
fn a_window_that_a_newcomer_inherits_does_not_end_before_its_own() {
    let siege = crowded_with_first_request_windows();
    siege.clock.advance(HOUR * 9 / 10);
    // Frees slots, while a part of the shared quota is still spent.
    for attacker in 0..MAX_MEMORY as u64 / 23 {
        siege.limiter.reset(&attacker.to_le_bytes());
    }
    strangers_keep_to_their_own_window(&siege);
}
