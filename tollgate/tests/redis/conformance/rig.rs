//! A limiter on either store, with a manual clock.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::RedisServer;
use tollgate::redis::{RedisLimiter, RedisReservation};
use tollgate::{
    Algorithm, Decision, Denied, Hit, Limit, LimitId, Limiter, ManualClock, Reservation, Settlement, Source, Timestamp,
};

pub(super) const SECOND_US: u64 = 1_000_000;

/// A whole hour, so a multiple of every window in use.
pub(super) const START_US: u64 = (1_700_000_040 - 1_700_000_040 % 3600) * SECOND_US;

/// Nothing here is about a slow Redis.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) struct Rig {
    pub(super) clock: ManualClock,
    store: Store,
}

#[derive(Clone)]
enum Store {
    Memory(Limiter),
    Redis(RedisLimiter),
}

pub(super) enum Reserved {
    Memory(Reservation),
    Redis(RedisReservation),
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self.store {
            Store::Memory(_) => "memory",
            Store::Redis(_) => "redis",
        })
    }
}

/// Both stores with the same limits.
pub(super) async fn rigs_with(server: &RedisServer, limits: &[Limit]) -> [Rig; 2] {
    let start = Timestamp::from_micros(START_US);
    let (clock, memory) = (ManualClock::at(start), Limiter::builder().max_memory(1 << 24));
    let memory = limits.iter().fold(memory, |builder, limit| builder.limit(limit.clone())).clock(clock.clone());
    let memory = Rig { clock, store: Store::Memory(memory.build().expect("valid limits")) };

    let (clock, redis) = (ManualClock::at(start), RedisLimiter::builder(server.url()).store_timeout(PATIENCE));
    let redis = limits.iter().fold(redis, |builder, limit| builder.limit(limit.clone())).clock(clock.clone());
    [memory, Rig { clock, store: Store::Redis(redis.connect().await.expect("valid limits")) }]
}

/// Both stores with one limit and no keys.
pub(super) async fn rigs(server: &RedisServer, algorithm: impl Into<Algorithm>) -> [Rig; 2] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("limit {}", NEXT.fetch_add(1, Ordering::Relaxed));
    rigs_with(server, &[Limit::new(name, algorithm).expect("the numbers are within the bounds")]).await
}

impl Rig {
    pub(super) fn set(&self, micros: u64) {
        self.clock.set(Timestamp::from_micros(START_US + micros));
    }

    pub(super) async fn check(&self, key: &str, cost: u64) -> Decision {
        let decision = match &self.store {
            Store::Memory(limiter) => limiter.check_n(key, cost),
            Store::Redis(limiter) => limiter.check_n(key, cost).await,
        };
        assert_eq!(decision.source(), Source::Store, "{self:?}");
        decision
    }

    pub(super) async fn decide(&self, hits: &[Hit<'_>]) -> Decision {
        match &self.store {
            Store::Memory(limiter) => limiter.decide_now(hits),
            Store::Redis(limiter) => limiter.decide(hits).await,
        }
    }

    pub(super) async fn peek(&self, key: &str) -> Decision {
        match &self.store {
            Store::Memory(limiter) => limiter.peek(key),
            Store::Redis(limiter) => limiter.peek(key).await.expect("Redis answers"),
        }
    }

    pub(super) async fn refund(&self, reserved: Reserved) -> Settlement {
        self.settle(reserved, 0).await
    }

    pub(super) async fn reset(&self, key: &str) {
        match &self.store {
            Store::Memory(limiter) => limiter.reset(key),
            Store::Redis(limiter) => limiter.reset(key).await.expect("Redis answers"),
        }
    }

    pub(super) async fn reserve(&self, key: &str, estimate: u64, expires: Duration) -> Result<Reserved, Denied> {
        Ok(match &self.store {
            Store::Memory(limiter) => Reserved::Memory(limiter.reserve(key, estimate, expires)?),
            Store::Redis(limiter) => Reserved::Redis(limiter.reserve(key, estimate, expires).await?),
        })
    }

    pub(super) async fn reserve_hits(&self, hits: &[Hit<'_>], expires: Duration) -> Result<Reserved, Denied> {
        Ok(match &self.store {
            Store::Memory(limiter) => Reserved::Memory(limiter.reserve_hits(hits, expires)?),
            Store::Redis(limiter) => Reserved::Redis(limiter.reserve_hits(hits, expires).await?),
        })
    }

    pub(super) async fn settle(&self, reserved: Reserved, actual: u64) -> Settlement {
        match (&self.store, reserved) {
            (Store::Memory(limiter), Reserved::Memory(reservation)) => limiter.settle(reservation, actual),
            (Store::Redis(limiter), Reserved::Redis(reservation)) => {
                limiter.settle(reservation, actual).await.expect("Redis answers")
            }
            _ => panic!("a reservation is settled where it was made"),
        }
    }

    pub(super) fn id(&self, name: &str) -> LimitId {
        let id = match &self.store {
            Store::Memory(limiter) => limiter.id(name),
            Store::Redis(limiter) => limiter.id(name),
        };
        id.expect("there is a limit of that name")
    }

    /// Checks one unit of `key` at that many seconds after the start.
    pub(super) async fn passes_at(&self, seconds: u64) -> bool {
        self.set(seconds * SECOND_US);
        self.check("key", 1).await.is_allowed()
    }

    /// Sends requests of one unit at the same time and returns how many were allowed.
    pub(super) async fn admitted_at(&self, seconds: u64, requests: usize) -> usize {
        self.set(seconds * SECOND_US);
        let decisions = join_all((0..requests).map(|_| self.check("key", 1))).await;
        decisions.iter().filter(|decision| decision.is_allowed()).count()
    }

    pub(super) async fn remaining_at(&self, seconds: u64) -> u64 {
        self.set(seconds * SECOND_US);
        self.peek("key").await.remaining()
    }

    /// Sends two requests at the same time, on separate threads if possible.
    pub(super) async fn race(&self, key: &str) -> [bool; 2] {
        let check = |store: Store, key: String| async move {
            match store {
                Store::Memory(limiter) => limiter.check(&key).is_allowed(),
                Store::Redis(limiter) => limiter.check(&key).await.is_allowed(),
            }
        };
        let one = tokio::spawn(check(self.store.clone(), key.to_owned()));
        let other = tokio::spawn(check(self.store.clone(), key.to_owned()));
        [one.await.expect("no panic"), other.await.expect("no panic")]
    }
}
