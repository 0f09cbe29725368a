//! The admin listener: health, readiness and metrics.
//!
//! `/healthz` reports that the process answers. `/readyz` reports whether it is ready for requests: not before
//! everything listens, and not while it stops. `/metrics` is for Prometheus.

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use crate::metrics::{self, Metrics};
use crate::readiness::Readiness;
use crate::service::http::{ErrorBody, quoted};
use crate::service::{Hosts, Options, Stop, guard, serve};

/// The page at `/`, which lists the others.
const PAGES: &str = "\
/healthz  liveness: 200 if the process answers
/readyz   readiness: 200 if it accepts requests, 503 while it starts or stops
/metrics  metrics for Prometheus
";

/// Serves until `shutdown` resolves.
pub(crate) async fn run(
    listener: Arc<TcpListener>,
    metrics: Metrics,
    (options, hosts): (Options, Hosts),
    shutdown: impl Future<Output = Stop>,
) {
    let readiness = Arc::clone(&metrics.readiness);
    let registry = Arc::new(metrics.registry());
    let router = Router::new()
        .route("/", get(|| async { PAGES }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(async move || ready(&readiness)))
        .route("/metrics", get(async move || all_metrics(&registry)))
        .method_not_allowed_fallback(wrong_method)
        .fallback(wrong_path);
    serve(listener, guard(router, hosts), options, shutdown).await;
}

fn ready(readiness: &Readiness) -> impl IntoResponse + use<> {
    match readiness.check_ready() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn all_metrics(registry: &Registry) -> impl IntoResponse + use<> {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics::text(registry))
}

async fn wrong_method(method: Method, uri: Uri) -> impl IntoResponse {
    let error = ErrorBody {
        status: StatusCode::METHOD_NOT_ALLOWED,
        error: "method_not_allowed",
        message: format!("{} does not support {}: use GET", quoted(uri.path()), quoted(method.as_str())),
    };
    ([(header::ALLOW, "GET")], error)
}

async fn wrong_path(uri: Uri) -> ErrorBody {
    ErrorBody {
        status: StatusCode::NOT_FOUND,
        error: "not_found",
        message: format!("no page is at {}: use /healthz, /readyz or /metrics", quoted(uri.path())),
    }
}
