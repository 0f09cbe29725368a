//! Snapshots of a gate with counts in memory.

use std::io::{self, Read, Write};

use super::Gate;
#[cfg(feature = "file")]
use super::opening::{OpenError, limiter};
use super::store::Store;
use crate::limiter::{LimiterBuilder, RestoreError, Restored};
use crate::rules::RuleSet;
#[cfg(feature = "file")]
use crate::rules::file::Parsed;

impl Gate {
    /// Builds a gate from a [snapshot](Self::snapshot) of another one; see [`LimiterBuilder::restore`]. The limits of
    /// `rules` replace those of `settings`.
    ///
    /// # Errors
    ///
    /// If the memory bound is too small for the limits, or the snapshot cannot be read or used.
    pub fn restore(
        rules: RuleSet,
        settings: LimiterBuilder,
        snapshot: impl Read,
    ) -> Result<(Self, Restored), RestoreError> {
        let (limiter, restored) = settings.limits(rules.limit_set()).restore(snapshot)?;
        Ok((Self::with_store(rules, Store::of(limiter)), restored))
    }

    /// Opens a gate from a rule file and a snapshot of another gate.
    ///
    /// # Errors
    ///
    /// An [`OpenError`] if a file that the rule file refers to cannot be read, if its store is Redis, or if the memory
    /// bound is too small for the limits. A [`RestoreError`] if the snapshot cannot be read or used.
    #[cfg(feature = "file")]
    pub fn open_restored(
        file: &Parsed,
        snapshot: impl Read,
    ) -> Result<Result<(Self, Restored), RestoreError>, OpenError> {
        file.check_default_store()?;
        if !file.store.is_memory() {
            return Err(OpenError::store(
                "snapshots need the memory store, but the store is Redis: use `store: memory`",
            ));
        }
        match Self::restore(file.compile()?, limiter(file), snapshot) {
            Err(RestoreError::Limits(error)) => Err(error.into()),
            restored => Ok(restored),
        }
    }

    /// Writes the state of all keys and returns their number; see [`Limiter::snapshot`](crate::Limiter::snapshot).
    /// Returns `None` and writes nothing if the keys are on Redis, which persists them itself.
    ///
    /// # Errors
    ///
    /// If writing to `out` fails.
    pub fn snapshot(&self, out: impl Write) -> io::Result<Option<u64>> {
        let state = self.0.state.load_full();
        state.store.in_memory().map(|limiter| limiter.snapshot(out)).transpose()
    }
}
