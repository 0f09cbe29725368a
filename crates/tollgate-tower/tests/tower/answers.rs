//! Responses, byte by byte.

use http::{Method, Version};
use tollgate::SECOND;
use tollgate_http::{Body, Families};
use tollgate_rules::{Missing, RuleSet};

use super::server::{Server, http1, http2};
use super::{gate, gate_of, per_minute, user};

const LEGACY: [&str; 3] = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"];
const IETF: [&str; 2] = ["ratelimit-policy", "ratelimit"];
const ANN: [(&str, &str); 1] = [("x-user-id", "ann")];

#[tokio::test]
async fn every_response_has_the_remaining_quota_and_a_denial_the_wait() {
    let (gate, clock) = gate([per_minute("per-user", 2).key(user())]);
    let server = Server::with(&gate).await;

    let first = server.get("/api/test", &ANN).await;
    assert_eq!((first.status, &*first.body), (200, "hello"));
    assert_eq!(first.all(LEGACY), [Some("2"), Some("1"), Some("1700000040")]);
    assert_eq!(first.all(IETF), [Some(r#""per-user";q=2;w=60"#), Some(r#""per-user";r=1;t=20"#)]);
    assert_eq!(first.header("retry-after"), None);

    clock.advance(SECOND / 2);
    let second = server.get("/api/test", &ANN).await;
    assert_eq!((second.status, &*second.body), (200, "hello"));
    assert_eq!(second.all(LEGACY), [Some("2"), Some("0"), Some("1700000040")]);
    assert_eq!(second.all(IETF), [Some(r#""per-user";q=2;w=60"#), Some(r#""per-user";r=0;t=20"#)]);

    let denied = server.get("/api/test", &ANN).await;
    assert_eq!(denied.status, 429);
    assert_eq!(denied.all(LEGACY), [Some("2"), Some("0"), Some("1700000040")]);
    assert_eq!(denied.all(IETF), [Some(r#""per-user";q=2;w=60"#), Some(r#""per-user";r=0;t=20"#)]);
    assert_eq!(
        denied.all(["retry-after", "content-type", "content-length", "cache-control"]),
        [Some("20"), Some("application/json"), Some("110"), Some("no-store")]
    );
    assert_eq!(
        denied.body,
        r#"{"error":"rate_limit_exceeded","message":"Too many requests. Please retry after 20 seconds.","retry_after":20}"#
    );
    assert_eq!(server.calls(), 2);

    clock.advance(SECOND * 20);
    assert_eq!(server.get("/api/test", &ANN).await.status, 200);
}

#[tokio::test]
async fn the_selected_header_families_are_sent() {
    const ALL: [&str; 8] = [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "ratelimit-limit",
        "ratelimit-remaining",
        "ratelimit-reset",
        "ratelimit-policy",
        "ratelimit",
    ];
    let table = [
        (&[][..], [None; 8]),
        (&["legacy"], [Some("5"), Some("4"), Some("1700000040"), None, None, None, None, None]),
        (&["draft6"], [None, None, None, Some("5"), Some("4"), Some("20"), Some("5;w=60"), None]),
        (&["draft7"], {
            let combined = Some("limit=5, remaining=4, reset=20");
            [None, None, None, None, None, None, Some("5;w=60"), combined]
        }),
        (&["ietf"], {
            let combined = Some(r#""a";r=4;t=20"#);
            [None, None, None, None, None, None, Some(r#""a";q=5;w=60"#), combined]
        }),
    ];
    for (names, expected) in table {
        let families = Families::from_names(names.iter().copied()).unwrap();
        let (gate, _) = gate_of(RuleSet::builder().rule(per_minute("a", 5)).headers(families));
        assert_eq!(Server::with(&gate).await.get("/", &[]).await.all(ALL), expected, "{names:?}");
    }
}

#[tokio::test]
async fn the_accept_header_selects_the_body() {
    let template = Body::template("<p>{{limit}}: wait {{retry_after}} s</p>", "text/html").unwrap();
    let (gate, _) = gate_of(RuleSet::builder().rule(per_minute("all", 1)).body(template));
    let server = Server::with(&gate).await;
    assert_eq!(server.get("/", &[]).await.status, 200);

    let html = server.get("/", &[]).await;
    assert_eq!((html.header("content-type"), &*html.body), (Some("text/html; charset=utf-8"), "<p>all: wait 20 s</p>"));
    let json = server.get("/", &[("accept", "application/json")]).await;
    assert_eq!(json.header("content-type"), Some("application/json"));
    assert!(json.body.starts_with(r#"{"error":"rate_limit_exceeded","#), "{}", json.body);
    let problem = server.get("/", &[("accept", "application/json;q=0.5, application/problem+json")]).await;
    assert_eq!(problem.header("content-type"), Some("application/problem+json"));
    let problem: serde_json::Value = serde_json::from_str(&problem.body).unwrap();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["violated-policies"], serde_json::json!(["all"]));
}

#[tokio::test]
async fn a_refused_head_request_gets_no_body() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let server = Server::with(&gate).await;
    assert_eq!(server.get("/", &[]).await.status, 200);
    for client in [http1(), http2()] {
        let whole = server.send(&client, Method::GET, "/", &[]).await;
        let head = server.send(&client, Method::HEAD, "/", &[]).await;
        assert_eq!((head.status, &*head.body), (429, ""));
        assert_eq!(head.header("content-length"), Some(&*whole.body.len().to_string()));
        assert_eq!(head.all(IETF), whole.all(IETF));
        assert_eq!(head.header("retry-after"), Some("20"));
    }
    assert_eq!(server.calls(), 1);
}

#[tokio::test]
async fn http2_gets_the_same_responses() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let server = Server::with(&gate).await;
    let client = http2();
    let allowed = server.send(&client, Method::GET, "/", &[]).await;
    assert_eq!((allowed.version, allowed.status, &*allowed.body), (Version::HTTP_2, 200, "hello"));
    assert_eq!(allowed.left(), Some(r#""all";r=0;t=20"#));
    let denied = server.send(&client, Method::POST, "/", &[]).await;
    assert_eq!((denied.version, denied.status, denied.header("retry-after")), (Version::HTTP_2, 429, Some("20")));
    assert!(denied.body.ends_with(r#""retry_after":20}"#), "{}", denied.body);
}

#[tokio::test]
async fn a_request_without_a_required_key_is_forbidden() {
    let (gate, _) = gate([per_minute("per-user", 1).key(user()).missing(Missing::Deny)]);
    let server = Server::with(&gate).await;
    let refused = server.get("/", &[]).await;
    assert_eq!((refused.status, refused.header("retry-after"), server.calls()), (403, None, 0));
    assert_eq!(
        refused.body,
        r#"{"error":"key_missing","message":"The request lacks header:x-user-id, which the limit counts by."}"#
    );
}

#[tokio::test]
async fn stricter_headers_of_the_service_inside_stay() {
    let (gate, _) = gate([per_minute("all", 100)]);
    let strict = async || [("ratelimit", r#""inner";r=3;t=9"#), ("x-ratelimit-remaining", "1000")];
    let app = axum::Router::new().fallback(strict).layer(super::server::layer(&gate));
    let answer = Server::serving(app).await.get("/", &[]).await;
    assert_eq!(answer.left(), Some(r#""inner";r=3;t=9"#));
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("99"));
}
