//! Headers that describe the client and the connection to upstreams, and whose headers are trusted.

use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use testkit::client::{Protocol, each_http1, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::skip::has_ipv6;
use testkit::upstream::{Raw, ReceivedRequest, Served, Speaks, full};

/// Returns the request that the upstream got for these headers, and the ID that the client got back.
fn forwarded_headers(gateway: &Gateway, headers: &str) -> (ReceivedRequest, Option<String>) {
    let answer = gateway.client().ask(format!("GET / HTTP/1.1\r\nHost: shop.example.com:81\r\n{headers}\r\n"));
    let id = answer.header("x-request-id").map(str::to_owned);
    (ReceivedRequest { head: answer.text().to_owned(), body: Vec::new(), trailers: String::new() }, id)
}

fn gateway(protocol: Protocol, settings: &str, upstream: &Raw) -> Gateway {
    protocol.start(&site(settings, &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""))
}

/// Returns the version in the `Via` of a client's request.
fn via(protocol: Protocol) -> &'static str {
    if protocol.is_http2() { "2" } else { "1.1" }
}

#[test]
fn upstream_gets_the_clients_address_and_no_forged_one() {
    each_protocol(|protocol| {
        let (scheme, version) = (protocol.scheme(), via(protocol));
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "", &upstream);
        for headers in [
            "",
            "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: evil\r\nForwarded: for=1.2.3.4\r\n\
         X-Forwarded-For: 5.6.7.8\r\n",
        ] {
            let (asked, _) = forwarded_headers(&gateway, headers);
            assert_eq!(asked.values("x-forwarded-for"), ["127.0.0.1"]);
            assert_eq!(asked.values("x-forwarded-proto"), [scheme]);
            assert_eq!(asked.values("x-forwarded-host"), ["shop.example.com:81"]);
            assert_eq!(
                asked.values("forwarded"),
                [format!("for=127.0.0.1;host=\"shop.example.com:81\";proto={scheme}")]
            );
            assert!(
                asked.values("via").iter().all(|via| via.starts_with(&format!("{version} tollgate-"))),
                "{}",
                asked.head
            );
            assert_eq!(asked.values("via").len(), 1);
        }
    });
}

#[test]
fn headers_of_a_trusted_proxy_are_kept_and_extended() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "trusted_proxies: [127.0.0.0/8]", &upstream);
        let (asked, _) = forwarded_headers(
            &gateway,
            "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-For: 5.6.7.8\r\nX-Forwarded-Proto: https\r\n\
         X-Forwarded-Host: shop\r\nForwarded: for=1.2.3.4\r\nVia: 1.0 edge\r\n",
        );
        assert_eq!(asked.values("x-forwarded-for"), ["1.2.3.4, 5.6.7.8, 127.0.0.1"]);
        assert_eq!(asked.values("x-forwarded-proto"), ["https"]);
        assert_eq!(asked.values("x-forwarded-host"), ["shop"]);
        let forwarded = asked.values("forwarded").join(", ");
        let own = format!("for=127.0.0.1;host=\"shop.example.com:81\";proto={}", protocol.scheme());
        assert_eq!(forwarded, format!("for=1.2.3.4, {own}"));
        assert!(
            asked.values("via").join(", ").starts_with(&format!("1.0 edge, {} tollgate-", via(protocol))),
            "{}",
            asked.head
        );
    });
}

#[test]
fn limits_count_by_the_client_behind_a_trusted_proxy_alone() {
    each_protocol(|protocol| {
        let limit = "{ name: ip, key: ip, algorithm: fixed_window, align: first_request, limit: 1, window: 1h }";
        for (settings, wanted) in [("trusted_proxies: [127.0.0.1/32]", [200, 429, 200]), ("", [200, 429, 429])] {
            let gateway = protocol.start(&site(settings, &["{ path: /**, respond: { body: ok } }"], limit));
            let statuses = ["1.2.3.4", "1.2.3.4", "5.6.7.8"].map(|address| {
                let request = format!("GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: {address}\r\n\r\n");
                gateway.client().ask(request).status
            });
            assert_eq!(statuses, wanted, "{settings}");
        }
    });
}

#[test]
fn request_id_is_created_or_kept_and_returned() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "", &upstream);
        let mut made = std::collections::HashSet::new();
        for headers in ["", "", "X-Request-Id: has a space\r\n", "X-Request-Id: \r\n"] {
            let (asked, id) = forwarded_headers(&gateway, headers);
            let id = id.expect("it is given back");
            assert_eq!(asked.values("x-request-id"), [&id]);
            assert_eq!(id.len(), 32);
            assert!(made.insert(id), "it was made before");
        }
        let (asked, id) = forwarded_headers(&gateway, "X-Request-Id: mine-1\r\n");
        assert_eq!((asked.values("x-request-id"), id.as_deref()), (vec!["mine-1"], Some("mine-1")));
        let (asked, _) = forwarded_headers(&gateway, &format!("X-Request-Id: {}\r\n", "x".repeat(200)));
        assert_eq!(asked.values("x-request-id")[0].len(), 32, "too long to be kept");
    });
}

#[test]
fn headers_that_are_turned_off_are_not_sent() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "tell_upstreams: []", &upstream);
        // The upstream would take the client's own headers for those of the gateway.
        let (asked, id) = forwarded_headers(
            &gateway,
            "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Host: h\r\nForwarded: for=1.2.3.4\r\n",
        );
        for name in ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded", "via", "x-request-id"] {
            assert_eq!(asked.values(name), [""; 0], "{name}");
        }
        assert_eq!(id, None);
    });
}

#[test]
fn ipv6_works_on_both_sides() {
    each_protocol(|protocol| {
        if !has_ipv6() {
            return;
        }
        let upstream = Raw::at_named("[::1]:0", "six");
        let rules = site("", &[format!("{{ path: /**, upstream: 'http://{}' }}", upstream.address)], "");
        let gateway = protocol.start(&rules.replace("listen: 127.0.0.1:0", "listen: '[::1]:0'"));
        let (asked, _) = forwarded_headers(&gateway, "");
        assert_eq!(asked.values("x-forwarded-for"), ["::1"]);
        assert_eq!(
            asked.values("forwarded"),
            [format!("for=\"[::1]\";host=\"shop.example.com:81\";proto={}", protocol.scheme())]
        );
    });
}

#[test]
fn the_proxy_protocol_names_the_client() {
    let upstream = Raw::named("one");
    let gateway = gateway(Protocol::Http1, "proxy_protocol: { from: 127.0.0.1 }", &upstream);
    let mut connection = gateway.connect();
    let answer = connection.ask("PROXY TCP4 203.0.113.9 10.0.0.1 4321 80\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert!(answer.text().to_ascii_lowercase().contains("\r\nx-forwarded-for: 203.0.113.9\r\n"), "{}", answer.text());
    let mut direct = gateway.connect();
    direct.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert!(direct.is_closed(), "a connection without a PROXY header is closed");
}

#[test]
fn a_proxy_header_from_another_address_closes_the_connection() {
    let upstream = Raw::named("one");
    let gateway = gateway(Protocol::Http1, "proxy_protocol: { from: [10.0.0.0/8, '::1'] }", &upstream);
    let mut stranger = gateway.connect();
    stranger.try_send("PROXY TCP4 203.0.113.9 10.0.0.1 4321 80\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n").ok();
    assert!(stranger.is_closed());
    assert_eq!(upstream.requests(), 0);
}

/// The address of the load balancer may be exempt or a trusted proxy. The client behind it is neither.
#[test]
fn a_proxy_header_without_an_address_leaves_the_client_without_one() {
    let upstream = Raw::named("one");
    let settings = "proxy_protocol: { from: 127.0.0.0/8 }\n  trusted_proxies: [127.0.0.0/8]";
    let limit = "{ name: per-ip, key: ip, algorithm: fixed_window, limit: 1, window: 1h, \
                 exempt: { ips: [127.0.0.0/8, 192.0.2.1] } }";
    let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
    let gateway = Protocol::Http1.start(&site(settings, &[route], limit));
    let v2_local = "\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
    let mut statuses = Vec::new();
    for header in ["PROXY UNKNOWN\r\n", "PROXY UNKNOWN ffff::1 ffff::2 1 1\r\n", v2_local] {
        let mut connection = gateway.connect();
        let answer = connection.ask(format!("{header}GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n"));
        if answer.status == 200 {
            let text = answer.text().to_ascii_lowercase();
            assert!(text.contains("\r\nx-forwarded-for: unknown\r\n"), "{text}");
            assert!(text.contains("for=unknown"), "{text}");
        }
        statuses.push(answer.status);
    }
    assert_eq!(statuses, [200, 429, 429], "they share the key of requests without an address");
}

/// Two servers in a row could log different ones, and a client could choose which.
#[test]
fn single_valid_request_id_is_kept_and_anything_else_is_replaced() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "", &upstream);
        let (asked, id) = forwarded_headers(&gateway, "X-Request-Id: mine\r\n");
        assert_eq!(asked.values("x-request-id"), ["mine"]);
        assert_eq!(id.as_deref(), Some("mine"));
        for ids in [
            "X-Request-Id: one\r\nX-Request-Id: two\r\n",
            "X-Request-Id: one\r\nX-Request-Id: one\r\n",
            "X-Request-Id: one\r\nX-Request-Id:\r\n",
            "X-Request-Id: two words\r\n",
        ] {
            let (asked, id) = forwarded_headers(&gateway, ids);
            let made = id.expect("the client gets the id");
            assert_eq!(asked.values("x-request-id"), [&made], "{ids}");
            assert_eq!(made.len(), 32, "a new one: {made}");
        }
    });
}

/// Headers that only a trusted proxy may send.
const FORGED: [&str; 14] = [
    "X-Forwarded-Prefix",
    "X-Forwarded-Port",
    "X-Forwarded-Ssl",
    "X-Forwarded-Server",
    "X-Forwarded-User",
    "X-Forwarded-Client-Cert",
    "X-Real-IP",
    "X-Client-IP",
    "X-Cluster-Client-IP",
    "True-Client-IP",
    "CF-Connecting-IP",
    "X-Original-URL",
    "X-Rewrite-URL",
    "X-Original-Host",
];

/// Returns the head that an upstream got of a request with these headers.
fn head(gateway: &Gateway, headers: &[(&str, &str)]) -> String {
    let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    forwarded_headers(gateway, &lines).0.head
}

#[test]
fn forwarding_headers_pass_from_trusted_proxies_alone() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let untrusted = gateway(protocol, "", &upstream);
        let trusted = gateway(protocol, "trusted_proxies: [127.0.0.0/8]", &upstream);
        let forged = FORGED.map(|name| (name, "forged"));
        let seen = head(&untrusted, &forged);
        assert!(!seen.contains("forged"), "{seen}");
        let seen = head(&trusted, &forged);
        assert_eq!(seen.matches("forged").count(), FORGED.len(), "{seen}");
    });
}

#[test]
fn dropped_headers_are_counted_by_reason() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("", &[route], "")));
        let sent =
            [("X_User", "1"), ("X_Forwarded_For", "1"), ("X-Real-IP", "1"), ("Keep-Alive", "1"), ("X-User", "1")];
        assert!(!head(&gateway, &sent[..3]).is_empty());
        // Every proxy drops hop-by-hop headers. HTTP/2 does not have them.
        assert!(!head(&gateway, &sent[3..]).is_empty());
        gateway.await_metric(r#"tollgate_request_headers_dropped_total{reason="underscore"}"#, 2);
        gateway.await_metric(r#"tollgate_request_headers_dropped_total{reason="forwarding"}"#, 1);
    });
}

#[test]
fn connection_option_does_not_remove_the_client_behind_a_trusted_proxy() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let limit = "{ name: ip, key: ip, algorithm: fixed_window, limit: 1, window: 10220d }";
        let names = FORGED.map(|name| format!("{name}: given\r\n")).concat();
        for (option, rest) in [("close", ""), ("upgrade", "Upgrade: websocket\r\n")] {
            let gateway = protocol.start(&site("trusted_proxies: [127.0.0.0/8]", std::slice::from_ref(&route), limit));
            let ask = |client: &str| {
                let connection = format!("Connection: {option}, Forwarded, X-Forwarded-For, {}", FORGED.join(", "));
                let headers = format!("{connection}\r\n{rest}X-Forwarded-For: {client}\r\n{names}");
                gateway.client().ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{headers}\r\n"))
            };
            for (client, status) in [("192.0.2.1", 200), ("192.0.2.2", 200), ("192.0.2.1", 429)] {
                let answer = ask(client);
                assert_eq!(answer.status, status, "{client}: {}", answer.text());
                if status == 200 {
                    let head = answer.text();
                    assert!(head.contains(&format!("x-forwarded-for: {client}")), "{head}");
                    assert!(head.matches("given").count() >= FORGED.len() - 1, "{head}");
                }
            }
        }
    });
}

#[test]
fn names_that_upstreams_fold_are_dropped_from_everybody_unless_they_are_kept_or_refused() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let sent = [
            ("X_Forwarded_For", "forged"),
            ("X.Forwarded.For", "forged"),
            ("SCRIPT_NAME", "other"),
            ("X_Sum", "other"),
            ("X.Sum", "other"),
            ("X~Sum", "other"),
            ("X-Sum", "fine"),
        ];
        for proxies in ["", "trusted_proxies: [127.0.0.0/8]\n  "] {
            let with = |setting: &str| head(&gateway(protocol, &format!("{proxies}{setting}"), &upstream), &sent);
            let seen = with("");
            let counts = ["forged", "other", "fine"].map(|value| seen.matches(value).count());
            assert_eq!(counts, [0, 0, 1], "{seen}");
            let seen = with("underscore_headers: keep");
            let counts = ["forged", "other", "fine"].map(|value| seen.matches(value).count());
            assert_eq!(counts, [0, 4, 1], "{seen}");
            let seen = with("underscore_headers: refuse");
            assert!(seen.contains("gateway.underscore_headers refuses"), "{seen}");
        }
        assert_eq!(upstream.requests(), 4, "a refused request does not reach the upstream");
    });
}

/// Returns the statuses of two requests that differ in the value of a header.
fn statuses(gateway: &Gateway, header: &str, extra: &str) -> [u16; 2] {
    ["a", "b"].map(|value| {
        let request = format!("GET / HTTP/1.1\r\nHost: h\r\n{extra}{header}: {value}\r\n\r\n");
        gateway.client().ask(request).status
    })
}

#[test]
fn limits_do_not_count_by_a_header_that_the_upstream_does_not_get() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        for (settings, header, extra) in [
            ("", "x_user_id", ""),
            ("", "x-real-ip", ""),
            ("", "proxy-authorization", ""),
            ("", "x-user-id", "Connection: x-user-id\r\n"),
            ("", "x-user-id", "Connection: close, X-User-Id\r\n"),
        ] {
            if protocol.is_http2() && !extra.is_empty() {
                continue;
            }
            let limit = format!(
                "{{ name: one, key: 'header:{header}', algorithm: fixed_window, align: first_request, limit: 1, \
             window: 1h }}"
            );
            let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
            let gateway = protocol.start(&site(settings, &[route], &limit));
            assert_eq!(statuses(&gateway, header, extra), [200, 429], "{header} {extra}");
        }
        assert!(
            upstream.seen().iter().all(|seen| !seen.to_ascii_lowercase().contains("user")),
            "{:?}",
            upstream.seen()
        );
    });
}

#[test]
fn header_that_connection_names_is_not_counted_by_over_websockets() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], &testkit::gateway::per_user(1)));
        let ask = |user: &str| {
            let connection = "Connection: upgrade, x-user-id\r\nUpgrade: websocket";
            gateway
                .client()
                .ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{connection}\r\nX-User-Id: {user}\r\n\r\n"))
                .status
        };
        assert_eq!([ask("a"), ask("b")], [200, 429]);
    });
}

#[test]
fn http_1_upstreams_get_no_trailer_header() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let seen = head(&gateway(protocol, "", &upstream), &[("Trailer", "x-sum"), ("X-Kept", "1")]);
        let seen = seen.to_ascii_lowercase();
        assert!(!seen.contains("\ntrailer:") && seen.contains("\nx-kept:"), "{seen}");
    });
}

#[test]
fn trailers_carry_nothing_that_an_upstream_could_take_for_a_header_of_the_proxy() {
    each_protocol(|protocol| {
        // An HTTP/1 upstream gets no trailers at all.
        let upstream = Served::start(Speaks::Http2, |request: Request<Incoming>| async {
            let trailers = request.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
            let lines = trailers.iter().map(|(name, value)| format!("{name}: {}\r\n", value.to_str().unwrap()));
            Response::new(full(lines.collect::<String>()))
        });
        // From trusted proxies too: limits have decided before trailers arrive.
        for settings in ["", "trusted_proxies: [127.0.0.0/8]"] {
            let route = format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address);
            let gateway = protocol.start(&site(settings, &[route], ""));
            let trailers = gateway.client().ask(
                "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum, x-real-ip, x_user\r\n\
             TE: trailers\r\n\r\n1\r\nx\r\n0\r\nX-Sum: 1\r\nX-Real-IP: forged\r\nX_User: forged\r\nHost: forged\r\n\
             X-Forwarded-For: forged\r\nAuthorization: forged\r\n\r\n",
            );
            assert_eq!(trailers.text().to_ascii_lowercase(), "x-sum: 1\r\n", "{settings}");
        }
    });
}

#[test]
fn max_forwards_is_counted_down_for_trace_and_options() {
    each_protocol(|protocol| {
        for scheme in ["http", "h2c"] {
            let speaks = if scheme == "http" { Speaks::Http1 } else { Speaks::Http2 };
            let upstream = Served::start(speaks, |request: Request<Incoming>| async move {
                let values =
                    request.headers().get_all("max-forwards").iter().map(|value| value.to_str().unwrap().to_owned());
                Response::new(full(values.collect::<Vec<_>>().join(",")))
            });
            let gateway = protocol.start_before(&format!("{scheme}://{}", upstream.address));
            let ask = |method: &str, value: &str| {
                let answer = gateway.client().ask(format!(
                    "{method} /a HTTP/1.1\r\nHost: h\r\nMax-Forwards: {value}\r\nCookie: secret=1\r\n\r\n"
                ));
                (answer.status, answer.header("allow").map(str::to_owned), answer.text().to_owned())
            };
            for method in ["TRACE", "OPTIONS"] {
                for (value, passed) in
                    [("1", "0"), ("10", "9"), ("99999999999999999999", "18446744073709551614"), ("x", "x")]
                {
                    let expected = (200, None, passed.to_owned());
                    assert_eq!(ask(method, value), expected, "{method} {value}");
                }
            }
            for value in ["0", "5"] {
                assert_eq!(ask("GET", value).2, value);
            }
            let allowed = Some("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE".to_owned());
            assert_eq!(ask("OPTIONS", "0"), (204, allowed, String::new()));
            let version = if protocol.is_http2() { "HTTP/2.0" } else { "HTTP/1.1" };
            let trace = format!("TRACE /a {version}\r\nHost: h\r\nMax-Forwards: 0\r\n\r\n");
            assert_eq!(ask("TRACE", "0"), (200, None, trace));
        }
    });
}
