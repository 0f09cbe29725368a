//! No command runs twice, and a denied request gives back all units that it took.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use testkit::redis::{Cluster, Link, RedisServer};
use testkit::window::LONG_WINDOW;
use tokio::time::{Instant, sleep, timeout};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{
    Algorithm, DAY, FixedWindow, Hit, LeakyBucket, Limit, LimitId, OnStoreFailure, Rate, SECOND, SlidingWindowCounter,
    SlidingWindowLog, Source, Timestamp, TokenBucket,
};

use crate::load::{RECOVERY, until_back};

const PATIENT: Duration = Duration::from_secs(20);

fn limit(name: &str, algorithm: impl Into<Algorithm>) -> Limit {
    Limit::new(name, algorithm).expect("the numbers are within the bounds")
}

fn builder(url: String) -> RedisLimiterBuilder {
    RedisLimiter::builder(url).store_timeout(PATIENT).on_store_failure(OnStoreFailure::Deny)
}

/// A cluster without failover, even on a busy machine.
fn steady_cluster() -> Cluster {
    Cluster::with(&["--cluster-node-timeout", "60000"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_whose_reply_is_lost_is_not_repeated() {
    let link = Link::to_nobody_yet();
    let port = link.port().to_string();
    let server = RedisServer::with(&["--cluster-enabled", "yes", "--cluster-announce-port", &port]);
    let mut connection = server.connection();
    let _: () =
        redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383).query(&mut connection).expect("slots are given");
    link.lead_to(&server);
    let limiter = builder(format!("redis+cluster://127.0.0.1:{port}"))
        .store_timeout(Duration::from_secs(2))
        .limit(limit("limit", FixedWindow::new(1_000, DAY).from_first_request()))
        .without_denial_cache()
        .connect()
        .await
        .unwrap();
    until_back(&limiter, "another").await;
    // Enough units stay taken for a second refund to show.
    let mut taken = 500;
    assert!(limiter.check_n("key", taken).await.is_allowed());
    for round in 1..=10 {
        let Ok(reservation) = limiter.reserve("key", 20, DAY).await else { panic!("round {round}: 20 fit") };
        assert_eq!(reservation.decision().source(), Source::Store, "round {round}");
        taken += 20;
        link.cut_next_reply();
        let outcome = timeout(PATIENT, limiter.refund(reservation)).await.expect("answered");
        until_back(&limiter, "another").await;
        let left = limiter.peek("key").await.expect("the server answers").remaining();
        assert!(left <= 1_000 - taken + 20, "round {round}: {left} are left of {taken} taken, {outcome:?}");
        taken = 1_000 - left;
    }
}

/// Creates limits together with one that is always exhausted, each in its own slot.
async fn beside_an_exhausted_limit(cluster: &Cluster, beside: Vec<Limit>) -> (RedisLimiter, LimitId) {
    // The clock advances by a millisecond with every read, so that time passes between taking and giving back.
    let micros = AtomicU64::new(1_700_000_000_000_000);
    let clock = move || Timestamp::from_micros(micros.fetch_add(1_000, Ordering::SeqCst));
    let spent = limit("spent", FixedWindow::new(1, DAY).from_first_request());
    let limits = beside.into_iter().chain([spent]).fold(builder(cluster.url()), RedisLimiterBuilder::limit);
    let limiter = limits.clock(clock).connect().await.expect("the settings are valid");
    let spent = limiter.id("spent").expect("a limit");
    assert!(limiter.decide(&[Hit::new(spent, "key")]).await.is_allowed());
    (limiter, spent)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_another_slot_denies_cost_a_bucket_no_refill() {
    let cluster = steady_cluster();
    let rate = || Rate::new(1, Duration::from_millis(10));
    let algorithms: [(&str, Algorithm); 3] = [
        ("tokens", TokenBucket::new(100_000, rate()).into()),
        ("meter", LeakyBucket::new(100_000, rate()).into()),
        ("portions", TokenBucket::new(100_000, rate()).interval().into()),
    ];
    let limits = algorithms.iter().map(|(name, algorithm)| limit(name, *algorithm)).collect();
    let (limiter, spent) = beside_an_exhausted_limit(&cluster, limits).await;
    for (name, _) in algorithms {
        let id = limiter.id(name).expect("a limit");
        let first = limiter.decide(&[Hit::new(id, "key").cost(50_000)]).await;
        assert!(first.is_allowed(), "{name}");
        for _ in 0..300 {
            let decision = limiter.decide(&[Hit::new(id, "key").cost(7), Hit::new(spent, "key")]).await;
            assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Store), "{name}");
        }
        let last = limiter.decide(&[Hit::new(id, "key").cost(0)]).await;
        let passed = (last.at().as_micros() - first.at().as_micros()) / 10_000;
        let expected = 50_000 + passed;
        // Time passes between the decisions of a batch and the replies.
        assert!(last.remaining() + 1 >= expected && last.remaining() <= expected + 1, "{name}: {last:?}, {passed}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_another_slot_denies_cost_nothing_by_any_algorithm() {
    let cluster = steady_cluster();
    let algorithms: [(&str, Algorithm); 5] = [
        ("queue", LeakyBucket::new(1_000, Rate::new(1, DAY)).queue(1000 * DAY).into()),
        ("window", FixedWindow::new(1_000, LONG_WINDOW).into()),
        ("opened", FixedWindow::new(1_000, 300 * DAY).from_first_request().into()),
        ("logged", SlidingWindowLog::new(1_000, 300 * DAY).into()),
        ("counted", SlidingWindowCounter::new(1_000, LONG_WINDOW).segments(6).into()),
    ];
    let limits = algorithms.iter().map(|(name, algorithm)| limit(name, *algorithm)).collect();
    let (limiter, spent) = beside_an_exhausted_limit(&cluster, limits).await;
    for (name, _) in algorithms {
        let id = limiter.id(name).expect("a limit");
        assert!(limiter.decide(&[Hit::new(id, "key").cost(10)]).await.is_allowed(), "{name}");
        for _ in 0..20 {
            let decision = limiter.decide(&[Hit::new(id, "key").cost(3), Hit::new(spent, "key")]).await;
            assert!(!decision.is_allowed(), "{name}");
        }
        let left = limiter.decide(&[Hit::new(id, "key").cost(0)]).await;
        assert_eq!(left.remaining(), 990, "{name}: {left:?}");
    }
}

/// Refill under an earlier configuration pays earlier debt, and does not reduce the units that are given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_another_slot_denies_cost_nothing_after_the_rate_was_lowered() {
    let cluster = steady_cluster();
    let bucket = |rate| limit("tokens", TokenBucket::new(1_000, rate));
    let (before, _) = beside_an_exhausted_limit(&cluster, vec![bucket(Rate::new(1_000, SECOND))]).await;
    let spent = limit("spent", FixedWindow::new(1, DAY).from_first_request());
    let limiter = before.with_limits(vec![bucket(Rate::new(1, DAY)), spent]).expect("valid limits");
    let [tokens, spent] = ["tokens", "spent"].map(|name| limiter.id(name).expect("a limit"));
    assert!(limiter.decide(&[Hit::new(tokens, "key").cost(500)]).await.is_allowed());
    for _ in 0..50 {
        let decision = limiter.decide(&[Hit::new(tokens, "key").cost(7), Hit::new(spent, "key")]).await;
        assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Store));
    }
    let left = limiter.decide(&[Hit::new(tokens, "key").cost(0)]).await;
    assert_eq!(left.remaining(), 500, "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_request_leaves_nothing_taken() {
    let cluster = steady_cluster();
    let limiter = builder(cluster.url())
        .limit(limit("loose", SlidingWindowLog::new(10_000, DAY)))
        .limit(limit("spent", FixedWindow::new(1, DAY).from_first_request()))
        .without_denial_cache()
        .connect()
        .await
        .unwrap();
    let [loose, spent] = ["loose", "spent"].map(|name| limiter.id(name).expect("a limit"));
    assert!(limiter.decide(&[Hit::new(spent, "key")]).await.is_allowed());
    for round in 0..400_u64 {
        let hits = [Hit::new(loose, "key"), Hit::new(spent, "key")];
        let _ = timeout(Duration::from_micros(5 * round), limiter.decide(&hits)).await;
    }
    let begin = Instant::now();
    loop {
        let left = limiter.decide(&[Hit::new(loose, "key").cost(0)]).await.remaining();
        if left == 10_000 {
            break;
        }
        assert!(begin.elapsed() < RECOVERY, "{left} of 10000 are left");
        sleep(10 * SECOND / 1_000).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_over_several_slots_gives_back_to_every_limit() {
    let cluster = steady_cluster();
    let algorithms: [(&str, Algorithm); 6] = [
        ("bucket", TokenBucket::new(100, Rate::per_day(100)).into()),
        ("opened", FixedWindow::new(100, DAY).from_first_request().into()),
        ("log", SlidingWindowLog::new(100, DAY).into()),
        ("other log", SlidingWindowLog::new(100, DAY).into()),
        ("third log", SlidingWindowLog::new(100, DAY).into()),
        ("counter", SlidingWindowCounter::new(100, LONG_WINDOW).into()),
    ];
    let builder =
        algorithms.iter().fold(builder(cluster.url()), |all, (name, algorithm)| all.limit(limit(name, *algorithm)));
    let limiter = builder.connect().await.expect("connects");
    let left = async |key: &str| {
        let mut left = Vec::new();
        for (name, _) in &algorithms {
            let hit = Hit::new(limiter.id(name).expect("a limit"), key).cost(0);
            left.push((*name, limiter.decide(&[hit]).await.remaining()));
        }
        left
    };
    for round in 0..20 {
        let key = format!("key {round}");
        let Ok(refunded) = limiter.reserve(&key, 30, DAY).await else { panic!("30 of 100 fit") };
        let Ok(settled) = limiter.reserve(&key, 20, DAY).await else { panic!("20 of 70 fit") };
        limiter.refund(refunded).await.expect("given back");
        limiter.settle(settled, 5).await.expect("given back");
        let left = left(&key).await;
        // Units that a bucket has refilled in the meantime are not given back.
        assert!(left.iter().all(|(name, left)| *left == 95 || *name == "bucket" && *left >= 94), "{round}: {left:?}");
    }
}
