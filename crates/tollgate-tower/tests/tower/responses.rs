//! Limits that are settled by the responses of the inner service.

use axum::Router;
use axum::extract::Query;
use axum::http::{HeaderName, StatusCode};
use axum::response::IntoResponse;
use axum::routing::get;
use tollgate::{Limit, MINUTE, SlidingWindowLog};
use tollgate_rules::{Check, Cost, Gate, Rule, StatusSet};
use tollgate_tower::ActualCost;

use super::gate;
use super::server::{Server, layer};

const COST: HeaderName = HeaderName::from_static("x-cost");

fn log(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, SlidingWindowLog::new(limit, MINUTE)).unwrap())
}

fn left(gate: &Gate, limit: &str) -> u64 {
    let Ok(Check::Ready(looked)) = gate.check_by_name(limit, &[], 0) else { panic!("it is there, in memory") };
    looked.decision().unwrap().remaining()
}

/// `?status=N`, `?cost=N` for the header, `?units=N` for the extension.
async fn work(Query(query): Query<Vec<(String, String)>>) -> impl IntoResponse {
    let value = |name: &str| query.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let status = value("status").and_then(|status| status.parse().ok()).unwrap_or(200);
    let mut response = StatusCode::from_u16(status).unwrap().into_response();
    response.headers_mut().extend(value("cost").map(|cost| (COST, cost.parse().unwrap())));
    if let Some(units) = value("units").and_then(|units| units.parse().ok()) {
        response.extensions_mut().insert(ActualCost::new(units));
    }
    response
}

#[tokio::test]
async fn status_header_and_extension_settle_a_limit_once_in_that_order() {
    // (response, tokens left of 1000 after an estimate of 400, failures left of 5)
    let table = [
        ("/", 600, 5),
        ("/?cost=100", 900, 5),
        ("/?units=200", 800, 5),
        ("/?cost=100&units=200", 900, 5),
        ("/?cost=much&units=200", 800, 5),
        ("/?status=404&cost=100", 900, 4),
        ("/?status=503&cost=100", 1000, 4),
        ("/?status=503&units=100", 1000, 4),
    ];
    for (path, tokens, failures) in table {
        let counted = StatusSet::none().class(StatusCode::OK).class(StatusCode::NOT_FOUND);
        let rules = [
            log("tokens", 1000).cost(Cost::constant(400)).settle_by(COST).count(counted),
            log("failures", 5).count(StatusSet::failures()),
        ];
        let (gate, _) = gate(rules);
        let server = Server::serving(Router::new().route("/", get(work)).layer(layer(&gate))).await;
        _ = server.get(path, &[]).await;
        assert_eq!((left(&gate, "tokens"), left(&gate, "failures")), (tokens, failures), "{path}");
    }
}
