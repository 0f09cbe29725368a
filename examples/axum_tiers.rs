//! Plans: an authentication layer finds the user and their plan, and each plan has its own quota.
//!
//! `cargo run --bin axum_tiers`, then `curl -i -H 'authorization: Bearer ann-gold' http://127.0.0.1:3000/`.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_rules::{Gate, KeyPart, Rule, RuleSet};
use tollgate_tower::RateLimitLayer;

/// The account that sent the request.
#[derive(Clone)]
struct Account {
    user: String,
    plan: String,
}

/// A stand-in for your authentication: a session, an API key, a verified token.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    let account = token.and_then(|token| token.strip_prefix("Bearer ")?.split_once('-'));
    if let Some((user, plan)) = account {
        let account = Account { user: user.to_owned(), plan: plan.to_owned() };
        request.extensions_mut().insert(account);
    }
    next.run(request).await
}

fn rules() -> Result<RuleSet, tollgate::InvalidLimit> {
    let account = |request: &tollgate_rules::Request<'_>| request.facts().extension::<Account>().cloned();
    let per_user = Rule::new(Limit::new("per-user", FixedWindow::new(3, MINUTE).from_first_request())?)
        .key(KeyPart::custom(move |request| Some(account(request)?.user)))
        .plan(KeyPart::custom(move |request| Some(account(request)?.plan)))
        .plan_limit("silver", FixedWindow::new(100, MINUTE).from_first_request())
        .plan_limit("gold", FixedWindow::new(1000, MINUTE).from_first_request());
    RuleSet::builder().rule(per_user).build()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two layers: the rate limits, and around them the authentication that they depend on.
    let limits = RateLimitLayer::new(Gate::in_memory(rules()?)?).for_axum();
    let app = Router::new().route("/", get(async || "hello\n")).layer(limits).layer(from_fn(authenticate));

    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
