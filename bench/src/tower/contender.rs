//! The handler bare, with tollgate's layer, and with tower_governor's.
//!
//! The one limit of both counts by the address of the connection, which is tower_governor's default and the cheapest
//! key it has.

use std::hint::black_box;
use std::ops::Range;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use futures_util::FutureExt;
use tollgate::{Limit, Rate, TokenBucket};
use tollgate_http::Families;
use tollgate_rules::{Gate, KeyPart, Match, Rule, RuleSet, RuleSetBuilder};
use tollgate_tower::RateLimitLayer;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_service::Service;

use super::requests::{CLIENTS, request};

/// A burst that no run spends.
const BURST: u32 = 10_000_000;
/// The time after which a unit comes back: longer than a run, so that all limiters keep every client. A
/// limiter may forget a key at rest, and forgetting must not look like saving time, nor like taking it.
const PERIOD: Duration = Duration::from_secs(60);

pub(super) const BARE: &str = "the handler alone";
pub(super) const LAYER3: &str = "tollgate, three limits, legacy and ietf: five headers";
pub(super) const LAYER1: &str = "tollgate, one limit, legacy and ietf: five headers";
pub(super) const LAYER1_LEGACY: &str = "tollgate, one limit, legacy: three headers";
pub(super) const LAYER1_PLAIN: &str = "tollgate, one limit, no headers";
pub(super) const GOVERNOR: &str = "tower_governor, no headers";
pub(super) const GOVERNOR_HEADERS: &str = "tower_governor, use_headers: two headers";

pub(super) const FIELD: [fn() -> anyhow::Result<Contender>; 7] =
    [bare, three_limits, one_limit, one_limit_legacy, one_limit_plain, governor_headers, governor];

pub(super) struct Contender {
    pub(super) name: &'static str,
    app: Router,
}

impl Contender {
    /// As a server has it: without the state being given, axum would put the layers together anew for every request.
    fn new(name: &'static str, app: Router) -> Self {
        Self { name, app: app.with_state(()) }
    }

    /// Sends one request for every client, so that its limiter knows all of them before the clock starts.
    pub(super) fn fill(&mut self) {
        self.serve(0..CLIENTS);
    }

    /// Serves requests one after the other. Neither the handler nor a layer has anything to wait for.
    pub(super) fn serve(&mut self, numbers: Range<usize>) {
        for number in numbers {
            let response = Service::call(&mut self.app, request(number)).now_or_never();
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
    Ok(Contender::new(BARE, app()))
}

/// For everybody, for each user, and for each user on that endpoint.
fn three_limits() -> anyhow::Result<Contender> {
    let user = || KeyPart::header("x-user-id");
    let items = Match::everything().path("/api/items/*").method("GET");
    let rules = RuleSet::builder()
        .rule(Rule::new(limit("global")?))
        .rule(Rule::new(limit("per-user")?).key(user()))
        .rule(Rule::new(limit("items")?).matching(items).key(user()).key(KeyPart::path()));
    tollgate(LAYER3, rules)
}

fn per_client() -> anyhow::Result<RuleSetBuilder> {
    Ok(RuleSet::builder().rule(Rule::new(limit("per-client")?).key(KeyPart::ip())))
}

/// Five headers: the default.
fn one_limit() -> anyhow::Result<Contender> {
    tollgate(LAYER1, per_client()?)
}

/// Three headers, where tower_governor writes two.
fn one_limit_legacy() -> anyhow::Result<Contender> {
    tollgate(LAYER1_LEGACY, per_client()?.headers(Families::from_names(["legacy"])?))
}

fn one_limit_plain() -> anyhow::Result<Contender> {
    tollgate(LAYER1_PLAIN, per_client()?.headers(Families::NONE))
}

fn tollgate(name: &'static str, rules: RuleSetBuilder) -> anyhow::Result<Contender> {
    let layer = RateLimitLayer::new(Gate::in_memory(rules.build()?)?).for_axum();
    Ok(Contender::new(name, app().layer(layer)))
}

fn governor_headers() -> anyhow::Result<Contender> {
    let config = GovernorConfigBuilder::default().period(PERIOD).burst_size(BURST).use_headers().finish();
    let config = config.ok_or_else(|| anyhow::anyhow!("tower_governor refuses its settings"))?;
    Ok(Contender::new(GOVERNOR_HEADERS, app().layer(GovernorLayer::new(config))))
}

fn governor() -> anyhow::Result<Contender> {
    let config = GovernorConfigBuilder::default().period(PERIOD).burst_size(BURST).finish();
    let config = config.ok_or_else(|| anyhow::anyhow!("tower_governor refuses its settings"))?;
    Ok(Contender::new(GOVERNOR, app().layer(GovernorLayer::new(config))))
}

fn limit(name: &str) -> anyhow::Result<Limit> {
    Ok(Limit::new(name, TokenBucket::new(u64::from(BURST), Rate::new(1, PERIOD)))?)
}
