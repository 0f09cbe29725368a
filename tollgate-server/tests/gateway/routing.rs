//! The choice of upstreams, and the changes to requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;
use http::HeaderValue;
use testkit::client::each_protocol;
use testkit::gateway::{per_user, site};
use testkit::http1::Response;
use testkit::port::unused_address;
use testkit::tollgate::fails;
use testkit::upstream::{Raw, Served, Speaks};
use testkit::wait::until;

use crate::http2::with_trailers;

/// Returns the name of the upstream that answered.
fn by(answer: &Response) -> &str {
    answer.header("x-upstream").unwrap_or_default()
}

/// Returns the request line that reached the upstream.
fn line(answer: &Response) -> &str {
    answer.text().lines().next().unwrap_or_default()
}

/// A limit counts by the path and the query that the client sent. The upstream gets no other parameters by them.
#[test]
fn a_rewrite_adds_no_parameter_that_the_client_chooses() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let route = |path: &str, pattern: &str, to: &str| {
            format!("{{ path: {path}, rewrite: {{ pattern: '{pattern}', to: '{to}' }}, upstream: {} }}", upstream.url())
        };
        let gateway = protocol.start(&site(
            "",
            &[
                route("/item/**", "^/item/(.+)$", "/items?id=$1"),
                route("/part/**", "^/part/", "/parts?id="),
                route("/file/**", "^/file/(.*)x(.*)$", "/files/$1$2"),
            ],
            "",
        ));
        let mut client = gateway.client();
        for (target, expected) in [
            ("/item/7%26admin%3D1", "GET /items?id=7%26admin%3D1 HTTP/1.1"),
            ("/item/7&admin=1;b=2", "GET /items?id=7%26admin%3D1%3Bb%3D2 HTTP/1.1"),
            ("/part/7&admin=1", "GET /parts?id=7%26admin%3D1 HTTP/1.1"),
            ("/item/7?page=2&id=8&%49D=9", "GET /items?id=7&page=2 HTTP/1.1"),
            ("/item/a+b%2Fc", "GET /items?id=a%2Bb%2Fc HTTP/1.1"),
            ("/file/axb%3Fc%23d", "GET /files/ab%3Fc%23d HTTP/1.1"),
        ] {
            assert_eq!(line(&client.get(target)), expected, "{target}");
        }
        for target in ["/file/.x.", "/file/..x", "/file/%2ex%2e", "/file/%2Fx../a"] {
            assert_ne!(client.get(target).status, 200, "{target}");
        }
        assert_eq!(upstream.requests(), 6);
    });
}

#[test]
fn the_most_specific_route_serves_by_host_then_path_then_method_then_header() {
    each_protocol(|protocol| {
        let all = Raw::named("all");
        let others = ["api", "posts", "beta", "host", "under"].map(Raw::named);
        let [api, posts, beta, host, under] = others.each_ref().map(Raw::url);
        let gateway = protocol.start(&site(
            "",
            &[
                format!("{{ path: /**, upstream: {} }}", all.url()),
                format!("{{ path: /api/**, upstream: {api} }}"),
                format!("{{ path: /api/**, methods: [POST], upstream: {posts} }}"),
                format!("{{ path: /api/**, headers: {{ x-beta: 'yes' }}, upstream: {beta} }}"),
                format!("{{ path: /**, hosts: [shop.example.com], upstream: {host} }}"),
                format!("{{ path: /**, hosts: ['*.example.com'], upstream: {under} }}"),
            ],
            "",
        ));
        let mut connection = gateway.client();
        for (request, wanted) in [
            ("GET /x HTTP/1.1\r\nHost: h\r\n\r\n", "all"),
            ("GET /api HTTP/1.1\r\nHost: h\r\n\r\n", "api"),
            ("GET /api/x?y=/z HTTP/1.1\r\nHost: h\r\n\r\n", "api"),
            ("GET /apix HTTP/1.1\r\nHost: h\r\n\r\n", "all"),
            ("POST /api/x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n", "posts"),
            ("GET /api/x HTTP/1.1\r\nHost: h\r\nX-Beta: yes\r\n\r\n", "beta"),
            ("GET /api/x HTTP/1.1\r\nHost: h\r\nX-Beta: no\r\n\r\n", "api"),
            ("POST /api/x HTTP/1.1\r\nHost: h\r\nX-Beta: yes\r\nContent-Length: 0\r\n\r\n", "posts"),
            ("GET /api/x HTTP/1.1\r\nHost: shop.example.com:8080\r\n\r\n", "host"),
            ("GET /api/x HTTP/1.1\r\nHost: SHOP.example.com\r\n\r\n", "host"),
            ("GET /api/x HTTP/1.1\r\nHost: a.b.example.com\r\n\r\n", "under"),
            ("GET /api/x HTTP/1.1\r\nHost: example.com\r\n\r\n", "api"),
        ] {
            assert_eq!(by(&connection.ask(request)), wanted, "{request}");
        }
    });
}

#[test]
fn head_takes_the_route_and_the_limit_of_get() {
    each_protocol(|protocol| {
        let [all, reads, heads] = ["all", "reads", "heads"].map(Raw::named);
        let gateway = protocol.start(&site(
            "",
            &[
                format!("{{ path: /**, upstream: {} }}", all.url()),
                format!("{{ path: /a/**, methods: [GET], upstream: {} }}", reads.url()),
                format!("{{ path: /b/**, methods: [GET], upstream: {} }}", reads.url()),
                format!("{{ path: /b/**, methods: [HEAD], upstream: {} }}", heads.url()),
            ],
            "{ name: reads, match: { path: /a/**, methods: [GET] }, algorithm: fixed_window, limit: 1, window: 10220d }",
        ));
        let mut connection = gateway.client();
        for (request, status, wanted) in [
            ("HEAD /a", 200, "reads"),
            ("HEAD /a", 429, ""),
            ("GET /a", 429, ""),
            ("HEAD /b", 200, "heads"),
            ("GET /b", 200, "reads"),
            ("HEAD /c", 200, "all"),
        ] {
            let head = format!("{request} HTTP/1.1\r\nHost: h\r\n\r\n");
            let answer = if request.starts_with("HEAD") {
                connection.send(head);
                connection.receive_head().unwrap()
            } else {
                connection.ask(head)
            };
            assert_eq!((answer.status, by(&answer)), (status, wanted), "{request}");
        }
    });
}

#[test]
fn the_path_is_stripped_rewritten_and_put_behind_that_of_the_url() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let url = upstream.url();
        let gateway = protocol.start(&site(
        "",
        &[
            format!("{{ path: /strip/**, strip_prefix: /strip, upstream: {url} }}"),
            format!(
                "{{ path: /rewrite/**, rewrite: {{ pattern: '^/rewrite/(\\d+)', to: '/item/$1' }}, upstream: {url} }}"
            ),
            format!("{{ path: /url/**, strip_prefix: /url/, upstream: {url}/base/ }}"),
            format!("{{ path: /**, upstream: {url} }}"),
        ],
        "",
    ));
        let mut connection = gateway.client();
        for (asked, wanted) in [
            ("/strip/a/b?c=d", "/a/b?c=d"),
            ("/strip", "/"),
            ("/strip?x", "/?x"),
            ("/rewrite/42/x?y=1", "/item/42/x?y=1"),
            ("/url/a?b", "/base/a?b"),
            ("/url/a/?b", "/base/a/?b"),
            // A rewritten path is below the upstream's, however it is written.
            ("/url/../url/a", "/base/a"),
            ("/url/../%75rl/a%20b%40", "/base/a%20b@"),
            ("/strip/../../strip/a", "/a"),
            ("/%72ewrite/42", "/item/42"),
            ("/as/it%20is//../x?y=%2F&z#", "/as/it%20is/x?y=%2F&z"),
            ("/stripped", "/stripped"),
        ] {
            let answer = connection.get(asked.trim_end_matches('#'));
            assert_eq!(line(&answer), format!("GET {wanted} HTTP/1.1"), "{asked}");
        }
    });
}

#[test]
fn paths_are_changed_without_regard_to_case_where_routes_are_found_so() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let url = upstream.url();
        let routes = [
            format!("{{ path: /api/**, strip_prefix: /api, upstream: {url} }}"),
            format!("{{ path: /old/**, rewrite: {{ pattern: '^/old/', to: /new/ }}, upstream: {url} }}"),
            format!("{{ path: /own/**, paths: {{ case: sensitive }}, strip_prefix: /own, upstream: {url} }}"),
            format!("{{ path: /**, upstream: {url} }}"),
        ];
        let gateway = protocol.start(&site("paths: { case: insensitive }", &routes, ""));
        for (asked, wanted) in [
            ("/api/X", "/X"),
            ("/API/X?y", "/X?y"),
            ("/Api", "/"),
            ("/OLD/X", "/new/X"),
            ("/OWN/X", "/X"),
            ("/APIS/X", "/APIS/X"),
        ] {
            let answer = gateway.client().ask(format!("GET {asked} HTTP/1.1\r\nHost: h\r\n\r\n"));
            assert_eq!(line(&answer), format!("GET {wanted} HTTP/1.1"), "{asked}");
        }
    });
}

#[test]
fn a_route_that_ignores_case_is_found_in_any_case() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let url = upstream.url();
        let routes = [
            format!("{{ path: /api/**, paths: {{ case: insensitive }}, strip_prefix: /api, upstream: {url} }}"),
            format!("{{ path: /exact/**, strip_prefix: /exact, upstream: {url} }}"),
            format!("{{ path: /**, upstream: {url} }}"),
        ];
        let limits = "{ name: api, match: { path: /api/once }, algorithm: fixed_window, align: first_request, limit: 1, window: 1h }";
        let gateway = protocol.start(&site("", &routes, limits));
        for (asked, wanted) in
            [("/api/X", "/X"), ("/API/X?y", "/X?y"), ("/Api", "/"), ("/EXACT/X", "/EXACT/X"), ("/exact/X", "/X")]
        {
            let answer = gateway.client().ask(format!("GET {asked} HTTP/1.1\r\nHost: h\r\n\r\n"));
            assert_eq!(line(&answer), format!("GET {wanted} HTTP/1.1"), "{asked}");
        }
        // All cases of a path share its limits.
        let statuses: Vec<_> =
            ["/api/once", "/API/once", "/Api/ONCE"].map(|path| gateway.client().get(path).status).into_iter().collect();
        assert_eq!(statuses, [200, 429, 429]);
    });
}

#[test]
fn each_upstream_of_a_route_has_the_path_of_its_own_url() {
    each_protocol(|protocol| {
        let [one, two] = ["one", "two"].map(Raw::named);
        // Two of them share an address, and so their connections.
        let urls =
            [format!("{}/one", one.url()), format!("{}/two/", two.url()), format!("{}/three", one.url()), two.url()];
        let route =
            format!("{{ path: /api/**, strip_prefix: /api, balance: round_robin, upstream: [{}] }}", urls.join(", "));
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        let mut seen: Vec<_> = (0..8)
            .map(|_| {
                let answer = connection.get("/api/x?y=/z");
                format!("{} {}", by(&answer), line(&answer))
            })
            .collect();
        seen.sort();
        let wanted = ["one GET /one/x", "one GET /three/x", "two GET /two/x", "two GET /x"];
        assert_eq!(seen, wanted.map(|line| [(); 2].map(|()| format!("{line}?y=/z HTTP/1.1"))).concat());
    });
}

#[test]
fn a_request_tried_again_has_the_path_of_the_upstream_that_gets_it_alone() {
    each_protocol(|protocol| {
        let hangs_up = Raw::start(|conversation| _ = conversation.request());
        let live = Raw::named("live");
        // One has never seen the request; the other has, with its own path prepended.
        for (dead, path) in
            [(format!("http://{}", unused_address()), "/dead"), (hangs_up.url(), "/hangs/up"), (hangs_up.url(), "")]
        {
            for wanted in ["/live", ""] {
                let route = format!(
                    "{{ path: /**, balance: round_robin, upstream: [{dead}{path}, {}{wanted}], eject: {{ after: 1000000 }} }}",
                    live.url()
                );
                let gateway = protocol.start(&site("workers: 1", &[route], ""));
                let mut connection = gateway.client();
                for _ in 0..4 {
                    let answer = connection.get("/x?y");
                    assert_eq!(line(&answer), format!("GET {wanted}/x?y HTTP/1.1"), "after {dead}{path}");
                }
            }
        }
        let asked = hangs_up.seen().concat();
        assert!(asked.contains("GET /hangs/up/x?y HTTP/1.1\r\n") && asked.contains("GET /x?y HTTP/1.1\r\n"), "{asked}");
    });
}

#[test]
fn a_request_tried_again_asks_for_the_host_that_the_client_asked_for() {
    each_protocol(|protocol| {
        let hangs_up = Raw::start(|conversation| _ = conversation.more());
        let live = Raw::named("live");
        for scheme in ["http", "h2c"] {
            let dead = format!("{scheme}://{}/dead", hangs_up.address);
            for (host, wanted) in [("client", "shop.example.com".to_owned()), ("upstream", live.address.to_string())] {
                let route = format!(
                    "{{ path: /**, host: {host}, balance: round_robin, upstream: [{dead}, {}], eject: {{ after: 1000000 }} }}",
                    live.url()
                );
                let gateway = protocol.start(&site("workers: 1", &[route], ""));
                let mut connection = gateway.client();
                for _ in 0..4 {
                    let answer = connection.ask("GET /x HTTP/1.1\r\nHost: shop.example.com\r\n\r\n");
                    let text = answer.text().to_ascii_lowercase();
                    assert!(text.contains(&format!("\r\nhost: {wanted}\r\n")), "after {dead}: {text}");
                    assert_eq!(line(&answer), "GET /x HTTP/1.1", "after {dead}");
                }
            }
        }
        assert!(hangs_up.accepted() >= 8, "{}", hangs_up.accepted());
    });
}

#[test]
fn path_too_long_to_be_rewritten_is_not_forwarded() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let (url, longer) = (upstream.url(), "/p".repeat(500));
        let prefixed = format!("{{ path: /**, upstream: {url}{longer} }}");
        let rewritten = format!("{{ path: /**, rewrite: {{ pattern: '^', to: '{longer}' }}, upstream: {url} }}");
        for (number, route) in [prefixed, rewritten].into_iter().enumerate() {
            let gateway = protocol.start(&site("max_head: 128KiB", &[route], ""));
            let mut connection = gateway.client();
            // No URI is longer than 65,534 bytes. The query counts, too.
            assert_eq!(connection.get(&format!("/secret?{}", "x".repeat(64_900))).status, 404);
            assert_eq!(line(&connection.get("/x")), format!("GET {longer}/x HTTP/1.1"));
            assert_eq!(upstream.requests(), number + 1);
        }
    });
}

#[test]
fn headers_are_changed_both_ways() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                let expected = format!("{:?}", ["x-gone", "x-set", "x-added"].map(|name| asked.values(name)));
                conversation.send(format!(
                "HTTP/1.1 200 OK\r\nServer: secret\r\nX-Set: old\r\nX-Added: first\r\nContent-Length: {}\r\n\r\n{expected}",
                expected.len()
            ));
            }
        });
        let edits = "{ remove: [x-gone, server], set: { x-set: new }, add: { x-added: second } }";
        let gateway = protocol.start(&site(
            "",
            &[format!(
                "{{ path: /**, upstream: {}, request_headers: {edits}, response_headers: {edits} }}",
                upstream.url()
            )],
            "",
        ));
        let answer = gateway
            .client()
            .ask("GET / HTTP/1.1\r\nHost: h\r\nX-Gone: 1\r\nX-Set: a\r\nX-Set: b\r\nX-Added: first\r\n\r\n");
        assert_eq!(answer.text(), r#"[[], ["new"], ["first", "second"]]"#);
        assert_eq!((answer.header("server"), answer.header("x-set")), (None, Some("new")));
        let added: Vec<_> =
            answer.headers.iter().filter(|(name, _)| name == "x-added").map(|(_, value)| value).collect();
        assert_eq!(added, ["first", "second"]);
    });
}

/// A client may take another spelling for the same name, and a trailer for a header.
#[test]
fn removed_response_headers_and_trailers_are_removed_in_every_spelling() {
    each_protocol(|protocol| {
        const NAMES: [&str; 5] = ["x-secret", "x_secret", "x.secret", "x-set", "x_set"];
        let lines: String = NAMES.iter().map(|name| format!("{name}: 1\r\n")).collect();
        let http1 = Raw::answering(format!(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: {}, x-sum\r\n{lines}\r\n5\r\nhello\r\n0\r\n{lines}\
         X-Sum: 42\r\n\r\n",
            NAMES.join(", ")
        ));
        let http2 = Served::start(Speaks::Http2, |_| async {
            let trailers = NAMES.map(|name| (name, "1")).into_iter().chain([("x-sum", "42")]).collect::<Vec<_>>();
            let mut response = http::Response::new(with_trailers(Bytes::from_static(b"hello"), &trailers));
            for name in NAMES {
                response.headers_mut().insert(name, HeaderValue::from_static("1"));
            }
            response.headers_mut().insert("trailer", HeaderValue::try_from(NAMES.join(", ") + ", x-sum").unwrap());
            response
        });
        for upstream in [http1.url(), format!("h2c://{}", http2.address)] {
            let edits = "response_headers: { remove: [X-Secret], set: { X-Set: new } }";
            let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: '{upstream}', {edits} }}")], ""));
            let found = |pairs: Vec<(String, String)>| -> Vec<String> {
                let named = pairs.iter().filter(|(name, _)| NAMES.contains(&&**name) || name == "x-sum");
                named.map(|(name, value)| format!("{name}: {value}")).collect()
            };
            let asked = "GET / HTTP/1.1\r\nHost: h\r\nTE: trailers\r\nConnection: TE\r\n\r\n";
            let answer = gateway.client().ask(asked);
            assert_eq!((found(answer.headers), answer.body), (vec!["x-set: new".to_owned()], b"hello".to_vec()));
            assert_eq!(found(answer.trailers), ["x-sum: 42"], "{upstream}");
        }
    });
}

#[test]
fn an_upstream_is_asked_for_the_clients_host_or_for_its_own() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let url = upstream.url();
        let gateway = protocol.start(&site(
            "",
            &[
                format!("{{ path: /own, host: upstream, upstream: {url} }}"),
                format!("{{ path: /**, upstream: {url} }}"),
            ],
            "",
        ));
        let ask = |path: &str| {
            let answer = gateway.client().ask(format!("GET {path} HTTP/1.1\r\nHost: shop.example.com\r\n\r\n"));
            let text = answer.text().to_ascii_lowercase();
            text.lines().filter(|line| line.starts_with("host:")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(ask("/own"), [format!("host: {}", upstream.address)]);
        assert_eq!(ask("/other"), ["host: shop.example.com"]);
    });
}

#[test]
fn route_can_respond_itself_and_echo_returns_the_request() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site(
            "",
            &[
                "{ path: /down, respond: { status: 503, headers: { retry-after: '120' }, body: 'Back at noon.' } }",
                "{ path: /**, upstream: echo }",
            ],
            "",
        ));
        let mut connection = gateway.client();
        let down = connection.ask("POST /down HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello");
        assert_eq!((down.status, down.header("retry-after"), down.text()), (503, Some("120"), "Back at noon."));
        connection.send("HEAD /down HTTP/1.1\r\nHost: h\r\n\r\n");
        let head = connection.receive_head().unwrap();
        assert_eq!((head.status, head.header("content-length")), (503, Some("13")));
        let echo = connection.ask("PUT /a?b=c HTTP/1.1\r\nHost: h\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello");
        let expected: serde_json::Value = serde_json::from_str(echo.text()).unwrap();
        assert_eq!(
            expected,
            serde_json::json!({"method": "PUT", "path": "/a", "query": "b=c", "client": "127.0.0.1",
            "headers": {"host": "h", "x-y": "z", "content-length": "5"}, "body": "hello"})
        );
    });
}

#[test]
fn request_without_a_route_is_404_and_counted() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site("", &["{ path: /here, respond: { body: here } }"], &per_user(2)));
        let mut connection = gateway.client();
        let answer = connection.get_as("ann", "/nowhere");
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (404, Some("1")));
        assert!(answer.text().contains("no_route"), "{}", answer.text());
        assert_eq!(connection.get_as("ann", "/here").status, 200);
        assert_eq!(connection.get_as("ann", "/nowhere").status, 429, "guessing paths is not free");
    });
}

#[test]
fn file_without_a_gateway_starts_none() {
    let (said, code) = fails(&[("tollgate.yaml", "limits: [{ name: user }]\n")]);
    assert!(said.contains("configures nothing to serve: add `gateway: { routes: [...] }`"), "{said}");
    assert_eq!(code, Some(2));
}

#[test]
fn requests_are_shared_out_by_weight() {
    each_protocol(|protocol| {
        for balance in ["round_robin", "least_requests"] {
            let upstreams = ["light", "heavy"].map(Raw::named);
            let [light, heavy] = upstreams.each_ref().map(Raw::url);
            let route = format!(
                "{{ path: /**, balance: {balance}, upstream: [{{ url: {light}, weight: 1 }}, {{ url: {heavy}, weight: 3 }}] }}"
            );
            let gateway = protocol.start(&site("workers: 1", &[route], ""));
            let mut connection = gateway.client();
            let light = (0..40).filter(|_| by(&connection.get("/")) == "light").count();
            match balance {
                "round_robin" => assert_eq!(light, 10),
                // One at a time, so neither has requests in flight: the heavier is always less busy for its weight.
                _ => assert_eq!(light, 0, "{balance}"),
            }
        }
    });
}

#[test]
fn the_upstream_with_fewer_requests_under_way_gets_the_next() {
    each_protocol(|protocol| {
        let held = Arc::new(AtomicBool::new(true));
        let holding = Arc::clone(&held);
        let slow = Raw::start(move |conversation| {
            while conversation.request().is_some() {
                until("the end of the wait", || !holding.load(Relaxed));
                conversation.send("HTTP/1.1 200 OK\r\nX-Upstream: slow\r\nContent-Length: 0\r\n\r\n");
            }
        });
        let quick = Raw::named("quick");
        let route = format!("{{ path: /**, upstream: [{}, {}] }}", slow.url(), quick.url());
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut waiting = gateway.client();
        let mut other = gateway.client();
        // One of two goes to the slow upstream, and stays there.
        waiting.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        until("a request under way", || slow.requests() + quick.requests() == 1);
        if slow.requests() == 0 {
            assert_eq!(by(&waiting.receive()), "quick");
            waiting.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
            until("a request at the slow upstream", || slow.requests() == 1);
        }
        for _ in 0..10 {
            assert_eq!(by(&other.get("/")), "quick");
        }
        held.store(false, Relaxed);
        assert_eq!(by(&waiting.receive()), "slow");
    });
}
