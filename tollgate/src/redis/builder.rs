//! The builder of a limiter on Redis.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::mpsc;

use super::bounds::ReplyBounds;
use super::cluster::{MAX_ORPHANS, ScriptCalls};
use super::denials::Denials;
use super::fallback::{Fallback, LocalStore};
use super::leases::Leases;
use super::pending::{Open, Reads};
use super::resets::Resets;
use super::settings::RedisSettings;
use super::stats::{Calls, Counts};
use super::stores::{self, Fleet, Store, Stores};
use super::topology::Topology;
use super::{ConnectError, Inner, PreparedLimit, RedisLimiter, Shared, Tasks};
use crate::clock::{Clock, TimeSource};
use crate::limit::{Limit, OnStoreFailure};
use crate::limit_set::{Checked, LimitSet};
use crate::limiter::Limiter;

/// Default of `store_timeout`.
const DEFAULT_TIMEOUT: Duration = Duration::from_millis(50);
/// Bounds of `store_timeout`: shorter than a round trip within a data centre, and longer than a request waits for a
/// decision.
const TIMEOUTS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(60));

/// How long `connect` waits for the first connections.
const CONNECT_WAIT: Duration = Duration::from_secs(3);

/// A builder of [`RedisLimiter`].
#[must_use]
pub struct RedisLimiterBuilder {
    settings: RedisSettings,
    /// The stores other than the default one.
    named: Vec<(String, RedisSettings)>,
    limits: LimitSet,
    store_timeout: Duration,
    on_store_failure: OnStoreFailure,
    clock: Option<TimeSource>,
    max_memory: Option<usize>,
    denial_cache: bool,
    expected_nodes: u32,
}

impl RedisLimiterBuilder {
    pub(super) fn new(settings: RedisSettings) -> Self {
        Self {
            settings,
            named: Vec::new(),
            limits: LimitSet::new(),
            store_timeout: DEFAULT_TIMEOUT,
            on_store_failure: OnStoreFailure::default(),
            clock: None,
            max_memory: None,
            denial_cache: true,
            expected_nodes: 1,
        }
    }

    /// Adds a store by name, for limits that choose it with [`Limit::with_store`]. All others are on the default store.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::redis::RedisLimiter;
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// let limiter = RedisLimiter::builder("redis://10.0.0.5:6379")
    ///     .store("sessions", "redis+cluster://10.0.1.1:7001,10.0.1.2:7002")
    ///     .limit(Limit::new("global", FixedWindow::new(10_000, MINUTE))?)
    ///     .limit(Limit::new("per-session", FixedWindow::new(100, MINUTE))?.with_store("sessions"))
    ///     .connect()
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A request with limits on several stores takes from all of them or from none. The stores decide at the same time,
    /// and if one denies, the units of the others are given back. A store that fails affects only its own limits, whose
    /// [failure policy](Limit::with_on_store_failure) then decides.
    pub fn store(mut self, name: impl Into<String>, settings: impl Into<RedisSettings>) -> Self {
        self.named.push((name.into(), settings.into()));
        self
    }

    /// Adds a limit. Names must differ.
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

    /// Sets how long a decision waits for Redis: 1 ms to 60 s, 50 ms by default.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.store_timeout = timeout;
        self
    }

    /// Sets the policy while Redis fails, for limits without [their own](Limit::with_on_store_failure).
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.on_store_failure = policy;
        self
    }

    /// Takes the time from `clock` instead of Redis, for tests and simulations. Denials are then not cached.
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(TimeSource::Custom(Arc::new(clock)));
        self
    }

    /// Sets the most memory for local counts while Redis fails, and for the denial cache, which takes at most an eighth
    /// of it: see [`LimiterBuilder::max_memory`](crate::LimiterBuilder::max_memory).
    pub fn max_memory(mut self, bytes: usize) -> Self {
        self.max_memory = Some(bytes);
        self
    }

    /// Sets the least number of nodes by which local limits are divided while Redis fails, 1 by default: see
    /// [`RedisLimiter::fleet_nodes`].
    ///
    /// Nodes count each other on Redis. A node that starts while Redis is down cannot, and divides by this number.
    pub fn expected_nodes(mut self, nodes: u32) -> Self {
        self.expected_nodes = nodes;
        self
    }

    /// Disables the denial cache: every request is decided by Redis, even if a denial is certain.
    pub fn without_denial_cache(mut self) -> Self {
        self.denial_cache = false;
        self
    }

    /// Builds the limiter and connects to Redis. If Redis is down, the limiter keeps trying while the failure policies
    /// of the limits decide, so a service can start without its Redis.
    ///
    /// # Errors
    ///
    /// If a setting is invalid.
    ///
    /// # Panics
    ///
    /// If there is no tokio runtime.
    pub async fn connect(self) -> Result<RedisLimiter, ConnectError> {
        let (shortest, longest) = TIMEOUTS;
        if !(shortest..=longest).contains(&self.store_timeout) {
            let given = self.store_timeout;
            return Err(ConnectError::new(format!("a store_timeout of {given:?} is out of bounds"), "use 1ms to 60s"));
        }
        let limit_set = self.limits.clone().with_generation();
        let catalogue = Limiter::builder().limits(limit_set.clone());
        let catalogue = match &self.clock {
            Some(clock) => catalogue.time_source(clock.clone()),
            None => catalogue,
        };
        let catalogue = match self.max_memory {
            Some(bytes) => catalogue.max_memory(bytes),
            None => catalogue,
        };
        let catalogue = catalogue.build()?;
        let Checked { limits, base_count, .. } = limit_set.clone().checked()?;
        let fallback = Fallback::new(limit_set);
        super::prepared::check(&limits)?;
        let Some(clock) = self.clock.clone().or_else(TimeSource::system) else {
            return Err(ConnectError::new("this platform has no system clock", "set one with `clock`"));
        };
        let (orphans, without_caller) = mpsc::channel(MAX_ORPHANS);
        let (timeout, calls) = (self.store_timeout, Calls::default());
        let script_calls = Arc::new(ScriptCalls { timeout, clock: self.clock.clone(), calls, orphans });
        let stores = self.stores(&script_calls)?;
        stores.check(&limits, base_count)?;
        // A server that hangs counts as failed after this time.
        let settled = join_all(stores.iter().map(|store| store.topology.settled()));
        let _ = tokio::time::timeout(self.store_timeout.max(CONNECT_WAIT), settled).await;
        let denials = Arc::new(Denials::new(catalogue.budget()));
        let leases = Arc::new(Leases::new(stores.iter().count()));
        let open = Open::new(&denials);
        stores.join_fleets(&limits, self.on_store_failure);
        let mut tasks = Vec::new();
        for (index, store) in stores.indexed() {
            let resets = Resets {
                store: index,
                denials: denials.clone(),
                leases: leases.clone(),
                open: open.clone(),
                // Cached denials expire by real time, which an injected clock does not follow.
                is_subscribed: (self.denial_cache && self.clock.is_none()).then(|| store.is_subscribed.clone()),
                problem: store.subscription_problem.clone(),
                store_name: store.name.clone(),
            };
            tasks.push(tokio::spawn(super::resets::listen(store.topology.clone(), resets)).abort_handle());
            let beat = store.fleet.clone().beat(store.name.clone(), store.topology.clone(), self.store_timeout);
            tasks.push(tokio::spawn(beat).abort_handle());
        }
        let shared = Arc::new_cyclic(|itself| {
            let leftovers = super::leases::return_leftovers(leases.clone(), Weak::clone(itself));
            tasks.push(tokio::spawn(leftovers).abort_handle());
            let orphans = super::requests::give_back_orphans(without_caller, Weak::clone(itself));
            tasks.push(tokio::spawn(orphans).abort_handle());
            Shared {
                on_store_failure: self.on_store_failure,
                stores,
                script_calls,
                denials: denials.clone(),
                leases,
                clock,
                store_timeout: self.store_timeout,
                counts: Counts::default(),
                reads: Reads::default(),
                open,
                local: LocalStore::default(),
                _tasks: Tasks(tasks),
            }
        });
        let limits = PreparedLimit::all(limits, &[], &catalogue, &shared.stores);
        Ok(RedisLimiter(Arc::new(Inner { limits, catalogue, fallback, denials, shared })))
    }

    /// Connects to all stores in the background.
    fn stores(&self, script_calls: &Arc<ScriptCalls>) -> Result<Stores, ConnectError> {
        let open = |name: &str, settings: &RedisSettings| {
            let name: Arc<str> = name.into();
            let topology =
                Topology::new(settings, name.clone(), self.store_timeout, Some(script_calls), ReplyBounds::DECISIONS)?;
            Ok(Store {
                fleet: Arc::new(Fleet::new(self.expected_nodes, topology.names().layout())),
                topology: Arc::new(topology),
                is_subscribed: Arc::new(AtomicBool::new(false)),
                subscription_problem: Arc::default(),
                name,
            })
        };
        for (index, (name, settings)) in self.named.iter().enumerate() {
            stores::check_name(name, self.named[..index].iter().map(|(other, _)| other.as_str()))?;
            settings.check().map_err(|error| error.of_store(name))?;
        }
        let named = self.named.iter().map(|(name, settings)| open(name, settings));
        let all = std::iter::once(open(stores::DEFAULT, &self.settings)).chain(named);
        Ok(Stores::new(all.collect::<Result<_, ConnectError>>()?))
    }
}
