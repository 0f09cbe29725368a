//! `/v1/authorize`, as reverse proxies use it.

use serde_json::json;
use testkit::folder::folder_with;
use testkit::http1::{Connection, Response};
use testkit::service::Server;
use testkit::tollgate::RULES;

const ONCE: &str = "limits:
  - { name: per-user, key: header:x-user-id, algorithm: fixed_window, align: first_request, limit: 1, window: 1h }
  - { name: posts, match: { methods: [POST], path: /api/**, hosts: [api.example.com] }, key: ip,
      algorithm: fixed_window, align: first_request, limit: 1, window: 1h }
";

fn send(connection: &mut Connection, line: &str, headers: &[(&str, &str)]) -> Response {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let host = if headers.contains("Host: ") { "" } else { "Host: 127.0.0.1:8090\r\n" };
    connection.send(format!("{line} HTTP/1.1\r\n{host}{headers}\r\n"));
    connection.receive()
}

/// Returns the headers of nginx for a request of a user.
fn of_user(user: &str) -> [(&str, &str); 3] {
    [("X-Original-URI", "/"), ("X-Original-Method", "GET"), ("X-User-Id", user)]
}

#[test]
fn an_allowed_request_gets_200_and_a_denied_one_the_response_for_the_client() {
    let server = Server::with_rules(ONCE);
    let connection = &mut server.connect();
    let allowed = send(connection, "GET /v1/authorize", &of_user("ann"));
    assert_eq!((allowed.status, allowed.text()), (200, ""));
    assert_eq!(allowed.header("x-ratelimit-remaining"), Some("0"));
    let denied = send(connection, "GET /v1/authorize", &of_user("ann"));
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("x-ratelimit-limit"), Some("1"));
    assert_eq!(denied.header("retry-after"), Some("3600"));
    assert_eq!(denied.json()["error"], "rate_limit_exceeded");
    let denied = send(connection, "GET /v1/authorize?deny_status=403", &of_user("ann"));
    assert_eq!(denied.status, 403);
    assert_eq!(denied.json()["error"], "rate_limit_exceeded");
    assert_eq!(send(connection, "GET /v1/authorize?deny_status=200", &of_user("ann")).status, 400);
}

#[test]
fn denied_requests_are_counted_for_the_admin_api() {
    let listeners = "service: { http: '127.0.0.1:0' }\nadmin: { listen: '127.0.0.1:0', show_keys: true }\n";
    let server = Server::in_folder(folder_with(&[(RULES, &format!("{listeners}{ONCE}"))]));
    let connection = &mut server.connect();
    let statuses = [(); 3].map(|()| send(connection, "GET /v1/authorize", &of_user("ann")).status);
    assert_eq!(statuses, [200, 429, 429]);
    let top = send(&mut Connection::to(server.address_of("admin")), "GET /v1/top", &[]).json();
    let key = &top["keys"][0];
    assert_eq!(
        (&key["limit"], &key["parts"], &key["count"]),
        (&json!("per-user"), &json!(["ann"]), &json!(2)),
        "{top}"
    );
}

#[test]
fn the_original_request_decides_which_limits_apply() {
    let server = Server::with_rules(ONCE);
    let connection = &mut server.connect();
    let forwarded = |method, address| {
        [
            ("X-Forwarded-Method", method),
            ("X-Forwarded-Uri", "/api/orders"),
            ("X-Forwarded-Host", "api.example.com"),
            ("X-Forwarded-For", address),
            ("X-User-Id", address),
        ]
    };
    // The first user of each address; only the limit on posts counts by address.
    let mut users = 0;
    let mut status = |connection: &mut Connection, method, address| {
        users += 1;
        let user = format!("user-{users}");
        let mut headers = forwarded(method, address);
        headers[4].1 = &user;
        send(connection, "GET /v1/authorize", &headers).status
    };
    assert_eq!(status(connection, "POST", "192.0.2.1"), 200);
    assert_eq!(status(connection, "POST", "192.0.2.1"), 429);
    assert_eq!(status(connection, "POST", "6.6.6.6, 192.0.2.1"), 429, "a client cannot choose its address");
    assert_eq!(status(connection, "POST", "192.0.2.2"), 200);
    assert_eq!(status(connection, "GET", "192.0.2.1"), 200);
    let envoy = |address| [("Host", "api.example.com"), ("X-Forwarded-For", address), ("X-User-Id", address)];
    // The original host is the host of this request, so it has to be served.
    assert_eq!(send(connection, "POST /v1/authorize/api/orders", &envoy("192.0.2.3")).status, 421);
    let rules = format!("service: {{ http: {{ listen: '127.0.0.1:0', hosts: [api.example.com] }} }}\n{ONCE}");
    let server = Server::in_folder(folder_with(&[(RULES, &rules)]));
    let connection = &mut server.connect();
    let mut envoy_status = |address| send(connection, "POST /v1/authorize/api/orders?a=b", &envoy(address)).status;
    assert_eq!(envoy_status("192.0.2.3"), 200);
    assert_eq!(envoy_status("192.0.2.3"), 429);
}

#[test]
fn a_grpc_request_is_denied_with_a_status_that_proxies_understand() {
    let server = Server::with_rules(ONCE);
    let connection = &mut server.connect();
    let [uri, method, user] = of_user("ann");
    let headers = [uri, method, user, ("Content-Type", "application/grpc"), ("TE", "trailers")];
    assert_eq!(send(connection, "POST /v1/authorize", &headers).status, 200);
    assert_eq!(send(connection, "POST /v1/authorize", &headers).status, 429);
}

#[test]
fn clients_of_a_proxy_may_be_browsers_but_a_browser_itself_is_refused() {
    let server = Server::with_rules(ONCE);
    let connection = &mut server.connect();
    let browser = [("Origin", "https://shop.example.com"), ("Sec-Fetch-Site", "cross-site")];
    let through_proxy = [&of_user("ann")[..], &browser].concat();
    assert_eq!(send(connection, "GET /v1/authorize", &through_proxy).status, 200);
    // A page cannot add the headers without a preflight, which is refused without any `Access-Control-Allow-*`.
    let preflight = [&browser[..], &[("Access-Control-Request-Headers", "x-original-uri")]].concat();
    for line in ["OPTIONS /v1/authorize", "GET /v1/authorize", "GET /v1/authorize/api", "POST /v1/authorize/"] {
        let response = send(connection, line, &preflight);
        assert_eq!(response.status, 400, "{line}");
        assert!(!response.headers.iter().any(|(name, _)| name.to_ascii_lowercase().starts_with("access-control")));
    }
    // With DNS rebinding a page can add them, but names its own host.
    let rebound = [&of_user("bob")[..], &[("Host", "evil.example.com")]].concat();
    assert_eq!(send(connection, "GET /v1/authorize", &rebound).status, 421);
    assert_eq!(send(connection, "GET /v1/authorize", &of_user("bob")).status, 200, "nothing was counted");
}

#[test]
fn a_proxy_authenticates_without_replacing_the_clients_authorization() {
    const TOKEN: &str = "0123456789abcdef";
    let rules = "service: { http: { listen: '127.0.0.1:0', tokens_file: tokens } }
limits:
  - { name: per-token, key: header:authorization, algorithm: fixed_window, align: first_request, limit: 1, window: 1h }
";
    let server = Server::in_folder(folder_with(&[(RULES, rules), ("tokens", TOKEN)]));
    let connection = &mut server.connect();
    let mut status = |headers: &[(&str, &str)]| {
        let headers = [&of_user("ann")[..], headers].concat();
        send(connection, "GET /v1/authorize", &headers).status
    };
    assert_eq!(status(&[]), 401);
    let refused = send(&mut server.connect(), "GET /v1/authorize", &[("X-Forwarded-Uri", "/")]);
    assert!(refused.json()["message"].as_str().is_some_and(|message| message.contains("X-Tollgate-Token: TOKEN")));
    assert_eq!(status(&[("Authorization", "Bearer of-the-client")]), 401);
    assert_eq!(status(&[("X-Tollgate-Token", "of-nobody-0123456789")]), 401);
    assert_eq!(status(&[("X-Tollgate-Token", TOKEN), ("X-Tollgate-Token", TOKEN)]), 401);
    for client in ["Bearer ann", "Bearer bob"] {
        let headers = [("X-Tollgate-Token", TOKEN), ("Authorization", client)];
        assert_eq!((status(&headers), status(&headers)), (200, 429), "{client}");
    }
    // The proxy's own token is nobody's key: all such requests count as anonymous.
    let bearer = [("Authorization", "Bearer 0123456789abcdef"), ("Host", "api.example.com")];
    assert_eq!((status(&bearer), status(&[("X-Tollgate-Token", TOKEN)])), (200, 429));
}

#[test]
fn a_problem_with_the_original_request_gets_the_status_that_the_proxy_passes_on() {
    let server = Server::with_rules(ONCE);
    let connection = &mut server.connect();
    for (name, value) in [("X-Original-URI", "/%2e%2e/a\\b"), ("X-Original-URI", "/a#b"), ("X-Forwarded-Uri", "/")] {
        let mut headers = of_user("ann").to_vec();
        headers.retain(|(known, _)| *known != name);
        headers.push((name, value));
        assert_eq!(send(connection, "GET /v1/authorize", &headers).status, 400, "{name}: {value}");
        assert_eq!(send(connection, "GET /v1/authorize?deny_status=403", &headers).status, 403, "{name}: {value}");
    }
    // The operator sees this one at once.
    assert_eq!(send(connection, "GET /v1/authorize?deny_status=403", &[("X-Original-URI", "/")]).status, 400);
}
