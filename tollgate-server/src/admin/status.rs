//! `GET /v1/status`: the server, its store, rules, upstreams and listeners.

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use tollgate::redis::RedisLimiter;
use tollgate_rules::Gate;
use tollgate_telemetry::seconds::unix_seconds;

use super::{Admin, AdminState};
use crate::reload::versions::RulesSource;

/// The state of the server.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Status {
    version: &'static str,
    /// Times are in seconds since the Unix epoch.
    started_at: f64,
    now: f64,
    /// Whether it accepts requests, as `/readyz` reports.
    ready: bool,
    /// Why it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<&'static str>,
    /// Whether this API shows keys, or their hashes.
    show_keys: bool,
    store: StoreJson,
    rules: RulesJson,
    upstreams: Vec<UpstreamJson>,
    listeners: Vec<ListenerJson>,
}

/// The store of counts.
#[derive(Debug, Serialize, JsonSchema)]
struct StoreJson {
    kind: StoreKind,
    available: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The servers of Redis.
    servers: Vec<ServerJson>,
    /// Keys with a count, in memory only.
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<u64>,
    /// Bytes of these keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<u64>,
    /// Nodes that share the store, for Redis only.
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<u32>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum StoreKind {
    Memory,
    Redis,
}

/// A server of a store.
#[derive(Debug, Serialize, JsonSchema)]
struct ServerJson {
    /// The name of the store: `default`, or the one by which limits choose it.
    store: String,
    address: String,
    available: bool,
    breaker: BreakerState,
}

/// The circuit breaker of a server.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum BreakerState {
    /// Requests are sent to the server.
    Closed,
    /// The server fails. It is probed, and no request is sent to it until a probe succeeds.
    Open,
    /// The server refuses writes, because its memory is full or its user lacks a permission.
    Refusing,
}

impl From<tollgate::redis::BreakerState> for BreakerState {
    fn from(state: tollgate::redis::BreakerState) -> Self {
        match state {
            tollgate::redis::BreakerState::Closed => Self::Closed,
            tollgate::redis::BreakerState::Refusing => Self::Refusing,
            _ => Self::Open,
        }
    }
}

/// The rules in force.
#[derive(Debug, Serialize, JsonSchema)]
struct RulesJson {
    /// A hash of the text, which is the same on all nodes with the same rules.
    version: String,
    source: RulesSource,
    loaded_at: f64,
    /// The number of limits.
    limits: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
struct UpstreamJson {
    /// Host and port.
    upstream: String,
    healthy: bool,
    /// The names of the routes that use it.
    routes: Vec<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ListenerJson {
    /// `gateway`, `http`, `grpc`, `resp` or `admin`.
    surface: &'static str,
    url: String,
}

pub(super) async fn status(State(state): State<AdminState>) -> Json<Status> {
    let ready = state.server.readiness.check_ready();
    let in_force = state.server.reloads.in_force();
    Json(Status {
        version: env!("CARGO_PKG_VERSION"),
        started_at: state.server.started_at,
        now: unix_seconds(),
        ready: ready.is_ok(),
        problem: ready.err(),
        show_keys: state.server.key_display.shows_keys(),
        store: StoreJson::of(&state.server.gate),
        rules: RulesJson {
            version: in_force.version.clone(),
            source: in_force.source,
            loaded_at: in_force.loaded_at,
            limits: state.server.gate.rules().names().count(),
        },
        upstreams: state.upstreams(),
        listeners: state.listeners(),
    })
}

impl Admin {
    fn upstreams(&self) -> Vec<UpstreamJson> {
        let upstreams = self.server.readiness.gateway().map(|gateway| gateway.upstreams()).unwrap_or_default();
        let json = |(upstream, (healthy, routes)): (String, (bool, _))| UpstreamJson {
            upstream,
            healthy,
            routes: Vec::from_iter::<std::collections::BTreeSet<String>>(routes),
        };
        upstreams.into_iter().map(json).collect()
    }

    fn listeners(&self) -> Vec<ListenerJson> {
        let of_gateway = self.server.readiness.gateway().map(|gateway| gateway.addresses()).unwrap_or_default();
        let of_gateway = of_gateway
            .into_iter()
            .map(|(scheme, address)| ListenerJson { surface: "gateway", url: format!("{scheme}://{address}") });
        let others = self.server.listening.all();
        let others = others.into_iter().map(|(surface, url)| ListenerJson { surface: surface.as_str(), url });
        of_gateway.chain(others).collect()
    }
}

impl StoreJson {
    fn of(gate: &Gate) -> Self {
        match (gate.memory(), gate.redis()) {
            (Some(limiter), _) => {
                let keys: usize = limiter.ids().map(|id| limiter.live_keys(id)).sum();
                Self {
                    kind: StoreKind::Memory,
                    available: true,
                    problem: None,
                    servers: Vec::new(),
                    keys: Some(keys as u64),
                    memory: Some(limiter.memory_used() as u64),
                    nodes: None,
                }
            }
            (None, redis) => Self::of_redis(redis.as_ref()),
        }
    }

    fn of_redis(redis: Option<&RedisLimiter>) -> Self {
        let stores = redis.map(RedisLimiter::stores).unwrap_or_default();
        let problem = stores.iter().find_map(|store| {
            let why = store.why_unavailable.as_ref()?;
            Some(format!("{} at {}: {}: {}", store.name, store.address, why.detail().trim_end_matches('.'), why.fix()))
        });
        let servers = redis.map(RedisLimiter::servers).unwrap_or_default();
        let servers = servers.into_iter().map(|server| ServerJson {
            store: server.store,
            address: server.address,
            available: server.available,
            breaker: server.breaker.into(),
        });
        Self {
            kind: StoreKind::Redis,
            available: redis.is_some_and(RedisLimiter::is_store_available),
            problem,
            servers: servers.collect(),
            keys: None,
            memory: None,
            nodes: redis.map(RedisLimiter::fleet_nodes),
        }
    }
}
