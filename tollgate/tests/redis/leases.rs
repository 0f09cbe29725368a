//! Leases: many nodes, one busy key, few trips, and never more admitted than the limit says.

mod beside;
mod resets;

use std::time::Duration;

use tokio::time::Instant;
use tollgate::redis::RedisLimiter;
use tollgate::{
    Algorithm, Consistency, FixedWindow, HOUR, Limit, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog, Source,
    TokenBucket,
};

use crate::servers::RedisServer;

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

/// Offers each node some thousands of requests a second for that long; says when each one that passed began and
/// had its answer, counted from the start.
async fn offer(nodes: &[RedisLimiter], lasting: Duration) -> Vec<(Duration, Duration)> {
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

fn trips(nodes: &[RedisLimiter]) -> u64 {
    nodes.iter().map(|node| node.stats().calls).sum()
}

fn spent_from_slices(nodes: &[RedisLimiter]) -> u64 {
    nodes.iter().map(|node| node.stats().leased).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_bucket_admits_no_more_than_its_capacity_and_its_rate() {
    let server = RedisServer::start();
    let (capacity, rate) = (2_000, 4_000);
    let nodes = nodes(&server, TokenBucket::new(capacity, Rate::per_second(rate)).into()).await;
    let admitted = offer(&nodes, 2 * SECOND).await;
    // Of every stretch that begins with one admitted and ends with another, as much of it as is certain.
    let mut ends: Vec<Duration> = admitted.iter().map(|(_, answered)| *answered).collect();
    ends.sort_unstable();
    let last = *ends.last().expect("some pass");
    let most = capacity as f64 + rate as f64 * last.as_secs_f64();
    assert!(admitted.len() as f64 <= most, "{} admitted in {last:?}, at most {most}", admitted.len());
    for from in (0..ends.len()).step_by(97) {
        for to in (from..ends.len()).step_by(89) {
            // What was answered in a stretch began at most so much earlier.
            let slack = Duration::from_millis(50);
            let stretch = (ends[to] - ends[from] + slack).as_secs_f64();
            let most = capacity as f64 + rate as f64 * stretch;
            assert!((to - from) as f64 <= most + 1.0, "{} in {stretch} s", to - from);
        }
    }
    assert!(spent_from_slices(&nodes) > admitted.len() as u64 / 2, "most are decided here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_window_admits_exactly_its_limit() {
    let server = RedisServer::start();
    for algorithm in [
        FixedWindow::new(5_000, 24 * HOUR).into(),
        FixedWindow::new(5_000, HOUR).from_first_request().into(),
        SlidingWindowLog::new(5_000, HOUR).into(),
        SlidingWindowCounter::new(5_000, 24 * HOUR).into(),
        TokenBucket::new(5_000, Rate::per_day(1)).into(),
    ] as [Algorithm; 5]
    {
        let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
        let nodes = nodes(&server, algorithm).await;
        let mut admitted = offer(&nodes, SECOND).await.len();
        // What is left of dead slices comes back, and then all of the limit can be had.
        tokio::time::sleep(Duration::from_millis(400)).await;
        admitted += offer(&nodes, Duration::from_millis(500)).await.len();
        assert!(admitted <= 5_000, "{algorithm:?}: {admitted}");
        assert!(admitted > 4_500, "{algorithm:?}: {admitted} of 5000");
        assert!(trips(&nodes) < 2_000, "{algorithm:?}: {} trips", trips(&nodes));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_second_of_a_leased_log_holds_more_than_its_limit() {
    let server = RedisServer::start();
    let nodes = nodes(&server, SlidingWindowLog::new(2_000, SECOND).into()).await;
    let mut admitted = offer(&nodes, Duration::from_millis(2_500)).await;
    admitted.sort_unstable_by_key(|(began, _)| *began);
    for (index, (began, _)) in admitted.iter().enumerate() {
        // Spent between its beginning and its answer: those that are certainly within the second after `began`.
        let within = admitted[index..].iter().filter(|(_, answered)| *answered < *began + SECOND);
        assert!(within.count() <= 2_000, "from {began:?}");
    }
    // The bench measures how much of it is used. On a busy machine it may be little.
    assert!(admitted.len() > 100, "{} admitted", admitted.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demand_above_a_limit_uses_most_of_it_and_never_more() {
    let server = RedisServer::start();
    let rate = 4_000;
    for (algorithm, capacity) in [
        (TokenBucket::new(rate / 10, Rate::per_second(rate)).into(), rate / 10),
        (TokenBucket::new(rate, Rate::per_second(rate)).into(), rate),
    ] as [(Algorithm, u64); 2]
    {
        let () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
        let nodes = nodes(&server, algorithm).await;
        let admitted = offer(&nodes[..3], 2 * SECOND).await;
        let last = admitted.iter().map(|(_, answered)| *answered).max().expect("some pass");
        let most = capacity as f64 + rate as f64 * last.as_secs_f64();
        let used = admitted.len() as f64 / most;
        assert!(used <= 1.0, "{algorithm:?}: {} admitted, at most {most}", admitted.len());
        // The bench measures how much it is. A machine that stands still for a while loses what comes back meanwhile.
        assert!(used > 0.2, "{algorithm:?}: {} admitted, at most {most}", admitted.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demand_above_a_window_of_a_second_is_never_admitted_above_it() {
    let server = RedisServer::start();
    let limit = 4_000;
    let nodes = nodes(&server, FixedWindow::new(limit, SECOND).into()).await;
    let (seconds, micros): (u64, u64) = redis::cmd("TIME").query(&mut server.connection()).expect("the time");
    tokio::time::sleep(Duration::from_micros(1_000_000 - micros)).await;
    let admitted = offer(&nodes[..3], Duration::from_millis(1_900)).await.len() as u64;
    let (end, _): (u64, u64) = redis::cmd("TIME").query(&mut server.connection()).expect("the time");
    let most = limit * (end - seconds);
    assert!(admitted <= most, "{admitted} admitted, at most {most}");
    // The bench measures how much of it is used: a busy machine offers little.
    assert!(admitted > most / 50, "{admitted} admitted, at most {most}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spent_bucket_is_asked_for_less_and_less() {
    let server = RedisServer::start();
    // Slices live for 100 ms. All is spent at once, and little comes back.
    let node = node(&server, TokenBucket::new(1_000, Rate::per_second(1_000))).await;
    let nodes = [node];
    let (before, began) = (trips(&nodes), Instant::now());
    assert!(!offer(&nodes, 3 * SECOND).await.is_empty());
    let (trips, seconds) = (trips(&nodes) - before, began.elapsed().as_secs_f64());
    // The pauses grow to 80 ms, less a jitter of up to two thirds. Asking every 10 ms would be 100 trips a second.
    assert!((trips as f64) < 60.0 + 40.0 * seconds, "{trips} trips in {seconds} s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_key_costs_a_few_trips_a_second() {
    let server = RedisServer::start();
    let nodes = nodes(&server, TokenBucket::new(1_000_000, Rate::per_second(100_000)).into()).await;
    let asked = offer(&nodes, 2 * SECOND).await.len() as u64;
    assert!(trips(&nodes) * 50 < asked, "{} trips for {asked} requests", trips(&nodes));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_key_is_decided_by_the_store() {
    let server = RedisServer::start();
    let node = node(&server, TokenBucket::new(1_000, Rate::per_second(1))).await;
    for _ in 0..5 {
        assert_eq!(node.check("quiet").await.source(), Source::Store);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert_eq!(node.stats().leased, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unspent_slices_are_given_back() {
    let server = RedisServer::start();
    let node = node(&server, FixedWindow::new(100_000, 24 * HOUR)).await;
    let mut admitted = 0;
    for _ in 0..500 {
        admitted += u64::from(node.check("key").await.is_allowed());
    }
    node.return_leases().await;
    let left = node.peek("key").await.expect("answers").remaining();
    assert_eq!(left, 100_000 - admitted, "only what was admitted is charged");
}
