//! Opens a gate from a rule file, in memory.

use super::Gate;
use super::opening::{OpenError, limiter};
use crate::rules::file::Parsed;

impl Gate {
    /// Opens a gate with the rules of a rule file, in this process's memory.
    ///
    /// # Errors
    ///
    /// If a file that the rule file refers to cannot be read, or if its store is Redis.
    #[expect(clippy::unused_async, reason = "with the feature `redis` it connects")]
    pub async fn open(file: &Parsed) -> Result<Self, OpenError> {
        file.check_default_store()?;
        if !file.store.is_memory() {
            return Err(OpenError::store(
                "the store is Redis, but this build lacks the feature `redis`: enable the feature, or use memory",
            ));
        }
        Ok(Self::with_limiter(file.compile()?, limiter(file))?)
    }
}
