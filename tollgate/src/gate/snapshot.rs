//! Snapshots of a gate whose keys are in memory.

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
    /// Builds a gate that goes on where another one was when it wrote a [snapshot](Self::snapshot): see
    /// [`LimiterBuilder::restore`]. The limits of the rules take the permit of any that `settings` has.
    ///
    /// # Errors
    ///
    /// When the memory is too little for the limits, or when the snapshot cannot be read or used.
    pub fn restore(
        rules: RuleSet,
        settings: LimiterBuilder,
        snapshot: impl Read,
    ) -> Result<(Self, Restored), RestoreError> {
        let (limiter, restored) = settings.limits(rules.limit_set()).restore(snapshot)?;
        Ok((Self::with_store(rules, Store::of(limiter)), restored))
    }

    /// Builds a gate with the rules of a rule file that goes on where another one was when it wrote a snapshot.
    ///
    /// # Errors
    ///
    /// As an [`OpenError`], when files that the rule file names cannot be read, when it wants a store on Redis, or when the
    /// memory is too little for the limits. As a [`RestoreError`], when the snapshot cannot be read or used.
    #[cfg(feature = "file")]
    pub fn open_restored(
        file: &Parsed,
        snapshot: impl Read,
    ) -> Result<Result<(Self, Restored), RestoreError>, OpenError> {
        file.check_default_store()?;
        if !file.store.is_memory() {
            return Err(OpenError::store("snapshots are of the store in memory, and this one is on Redis: use memory"));
        }
        match Self::restore(file.compile()?, limiter(file), snapshot) {
            Err(RestoreError::Limits(error)) => Err(error.into()),
            restored => Ok(restored),
        }
    }

    /// Writes what all keys have spent, and returns the number of keys: see
    /// [`Limiter::snapshot`](crate::Limiter::snapshot). `None` if the keys are on Redis, which keeps them; then nothing is
    /// written.
    ///
    /// # Errors
    ///
    /// When `out` fails.
    pub fn snapshot(&self, out: impl Write) -> io::Result<Option<u64>> {
        let state = self.0.state.load_full();
        state.store.in_memory().map(|limiter| limiter.snapshot(out)).transpose()
    }
}
