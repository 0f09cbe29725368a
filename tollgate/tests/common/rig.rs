//! A limiter on either store, with a manual clock.

#![allow(dead_code, reason = "each suite is a crate of its own and uses its own part of this")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
#[cfg(feature = "redis")]
pub(crate) use testkit::redis::RedisServer as StoreServer;
#[cfg(feature = "redis")]
use tollgate::redis::{Layout, RedisLimiter, RedisReservation, RedisSettings};
use tollgate::{
    Algorithm, Decision, Denied, Hit, Limit, LimitId, LimitSet, Limiter, ManualClock, Reservation, Settlement, Source,
    Timestamp,
};

pub(crate) const SECOND_US: u64 = 1_000_000;

/// A whole hour, so a multiple of every window in use.
pub(crate) const START_US: u64 = (1_700_000_040 - 1_700_000_040 % 3600) * SECOND_US;

/// Stands in for the server of the store, which the library has with the feature `redis` alone.
#[cfg(not(feature = "redis"))]
pub(crate) struct StoreServer;

#[cfg(not(feature = "redis"))]
impl StoreServer {
    pub(crate) fn start() -> Self {
        Self
    }
}

/// Nothing here is about a slow Redis.
#[cfg(feature = "redis")]
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Rig {
    pub(crate) clock: ManualClock,
    store: Store,
}

#[derive(Clone)]
enum Store {
    Memory(Limiter),
    #[cfg(feature = "redis")]
    Redis(RedisLimiter),
}

pub(crate) enum Reserved {
    Memory(Box<Reservation>),
    #[cfg(feature = "redis")]
    Redis(Box<RedisReservation>),
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self.store {
            Store::Memory(_) => "memory",
            #[cfg(feature = "redis")]
            Store::Redis(_) => "redis",
        })
    }
}

/// All stores with the same limits.
pub(crate) async fn rigs_with(server: &StoreServer, limits: &[Limit]) -> Vec<Rig> {
    rigs_of(server, &limits.to_vec().into()).await
}

/// All stores with the same limits, variants and bans.
#[cfg_attr(not(feature = "redis"), expect(unused_variables, reason = "memory needs no server"))]
pub(crate) async fn rigs_of(server: &StoreServer, limits: &LimitSet) -> Vec<Rig> {
    let start = Timestamp::from_micros(START_US);
    let (clock, memory) = (ManualClock::at(start), Limiter::builder().max_memory(1 << 24));
    let memory = memory.limits(limits.clone()).clock(clock.clone());
    let memory = Rig { clock, store: Store::Memory(memory.build().expect("valid limits")) };
    vec![
        memory,
        #[cfg(feature = "redis")]
        on_redis(RedisSettings::new(server.url()), limits).await,
        // All keys of a limit share a hash.
        #[cfg(feature = "redis")]
        on_redis(RedisSettings::new(server.url()).prefix("compact").layout(Layout::Compact).expected_keys(1), limits)
            .await,
    ]
}

#[cfg(feature = "redis")]
async fn on_redis(settings: RedisSettings, limits: &LimitSet) -> Rig {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let redis = RedisLimiter::builder(settings).store_timeout(PATIENCE);
    let redis = redis.limits(limits.clone()).clock(clock.clone());
    Rig { clock, store: Store::Redis(redis.connect().await.expect("valid limits")) }
}

/// All stores with one limit and no keys.
pub(crate) async fn rigs(server: &StoreServer, algorithm: impl Into<Algorithm>) -> Vec<Rig> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("limit {}", NEXT.fetch_add(1, Ordering::Relaxed));
    rigs_with(server, &[Limit::new(name, algorithm).expect("the numbers are within the bounds")]).await
}

impl Rig {
    /// Returns a number of requests: on Redis fewer, because each is a round trip.
    pub(crate) fn sized<N>(&self, in_memory: N, on_redis: N) -> N {
        if matches!(self.store, Store::Memory(_)) { in_memory } else { on_redis }
    }

    pub(crate) fn set(&self, micros: u64) {
        self.clock.set(Timestamp::from_micros(START_US + micros));
    }

    pub(crate) async fn check(&self, key: &str, cost: u64) -> Decision {
        let decision = match &self.store {
            Store::Memory(limiter) => limiter.check_n(key, cost),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => limiter.check_n(key, cost).await,
        };
        assert_eq!(decision.source(), Source::Store, "{self:?}");
        decision
    }

    pub(crate) async fn decide(&self, hits: &[Hit<'_>]) -> Decision {
        match &self.store {
            Store::Memory(limiter) => limiter.decide_now(hits),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => limiter.decide(hits).await,
        }
    }

    pub(crate) async fn peek(&self, key: &str) -> Decision {
        match &self.store {
            Store::Memory(limiter) => limiter.peek(key),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => limiter.peek(key).await.expect("Redis answers"),
        }
    }

    pub(crate) async fn refund(&self, reserved: Reserved) -> Settlement {
        self.settle(reserved, 0).await
    }

    pub(crate) async fn reset(&self, key: &str) {
        match &self.store {
            Store::Memory(limiter) => limiter.reset(key),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => limiter.reset(key).await.expect("Redis answers"),
        }
    }

    pub(crate) async fn reserve(&self, key: &str, estimate: u64, expires: Duration) -> Result<Reserved, Denied> {
        Ok(match &self.store {
            Store::Memory(limiter) => Reserved::Memory(Box::new(limiter.reserve(key, estimate, expires)?)),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => Reserved::Redis(Box::new(limiter.reserve(key, estimate, expires).await?)),
        })
    }

    pub(crate) async fn reserve_hits(&self, hits: &[Hit<'_>], expires: Duration) -> Result<Reserved, Denied> {
        Ok(match &self.store {
            Store::Memory(limiter) => Reserved::Memory(Box::new(limiter.reserve_hits(hits, expires)?)),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => Reserved::Redis(Box::new(limiter.reserve_hits(hits, expires).await?)),
        })
    }

    pub(crate) async fn settle(&self, reserved: Reserved, actual: u64) -> Settlement {
        match (&self.store, reserved) {
            (Store::Memory(limiter), Reserved::Memory(reservation)) => limiter.settle(*reservation, actual),
            #[cfg(feature = "redis")]
            (Store::Redis(limiter), Reserved::Redis(reservation)) => {
                limiter.settle(*reservation, actual).await.expect("Redis answers")
            }
            #[cfg(feature = "redis")]
            _ => panic!("a reservation is settled where it was made"),
        }
    }

    /// Returns the id of the limit or ban of that name.
    pub(crate) fn id(&self, name: &str) -> LimitId {
        let id = match &self.store {
            Store::Memory(limiter) => limiter.id(name).or_else(|| limiter.ban(name)),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => limiter.id(name).or_else(|| limiter.ban(name)),
        };
        id.expect("there is a limit of that name")
    }

    pub(crate) fn variant(&self, limit: &str, variant: &str) -> LimitId {
        let id = match &self.store {
            Store::Memory(limiter) => limiter.variant(limit, variant),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => limiter.variant(limit, variant),
        };
        id.expect("the limit has that variant")
    }

    pub(crate) fn has_limit(&self, id: LimitId) -> bool {
        match &self.store {
            Store::Memory(limiter) => limiter.limit(id).is_some(),
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => limiter.limit(id).is_some(),
        }
    }

    /// Checks one unit of `key` at that many seconds after the start.
    pub(crate) async fn passes_at(&self, seconds: u64) -> bool {
        self.set(seconds * SECOND_US);
        self.check("key", 1).await.is_allowed()
    }

    /// Sends requests of one unit at the same time and returns how many were allowed.
    pub(crate) async fn admitted_at(&self, seconds: u64, requests: usize) -> usize {
        self.set(seconds * SECOND_US);
        let decisions = join_all((0..requests).map(|_| self.check("key", 1))).await;
        decisions.iter().filter(|decision| decision.is_allowed()).count()
    }

    pub(crate) async fn remaining_at(&self, seconds: u64) -> u64 {
        self.set(seconds * SECOND_US);
        self.peek("key").await.remaining()
    }

    /// Sends two requests at the same time, on separate threads if possible.
    pub(crate) async fn race(&self, key: &str) -> [bool; 2] {
        let check = |store: Store, key: String| async move {
            match store {
                Store::Memory(limiter) => limiter.check(&key).is_allowed(),
                #[cfg(feature = "redis")]
                Store::Redis(limiter) => limiter.check(&key).await.is_allowed(),
            }
        };
        let one = tokio::spawn(check(self.store.clone(), key.to_owned()));
        let other = tokio::spawn(check(self.store.clone(), key.to_owned()));
        [one.await.expect("no panic"), other.await.expect("no panic")]
    }
}
