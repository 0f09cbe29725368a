//! Invalid input gets a typed error that names the field and the fix, or a defined result. It never causes a panic, an
//! endless wait or unbounded memory.

mod common;

use std::time::Duration;

use common::{Rig, START_US};
use tollgate::{
    Algorithm, FixedWindow, Hit, InvalidLimit, Key, LeakyBucket, Limit, Limiter, MAX_SPAN, MINUTE, ManualClock, Rate,
    SECOND, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

const PER_SECOND: Rate = Rate::per_second(1);
const NANOSECOND: Duration = Duration::from_nanos(1);

/// Checks that the error names the limit and the field, and ends with the fix.
fn is_refused(algorithm: impl Into<Algorithm>, field: &str) {
    let algorithm = algorithm.into();
    let error = Limit::new("mine", algorithm).expect_err("out of bounds");
    assert_eq!(error.field(), field, "{algorithm:?}: {error}");
    let shown = error.to_string();
    assert!(shown.starts_with("limit `mine`: "), "{shown}");
    let (_, fix) = shown.rsplit_once(": ").expect("a problem, then a fix");
    assert!(!fix.is_empty(), "{shown}");
    assert!(!shown.contains("Error") && !shown.contains("::"), "`{shown}` is written for people");
}

#[test]
fn a_quota_is_from_one_to_two_to_the_thirty_second() {
    for quota in [0, (1 << 32) + 1, u64::MAX] {
        is_refused(TokenBucket::new(quota, Rate::per_second(1_000_000)), "capacity");
        is_refused(TokenBucket::new(quota, Rate::per_second(1_000_000)).interval(), "capacity");
        is_refused(LeakyBucket::new(quota, Rate::per_second(1_000_000)), "capacity");
        is_refused(FixedWindow::new(quota, MINUTE), "limit");
        is_refused(FixedWindow::new(quota, MINUTE).from_first_request(), "limit");
        is_refused(SlidingWindowLog::new(quota, MINUTE), "limit");
        is_refused(SlidingWindowCounter::new(quota, MINUTE), "limit");
    }
    for quota in [1, 1 << 32] {
        let algorithms: [Algorithm; 5] = [
            TokenBucket::new(quota, Rate::per_second(1_000_000)).into(),
            LeakyBucket::new(quota, Rate::per_second(1_000_000)).into(),
            FixedWindow::new(quota, MINUTE).into(),
            SlidingWindowLog::new(quota, MINUTE).into(),
            SlidingWindowCounter::new(quota, MINUTE).into(),
        ];
        for algorithm in algorithms {
            assert_eq!(Limit::new("mine", algorithm).unwrap().quota(), quota);
        }
    }
}

#[test]
fn a_window_is_from_a_millisecond_to_years() {
    let below = Duration::from_millis(1) - NANOSECOND;
    for window in [Duration::ZERO, NANOSECOND, below, MAX_SPAN + Duration::from_micros(1), Duration::MAX] {
        is_refused(FixedWindow::new(10, window), "window");
        is_refused(FixedWindow::new(10, window).from_first_request(), "window");
        is_refused(SlidingWindowLog::new(10, window), "window");
        is_refused(SlidingWindowCounter::new(10, window), "window");
    }
    for window in [Duration::from_millis(1), Duration::from_secs(10 * 366 * 24 * 60 * 60)] {
        assert!(Limit::new("mine", FixedWindow::new(10, window)).is_ok(), "{window:?}");
        assert!(Limit::new("mine", SlidingWindowLog::new(10, window)).is_ok(), "{window:?}");
        assert!(Limit::new("mine", SlidingWindowCounter::new(10, window)).is_ok(), "{window:?}");
    }
}

#[test]
fn a_rate_that_brings_nothing_or_has_no_period_is_refused() {
    let rates = [
        Rate::per_second(0),
        Rate::new(1, Duration::ZERO),
        Rate::new(1, NANOSECOND),
        Rate::new(1, Duration::MAX),
        Rate::new(0, Duration::ZERO),
        Rate::new(u64::MAX, SECOND),
        Rate::new(u64::MAX, Duration::MAX),
    ];
    for rate in rates {
        is_refused(TokenBucket::new(10, rate), "refill");
        is_refused(TokenBucket::new(10, rate).interval(), "refill");
        is_refused(LeakyBucket::new(10, rate), "leak");
        is_refused(LeakyBucket::new(10, rate).queue(SECOND), "leak");
    }
}

#[test]
fn a_bucket_that_would_need_centuries_to_fill_is_refused() {
    let yearly = Rate::new(1, Duration::from_secs(365 * 24 * 60 * 60));
    let errors = [
        Limit::new("mine", TokenBucket::new(1 << 32, yearly)).unwrap_err(),
        Limit::new("mine", LeakyBucket::new(1 << 32, yearly)).unwrap_err(),
    ];
    for error in errors {
        assert!(["refill", "leak", "capacity"].contains(&error.field()), "{error}");
    }
}

#[test]
fn a_rate_that_is_no_number_is_refused() {
    for float in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, -0.001, 1e300, f64::MAX, f64::MIN_POSITIVE] {
        let error = Rate::try_from(float).expect_err("no rate");
        assert!(error.to_string().contains("7/s"), "{float}: {error}");
    }
    let texts =
        ["NaN/s", "-1/s", "inf/s", "1/0", "1/-1s", "", "/", "99999999999999999999/s", "1/99999999999d", "1/s/s", "١/s"];
    for text in texts {
        let error = text.parse::<Rate>().expect_err("no rate");
        assert!(error.to_string().contains("7/s"), "{text}: {error}");
    }
    let huge = "9".repeat(1_000_000);
    assert!(huge.parse::<Rate>().unwrap_err().to_string().len() < 200, "an error does not repeat a megabyte");
    for zero in ["0/s", "0.000/h", "1/0s"] {
        let refused = zero.parse::<Rate>().and_then(|rate| Limit::new("mine", TokenBucket::new(10, rate)));
        assert!(refused.is_err(), "{zero}");
    }
}

#[test]
fn segments_are_from_one_to_a_bound() {
    for segments in [0, 1_000_000, u32::MAX] {
        is_refused(SlidingWindowCounter::new(10, MINUTE).segments(segments), "segments");
    }
}

#[test]
fn a_longest_wait_past_all_time_is_refused_or_means_no_bound() {
    let queue = LeakyBucket::new(10, PER_SECOND).queue(Duration::MAX);
    match Limit::new("mine", queue) {
        Err(error) => assert_eq!(error.field(), "max_wait", "{error}"),
        Ok(limit) => assert_eq!(Rig::new(limit, START_US).admitted_at(0, 20), 10),
    }
    let at_once = Rig::of(LeakyBucket::new(10, PER_SECOND).queue(Duration::ZERO));
    assert_eq!(at_once.admitted_at(0, 20), 1, "only who need not wait");
}

#[test]
fn a_cost_above_the_quota_is_denied_for_good_and_takes_nothing() {
    let algorithms: [Algorithm; 8] = [
        TokenBucket::new(10, PER_SECOND).into(),
        TokenBucket::new(10, PER_SECOND).interval().into(),
        LeakyBucket::new(10, PER_SECOND).into(),
        LeakyBucket::new(10, PER_SECOND).queue(MINUTE).into(),
        FixedWindow::new(10, MINUTE).into(),
        SlidingWindowLog::new(10, MINUTE).into(),
        SlidingWindowLog::new(10, MINUTE).count_denied().into(),
        SlidingWindowCounter::new(10, MINUTE).segments(3).into(),
    ];
    for algorithm in algorithms {
        let rig = Rig::of(algorithm);
        for cost in [11, 1 << 32, (1 << 32) + 1, u64::MAX - 1, u64::MAX] {
            let answer = rig.ask(START_US, cost);
            assert!(!answer.allowed, "{cost} of {algorithm:?}");
            assert_eq!((answer.retry_after, answer.remaining), (None, 10), "{cost} of {algorithm:?}");
        }
        assert!(rig.ask(START_US, 10).allowed, "{algorithm:?}");
    }
}

#[test]
fn costs_that_overflow_together_are_denied() {
    let limits = ["a", "b"].map(|name| Limit::new(name, TokenBucket::new(10, PER_SECOND)).unwrap());
    let [first, second] = limits;
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limiter = Limiter::builder().limit(first).limit(second).clock(clock).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| limiter.id(name).unwrap());
    let decision = limiter.decide_now(&[Hit::new(a, "key").cost(1), Hit::new(b, "key").cost(u64::MAX)]);
    assert!(!decision.is_allowed());
    assert_eq!((decision.limit(), decision.retry_after()), (Some(b), None));
    assert!(!limiter.decide_now(&[Hit::new(a, "key").cost(u64::MAX), Hit::new(a, "key").cost(2)]).is_allowed());
    assert_eq!(limiter.peek("key").remaining(), 10);
}

#[test]
fn one_limit_and_key_named_twice_in_a_request_pay_twice() {
    let rig = Rig::of(TokenBucket::new(3, PER_SECOND));
    let id = rig.limiter.id("limit").unwrap();
    assert!(rig.limiter.decide_now(&[Hit::new(id, "key"), Hit::new(id, "key")]).is_allowed());
    assert_eq!(rig.limiter.peek("key").remaining(), 1);
    assert!(!rig.limiter.decide_now(&[Hit::new(id, "key"), Hit::new(id, "key")]).is_allowed());
    assert_eq!(rig.limiter.peek("key").remaining(), 1, "all or nothing");
}

#[test]
fn keys_are_any_bytes_of_any_length() {
    let rig = Rig::of(TokenBucket::new(1, PER_SECOND));
    let long = "k".repeat(1 << 20);
    let nearly = format!("{}j", &long[1..]);
    let before = rig.limiter.memory_used();
    for key in ["", long.as_str(), nearly.as_str(), "\0", "\0\0"] {
        assert!(rig.limiter.check(key).is_allowed(), "first of {} bytes", key.len());
        assert!(!rig.limiter.check(key).is_allowed(), "second of {} bytes", key.len());
    }
    assert!(rig.limiter.memory_used() - before < 1 << 20, "a key of a megabyte is not kept");
    assert!(rig.limiter.check(&[0xff, 0xfe, 0x00]).is_allowed());
    let _ = rig.limiter.check(Key::parts(&[]));
    assert!(!rig.limiter.check(Key::parts(&[])).is_allowed(), "no parts are a key too");
}

#[test]
fn parts_do_not_run_together() {
    let rig = Rig::of(TokenBucket::new(1, PER_SECOND));
    let lists: [&[&str]; 6] = [&["ab", "c"], &["a", "bc"], &["abc", ""], &["", "abc"], &["a", "b", "c"], &["abc"]];
    for parts in lists {
        assert!(rig.limiter.check(Key::parts(parts)).is_allowed(), "{parts:?}");
    }
    assert!(!rig.limiter.check("abc").is_allowed(), "one part is the key itself");
}

#[test]
fn a_name_is_not_empty_and_not_a_megabyte() {
    for name in [String::new(), "n".repeat(1 << 20)] {
        let error = Limit::new(name, TokenBucket::new(10, PER_SECOND)).unwrap_err();
        assert_eq!(error.field(), "name");
        assert!(error.to_string().len() < 300, "an error does not repeat a megabyte");
    }
}

fn limits(names: impl Iterator<Item = String>) -> Result<Limiter, InvalidLimit> {
    let limit = |name| Limit::new(name, TokenBucket::new(10, PER_SECOND)).expect("a valid limit");
    names.fold(Limiter::builder(), |builder, name| builder.limit(limit(name))).build()
}

#[test]
fn two_limits_of_one_name_are_refused() {
    let error = limits(["same", "other", "same"].map(String::from).into_iter()).unwrap_err();
    assert_eq!(error.field(), "name");
    assert!(error.to_string().contains("same"), "{error}");
}

#[test]
fn a_limiter_without_limits_is_refused() {
    assert!(limits(std::iter::empty()).is_err());
}

#[test]
fn a_million_limits_are_refused() {
    let error = limits((0..1_000_000).map(|index| format!("limit {index}"))).unwrap_err();
    assert!(!error.to_string().is_empty());
    assert_eq!(error.field(), "limits");
}

#[test]
fn a_bound_on_memory_that_holds_nothing_is_refused_or_held() {
    for max_memory in [0, 1, 64] {
        let limit = Limit::new("mine", TokenBucket::new(10, PER_SECOND)).unwrap();
        match Limiter::builder().limit(limit).max_memory(max_memory).build() {
            Err(error) => assert_eq!(error.field(), "max_memory", "{error}"),
            Ok(limiter) => assert!(limiter.memory_used() <= max_memory),
        }
    }
}

#[test]
fn the_ends_of_time_are_moments_like_others() {
    for now in [0, Timestamp::MAX.as_micros(), u64::MAX] {
        let rig = Rig::of(SlidingWindowLog::new(10, MINUTE));
        assert!((0..10).all(|_| rig.ask(now, 1).allowed), "at {now}");
        assert!(!rig.ask(now, 1).allowed, "at {now}");
    }
    let rig = Rig::of(TokenBucket::new(10, PER_SECOND));
    rig.clock.set(Timestamp::MAX);
    rig.clock.advance(Duration::MAX);
    assert!(rig.limiter.check_n("key", 10).is_allowed());
    assert!(!rig.limiter.check("key").is_allowed());
    rig.set(0);
    assert!(rig.limiter.reserve("key", u64::MAX, Duration::MAX).is_err());
}
