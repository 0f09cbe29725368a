//! Headers that describe the client and the connection to upstreams, and whose headers are trusted.

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use testkit::gateway::{Gateway, site};
use testkit::skip::has_ipv6;
use testkit::upstream::{Raw, ReceivedRequest, Served, Speaks, full, runtime};

use crate::http2::{connect, get, whole, with_trailers};

/// Returns the request that the upstream got for these headers, and the ID that the client got back.
fn forwarded_headers(gateway: &Gateway, headers: &str) -> (ReceivedRequest, Option<String>) {
    let answer = gateway.connect().ask(format!("GET / HTTP/1.1\r\nHost: shop.example.com:81\r\n{headers}\r\n"));
    let id = answer.header("x-request-id").map(str::to_owned);
    (ReceivedRequest { head: answer.text().to_owned(), body: Vec::new(), trailers: String::new() }, id)
}

fn gateway(settings: &str, upstream: &Raw) -> Gateway {
    Gateway::start(&site(settings, &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""))
}

#[test]
fn upstream_gets_the_clients_address_and_no_forged_one() {
    let upstream = Raw::named("one");
    let gateway = gateway("", &upstream);
    for headers in [
        "",
        "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: evil\r\nForwarded: for=1.2.3.4\r\n\
         X-Forwarded-For: 5.6.7.8\r\n",
    ] {
        let (asked, _) = forwarded_headers(&gateway, headers);
        assert_eq!(asked.values("x-forwarded-for"), ["127.0.0.1"]);
        assert_eq!(asked.values("x-forwarded-proto"), ["http"]);
        assert_eq!(asked.values("x-forwarded-host"), ["shop.example.com:81"]);
        assert_eq!(asked.values("forwarded"), ["for=127.0.0.1;host=\"shop.example.com:81\";proto=http"]);
        assert!(asked.values("via").iter().all(|via| via.starts_with("1.1 tollgate-")), "{}", asked.head);
        assert_eq!(asked.values("via").len(), 1);
    }
}

#[test]
fn headers_of_a_trusted_proxy_are_kept_and_extended() {
    let upstream = Raw::named("one");
    let gateway = gateway("trusted_proxies: [127.0.0.0/8]", &upstream);
    let (asked, _) = forwarded_headers(
        &gateway,
        "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-For: 5.6.7.8\r\nX-Forwarded-Proto: https\r\n\
         X-Forwarded-Host: shop\r\nForwarded: for=1.2.3.4\r\nVia: 1.0 edge\r\n",
    );
    assert_eq!(asked.values("x-forwarded-for"), ["1.2.3.4, 5.6.7.8, 127.0.0.1"]);
    assert_eq!(asked.values("x-forwarded-proto"), ["https"]);
    assert_eq!(asked.values("x-forwarded-host"), ["shop"]);
    let forwarded = asked.values("forwarded").join(", ");
    assert_eq!(forwarded, "for=1.2.3.4, for=127.0.0.1;host=\"shop.example.com:81\";proto=http");
    assert!(asked.values("via").join(", ").starts_with("1.0 edge, 1.1 tollgate-"), "{}", asked.head);
}

#[test]
fn limits_count_by_the_client_behind_a_trusted_proxy_alone() {
    let limit = "{ name: ip, key: ip, algorithm: fixed_window, align: first_request, limit: 1, window: 1h }";
    for (settings, wanted) in [("trusted_proxies: [127.0.0.1/32]", [200, 429, 200]), ("", [200, 429, 429])] {
        let gateway = Gateway::start(&site(settings, &["{ path: /**, respond: { body: ok } }"], limit));
        let statuses = ["1.2.3.4", "1.2.3.4", "5.6.7.8"].map(|address| {
            let request = format!("GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: {address}\r\n\r\n");
            gateway.connect().ask(request).status
        });
        assert_eq!(statuses, wanted, "{settings}");
    }
}

#[test]
fn request_id_is_created_or_kept_and_returned() {
    let upstream = Raw::named("one");
    let gateway = gateway("", &upstream);
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
}

#[test]
fn headers_that_are_turned_off_are_not_sent() {
    let upstream = Raw::named("one");
    let gateway = gateway("tell_upstreams: []", &upstream);
    // The upstream would take the client's own headers for those of the gateway.
    let (asked, id) =
        forwarded_headers(&gateway, "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Host: h\r\nForwarded: for=1.2.3.4\r\n");
    for name in ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded", "via", "x-request-id"] {
        assert_eq!(asked.values(name), [""; 0], "{name}");
    }
    assert_eq!(id, None);
}

#[test]
fn ipv6_works_on_both_sides() {
    if !has_ipv6() {
        return;
    }
    let upstream = Raw::at_named("[::1]:0", "six");
    let rules = site("", &[format!("{{ path: /**, upstream: 'http://{}' }}", upstream.address)], "");
    let gateway = Gateway::start(&rules.replace("listen: 127.0.0.1:0", "listen: '[::1]:0'"));
    let (asked, _) = forwarded_headers(&gateway, "");
    assert_eq!(asked.values("x-forwarded-for"), ["::1"]);
    assert_eq!(asked.values("forwarded"), ["for=\"[::1]\";host=\"shop.example.com:81\";proto=http"]);
}

#[test]
fn the_proxy_protocol_names_the_client() {
    let upstream = Raw::named("one");
    let gateway = gateway("proxy_protocol: true", &upstream);
    let mut connection = gateway.connect();
    let answer = connection.ask("PROXY TCP4 203.0.113.9 10.0.0.1 4321 80\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert!(answer.text().to_ascii_lowercase().contains("\r\nx-forwarded-for: 203.0.113.9\r\n"), "{}", answer.text());
    let mut direct = gateway.connect();
    direct.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert!(direct.is_closed(), "a connection without a PROXY header is closed");
}

/// Two servers in a row could log different ones, and a client could choose which.
#[test]
fn single_valid_request_id_is_kept_and_anything_else_is_replaced() {
    let upstream = Raw::named("one");
    let gateway = gateway("", &upstream);
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

/// Returns the heads that an upstream got of a request with these headers, over HTTP/1 and HTTP/2.
fn heads(gateway: &Gateway, headers: &[(&str, &str)]) -> [ReceivedRequest; 2] {
    let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let http1 = forwarded_headers(gateway, &lines).0;
    let http2 = runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let request = headers.iter().fold(get(gateway, "/"), |request, (name, value)| request.header(*name, *value));
        let answered = sender.send_request(request.body(full("")).unwrap()).await.unwrap();
        let (_, head, _) = whole(answered).await;
        ReceivedRequest { head: String::from_utf8_lossy(&head).into_owned(), body: Vec::new(), trailers: String::new() }
    });
    [http1, http2]
}

#[test]
fn forwarding_headers_pass_from_trusted_proxies_alone() {
    let upstream = Raw::named("one");
    let (untrusted, trusted) = (gateway("", &upstream), gateway("trusted_proxies: [127.0.0.0/8]", &upstream));
    let forged = FORGED.map(|name| (name, "forged"));
    for asked in heads(&untrusted, &forged) {
        assert!(!asked.head.contains("forged"), "{}", asked.head);
    }
    for asked in heads(&trusted, &forged) {
        assert_eq!(asked.head.matches("forged").count(), FORGED.len(), "{}", asked.head);
    }
}

#[test]
fn dropped_headers_are_counted_by_reason() {
    let upstream = Raw::named("one");
    let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
    let gateway = Gateway::start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("", &[route], "")));
    let sent = [("X_User", "1"), ("X_Forwarded_For", "1"), ("X-Real-IP", "1"), ("Keep-Alive", "1"), ("X-User", "1")];
    for asked in heads(&gateway, &sent[..3]) {
        assert!(!asked.head.is_empty());
    }
    // Every proxy drops hop-by-hop headers. HTTP/2 does not have them.
    let lines: String = sent[3..].iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    forwarded_headers(&gateway, &lines);
    gateway.await_metric(r#"tollgate_request_headers_dropped_total{reason="underscore"}"#, 4);
    gateway.await_metric(r#"tollgate_request_headers_dropped_total{reason="forwarding"}"#, 2);
}

#[test]
fn connection_option_does_not_remove_the_client_behind_a_trusted_proxy() {
    let upstream = Raw::named("one");
    let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
    let limit = "{ name: ip, key: ip, algorithm: fixed_window, limit: 1, window: 10220d }";
    let names = FORGED.map(|name| format!("{name}: given\r\n")).concat();
    for (option, rest) in [("close", ""), ("upgrade", "Upgrade: websocket\r\n")] {
        let gateway = Gateway::start(&site("trusted_proxies: [127.0.0.0/8]", std::slice::from_ref(&route), limit));
        let ask = |client: &str| {
            let connection = format!("Connection: {option}, Forwarded, X-Forwarded-For, {}", FORGED.join(", "));
            let headers = format!("{connection}\r\n{rest}X-Forwarded-For: {client}\r\n{names}");
            gateway.connect().ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{headers}\r\n"))
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
}

#[test]
fn names_with_underscores_are_dropped_from_everybody_unless_they_are_kept_or_refused() {
    let upstream = Raw::named("one");
    let sent = [("X_Forwarded_For", "forged"), ("SCRIPT_NAME", "other"), ("X_Sum", "other"), ("X-Sum", "fine")];
    for proxies in ["", "trusted_proxies: [127.0.0.0/8]\n  "] {
        let with = |setting: &str| gateway(&format!("{proxies}{setting}"), &upstream);
        for asked in heads(&with(""), &sent) {
            let counts = ["forged", "other", "fine"].map(|value| asked.head.matches(value).count());
            assert_eq!(counts, [0, 0, 1], "{}", asked.head);
        }
        for asked in heads(&with("underscore_headers: keep"), &sent) {
            let counts = ["forged", "other", "fine"].map(|value| asked.head.matches(value).count());
            assert_eq!(counts, [0, 2, 1], "{}", asked.head);
        }
        for asked in heads(&with("underscore_headers: refuse"), &sent) {
            assert!(asked.head.contains("gateway.underscore_headers refuses"), "{}", asked.head);
        }
    }
    assert_eq!(upstream.requests(), 8, "a refused request does not reach the upstream");
}

/// Returns the statuses of two requests that differ in the value of a header.
fn statuses(gateway: &Gateway, header: &str, extra: &str) -> [u16; 2] {
    ["a", "b"].map(|value| {
        let request = format!("GET / HTTP/1.1\r\nHost: h\r\n{extra}{header}: {value}\r\n\r\n");
        gateway.connect().ask(request).status
    })
}

#[test]
fn limits_do_not_count_by_a_header_that_the_upstream_does_not_get() {
    let upstream = Raw::named("one");
    for (settings, header, extra) in [
        ("", "x_user_id", ""),
        ("", "x-real-ip", ""),
        ("", "proxy-authorization", ""),
        ("", "x-user-id", "Connection: x-user-id\r\n"),
        ("", "x-user-id", "Connection: close, X-User-Id\r\n"),
    ] {
        let limit = format!(
            "{{ name: one, key: 'header:{header}', algorithm: fixed_window, align: first_request, limit: 1, \
             window: 1h }}"
        );
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = Gateway::start(&site(settings, &[route], &limit));
        assert_eq!(statuses(&gateway, header, extra), [200, 429], "{header} {extra}");
    }
    assert!(upstream.seen().iter().all(|seen| !seen.to_ascii_lowercase().contains("user")), "{:?}", upstream.seen());
}

#[test]
fn header_that_connection_names_is_not_counted_by_over_websockets() {
    let upstream = Raw::named("one");
    let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
    let gateway = Gateway::start(&site("", &[route], &testkit::gateway::per_user(1)));
    let ask = |user: &str| {
        let connection = "Connection: upgrade, x-user-id\r\nUpgrade: websocket";
        gateway.connect().ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{connection}\r\nX-User-Id: {user}\r\n\r\n")).status
    };
    assert_eq!([ask("a"), ask("b")], [200, 429]);
}

#[test]
fn http_1_upstreams_get_no_trailer_header() {
    let upstream = Raw::named("one");
    for asked in heads(&gateway("", &upstream), &[("Trailer", "x-sum"), ("X-Kept", "1")]) {
        let head = asked.head.to_ascii_lowercase();
        assert!(!head.contains("\ntrailer:") && head.contains("\nx-kept:"), "{head}");
    }
}

#[test]
fn trailers_carry_nothing_that_an_upstream_could_take_for_a_header_of_the_proxy() {
    // An HTTP/1 upstream gets no trailers at all.
    let upstream = Served::start(Speaks::Http2, |request: Request<Incoming>| async {
        let trailers = request.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
        let lines = trailers.iter().map(|(name, value)| format!("{name}: {}\r\n", value.to_str().unwrap()));
        Response::new(full(lines.collect::<String>()))
    });
    // From trusted proxies too: limits have decided before trailers arrive.
    for settings in ["", "trusted_proxies: [127.0.0.0/8]"] {
        let route = format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address);
        let gateway = Gateway::start(&site(settings, &[route], ""));
        let http1 = gateway.connect().ask(
            "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum, x-real-ip, x_user\r\n\
             TE: trailers\r\n\r\n1\r\nx\r\n0\r\nX-Sum: 1\r\nX-Real-IP: forged\r\nX_User: forged\r\nHost: forged\r\n\
             X-Forwarded-For: forged\r\nAuthorization: forged\r\n\r\n",
        );
        let http1 = http1.text().to_ascii_lowercase();
        let forged = [("x-sum", "1"), ("x-real-ip", "forged"), ("x_user", "forged"), ("x-forwarded-for", "forged")];
        let http2 = runtime().block_on(async {
            let mut sender = connect(gateway.address).await;
            let request = Request::post(format!("http://{}/", gateway.address))
                .header("te", "trailers")
                .header("trailer", "x-sum, x-real-ip, x_user, x-forwarded-for")
                .body(with_trailers(Bytes::from_static(b"x"), &forged))
                .unwrap();
            let (_, trailers, _) = whole(sender.send_request(request).await.unwrap()).await;
            String::from_utf8_lossy(&trailers).to_ascii_lowercase()
        });
        assert_eq!([http1.as_str(), http2.as_str()], ["x-sum: 1\r\n"; 2], "{settings}");
    }
}

#[test]
fn max_forwards_is_counted_down_for_trace_and_options() {
    for scheme in ["http", "h2c"] {
        let speaks = if scheme == "http" { Speaks::Http1 } else { Speaks::Http2 };
        let upstream = Served::start(speaks, |request: Request<Incoming>| async move {
            let values =
                request.headers().get_all("max-forwards").iter().map(|value| value.to_str().unwrap().to_owned());
            Response::new(full(values.collect::<Vec<_>>().join(",")))
        });
        let gateway = Gateway::before(&format!("{scheme}://{}", upstream.address));
        let over_http2 = |method: &str, value: &str| {
            runtime().block_on(async {
                let mut sender = connect(gateway.address).await;
                let request = get(&gateway, "/a").method(method).header("max-forwards", value);
                let request = request.header("cookie", "secret=1").body(full("")).unwrap();
                let response = sender.send_request(request).await.unwrap();
                let allow = response.headers().get("allow").map(|value| value.to_str().unwrap().to_owned());
                let (status, body, _) = whole(response).await;
                (status, allow, String::from_utf8(body.to_vec()).unwrap())
            })
        };
        let over_http1 = |method: &str, value: &str| {
            let answer = gateway
                .connect()
                .ask(format!("{method} /a HTTP/1.1\r\nHost: h\r\nMax-Forwards: {value}\r\nCookie: secret=1\r\n\r\n"));
            (answer.status, answer.header("allow").map(str::to_owned), answer.text().to_owned())
        };
        for method in ["TRACE", "OPTIONS"] {
            for (value, passed) in
                [("1", "0"), ("10", "9"), ("99999999999999999999", "18446744073709551614"), ("x", "x")]
            {
                let expected = (200, None, passed.to_owned());
                assert_eq!(over_http1(method, value), expected, "{method} {value}");
                assert_eq!(over_http2(method, value), expected, "{method} {value}");
            }
        }
        for value in ["0", "5"] {
            assert_eq!(over_http1("GET", value).2, value);
            assert_eq!(over_http2("GET", value).2, value);
        }
        let allowed = Some("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE".to_owned());
        assert_eq!(over_http1("OPTIONS", "0"), (204, allowed.clone(), String::new()));
        assert_eq!(over_http2("OPTIONS", "0"), (204, allowed, String::new()));
        let trace = |version: &str, host: &str| {
            (200, None, format!("TRACE /a {version}\r\nHost: {host}\r\nMax-Forwards: 0\r\n\r\n"))
        };
        assert_eq!(over_http1("TRACE", "0"), trace("HTTP/1.1", "h"));
        assert_eq!(over_http2("TRACE", "0"), trace("HTTP/2.0", &gateway.address.to_string()));
    }
}
