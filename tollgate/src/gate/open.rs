//! Opens a gate from a rule file, in memory or on Redis.

use super::Gate;
use super::opening::{OpenError, limiter, max_memory};
use crate::redis::RedisLimiter;
use crate::rules::file::Parsed;

impl Gate {
    /// Opens a gate with the rules and the store of a rule file. Redis need not be reachable yet.
    ///
    /// # Errors
    ///
    /// If a file that the rule file refers to cannot be read, or the store settings are invalid.
    ///
    /// # Panics
    ///
    /// If the store is Redis and there is no tokio runtime.
    pub async fn open(file: &Parsed) -> Result<Self, OpenError> {
        let (rules, named) = (file.compile()?, file.named_redis_settings()?);
        match file.redis_settings()? {
            Some(settings) => {
                let mut settings = RedisLimiter::builder(settings)
                    .store_timeout(file.store_timeout.duration())
                    .on_store_failure(file.on_store_failure.into());
                for (name, of_store) in named {
                    settings = settings.store(name, of_store);
                }
                if let Some(bytes) = max_memory(file) {
                    settings = settings.max_memory(bytes);
                }
                if let Some(nodes) = file.expected_nodes {
                    settings = settings.expected_nodes(nodes);
                }
                Self::on_redis(rules, settings).await.map_err(OpenError::store)
            }
            None => Ok(Self::with_limiter(rules, limiter(file))?),
        }
    }
}
