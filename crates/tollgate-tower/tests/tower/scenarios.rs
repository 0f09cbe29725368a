//! Scenarios from the specification, seen by a client.

use tollgate_rules::{KeyPart, Match};

use super::server::Server;
use super::{gate, per_minute, user};

#[tokio::test]
async fn the_eleventh_call_to_an_endpoint_takes_nothing_from_the_other_limits() {
    let endpoint = Match::everything().path("/api/expensive");
    let (gate, _) = gate([
        per_minute("global", 10_000),
        per_minute("user", 100).key(user()),
        per_minute("endpoint", 10).matching(endpoint).key(user()).key(KeyPart::path()),
    ]);
    let server = Server::with(&gate).await;
    let ann = [("x-user-id", "ann")];
    for left in (0..10).rev() {
        let answer = server.get("/api/expensive", &ann).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.left(), Some(&*format!(r#""endpoint";r={left};t=20"#)));
    }
    // In every spelling of the path.
    for path in ["/api/expensive", "/api//expensive", "/api/expensive/", "/api/%65xpensive"] {
        let denied = server.get(path, &ann).await;
        assert_eq!((denied.status, denied.header("retry-after")), (429, Some("20")), "{path}");
        assert_eq!(denied.header("x-ratelimit-limit"), Some("10"));
    }
    // The service would get the path as sent, and may read it differently.
    assert_eq!(server.get("/x/../api/expensive", &ann).await.status, 400);
    assert_eq!(server.calls(), 10);
    assert_eq!(server.get("/api/cheap", &ann).await.left(), Some(r#""user";r=89;t=20"#));
    assert_eq!(server.get("/api/expensive", &[("x-user-id", "bob")]).await.left(), Some(r#""endpoint";r=9;t=20"#));
}

#[tokio::test]
async fn search_has_its_own_limit_and_the_general_one() {
    let search = Match::everything().path("/search/**");
    let (gate, _) =
        gate([per_minute("general", 100).key(user()), per_minute("search", 10).matching(search).key(user())]);
    let server = Server::with(&gate).await;
    let ann = [("x-user-id", "ann")];
    for _ in 0..10 {
        assert_eq!(server.get("/search?q=rust", &ann).await.status, 200);
    }
    let denied = server.get("/search?q=rust", &ann).await;
    assert_eq!((denied.status, denied.left()), (429, Some(r#""search";r=0;t=20"#)));
    for left in (0..90).rev() {
        let answer = server.get("/users", &ann).await;
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some(&*left.to_string())));
    }
    assert_eq!(server.get("/users", &ann).await.status, 429);
}

#[tokio::test]
async fn requests_without_a_user_share_one_key() {
    let (gate, _) = gate([per_minute("per-user", 2).key(user())]);
    let server = Server::with(&gate).await;
    assert_eq!(server.get("/", &[]).await.status, 200);
    assert_eq!(server.get("/", &[("x-user-id", "")]).await.status, 200);
    assert_eq!(server.get("/", &[]).await.status, 429);
    assert_eq!(server.get("/", &[("x-user-id", "anonymous")]).await.status, 429);
    assert_eq!(server.get("/", &[("x-user-id", "ann")]).await.status, 200);
}
