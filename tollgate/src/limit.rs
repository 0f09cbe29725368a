//! A limit: a name, an algorithm and its numbers, checked once and for all.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::{Algorithm, Ban, Compiled};
use crate::error::InvalidLimit;
use crate::units::WallOffset;

/// The longest name: enough for people, and short enough for headers, metrics and Redis keys.
const MAX_NAME: usize = 128;

/// A configured limit. There is no other way to make one than [`Limit::new`], which checks its numbers, so
/// every `Limit` is valid. Cloning it is cheap.
#[derive(Clone, Debug)]
pub struct Limit(Arc<Inner>);

/// In this order, so that what every decision reads comes together.
#[derive(Clone, Debug)]
#[repr(C)]
struct Inner {
    /// The algorithm knows it, but would have to be asked which one it is, at every decision.
    quota: u64,
    compiled: Compiled,
    name: String,
    algorithm: Algorithm,
    consistency: Consistency,
    on_store_failure: Option<OnStoreFailure>,
    store: Option<Arc<str>>,
}

/// How a limit that many processes share is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Consistency {
    /// Every decision is made by the store.
    #[default]
    Exact,
    /// A process takes slices of a busy key's quota in advance and decides by itself: a few trips a second to
    /// the store instead of one per request, and never more admitted than the limit says.
    Leased,
}

/// What a limit that many processes share answers while its store fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// This process's own memory takes over with this process's share of the limit: the quota and the rate, divided by
    /// the number of processes that shared the store lately. Together they admit the limit and at most one unit more for
    /// each of them, beside what the store admitted before it failed. See `RedisLimiter::fleet_nodes`.
    #[default]
    Local,
    /// Everything passes.
    Allow,
    /// Nothing passes.
    Deny,
}

/// Which limit of a [`Limiter`](crate::Limiter) it is; see [`Limiter::id`](crate::Limiter::id).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LimitId(pub(crate) u32);

impl LimitId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl Limit {
    /// A limit of that name.
    ///
    /// # Errors
    ///
    /// When a number makes no sense, such as a capacity of 0 or a window of 0, or is out of bounds: quotas go
    /// from 1 to 2^32, spans of time from 1 ms to 35 years. The error names the field and the fix.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// let error = Limit::new("login", FixedWindow::new(0, MINUTE)).unwrap_err();
    /// assert_eq!(error.field(), "limit");
    /// assert_eq!(error.to_string(), "limit `login`: limit 0 admits nothing; use 1 or more, or `blocked` to refuse every request");
    /// ```
    pub fn new(name: impl Into<String>, algorithm: impl Into<Algorithm>) -> Result<Self, InvalidLimit> {
        let (name, algorithm) = (name.into(), algorithm.into());
        check_name(&name).map_err(|error| error.of_limit(&name))?;
        let compiled = algorithm.compile().map_err(|error| error.of_limit(&name))?;
        let (quota, consistency) = (algorithm.quota(), Consistency::default());
        let inner = Inner { quota, compiled, name, algorithm, consistency, on_store_failure: None, store: None };
        Ok(Self(Arc::new(inner)))
    }

    /// A ban of that name: see [`Ban`].
    ///
    /// # Errors
    ///
    /// As [`Limit::new`].
    pub fn ban(name: impl Into<String>, ban: Ban) -> Result<Self, InvalidLimit> {
        Self::new(name, ban)
    }

    /// Chooses between exact decisions and leases, on a store that is shared.
    #[must_use]
    pub fn with_consistency(mut self, consistency: Consistency) -> Self {
        Arc::make_mut(&mut self.0).consistency = consistency;
        self
    }

    /// Chooses what to answer while a store that is shared fails, instead of what the limiter chooses.
    #[must_use]
    pub fn with_on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        Arc::make_mut(&mut self.0).on_store_failure = Some(policy);
        self
    }

    /// Keeps the keys of this limit on another Redis than the default one: a store that `RedisLimiterBuilder::store` added
    /// by this name. A limiter in memory ignores it.
    #[must_use]
    pub fn with_store(mut self, name: impl Into<Arc<str>>) -> Self {
        Arc::make_mut(&mut self.0).store = Some(name.into());
        self
    }

    /// Exact, or leased.
    #[must_use]
    pub fn consistency(&self) -> Consistency {
        self.0.consistency
    }

    /// What this limit answers while the store fails, if that was chosen for it.
    #[must_use]
    pub fn on_store_failure(&self) -> Option<OnStoreFailure> {
        self.0.on_store_failure
    }

    /// The name of the store that was chosen for this limit.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The whole quota: the capacity, or the count per window.
    #[must_use]
    pub fn quota(&self) -> u64 {
        self.0.quota
    }

    /// The time in which the whole quota comes back: the window, or how long an empty bucket takes to fill.
    #[must_use]
    pub fn window(&self) -> Duration {
        self.0.algorithm.window()
    }

    /// The algorithm and its numbers.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.0.algorithm
    }

    /// Returns whether requests can be admitted with a delay.
    #[cfg(feature = "redis")]
    pub(crate) fn queues(&self) -> bool {
        matches!(self.algorithm(), Algorithm::LeakyBucket(bucket) if bucket.queues())
    }

    /// The share of this limit that one of several nodes takes while it decides by itself.
    #[cfg(feature = "redis")]
    pub(crate) fn share(&self, nodes: u32) -> Self {
        let share = Self::new(self.name(), self.algorithm().share(nodes));
        share.unwrap_or_else(|_| self.clone())
    }

    pub(crate) fn compiled(&self) -> &Compiled {
        &self.0.compiled
    }

    /// Lets the windows of this limit follow the wall clock that `offset` describes, where they are aligned to it.
    pub(crate) fn follow_wall_clock(&mut self, offset: &WallOffset) {
        if matches!(self.compiled(), Compiled::ClockWindow(_) | Compiled::Interval(_)) {
            Arc::make_mut(&mut self.0).compiled.follow_wall_clock(offset.clone());
        }
    }

    /// Whether both count by the same algorithm under the same name, so that a key of one is a key of the other.
    pub(crate) fn is_variant_of(&self, other: &Self) -> bool {
        let kind = |limit: &Self| std::mem::discriminant(limit.algorithm());
        kind(self) == kind(other) && self.name() == other.name()
    }

    /// Whether a key of one is a key of the other: both are limits of one name, or bans of one name. Their algorithms
    /// may differ, if one was changed to the other.
    #[cfg(feature = "redis")]
    pub(crate) fn shares_keys_with(&self, other: &Self) -> bool {
        let is_ban = |limit: &Self| matches!(limit.algorithm(), Algorithm::Ban(_));
        is_ban(self) == is_ban(other) && self.name() == other.name()
    }

    /// The same limit with its numbers prepared in another way.
    pub(crate) fn with_compiled(&self, compiled: Compiled) -> Self {
        Self(Arc::new(Inner { compiled, ..(*self.0).clone() }))
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), InvalidLimit> {
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
