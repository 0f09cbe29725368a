//! Opens a gate from a rule file: in memory, from a snapshot or, with the feature `redis`, on Redis.

use std::fmt;
use std::io::Read;

#[cfg(feature = "redis")]
use tollgate::redis::RedisLimiter;
use tollgate::{InvalidLimit, Limiter, LimiterBuilder, RestoreError, Restored};
use tollgate_rules::Gate;

use crate::{Parsed, Problems};

/// Opens a gate with the rules and the store of a rule file. Redis need not be reachable yet.
///
/// # Errors
///
/// If a file that the rule file refers to cannot be read, or the store settings are invalid.
///
/// # Panics
///
/// If the store is Redis and there is no tokio runtime.
#[cfg(feature = "redis")]
pub async fn open_gate(file: &Parsed) -> Result<Gate, OpenError> {
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
            Gate::on_redis(rules, settings).await.map_err(OpenError::store)
        }
        None => Ok(Gate::with_limiter(rules, limiter(file))?),
    }
}

/// Opens a gate with the rules of a rule file, in this process's memory.
///
/// # Errors
///
/// If a file that the rule file refers to cannot be read, or if its store is Redis.
#[cfg(not(feature = "redis"))]
#[expect(clippy::unused_async, reason = "with the feature `redis` it connects")]
pub async fn open_gate(file: &Parsed) -> Result<Gate, OpenError> {
    file.check_default_store()?;
    if !file.store.is_memory() {
        return Err(OpenError::store(
            "the store is Redis, but this build lacks the feature `redis`: enable the feature, or use memory",
        ));
    }
    Ok(Gate::with_limiter(file.compile()?, limiter(file))?)
}

/// Opens a gate from a rule file and a snapshot of another gate.
///
/// # Errors
///
/// An [`OpenError`] if a file that the rule file refers to cannot be read, if its store is Redis, or if the memory
/// bound is too small for the limits. A [`RestoreError`] if the snapshot cannot be read or used.
pub fn open_gate_restored(
    file: &Parsed,
    snapshot: impl Read,
) -> Result<Result<(Gate, Restored), RestoreError>, OpenError> {
    file.check_default_store()?;
    if !file.store.is_memory() {
        return Err(OpenError::store("snapshots need the memory store, but the store is Redis: use `store: memory`"));
    }
    match Gate::restore(file.compile()?, limiter(file), snapshot) {
        Err(RestoreError::Limits(error)) => Err(error.into()),
        restored => Ok(restored),
    }
}

/// The reason that a gate cannot be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The rule file refers to files that cannot be read or used.
    Rules(Problems),
    /// The limits need more memory than the rule file allows.
    Limits(InvalidLimit),
    /// The store settings are invalid.
    Store(String),
}

impl OpenError {
    fn store(error: impl fmt::Display) -> Self {
        Self::Store(error.to_string())
    }
}

impl From<Problems> for OpenError {
    fn from(problems: Problems) -> Self {
        Self::Rules(problems)
    }
}

impl From<InvalidLimit> for OpenError {
    fn from(error: InvalidLimit) -> Self {
        Self::Limits(error)
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rules(problems) => problems.fmt(out),
            Self::Limits(error) => error.fmt(out),
            Self::Store(error) => write!(out, "store: {error}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// Returns the settings of the in-memory limiter that a rule file describes.
fn limiter(file: &Parsed) -> LimiterBuilder {
    match max_memory(file) {
        Some(bytes) => Limiter::builder().max_memory(bytes),
        None => Limiter::builder(),
    }
}

/// Returns the memory bound of a rule file, in bytes.
fn max_memory(file: &Parsed) -> Option<usize> {
    file.max_memory.map(|size| usize::try_from(size.bytes()).unwrap_or(usize::MAX))
}
