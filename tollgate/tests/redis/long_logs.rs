//! Sliding window logs on Redis that grow, shrink, and have several blocks: random traces give the same decisions as in
//! memory.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use testkit::redis::RedisServer;
use tollgate::redis::{RedisLimiter, RedisReservation};
use tollgate::{
    Decision, Denied, FixedWindow, HOUR, Limit, Limiter, MAX_SPAN, ManualClock, Reservation, SlidingWindowLog,
    Timestamp,
};

const TRACES: u32 = 40;
const START: u64 = 1_700_000_000_000_000;

#[derive(Clone, Debug)]
enum Op {
    /// Checks of one unit each, at intervals.
    Burst {
        count: u64,
        interval: u64,
    },
    Check {
        cost: u64,
    },
    Peek,
    /// Refunds reservations, starting at a position.
    Refund {
        from: usize,
        count: usize,
    },
    RefundNewest,
    Change {
        limit: u64,
        window: u64,
    },
    Window,
    Reset,
    Forward(u64),
    Back(u64),
}

/// Logs of one block, or of several.
fn limits() -> impl Strategy<Value = u64> {
    prop_oneof![1_u64..30, 50_u64..300, 300_u64..900]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => (1_u64..300, 1_u64..20).prop_map(|(count, interval)| Op::Burst { count, interval }),
        4 => prop_oneof![1_u64..10, 1_u64..900].prop_map(|cost| Op::Check { cost }),
        2 => Just(Op::Peek),
        4 => (0_usize..1000, 1_usize..80).prop_map(|(from, count)| Op::Refund { from, count }),
        1 => (limits(), 1_000_u64..20_000).prop_map(|(limit, window)| Op::Change { limit, window }),
        1 => Just(Op::Window),
        1 => Just(Op::Reset),
        4 => prop_oneof![1_u64..1_000, 1_u64..20_000].prop_map(Op::Forward),
        1 => prop_oneof![1_u64..1_000, 1_u64..100_000].prop_map(Op::Back),
    ];
    proptest::collection::vec(op, 4..24)
}

#[derive(Clone, Copy, Debug)]
struct Log {
    limit: u64,
    window: u64,
    counts_denied: bool,
}

impl Log {
    fn limits(self) -> Vec<Limit> {
        let log = SlidingWindowLog::new(self.limit, Duration::from_micros(self.window));
        let log = if self.counts_denied { log.count_denied() } else { log };
        vec![Limit::new("log", log).expect("a valid limit")]
    }
}

struct Both {
    clock: ManualClock,
    memory: Limiter,
    shared: RedisLimiter,
    reserved: Vec<(Reservation, RedisReservation)>,
    /// Tables of limits that are no longer in use would be dropped once their keys are idle.
    kept: Vec<Limiter>,
}

impl Both {
    async fn check(&mut self, cost: u64) {
        let here = self.memory.reserve("ann", cost, MAX_SPAN);
        let there = self.shared.reserve("ann", cost, MAX_SPAN).await;
        let decisions: [Decision; 2] = [
            *here.as_ref().map_or_else(Denied::decision, Reservation::decision),
            *there.as_ref().map_or_else(Denied::decision, RedisReservation::decision),
        ];
        assert_same(&decisions[0], &decisions[1], &format!("cost {cost}"));
        self.reserved.extend(here.ok().zip(there.ok()));
    }

    fn change(&mut self, limits: Vec<Limit>) {
        let memory = self.memory.with_limits(limits.clone()).expect("valid limits");
        self.kept.push(std::mem::replace(&mut self.memory, memory));
        self.shared = self.shared.with_limits(limits).expect("valid limits");
    }

    async fn apply(&mut self, op: Op, log: Log) {
        match op {
            Op::Burst { count, interval } => {
                for _ in 0..count {
                    self.check(1).await;
                    self.clock.advance(Duration::from_micros(interval));
                }
            }
            Op::Check { cost } => self.check(cost).await,
            Op::Peek => {
                let there = self.shared.peek("ann").await.expect("answers");
                assert_eq!(self.memory.peek("ann"), there, "peek");
            }
            Op::Refund { from, count } => {
                let from = from % (self.reserved.len() + 1);
                let to = (from + count).min(self.reserved.len());
                for (here, there) in self.reserved.drain(from..to) {
                    let here = self.memory.refund(here);
                    assert_eq!(here, self.shared.refund(there).await.expect("given back"), "refund");
                }
            }
            Op::RefundNewest => {
                if let Some((here, there)) = self.reserved.pop() {
                    let here = self.memory.refund(here);
                    assert_eq!(here, self.shared.refund(there).await.expect("given back"), "refund");
                }
            }
            Op::Change { limit, window } => self.change(Log { limit, window, ..log }.limits()),
            Op::Window => {
                let window = FixedWindow::new(log.limit, Duration::from_micros(log.window));
                self.change(vec![Limit::new("log", window).expect("a valid limit")]);
                self.check(1).await;
                self.change(log.limits());
            }
            Op::Reset => {
                self.memory.reset("ann");
                self.shared.reset("ann").await.expect("reset");
            }
            Op::Forward(gap) => self.clock.advance(Duration::from_micros(gap)),
            Op::Back(gap) => self.clock.set(Timestamp::from_micros(self.clock.now().as_micros() - gap)),
        }
    }
}

async fn agree(server: &RedisServer, log: Log, ops: Vec<Op>) {
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let memory = Limiter::builder().limits(log.limits()).clock(clock.clone()).build().expect("valid limits");
    let shared = RedisLimiter::builder(server.url()).limits(log.limits()).clock(clock.clone());
    let shared = shared.store_timeout(Duration::from_secs(10)).connect().await.expect("connects");
    let mut both = Both { clock, memory, shared, reserved: Vec::new(), kept: Vec::new() };
    for op in ops {
        both.apply(op, log).await;
    }
    both.apply(Op::Peek, log).await;
}

/// Checks that both have decided alike. On Redis, at most 100 denials in a second are examined for pending units.
fn assert_same(here: &Decision, there: &Decision, context: &str) {
    if !here.is_pending() {
        assert_eq!(here, there, "{context}");
        return;
    }
    let numbers = |decision: &Decision| {
        let times = (decision.at(), decision.retry_after(), decision.reset_after());
        (decision.is_allowed(), decision.quota(), decision.cost(), decision.remaining(), times)
    };
    assert_eq!(numbers(here), numbers(there), "{context}");
}

#[test]
fn memory_and_redis_agree_on_logs_of_any_length() {
    agree_on_traces(TRACES, limits(), 1_000..20_000, ops());
}

/// Entries leave the window one by one, and those that stay may have no units left.
#[test]
fn memory_and_redis_agree_on_short_logs() {
    let op = prop_oneof![
        6 => (1_u64..4).prop_map(|cost| Op::Check { cost }),
        3 => Just(Op::RefundNewest),
        1 => (0_usize..8).prop_map(|from| Op::Refund { from, count: 1 }),
        1 => Just(Op::Peek),
        6 => prop_oneof![1_u64..1_200, 400_u64..600].prop_map(Op::Forward),
        1 => (1_u64..1_200).prop_map(Op::Back),
    ];
    agree_on_traces(10 * TRACES, 1_u64..8, 1_000..1_001, proptest::collection::vec(op, 4..40));
}

/// The units of the newest entry were given back, and those of all others have left the window.
#[tokio::test]
async fn an_entry_after_one_without_units_counts_for_its_own_window() {
    let server = RedisServer::start();
    let log = Log { limit: 100, window: 10_000, counts_denied: false };
    let ops = vec![
        Op::Check { cost: 1 },
        Op::Forward(5_000),
        Op::Check { cost: 1 },
        Op::RefundNewest,
        Op::Forward(5_500),
        Op::Check { cost: 100 },
        Op::Forward(3_500),
        Op::Check { cost: 1 },
        Op::Forward(1_500),
        Op::Check { cost: 100 },
    ];
    agree(&server, log, ops).await;
}

fn agree_on_traces(
    traces: u32,
    limits: impl Strategy<Value = u64>,
    windows: std::ops::Range<u64>,
    ops: impl Strategy<Value = Vec<Op>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let logs = (limits, windows, any::<bool>());
    let logs = logs.prop_map(|(limit, window, counts_denied)| Log { limit, window, counts_denied });
    let mut runner = TestRunner::new(Config { cases: traces, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(logs, ops), |(log, ops)| {
        runtime.block_on(agree(&server, log, ops));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// Denied requests had counted more units than an entry has room for.
#[tokio::test]
async fn units_above_every_limit_survive_a_change_of_the_algorithm() {
    let server = RedisServer::start();
    let log = Log { limit: 137, window: 2566, counts_denied: true };
    let ops = vec![
        Op::Burst { count: 135, interval: 1 },
        Op::Window,
        Op::Burst { count: 111, interval: 1 },
        Op::Burst { count: 1, interval: 1 },
        Op::Check { cost: 8 },
        Op::Window,
        Op::Burst { count: 1, interval: 1 },
    ];
    agree(&server, log, ops).await;
}

#[tokio::test]
async fn refunded_entries_take_no_room() {
    let server = RedisServer::start();
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let limit = Limit::new("log", SlidingWindowLog::new(1_000, HOUR)).expect("a valid limit");
    let builder = RedisLimiter::builder(server.url()).limit(limit).clock(clock.clone());
    let limiter = builder.store_timeout(Duration::from_secs(10)).connect().await.expect("connects");
    let reserve = async || {
        clock.advance(Duration::from_micros(1));
        limiter.reserve("ann", 1, MAX_SPAN).await.expect("there is room")
    };
    let mut reserved = Vec::new();
    for _ in 0..600 {
        reserved.push(reserve().await);
    }
    let kind: String = redis::cmd("TYPE").arg("rate_limit:{log|ann}").query(&mut server.connection()).expect("answers");
    assert_eq!(kind, "hash");
    for reservation in reserved {
        limiter.refund(reservation).await.expect("given back");
    }
    let kind: String = redis::cmd("TYPE").arg("rate_limit:{log|ann}").query(&mut server.connection()).expect("answers");
    assert_eq!(kind, "string");
    let bytes: usize =
        redis::cmd("STRLEN").arg("rate_limit:{log|ann}").query(&mut server.connection()).expect("answers");
    assert!(bytes < 70, "{bytes} bytes");
    assert_eq!(limiter.peek("ann").await.expect("answers").remaining(), 1_000);
}

#[tokio::test]
async fn a_log_too_long_for_redis_is_refused() {
    let server = RedisServer::start();
    let log = |quota| vec![Limit::new("log", SlidingWindowLog::new(quota, HOUR)).expect("a valid limit")];
    let refused = RedisLimiter::builder(server.url()).limits(log(100_001)).connect().await;
    let expected = "limit `log`: limit 100001 is too large for a sliding window log on Redis: use 100000 or less, or a \
                    sliding window counter";
    assert_eq!(refused.err().map(|error| error.to_string()).as_deref(), Some(expected));
    let limiter = RedisLimiter::builder(server.url()).limits(log(100_000)).connect().await.expect("connects");
    let refused = limiter.with_limits(log(100_001));
    assert_eq!(refused.err().map(|error| error.to_string()).as_deref(), Some(expected));
}
