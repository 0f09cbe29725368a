//! The same random traces through memory and through Redis, with the time told by hand: every answer agrees to
//! the microsecond.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::redis::RedisLimiter;
use tollgate::{
    Algorithm, Decision, FixedWindow, Hit, LeakyBucket, Limit, Limiter, ManualClock, Rate, SlidingWindowCounter,
    SlidingWindowLog, Timestamp, TokenBucket,
};

use crate::servers::RedisServer;

/// Traces per run; each is some forty operations on a Redis of its own making.
const TRACES: u32 = 600;

#[derive(Clone, Debug)]
enum Op {
    Check {
        key: usize,
        cost: u64,
    },
    Several {
        costs: Vec<u64>,
    },
    Peek {
        key: usize,
    },
    /// Of the last allowed decision but so many.
    Refund {
        back: usize,
    },
    Reset {
        key: usize,
    },
    Forward(u64),
    Back(u64),
}

const KEYS: [&str; 2] = ["ann", "b{}|%\n\0b"];

fn rates() -> impl Strategy<Value = Rate> {
    (1_u64..=20, prop_oneof![Just(1_000_u64), Just(7_000), Just(1_000_000), Just(60_000_000), 1_000..5_000_000_u64])
        .prop_map(|(count, micros)| Rate::new(count, Duration::from_micros(micros)))
}

fn windows() -> impl Strategy<Value = Duration> {
    prop_oneof![Just(1_000_u64), Just(1_000_000), Just(60_000_000), 1_000..10_000_000_u64, Just(3_000_000_000_000_u64)]
        .prop_map(Duration::from_micros)
}

fn algorithms() -> impl Strategy<Value = Algorithm> {
    let quota = || prop_oneof![1_u64..=6, 1_u64..=300, Just(1_u64 << 32)];
    prop_oneof![
        (1_u64..=300, rates()).prop_map(|(capacity, rate)| TokenBucket::new(capacity, rate).into()),
        (1_u64..=300, rates()).prop_map(|(capacity, rate)| TokenBucket::new(capacity, rate).interval().into()),
        (1_u64..=300, rates()).prop_map(|(capacity, rate)| LeakyBucket::new(capacity, rate).into()),
        (1_u64..=300, rates(), 1_000_u64..3_000_000).prop_map(|(capacity, rate, wait)| {
            LeakyBucket::new(capacity, rate).queue(Duration::from_micros(wait)).into()
        }),
        (quota(), windows()).prop_map(|(limit, window)| FixedWindow::new(limit, window).into()),
        (quota(), windows()).prop_map(|(limit, window)| FixedWindow::new(limit, window).from_first_request().into()),
        (1_u64..=40, windows()).prop_map(|(limit, window)| SlidingWindowLog::new(limit, window).into()),
        (1_u64..=40, windows()).prop_map(|(limit, window)| SlidingWindowLog::new(limit, window).count_denied().into()),
        (quota(), windows(), prop_oneof![Just(1_u32), 1_u32..=12, Just(1000)])
            .prop_map(|(limit, window, segments)| SlidingWindowCounter::new(limit, window).segments(segments).into()),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let cost = || prop_oneof![4 => Just(1_u64), 2 => 0_u64..=8, 1 => 0_u64..=350, 1 => Just(3_000_000_000_u64)];
    let gap = || prop_oneof![Just(0_u64), Just(1), 1_u64..2_000, 1_u64..2_000_000, 1_u64..200_000_000];
    let op = prop_oneof![
        8 => (0..KEYS.len(), cost()).prop_map(|(key, cost)| Op::Check { key, cost }),
        1 => proptest::collection::vec(cost(), 1..4).prop_map(|costs| Op::Several { costs }),
        2 => (0..KEYS.len()).prop_map(|key| Op::Peek { key }),
        2 => (0_usize..4).prop_map(|back| Op::Refund { back }),
        1 => (0..KEYS.len()).prop_map(|key| Op::Reset { key }),
        5 => gap().prop_map(Op::Forward),
        1 => gap().prop_map(Op::Back),
    ];
    proptest::collection::vec(op, 1..40)
}

/// What was asked, to give it back.
enum Asked {
    Key(usize),
    Hits(Vec<u64>),
}

#[test]
fn memory_and_redis_agree_on_every_trace() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let mut runner = TestRunner::new(Config { cases: TRACES, failure_persistence: None, ..Config::default() });
    let traces =
        (proptest::collection::vec(algorithms(), 1..3), ops(), 1_600_000_000_000_000_u64..1_800_000_000_000_000);
    let outcome = runner.run(&traces, |(algorithms, ops, start)| {
        runtime.block_on(agree(&server, algorithms, ops, start));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

async fn agree(server: &RedisServer, algorithms: Vec<Algorithm>, ops: Vec<Op>, start: u64) {
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let mut now = start;
    let clock = ManualClock::at(Timestamp::from_micros(now));
    let names = ["first", "second"];
    let limits: Vec<Limit> =
        algorithms.into_iter().zip(names).filter_map(|(algorithm, name)| Limit::new(name, algorithm).ok()).collect();
    if limits.is_empty() {
        return;
    }
    // Memory forgets a key at rest when another needs its place, and a clock that then steps back finds it new;
    // Redis forgets by its own clock. So each key has a memory of its own, where nothing needs its place.
    let memories = KEYS.map(|_| {
        let builder = limits.iter().fold(Limiter::builder(), |builder, limit| builder.limit(limit.clone()));
        builder.clock(clock.clone()).build().expect("limits are valid")
    });
    let shared = limits.iter().fold(RedisLimiter::builder(server.url()), |builder, limit| builder.limit(limit.clone()));
    let memory = &memories[0];
    let shared = shared.clock(clock.clone()).store_timeout(Duration::from_secs(10)).connect().await.expect("connects");
    let ids: Vec<_> = memory.limits().iter().filter_map(|limit| memory.id(limit.name())).collect();
    let hits = |costs: &[u64]| -> Vec<Hit<'_>> {
        costs.iter().enumerate().map(|(index, cost)| Hit::new(ids[index % ids.len()], KEYS[0]).cost(*cost)).collect()
    };
    let mut allowed: Vec<(Asked, Decision, Decision)> = Vec::new();
    for (step, op) in ops.into_iter().enumerate() {
        match op {
            Op::Check { key, cost } => {
                let (here, there) = (memories[key].check_n(KEYS[key], cost), shared.check_n(KEYS[key], cost).await);
                assert_eq!(here, there, "step {step}: check {key} {cost}");
                if here.is_allowed() {
                    allowed.push((Asked::Key(key), here, there));
                }
            }
            Op::Several { costs } => {
                let (here, there) = (memory.decide_now(&hits(&costs)), shared.decide(&hits(&costs)).await);
                assert_eq!(here.is_allowed(), there.is_allowed(), "step {step}: several {costs:?}");
                assert_eq!(here.remaining(), there.remaining(), "step {step}: several {costs:?}");
                assert_eq!(here.retry_after(), there.retry_after(), "step {step}: several {costs:?}");
                if here.is_allowed() {
                    allowed.push((Asked::Hits(costs), here, there));
                }
            }
            Op::Peek { key } => {
                let there = shared.peek(KEYS[key]).await.expect("answers");
                assert_eq!(memories[key].peek(KEYS[key]), there, "step {step}: peek {key}");
            }
            Op::Refund { back } => {
                if back < allowed.len() {
                    let (asked, here, there) = allowed.remove(allowed.len() - 1 - back);
                    match asked {
                        Asked::Key(key) => {
                            memories[key].refund(KEYS[key], &here);
                            shared.refund(KEYS[key], &there).await.expect("given back");
                        }
                        Asked::Hits(costs) => {
                            memory.refund_hits(&hits(&costs), &here);
                            shared.refund_hits(&hits(&costs), &there).await.expect("given back");
                        }
                    }
                }
            }
            Op::Reset { key } => {
                memories[key].reset(KEYS[key]);
                shared.reset(KEYS[key]).await.expect("reset");
            }
            Op::Forward(gap) => now += gap,
            Op::Back(gap) => now -= gap,
        }
        clock.set(Timestamp::from_micros(now));
    }
}
