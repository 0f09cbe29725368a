//! How often Tollgate calls Redis: for a flood on an exhausted key, for a leased hot key on several nodes, and for a
//! request with several limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tollgate::redis::RedisLimiter;
use tollgate::{Consistency, FixedWindow, HOUR, Limit, MINUTE, SlidingWindowCounter};

use super::Bench;
use super::contender::{Bucket, limiter, limiter_of};
use crate::clock;
use crate::report::{Results, Table};

const KEY: &str = "user:000000";

const FLOOD_TASKS: usize = 64;
const FLOOD_FOR: Duration = Duration::from_secs(2);
/// One at a time, and the next after 200 ms.
const FLOODED: Bucket = Bucket { capacity: 1, per_second: 5 };

const NODES: usize = 4;
/// Each checks once a millisecond, so a node makes 10 000 checks a second.
const ASKERS_PER_NODE: usize = 10;
const ASK_EVERY: Duration = Duration::from_millis(1);
/// Far less than the 40 000 checks a second of all nodes: it is used up within the first second or two.
const TIGHT: Bucket = Bucket { capacity: 20_000, per_second: 20_000 };
/// More than all checks: nothing is ever denied.
const AMPLE: Bucket = Bucket { capacity: 100_000, per_second: 100_000 };

/// Nodes of the measurement of use; together they check twice as often as the limit allows.
const USE_NODES: usize = 3;
const USE_PER_SECOND: u64 = 15_000;

const SEVERAL_DECISIONS: usize = 1000;

pub(super) fn run(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    bench.block_on(async {
        bench.server.flush().await?;
        flood(bench, results).await?;
        leased(bench, results).await?;
        utilisation(bench, results).await?;
        several_limits(bench, results).await
    })
}

async fn flood(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let limiter = limiter(&bench.server, "flood", FLOODED.algorithm()).await?;
    // Denials are cached only once the subscription to resets is up.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let first_two = [limiter.check(KEY).await, limiter.check(KEY).await].map(|decision| decision.is_allowed());
    ensure!(first_two == [true, false], "a bucket of 1 let {first_two:?} pass");
    let before = limiter.stats();
    let began = clock::now();
    let (sent, passed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..FLOOD_TASKS {
        let (limiter, sent, passed) = (limiter.clone(), sent.clone(), passed.clone());
        tasks.spawn(async move {
            while clock::now() - began < FLOOD_FOR {
                let decision = limiter.check(KEY).await;
                sent.fetch_add(1, Ordering::Relaxed);
                passed.fetch_add(u64::from(decision.is_allowed()), Ordering::Relaxed);
                // A cached denial is returned without waiting, so this task would block all others.
                tokio::task::yield_now().await;
            }
        });
    }
    tasks.join_all().await;
    let waits = (clock::now() - began).as_secs_f64() * FLOODED.per_second as f64;
    let trips = (limiter.stats().calls - before.calls) as f64;
    let questions = limiter.stats().requests - before.requests;
    let title = format!("A flood against a spent key: {FLOOD_TASKS} tasks, one passes every 200 ms");
    let header = ["", "requests", "passed", "reached Redis", "round trips", "per retry_after"];
    let mut table = Table::new(title, header);
    let counts = [sent.load(Ordering::Relaxed), passed.load(Ordering::Relaxed), questions];
    let counts = counts.into_iter().map(|count| count.to_string());
    let shares = [format!("{trips:.0}"), format!("{:.2}", trips / waits)];
    table.row(["tollgate".to_string()].into_iter().chain(counts).chain(shares));
    table.print();
    results.ratio("flood_trips", trips / waits);
    Ok(())
}

/// The result of several nodes on one key.
struct Shared {
    requests: u64,
    admitted: u64,
    trips: u64,
    /// From before the first check until after the last decision.
    elapsed: Duration,
}

async fn leased(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let title = format!(
        "Leased, one hot key, {NODES} nodes of 10000 requests/s each; at most capacity + rate × time may be admitted"
    );
    let header = ["", "requests/s", "round trips/request", "admitted", "at most", "excess"];
    let mut table = Table::new(title, header);
    for (name, result, bucket) in [
        ("tollgate, demand of twice the rate", "leased", TIGHT),
        ("tollgate, demand below the rate", "leased_ample", AMPLE),
    ] {
        let nodes = nodes(bench, Limit::new(result, bucket.algorithm())?, NODES).await?;
        let shared = share(&nodes, bench.scale.leased_for).await?;
        let seconds = shared.elapsed.as_secs_f64();
        let bound = bucket.capacity as f64 + bucket.per_second as f64 * seconds;
        let excess = shared.admitted as f64 - bound;
        let per_request = shared.trips as f64 / shared.requests as f64;
        table.row([
            name.to_string(),
            format!("{:.0}", shared.requests as f64 / seconds),
            format!("{per_request:.5}"),
            shared.admitted.to_string(),
            format!("{bound:.0}"),
            format!("{excess:.0}"),
        ]);
        results.fraction(format!("{result}_trips_per_request"), per_request);
        results.quantity(format!("{result}_excess"), excess);
    }
    table.print();
    Ok(())
}

/// Returns the utilisation of a limit under twice the demand: admitted units over those that the limit allows.
async fn utilisation(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let title = format!("Leased, {USE_NODES} nodes, demand of twice the limit: use of the limit");
    let mut table = Table::new(title, ["", "admitted", "allowed", "used"]);
    // A tenth of a second's worth, so that most units are refilled during the run.
    let bucket = Bucket { capacity: USE_PER_SECOND / 10, per_second: USE_PER_SECOND };
    let length = bench.scale.leased_for;
    let bucket_nodes = nodes(bench, Limit::new("use", bucket.algorithm())?, USE_NODES).await?;
    let shared = share(&bucket_nodes, length).await?;
    let allowed = bucket.capacity as f64 + bucket.per_second as f64 * shared.elapsed.as_secs_f64();
    let mut least = f64::INFINITY;
    let mut row = |name: &str, admitted: u64, allowed: f64| {
        let used = admitted as f64 / allowed;
        table.row([name.to_string(), admitted.to_string(), format!("{allowed:.0}"), format!("{used:.3}")]);
        least = least.min(used);
    };
    row("token bucket", shared.admitted, allowed);
    let window = FixedWindow::new(USE_PER_SECOND, Duration::from_secs(1));
    let window_nodes = nodes(bench, Limit::new("use-window", window)?, USE_NODES).await?;
    // Windows begin at whole seconds.
    let since_epoch = clock::wall().duration_since(std::time::UNIX_EPOCH)?;
    let windows = length.as_secs();
    tokio::time::sleep(Duration::from_secs(1) - Duration::from_nanos(u64::from(since_epoch.subsec_nanos()))).await;
    // A little less than whole seconds, so that the last request does not open another window.
    let length = Duration::from_secs(windows) - Duration::from_millis(20);
    let shared = share(&window_nodes, length).await?;
    row("fixed window", shared.admitted, (USE_PER_SECOND * windows) as f64);
    table.print();
    results.ratio("leased_utilisation", least);
    Ok(())
}

async fn nodes(bench: &Bench, limit: Limit, count: usize) -> anyhow::Result<Vec<RedisLimiter>> {
    let limit = limit.with_consistency(Consistency::Leased);
    let mut nodes = Vec::new();
    for _ in 0..count {
        nodes.push(limiter_of(&bench.server, [limit.clone()]).await?);
    }
    Ok(nodes)
}

async fn share(nodes: &[RedisLimiter], length: Duration) -> anyhow::Result<Shared> {
    let ticks = u32::try_from(length.as_millis())?;
    let began = clock::now();
    let mut askers = JoinSet::new();
    for node in nodes {
        for cached in 0..ASKERS_PER_NODE {
            let offset = ASK_EVERY * u32::try_from(cached)? / u32::try_from(ASKERS_PER_NODE)?;
            askers.spawn(ask(node.clone(), offset, ticks));
        }
    }
    let admitted = askers.join_all().await.into_iter().sum();
    let elapsed = clock::now() - began;
    let stats = nodes.iter().map(RedisLimiter::stats);
    ensure!(stats.clone().all(|stats| stats.by_policy == 0), "tollgate decided without Redis");
    let requests = u64::from(ticks) * (nodes.len() * ASKERS_PER_NODE) as u64;
    Ok(Shared { requests, admitted, trips: stats.map(|stats| stats.calls).sum(), elapsed })
}

/// Checks at every tick and catches up on missed ones; returns how often it was allowed.
async fn ask(limiter: RedisLimiter, offset: Duration, ticks: u32) -> u64 {
    let mut clock = interval_at(Instant::from_std(clock::now()) + offset, ASK_EVERY);
    clock.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut admitted = 0;
    for _ in 0..ticks {
        clock.tick().await;
        admitted += u64::from(limiter.check(KEY).await.is_allowed());
    }
    admitted
}

async fn several_limits(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let limits = [
        Limit::new("second", Bucket::VAST.algorithm())?,
        Limit::new("minute", SlidingWindowCounter::new(1_000_000, MINUTE))?,
        Limit::new("hour", FixedWindow::new(1_000_000, HOUR))?,
    ];
    let count = limits.len();
    let limiter = limiter_of(&bench.server, limits).await?;
    let before = limiter.stats().calls;
    for _ in 0..SEVERAL_DECISIONS {
        ensure!(limiter.check(KEY).await.is_allowed(), "a request under {count} vast limits was denied");
    }
    let trips = (limiter.stats().calls - before) as f64 / SEVERAL_DECISIONS as f64;
    let mut table =
        Table::new(format!("{count} limits on one request, one request at a time"), ["", "round trips/request"]);
    table.row(["tollgate".to_string(), format!("{trips:.3}")]);
    table.print();
    results.ratio("several_limits_trips", trips);
    Ok(())
}
