//! The same random traces through memory and through Redis, on a clock that the test moves, with limits whose numbers
//! and algorithms change in between: every answer agrees to the microsecond.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use testkit::redis::RedisServer;
use tollgate::redis::{Layout, RedisLimiter, RedisReservation, RedisSettings};
use tollgate::{
    Algorithm, Ban, Decision, Denied, FixedWindow, Hit, LeakyBucket, Limit, LimitSet, Limiter, MAX_SPAN, ManualClock,
    Rate, Reservation, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

/// Traces per run. Each has about forty operations on an empty Redis.
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
    /// Refunds an earlier allowed decision, counted from the last.
    Refund {
        back: usize,
    },
    /// Settles an earlier allowed decision, counted from the last, at a cost that may be higher.
    Settle {
        back: usize,
        actual: u64,
    },
    Reset {
        key: usize,
    },
    /// Changes all quotas to a percentage of the original, and multiplies the rates.
    Change {
        percent: u64,
        faster: u64,
    },
    /// Changes everything: algorithms, windows, segments and numbers.
    Exchange {
        plans: Vec<Plan>,
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

/// A limit whose quota and rate can change, but not its algorithm.
#[derive(Clone, Copy, Debug)]
struct Plan {
    kind: Kind,
    quota: u64,
    rate: Rate,
    span: Duration,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Tokens,
    Portions,
    Meter,
    Queue,
    ClockWindow,
    OpenedWindow,
    Log,
    LogOfAll,
    Counter { segments: u32 },
    Ban { lasts: Duration },
}

impl Plan {
    fn algorithm(&self) -> Algorithm {
        let Self { kind, quota, rate, span } = *self;
        match kind {
            Kind::Tokens => TokenBucket::new(quota, rate).into(),
            Kind::Portions => TokenBucket::new(quota, rate).interval().into(),
            Kind::Meter => LeakyBucket::new(quota, rate).into(),
            Kind::Queue => LeakyBucket::new(quota, rate).queue(span).into(),
            Kind::ClockWindow => FixedWindow::new(quota, span).into(),
            Kind::OpenedWindow => FixedWindow::new(quota, span).from_first_request().into(),
            Kind::Log => SlidingWindowLog::new(quota, span).into(),
            Kind::LogOfAll => SlidingWindowLog::new(quota, span).count_denied().into(),
            Kind::Counter { segments } => SlidingWindowCounter::new(quota, span).segments(segments).into(),
            Kind::Ban { lasts } => Ban { after: quota, within: span, for_: lasts }.into(),
        }
    }

    /// Returns whether the compact layout has the keys in hashes.
    fn is_compact(&self) -> bool {
        match self.kind {
            Kind::Log | Kind::LogOfAll => false,
            Kind::Counter { segments } => segments <= 6,
            _ => true,
        }
    }

    /// Returns whether Redis looks at few open charges of a key only, because each is much work.
    fn has_many_segments(&self) -> bool {
        matches!(self.kind, Kind::Counter { segments: 100.. })
    }

    fn changed(&self, percent: u64, faster: u64) -> Self {
        let rate = Rate::new(self.rate.count() * faster, self.rate.period());
        Self { quota: (self.quota * percent / 100).max(1), rate, ..*self }
    }
}

fn limits(plans: &[Plan]) -> Vec<Limit> {
    let named = plans.iter().zip(["first", "second"]);
    named.filter_map(|(plan, name)| Limit::new(name, plan.algorithm()).ok()).collect()
}

/// Returns the settings of a store with that layout. In the compact layout, all keys of a limit share a hash.
fn settings(server: &RedisServer, layout: Layout) -> RedisSettings {
    let settings = RedisSettings::new(server.url()).layout(layout);
    if layout == Layout::Compact { settings.expected_keys(1) } else { settings }
}

/// Returns limits whose keys are stored in the same way in that layout, so that one can replace the other.
fn plans_in(layout: Layout) -> impl Strategy<Value = Plan> {
    plans().prop_filter("a plan in the compact layout", move |plan| layout == Layout::Plain || plan.is_compact())
}

fn plans() -> impl Strategy<Value = Plan> {
    let quota = || prop_oneof![1_u64..=6, 1_u64..=300, Just(1_u64 << 32)];
    let segments = prop_oneof![Just(1_u32), 1_u32..=12, Just(1000)];
    let kinds = prop_oneof![
        (Just(Kind::Tokens), 1_u64..=300),
        (Just(Kind::Portions), 1_u64..=300),
        (Just(Kind::Meter), 1_u64..=300),
        (Just(Kind::Queue), 1_u64..=300),
        (Just(Kind::ClockWindow), quota()),
        (Just(Kind::OpenedWindow), quota()),
        (Just(Kind::Log), 1_u64..=40),
        (Just(Kind::LogOfAll), 1_u64..=40),
        (segments.prop_map(|segments| Kind::Counter { segments }), quota()),
        (windows().prop_map(|lasts| Kind::Ban { lasts }), 1_u64..=12),
    ];
    (kinds, rates(), windows()).prop_map(|((kind, quota), rate, span)| Plan { kind, quota, rate, span })
}

fn ops(layout: Layout) -> impl Strategy<Value = Vec<Op>> {
    let cost = || prop_oneof![4 => Just(1_u64), 2 => 0_u64..=8, 1 => 0_u64..=350, 1 => Just(3_000_000_000_u64)];
    let gap = || prop_oneof![Just(0_u64), Just(1), 1_u64..2_000, 1_u64..2_000_000, 1_u64..200_000_000];
    let op = prop_oneof![
        8 => (0..KEYS.len(), cost()).prop_map(|(key, cost)| Op::Check { key, cost }),
        1 => proptest::collection::vec(cost(), 1..4).prop_map(|costs| Op::Several { costs }),
        2 => (0..KEYS.len()).prop_map(|key| Op::Peek { key }),
        2 => (0_usize..4).prop_map(|back| Op::Refund { back }),
        1 => (0..KEYS.len()).prop_map(|key| Op::Reset { key }),
        1 => (prop_oneof![Just(100_u64), 1_u64..=100], 1_u64..4)
            .prop_map(|(percent, faster)| Op::Change { percent, faster }),
        2 => proptest::collection::vec(plans_in(layout), 2).prop_map(|plans| Op::Exchange { plans }),
        5 => gap().prop_map(Op::Forward),
        1 => gap().prop_map(Op::Back),
    ];
    proptest::collection::vec(op, 1..40)
}

/// Returns limits that count units: a ban counts strikes.
fn plans_that_owe(layout: Layout) -> impl Strategy<Value = Plan> {
    plans_in(layout).prop_filter("a plan that counts units", |plan| !matches!(plan.kind, Kind::Ban { .. }))
}

/// Settlements above their estimates. The clock does not step back: in memory, all keys of a limit share the largest debt that
/// is not mistaken for such a step.
fn ops_with_debts(layout: Layout) -> impl Strategy<Value = Vec<Op>> {
    let cost = || prop_oneof![4 => Just(1_u64), 2 => 0_u64..=8, 1 => 0_u64..=350];
    let actual = prop_oneof![4 => 0_u64..=8, 4 => 0_u64..=700, 1 => Just(3_000_000_000_u64)];
    let gap = prop_oneof![Just(0_u64), Just(1), 1_u64..2_000, 1_u64..2_000_000, 1_u64..200_000_000];
    let op = prop_oneof![
        8 => (0..KEYS.len(), cost()).prop_map(|(key, cost)| Op::Check { key, cost }),
        1 => proptest::collection::vec(cost(), 1..4).prop_map(|costs| Op::Several { costs }),
        2 => (0..KEYS.len()).prop_map(|key| Op::Peek { key }),
        6 => (0_usize..4, actual).prop_map(|(back, actual)| Op::Settle { back, actual }),
        1 => (0..KEYS.len()).prop_map(|key| Op::Reset { key }),
        1 => (prop_oneof![Just(100_u64), 1_u64..=100], 1_u64..4)
            .prop_map(|(percent, faster)| Op::Change { percent, faster }),
        1 => proptest::collection::vec(plans_that_owe(layout), 2).prop_map(|plans| Op::Exchange { plans }),
        5 => gap.prop_map(Op::Forward),
    ];
    proptest::collection::vec(op, 1..40)
}

#[test]
fn memory_and_redis_agree_on_every_trace() {
    agree_on_traces(Layout::Plain, plans_in(Layout::Plain), ops(Layout::Plain));
}

#[test]
fn memory_and_the_compact_layout_agree_on_every_trace() {
    agree_on_traces(Layout::Compact, plans_in(Layout::Compact), ops(Layout::Compact));
}

#[test]
fn memory_and_redis_agree_on_debts() {
    agree_on_traces(Layout::Plain, plans_that_owe(Layout::Plain), ops_with_debts(Layout::Plain));
}

#[test]
fn memory_and_the_compact_layout_agree_on_debts() {
    agree_on_traces(Layout::Compact, plans_that_owe(Layout::Compact), ops_with_debts(Layout::Compact));
}

fn agree_on_traces(layout: Layout, plans: impl Strategy<Value = Plan>, ops: impl Strategy<Value = Vec<Op>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let mut runner = TestRunner::new(Config { cases: TRACES, failure_persistence: None, ..Config::default() });
    let start = 1_600_000_000_000_000_u64..1_800_000_000_000_000;
    let traces = (proptest::collection::vec(plans, 1..3), ops, start);
    let outcome = runner.run(&traces, |(plans, ops, start)| {
        prop_assume!(limits(&plans).len() == plans.len(), "a plan is not a valid limit");
        runtime.block_on(agree(&server, layout, &plans, ops, start));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

fn decision(reserved: &Result<Reservation, Denied>) -> Decision {
    *reserved.as_ref().map_or_else(Denied::decision, Reservation::decision)
}

fn there_decision(reserved: &Result<RedisReservation, Denied>) -> Decision {
    *reserved.as_ref().map_or_else(Denied::decision, RedisReservation::decision)
}

async fn agree(server: &RedisServer, layout: Layout, plans: &[Plan], ops: Vec<Op>, start: u64) {
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let mut now = start;
    let clock = ManualClock::at(Timestamp::from_micros(now));
    let limits = limits(plans);
    // The memory store drops an idle key when another needs its slot, and a clock that then steps back finds a new key;
    // Redis expires keys by its own clock. So each key has its own memory store, where no other key needs its slot.
    let mut memories = KEYS.map(|_| {
        let builder = limits.iter().fold(Limiter::builder(), |builder, limit| builder.limit(limit.clone()));
        builder.clock(clock.clone()).build().expect("limits are valid")
    });
    let shared = RedisLimiter::builder(settings(server, layout)).limits(limits.clone());
    let mut shared =
        shared.clock(clock.clone()).store_timeout(Duration::from_secs(10)).connect().await.expect("connects");
    let ids: Vec<_> = shared.limits().iter().filter_map(|limit| shared.id(limit.name())).collect();
    let hits = |costs: &[u64]| -> Vec<Hit<'_>> {
        costs.iter().enumerate().map(|(index, cost)| Hit::new(ids[index % ids.len()], KEYS[0]).cost(*cost)).collect()
    };
    let mut reserved: Vec<(Reservation, RedisReservation)> = Vec::new();
    // The first reservation by the current limits.
    let mut current = 0;
    let exchanged = ops.iter().filter_map(|op| if let Op::Exchange { plans } = op { Some(plans) } else { None });
    let is_examined_in_part = plans.iter().chain(exchanged.flatten()).any(Plan::has_many_segments);
    // Tables of limits that are no longer in use are dropped once their keys are idle, too.
    let mut kept = Vec::new();
    for (step, op) in ops.into_iter().enumerate() {
        match op {
            Op::Check { key, cost } => {
                let here = memories[key].reserve(KEYS[key], cost, MAX_SPAN);
                let there = shared.reserve(KEYS[key], cost, MAX_SPAN).await;
                let (one, other) = (decision(&here), there_decision(&there));
                if one.is_pending() && is_examined_in_part {
                    assert_eq!(one.retry_after().is_some(), other.retry_after().is_some(), "step {step}");
                } else {
                    assert_eq!(one, other, "step {step}: check {key} {cost}");
                }
                reserved.extend(here.ok().zip(there.ok()));
            }
            Op::Several { costs } => {
                let here_taken = memories[0].reserve_hits(&hits(&costs), MAX_SPAN);
                let there_taken = shared.reserve_hits(&hits(&costs), MAX_SPAN).await;
                let (here, there) = (decision(&here_taken), there_decision(&there_taken));
                assert_eq!(here.is_allowed(), there.is_allowed(), "step {step}: several {costs:?}");
                assert_eq!(here.remaining(), there.remaining(), "step {step}: several {costs:?}");
                if !(here.is_pending() && is_examined_in_part) {
                    assert_eq!(here.retry_after(), there.retry_after(), "step {step}: several {costs:?}");
                    assert_eq!(here.reason(), there.reason(), "step {step}: several {costs:?}");
                }
                reserved.extend(here_taken.ok().zip(there_taken.ok()));
            }
            Op::Peek { key } => {
                let there = shared.peek(KEYS[key]).await.expect("answers");
                assert_eq!(memories[key].peek(KEYS[key]), there, "step {step}: peek {key}");
            }
            Op::Refund { back } => {
                if back < reserved.len() {
                    let (here, there) = reserved.remove(reserved.len() - 1 - back);
                    current = current.min(reserved.len());
                    let here = memories[0].refund(here);
                    assert_eq!(here, shared.refund(there).await.expect("given back"), "step {step}: refund {back}");
                }
            }
            Op::Settle { back, actual } => {
                // Memory forgets what the limits before a reload count beyond the quota.
                if back + current < reserved.len() {
                    let (here, there) = reserved.remove(reserved.len() - 1 - back);
                    let there = shared.settle(there, actual).await.expect("settled");
                    assert_eq!(memories[0].settle(here, actual), there, "step {step}: settle {back} {actual}");
                }
            }
            Op::Reset { key } => {
                memories[key].reset(KEYS[key]);
                shared.reset(KEYS[key]).await.expect("reset");
            }
            Op::Change { percent, faster } => {
                current = reserved.len();
                let changed: Vec<Plan> = plans.iter().map(|plan| plan.changed(percent, faster)).collect();
                let changed = self::limits(&changed);
                kept.push((memories.clone(), shared.clone()));
                memories = memories.map(|memory| memory.with_limits(changed.clone()).expect("valid limits"));
                shared = shared.with_limits(changed).expect("valid limits");
            }
            Op::Exchange { plans: others } => {
                let changed = self::limits(&others[..limits.len()]);
                if changed.len() == limits.len() {
                    current = reserved.len();
                    kept.push((memories.clone(), shared.clone()));
                    memories = memories.map(|memory| memory.with_limits(changed.clone()).expect("valid limits"));
                    shared = shared.with_limits(changed).expect("valid limits");
                }
            }
            Op::Forward(gap) => now += gap,
            Op::Back(gap) => now -= gap,
        }
        clock.set(Timestamp::from_micros(now));
    }
}

/// The largest quota that a limit has had changes the layout of its keys in memory, and nothing on Redis. A clock that
/// steps back afterwards finds the same on both.
#[test]
fn a_clock_that_steps_back_after_a_reload_finds_the_same_on_both() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let plan = |kind, quota, span| Plan { kind, quota, rate: Rate::new(1, Duration::from_millis(1)), span };
    let (second, millisecond) = (Duration::from_secs(1), Duration::from_millis(1));
    let check = |cost| Op::Check { key: 0, cost };
    let raise = |quota| Op::Exchange { plans: vec![plan(Kind::Tokens, quota, second); 2] };
    let restore = || Op::Change { percent: 100, faster: 1 };
    let counter = plan(Kind::Counter { segments: 4 }, 1, second);
    let fine = plan(Kind::Counter { segments: 1000 }, 1, millisecond);
    let log = plan(Kind::Log, 4, millisecond);
    let later_segment =
        vec![check(1), raise(32), Op::Forward(34_292), restore(), check(1), Op::Back(250_001), check(1)];
    let refunded = vec![check(1), Op::Refund { back: 0 }, raise(2), Op::Back(1), restore(), check(1)];
    let expired = vec![check(1), raise(5), Op::Forward(1000), restore(), check(5), Op::Back(1), check(1)];
    for (plan, ops) in [(counter, later_segment), (fine, refunded), (log, expired)] {
        runtime.block_on(agree(&server, Layout::Plain, &[plan], ops.clone(), 1_735_781_807_465_708));
        if plan.is_compact() {
            runtime.block_on(agree(&server, Layout::Compact, &[plan], ops, 1_735_781_807_465_708));
        }
    }
}

/// Limits with the same rate have states that begin alike, but not the same largest quota.
#[test]
fn each_key_of_a_batch_keeps_its_own_ceiling_after_a_step_back() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let plan = |kind, quota| Plan { kind, quota, rate: Rate::per_second(1), span: Duration::from_secs(1) };
    let seconds = |seconds: u64| seconds * 1_000_000;
    for kind in [Kind::Tokens, Kind::Meter] {
        for quotas in [[1000, 10], [10, 1000]] {
            let ops = vec![
                Op::Several { costs: vec![5, 5] },
                Op::Forward(seconds(100)),
                Op::Several { costs: vec![10, 10] },
                Op::Back(seconds(99)),
                // Of the first request, which both limits refund in one call.
                Op::Refund { back: 1 },
                Op::Peek { key: 0 },
                Op::Forward(seconds(7)),
                Op::Several { costs: vec![2, 2] },
            ];
            for layout in [Layout::Plain, Layout::Compact] {
                let plans = quotas.map(|quota| plan(kind, quota));
                runtime.block_on(agree(&server, layout, &plans, ops.clone(), 1_700_000_000_000_000));
            }
        }
    }
}

/// An operation of one of two nodes.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Check { raised: bool, cost: u64 },
    Peek { raised: bool },
    Forward(u64),
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let cost = prop_oneof![3 => Just(1_u64), 3 => 1_u64..=40, 1 => 0_u64..=350];
    let turn = prop_oneof![
        6 => (any::<bool>(), cost).prop_map(|(raised, cost)| Turn::Check { raised, cost }),
        2 => any::<bool>().prop_map(|raised| Turn::Peek { raised }),
        2 => prop_oneof![1_u64..2_000, 1_u64..2_000_000].prop_map(Turn::Forward),
    ];
    proptest::collection::vec(turn, 1..40)
}

/// Two nodes, one of which has not loaded a raised quota yet. In memory both are handles of one limiter.
async fn agree_across_nodes(server: &RedisServer, layout: Layout, plan: Plan, percent: u64, turns: Vec<Turn>) {
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let mut now = 1_700_000_000_000_000;
    let clock = ManualClock::at(Timestamp::from_micros(now));
    let (low, high) = (limits(&[plan.changed(percent, 1)]), limits(&[plan]));
    if low.is_empty() || high.is_empty() {
        return;
    }
    // Raised first, so that memory has room for all and converts nothing.
    let memory = Limiter::builder().limits(high.clone()).clock(clock.clone()).build().expect("limits are valid");
    let memories = [memory.with_limits(low.clone()).expect("limits are valid"), memory];
    let node = async |limits: Vec<Limit>| {
        let builder = RedisLimiter::builder(settings(server, layout)).limits(limits).clock(clock.clone());
        builder.store_timeout(Duration::from_secs(10)).connect().await.expect("connects")
    };
    let nodes = [node(low).await, node(high).await];
    // From its first charge on, the state carries the raised quota.
    assert_eq!(memories[1].check("ann"), nodes[1].check("ann").await);
    for (step, turn) in turns.into_iter().enumerate() {
        match turn {
            Turn::Check { raised, cost } => {
                let which = usize::from(raised);
                let (here, there) = (memories[which].check_n("ann", cost), nodes[which].check_n("ann", cost).await);
                assert_eq!(here, there, "step {step}: {turn:?}");
            }
            Turn::Peek { raised } => {
                let which = usize::from(raised);
                let there = nodes[which].peek("ann").await.expect("answers");
                assert_eq!(memories[which].peek("ann"), there, "step {step}: {turn:?}");
            }
            Turn::Forward(gap) => now += gap,
        }
        clock.set(Timestamp::from_micros(now));
    }
}

#[test]
fn a_node_with_old_rules_keeps_units_spent_under_a_raised_quota() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let mut runner = TestRunner::new(Config { cases: TRACES / 2, failure_persistence: None, ..Config::default() });
    let layouts = prop_oneof![Just(Layout::Plain), Just(Layout::Compact)];
    let outcome = runner.run(&(layouts, plans(), 1_u64..100, turns()), |(layout, plan, percent, turns)| {
        runtime.block_on(agree_across_nodes(&server, layout, plan, percent, turns));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// Two limits have the same remaining share, and one of them has a hit without cost.
#[test]
fn of_equal_limits_the_first_with_a_cost_is_reported_on_both() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = RedisServer::start();
    let plan = |kind, quota| Plan { kind, quota, rate: Rate::per_second(1), span: Duration::from_secs(1) };
    let windows = [plan(Kind::ClockWindow, 35), plan(Kind::ClockWindow, 5)];
    let logs = [plan(Kind::ClockWindow, 35), plan(Kind::Log, 5)];
    for plans in [windows, logs] {
        for costs in [[5, 0], [0, 1]] {
            let ops = vec![Op::Several { costs: vec![2, 1] }, Op::Several { costs: costs.to_vec() }];
            for layout in [Layout::Plain, Layout::Compact] {
                runtime.block_on(agree(&server, layout, &plans, ops.clone(), 1_700_000_000_000_000));
            }
        }
    }
}

/// A plan that is added by a reload raises the largest quota of the limit, and then denies a key that has the state of the
/// limit. The denial corrects that state for a clock that has stepped back, on both by the same quota.
#[tokio::test]
async fn a_denial_by_an_added_plan_after_a_step_back_leaves_the_same_state_on_both() {
    let server = RedisServer::start();
    let limit = |capacity, per_second| {
        Limit::new("limit", TokenBucket::new(capacity, Rate::per_second(per_second))).expect("valid numbers")
    };
    let with_plan = || LimitSet::new().limit(limit(10, 1)).variant("plan", limit(100, 2));
    for layout in [Layout::Plain, Layout::Compact] {
        let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
        let clock = ManualClock::at(Timestamp::from_micros(1_700_000_000_000_000));
        let here = Limiter::builder().limit(limit(10, 1)).clock(clock.clone()).build().expect("valid limits");
        let there = RedisLimiter::builder(settings(&server, layout)).limit(limit(10, 1)).clock(clock.clone());
        let there = there.store_timeout(Duration::from_secs(10)).connect().await.expect("connects");
        assert_eq!(here.check_n("ann", 5), there.check_n("ann", 5).await);
        let here = here.with_limits(with_plan()).expect("valid limits");
        let there = there.with_limits(with_plan()).expect("valid limits");
        clock.set(Timestamp::from_micros(1_700_000_000_000_000 - 200_000_000));
        let [plan, plan_there] = [here.variant("limit", "plan"), there.variant("limit", "plan")].map(Option::unwrap);
        let denied = here.decide_now(&[Hit::new(plan, "ann").cost(100)]);
        assert!(!denied.is_allowed());
        assert_eq!(denied, there.decide(&[Hit::new(plan_there, "ann").cost(100)]).await);
        assert_eq!(here.peek("ann"), there.peek("ann").await.expect("answers"), "{layout:?}");
        clock.advance(Duration::from_secs(60));
        assert_eq!(here.peek("ann"), there.peek("ann").await.expect("answers"), "{layout:?}");
        let peeked = here.decide_now(&[Hit::new(plan, "ann").cost(0)]);
        assert_eq!(peeked, there.decide(&[Hit::new(plan_there, "ann").cost(0)]).await, "{layout:?}");
    }
}
