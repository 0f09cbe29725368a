//! Headers that a route sets to facts about the request: upstreams can trust them.

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::json;
use testkit::certificates::{Authority, params};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, per_user, site};
use testkit::tollgate::{RULES, run_in};
use testkit::upstream::{AnyBody, Served, Speaks, full, runtime};

use crate::http2::{connect, get, whole, with_trailers};
use crate::tls;
use crate::tokens::{SECRET, token};

/// The headers of every test, as a client would forge them.
const FORGED: [(&str, &str); 8] = [
    ("x-client", "192.0.2.66"),
    ("X-CLIENT", "192.0.2.67"),
    ("x_client", "192.0.2.68"),
    ("x.client", "192.0.2.69"),
    ("x!user", "root"),
    ("x-user", "root"),
    ("x-limit", "none"),
    ("x-route", "other"),
];

const SET: &str = "request_headers: { set: { X-Client: { from: ip }, X-Network: { from: ip/48 }, X-User: { from: \
                   'jwt:sub' }, X-Limit: { from: limit }, X-Route: { from: route }, X-Fixed: text } }";

/// Responds with the headers and trailers of the request whose names begin with `x-`, sorted, one per line.
async fn lines(request: Request<Incoming>) -> Response<AnyBody> {
    let headers = request.headers().clone();
    let trailers = request.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
    let line = |map: &HeaderMap, mark: &str| -> Vec<String> {
        let pairs = map.iter().filter(|(name, _)| name.as_str().starts_with("x"));
        let ours = pairs.filter(|(name, _)| !name.as_str().starts_with("x-forwarded") && *name != "x-request-id");
        ours.map(|(name, value)| format!("{mark}{name}: {}", value.to_str().unwrap())).collect()
    };
    let mut lines = [line(&headers, ""), line(&trailers, "trailer ")].concat();
    lines.sort_unstable();
    Response::new(full(lines.join("\n")))
}

fn upstreams() -> [(Served, &'static str); 2] {
    [(Served::start(Speaks::Http1, lines), "http"), (Served::start(Speaks::Http2, lines), "h2c")]
}

fn gateway(settings: &str, scheme: &str, upstream: &Served, limits: &str) -> Gateway {
    let route = format!("{{ name: api, path: /**, upstream: '{scheme}://{}', {SET} }}", upstream.address);
    let settings = format!("underscore_headers: keep\n  {settings}");
    let rules = format!("jwt: {{ key_file: secret.key, algorithms: [HS256] }}\n{}", site(&settings, &[route], limits));
    Gateway::in_folder(folder_with(&[(RULES, &rules), ("secret.key", SECRET)]))
}

/// Sends a request with these headers over HTTP/1 and HTTP/2. Returns the lines that the upstream has seen, which are equal.
fn seen(gateway: &Gateway, headers: &[(&str, &str)]) -> Vec<String> {
    let text: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let over_http1 = gateway.connect().ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{text}\r\n")).text().to_owned();
    let over_http2 = runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let request = headers.iter().fold(get(gateway, "/"), |request, (name, value)| request.header(*name, *value));
        let (_, body, _) = whole(sender.send_request(request.body(full("")).unwrap()).await.unwrap()).await;
        String::from_utf8(body.to_vec()).unwrap()
    });
    assert_eq!(over_http1, over_http2);
    over_http1.lines().map(str::to_owned).collect()
}

#[test]
fn facts_replace_the_headers_of_the_client() {
    for (upstream, scheme) in upstreams() {
        let gateway = gateway("", scheme, &upstream, &per_user(100));
        let bearer = format!("Bearer {}", token(SECRET, &json!({ "sub": "ann" })));
        let own = [("authorization", &*bearer), ("x-user-id", "7")];
        let expected = [
            "x-client: 127.0.0.1",
            "x-fixed: text",
            "x-limit: user",
            "x-network: 127.0.0.1",
            "x-route: api",
            "x-user-id: 7",
            "x-user: ann",
        ];
        assert_eq!(seen(&gateway, &own), expected, "{scheme}");
        assert_eq!(seen(&gateway, &[&own[..], &FORGED].concat()), expected, "{scheme}");
    }
}

#[test]
fn missing_facts_remove_the_headers_of_the_client() {
    for (upstream, scheme) in upstreams() {
        let gateway = gateway("", scheme, &upstream, "");
        let forged = token("ffffffffffffffffffffffffffffffff", &json!({ "sub": "ann" }));
        let expected = ["x-client: 127.0.0.1", "x-fixed: text", "x-network: 127.0.0.1", "x-route: api"];
        assert_eq!(seen(&gateway, &FORGED), expected, "{scheme}");
        let bearer = format!("Bearer {forged}");
        assert_eq!(seen(&gateway, &[&FORGED[..], &[("authorization", &*bearer)]].concat()), expected, "{scheme}");
    }
}

#[test]
fn the_address_is_the_clients_behind_a_trusted_proxy_and_whole() {
    let (upstream, scheme) = &upstreams()[0];
    let gateway = gateway("trusted_proxies: [127.0.0.1/32]", scheme, upstream, "");
    let lines = seen(&gateway, &[("x-forwarded-for", "2001:db8:1:2::7")]);
    assert!(lines.contains(&"x-client: 2001:db8:1:2::7".to_owned()), "{lines:?}");
    assert!(lines.contains(&"x-network: 2001:db8:1::/48".to_owned()), "{lines:?}");
}

#[test]
fn two_tokens_or_a_long_claim_are_no_fact() {
    for (upstream, scheme) in upstreams() {
        let gateway = gateway("", scheme, &upstream, "");
        let bearer = |sub: &str| format!("Bearer {}", token(SECRET, &json!({ "sub": sub })));
        let (ann, bob, long) = (bearer("ann"), bearer("bob"), bearer(&"a".repeat(5_000)));
        for tokens in [&[&*ann, &bob][..], &[&long]] {
            let headers: Vec<_> = tokens.iter().map(|token| ("authorization", *token)).collect();
            let lines = seen(&gateway, &headers);
            assert!(lines.contains(&"x-client: 127.0.0.1".to_owned()), "{lines:?}");
            assert!(!lines.iter().any(|line| line.starts_with("x-user")), "{lines:?}");
        }
    }
}

#[test]
fn a_claim_cannot_add_a_header() {
    for (upstream, scheme) in upstreams() {
        let gateway = gateway("", scheme, &upstream, "");
        let bearer = format!("Bearer {}", token(SECRET, &json!({ "sub": " é\r\nx-admin: 1" })));
        let lines = seen(&gateway, &[("authorization", &bearer)]);
        assert!(lines.contains(&"x-user: %20%C3%A9%0D%0Ax-admin: 1".to_owned()), "{lines:?}");
        assert!(!lines.iter().any(|line| line.starts_with("x-admin")), "{lines:?}");
    }
}

#[test]
fn trailers_cannot_pretend_to_be_facts() {
    let upstream = Served::start(Speaks::Http2, lines);
    assert_eq!(trailers_through(&gateway("", "h2c", &upstream, "")), ["trailer x-sum: 1"]);
    let edits = "request_headers: { set: { X-User: guest, X-Fixed: text }, remove: [X-Client] }";
    let route = format!("{{ path: /**, upstream: 'h2c://{}', {edits} }}", upstream.address);
    assert_eq!(trailers_through(&Gateway::start(&site("", &[route], ""))), ["trailer x-sum: 1"]);
}

/// Sends trailers with the names of changed headers, over HTTP/2 and HTTP/1, and returns those that arrive over both.
fn trailers_through(gateway: &Gateway) -> Vec<String> {
    let trailers = [("x-user", "root"), ("x.client", "192.0.2.66"), ("x-fixed", "other"), ("x-sum", "1")];
    let over_http2 = runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let request = Request::post(format!("http://{}/", gateway.address));
        let request = request.body(with_trailers(Bytes::from_static(b"hello"), &trailers)).unwrap();
        whole(sender.send_request(request).await.unwrap()).await.1
    });
    let over_http1 = gateway.connect().ask(
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: x-user, x.client, x-sum\r\n\r\n\
         5\r\nhello\r\n0\r\nX-User: root\r\nX.Client: 192.0.2.66\r\nX-Fixed: other\r\nX-Sum: 1\r\n\r\n",
    );
    let [over_http2, over_http1] = [std::str::from_utf8(&over_http2).unwrap(), over_http1.text()]
        .map(|seen| seen.lines().filter(|line| line.starts_with("trailer ")).map(str::to_owned).collect::<Vec<_>>());
    assert_eq!(over_http2, over_http1);
    over_http1
}

#[test]
fn the_name_in_a_verified_certificate_is_a_fact() {
    let upstream = Served::start(Speaks::Http1, lines);
    let (authority, people) = (Authority::new(), Authority::new());
    let signed = authority.sign(&["localhost"]);
    let tls =
        "tls: { certificates: { cert: cert.pem, key: key.pem }, client_ca: people.pem, client_certificates: optional }";
    let route = format!(
        "{{ path: /**, upstream: 'http://{}', request_headers: {{ set: {{ X-Name: {{ from: 'cert:cn' }} }} }} }}",
        upstream.address
    );
    let (rules, pem) = (site(tls, &[route], ""), people.pem());
    let files = [(RULES, &*rules), ("cert.pem", &signed.cert), ("key.pem", &signed.key), ("people.pem", &pem)];
    let gateway = Gateway::in_folder(folder_with(&files));
    let mut ann = params(&["ann.example"]);
    ann.distinguished_name.push(rcgen::DnType::CommonName, "Ann");
    let ask = |own: Option<&testkit::certificates::Signed>| {
        let mut connection = tls::connect(&gateway, &tls::client(&authority, own, &[]), "localhost");
        connection.ask("GET / HTTP/1.1\r\nHost: h\r\nX-Name: Eve\r\n\r\n").text().to_owned()
    };
    assert_eq!(ask(Some(&people.sign_params(ann))), "x-name: Ann");
    assert_eq!(ask(None), "");
}

#[test]
fn explain_shows_the_values() {
    let route = format!("{{ path: /**, upstream: 'http://127.0.0.1:9', {SET} }}");
    let rules = format!("jwt: {{ key_file: secret.key, algorithms: [HS256] }}\n{}", site("", &[route], &per_user(100)));
    let folder = folder_with(&[(RULES, &rules), ("secret.key", SECRET)]);
    let explain = |arguments: &[&str]| {
        let arguments = [&["explain", "--config", RULES, "GET", "/a", "--ip", "2001:db8::7"], arguments].concat();
        String::from_utf8(run_in(folder.path(), &arguments).stdout).unwrap()
    };
    let text = explain(&["-H", "X-User-Id: 7", "-H", "X-User: root"]);
    for line in [
        "  X-Client: 2001:db8::7 (from ip)\n",
        "  X-Limit: user (from limit)\n",
        "  X-User is removed, because the request has no jwt:sub\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&explain(&["-H", "X-User-Id: 7", "--json"])).unwrap();
    let headers = &json["route"]["fact_headers"];
    assert_eq!((&headers["X-Client"], &headers["X-User"]), (&json!("2001:db8::7"), &json!(null)));
    // The gateway knows the address of every client.
    let without_address = |arguments: &[&str]| {
        let arguments = [&["explain", "--config", RULES, "GET", "/a"], arguments].concat();
        String::from_utf8(run_in(folder.path(), &arguments).stdout).unwrap()
    };
    let text = without_address(&[]);
    assert!(text.contains("  X-Client: from ip, which is unknown: use --ip\n"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&without_address(&["--json"])).unwrap();
    let headers = json["route"]["fact_headers"].as_object().unwrap();
    assert!(headers.contains_key("X-User") && !headers.contains_key("X-Client"), "{headers:?}");
    std::fs::write(folder.path().join(RULES), rules.replace("'http://127.0.0.1:9'", "echo")).unwrap();
    assert!(!explain(&[]).contains("X-Client"), "the echo server gets no such headers");
}
