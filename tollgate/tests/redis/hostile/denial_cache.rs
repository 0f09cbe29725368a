//! The denial cache: denials are answered without a call, until the key is reset or the denial reaches its maximum age.

use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tokio::time::{Instant, sleep};
use tollgate::redis::RedisLimiter;
use tollgate::{
    Decision, FixedWindow, HOUR, Limit, Rate, SECOND, Settlement, SlidingWindowCounter, SlidingWindowLog, Source,
    Timestamp, TokenBucket,
};

use super::{PATIENCE, limiter};
use crate::load::{RECOVERY, until};
use crate::variants::{Variant, variants};

/// The time after which a reset by another process has arrived, on a busy machine.
const PROMPTLY: Duration = Duration::from_secs(5);

/// The time after which a refund by another process is noticed: a cached denial expires after a second. The rest is for
/// a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// Exhausts a key, until its denials come from the cache.
async fn exhaust(limiter: &RedisLimiter, key: &str) {
    let _ = until(limiter, key, RECOVERY, |decision| decision.source() == Source::DenialCache).await;
}

fn caching() -> impl Iterator<Item = Variant> {
    variants(5, LONG_WINDOW).into_iter().filter(|variant| !variant.counts_denied())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_debt_ends_the_cached_denials_of_its_key() {
    let server = RedisServer::start();
    let limit = Limit::new("tokens", TokenBucket::new(10, Rate::per_hour(1))).unwrap();
    let limiter = limiter(&server.url(), limit).await;
    let Ok(reserved) = limiter.reserve("key", 1, HOUR).await else { panic!("1 of 10 fits") };
    exhaust(&limiter, "key").await;
    assert!(limiter.check("key").await.retry_after().is_some_and(|wait| wait <= HOUR));
    assert_eq!(limiter.settle(reserved, 101).await, Ok(Settlement::Owed { units: 100 }));
    assert!(limiter.check("key").await.retry_after().is_some_and(|wait| wait > 100 * HOUR));
    exhaust(&limiter, "key").await;
    assert!(limiter.check("key").await.retry_after().is_some_and(|wait| wait > 100 * HOUR));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_on_an_exhausted_key_does_not_reach_redis() {
    let server = RedisServer::start();
    for variant in caching() {
        let limiter = limiter(&server.url(), variant.limit()).await;
        exhaust(&limiter, "key").await;
        let (before, began) = (limiter.stats(), Instant::now());
        let flood = (0..8).map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                for _ in 0..500 {
                    let denied = limiter.check("key").await;
                    assert!(!denied.is_allowed(), "{denied:?}");
                    assert!(denied.retry_after().is_some_and(|wait| wait <= LONG_WINDOW));
                }
            })
        });
        for task in join_all(flood).await {
            task.expect("no task panics");
        }
        // A cached denial expires after a second.
        let (calls, seconds) = (limiter.stats().calls - before.calls, began.elapsed().as_secs());
        assert!(calls <= 2 + 2 * seconds, "{}: {calls} calls in {seconds} s", variant.name);
        let by_store = limiter.stats().requests - before.requests;
        let cached = limiter.stats().cached_denials - before.cached_denials;
        assert!(cached + by_store >= 8 * 500 && by_store <= 2 + 2 * seconds, "{}: {cached}, {by_store}", variant.name);
        assert!(limiter.check("another").await.is_allowed(), "{}: it is about that key alone", variant.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_makes_few_calls_per_retry_after() {
    let server = RedisServer::start();
    let limit = Limit::new("slow", TokenBucket::new(1, Rate::per_second(4))).unwrap();
    let limiter = limiter(&server.url(), limit).await;
    exhaust(&limiter, "key").await;
    let (before, begin, mut admitted) = (limiter.stats().calls, Instant::now(), 0_u64);
    while begin.elapsed() < SECOND {
        admitted += u64::from(limiter.check("key").await.is_allowed());
        tokio::task::yield_now().await;
    }
    let (calls, waits) = (limiter.stats().calls - before, begin.elapsed().as_millis() as u64 / 250 + 1);
    assert!(admitted >= 1 && admitted <= waits, "{admitted} admitted in {waits} waits");
    // One allowed and one denied request; a third if the wait ends here a little earlier than on Redis.
    assert!(calls <= 3 * waits, "{calls} calls in {waits} waits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_by_another_process_is_noticed_at_once() {
    let server = RedisServer::start();
    for variant in caching() {
        let here = limiter(&server.url(), variant.limit()).await;
        let there = limiter(&server.url(), variant.limit()).await;
        exhaust(&here, "key").await;
        there.reset("key").await.expect("reset");
        let _ = until(&here, "key", PROMPTLY, |decision| decision.is_allowed()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_by_another_process_is_noticed_soon() {
    let server = RedisServer::start();
    for variant in caching().filter(Variant::gives_back) {
        let here = limiter(&server.url(), variant.limit()).await;
        let there = limiter(&server.url(), variant.limit()).await;
        let Ok(taken) = there.reserve("key", 5, tollgate::MINUTE).await else { panic!("5 fit") };
        exhaust(&here, "key").await;
        there.refund(taken).await.expect("given back");
        let _ = until(&here, "key", SOON, |decision| decision.is_allowed()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_for_less_by_another_process_is_noticed_soon() {
    let server = RedisServer::start();
    for variant in caching().filter(Variant::gives_back) {
        let here = limiter(&server.url(), variant.limit()).await;
        let there = limiter(&server.url(), variant.limit()).await;
        let Ok(reserved) = there.reserve("key", 5, HOUR).await else { panic!("5 of 5 fit") };
        exhaust(&here, "key").await;
        there.settle(reserved, 1).await.expect("given back");
        let _ = until(&here, "key", SOON, |decision| decision.is_allowed()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_during_a_denial_in_flight_is_not_lost() {
    let server = RedisServer::start();
    let limit = || Limit::new("one", FixedWindow::new(1, HOUR).from_first_request()).unwrap();
    let here = limiter(&server.url(), limit()).await;
    let there = limiter(&server.url(), limit()).await;
    exhaust(&here, "listening").await;
    for round in 0..300 {
        let key = format!("round {round}");
        assert!(here.check(&key).await.is_allowed());
        let (checking, resetting) = (here.clone(), there.clone());
        let denied = key.clone();
        let denials = tokio::spawn(async move { join_all((0..8).map(|_| checking.check(&denied))).await });
        let same = key.clone();
        let reset = tokio::spawn(async move { resetting.reset(&same).await });
        reset.await.expect("no panic").expect("reset");
        let denials = denials.await.expect("no panic");
        // One of the requests after the reset took its unit.
        if !denials.iter().any(|decision| decision.is_allowed()) {
            let _ = until(&here, &key, PROMPTLY, |decision| decision.is_allowed()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_denial_does_not_apply_to_a_smaller_cost() {
    let server = RedisServer::start();
    for variant in caching() {
        let limiter = limiter(&server.url(), variant.limit()).await;
        assert!(limiter.check_n("key", 2).await.is_allowed());
        let begin = Instant::now();
        while limiter.check_n("key", 4).await.source() != Source::DenialCache {
            assert!(begin.elapsed() < RECOVERY, "{}: never cached", variant.name);
            sleep(Duration::from_millis(5)).await;
        }
        let higher = limiter.check_n("key", 5).await;
        assert!(!higher.is_allowed(), "{}", variant.name);
        if variant.name != "log" {
            // The wait of a log depends on all of its entries, so the store decides.
            assert_eq!(higher.source(), Source::DenialCache, "{}", variant.name);
        }
        let smaller = limiter.check_n("key", 3).await;
        assert_eq!((smaller.is_allowed(), smaller.source()), (true, Source::Store), "{}", variant.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn denials_that_count_are_not_cached() {
    let server = RedisServer::start();
    let all = variants(5, LONG_WINDOW).into_iter().find(Variant::counts_denied).expect("there is one");
    let limiter = limiter(&server.url(), all.limit()).await;
    assert!(limiter.check_n("key", 5).await.is_allowed());
    // The subscription is up once the denial of another key is cached.
    for _ in 0..200 {
        let denied = limiter.check("key").await;
        assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Store));
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(limiter.stats().cached_denials, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_clears_the_cache() {
    let mut server = RedisServer::start();
    let limit = || Limit::new("one", FixedWindow::new(1, HOUR).from_first_request()).unwrap();
    let limiter = limiter(&server.url(), limit()).await;
    exhaust(&limiter, "key").await;
    // All data is lost, as may happen in a failover.
    server.restart();
    let back = until(&limiter, "key", RECOVERY, |decision| decision.is_allowed()).await;
    assert_eq!(back.source(), Source::Store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_keys_are_noticed_soon() {
    let server = RedisServer::start();
    for variant in caching() {
        let limiter = limiter(&server.url(), variant.limit()).await;
        exhaust(&limiter, "key").await;
        let () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
        let _ = until(&limiter, "key", SOON, |decision| decision.is_allowed()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_by_this_process_ends_its_own_denials() {
    let server = RedisServer::start();
    for variant in caching().filter(Variant::gives_back) {
        let limiter = limiter(&server.url(), variant.limit()).await;
        for round in 0..10 {
            let key = format!("key {round}");
            let Ok(taken) = limiter.reserve(&key, 5, tollgate::MINUTE).await else { panic!("5 fit") };
            exhaust(&limiter, &key).await;
            limiter.refund(taken).await.expect("given back");
            assert!(limiter.check(&key).await.is_allowed(), "{}", variant.name);
        }
    }
}

/// Messages that the server has published since its start.
fn published(server: &RedisServer) -> u64 {
    let info: redis::InfoDict =
        redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).expect("counted");
    let line: String = info.get("cmdstat_publish").unwrap_or_default();
    line.split(',').find_map(|part| part.strip_prefix("calls=")?.parse().ok()).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resets_are_published_and_refunds_are_not() {
    let server = RedisServer::start();
    for variant in caching().filter(Variant::gives_back) {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let before = published(&server);
        for _ in 0..20 {
            let Ok(taken) = limiter.reserve("key", 5, tollgate::MINUTE).await else { panic!("5 fit") };
            limiter.refund(taken).await.expect("given back");
        }
        assert_eq!(published(&server), before, "{}", variant.name);
        assert!(limiter.check("key").await.is_allowed());
        limiter.reset("key").await.expect("reset");
        assert_eq!(published(&server), before + 1, "{}", variant.name);
    }
}

/// A client chooses the numbers of `CL.THROTTLE`, and must not end the cached denials of other limits with them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_beside_those_of_a_limiter_end_no_cached_denials() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url(), Limit::new("spent", FixedWindow::new(1, LONG_WINDOW)).unwrap()).await;
    // A cached denial holds for a second only.
    let mut is_cached_still = false;
    for quota in 1..=20 {
        exhaust(&limiter, "key").await;
        let limit = Limit::new("other", FixedWindow::new(quota, HOUR)).unwrap();
        let beside = limiter.with_limits_beside(vec![limit]).expect("valid limits");
        assert!(beside.check(&quota.to_string()).await.is_allowed());
        is_cached_still |= limiter.check("key").await.source() == Source::DenialCache;
    }
    assert!(is_cached_still);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn denials_are_cached_after_a_reload_even_if_many_have_expired() {
    let server = RedisServer::start();
    let limit = |quota| Limit::new("one", FixedWindow::new(quota, HOUR).from_first_request()).unwrap();
    let builder = RedisLimiter::builder(server.url()).limit(limit(1)).store_timeout(super::PATIENCE);
    // Room for some hundreds of denials.
    let mut limiter = builder.max_memory(1 << 20).connect().await.expect("the settings are valid");
    exhaust(&limiter, "key").await;
    for quota in 2..5 {
        // More keys than fit, none of which is used again. All of the quota is taken, so the next request is denied.
        for number in 0..2_000 {
            assert!(limiter.check_n(&format!("{quota} {number}"), quota - 1).await.is_allowed());
        }
        limiter = limiter.with_limits(vec![limit(quota)]).expect("a valid limit");
        exhaust(&limiter, "key").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_changing_costs_does_not_reach_redis() {
    let server = RedisServer::start();
    let counter = Limit::new("counter", SlidingWindowCounter::new(20, LONG_WINDOW).segments(10)).unwrap();
    let log = Limit::new("log", SlidingWindowLog::new(20, LONG_WINDOW)).unwrap();
    for limit in [counter, log] {
        let limiter = limiter(&server.url(), limit).await;
        exhaust(&limiter, "key").await;
        let (before, began) = (limiter.stats().requests, Instant::now());
        for turn in 0..2_000 {
            let denied = limiter.check_n("key", 1 + turn % 8).await;
            // A counter waits until a whole segment has left the window.
            assert!(denied.retry_after().is_some_and(|wait| wait <= 2 * LONG_WINDOW), "{denied:?}");
            if turn % 100 == 0 {
                let never = limiter.check_n("key", 21).await;
                assert_eq!((never.is_allowed(), never.retry_after()), (false, None), "{never:?}");
            }
        }
        // Each cost once a second, and those above the quota.
        let (sent, seconds) = (limiter.stats().requests - before, began.elapsed().as_secs());
        assert!(sent <= 40 + 16 * seconds, "{sent} requests in {seconds} s");
    }
}

/// Returns the time by Redis's clock at which a denied cost fits.
fn fits_at(denied: &Decision) -> Option<Timestamp> {
    denied.retry_after().map(|wait| denied.at().saturating_add(wait))
}

/// Sends random costs to new keys, and compares the waits of denials by the cache with those by the store. Returns how many
/// denials came from the cache.
async fn waits_are_right(
    server: &RedisServer,
    variant: Variant,
    costs: &[u64],
    is_right: impl Fn(Option<Timestamp>, Option<Timestamp>) -> bool,
) -> usize {
    let here = limiter(&server.url(), variant.limit()).await;
    let uncached = RedisLimiter::builder(server.url()).limit(variant.limit()).without_denial_cache();
    let uncached = uncached.store_timeout(PATIENCE).connect().await.expect("the settings are valid");
    exhaust(&here, "listening").await;
    let (mut cached, mut random) = (0, 1_u64);
    let mut below = |bound: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % bound
    };
    for key in 0..10 {
        let (key, mut history) = (format!("key {key}"), Vec::new());
        for _ in 0..30 {
            let cost = costs[below(costs.len())];
            let decided = here.check_n(&key, cost).await;
            history.push((cost, decided.is_allowed()));
            if decided.source() == Source::DenialCache {
                cached += 1;
                let exact = uncached.check_n(&key, cost).await;
                let what = format!("{}: {history:?}: {decided:?} instead of {exact:?}", variant.name);
                assert!(!exact.is_allowed() && is_right(fits_at(&decided), fits_at(&exact)), "{what}");
            }
        }
    }
    cached
}

fn counter_of_many_segments() -> Variant {
    let algorithm = SlidingWindowCounter::new(10, LONG_WINDOW).segments(60).into();
    Variant { name: "counter of 60 segments", algorithm }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_denial_of_a_higher_cost_ends_when_a_lower_cost_is_admitted() {
    let server = RedisServer::start();
    let all = variants(10, LONG_WINDOW).into_iter().filter(|variant| !variant.counts_denied());
    for variant in all.chain([counter_of_many_segments()]) {
        let cached = waits_are_right(&server, variant, &[1, 2, 5, 9], |decided, exact| decided == exact).await;
        assert!(cached > 30, "{}: {cached}", variant.name);
    }
}

/// The cache holds the replies for a few costs of a log. The wait of another cost is longer than that of a lower one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_wait_is_never_too_short() {
    let server = RedisServer::start();
    let log = Variant { name: "log", algorithm: SlidingWindowLog::new(10, LONG_WINDOW).into() };
    for variant in [log, counter_of_many_segments()] {
        let costs: Vec<u64> = (1..=10).collect();
        let cached = waits_are_right(&server, variant, &costs, |decided, exact| decided >= exact).await;
        assert!(cached > 30, "{}: {cached}", variant.name);
    }
}
