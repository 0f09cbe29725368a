//! Builder of the in-memory limiter.

use std::sync::Arc;

use super::{Inner, Limiter};
use crate::clock::{Clock, TimeSource};
use crate::error::InvalidLimit;
use crate::limit::Limit;
use crate::limit_set::{Checked, LimitSet};
use crate::store::memory::MemoryStore;

/// Default memory for keys: 512 MiB, room for about twenty million keys of a token bucket. It is allocated as keys
/// arrive.
const DEFAULT_MAX_MEMORY: usize = 512 << 20;

/// Builds a [`Limiter`]: see [`Limiter::builder`].
///
/// ```
/// use tollgate::{FixedWindow, Limit, Limiter, Rate, SECOND, TokenBucket};
///
/// let limiter = Limiter::builder()
///     .limit(Limit::new("burst", FixedWindow::new(10, SECOND))?)
///     .limit(Limit::new("sustained", TokenBucket::new(1000, Rate::per_minute(100)))?)
///     .max_memory(64 << 20)
///     .build()?;
/// assert!(limiter.check("user:42").is_allowed());
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct LimiterBuilder {
    pub(super) limits: LimitSet,
    pub(super) max_memory: usize,
    pub(super) clock: Option<TimeSource>,
    hash_seed: Option<[u64; 4]>,
}

impl Default for LimiterBuilder {
    fn default() -> Self {
        Self { limits: LimitSet::new(), max_memory: DEFAULT_MAX_MEMORY, clock: None, hash_seed: None }
    }
}

impl LimiterBuilder {
    /// Adds a limit. Each limit needs its own name.
    pub fn limit(mut self, limit: Limit) -> Self {
        self.limits = self.limits.limit(limit);
        self
    }

    /// Replaces all limits, variants and bans that were added so far.
    pub fn limits(mut self, limits: impl Into<LimitSet>) -> Self {
        self.limits = limits.into();
        self
    }

    /// Adds a variant of a limit, with other numbers: see [`LimitSet::variant`].
    pub fn variant(mut self, name: impl Into<String>, limit: Limit) -> Self {
        self.limits = self.limits.variant(name, limit);
        self
    }

    /// Bounds the memory for keys, in bytes, for all limits together. A token bucket's key takes 23 to 46 bytes.
    ///
    /// When the memory is full, a new key takes the slot of a key that has more than half of its quota left. If no
    /// such key is nearby, new keys share the quota of one key. So an attack with invented keys cannot use more memory or
    /// exceed a limit, and busy keys are still counted exactly. Honest new keys may get less than their quota, or
    /// nothing, until the windows of the invented keys end. Keys of sliding window logs, of fixed windows that start
    /// with the first request, and of limits of 1 or 2 keep their slots, so there new keys share a quota as soon as the
    /// memory is full. Give limits with long windows enough memory, or keys that clients cannot invent. See
    /// [`Limiter::overflow`].
    ///
    /// Tables grow by doubling, so up to half of the bound may stay unused.
    pub fn max_memory(mut self, bytes: usize) -> Self {
        self.max_memory = bytes;
        self
    }

    /// Takes the time from `clock` instead of the system: see [`Clock`], and [`ManualClock`](crate::ManualClock) for
    /// tests. Platforms without a system clock need one.
    pub fn clock(self, clock: impl Clock + 'static) -> Self {
        self.time_source(TimeSource::Custom(Arc::new(clock)))
    }

    pub(crate) fn time_source(mut self, clock: TimeSource) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Hashes keys with this secret instead of a random one.
    ///
    /// Platforms without a source of randomness, such as `wasm32-unknown-unknown`, need it: get random numbers from the
    /// host. An attacker who knows the secret can find keys that collide.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, ManualClock, MINUTE, Timestamp};
    ///
    /// # let (random, host_clock) = ([1, 2, 3, 4], ManualClock::at(Timestamp::EPOCH));
    /// let limiter = Limiter::builder()
    ///     .limit(Limit::new("per-user", FixedWindow::new(10, MINUTE))?)
    ///     .clock(host_clock)
    ///     .hash_seed(random)
    ///     .build()?;
    /// # assert!(limiter.check("ann").is_allowed());
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn hash_seed(mut self, secret: [u64; 4]) -> Self {
        self.hash_seed = Some(secret);
        self
    }

    /// Builds the limiter.
    ///
    /// # Errors
    ///
    /// Fails if there is no limit or more than 10 000, if two limits or two variants of a limit have the same name, if
    /// a variant has no limit of its name and algorithm, or if the memory does not suffice for the first keys of each
    /// limit. On a platform without a system clock or randomness, also if no [`clock`](Self::clock) or no
    /// [`hash_seed`](Self::hash_seed) was set.
    pub fn build(self) -> Result<Limiter, InvalidLimit> {
        let Checked { mut limits, base_count, generation } = self.limits.checked()?;
        let clock = self.clock.or_else(TimeSource::system).ok_or_else(no_clock)?;
        if self.hash_seed.is_none() && cfg!(all(target_family = "wasm", target_os = "unknown")) {
            let problem = "this platform has no source of randomness".into();
            return Err(InvalidLimit::new("hash_seed", problem, "set one with `hash_seed`"));
        }
        let wall_offset = clock.wall_offset();
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&wall_offset));
        let store = MemoryStore::new(&mut limits, self.max_memory)?;
        let store = match self.hash_seed {
            Some(secret) => store.with_secret(secret),
            None => store,
        };
        let (limits, open) = (limits.into(), Arc::default());
        Ok(Limiter(Arc::new(Inner { limits, base_count, generation, store, clock, open })))
    }
}

pub(super) fn no_clock() -> InvalidLimit {
    InvalidLimit::new("clock", "this platform has no system clock".into(), "set one with `clock`")
}
