//! Headers that a route sets to facts about the request: upstreams can trust them.

use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::json;
use testkit::certificates::{Authority, params};
use testkit::client::{Protocol, each_protocol, each_tls};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, per_user, site};
use testkit::tollgate::{RULES, run_in};
use testkit::upstream::{AnyBody, Served, Speaks, full, runtime};
use tokio_rustls::TlsConnector;

use crate::http2;
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

fn gateway(protocol: Protocol, settings: &str, scheme: &str, upstream: &Served, limits: &str) -> Gateway {
    let route = format!("{{ name: api, path: /**, upstream: '{scheme}://{}', {SET} }}", upstream.address);
    let settings = format!("underscore_headers: keep\n  {settings}");
    let rules = format!("jwt: {{ key_file: secret.key, algorithms: [HS256] }}\n{}", site(&settings, &[route], limits));
    protocol.start_in(folder_with(&[(RULES, &rules), ("secret.key", SECRET)]))
}

/// Sends a request with these headers. Returns the lines that the upstream has seen.
fn seen(gateway: &Gateway, headers: &[(&str, &str)]) -> Vec<String> {
    let text: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let answer = gateway.client().ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{text}\r\n"));
    answer.text().lines().map(str::to_owned).collect()
}

#[test]
fn facts_replace_the_headers_of_the_client() {
    each_protocol(|protocol| {
        for (upstream, scheme) in upstreams() {
            let gateway = gateway(protocol, "", scheme, &upstream, &per_user(100));
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
    });
}

#[test]
fn missing_facts_remove_the_headers_of_the_client() {
    each_protocol(|protocol| {
        for (upstream, scheme) in upstreams() {
            let gateway = gateway(protocol, "", scheme, &upstream, "");
            let forged = token("ffffffffffffffffffffffffffffffff", &json!({ "sub": "ann" }));
            let expected = ["x-client: 127.0.0.1", "x-fixed: text", "x-network: 127.0.0.1", "x-route: api"];
            assert_eq!(seen(&gateway, &FORGED), expected, "{scheme}");
            let bearer = format!("Bearer {forged}");
            assert_eq!(seen(&gateway, &[&FORGED[..], &[("authorization", &*bearer)]].concat()), expected, "{scheme}");
        }
    });
}

#[test]
fn the_address_is_the_clients_behind_a_trusted_proxy_and_whole() {
    each_protocol(|protocol| {
        let (upstream, scheme) = &upstreams()[0];
        let gateway = gateway(protocol, "trusted_proxies: [127.0.0.1/32]", scheme, upstream, "");
        let lines = seen(&gateway, &[("x-forwarded-for", "2001:db8:1:2::7")]);
        assert!(lines.contains(&"x-client: 2001:db8:1:2::7".to_owned()), "{lines:?}");
        assert!(lines.contains(&"x-network: 2001:db8:1::/48".to_owned()), "{lines:?}");
    });
}

#[test]
fn two_tokens_or_a_long_claim_are_no_fact() {
    each_protocol(|protocol| {
        for (upstream, scheme) in upstreams() {
            let gateway = gateway(protocol, "", scheme, &upstream, "");
            let bearer = |sub: &str| format!("Bearer {}", token(SECRET, &json!({ "sub": sub })));
            let (ann, bob, long) = (bearer("ann"), bearer("bob"), bearer(&"a".repeat(5_000)));
            for tokens in [&[&*ann, &bob][..], &[&long]] {
                let headers: Vec<_> = tokens.iter().map(|token| ("authorization", *token)).collect();
                let lines = seen(&gateway, &headers);
                assert!(lines.contains(&"x-client: 127.0.0.1".to_owned()), "{lines:?}");
                assert!(!lines.iter().any(|line| line.starts_with("x-user")), "{lines:?}");
            }
        }
    });
}

#[test]
fn a_claim_cannot_add_a_header() {
    each_protocol(|protocol| {
        for (upstream, scheme) in upstreams() {
            let gateway = gateway(protocol, "", scheme, &upstream, "");
            let bearer = format!("Bearer {}", token(SECRET, &json!({ "sub": " é\r\nx-admin: 1" })));
            let lines = seen(&gateway, &[("authorization", &bearer)]);
            assert!(lines.contains(&"x-user: %20%C3%A9%0D%0Ax-admin: 1".to_owned()), "{lines:?}");
            assert!(!lines.iter().any(|line| line.starts_with("x-admin")), "{lines:?}");
        }
    });
}

#[test]
fn trailers_cannot_pretend_to_be_facts() {
    each_protocol(|protocol| {
        let upstream = Served::start(Speaks::Http2, lines);
        assert_eq!(trailers_through(&gateway(protocol, "", "h2c", &upstream, "")), ["trailer x-sum: 1"]);
        let edits = "request_headers: { set: { X-User: guest, X-Fixed: text }, remove: [X-Client] }";
        let route = format!("{{ path: /**, upstream: 'h2c://{}', {edits} }}", upstream.address);
        assert_eq!(trailers_through(&protocol.start(&site("", &[route], ""))), ["trailer x-sum: 1"]);
    });
}

/// Sends trailers with the names of changed headers, and returns those that arrive.
fn trailers_through(gateway: &Gateway) -> Vec<String> {
    let answer = gateway.client().ask(
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: x-user, x.client, x-sum\r\n\r\n\
         5\r\nhello\r\n0\r\nX-User: root\r\nX.Client: 192.0.2.66\r\nX-Fixed: other\r\nX-Sum: 1\r\n\r\n",
    );
    answer.text().lines().filter(|line| line.starts_with("trailer ")).map(str::to_owned).collect()
}

#[test]
fn the_name_in_a_verified_certificate_is_a_fact() {
    each_tls(|protocol| {
        let upstream = Served::start(Speaks::Http1, lines);
        let (authority, people) = (Authority::new(), Authority::new());
        let signed = authority.sign(&["localhost"]);
        let tls = "tls: { certificates: { cert: cert.pem, key: key.pem }, client_ca: people.pem, client_certificates: optional }";
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
            if !protocol.is_http2() {
                let mut connection = tls::connect(&gateway, &tls::client(&authority, own, &[]), "localhost");
                return connection.ask("GET / HTTP/1.1\r\nHost: h\r\nX-Name: Eve\r\n\r\n").text().to_owned();
            }
            runtime().block_on(async {
                let tcp = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
                let connector = TlsConnector::from(tls::client(&authority, own, &["h2"]));
                let stream = connector.connect("localhost".try_into().unwrap(), tcp).await.unwrap();
                let request = Request::get("https://localhost/").header("x-name", "Eve").body(full("")).unwrap();
                let response = http2::speak(stream).await.send_request(request).await.unwrap();
                String::from_utf8(http2::whole(response).await.1.to_vec()).unwrap()
            })
        };
        assert_eq!(ask(Some(&people.sign_params(ann))), "x-name: Ann");
        assert_eq!(ask(None), "");
    });
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
