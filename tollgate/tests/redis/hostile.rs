//! What the world does to a store: memory that is full, keys that are someone else's, names that would break out,
//! clocks that go back, floods.

mod denial_cache;
mod full_memory;
mod keys;
mod not_ours;
mod replies;
mod shared_data;
mod stepped_clock;
mod unusable;

use std::time::Duration;

use tollgate::redis::RedisLimiter;
use tollgate::{Limit, OnStoreFailure};

/// Nothing here is about a slow Redis.
const PATIENCE: Duration = Duration::from_secs(20);

/// A limiter that denies where the store does not answer.
async fn limiter(url: &str, limit: Limit) -> RedisLimiter {
    let builder = RedisLimiter::builder(url).limit(limit).store_timeout(PATIENCE);
    builder.on_store_failure(OnStoreFailure::Deny).connect().await.expect("the settings are valid")
}
