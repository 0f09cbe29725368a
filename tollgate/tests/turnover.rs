//! Keys are used, come to rest and disappear. There are far more of them than slots, but few at a time. No decision
//! shows that a key at rest was dropped, that its slot was reused, or that the table grew.

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::{Answer, Dice, Rig, START_US};
use tollgate::{
    Algorithm, FixedWindow, LeakyBucket, Limit, Limiter, ManualClock, Rate, SECOND, SlidingWindowCounter,
    SlidingWindowLog, Timestamp, TokenBucket,
};

const QUOTA: u64 = 6;
const STEPS: u64 = 40_000;
const STEP_US: u64 = 1_000;
/// Steps between new keys: ten thousand keys arrive in total.
const STEPS_PER_KEY: u64 = 4;
/// Room for some hundreds of keys.
const MAX_MEMORY: usize = 64 * 1024;
/// Keys in use at the same time.
const IN_USE: u64 = 40;

/// Sends the requests of all keys to one small limiter, and those of each key to a separate limiter, and compares the
/// decisions.
fn each_key_is_judged_as_if_alone(algorithm: Algorithm) {
    let limit = Limit::new("limit", algorithm).expect("a valid limit");
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let together = Limiter::builder().limit(limit.clone()).max_memory(MAX_MEMORY).clock(clock.clone()).build();
    let together = together.expect("enough memory for those in use");
    let mut alone: HashMap<u64, Rig> = HashMap::new();
    let mut dice = Dice(7);
    for step in 0..STEPS {
        let now = START_US + step * STEP_US + dice.below(STEP_US);
        clock.set(Timestamp::from_micros(now));
        let (key, cost) = (step / STEPS_PER_KEY + dice.below(IN_USE), dice.below(QUOTA));
        let answer = Answer::from(together.check_n(&key.to_le_bytes(), cost));
        let rig = alone.entry(key).or_insert_with(|| Rig::new(limit.clone(), now));
        assert_eq!(answer, rig.ask(now, cost), "{algorithm:?}: key {key} for {cost} at step {step}");
        if step % 1_000 == 0 {
            alone.retain(|key, _| *key + IN_USE > step / STEPS_PER_KEY);
        }
    }
    assert!(together.memory_used() <= MAX_MEMORY);
}

#[test]
fn keys_of_a_bucket_are_judged_as_if_alone() {
    let rate = Rate::per_second(QUOTA);
    each_key_is_judged_as_if_alone(TokenBucket::new(QUOTA, rate).into());
    each_key_is_judged_as_if_alone(TokenBucket::new(QUOTA, rate).interval().into());
    each_key_is_judged_as_if_alone(LeakyBucket::new(QUOTA, rate).into());
    each_key_is_judged_as_if_alone(LeakyBucket::new(QUOTA, rate).queue(Duration::from_millis(500)).into());
}

#[test]
fn keys_of_a_fixed_window_are_judged_as_if_alone() {
    each_key_is_judged_as_if_alone(FixedWindow::new(QUOTA, SECOND).into());
    each_key_is_judged_as_if_alone(FixedWindow::new(QUOTA, SECOND).from_first_request().into());
}

#[test]
fn keys_of_a_log_are_judged_as_if_alone() {
    each_key_is_judged_as_if_alone(SlidingWindowLog::new(QUOTA, SECOND).into());
    each_key_is_judged_as_if_alone(SlidingWindowLog::new(QUOTA, SECOND).count_denied().into());
}

#[test]
fn keys_of_a_counter_are_judged_as_if_alone() {
    each_key_is_judged_as_if_alone(SlidingWindowCounter::new(QUOTA, SECOND).into());
    each_key_is_judged_as_if_alone(SlidingWindowCounter::new(QUOTA, SECOND).segments(7).into());
}
