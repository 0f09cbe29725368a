//! The contenders: INCR, which makes no decision, the two-key script, and Tollgate with and without batching.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;
use tollgate::redis::{Layout, RedisLimiter, RedisSettings};
use tollgate::{Algorithm, Limit, Rate, Source, TokenBucket};

use super::MOST_TASKS;
use super::server::Server;
use crate::traffic;

/// The one all others are measured against.
pub(super) const SCRIPT: &str = "two-key script";
pub(super) const TOLLGATE: &str = "tollgate";
const INCR: &str = "INCR: decides nothing";
const ALONE: &str = "tollgate, never batched: a limiter and a connection per task";

/// The units that every key spends before the measurement starts: see [`Bucket::VAST`].
const FILL_COST: u64 = 3600;

/// How long the two-key script keeps its keys.
const SCRIPT_TTL_SECONDS: u64 = 3600;

/// Longer than the machine's pauses. A decision that times out ends the run.
const PATIENCE: Duration = Duration::from_secs(10);

/// A token bucket.
#[derive(Clone, Copy)]
pub(super) struct Bucket {
    pub(super) capacity: u64,
    pub(super) per_second: u64,
}

impl Bucket {
    /// No key ever runs out, and one that spent an hour's worth stays on Redis for the run.
    pub(super) const VAST: Self = Self { capacity: 1_000_000_000, per_second: 1 };

    pub(super) fn algorithm(self) -> TokenBucket {
        TokenBucket::new(self.capacity, Rate::per_second(self.per_second))
    }
}

/// A way to decide. Each task has a clone.
#[derive(Clone)]
pub(super) enum Contender {
    Incr(MultiplexedConnection),
    Script {
        connection: MultiplexedConnection,
        script: Arc<redis::Script>,
        bucket: Bucket,
    },
    /// A limiter per task, so that nothing is batched. The additional connections are part of its cost.
    Alone(Arc<[RedisLimiter]>),
    Tollgate(RedisLimiter),
}

impl Contender {
    /// Creates all contenders, with all keys on Redis.
    pub(super) async fn field(server: &Server, keys: usize) -> anyhow::Result<Vec<Self>> {
        let mut alone = Vec::new();
        for _ in 0..MOST_TASKS {
            alone.push(limiter(server, "alone", Bucket::VAST.algorithm()).await?);
        }
        let contenders = vec![
            Self::Incr(server.connect().await?),
            Self::script(server, Bucket::VAST).await?,
            Self::Alone(alone.into()),
            Self::Tollgate(limiter(server, "u", Bucket::VAST.algorithm()).await?),
        ];
        for contender in &contenders {
            contender.fill(keys, &[FILL_COST]).await?;
        }
        Ok(contenders)
    }

    pub(super) async fn script(server: &Server, bucket: Bucket) -> anyhow::Result<Self> {
        let script = Arc::new(redis::Script::new(include_str!("two_keys.lua")));
        let mut connection = server.connect().await?;
        script.load_async(&mut connection).await?;
        Ok(Self::Script { connection, script, bucket })
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Incr(_) => INCR,
            Self::Script { .. } => SCRIPT,
            Self::Alone(_) => ALONE,
            Self::Tollgate(_) => TOLLGATE,
        }
    }

    /// Takes `cost` units of a key, and fails if that is denied.
    pub(super) async fn spend(&mut self, task: usize, key: &str, cost: u64) -> anyhow::Result<()> {
        match self {
            Self::Incr(connection) => {
                let mut command = match cost {
                    1 => redis::cmd("INCR"),
                    _ => redis::cmd("INCRBY"),
                };
                command.arg(format!("rate_limit:incr:{key}"));
                if cost > 1 {
                    command.arg(cost);
                }
                let count: u64 = command.query_async(connection).await?;
                ensure!(count >= cost, "INCR of {key} came to {count}");
            }
            Self::Script { connection, script, bucket } => {
                let (allowed, tokens, _): (bool, f64, u64) = script
                    .key(format!("rate_limit:token_bucket:{key}"))
                    .arg(bucket.capacity)
                    .arg(bucket.per_second)
                    .arg(cost)
                    .arg(SCRIPT_TTL_SECONDS)
                    .invoke_async(connection)
                    .await?;
                ensure!(allowed, "the two-key script denied {key} with {tokens} tokens");
            }
            Self::Alone(limiters) => spend(&limiters[task], key, cost).await?,
            Self::Tollgate(limiter) => spend(limiter, key, cost).await?,
        }
        Ok(())
    }

    /// Takes these costs from every key, one after the other.
    pub(super) async fn fill(&self, keys: usize, costs: &'static [u64]) -> anyhow::Result<()> {
        let mut tasks = JoinSet::new();
        for task in 0..MOST_TASKS {
            let mut contender = self.clone();
            tasks.spawn(async move {
                let mut key = String::new();
                for id in (task..keys).step_by(MOST_TASKS) {
                    traffic::write_name(&mut key, id);
                    for cost in costs {
                        contender.spend(task, &key, *cost).await?;
                    }
                }
                anyhow::Ok(())
            });
        }
        tasks.join_all().await.into_iter().collect()
    }

    /// Decisions and script calls so far, where they differ.
    pub(super) fn batched(&self) -> Option<(u64, u64)> {
        match self {
            Self::Tollgate(limiter) => {
                let stats = limiter.stats();
                Some((stats.requests, stats.calls))
            }
            _ => None,
        }
    }
}

async fn spend(limiter: &RedisLimiter, key: &str, cost: u64) -> anyhow::Result<()> {
    let decision = limiter.check_n(key, cost).await;
    ensure!(decision.is_allowed(), "tollgate denied {key} with {} left", decision.remaining());
    ensure!(decision.source() == Source::Store, "tollgate decided {key} without Redis");
    Ok(())
}

pub(super) async fn limiter(
    server: &Server,
    name: &str,
    algorithm: impl Into<Algorithm>,
) -> anyhow::Result<RedisLimiter> {
    limiter_of(server, [Limit::new(name, algorithm)?]).await
}

/// Creates a limiter in the compact layout.
pub(super) async fn compact_limiter(
    server: &Server,
    name: &str,
    expected_keys: usize,
    algorithm: impl Into<Algorithm>,
) -> anyhow::Result<RedisLimiter> {
    let settings = RedisSettings::new(&server.url).layout(Layout::Compact).expected_keys(expected_keys as u64);
    let builder = RedisLimiter::builder(settings).limit(Limit::new(name, algorithm)?);
    Ok(builder.store_timeout(PATIENCE).connect().await?)
}

pub(super) async fn limiter_of(
    server: &Server,
    limits: impl IntoIterator<Item = Limit>,
) -> anyhow::Result<RedisLimiter> {
    let builder = limits.into_iter().fold(RedisLimiter::builder(&server.url), |builder, limit| builder.limit(limit));
    let limiter = builder.store_timeout(PATIENCE).connect().await?;
    ensure!(limiter.is_store_available(), "tollgate could not reach {}", server.url);
    Ok(limiter)
}
