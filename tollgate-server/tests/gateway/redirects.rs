//! `Location` in responses of upstreams leads clients to the same place.

use http::{Response, StatusCode};
use testkit::client::{each_protocol, each_tls};
use testkit::gateway::site;
use testkit::upstream::{Served, Speaks, full};

/// Starts an upstream that redirects to the value of the header `x-to`.
fn redirecting(speaks: Speaks) -> Served {
    Served::start(speaks, |request: http::Request<hyper::body::Incoming>| async move {
        let mut response = Response::new(full(""));
        *response.status_mut() = StatusCode::FOUND;
        response.headers_mut().insert("location", request.headers()["x-to"].clone());
        response
    })
}

fn routes(url: &str) -> [String; 5] {
    [
        format!("{{ path: /api/**, strip_prefix: /api, upstream: '{url}' }}"),
        format!("{{ path: /url/**, strip_prefix: /url, upstream: '{url}/base' }}"),
        format!("{{ path: /old/**, rewrite: {{ pattern: '^/old/', to: /new/ }}, upstream: '{url}' }}"),
        format!("{{ path: /keep/**, redirects: keep, strip_prefix: /keep, upstream: '{url}' }}"),
        format!("{{ path: /**, upstream: '{url}' }}"),
    ]
}

/// The path of a request, the `Location` of the upstream at `AT`, and that of the client.
const CASES: [(&str, &str, &str); 26] = [
    ("/x", "http://AT/login?a=b#c", "/login?a=b#c"),
    ("/x", "HTTP://AT/login", "/login"),
    ("/x", "http://AT", "/"),
    ("/x", "http://AT?a", "/?a"),
    ("/x", "/login", "/login"),
    ("/x", "login?a", "login?a"),
    ("/x", "https://AT/login", "https://AT/login"),
    ("/x", "http://other.example/login", "http://other.example/login"),
    ("/x", "http://user@AT/login", "http://user@AT/login"),
    ("/x", "http://AT.other.example/login", "http://AT.other.example/login"),
    ("/x", "//AT/login", "//AT/login"),
    // Without the host, the path would begin another one.
    ("/x", "http://AT//other.example/", "http://AT//other.example/"),
    ("/x", "http://AT/\\other.example/", "http://AT/\\other.example/"),
    ("/x", "http://AT/\t/other.example/", "http://AT/\t/other.example/"),
    ("/api/x", "/login?a", "/api/login?a"),
    ("/api/x", "http://AT/login", "/api/login"),
    ("/api/x", "http://AT//other.example/", "/api//other.example/"),
    ("/api/x", "/api/login", "/api/login"),
    ("/api/x", "/apis", "/api/apis"),
    ("/url/x", "/base/login", "/url/login"),
    ("/url/x", "http://AT/base", "/url/"),
    ("/url/x", "/other", "/other"),
    ("/url/x", "http://AT/other", "http://AT/other"),
    ("/old/x", "http://AT/new/login", "/new/login"),
    ("/keep/x", "http://AT/login", "http://AT/login"),
    ("/keep/x", "/login", "/login"),
];

#[test]
fn redirects_of_upstreams_lead_to_the_gateway() {
    each_protocol(|protocol| {
        for (speaks, scheme) in [(Speaks::Http1, "http"), (Speaks::Http2, "h2c")] {
            let upstream = redirecting(speaks);
            let gateway = protocol.start(&site("", &routes(&format!("{scheme}://{}", upstream.address)), ""));
            let at = |text: &str| text.replace("AT", &upstream.address.to_string());
            let mut connection = gateway.client();
            for (path, given, expected) in CASES {
                let (given, expected) = (at(given), at(expected));
                let response = connection.ask(format!("GET {path} HTTP/1.1\r\nHost: h\r\nx-to: {given}\r\n\r\n"));
                assert_eq!(response.header("location"), Some(&*expected), "{scheme} {path}: {given}");
            }
        }
    });
}

#[test]
fn an_upstream_without_tls_does_not_lead_clients_away_from_it() {
    each_tls(|protocol| {
        let upstream = redirecting(Speaks::Http1);
        let gateway = protocol.start(&site("", &routes(&format!("http://{}", upstream.address)), ""));
        let mut connection = gateway.client();
        for (path, given, expected) in [
            ("/x", "http://shop.example:8443/login", "/login"),
            ("/api/x", "http://Shop.example:8443/login", "/api/login"),
            ("/x", "https://shop.example:8443/login", "https://shop.example:8443/login"),
            ("/x", "http://shop.example/login", "http://shop.example/login"),
            ("/keep/x", "http://shop.example:8443/login", "http://shop.example:8443/login"),
        ] {
            let request = format!("GET {path} HTTP/1.1\r\nHost: shop.example:8443\r\nx-to: {given}\r\n\r\n");
            assert_eq!(connection.ask(request).header("location"), Some(expected), "{path}: {given}");
        }
    });
}

#[test]
fn every_location_of_a_response_is_changed() {
    each_protocol(|protocol| {
        let upstream = Served::start(Speaks::Http1, |request: http::Request<hyper::body::Incoming>| async move {
            let mut response = Response::new(full(""));
            let host = request.headers()["host"].to_str().unwrap().to_owned();
            for path in ["/a", "/b"] {
                response.headers_mut().append("location", format!("http://{host}{path}").parse().unwrap());
            }
            response
        });
        let route = format!("{{ path: /**, host: upstream, upstream: 'http://{}' }}", upstream.address);
        let gateway = protocol.start(&site("", &[route], ""));
        let changed = gateway.get("/").headers.into_iter().filter(|(name, _)| name == "location");
        assert_eq!(changed.map(|(_, value)| value).collect::<Vec<_>>(), ["/a", "/b"]);
    });
}
