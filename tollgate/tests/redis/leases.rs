//! Leases: several nodes use one busy key with few calls, and never admit more than the limit.

mod beside;
mod debts;
mod resets;

use std::time::Duration;

use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tokio::time::Instant;
use tollgate::redis::RedisLimiter;
use tollgate::{
    Algorithm, Consistency, FixedWindow, HOUR, Limit, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog, Source,
    TokenBucket,
};

const NODES: usize = 4;

async fn node(server: &RedisServer, algorithm: impl Into<Algorithm>) -> RedisLimiter {
    let limit = Limit::new("hot", algorithm).expect("a valid limit").with_consistency(Consistency::Leased);
    let builder = RedisLimiter::builder(server.url()).limit(limit).store_timeout(5 * SECOND);
    builder.connect().await.expect("connects")
}

async fn nodes(server: &RedisServer, algorithm: Algorithm) -> Vec<RedisLimiter> {
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        nodes.push(node(server, algorithm).await);
    }
    nodes
}

/// Sends some thousands of requests per second to each node. Returns when each allowed request began and was decided,
/// counted from the start.
async fn send_load(nodes: &[RedisLimiter], lasting: Duration) -> Vec<(Duration, Duration)> {
    let start = Instant::now();
    let offered = nodes.iter().map(|node| {
        let node = node.clone();
        tokio::spawn(async move {
            let mut admitted = Vec::new();
            let mut tick = tokio::time::interval(Duration::from_millis(1));
            while start.elapsed() < lasting {
                tick.tick().await;
                for _ in 0..5 {
                    let began = start.elapsed();
                    let decision = node.check("key").await;
                    assert_ne!(decision.source(), Source::Local, "Redis was there all the time");
                    if decision.is_allowed() {
                        admitted.push((began, start.elapsed()));
                    }
                }
            }
            admitted
        })
    });
    let mut all = Vec::new();
    for offered in offered.collect::<Vec<_>>() {
        all.extend(offered.await.expect("a node works"));
    }
    all
}

fn calls(nodes: &[RedisLimiter]) -> u64 {
    nodes.iter().map(|node| node.stats().calls).sum()
}

fn spent_from_leases(nodes: &[RedisLimiter]) -> u64 {
    nodes.iter().map(|node| node.stats().leased).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_bucket_admits_no_more_than_its_capacity_and_its_rate() {
    let server = RedisServer::start();
    let (capacity, rate) = (2_000, 4_000);
    let nodes = nodes(&server, TokenBucket::new(capacity, Rate::per_second(rate)).into()).await;
    let admitted = send_load(&nodes, 2 * SECOND).await;
    // Every interval between two admitted requests, as far as its length is certain.
    let mut ends: Vec<Duration> = admitted.iter().map(|(_, answered)| *answered).collect();
    ends.sort_unstable();
    let last = *ends.last().expect("some pass");
    let most = capacity as f64 + rate as f64 * last.as_secs_f64();
    assert!(admitted.len() as f64 <= most, "{} admitted in {last:?}, at most {most}", admitted.len());
    for from in (0..ends.len()).step_by(97) {
        for to in (from..ends.len()).step_by(89) {
            // Requests that were decided in the interval began at most this much earlier.
            let slack = Duration::from_millis(50);
            let stretch = (ends[to] - ends[from] + slack).as_secs_f64();
            let most = capacity as f64 + rate as f64 * stretch;
            assert!((to - from) as f64 <= most + 1.0, "{} in {stretch} s", to - from);
        }
    }
    assert!(spent_from_leases(&nodes) > admitted.len() as u64 / 2, "most are decided here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_window_admits_exactly_its_limit() {
    let server = RedisServer::start();
    for algorithm in [
        FixedWindow::new(5_000, LONG_WINDOW).into(),
        FixedWindow::new(5_000, HOUR).from_first_request().into(),
        SlidingWindowLog::new(5_000, HOUR).into(),
        SlidingWindowCounter::new(5_000, LONG_WINDOW).into(),
        TokenBucket::new(5_000, Rate::per_day(1)).into(),
    ] as [Algorithm; 5]
    {
        let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
        let nodes = nodes(&server, algorithm).await;
        let mut admitted = send_load(&nodes, SECOND).await.len();
        // The rest of expired leases is given back, and then the whole limit is available.
        tokio::time::sleep(Duration::from_millis(400)).await;
        admitted += send_load(&nodes, Duration::from_millis(500)).await.len();
        assert!(admitted <= 5_000, "{algorithm:?}: {admitted}");
        assert!(admitted > 4_500, "{algorithm:?}: {admitted} of 5000");
        assert!(calls(&nodes) < 2_000, "{algorithm:?}: {} calls", calls(&nodes));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_log_admits_no_more_than_its_limit_in_any_second() {
    let server = RedisServer::start();
    let nodes = nodes(&server, SlidingWindowLog::new(2_000, SECOND).into()).await;
    let mut admitted = send_load(&nodes, Duration::from_millis(2_500)).await;
    admitted.sort_unstable_by_key(|(began, _)| *began);
    for (index, (began, _)) in admitted.iter().enumerate() {
        // A unit is taken between the start of a request and its decision: count those that are certainly within the
        // second after `began`.
        let within = admitted[index..].iter().filter(|(_, answered)| *answered < *began + SECOND);
        assert!(within.count() <= 2_000, "from {began:?}");
    }
    // The benchmark measures the utilisation. On a busy machine it may be low.
    assert!(admitted.len() > 100, "{} admitted", admitted.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excess_demand_is_never_admitted_above_a_limit() {
    let server = RedisServer::start();
    let rate = 4_000;
    for (algorithm, capacity) in [
        (TokenBucket::new(rate / 10, Rate::per_second(rate)).into(), rate / 10),
        (TokenBucket::new(rate, Rate::per_second(rate)).into(), rate),
    ] as [(Algorithm, u64); 2]
    {
        let () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
        let nodes = nodes(&server, algorithm).await;
        let admitted = send_load(&nodes[..3], 2 * SECOND).await;
        let last = admitted.iter().map(|(_, answered)| *answered).max().expect("some pass");
        let most = capacity as f64 + rate as f64 * last.as_secs_f64();
        let used = admitted.len() as f64 / most;
        assert!(used <= 1.0, "{algorithm:?}: {} admitted, at most {most}", admitted.len());
        // The benchmark measures the utilisation. A machine that pauses loses the units that are refilled meanwhile.
        assert!(used > 0.2, "{algorithm:?}: {} admitted, at most {most}", admitted.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excess_demand_is_never_admitted_above_a_window_of_a_second() {
    let server = RedisServer::start();
    let limit = 4_000;
    let nodes = nodes(&server, FixedWindow::new(limit, SECOND).into()).await;
    let (seconds, micros): (u64, u64) = redis::cmd("TIME").query(&mut server.connection()).expect("the time");
    tokio::time::sleep(Duration::from_micros(1_000_000 - micros)).await;
    let admitted = send_load(&nodes[..3], Duration::from_millis(1_900)).await.len() as u64;
    let (end, _): (u64, u64) = redis::cmd("TIME").query(&mut server.connection()).expect("the time");
    let most = limit * (end - seconds);
    assert!(admitted <= most, "{admitted} admitted, at most {most}");
    // The benchmark measures the utilisation: a busy machine sends few requests.
    assert!(admitted > most / 50, "{admitted} admitted, at most {most}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exhausted_bucket_is_called_less_and_less_often() {
    let server = RedisServer::start();
    // Leases last for 100 ms. The quota is spent at once, and little is refilled.
    let node = node(&server, TokenBucket::new(1_000, Rate::per_second(1_000))).await;
    let nodes = [node];
    let (before, began) = (calls(&nodes), Instant::now());
    assert!(!send_load(&nodes, 3 * SECOND).await.is_empty());
    let (calls, seconds) = (calls(&nodes) - before, began.elapsed().as_secs_f64());
    // The pauses grow to 80 ms, minus a jitter of up to two thirds. Without them there would be 100 calls a second.
    assert!((calls as f64) < 60.0 + 40.0 * seconds, "{calls} calls in {seconds} s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_key_costs_a_few_calls_per_second() {
    let server = RedisServer::start();
    let nodes = nodes(&server, TokenBucket::new(1_000_000, Rate::per_second(100_000)).into()).await;
    let allowed = send_load(&nodes, 2 * SECOND).await.len() as u64;
    assert!(calls(&nodes) * 50 < allowed, "{} calls for {allowed} requests", calls(&nodes));
}

/// A client chooses the numbers of `CL.THROTTLE`, and must not end the leases of other limits with them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_beside_those_of_a_limiter_end_no_leases() {
    let server = RedisServer::start();
    let node = node(&server, FixedWindow::new(1 << 30, LONG_WINDOW)).await;
    while node.check("key").await.source() != Source::Lease {}
    let (before, mut beside) = (node.stats().calls, node.clone());
    for quota in 1..=100 {
        let limit = Limit::new("other", FixedWindow::new(quota, HOUR)).expect("a valid limit");
        beside = beside.with_limits_beside(vec![limit]).expect("valid limits");
        assert!(node.check("key").await.is_allowed());
    }
    // A lease lasts some tenths of a second.
    let calls = node.stats().calls - before;
    assert!(calls < 50, "{calls} calls for 100 requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_key_is_decided_by_the_store() {
    let server = RedisServer::start();
    let node = node(&server, TokenBucket::new(1_000, Rate::per_second(1))).await;
    for _ in 0..5 {
        assert_eq!(node.check("quiet").await.source(), Source::Store);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert_eq!(node.stats().leased, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unspent_leases_are_given_back() {
    let server = RedisServer::start();
    let node = node(&server, FixedWindow::new(100_000, LONG_WINDOW)).await;
    let mut admitted = 0;
    for _ in 0..500 {
        admitted += u64::from(node.check("key").await.is_allowed());
    }
    node.return_leases().await;
    let left = node.peek("key").await.expect("answers").remaining();
    assert_eq!(left, 100_000 - admitted, "only what was admitted is charged");
}
