//! Limits shared by many processes, on Redis or Valkey: a single server, Sentinel or Cluster.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use tollgate::redis::RedisLimiter;
//! use tollgate::{Limit, Rate, TokenBucket};
//!
//! let limiter = RedisLimiter::builder("redis://127.0.0.1:6379")
//!     .limit(Limit::new("per-user", TokenBucket::new(10, Rate::per_second(1)))?)
//!     .connect()
//!     .await?;
//! if !limiter.check("user:42").await.is_allowed() {
//!     // …
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The algorithms, decisions and operations are those of [`Limiter`]. Redis's clock decides, to the microsecond. Most
//! of this module keeps round trips few and short:
//!
//! - Requests that arrive while a call is in flight are sent together in the next one.
//! - A denial is cached for up to a second, so a flood on a spent key hardly reaches Redis.
//! - A [`Leased`](crate::Consistency::Leased) limit takes slices of a busy key's quota in advance.
//! - No decision waits longer than the store's timeout. After a few failures no decision waits at all until Redis
//!   answers again. Meanwhile, the [`OnStoreFailure`] policy of each limit decides.

mod bounds;
mod breaker;
mod builder;
mod cluster;
mod credentials;
mod denials;
mod dial;
mod error;
mod fallback;
pub(crate) mod fuzzing;
pub(crate) mod hits;
mod lease;
mod leases;
mod names;
mod node;
mod pending;
mod prepared;
mod requests;
pub(crate) mod reservation;
mod resets;
mod rule_sets;
mod script;
mod settings;
mod shared_reservations;
mod shared_state;
mod stats;
mod stores;
mod target;
mod topology;
mod warnings;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;

pub use self::builder::RedisLimiterBuilder;
use self::cluster::ScriptCalls;
#[doc(hidden)]
pub use self::credentials::check_pem_file;
use self::denials::Denials;
pub use self::error::{ConnectError, StoreError};
use self::fallback::{Fallback, LocalStore};
use self::leases::Leases;
pub use self::names::Layout;
use self::prepared::PreparedLimit;
use self::reservation::Receipt;
pub use self::reservation::RedisReservation;
pub use self::rule_sets::{PublishError, PublishedRules, Repair, Repairs, RuleSets};
use self::script::{ScriptHit, ScriptHits, ScriptRequest};
pub use self::settings::RedisSettings;
pub use self::shared_state::StoredState;
use self::stats::Counts;
pub use self::stats::{Histogram, ServerMemory, Stats};
use self::stores::Stores;
pub use self::warnings::StoreWarning;
use crate::clock::TimeSource;
use crate::decision::{Decision, InvalidHits, LimitId, Source, Verdict};
use crate::key::Key;
use crate::limit::{Limit, OnStoreFailure};
use crate::limiter::{Hit, Limiter};
use crate::store::memory::Positions;
use crate::units::Timestamp;

/// A rate limiter whose counts are on Redis, shared with every process that has the same limits.
///
/// Cloning is cheap, and clones share everything. It returns a decision even if Redis fails: see [`Decision::source`].
#[derive(Clone)]
pub struct RedisLimiter(Arc<Inner>);

struct Inner {
    limits: Box<[PreparedLimit]>,
    /// Finds limits by name and id, and keeps their earlier configurations. It decides nothing.
    catalogue: Limiter,
    /// Counts in memory while Redis fails, for limits with that policy.
    fallback: Fallback,
    /// The denial cache of [`Shared`], without the extra pointer.
    denials: Arc<Denials>,
    shared: Arc<Shared>,
}

/// State that is kept when the limits change.
struct Shared {
    on_store_failure: OnStoreFailure,
    stores: Stores,
    script_calls: Arc<ScriptCalls>,
    denials: Arc<Denials>,
    leases: Arc<Leases>,
    clock: TimeSource,
    store_timeout: Duration,
    counts: Counts,
    reads: pending::Reads,
    open: pending::Open,
    local: LocalStore,
    _tasks: Tasks,
}

/// Aborts the background tasks when dropped.
struct Tasks(Vec<tokio::task::AbortHandle>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

/// The status of a store: see [`RedisLimiter::stores`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStatus {
    /// The name by which limits choose it, or `default`.
    pub name: String,
    /// Hosts and ports, after the master's name if they are sentinels. Never a password.
    pub address: String,
    /// The reason why it cannot decide for some or all keys. `None` if it is available.
    pub why_unavailable: Option<StoreError>,
    /// Problems with which it still decides for all or most keys.
    pub warnings: Vec<StoreWarning>,
}

/// The status of a server: see [`RedisLimiter::servers`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerStatus {
    /// The name of the store: `default`, or the name by which limits choose it.
    pub store: String,
    /// Host and port.
    pub address: String,
    /// Whether it decides. It does not while it fails, or while it refuses requests: its memory is full, its user lacks a
    /// permission, it lacks a command, or it is a node of a cluster that is used as a single server.
    pub available: bool,
    /// The state of its circuit breaker.
    pub breaker: BreakerState,
    /// Its memory, read a few times a minute. `None` if it has not been read yet, or if the user may not run `INFO`.
    pub memory: Option<ServerMemory>,
}

/// The state of a server's circuit breaker: see [`ServerStatus`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BreakerState {
    /// Requests are sent to the server.
    Closed,
    /// The server failed several times in a row. It is probed, and no request is sent to it until a probe succeeds.
    Open,
    /// The server refuses requests, for example because its memory is full or its user lacks a permission. Requests are
    /// sent to it, because those that need no write are decided.
    Refusing,
}

impl BreakerState {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Closed, Self::Open, Self::Refusing];

    /// Returns the state as a word, such as `open`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::Refusing => "refusing",
        }
    }
}

/// A hit on a limit, prepared for Redis.
#[derive(Clone)]
pub struct RedisHit {
    limit: LimitId,
    script_hit: ScriptHit,
    take_from: TakeFrom,
    /// Where its units were taken, once it is decided.
    receipt: Receipt,
    /// The decision of this limit alone, if the store made it.
    decided: Option<Decision>,
    /// Whether pending units may have caused the denial, which nobody has looked at.
    may_be_pending: bool,
}

/// The places from which units may be taken.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum TakeFrom {
    /// A slice of this process if the limit is leased, or else the store.
    #[default]
    SliceOrStore,
    /// The store only, so that a cost that changes later is counted exactly.
    Store,
}

/// The hits of a request.
pub type RedisHits = SmallVec<[RedisHit; 2]>;

impl RedisLimiter {
    /// Returns a builder for a limiter on the Redis at that URL: `redis://host:6379`, `rediss://…` for TLS,
    /// `redis+cluster://h1:7001,h2:7002`, `redis+sentinel://h1:26379,h2:26379/mymaster` or `unix:///path/to/socket`.
    /// [`RedisSettings`] add a prefix for all keys, certificates, and credentials outside the URL.
    pub fn builder(settings: impl Into<RedisSettings>) -> RedisLimiterBuilder {
        RedisLimiterBuilder::new(settings.into())
    }

    /// Takes one unit of the key from every limit, or from none.
    #[must_use = "an ignored decision limits nothing"]
    pub async fn check<'k>(&self, key: impl Into<Key<'k>>) -> Decision {
        self.check_n(key, 1).await
    }

    /// Takes `cost` units of the key from every limit, or from none.
    #[must_use = "an ignored decision limits nothing"]
    pub async fn check_n<'k>(&self, key: impl Into<Key<'k>>, cost: u64) -> Decision {
        let mut hits = self.hits_for_key(key.into(), cost);
        self.take_or_lease(&mut hits, cost).await
    }

    /// Takes the cost of every hit, or of none. Hits may be on different limits and keys. However many hits there are,
    /// this takes one round trip. Several stores or cluster slots are called at the same time. Mistakes in the hits are
    /// denied, as by [`Limiter::decide_now`](crate::Limiter::decide_now).
    #[must_use = "an ignored decision limits nothing"]
    pub async fn decide(&self, hits: &[Hit<'_>]) -> Decision {
        let cost = hits.iter().map(|hit| hit.parts().2).max().unwrap_or(0);
        match self.prepare_hits(hits) {
            Ok(mut hits) => self.take_or_lease(&mut hits, cost).await,
            Err(mistake) => self.deny_invalid(mistake, cost),
        }
    }

    /// Returns the remaining quota of the key as a decision, and takes nothing.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    pub async fn peek<'k>(&self, key: impl Into<Key<'k>>) -> Result<Decision, StoreError> {
        let hits = self.hits_for_key(key.into(), 0);
        self.peek_at(&hits).await
    }

    /// Resets the key: all of its quota is available again.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    pub async fn reset<'k>(&self, key: impl Into<Key<'k>>) -> Result<(), StoreError> {
        // Reservations of this type know the process that made them, which ends them with the reset.
        self.reset_each(&self.hits_for_key(key.into(), 0), |_| None).await
    }

    /// Resets the keys of hits, whatever their cost, for reservations that any node settles, too.
    #[doc(hidden)]
    pub async fn reset_hits(&self, hits: &RedisHits) -> Result<(), StoreError> {
        self.reset_each(hits, |hit| self.0.shared.reset_marker(hit)).await
    }

    /// Resets the keys of hits, and leaves the time of the reset beside each that has a name for it.
    async fn reset_each(
        &self,
        hits: &RedisHits,
        marker: impl Fn(&ScriptHit) -> Option<Arc<[u8]>>,
    ) -> Result<(), StoreError> {
        let shared = &*self.0.shared;
        for hit in hits {
            self.reset_locally(hit);
            shared.leases.drop_slices(&hit.script_hit.name);
        }
        let calls = shared.stores.calls(hits.iter().map(|hit| &hit.script_hit));
        let each = calls.into_iter().map(|call| {
            let script_hits: ScriptHits = call.into_iter().map(|position| hits[position].script_hit.clone()).collect();
            let beside = script_hits.iter().map(&marker).collect();
            async move {
                let mark = shared.open.mark();
                let result = shared.send(ScriptRequest::Reset(script_hits.clone(), beside)).await;
                let reset_at = result.as_ref().ok().map(|reply| reply.at);
                for script_hit in script_hits {
                    // A denial that was decided before the reset may have been cached in the meantime.
                    shared.denials.forget(&script_hit.name);
                    shared.leases.forget(&script_hit.name, reset_at);
                    if result.is_ok() {
                        shared.open.reset(&script_hit.name, reset_at, mark);
                    }
                }
                result.map(drop)
            }
        });
        join_all(each).await.into_iter().collect()
    }

    /// Returns the id of the limit of that name.
    #[must_use]
    pub fn id(&self, name: &str) -> Option<LimitId> {
        self.0.catalogue.id(name)
    }

    /// Returns the limits that apply to every key, in the order in which they were added.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        self.0.catalogue.limits()
    }

    /// Returns the id of a limit's variant, by the names of both: see [`LimitSet::variant`](crate::LimitSet::variant).
    #[must_use]
    pub fn variant(&self, limit: &str, variant: &str) -> Option<LimitId> {
        self.0.catalogue.variant(limit, variant)
    }

    /// Returns the id of the ban of that name: see [`LimitSet::ban`](crate::LimitSet::ban).
    #[must_use]
    pub fn ban(&self, name: &str) -> Option<LimitId> {
        self.0.catalogue.ban(name)
    }

    /// Returns the ids of all variants and bans, in the order in which they were added: see
    /// [`LimitSet`](crate::LimitSet).
    pub fn variants(&self) -> impl Iterator<Item = LimitId> + use<> {
        self.0.catalogue.variants()
    }

    /// Returns the limit of that id, for example the one that a decision names, or `None` if the id comes from another
    /// limiter.
    #[must_use]
    pub fn limit(&self, id: LimitId) -> Option<&Limit> {
        self.0.catalogue.limit(id)
    }

    /// Returns whether Redis decides for every key. On a cluster, this is false while any server fails, although that
    /// affects only the keys of that server.
    #[must_use]
    pub fn is_store_available(&self) -> bool {
        self.why_unavailable().is_none()
    }

    /// Returns why Redis cannot decide for some or all keys: the failure or refusal of a server. `None` if Redis is
    /// available.
    #[must_use]
    pub fn why_unavailable(&self) -> Option<StoreError> {
        self.0.shared.stores.why_unavailable()
    }

    /// Returns the status of all servers that hold keys, of all stores: a single server, the master that sentinels
    /// name, or the masters of a cluster. An idle server is probed about every second.
    #[must_use]
    pub fn servers(&self) -> Vec<ServerStatus> {
        self.0.shared.stores.servers()
    }

    /// Returns the default store, followed by those that were [added by name](RedisLimiterBuilder::store).
    #[must_use]
    pub fn stores(&self) -> Vec<StoreStatus> {
        self.0.shared.stores.status()
    }

    /// Returns the address of the default store for display: hosts and ports, after the master's name if they are
    /// sentinels. Never a password.
    #[must_use]
    pub fn address(&self) -> &str {
        self.0.shared.stores.default_store().topology.address()
    }

    /// Returns the policy while Redis fails, for limits without [their own](Limit::on_store_failure).
    #[must_use]
    pub fn on_store_failure(&self) -> OnStoreFailure {
        self.0.shared.on_store_failure
    }

    /// Returns the number of nodes by which local limits are divided while Redis fails: see [`OnStoreFailure::Local`].
    ///
    /// Nodes are limiters on the same Redis that have a limit with that policy. Each registers there a second after it
    /// was created, and about every two seconds from then on. The result is the largest number of nodes alive in the
    /// five minutes before Redis failed, and never less than [`expected_nodes`](RedisLimiterBuilder::expected_nodes).
    /// With several stores, each has its own number, and this is the largest.
    #[must_use]
    pub fn fleet_nodes(&self) -> u32 {
        self.0.shared.stores.iter().map(|store| store.fleet.nodes()).max().unwrap_or(1)
    }

    /// Returns the counters of this limiter.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Shared { script_calls, stores, counts, leases, clock, .. } = &*self.0.shared;
        let (leases_held, leased_units) = leases.held(clock.now_with_gaps());
        let counted = Stats::read(
            counts,
            &script_calls.calls,
            stores.iter().map(|store| (store.topology.traffic(), store.topology.breaker_counts())),
        );
        Stats { leases_held, leased_units, ..counted }
    }

    fn decision(&self, hit: &RedisHit, verdict: Verdict, at: Timestamp, source: Source) -> Decision {
        let quota = self.0.limits[hit.limit.index()].limit.quota();
        Decision { limit: Some(hit.limit), quota, cost: hit.script_hit.cost, at, wall_offset: 0, source, verdict }
    }

    /// Returns the denial of a request with a mistake in its hits.
    fn deny_invalid(&self, mistake: InvalidHits, cost: u64) -> Decision {
        Decision::invalid(mistake, cost, self.0.shared.clock.wall())
    }

    fn hits_for_key(&self, key: Key<'_>, cost: u64) -> RedisHits {
        self.0.catalogue.ids().zip(&self.0.limits).map(|(limit, prepared)| prepared.hit(limit, key, cost)).collect()
    }

    /// Prepares hits for Redis.
    fn prepare_hits(&self, hits: &[Hit<'_>]) -> Result<RedisHits, InvalidHits> {
        let (mut all, mut positions) = (RedisHits::new(), Positions::default());
        for hit in hits {
            let (limit, key, cost) = hit.parts();
            let prepared = self.0.limits.get(limit.index()).filter(|_| self.limit(limit).is_some());
            let added = prepared.ok_or(InvalidHits::UnknownLimit)?.hit(limit, key, cost);
            // Hits on the same key are added up.
            let is_same = |other: &RedisHit| other.script_hit.name == added.script_hit.name;
            match positions.of(&all, is_same, || added.script_hit.name.clone()) {
                Some(same) if all[same].limit != limit => return Err(InvalidHits::TwoVariants),
                Some(same) => all[same].script_hit.cost = all[same].script_hit.cost.saturating_add(cost),
                None => {
                    all.push(added);
                    positions.added(&all, |hit| hit.script_hit.name.clone());
                }
            }
        }
        Ok(all)
    }
}

impl std::fmt::Debug for RedisLimiter {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RedisLimiter").field("limits", &self.limits()).finish_non_exhaustive()
    }
}
