//! Limits see what upstreams get: one form of the path, host, method and key values.

use http::{HeaderValue, Request};
use testkit::client::{Protocol, each_http2, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::upstream::{Raw, full, runtime};
use testkit::wait::until;

use crate::http2;

const SPENT: &str = "algorithm: fixed_window, limit: 1, window: 10220d";

/// Starts a gateway whose limits by path are spent.
fn gateway(protocol: Protocol, settings: &str, upstream: &Raw, limits: &[&str]) -> Gateway {
    let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
    protocol.start(&site(settings, &[route], &limits.join(",\n  ")))
}

fn login_limit() -> String {
    format!("{{ name: login, match: {{ path: /api/** }}, {SPENT} }}")
}

#[test]
fn every_reading_of_a_path_meets_its_limit() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "", &upstream, &[&login_limit()]);
        assert_eq!(gateway.get("/api/login").status, 200);
        for target in [
            "/api/login",
            "/api%2Flogin",
            "/api%2flogin?x",
            "/api%5clogin",
            "/api;a/login",
            "/api/login;jsessionid=1",
            "/;x/api/login",
            "//api/login",
            "/x/../api/login",
            "/api//../login",
            "/%61pi/login",
            "/api%2F",
        ] {
            assert_eq!(gateway.get(target).status, 429, "{target}");
        }
        for target in ["/apis", "/x%2Fapi", "/x;/api", "/api%252Flogin"] {
            assert_eq!(gateway.get(target).status, 200, "{target}");
        }
    });
}

#[test]
fn the_upstream_gets_the_path_that_limits_saw() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "", &upstream, &[]);
        let mut connection = gateway.client();
        for (sent, forwarded) in [
            ("/graphql/../x?y=..%2F", "/x?y=..%2F"),
            ("/a//b/", "/a/b/"),
            ("/%61%2db", "/a-b"),
            ("/a%2fb;c", "/a%2Fb;c"),
            ("/api//../login", "/api/login"),
            ("/users/%40me", "/users/@me"),
            ("/a%3bb", "/a%3Bb"),
        ] {
            let answer = connection.get(sent);
            assert_eq!(answer.status, 200, "{sent}");
            assert!(answer.text().starts_with(&format!("GET {forwarded} HTTP/1.1\r\n")), "{sent}: {}", answer.text());
        }
        // A target without a path means the root. HTTP/2 has no such targets.
        if protocol.is_http2() {
            return;
        }
        for (rest, forwarded) in [("?y=1", "/?y=1"), ("", "/"), ("#y", "/"), ("#", "/"), ("#?q", "/"), ("/", "/")] {
            let target = format!("{}://{}{rest}", protocol.scheme(), gateway.address);
            let answer = connection.ask(format!("GET {target} HTTP/1.1\r\nHost: {}\r\n\r\n", gateway.address));
            assert!(answer.text().starts_with(&format!("GET {forwarded} HTTP/1.1\r\n")), "{target}: {}", answer.text());
        }
    });
}

#[test]
fn ambiguous_requests_are_refused_with_their_reason() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("", &[route], "")));
        let cases = [
            ("GET /a/%2e%2e/b HTTP/1.1\r\nHost: h", "dot_segment"),
            ("GET /x/..;/api HTTP/1.1\r\nHost: h", "dot_segment"),
            ("GET /x/..%2fapi HTTP/1.1\r\nHost: h", "dot_segment"),
            ("GET /login%0a HTTP/1.1\r\nHost: h", "control_character"),
            ("GET /login%00 HTTP/1.1\r\nHost: h", "control_character"),
            ("GET /a\\b HTTP/1.1\r\nHost: h", "backslash"),
            ("GET / HTTP/1.1\r\nHost: node.test:x", "invalid_host"),
            ("GET / HTTP/1.1\r\nHost: node.test:80:90", "invalid_host"),
            ("GET / HTTP/1.1\r\nHost: [node.test]", "invalid_host"),
            ("post / HTTP/1.1\r\nHost: h", "method_case"),
            ("GET * HTTP/1.1\r\nHost: h", "asterisk_target"),
            ("GET / HTTP/1.1\r\nHost: h\r\nHost: i", "several_hosts"),
        ];
        for (head, reason) in cases {
            // Requests that no HTTP/2 library sends.
            if protocol.is_http2() && ["invalid_host", "asterisk_target"].contains(&reason) {
                continue;
            }
            let mut connection = gateway.client();
            let answer = connection.ask(format!("{head}\r\n\r\n"));
            assert_eq!(answer.status, 400, "{head}: {}", answer.text());
            assert!(answer.text().contains(&format!(r#""reason":"{reason}""#)), "{head}: {}", answer.text());
            assert!(protocol.is_http2() || connection.is_closed(), "{head}");
        }
        let long = format!("GET / HTTP/1.1\r\nHost: {}example.com\r\n\r\n", "a.".repeat(130));
        assert!(gateway.client().ask(long).text().contains("invalid_host"));
        assert_eq!(upstream.requests(), 0);
        gateway.await_metric(r#"tollgate_ambiguous_requests_total{reason="dot_segment"}"#, 3);
        gateway.await_metric(
            r#"tollgate_ambiguous_requests_total{reason="invalid_host"}"#,
            if protocol.is_http2() { 1 } else { 4 },
        );
        gateway.await_metric(r#"tollgate_ambiguous_requests_total{reason="several_hosts"}"#, 1);
    });
}

#[test]
fn a_flood_of_unreadable_requests_is_banned() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let limits = [
            "{ name: ip, key: ip, limit: 1000000, window: 1h, ban: { after: 3, within: 1m, for: 1h } }",
            "{ name: key, key: header:x-api-key, missing: skip, limit: 100, window: 1h }",
            "{ name: session, key: 'cookie:session', missing: skip, limit: 100, window: 1h }",
            "{ name: page, key: 'query:page', missing: skip, limit: 100, window: 1h }",
        ];
        let (long_head, long_target) = ("x: y\r\n".repeat(200), "a".repeat(70_000));
        for (bad, status) in [
            ("GET /%2e%2e/ HTTP/1.1\r\nHost: h\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: h\r\nX-Api-Key: a\r\nX-Api-Key: b\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: h\r\nCookie: session=a; session=b\r\n\r\n", 400),
            ("GET /?page=1&page=2 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: h\r\nX_User: a\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", 400),
            // Requests that no HTTP/2 library sends.
            ("GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\n\r\n", 400),
            ("GET / HTTP/1.1\nHost: h\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
            ("GET /\u{7f} HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n", 400),
            ("CONNECT h:80 HTTP/1.1\r\nHost: h:80\r\n\r\n", 405),
            (&format!("GET / HTTP/1.1\r\nHost: h\r\n{long_head}\r\n"), 431),
            (&format!("GET /{long_target} HTTP/1.1\r\nHost: h\r\n\r\n"), 414),
        ]
        .into_iter()
        .take(if protocol.is_http2() { 6 } else { usize::MAX })
        {
            let settings = "underscore_headers: refuse\n  max_head: 128KiB";
            let gateway = gateway(protocol, settings, &upstream, &limits);
            for _ in 0..3 {
                assert_eq!(gateway.get("/").status, 200);
                assert_eq!(gateway.client().ask(bad).status, status, "{}", &bad[..bad.len().min(80)]);
            }
            // A head that could not be parsed counts once its connection has ended.
            until(&format!("the ban for {:?}", &bad[..bad.len().min(80)]), || {
                let answer = gateway.get("/");
                answer.status == 429 && answer.text().contains(r#""error":"banned""#)
            });
        }
    });
}

#[test]
fn path_settings_describe_upstreams() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let url = upstream.url();
        let routes = [
            format!("{{ path: /strict/**, paths: {{ encoded_slash: refuse, parameters: refuse }}, upstream: {url} }}"),
            format!("{{ path: /java/**, paths: {{ encoded_slash: decode, parameters: strip }}, upstream: {url} }}"),
            format!("{{ path: /**, upstream: {url} }}"),
        ];
        let settings = "paths: { encoded_slash: keep, parameters: keep, case: insensitive }";
        let limit = format!("{{ name: deep, match: {{ path: [/a/b, /java/a/b] }}, key: path, {SPENT} }}");
        let gateway = protocol.start(&site(settings, &routes, &limit));
        assert_eq!(gateway.get("/a/b").status, 200);
        assert_eq!(gateway.get("/A/B").status, 429, "case does not count");
        assert_eq!(gateway.get("/a%2Fb").status, 200, "an encoded slash is data here");
        assert_eq!(gateway.get("/a;x/b").status, 200);
        assert!(gateway.get("/strict/a%2Fb").text().contains("paths.encoded_slash"));
        assert!(gateway.get("/strict/a;b").text().contains("paths.parameters"));
        let answer = gateway.get("/JAVA/a;x/b");
        assert!(answer.text().starts_with("GET /JAVA/a/b HTTP/1.1\r\n"), "{}", answer.text());
        assert_eq!(gateway.get("/java/a%2Fb;v=1").status, 429, "the same path in another spelling");
    });
}

/// Requests with values that frameworks interpret differently, against a spent key and one on a block list.
#[test]
fn spellings_of_a_key_count_as_one_or_are_refused() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let keys = ["header:x-api-key", "cookie:s", "query:key"];
        let limit = |(number, key): (usize, &&str)| {
            format!("{{ name: n{number}, key: '{key}', missing: skip, blocked: {{ keys: [BAD] }}, {SPENT} }}")
        };
        let limits: Vec<String> = keys.iter().enumerate().map(limit).collect();
        let limits: Vec<&str> = limits.iter().map(String::as_str).collect();
        let gateway = gateway(protocol, "", &upstream, &limits);
        let ask = |target: &str, headers: &str| {
            let request = format!("GET {target} HTTP/1.1\r\nHost: h\r\n{headers}\r\n");
            gateway.client().ask(request).status
        };
        assert_eq!(ask("/?key=REAL", "X-Api-Key: REAL\r\nCookie: s=REAL\r\n"), 200);
        for (target, headers, wanted) in [
            ("/", "X-Api-Key: junk\r\nX-Api-Key: REAL\r\n", 400),
            ("/", "X-Api-Key: REAL\r\nX-Api-Key: REAL\r\n", 429),
            ("/", "X-Api-Key: junk\r\nX-Api-Key: BAD\r\n", 400),
            ("/", "X-Api-Key:  REAL \t\r\n", 429),
            ("/", "Cookie: s=junk; s=REAL\r\n", 400),
            ("/", "Cookie: s=junk\r\nCookie: s=REAL\r\n", 400),
            ("/", "Cookie: s=\"REAL\"\r\n", 429),
            ("/", "Cookie: s=\"\\122EAL\"\r\n", 429),
            ("/", "Cookie: s=%52EAL\r\n", 429),
            ("/", "Cookie: a=1, s=REAL\r\n", 429),
            ("/", "Cookie: s=BAD\r\n", 403),
            ("/?key=junk&key=REAL", "", 400),
            ("/?k%65y=R%45AL", "", 429),
            ("/?key[]=REAL", "", 429),
            ("/?a=1;key=REAL", "", 429),
            ("/?key=REAL+", "", 429),
            ("/?other=1&other=2&key=new", "", 200),
        ] {
            assert_eq!(ask(target, headers), wanted, "{target} {headers}");
        }
    });
}

#[test]
fn http_2_is_held_to_the_same_form() {
    each_http2(|protocol| {
        let upstream = Raw::named("one");
        let key = format!("{{ name: key, key: header:x-api-key, missing: skip, {SPENT} }}");
        let gateway = gateway(protocol, "", &upstream, &[&login_limit(), &key]);
        runtime().block_on(async {
            let mut sender = http2::connect_over(protocol, gateway.address).await;
            let mut ask = async |method: &str, path: &str, key: Option<&[u8]>| {
                let mut request =
                    Request::builder().method(method).uri(format!("{}://{}{path}", protocol.scheme(), gateway.address));
                if let Some(key) = key {
                    request = request.header("x-api-key", HeaderValue::from_bytes(key).unwrap());
                }
                http2::whole(sender.send_request(request.body(full("")).unwrap()).await.unwrap()).await
            };
            assert_eq!(ask("GET", "/api/login", Some(b"REAL")).await.0, 200);
            assert_eq!(ask("GET", "/api%2Flogin", None).await.0, 429);
            assert_eq!(ask("GET", "/x", Some(b"REAL")).await.0, 429);
            for key in [&b" REAL"[..], b"REAL ", b"REAL\t"] {
                let (status, body, _) = ask("GET", "/x", Some(key)).await;
                assert_eq!(status, 400, "{key:?}");
                assert!(String::from_utf8_lossy(&body).contains("x-api-key"));
            }
            assert_eq!(ask("GET", "/x", Some(b"REAL\xA0")).await.0, 429);
            assert_eq!(ask("GET", "/a/%2e%2e/b", None).await.0, 400);
            assert_eq!(ask("get", "/x", None).await.0, 400);
            assert_eq!(ask("GET", "?y=1", None).await.0, 200);
        });
        assert_eq!(upstream.requests(), 2);
    });
}

#[test]
fn unreadable_requests_do_not_ban_clients_that_share_a_key() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let limit = "{ name: all, limit: 100, window: 1h, ban: { after: 1, within: 1m, for: 1h } }";
        let gateway = gateway(protocol, "", &upstream, &[limit]);
        for _ in 0..3 {
            assert_eq!(gateway.get("/%2e%2e/").status, 400);
            assert_eq!(gateway.get("/").status, 200);
        }
    });
}

#[test]
fn a_host_header_may_repeat_the_authority_with_its_default_port() {
    each_http2(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "", &upstream, &[]);
        let (default, other) = if protocol == Protocol::Http2Tls { ("443", "80") } else { ("80", "443") };
        for (authority, host, status) in [
            ("h", "h".to_owned(), 200),
            ("h", "H".to_owned(), 200),
            ("h", "h.".to_owned(), 200),
            ("h", format!("h:{default}"), 200),
            ("h", "h:".to_owned(), 200),
            ("h", format!("h:{other}"), 400),
            ("h:81", "h:81".to_owned(), 200),
            ("h:81", "h".to_owned(), 400),
            ("h", "i".to_owned(), 400),
        ] {
            let answer = gateway.client().ask(format!("GET / HTTP/1.1\r\nHost: {authority}\r\nHost: {host}\r\n\r\n"));
            assert_eq!(answer.status, status, "{authority} {host}: {}", answer.text());
        }
    });
}
