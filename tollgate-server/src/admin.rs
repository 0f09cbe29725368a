//! For whoever operates the server: is it alive, is it ready, and what has it done.
//!
//! `/healthz` says that the process answers. `/readyz` says whether it wants requests: not while it stops.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;

use crate::gateway::Gateway;
use crate::service::{Options, serve};

/// Answers until `shutdown` ends.
pub(crate) async fn run(listener: TcpListener, gateway: Option<Arc<Gateway>>, shutdown: impl Future<Output = ()>) {
    let ready = move || {
        let is_ready = gateway.as_ref().is_none_or(|gateway| !gateway.is_stopping());
        async move { if is_ready { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "stopping\n") } }
    };
    let router = Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(ready));
    serve(listener, router, Options::default(), shutdown).await;
}
