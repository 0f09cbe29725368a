//! Refunds and resets by the name of a limit: memory and Redis agree after each of them.

use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::Union;
use proptest::test_runner::{Config, TestRunner};
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::{Layout, RedisLimiter, RedisSettings};
use tollgate::{
    Algorithm, Ban, Decision, FixedWindow, HOUR, LeakyBucket, Limit, Limiter, MINUTE, ManualClock, OnStoreFailure,
    Rate, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};
use tollgate_rules::{Gate, KeyPart, Rule, RuleSet};

/// Traces per run. Each has up to sixty operations on an empty Redis.
const TRACES: u32 = 400;

const KEY: &[&[u8]] = &[b"ann"];

#[derive(Clone, Debug)]
enum Op {
    Check(u64),
    /// Single requests at different times: they make a log long.
    Burst(u64),
    Refund(u64),
    Reset,
    /// Other numbers, or another algorithm, for the same keys.
    Change(Algorithm),
    Forward(u64),
    Back(u64),
}

/// Returns the algorithms and modes whose keys are stored in the same way in that layout, so that one can replace the
/// other.
fn kinds(layout: Layout) -> Vec<BoxedStrategy<Algorithm>> {
    let span = || prop_oneof![Just(1_000_u64), Just(60_000_000), 1_000..10_000_000_u64].prop_map(Duration::from_micros);
    let rate = || (1_u64..=20, span()).prop_map(|(count, period)| Rate::new(count, period));
    let most_segments = if layout == Layout::Compact { 6_u32 } else { 12 };
    let mut kinds = vec![
        (1_u64..=300, rate()).prop_map(|(quota, rate)| TokenBucket::new(quota, rate).into()).boxed(),
        (1_u64..=300, rate()).prop_map(|(quota, rate)| TokenBucket::new(quota, rate).interval().into()).boxed(),
        (1_u64..=300, rate()).prop_map(|(quota, rate)| LeakyBucket::new(quota, rate).into()).boxed(),
        (1_u64..=30, rate()).prop_map(|(quota, rate)| LeakyBucket::new(quota, rate).queue(HOUR).into()).boxed(),
        (1_u64..=300, span()).prop_map(|(quota, span)| FixedWindow::new(quota, span).into()).boxed(),
        (1_u64..=300, span())
            .prop_map(|(quota, span)| FixedWindow::new(quota, span).from_first_request().into())
            .boxed(),
        (1_u64..=300, span(), 1..=most_segments)
            .prop_map(|(quota, span, segments)| SlidingWindowCounter::new(quota, span).segments(segments).into())
            .boxed(),
    ];
    if layout == Layout::Plain {
        kinds.extend([
            (1_u64..=30, span()).prop_map(|(quota, span)| SlidingWindowLog::new(quota, span).into()).boxed(),
            (100_u64..=400).prop_map(|quota| SlidingWindowLog::new(quota, HOUR).into()).boxed(),
            (1_u64..=30, span())
                .prop_map(|(quota, span)| SlidingWindowLog::new(quota, span).count_denied().into())
                .boxed(),
        ]);
    }
    kinds
}

/// Generates an algorithm and operations, half of whose changes keep the algorithm and change its numbers.
fn traces(layout: Layout) -> impl Strategy<Value = (Algorithm, Vec<Op>)> {
    let kinds = kinds(layout);
    (0..kinds.len()).prop_flat_map(move |kind| {
        let changes = prop_oneof![kinds[kind].clone(), Union::new(kinds.clone())];
        (kinds[kind].clone(), ops(changes))
    })
}

fn gaps() -> impl Strategy<Value = u64> {
    prop_oneof![Just(1_u64), 1_u64..2_000, 1_u64..2_000_000, 1_u64..200_000_000]
}

/// The operations of a trace, which mixes changes of the numbers, steps back of the clock and refunds.
fn ops(changes: impl Strategy<Value = Algorithm> + 'static) -> impl Strategy<Value = Vec<Op>> {
    let units = || prop_oneof![4 => 1_u64..=8, 2 => 0_u64..=350, 1 => Just(u64::MAX)];
    let op = prop_oneof![
        8 => units().prop_map(Op::Check),
        1 => (1_u64..200).prop_map(Op::Burst),
        4 => units().prop_map(Op::Refund),
        1 => Just(Op::Reset),
        2 => changes.prop_map(Op::Change),
        5 => gaps().prop_map(Op::Forward),
        2 => gaps().prop_map(Op::Back),
    ];
    proptest::collection::vec(op, 1..60)
}

fn rules(algorithm: Algorithm) -> Option<RuleSet> {
    let limit = Limit::new("per-user", algorithm).ok()?;
    RuleSet::builder().rule(Rule::new(limit).key(KeyPart::header("x-user-id"))).build().ok()
}

async fn checked(gate: &Gate, cost: u64) -> Decision {
    let outcome = gate.check_by_name("per-user", KEY, cost).expect("the rule exists").outcome().await;
    *outcome.decision().expect("the limit decides")
}

async fn refunded(gate: &Gate, units: u64) -> Decision {
    let outcome = gate.refund_by_name("per-user", KEY, units).expect("the rule exists").await.expect("refunded");
    *outcome.decision().expect("the limit decides")
}

async fn reset(gate: &Gate) -> Decision {
    let outcome = gate.reset_by_name("per-user", KEY).expect("the rule exists").await.expect("reset");
    *outcome.decision().expect("the limit decides")
}

/// The numbers of a decision on which both stores must agree.
fn numbers(decision: &Decision) -> (bool, u64, Duration, Option<Duration>) {
    (decision.is_allowed(), decision.remaining(), decision.reset_after(), decision.retry_after())
}

async fn agree(server: &RedisServer, layout: Layout, algorithm: Algorithm, ops: Vec<Op>) {
    let Some(first) = rules(algorithm) else { return };
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let mut now = 1_700_000_000_000_000_u64;
    let clock = ManualClock::at(Timestamp::from_micros(now));
    let here = Gate::with_limiter(first.clone(), Limiter::builder().clock(clock.clone())).expect("built");
    let settings = RedisSettings::new(server.url()).layout(layout);
    let settings = if layout == Layout::Compact { settings.expected_keys(1) } else { settings };
    let settings = RedisLimiter::builder(settings).clock(clock.clone()).store_timeout(Duration::from_secs(10));
    let there = Gate::on_redis(first, settings.on_store_failure(OnStoreFailure::Deny)).await.expect("built");
    // Tables of limits that are no longer in use are dropped once their keys are idle.
    let mut kept = Vec::new();
    for (step, op) in ops.into_iter().enumerate() {
        let context = format!("step {step}: {op:?}");
        match op {
            Op::Check(cost) => {
                assert_eq!(numbers(&checked(&here, cost).await), numbers(&checked(&there, cost).await), "{context}");
            }
            Op::Burst(requests) => {
                for _ in 0..requests {
                    assert_eq!(numbers(&checked(&here, 1).await), numbers(&checked(&there, 1).await), "{context}");
                    now += 1;
                    clock.set(Timestamp::from_micros(now));
                }
            }
            Op::Refund(units) => {
                // A check corrects the state if the clock has stepped back, even if it costs nothing.
                let before = checked(&here, 0).await;
                assert_eq!(numbers(&before), numbers(&checked(&there, 0).await), "{context}");
                let after = refunded(&here, units).await;
                assert_eq!(numbers(&after), numbers(&refunded(&there, units).await), "{context}");
                assert!(after.remaining() >= before.remaining(), "{context}");
                assert!(after.remaining() <= before.remaining().saturating_add(units), "{context}");
                assert!(after.remaining() <= after.quota(), "{context}");
            }
            Op::Reset => {
                let after = reset(&here).await;
                assert_eq!(after.remaining(), after.quota(), "{context}");
                assert_eq!(numbers(&after), numbers(&reset(&there).await), "{context}");
            }
            Op::Change(algorithm) => {
                if let Some(rules) = rules(algorithm) {
                    kept.push((here.pinned(), there.pinned()));
                    here.replace(rules.clone()).expect("replaced");
                    there.replace(rules).expect("replaced");
                }
            }
            Op::Forward(gap) => now += gap,
            Op::Back(gap) => now -= gap,
        }
        clock.set(Timestamp::from_micros(now));
    }
}

#[test]
fn memory_and_redis_agree_on_refunds_without_a_receipt() {
    agree_on_traces(Layout::Plain);
}

#[test]
fn memory_and_the_compact_layout_agree_on_refunds_without_a_receipt() {
    agree_on_traces(Layout::Compact);
}

fn agree_on_traces(layout: Layout) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let mut runner = TestRunner::new(Config { cases: TRACES, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&traces(layout), |(algorithm, ops)| {
        runtime.block_on(agree(&server, layout, algorithm, ops));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// The window that counts begins after the time of the clock, and so does the period of the bucket that replaces it.
#[test]
fn a_refund_after_the_clock_stepped_back_is_the_same_on_both() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let bucket = TokenBucket::new(102, Rate::new(1, Duration::from_millis(1))).interval().into();
    let ops = vec![Op::Check(1), Op::Back(20_001_001), Op::Change(bucket), Op::Refund(1), Op::Check(1)];
    runtime.block_on(agree(&server, Layout::Plain, FixedWindow::new(3, MINUTE).into(), ops));
}

/// The debt looks larger than the capacity under which it was made, but no larger than the raised one. So it is not
/// attributed to the clock, whichever numbers the stored state has.
#[test]
fn a_refund_after_a_raise_and_a_step_back_is_the_same_on_both() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let bucket = |capacity, per_second| TokenBucket::new(capacity, Rate::per_second(per_second)).into();
    let ops = vec![Op::Check(5), Op::Change(bucket(100, 2)), Op::Back(20_000_000), Op::Refund(1), Op::Check(1)];
    for layout in [Layout::Plain, Layout::Compact] {
        runtime.block_on(agree(&server, layout, bucket(10, 1), ops.clone()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_by_name_lifts_the_ban_of_the_key() {
    let server = RedisServer::start();
    let ban = Ban { after: 1, within: HOUR, for_: HOUR };
    let limit = Limit::new("per-user", FixedWindow::new(1, LONG_WINDOW)).expect("valid");
    let rules = RuleSet::builder().rule(Rule::new(limit).key(KeyPart::header("x-user-id")).ban(ban)).build();
    let settings = RedisLimiter::builder(server.url()).store_timeout(Duration::from_secs(5));
    let on_redis = Gate::on_redis(rules.clone().expect("built"), settings).await.expect("built");
    for gate in [Gate::in_memory(rules.expect("built")).expect("built"), on_redis] {
        assert!(checked(&gate, 1).await.is_allowed());
        assert!(!checked(&gate, 1).await.is_allowed(), "and banned");
        let refunded = gate.refund_by_name("per-user", KEY, 1).expect("the rule exists").await.expect("refunded");
        assert!(!refunded.is_allowed(), "a refund leaves the ban");
        let reset = gate.reset_by_name("per-user", KEY).expect("the rule exists").await.expect("reset");
        assert!(reset.is_allowed());
        assert!(checked(&gate, 1).await.is_allowed());
        assert!(gate.refund_by_name("other", KEY, 1).is_err());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_that_the_store_did_not_confirm_is_an_error() {
    let server = RedisServer::start();
    let limit = Limit::new("per-user", FixedWindow::new(1, LONG_WINDOW)).expect("valid");
    let rules = RuleSet::builder().rule(Rule::new(limit).key(KeyPart::header("x-user-id"))).build().expect("built");
    let settings = RedisLimiter::builder(server.url()).store_timeout(Duration::from_secs(5));
    let gate = Gate::on_redis(rules, settings).await.expect("built");
    assert!(checked(&gate, 1).await.is_allowed());
    drop(server);
    let error = gate.refund_by_name("per-user", KEY, 1).expect("the rule exists").await.unwrap_err();
    assert!(error.to_string().starts_with("the store is unavailable ("), "{error}");
    assert!(gate.reset_by_name("per-user", KEY).expect("the rule exists").await.is_err());
}
