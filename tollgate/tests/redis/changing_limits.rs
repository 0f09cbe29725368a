//! Limits on Redis that change while they are in use: counts are kept, cached denials are not, and connections end with
//! the last limiter.

use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tokio::time::{Instant, sleep};
use tollgate::redis::RedisLimiter;
use tollgate::{
    Algorithm, Consistency, DAY, Decision, FixedWindow, HOUR, Hit, LeakyBucket, Limit, LimitSet, ManualClock, Rate,
    SECOND, Settlement, SlidingWindowCounter, SlidingWindowLog, Source, Timestamp, TokenBucket,
};

use crate::load::{RECOVERY, until};

/// A whole hour, so a multiple of every window in use.
const START: Timestamp = Timestamp::from_secs(1_700_000_040 - 1_700_000_040 % 3600);
const PATIENCE: Duration = Duration::from_secs(20);
/// Refills a quota of 1,000 in the longest window.
const SLOW: Rate = Rate::new(1_000, LONG_WINDOW);

/// Every algorithm and variant, as functions of the quota. Nothing is refilled during a test on a real clock.
fn every_way() -> [fn(u64) -> Algorithm; 9] {
    [
        |quota| TokenBucket::new(quota, SLOW).into(),
        |quota| TokenBucket::new(quota, SLOW).interval().into(),
        |quota| LeakyBucket::new(quota, SLOW).into(),
        |quota| LeakyBucket::new(quota, SLOW).queue(LONG_WINDOW).into(),
        |quota| FixedWindow::new(quota, LONG_WINDOW).into(),
        |quota| FixedWindow::new(quota, DAY).from_first_request().into(),
        |quota| SlidingWindowLog::new(quota, DAY).into(),
        |quota| SlidingWindowCounter::new(quota, LONG_WINDOW).into(),
        |quota| SlidingWindowCounter::new(quota, LONG_WINDOW).segments(6).into(),
    ]
}

fn limit(algorithm: impl Into<Algorithm>) -> Limit {
    Limit::new("limit", algorithm).expect("the numbers are within the bounds")
}

fn changed(limiter: &RedisLimiter, algorithm: impl Into<Algorithm>) -> RedisLimiter {
    limiter.with_limits(vec![limit(algorithm)]).expect("one valid limit")
}

async fn connect(server: &RedisServer, limits: impl Into<LimitSet>, clock: Option<&ManualClock>) -> RedisLimiter {
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let builder = RedisLimiter::builder(server.url()).limits(limits).store_timeout(PATIENCE);
    let builder = match clock {
        Some(clock) => builder.clock(clock.clone()),
        None => builder,
    };
    builder.connect().await.expect("connects")
}

async fn left(limiter: &RedisLimiter, key: &str) -> u64 {
    limiter.peek(key).await.expect("Redis answers").remaining()
}

#[tokio::test]
async fn spent_units_count_under_a_changed_limit_and_both_handles_count_together() {
    let server = RedisServer::start();
    for way in every_way() {
        let clock = ManualClock::at(START);
        let first = connect(&server, vec![limit(way(100))], Some(&clock)).await;
        assert_eq!(first.check_n("ann", 40).await.remaining(), 60);
        let raised = changed(&first, way(1_000));
        assert_eq!(raised.check_n("ann", 20).await.remaining(), 940, "{:?}", way(1_000));
        assert_eq!(first.check_n("ann", 10).await.remaining(), 30, "{:?}", way(100));
        let lowered = changed(&raised, way(50));
        let denied = lowered.check("ann").await;
        assert_eq!((denied.is_allowed(), denied.remaining()), (false, 0), "{:?}", way(50));
        let wait = denied.retry_after().expect("waiting helps");
        clock.set(START.saturating_add(wait - Duration::from_micros(1)));
        assert!(!lowered.check("ann").await.is_allowed(), "{:?}", way(50));
        clock.set(START.saturating_add(wait));
        assert!(lowered.check("ann").await.is_allowed(), "{:?}", way(50));
    }
}

#[tokio::test]
async fn a_debt_stays_under_a_changed_limit() {
    let server = RedisServer::start();
    for way in every_way() {
        let clock = ManualClock::at(START);
        let first = connect(&server, vec![limit(way(100))], Some(&clock)).await;
        let Ok(reserved) = first.reserve("ann", 1, DAY).await else { panic!("1 of 100 fits") };
        let Ok(other) = first.reserve("ann", 1, DAY).await else { panic!("1 of 100 fits") };
        assert_eq!(first.settle(reserved, 149).await, Ok(Settlement::Owed { units: 50 }), "{:?}", way(100));
        let raised = changed(&first, way(1_000));
        assert_eq!(left(&raised, "ann").await, 850, "{:?}", way(1_000));
        // The units that a node with the raised limit admits stay counted when another node still has the old one.
        clock.advance(Duration::from_micros(1));
        assert!(raised.check_n("ann", 400).await.is_allowed(), "{:?}", way(1_000));
        clock.advance(Duration::from_micros(1));
        assert_eq!(first.settle(other, 101).await, Ok(Settlement::Owed { units: 100 }), "{:?}", way(100));
        assert_eq!(left(&raised, "ann").await, 350, "{:?}", way(1_000));
        let lowered = changed(&raised, way(50));
        let denied = lowered.check("ann").await;
        assert_eq!((denied.is_allowed(), denied.remaining()), (false, 0), "{:?}", way(50));
        let wait = denied.retry_after().expect("waiting helps");
        clock.advance(wait - Duration::from_micros(1));
        assert!(!lowered.check("ann").await.is_allowed(), "{:?}", way(50));
        clock.advance(Duration::from_micros(1));
        assert!(lowered.check("ann").await.is_allowed(), "{:?}", way(50));
    }
}

/// A reservation is settled by the limit that took it, although the key is counted by another algorithm now.
#[tokio::test]
async fn a_debt_is_charged_to_the_state_of_any_other_algorithm() {
    let server = RedisServer::start();
    for before in every_way() {
        for after in every_way() {
            let what = format!("from {:?} to {:?}", before(100), after(100));
            let clock = ManualClock::at(START);
            let first = connect(&server, vec![limit(before(100))], Some(&clock)).await;
            let Ok(reserved) = first.reserve("ann", 1, DAY).await else { panic!("{what}: 1 of 100 fits") };
            let Ok(other) = first.reserve("ann", 1, DAY).await else { panic!("{what}: 1 of 100 fits") };
            let second = changed(&first, after(100));
            assert_eq!(second.check_n("ann", 8).await.remaining(), 90, "{what}");
            assert_eq!(first.settle(reserved, 491).await, Ok(Settlement::Owed { units: 400 }), "{what}");
            assert_eq!(first.settle(other, 2).await, Ok(Settlement::Owed { units: 1 }), "{what}");
            assert!(!second.check("ann").await.is_allowed(), "{what}");
            assert!(!first.check("ann").await.is_allowed(), "{what}");
            let Ok(reserved) = first.reserve("bob", 1, DAY).await else { panic!("{what}: 1 of 100 fits") };
            let Ok(other) = second.reserve("bob", 1, DAY).await else { panic!("{what}: 1 of 100 fits") };
            assert_eq!(second.settle(other, 500).await, Ok(Settlement::Owed { units: 401 }), "{what}");
            assert!(!first.check("bob").await.is_allowed(), "{what}");
            assert_eq!(first.settle(reserved, 3).await, Ok(Settlement::Owed { units: 2 }), "{what}");
            assert!(!second.check("bob").await.is_allowed(), "{what}");
        }
    }
}

/// Algorithms with windows, as functions of the window. The quota is ten units.
fn windowed() -> [fn(Duration) -> Algorithm; 6] {
    [
        |window| FixedWindow::new(10, window).into(),
        |window| FixedWindow::new(10, window).from_first_request().into(),
        |window| TokenBucket::new(10, Rate::new(10, window)).interval().into(),
        |window| SlidingWindowLog::new(10, window).into(),
        |window| SlidingWindowCounter::new(10, window).into(),
        |window| SlidingWindowCounter::new(10, window).segments(7).into(),
    ]
}

#[tokio::test]
async fn a_window_that_is_made_longer_and_shorter_again_locks_no_client_out() {
    let server = RedisServer::start();
    let lengths = [30, 60, 30, 3600, 1, 45, 30].map(Duration::from_secs);
    for way in windowed() {
        for at in [0, 29, 45, 59, 1_799] {
            let clock = ManualClock::at(START.saturating_add(Duration::from_secs(at)));
            let mut limiter = connect(&server, vec![limit(way(lengths[0]))], Some(&clock)).await;
            assert!(limiter.check_n("ann", 10).await.is_allowed());
            for window in lengths {
                limiter = changed(&limiter, way(window));
                let decision = limiter.check_n("ann", 10).await;
                assert_eq!(decision.source(), Source::Store);
                // A counter may wait for two windows, the others for one.
                let wait = decision.retry_after().unwrap_or_default();
                assert!(wait <= 2 * window, "{wait:?} for {:?} at {at} s", way(window));
                clock.advance(wait);
                let passes = decision.is_allowed() || limiter.check_n("ann", 10).await.is_allowed();
                assert!(passes, "{:?} at {at} s, after {wait:?}", way(window));
            }
        }
    }
}

#[tokio::test]
async fn a_window_whose_length_changes_admits_no_more_than_its_limit() {
    let server = RedisServer::start();
    let clock = ManualClock::at(START);
    let ways = [
        |window| FixedWindow::new(10, window).into(),
        |window| SlidingWindowCounter::new(10, window).segments(3).into(),
    ] as [fn(Duration) -> Algorithm; 2];
    for way in ways {
        let first = connect(&server, vec![limit(way(30 * SECOND))], Some(&clock)).await;
        let mut limiter = first;
        let mut admitted = 0;
        for round in 0..40 {
            limiter = changed(&limiter, way([30, 60][round % 2] * SECOND));
            for _ in 0..10 {
                admitted += usize::from(limiter.check("ann").await.is_allowed());
            }
        }
        assert_eq!(admitted, 10, "in one moment, of {:?}", way(SECOND));
    }
}

#[tokio::test]
async fn counters_with_other_windows_and_segments_share_a_batch() {
    let server = RedisServer::start();
    let clock = ManualClock::at(START);
    let way = |segments: u32| SlidingWindowCounter::new(1_000, HOUR + SECOND * segments).segments(segments);
    let first = connect(&server, vec![limit(way(1))], Some(&clock)).await;
    let others: Vec<RedisLimiter> = [6, 2, 1_000, 3].map(|segments| changed(&first, way(segments))).into();
    for round in 0..20 {
        clock.advance(7 * SECOND);
        let all = others.iter().chain([&first]).cycle().take(30);
        let decisions = join_all(all.map(|limiter| limiter.check("ann"))).await;
        for decision in &decisions {
            assert_eq!((decision.source(), decision.is_allowed()), (Source::Store, true), "round {round}");
        }
    }
    assert!(left(&first, "ann").await < 1_000, "the last round at least is counted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denial_under_the_old_limit_is_not_cached_for_the_new_one() {
    let server = RedisServer::start();
    for way in every_way() {
        let old = connect(&server, vec![limit(way(5))], None).await;
        let _ = until(&old, "key", RECOVERY, |decision| decision.source() == Source::DenialCache).await;
        let new = changed(&old, way(50));
        let decision = new.check("key").await;
        assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Store), "{:?}", way(50));
        let lower = changed(&new, way(1));
        assert!(!lower.check("key").await.is_allowed(), "{:?}", way(1));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denial_in_flight_while_the_limits_change_is_not_cached_for_the_new_ones() {
    let server = RedisServer::start();
    let way = |quota: u64| FixedWindow::new(quota, HOUR).from_first_request();
    let first = connect(&server, vec![limit(way(1))], None).await;
    let _ = until(&first, "listening", RECOVERY, |decision| decision.source() == Source::DenialCache).await;
    for round in 0..200 {
        let (key, old) = (format!("round {round}"), changed(&first, way(1)));
        assert!(old.check(&key).await.is_allowed());
        let (limiter, denied) = (old.clone(), key.clone());
        let denials = tokio::spawn(async move { join_all((0..8).map(|_| limiter.check(&denied))).await });
        let new = changed(&old, way(3));
        assert!(new.check(&key).await.is_allowed(), "{key}");
        assert!(denials.await.expect("no panic").iter().all(|decision| !decision.is_allowed()));
        assert!(new.check(&key).await.is_allowed(), "{key}");
        assert!(!new.check(&key).await.is_allowed(), "{key}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_by_another_process_reaches_the_new_limits() {
    let server = RedisServer::start();
    let way = |quota: u64| FixedWindow::new(quota, HOUR).from_first_request();
    let there = connect(&server, vec![limit(way(5))], None).await;
    let here =
        RedisLimiter::builder(server.url()).limit(limit(way(5))).store_timeout(PATIENCE).connect().await.unwrap();
    let new = changed(&here, way(3));
    for limiter in [&here, &new] {
        let _ = until(limiter, "key", RECOVERY, |decision| decision.source() == Source::DenialCache).await;
        there.reset("key").await.expect("reset");
        let _ = until(limiter, "key", RECOVERY, Decision::is_allowed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn variants_of_a_limit_share_a_key_but_not_cached_denials() {
    let server = RedisServer::start();
    for way in every_way() {
        let limits = LimitSet::new().limit(limit(way(10))).variant("plan", limit(way(1_000)));
        let limiter = connect(&server, limits, None).await;
        let plan = limiter.variant("limit", "plan").expect("a variant");
        let _ = until(&limiter, "key", RECOVERY, |decision| decision.source() == Source::DenialCache).await;
        let by_plan = limiter.decide(&[Hit::new(plan, "key")]).await;
        assert_eq!((by_plan.is_allowed(), by_plan.limit()), (true, Some(plan)), "{:?}", way(1_000));
        assert!(by_plan.remaining() < 1_000 - 10, "{:?}", way(1_000));
        assert!(!limiter.check("key").await.is_allowed(), "{:?}", way(10));
    }
}

fn leased(quota: u64) -> Limit {
    limit(FixedWindow::new(quota, LONG_WINDOW)).with_consistency(Consistency::Leased)
}

async fn spend(limiter: &RedisLimiter, requests: usize) -> u64 {
    let mut admitted = 0;
    for _ in 0..requests {
        admitted += u64::from(limiter.check("key").await.is_allowed());
    }
    admitted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_of_an_unchanged_limit_stay_in_use() {
    let server = RedisServer::start();
    let other = |quota: u64| Limit::new("other", FixedWindow::new(quota, LONG_WINDOW)).expect("valid");
    let limiter = connect(&server, vec![leased(100_000)], None).await;
    let admitted = spend(&limiter, 300).await;
    let (calls, before) = (limiter.stats().calls, limiter.stats().leased);
    let hit = |limiter: &RedisLimiter| limiter.id("limit").expect("there");
    let new = limiter.with_limits(vec![other(7), leased(100_000)]).expect("valid limits");
    let decision = new.decide(&[Hit::new(hit(&new), "key")]).await;
    assert_eq!(decision.source(), Source::Lease, "after {calls} calls");
    assert_eq!(new.stats().leased, before + 1);
    new.return_leases().await;
    let peeked = limiter.peek("key").await.expect("answers").remaining();
    assert_eq!(peeked, 100_000 - admitted - 1, "only admitted units are charged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_of_a_changed_limit_are_given_back() {
    let server = RedisServer::start();
    let old = connect(&server, vec![leased(100_000)], None).await;
    let admitted = spend(&old, 300).await;
    let new = changed(&old, FixedWindow::new(50_000, LONG_WINDOW));
    let begin = Instant::now();
    while left(&new, "key").await != 50_000 - admitted {
        assert!(begin.elapsed() < RECOVERY, "{} left, {admitted} admitted", left(&new, "key").await);
        sleep(Duration::from_millis(5)).await;
    }
}

fn clients(server: &RedisServer) -> usize {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).expect("listed");
    // Without this connection.
    list.lines().count() - 1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_and_tasks_end_with_the_last_limiter() {
    let server = RedisServer::start();
    let way = |quota: u64| FixedWindow::new(quota, LONG_WINDOW);
    let mut limiter = connect(&server, vec![leased(1_000)], None).await;
    let _ = spend(&limiter, 50).await;
    let connected = clients(&server);
    for quota in 1..50 {
        limiter = changed(&limiter, way(100 + quota));
        assert_eq!(limiter.check("key").await.source(), Source::Store);
    }
    // The subscription may have been made in the meantime.
    assert!(clients(&server) <= connected + 1);
    drop(limiter);
    let begin = Instant::now();
    while clients(&server) > 0 {
        assert!(begin.elapsed() < RECOVERY, "{} connections are left", clients(&server));
        sleep(Duration::from_millis(5)).await;
    }
}
