//! Reservations that leave the process: any node settles them, once.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::RedisLimiter;
use tollgate::{
    Algorithm, Consistency, FixedWindow, HOUR, LeakyBucket, Limit, Limiter, MINUTE, ManualClock, Rate, Settlement,
    SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};
use tollgate_rules::{Gate, KeyPart, ReservationError, Rule, RuleSet};

const KEY: &[&[u8]] = &[b"a{n}|%n"];
const START: u64 = 1_700_000_000_000_000;

fn rules(algorithm: impl Into<Algorithm>) -> RuleSet {
    let limit = Limit::new("per-user", algorithm).expect("valid").with_consistency(Consistency::Leased);
    let rule = Rule::new(limit).key(KeyPart::header("x-user-id"));
    RuleSet::builder().rule(rule).build().expect("built")
}

async fn on_redis(server: &RedisServer, rules: RuleSet, clock: Option<&ManualClock>) -> Gate {
    let mut settings = RedisLimiter::builder(server.url()).store_timeout(Duration::from_secs(10));
    if let Some(clock) = clock {
        settings = settings.clock(clock.clone());
    }
    Gate::on_redis(rules, settings).await.expect("built")
}

async fn reserve(gate: &Gate, cost: u64, expires_after: Duration) -> Option<String> {
    let reserving = gate.reserve_by_name("per-user", KEY, cost, expires_after).expect("the rule exists");
    reserving.await.expect("the store replies").token
}

async fn left(gate: &Gate) -> u64 {
    let outcome = gate.check_by_name("per-user", KEY, 0).expect("the rule exists").outcome().await;
    outcome.decision().expect("the limit decides").remaining()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_node_settles_a_reservation_once() {
    let server = RedisServer::start();
    let first = on_redis(&server, rules(FixedWindow::new(100, LONG_WINDOW)), None).await;
    let second = on_redis(&server, rules(FixedWindow::new(100, LONG_WINDOW)), None).await;
    let token = reserve(&first, 80, MINUTE).await.expect("allowed");
    assert_eq!(reserve(&second, 80, MINUTE).await, None, "denied");
    let settling = (0..8).map(|_| second.settle_token(&token, 30));
    let results = futures_util::future::join_all(settling).await;
    let count = |expected| results.iter().filter(|result| **result == Ok(expected)).count();
    assert_eq!((count(Settlement::Settled), count(Settlement::AlreadySettled)), (1, 7), "{results:?}");
    assert_eq!(first.settle_token(&token, 0).await, Ok(Settlement::AlreadySettled));
    assert_eq!(left(&first).await, 70);
    let token = reserve(&second, 10, MINUTE).await.expect("allowed");
    assert_eq!(first.settle_token(&token, 200).await, Ok(Settlement::Owed { units: 130 }));
    assert_eq!(left(&second).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_excess_over_a_reservation_is_counted_once_and_in_full() {
    let server = RedisServer::start();
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let limit = || TokenBucket::new(100, Rate::per_second(1)).interval();
    let (first, second) =
        (on_redis(&server, rules(limit()), Some(&clock)).await, on_redis(&server, rules(limit()), Some(&clock)).await);
    let token = reserve(&first, 10, MINUTE).await.expect("allowed");
    let settling = (0..8).map(|number| if number % 2 == 0 { &first } else { &second }.settle_token(&token, 200));
    let results = futures_util::future::join_all(settling).await;
    let count = |expected| results.iter().filter(|result| **result == Ok(expected)).count();
    assert_eq!((count(Settlement::Owed { units: 100 }), count(Settlement::AlreadySettled)), (1, 7), "{results:?}");
    for gate in [&first, &second] {
        let outcome = gate.check_by_name("per-user", KEY, 1).expect("the rule exists").outcome().await;
        let wait = outcome.decision().expect("the limit decides").retry_after();
        assert_eq!(wait, Some(Duration::from_secs(101)));
    }
    // An expired reservation counts no more.
    clock.advance(Duration::from_secs(101));
    let token = reserve(&first, 1, MINUTE).await.expect("paid");
    clock.advance(MINUTE);
    assert_eq!(second.settle_token(&token, 500).await, Ok(Settlement::Expired));
    assert_eq!(left(&first).await, 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_foreign_and_expired_reservations_are_refused() {
    let (server, other_server) = (RedisServer::start(), RedisServer::start());
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let rules = || rules(FixedWindow::new(100, HOUR));
    let memory = || Gate::with_limiter(rules(), Limiter::builder().clock(clock.clone())).expect("built");
    let gates = [on_redis(&server, rules(), Some(&clock)).await, memory()];
    let others = [on_redis(&other_server, rules(), Some(&clock)).await, memory()];
    for (gate, other) in gates.iter().zip(&others) {
        let token = reserve(gate, 10, MINUTE).await.expect("allowed");
        assert_eq!(other.settle_token(&token, 0).await, Err(ReservationError::Foreign));
        let changed = token[..token.len() - 4].to_owned() + "AAAA";
        assert_eq!(gate.settle_token(&changed, 0).await, Err(ReservationError::Invalid));
        assert_eq!(gate.settle_token("not a token", 0).await, Err(ReservationError::Invalid));
        assert_eq!(left(gate).await, 90);
        clock.advance(MINUTE);
        assert_eq!(gate.settle_token(&token, 0).await, Ok(Settlement::Expired));
        assert_eq!(left(gate).await, 90);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_survives_a_reload_and_a_restart_of_its_node() {
    let server = RedisServer::start();
    let token = {
        let node = on_redis(&server, rules(FixedWindow::new(100, LONG_WINDOW)), None).await;
        reserve(&node, 60, MINUTE).await.expect("allowed")
    };
    let node = on_redis(&server, rules(SlidingWindowLog::new(50, HOUR)), None).await;
    node.replace(rules(FixedWindow::new(200, LONG_WINDOW))).expect("replaced");
    assert_eq!(left(&node).await, 140);
    assert_eq!(node.settle_token(&token, 10).await, Ok(Settlement::Settled));
    assert_eq!(left(&node).await, 190);
    let token = reserve(&node, 1, MINUTE).await.expect("allowed");
    drop(server);
    assert!(matches!(node.settle_token(&token, 0).await, Err(ReservationError::Store(_))));
}

/// A request that was decided before a reload, and is answered afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_is_settled_once_after_a_reload() {
    let server = RedisServer::start();
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let fixed = || rules(FixedWindow::new(100, HOUR));
    let memory = Gate::with_limiter(fixed(), Limiter::builder().clock(clock.clone())).expect("built");
    for gate in [on_redis(&server, fixed(), Some(&clock)).await, memory] {
        for actual in [30, 60] {
            let outcome = gate.check_by_name("per-user", KEY, 40).expect("the rule exists").outcome().await;
            let before = left(&gate).await;
            gate.replace(rules(SlidingWindowLog::new(200, HOUR))).expect("replaced");
            assert_eq!(outcome.settle(actual).await, Settlement::Settled);
            assert_eq!(outcome.settle(0).await, Settlement::AlreadySettled);
            gate.replace(fixed()).expect("replaced");
            let after = left(&gate).await;
            assert_eq!(after, before + 40 - actual, "{actual}");
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Reserve(u64),
    Settle { back: usize, actual: u64 },
    Forward(u64),
}

fn algorithms() -> impl Strategy<Value = Algorithm> {
    let rate = || (1_u64..=20).prop_map(Rate::per_second);
    prop_oneof![
        rate().prop_map(|rate| TokenBucket::new(50, rate).into()),
        rate().prop_map(|rate| TokenBucket::new(50, rate).interval().into()),
        rate().prop_map(|rate| LeakyBucket::new(50, rate).queue(HOUR).into()),
        Just(FixedWindow::new(50, MINUTE).into()),
        Just(FixedWindow::new(50, MINUTE).from_first_request().into()),
        Just(SlidingWindowLog::new(50, MINUTE).into()),
        Just(SlidingWindowCounter::new(50, MINUTE).segments(6).into()),
    ]
}

async fn agree(server: &RedisServer, algorithm: Algorithm, ops: Vec<Op>) {
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let here = Gate::with_limiter(rules(algorithm), Limiter::builder().clock(clock.clone())).expect("built");
    let limit = Limit::new("per-user", algorithm).expect("valid");
    let exact = Rule::new(limit).key(KeyPart::header("x-user-id"));
    let exact = RuleSet::builder().rule(exact).build().expect("built");
    let there = [on_redis(server, exact.clone(), Some(&clock)).await, on_redis(server, exact, Some(&clock)).await];
    let mut tokens: Vec<(String, String)> = Vec::new();
    for (step, op) in ops.into_iter().enumerate() {
        let (context, node) = (format!("step {step}: {op:?}"), &there[step % 2]);
        match op {
            Op::Reserve(cost) => {
                let reserved = (reserve(&here, cost, MINUTE).await, reserve(node, cost, MINUTE).await);
                assert_eq!(reserved.0.is_some(), reserved.1.is_some(), "{context}");
                tokens.extend(reserved.0.zip(reserved.1));
            }
            Op::Settle { back, actual } => {
                if let Some((in_memory, on_redis)) = tokens.len().checked_sub(back + 1).map(|index| &tokens[index]) {
                    let settled =
                        (here.settle_token(in_memory, actual).await, node.settle_token(on_redis, actual).await);
                    assert_eq!(settled.0, settled.1, "{context}");
                }
            }
            Op::Forward(micros) => clock.advance(Duration::from_micros(micros)),
        }
        assert_eq!(left(&here).await, left(node).await, "{context}");
    }
}

#[test]
fn memory_and_redis_agree_on_reservations() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let op = prop_oneof![
        4 => (0_u64..=30).prop_map(Op::Reserve),
        3 => (0_usize..4, 0_u64..=60).prop_map(|(back, actual)| Op::Settle { back, actual }),
        2 => prop_oneof![1_u64..2_000_000, 1_u64..70_000_000].prop_map(Op::Forward),
    ];
    let mut runner = TestRunner::new(Config { cases: 100, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(algorithms(), proptest::collection::vec(op, 1..40)), |(algorithm, ops)| {
        runtime.block_on(agree(&server, algorithm, ops));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_whose_limit_is_gone_says_so_and_stays_open() {
    let server = RedisServer::start();
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let renamed = || {
        let limit = Limit::new("renamed", FixedWindow::new(100, HOUR)).expect("valid");
        RuleSet::builder().rule(Rule::new(limit).key(KeyPart::header("x-user-id"))).build().expect("built")
    };
    let fixed = || rules(FixedWindow::new(100, HOUR));
    let memory = Gate::with_limiter(fixed(), Limiter::builder().clock(clock.clone())).expect("built");
    for gate in [on_redis(&server, fixed(), Some(&clock)).await, memory] {
        let token = reserve(&gate, 80, MINUTE).await.expect("allowed");
        gate.replace(renamed()).expect("replaced");
        for _ in 0..2 {
            let removed = Err(ReservationError::LimitRemoved { limit: "per-user".to_owned() });
            assert_eq!(gate.settle_token(&token, 0).await, removed);
        }
        gate.replace(fixed()).expect("replaced");
        assert_eq!(left(&gate).await, 20);
        assert_eq!(gate.settle_token(&token, 30).await, Ok(Settlement::Settled));
        assert_eq!(left(&gate).await, 70);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gate_that_moves_to_another_store_knows_no_reservation_of_the_one_before() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let fixed = || rules(FixedWindow::new(100, LONG_WINDOW));
    let gate = Gate::in_memory(fixed()).expect("built");
    let mut tokens = Vec::new();
    for store in [Some(&server), Some(&other), None] {
        tokens.push(reserve(&gate, 10, MINUTE).await.expect("allowed"));
        let next = match store {
            Some(server) => on_redis(server, fixed(), None).await,
            None => Gate::in_memory(fixed()).expect("built"),
        };
        gate.adopt(&next);
        for token in &tokens {
            assert_eq!(gate.settle_token(token, 0).await, Err(ReservationError::Foreign));
        }
    }
    gate.adopt(&on_redis(&server, fixed(), None).await);
    assert_eq!(gate.settle_token(&tokens[1], 0).await, Ok(Settlement::Settled), "it is back on its store");
}
