//! What an upstream is told of the client and of the way, and who is believed about that.

use crate::process::{Gateway, site};
use crate::upstream::{Asked, Raw};

/// What an upstream got of a request with these headers, and the id that the client got back.
fn told(gateway: &Gateway, headers: &str) -> (Asked, Option<String>) {
    let answer = gateway.connect().ask(format!("GET / HTTP/1.1\r\nHost: shop.example.com:81\r\n{headers}\r\n"));
    let id = answer.header("x-request-id").map(str::to_owned);
    (Asked { head: answer.text().to_owned(), body: Vec::new(), trailers: String::new() }, id)
}

fn gateway(settings: &str, upstream: &Raw) -> Gateway {
    Gateway::start(&site(settings, &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""))
}

#[test]
fn an_upstream_is_told_of_the_client_and_what_strangers_say_of_it_is_not_passed_on() {
    let upstream = Raw::named("one");
    let gateway = gateway("", &upstream);
    for headers in [
        "",
        "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: evil\r\nForwarded: for=1.2.3.4\r\n\
         X-Forwarded-For: 5.6.7.8\r\n",
    ] {
        let (asked, _) = told(&gateway, headers);
        assert_eq!(asked.values("x-forwarded-for"), ["127.0.0.1"]);
        assert_eq!(asked.values("x-forwarded-proto"), ["http"]);
        assert_eq!(asked.values("x-forwarded-host"), ["shop.example.com:81"]);
        assert_eq!(asked.values("forwarded"), ["for=127.0.0.1;host=\"shop.example.com:81\";proto=http"]);
        assert_eq!(asked.values("via"), ["1.1 tollgate"]);
    }
}

#[test]
fn a_trusted_proxy_is_believed_and_added_to() {
    let upstream = Raw::named("one");
    let gateway = gateway("trusted_proxies: [127.0.0.0/8]", &upstream);
    let (asked, _) = told(
        &gateway,
        "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-For: 5.6.7.8\r\nX-Forwarded-Proto: https\r\n\
         X-Forwarded-Host: shop\r\nForwarded: for=1.2.3.4\r\nVia: 1.0 edge\r\n",
    );
    assert_eq!(asked.values("x-forwarded-for"), ["1.2.3.4, 5.6.7.8, 127.0.0.1"]);
    assert_eq!(asked.values("x-forwarded-proto"), ["https"]);
    assert_eq!(asked.values("x-forwarded-host"), ["shop"]);
    let forwarded = asked.values("forwarded").join(", ");
    assert_eq!(forwarded, "for=1.2.3.4, for=127.0.0.1;host=\"shop.example.com:81\";proto=http");
    assert_eq!(asked.values("via").join(", "), "1.0 edge, 1.1 tollgate");
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
fn the_id_of_a_request_is_made_or_kept_and_given_back() {
    let upstream = Raw::named("one");
    let gateway = gateway("", &upstream);
    let mut made = std::collections::HashSet::new();
    for headers in ["", "", "X-Request-Id: has a space\r\n", "X-Request-Id: \r\n"] {
        let (asked, id) = told(&gateway, headers);
        let id = id.expect("it is given back");
        assert_eq!(asked.values("x-request-id"), [&id]);
        assert_eq!(id.len(), 32);
        assert!(made.insert(id), "it was made before");
    }
    let (asked, id) = told(&gateway, "X-Request-Id: mine-1\r\n");
    assert_eq!((asked.values("x-request-id"), id.as_deref()), (vec!["mine-1"], Some("mine-1")));
    let (asked, _) = told(&gateway, &format!("X-Request-Id: {}\r\n", "x".repeat(200)));
    assert_eq!(asked.values("x-request-id")[0].len(), 32, "too long to be kept");
}

#[test]
fn nothing_is_told_that_nobody_wants_told() {
    let upstream = Raw::named("one");
    let gateway = gateway("tell_upstreams: []", &upstream);
    // What a client says of itself would be taken for what the gateway says.
    let (asked, id) = told(&gateway, "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Host: h\r\nForwarded: for=1.2.3.4\r\n");
    for name in ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded", "via", "x-request-id"] {
        assert_eq!(asked.values(name), [""; 0], "{name}");
    }
    assert_eq!(id, None);
}

#[test]
fn ipv6_works_on_both_sides() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let upstream = Raw::at_named("[::1]:0", "six");
    let rules = site("", &[format!("{{ path: /**, upstream: 'http://{}' }}", upstream.address)], "");
    let gateway = Gateway::start(&rules.replace("listen: 127.0.0.1:0", "listen: '[::1]:0'"));
    let (asked, _) = told(&gateway, "");
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
    assert!(direct.is_closed(), "whoever does not name its client is hung up on");
}

/// Two servers behind each other could log different ones, and a client could choose which.
#[test]
fn single_valid_request_id_is_kept_and_anything_else_is_replaced() {
    let upstream = Raw::named("one");
    let gateway = gateway("", &upstream);
    // The lane serves a plain request, hyper one with a header that the lane leaves to it.
    for road in ["", "TE: trailers\r\nConnection: te\r\n"] {
        let (asked, id) = told(&gateway, &format!("{road}X-Request-Id: mine\r\n"));
        assert_eq!(asked.values("x-request-id"), ["mine"]);
        assert_eq!(id.as_deref(), Some("mine"));
        for ids in [
            "X-Request-Id: one\r\nX-Request-Id: two\r\n",
            "X-Request-Id: one\r\nX-Request-Id: one\r\n",
            "X-Request-Id: one\r\nX-Request-Id:\r\n",
            "X-Request-Id: two words\r\n",
        ] {
            let (asked, id) = told(&gateway, &format!("{road}{ids}"));
            let made = id.expect("the client gets the id");
            assert_eq!(asked.values("x-request-id"), [&made], "{road}{ids}");
            assert_eq!(made.len(), 32, "a new one: {made}");
        }
    }
}
