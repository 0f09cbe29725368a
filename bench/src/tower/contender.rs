//! The handler bare, with tollgate's layer, and with tower_governor's.
//!
//! The one limit of both counts by the address of the connection, which is tower_governor's default and the cheapest
//! key it has.

use std::hint::black_box;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, StatusCode};
use axum::routing::get;
use futures_util::FutureExt;
use tollgate::http::Families;
use tollgate::rules::{KeyPart, Match, Rule, RuleSet, RuleSetBuilder};
use tollgate::tower::RateLimitLayer;
use tollgate::{Gate, Limit, Rate, TokenBucket};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_service::Service;

/// A burst that no run spends.
const BURST: u32 = 1_000_000_000;

pub(super) const BARE: &str = "the handler alone";
pub(super) const LAYER3: &str = "tollgate, three limits";
pub(super) const LAYER1: &str = "tollgate, one limit";
pub(super) const LAYER1_PLAIN: &str = "tollgate, one limit, no headers";
pub(super) const GOVERNOR: &str = "tower_governor, no headers";
pub(super) const GOVERNOR_HEADERS: &str = "tower_governor";

pub(super) const FIELD: [fn() -> anyhow::Result<Contender>; 6] =
    [bare, three_limits, one_limit, one_limit_plain, governor_headers, governor];

pub(super) struct Contender {
    pub(super) name: &'static str,
    app: Router,
}

impl Contender {
    /// Serves the requests one after the other. Neither the handler nor a layer has anything to wait for.
    pub(super) fn serve(&mut self, batch: Vec<Request>) {
        for request in batch {
            let response = Service::call(&mut self.app, request).now_or_never();
            let Some(Ok(response)) = response else { panic!("{} does not answer at once", self.name) };
            assert_eq!(response.status(), StatusCode::OK, "{}", self.name);
            drop(black_box(response));
        }
    }
}

fn app() -> Router {
    Router::new().route("/api/items/{item}", get(async || "an item"))
}

fn bare() -> anyhow::Result<Contender> {
    Ok(Contender { name: BARE, app: app() })
}

/// For everybody, for each user, and for each user on that endpoint.
fn three_limits() -> anyhow::Result<Contender> {
    let user = || KeyPart::header(HeaderName::from_static("x-user-id"));
    let items = Match::everything().path("/api/items/*".parse()?).method("GET");
    let rules = RuleSet::builder()
        .rule(Rule::new(limit("global")?))
        .rule(Rule::new(limit("per-user")?).key(user()))
        .rule(Rule::new(limit("items")?).matching(items).key(user()).key(KeyPart::path()));
    tollgate(LAYER3, rules)
}

fn one_limit() -> anyhow::Result<Contender> {
    tollgate(LAYER1, RuleSet::builder().rule(Rule::new(limit("per-client")?).key(KeyPart::ip())))
}

fn one_limit_plain() -> anyhow::Result<Contender> {
    let rules = RuleSet::builder().rule(Rule::new(limit("per-client")?).key(KeyPart::ip()));
    tollgate(LAYER1_PLAIN, rules.headers(Families::NONE))
}

fn tollgate(name: &'static str, rules: RuleSetBuilder) -> anyhow::Result<Contender> {
    let layer = RateLimitLayer::new(Gate::in_memory(rules.build()?)?);
    Ok(Contender { name, app: app().layer(layer) })
}

fn governor_headers() -> anyhow::Result<Contender> {
    let config = GovernorConfigBuilder::default().per_second(1).burst_size(BURST).use_headers().finish();
    let config = config.ok_or_else(|| anyhow::anyhow!("tower_governor refuses its settings"))?;
    Ok(Contender { name: GOVERNOR_HEADERS, app: app().layer(GovernorLayer::new(config)) })
}

fn governor() -> anyhow::Result<Contender> {
    let config = GovernorConfigBuilder::default().per_second(1).burst_size(BURST).finish();
    let config = config.ok_or_else(|| anyhow::anyhow!("tower_governor refuses its settings"))?;
    Ok(Contender { name: GOVERNOR, app: app().layer(GovernorLayer::new(config)) })
}

fn limit(name: &str) -> anyhow::Result<Limit> {
    Ok(Limit::new(name, TokenBucket::new(u64::from(BURST), Rate::per_second(1)))?)
}
