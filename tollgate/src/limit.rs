//! Limits: a name and an algorithm with checked numbers.
//!
//! Deliberately not here: the state of keys, which stores have, and the requests a limit applies to, which rules
//! define.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::{Algorithm, Ban, Compiled};
use crate::error::InvalidLimit;
use crate::units::WallOffset;

/// Longest name in bytes: short enough for headers, metrics and Redis keys.
const MAX_NAME: usize = 128;

/// A configured limit. [`Limit::new`] checks its numbers, so every `Limit` is valid. Clones are cheap.
///
/// ```
/// use tollgate::{Limit, Rate, TokenBucket};
///
/// let limit = Limit::new("per-user", TokenBucket::new(10, Rate::per_second(1)))?;
/// assert_eq!((limit.name(), limit.quota()), ("per-user", 10));
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Debug)]
pub struct Limit(Arc<Inner>);

/// The fields that every decision reads come first, on one cache line.
#[derive(Clone, Debug)]
#[repr(C)]
struct Inner {
    /// A copy of the algorithm's quota, which saves a match for every decision.
    quota: u64,
    compiled: Compiled,
    name: String,
    algorithm: Algorithm,
    consistency: Consistency,
    on_store_failure: Option<OnStoreFailure>,
    /// Name of the store that keeps this limit; `None` for the default store.
    store: Option<Arc<str>>,
    /// Name of the variant of a limit that this is; `None` for the limit itself.
    variant: Option<Box<str>>,
}

/// How exactly processes that share a limit count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Consistency {
    /// The store makes every decision.
    #[default]
    Exact,
    /// A process takes slices of a busy key's quota in advance and decides by itself. That takes a few round trips per
    /// second instead of one per request, and still never exceeds the limit.
    Leased,
}

/// Decisions of a shared limit while its store fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// Each process counts its share of the limit in memory: the quota and the rate, divided by the number of processes
    /// that recently used the store. Together they admit at most one unit per process more than the limit, in addition
    /// to what the store admitted before it failed. See `RedisLimiter::fleet_nodes`.
    #[default]
    Local,
    /// All requests are allowed.
    Allow,
    /// All requests are denied.
    Deny,
}

impl Limit {
    /// Creates a limit.
    ///
    /// # Errors
    ///
    /// Fails if a number is out of bounds: quotas range from 1 to 2^32, and times from 1 ms to 35 years. The error
    /// names the field and the fix.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// let error = Limit::new("login", FixedWindow::new(0, MINUTE)).unwrap_err();
    /// assert_eq!(error.field(), "limit");
    /// assert_eq!(error.to_string(), "limit `login`: limit 0 admits nothing: use 1 or more, or `blocked` to refuse every request");
    /// ```
    pub fn new(name: impl Into<String>, algorithm: impl Into<Algorithm>) -> Result<Self, InvalidLimit> {
        let (name, algorithm) = (name.into(), algorithm.into());
        check_name(&name).map_err(|error| error.of_limit(&name))?;
        let compiled = algorithm.compile().map_err(|error| error.of_limit(&name))?;
        let (quota, consistency) = (algorithm.quota(), Consistency::default());
        Ok(Self(Arc::new(Inner {
            quota,
            compiled,
            name,
            algorithm,
            consistency,
            on_store_failure: None,
            store: None,
            variant: None,
        })))
    }

    /// Creates a ban, which only a [`LimitSet`](crate::LimitSet) or a rule has.
    #[doc(hidden)]
    pub fn ban(name: impl Into<String>, ban: Ban) -> Result<Self, InvalidLimit> {
        Self::new(name, ban)
    }

    /// Chooses between exact decisions and leases on a shared store.
    #[must_use]
    pub fn with_consistency(mut self, consistency: Consistency) -> Self {
        Arc::make_mut(&mut self.0).consistency = consistency;
        self
    }

    /// Sets the failure policy of this limit on a shared store, instead of that of the limiter.
    #[must_use]
    pub fn with_on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        Arc::make_mut(&mut self.0).on_store_failure = Some(policy);
        self
    }

    /// Keeps the keys of this limit on another Redis than the default one: a store that `RedisLimiterBuilder::store`
    /// added under this name. In-memory limiters ignore it.
    #[must_use]
    pub fn with_store(mut self, name: impl Into<Arc<str>>) -> Self {
        Arc::make_mut(&mut self.0).store = Some(name.into());
        self
    }

    /// Returns how exactly processes that share this limit count.
    #[must_use]
    pub fn consistency(&self) -> Consistency {
        self.0.consistency
    }

    /// Returns the failure policy of this limit, or `None` if the limiter's policy applies.
    #[must_use]
    pub fn on_store_failure(&self) -> Option<OnStoreFailure> {
        self.0.on_store_failure
    }

    /// Returns the name of the store of this limit, or `None` for the default store.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// Returns the name of this variant, or `None` if this is the limit itself: see [`LimitSet::variant`].
    ///
    /// [`LimitSet::variant`]: crate::LimitSet::variant
    #[must_use]
    pub fn variant(&self) -> Option<&str> {
        self.0.variant.as_deref()
    }

    /// Returns the name. Variants of a limit have the name of the limit.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns whether this is a ban rather than a limit.
    pub(crate) fn is_ban(&self) -> bool {
        matches!(self.algorithm(), Algorithm::Ban(_))
    }

    /// Returns the whole quota: the capacity, or the count per window.
    #[must_use]
    pub fn quota(&self) -> u64 {
        self.0.quota
    }

    /// Returns the time in which the whole quota comes back: the window, or the time to refill an empty bucket.
    #[must_use]
    pub fn window(&self) -> Duration {
        self.0.algorithm.window()
    }

    /// Returns the algorithm with its numbers.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.0.algorithm
    }

    /// Returns whether requests can be admitted with a delay.
    #[cfg(feature = "redis")]
    pub(crate) fn queues(&self) -> bool {
        matches!(self.algorithm(), Algorithm::LeakyBucket(bucket) if bucket.queues())
    }

    /// Returns the share of this limit for one of `nodes` processes that count by themselves.
    #[cfg(feature = "redis")]
    pub(crate) fn share(&self, nodes: u32) -> Self {
        let share = Self::new(self.name(), self.algorithm().share(nodes));
        share.unwrap_or_else(|_| self.clone())
    }

    /// Returns this limit as the variant of that name.
    pub(crate) fn with_variant(mut self, variant: String) -> Self {
        Arc::make_mut(&mut self.0).variant = Some(variant.into());
        self
    }

    /// Returns this limit with the consistency, the store and the failure policy of another one.
    #[doc(hidden)]
    pub fn with_settings_of(mut self, other: &Self) -> Self {
        let inner = Arc::make_mut(&mut self.0);
        inner.consistency = other.0.consistency;
        inner.store.clone_from(&other.0.store);
        inner.on_store_failure = other.0.on_store_failure;
        self
    }

    /// Checks that the limit suits a store with one thread for all clients.
    #[cfg(feature = "redis")]
    #[doc(hidden)]
    pub fn check_shared(&self) -> Result<(), InvalidLimit> {
        self.0.compiled.check_shared()
    }

    pub(crate) fn compiled(&self) -> &Compiled {
        &self.0.compiled
    }

    /// Makes windows that are aligned to the wall clock follow `offset`.
    pub(crate) fn follow_wall_clock(&mut self, offset: &WallOffset) {
        if matches!(self.compiled(), Compiled::ClockWindow(_) | Compiled::Interval(_)) {
            Arc::make_mut(&mut self.0).compiled.follow_wall_clock(offset.clone());
        }
    }

    /// Returns whether both limits have the same name and algorithm, so that they share keys.
    pub(crate) fn is_variant_of(&self, other: &Self) -> bool {
        let algorithm = |limit: &Self| std::mem::discriminant(limit.algorithm());
        algorithm(self) == algorithm(other) && self.name() == other.name()
    }

    /// Returns this limit with other compiled numbers.
    pub(crate) fn with_compiled(&self, compiled: Compiled) -> Self {
        Self(Arc::new(Inner { compiled, ..(*self.0).clone() }))
    }
}

/// Checks the name of a limit.
pub fn check_name(name: &str) -> Result<(), InvalidLimit> {
    if name.is_empty() {
        return Err(InvalidLimit::new("name", "a limit needs a name".into(), "give it one, such as per-user"));
    }
    if name.len() > MAX_NAME {
        let problem = format!("a name of {} bytes is too long", name.len());
        return Err(InvalidLimit::new("name", problem, "use 128 bytes or less"));
    }
    if name.chars().any(char::is_control) {
        let problem = "the name has a control character in it".into();
        return Err(InvalidLimit::new("name", problem, "use printable characters"));
    }
    Ok(())
}
