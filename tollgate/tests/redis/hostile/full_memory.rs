//! A Redis that may not take any more memory refuses; that is no outage, and it passes.

use redis::Connection;
use tollgate::{HOUR, Source};

use super::limiter;
use crate::load::until_back;
use crate::servers::RedisServer;
use crate::variants::variants;

fn allow_memory(connection: &mut Connection, bytes: u64) {
    let _: () = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).query(connection).expect("set");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_redis_leaves_decisions_to_the_policy_and_counts_unharmed() {
    let server = RedisServer::with(&["--maxmemory-policy", "noeviction"]);
    let mut connection = server.connection();
    let _: () = redis::cmd("SET").arg("theirs").arg(vec![b'x'; 4 << 20]).query(&mut connection).expect("set");
    for variant in variants(10, HOUR) {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let taken = limiter.check_n("old", 4).await;
        assert_eq!((taken.is_allowed(), taken.source()), (true, Source::Store), "{}", variant.name);

        allow_memory(&mut connection, 1 << 20);
        for key in ["old", "new"] {
            let decision = limiter.check(key).await;
            assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Policy), "{} {key}", variant.name);
            assert!(decision.retry_after().is_some(), "{} {key}", variant.name);
        }
        assert!(limiter.is_store_available(), "{}: it answers, if with a no", variant.name);
        assert_eq!(limiter.peek("old").await.expect("a look needs no memory").remaining(), 6, "{}", variant.name);

        allow_memory(&mut connection, 0);
        until_back(&limiter, "new").await;
        let left = limiter.peek("old").await.expect("Redis answers").remaining();
        assert_eq!(left, 6, "{}: what was refused took nothing", variant.name);
    }
}
