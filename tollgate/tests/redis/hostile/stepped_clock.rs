//! A server clock that steps back adds no quota and locks no client out.

use std::time::Duration;

use testkit::redis::RedisServer;
use tollgate::redis::RedisLimiter;
use tollgate::{HOUR, MINUTE, ManualClock, SECOND, Source, Timestamp};

use super::PATIENCE;
use crate::variants::variants;

/// Not at the start of any window.
const NOW: Timestamp = Timestamp::from_secs(1_700_000_017);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_steps_back_hours_adds_no_quota_and_locks_no_client_out() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for back in [SECOND, MINUTE, MINUTE * 2, HOUR * 5, HOUR * 24 * 365] {
            let what = format!("{} stepped back {back:?}", variant.name);
            let clock = ManualClock::at(NOW);
            let builder = RedisLimiter::builder(server.url()).limit(variant.limit()).store_timeout(PATIENCE);
            let limiter = builder.clock(clock.clone()).connect().await.expect("valid settings");
            let key = format!("{back:?}");
            assert!(limiter.check_n(&key, 10).await.is_allowed(), "{what}");
            clock.set(NOW.saturating_sub(back));
            let denied = limiter.check(&key).await;
            assert_eq!((denied.is_allowed(), denied.source()), (false, Source::Store), "{what}: no quota is added");
            // A clock-aligned window may stay exhausted for the rest of this window and the whole of the next.
            let wait = denied.retry_after().expect("a promise");
            assert!(wait <= MINUTE * 2, "{what}: locked out for {wait:?}");
            if !variant.counts_denied() {
                clock.advance(wait - Duration::from_micros(1));
                assert!(!limiter.check(&key).await.is_allowed(), "{what}: no quota is added meanwhile");
                clock.advance(Duration::from_micros(1));
                assert!(limiter.check(&key).await.is_allowed(), "{what}: after {wait:?}");
            } else {
                clock.advance(wait);
                assert!(limiter.check(&key).await.is_allowed(), "{what}: after {wait:?}");
            }
            let mut admitted = 1;
            for _ in 0..60 {
                clock.advance(SECOND);
                admitted += u64::from(limiter.check(&key).await.is_allowed());
            }
            assert!(admitted <= 20, "{what}: {admitted} in a minute, of 10 a minute and a burst of 10");
        }
    }
}
