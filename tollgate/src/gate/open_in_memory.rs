//! A gate as a rule file describes it, in memory.

use super::Gate;
use super::opening::{OpenError, limiter};
use crate::rules::file::Parsed;

impl Gate {
    /// A gate with the rules of a rule file, in this process's memory.
    ///
    /// # Errors
    ///
    /// When files that it names cannot be read, or when it wants a store on Redis.
    #[expect(clippy::unused_async, reason = "with the feature `redis` it connects")]
    pub async fn open(file: &Parsed) -> Result<Self, OpenError> {
        file.check_default_store()?;
        if !file.store.is_memory() {
            return Err(OpenError::store("the store is Redis; build tollgate with the feature `redis`, or use memory"));
        }
        Ok(Self::with_limiter(file.compile()?, limiter(file))?)
    }
}
