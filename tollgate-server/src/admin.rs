//! The admin listener: health, readiness, metrics, and the admin API under `/v1`.
//!
//! `/healthz` reports that the process answers. `/readyz` reports whether it is ready for requests: not before
//! everything listens, and not while it stops. `/metrics` is for Prometheus. These need no token. The API reads and
//! changes rules and keys, so [`access`] guards it, and every change is logged.

mod access;
mod bans;
mod dashboard;
mod explain;
pub(crate) mod key_hash;
mod keys;
mod live;
mod openapi;
mod parameters;
mod rules;
mod simulate;
mod status;
mod top;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tollgate_net::listening::Stop;
use tollgate_telemetry::decisions::Sums;

pub(crate) use self::access::Access;
use self::live::Live;
use crate::metrics::{self, Format, Metrics};
use crate::readiness::Readiness;
use crate::server_state::ServerState;
use crate::service::error_body::{ErrorBody, quoted};
use crate::service::{Hosts, Options, guard, serve};

/// The pages of the listener, with their methods. [`router`] has the same.
const PAGES: &[(&str, &str, &str)] = &[
    ("/healthz", "GET", "liveness: 200 if the process answers"),
    ("/readyz", "GET", "readiness: 200 if it accepts requests, 503 while it starts or stops"),
    ("/metrics", "GET", "metrics for Prometheus"),
    ("/openapi.json", "GET", "the description of the API"),
    ("/v1/status", "GET", "the server, its store, rules, upstreams and listeners"),
    ("/v1/live", "GET", "decisions per second by limit and outcome"),
    ("/v1/top", "GET", "the keys that limits deny or nearly deny most"),
    ("/v1/simulate", "POST", "the five algorithms on generated traffic"),
    ("/v1/rules", "GET, PUT", "the rules in force, and those before"),
    ("/v1/rules/validate", "POST", "check rules"),
    ("/v1/rules/rollback", "POST", "return to rules of the history"),
    ("/v1/keys", "GET", "the state of a key in its limits"),
    ("/v1/keys/reset", "POST", "give a key its whole quota back"),
    ("/v1/keys/grant", "POST", "give units back to a key"),
    ("/v1/keys/ban", "POST", "ban a key"),
    ("/v1/keys/unban", "POST", "lift the ban of a key"),
    ("/v1/bans", "GET", "the keys that operators have banned"),
    ("/v1/explain", "POST", "explain which limits apply to a request"),
];

/// The state that requests share.
pub(crate) struct Admin {
    pub(crate) server: ServerState,
    /// The authentication of clients.
    pub(crate) access: Access,
    live: Live,
}

/// The state of handlers.
pub(crate) type AdminState = Arc<Admin>;

impl Admin {
    pub(crate) fn new(server: &ServerState, access: Access) -> Self {
        Self { server: server.clone(), access, live: Live::default() }
    }

    /// Returns the decisions since the start by limit, of the gateway and the decision service.
    pub(crate) fn decisions(&self) -> Sums {
        let mut sums = Sums::new();
        self.server.decisions.add_to(&mut sums);
        if let Some(gateway) = self.server.readiness.gateway() {
            gateway.add_decisions_to(&mut sums);
        }
        sums
    }
}

/// Serves until `shutdown` resolves.
pub(crate) async fn run(
    listener: Arc<TcpListener>,
    admin: Admin,
    (options, hosts): (Options, Hosts),
    shutdown: impl Future<Output = Stop>,
) {
    serve(listener, guard(router(Arc::new(admin)), hosts), options, shutdown).await;
}

fn router(state: AdminState) -> Router {
    let readiness = Arc::clone(&state.server.readiness);
    let registry = Arc::new(Metrics { server: state.server.clone() }.registry());
    let api = Router::new()
        .route("/v1/status", get(status::status))
        .route("/v1/live", get(live::live))
        .route("/v1/top", get(top::top))
        .route("/v1/simulate", post(simulate::simulate))
        .route("/v1/rules", get(rules::read).put(rules::replace))
        .route("/v1/rules/validate", post(rules::validate))
        .route("/v1/rules/rollback", post(rules::roll_back))
        .route("/v1/keys", get(keys::state))
        .route("/v1/keys/reset", post(keys::reset))
        .route("/v1/keys/grant", post(keys::grant))
        .route("/v1/keys/ban", post(keys::ban))
        .route("/v1/keys/unban", post(keys::unban))
        .route("/v1/bans", get(bans::bans))
        .route("/v1/explain", post(explain::explain))
        .layer(DefaultBodyLimit::max(rules::MAX_RULES_BYTES))
        .route_layer(from_fn_with_state(Arc::clone(&state), access::check));
    Router::new()
        .route("/", get(first_page))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(async move || ready(&readiness)))
        // The description has no secrets.
        .route("/openapi.json", get(openapi::openapi))
        .route("/metrics", get(async move |headers: HeaderMap| all_metrics(&registry, &headers)))
        .merge(api)
        .method_not_allowed_fallback(wrong_method)
        .fallback(wrong_path)
        .with_state(state)
}

/// Returns the dashboard to browsers, and a list of the pages to other clients.
async fn first_page(headers: HeaderMap) -> Response {
    if dashboard::is_wanted(&headers) {
        return dashboard::page();
    }
    let read = PAGES.iter().filter(|(_, methods, _)| methods.starts_with("GET"));
    let pages: String = read.map(|(path, _, description)| format!("{path:<13} {description}\n")).collect();
    ([(header::VARY, "accept")], pages).into_response()
}

fn ready(readiness: &Readiness) -> impl IntoResponse + use<> {
    match readiness.check_ready() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn all_metrics(registry: &Registry, headers: &HeaderMap) -> impl IntoResponse + use<> {
    let format = Format::accepted(headers);
    let headers = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "accept")];
    (headers, metrics::text(registry, format))
}

async fn wrong_method(method: Method, uri: Uri) -> impl IntoResponse {
    let allowed = PAGES.iter().find(|(path, ..)| *path == uri.path()).map_or("GET", |(_, methods, _)| methods);
    let error = ErrorBody {
        status: StatusCode::METHOD_NOT_ALLOWED,
        error: "method_not_allowed",
        message: format!("{} does not support {}: use {allowed}", quoted(uri.path()), quoted(method.as_str())),
    };
    ([(header::ALLOW, allowed)], error)
}

async fn wrong_path(uri: Uri) -> ErrorBody {
    ErrorBody {
        status: StatusCode::NOT_FOUND,
        error: "not_found",
        message: format!("no page is at {}: see / for a list", quoted(uri.path())),
    }
}
