//! HTTP/1 on both sides: connections, bodies, trailers, and heads that a proxy must understand.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use futures_util::stream::iter;
use http::{Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use testkit::client::each_http1;
use testkit::gateway::{Gateway, per_user, site};
use testkit::upstream::{Raw, Served, Speaks, full};
use testkit::wait::until;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[test]
fn requests_share_connections_on_both_sides() {
    each_http1(|protocol| {
        let upstream = Raw::answering(OK);
        let gateway =
            protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
        let mut connection = gateway.connect();
        for _ in 0..20 {
            assert_eq!(connection.get("/").text(), "ok");
        }
        for _ in 0..5 {
            assert_eq!(gateway.get("/").text(), "ok");
        }
        assert_eq!((upstream.accepted(), upstream.requests()), (1, 25));
    });
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        connection.send((0..10).map(|number| format!("GET /{number} HTTP/1.1\r\nHost: h\r\n\r\n")).collect::<String>());
        for number in 0..10 {
            assert!(connection.receive().text().starts_with(&format!("GET /{number} ")));
        }
    });
}

#[test]
fn very_many_requests_in_one_write_are_answered_in_order() {
    const REQUESTS: usize = 5_000;
    let gateway = Gateway::start(&site("", &["{ path: /**, upstream: echo }"], ""));
    let mut connection = gateway.connect();
    let mut tcp = connection.tcp();
    let request = |number| format!("GET /{number} HTTP/1.1\r\nHost: h\r\n\r\n");
    let requests: String = (0..REQUESTS).map(request).collect();
    let writing = std::thread::spawn(move || tcp.write_all(requests.as_bytes()));
    for number in 0..REQUESTS {
        let answer = connection.receive();
        assert!(answer.text().contains(&format!("\"path\":\"/{number}\"")), "{number}: {}", answer.text());
    }
    writing.join().unwrap().unwrap();
}

/// Each boundary of the requests falls into another part of what the gateway reads.
#[test]
fn requests_that_are_sent_in_parts_reach_the_upstream_whole() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                let seen = format!("{} {}", asked.head.lines().next().unwrap_or(""), asked.body.len());
                conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{seen}", seen.len()));
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let one = "POST /one HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc";
        let requests = format!("{one}GET /two HTTP/1.1\r\nHost: h\r\n\r\n{}", one.replace("/one", "/three"));
        for at in (1..requests.len()).step_by(7) {
            let mut connection = gateway.connect();
            connection.send(&requests[..at]);
            // The first part has probably been read when another connection was served.
            assert_eq!(gateway.get("/other").text(), "GET /other HTTP/1.1 0");
            connection.send(&requests[at..]);
            for seen in ["POST /one HTTP/1.1 3", "GET /two HTTP/1.1 0", "POST /three HTTP/1.1 3"] {
                assert_eq!(connection.receive().text(), seen, "{at} bytes in the first part");
            }
        }
    });
}

#[test]
fn bytes_behind_a_malformed_request_reach_no_upstream() {
    each_http1(|protocol| {
        let upstream = Raw::answering(OK);
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        let (good, bad) = ("GET /good HTTP/1.1\r\nHost: h\r\n\r\n", "GET /bad HTTP/1.1\r\nHost h\r\n\r\n");
        connection.send(format!("{good}{bad}{good}"));
        assert_eq!([(); 2].map(|()| connection.receive().status), [200, 400]);
        assert!(connection.is_closed());
        assert_eq!(upstream.requests(), 1);
    });
}

#[test]
fn a_client_that_wants_the_connection_closed_gets_that() {
    each_http1(|protocol| {
        let upstream = Raw::answering(OK);
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        let answer = connection.ask("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
        assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
        assert!(connection.is_closed());
    });
}

#[test]
fn http_1_0_is_answered_and_the_upstream_is_asked_in_1_1() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while conversation.request().is_some() {
                conversation.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n");
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        let answer = connection.ask("GET /old HTTP/1.0\r\n\r\n");
        assert_eq!((answer.status, answer.text(), answer.header("transfer-encoding")), (200, "ok", None));
        assert!(connection.is_closed());
        let seen = upstream.seen().concat().to_ascii_lowercase();
        assert!(seen.starts_with("get /old http/1.1\r\n"), "{seen}");
        // RFC 9112, 3.2: a request of HTTP/1.1 has a host.
        assert!(seen.contains(&format!("\r\nhost: {}\r\n", upstream.address)), "{seen}");
        let answer = gateway.connect().ask("GET /old HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n");
        assert_eq!((answer.status, answer.text()), (200, "ok"));
    });
}

#[test]
fn http_1_0_keeps_a_connection_only_if_the_client_asks_for_it() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                conversation.send(match asked.head.split(' ').nth(1) {
                    Some("/chunked") => {
                        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: y\r\n\r\n"
                    }
                    _ => OK,
                });
            }
        });
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], &per_user(3)));
        let keep = "X-User-Id: ann\r\nConnection: Keep-Alive\r\n\r\n";
        let mut connection = gateway.connect();
        for (target, status) in [("/", 200), ("/", 200), ("/", 200), ("/", 429)] {
            let answer = connection.ask(format!("POST {target} HTTP/1.0\r\nContent-Length: 0\r\n{keep}"));
            assert_eq!((answer.status, answer.header("connection")), (status, Some("keep-alive")), "{target}");
        }
        let chunked = connection.ask("GET /chunked HTTP/1.0\r\nTE: trailers\r\nConnection: keep-alive\r\n\r\n");
        assert_eq!((chunked.text(), chunked.header("connection")), ("ok", Some("close")), "only the end ends the body");
        assert_eq!(chunked.header("transfer-encoding"), None);
        let mut connection = gateway.connect();
        let answer = connection.ask("GET / HTTP/1.0\r\nHost: h\r\nExpect: 100-continue\r\n\r\n");
        assert_eq!((answer.status, answer.text(), answer.header("connection")), (200, "ok", Some("close")));
        assert!(connection.is_closed());
        assert!(upstream.seen().concat().contains("via: 1.0 tollgate-"));
    });
}

#[test]
fn a_request_of_1_1_without_a_host_is_refused() {
    each_http1(|protocol| {
        let upstream = Raw::answering(OK);
        let gateway = protocol.start_before(&upstream.url());
        assert_eq!(gateway.connect().ask("GET / HTTP/1.1\r\n\r\n").status, 400);
        assert_eq!(upstream.accepted(), 0);
    });
}

#[test]
fn head_has_the_length_and_no_body() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                let is_head = asked.head.starts_with("HEAD ");
                conversation.send(if is_head { "HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n" } else { OK });
            }
        });
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], &per_user(2)));
        let mut connection = gateway.connect();
        for _ in 0..2 {
            connection.send("HEAD / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
            let head = connection.receive_head().unwrap();
            assert_eq!((head.status, head.header("content-length")), (200, Some("12345")));
        }
        connection.send("HEAD / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
        let denied = connection.receive_head().unwrap();
        assert_eq!(denied.status, 429);
        assert!(denied.header("content-length").unwrap().parse::<usize>().unwrap() > 0);
        assert_eq!(connection.get("/").status, 200, "the connection goes on behind it");
    });
}

#[test]
fn bodies_in_chunks_pass_both_ways() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                conversation.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
                for piece in asked.body.chunks(3) {
                    conversation.send(format!("{:x}\r\n", piece.len()));
                    conversation.send([piece, b"\r\n"].concat());
                }
                conversation.send("0\r\n\r\n");
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        for _ in 0..3 {
            connection.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
            connection.send("5;ext=1\r\nhello\r\n");
            connection.send("7\r\n, world\r\n0\r\n\r\n");
            let answer = connection.receive();
            assert_eq!((answer.text(), answer.header("transfer-encoding")), ("hello, world", Some("chunked")));
        }
        assert!(!upstream.seen().concat().contains("ext"), "extensions are between neighbours");
    });
}

/// Some servers treat trailers as headers: uvicorn as those of the same request, aiohttp as those of the next.
#[test]
fn trailers_of_responses_pass_and_those_of_requests_do_not_reach_http_1() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                assert_eq!((&asked.values("te")[..], asked.values("trailer").len()), (&["trailers"][..], 0));
                conversation.send(format!(
                    "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n\
                 2\r\n{:02}\r\n0\r\nX-Sum: 42\r\n\r\n",
                    asked.trailers.len(),
                ));
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let answer = gateway.connect().ask(
            "POST / HTTP/1.1\r\nHost: h\r\nTE: trailers\r\nTrailer: X-Check\r\nTransfer-Encoding: chunked\r\n\r\n\
         2\r\nok\r\n0\r\nX-Check: 7\r\n\r\n",
        );
        assert_eq!(answer.text(), "00", "bytes of trailers at the upstream");
        assert_eq!(answer.trailers, [("x-sum".to_owned(), "42".to_owned())]);
    });
}

#[test]
fn interim_continue_is_sent_only_when_the_body_is_wanted() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], &per_user(1)));
        let request =
            "POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n";
        let mut connection = gateway.connect();
        assert_eq!(connection.ask(request).status, 100);
        let answer = connection.ask("hello");
        assert_eq!(answer.status, 200);
        assert!(upstream.seen().concat().ends_with("\r\n\r\nhello"));
        let denied = gateway.connect().ask(request);
        assert_eq!(denied.status, 429, "no 100 before it");
        assert_eq!(upstream.requests(), 1);
    });
}

#[test]
fn interim_answers_of_an_upstream_reach_clients_of_1_1_at_once() {
    each_http1(|protocol| {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let upstream = Raw::start(move |conversation| {
            while let Some(asked) = conversation.request() {
                conversation.send(
                    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nConnection: x-mine\r\nX-Mine: 1\r\n",
                );
                conversation
                    .send("Link: </a.css>; rel=preload\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </b.css>\r\n\r\nHTTP");
                if asked.head.starts_with("GET /wait") {
                    released.lock().unwrap().recv().unwrap();
                }
                conversation.send(&OK[4..]);
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        for _ in 0..3 {
            connection.send("GET /wait HTTP/1.1\r\nHost: h\r\n\r\n");
            for link in ["</a.css>; rel=preload", "</b.css>"] {
                let hint = connection.receive();
                assert_eq!((hint.status, hint.header("link"), hint.headers.len()), (103, Some(link), 1));
            }
            release.send(()).unwrap();
            let answer = connection.receive();
            assert_eq!((answer.status, answer.text()), (200, "ok"));
        }
        let answer = gateway.connect().ask("GET / HTTP/1.0\r\n\r\n");
        assert_eq!((answer.status, answer.text()), (200, "ok"), "clients of HTTP/1.0 do not know them");
    });
}

#[test]
fn upstream_that_sends_interim_answers_without_end_is_given_up() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                let interim = asked.head.split(['/', ' ']).nth(2).and_then(|number| number.parse().ok()).unwrap();
                conversation.send("HTTP/1.1 102 Processing\r\n\r\n".repeat(interim));
                conversation.send(OK);
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        for (interim, status) in [(32, 200), (33, 502)] {
            let mut connection = gateway.connect();
            connection.send(format!("GET /{interim} HTTP/1.1\r\nHost: h\r\n\r\n"));
            let mut answers = std::iter::repeat_with(|| connection.receive().status);
            assert_eq!(answers.find(|status| *status != 102), Some(status), "{interim}");
        }
    });
}

/// A connection is not bound to the protocol of its first upstream.
#[test]
fn one_connection_reaches_upstreams_of_every_protocol() {
    each_http1(|protocol| {
        let http1 = Raw::named("one");
        let http2 = Served::start(Speaks::Http2, |request: Request<Incoming>| async {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let text = format!("{} {} {:?}", parts.method, parts.uri.path(), body);
            let mut response = Response::new(full(text));
            if parts.uri.path().ends_with("/stream") {
                *response.body_mut() = BodyExt::boxed(StreamBody::new(iter([Ok(Frame::data(body))])));
            }
            response
        });
        let routes = [
            format!("{{ path: /two/**, upstream: 'h2c://{}' }}", http2.address),
            format!("{{ path: /**, upstream: {} }}", http1.url()),
        ];
        let gateway = protocol.start(&site("", &routes, ""));
        let mut connection = gateway.connect();
        for _ in 0..3 {
            assert!(connection.get("/one").text().starts_with("GET /one "));
            let answer = connection.get("/two//a");
            assert_eq!((answer.text(), answer.header("via")), ("GET /two/a b\"\"", Some("2 tollgate")));
            for body in ["Content-Length: 5\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
            {
                let answer = connection.ask(format!("POST /two/b HTTP/1.1\r\nHost: h\r\n{body}"));
                assert_eq!(answer.text(), "POST /two/b b\"hello\"");
                let answer = connection.ask(format!("POST /two/stream HTTP/1.1\r\nHost: h\r\n{body}"));
                assert_eq!((answer.text(), answer.header("transfer-encoding")), ("hello", Some("chunked")));
            }
            connection.send("HEAD /two/c HTTP/1.1\r\nHost: h\r\n\r\n");
            assert_eq!(connection.receive_head().unwrap().status, 200);
            let refused = connection.ask("CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n");
            assert_eq!(refused.status, 405);
        }
        let old = gateway.connect().ask("POST /two/stream HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello");
        assert_eq!((old.text(), old.header("connection")), ("hello", Some("close")));
        let pipelined = "GET /two/1 HTTP/1.1\r\nHost: h\r\n\r\nGET /2 HTTP/1.1\r\nHost: h\r\n\r\nGET /two/3 HTTP/1.1\r\nHost: h\r\n\r\n";
        connection.send(pipelined);
        for path in ["/two/1 ", "/2 ", "/two/3 "] {
            assert!(connection.receive().text().contains(path), "{path}");
        }
    });
}

#[test]
fn answers_without_a_body_leave_the_connection_good() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                conversation.send(match asked.head.split(' ').nth(1) {
                    Some("/204") => "HTTP/1.1 204 No Content\r\n\r\n",
                    Some("/304") => "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 99\r\n\r\n",
                    Some("/empty") => "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
                    _ => OK,
                });
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        for _ in 0..2 {
            let answer = connection.get("/204");
            assert_eq!((answer.status, answer.header("content-length")), (204, None));
            assert_eq!(answer.header("transfer-encoding"), None);
            let answer = connection.get("/304");
            assert_eq!((answer.status, answer.header("etag")), (304, Some("\"x\"")));
            assert_eq!(connection.get("/empty").text(), "");
            assert_eq!(connection.get("/").text(), "ok");
        }
    });
}

#[test]
fn an_answer_that_ends_with_its_connection_is_passed_on_whole() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.send("HTTP/1.1 200 OK\r\n\r\nsome");
            std::thread::sleep(Duration::from_millis(50));
            conversation.send(" more");
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        for _ in 0..3 {
            assert_eq!(connection.get("/").text(), "some more");
        }
    });
}

#[test]
fn hop_by_hop_headers_are_not_forwarded() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                conversation.send(format!(
                    "HTTP/1.1 200 OK\r\nConnection: X-Mine, keep-alive\r\nX-Mine: 1\r\nKeep-Alive: timeout=5\r\n\
                 Proxy-Authenticate: Basic\r\nUpgrade: h2c\r\nX-End: 1\r\nContent-Length: {}\r\n\r\n{}",
                    asked.head.len(),
                    asked.head
                ));
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let answer = gateway.connect().ask(
            "POST / HTTP/1.1\r\nHost: h\r\nConnection: X-Mine, close, Content-Length, Host\r\nX-Mine: 1\r\n\
         Keep-Alive: 5\r\nTE: gzip\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nX-End: 1\r\n\
         Content-Length: 0\r\n\r\n",
        );
        let seen = answer.text().to_ascii_lowercase();
        for gone in ["connection:", "x-mine:", "keep-alive:", "te:", "proxy-connection:", "proxy-authorization:"] {
            assert!(!seen.contains(&format!("\r\n{gone}")), "{gone} in {seen}");
        }
        assert!(seen.contains("\r\nx-end: 1\r\n") && seen.contains("\r\nhost: h\r\n"), "{seen}");
        for gone in ["x-mine", "keep-alive", "proxy-authenticate", "upgrade"] {
            assert_eq!(answer.header(gone), None, "{gone}");
        }
        assert_eq!((answer.header("x-end"), answer.header("connection")), (Some("1"), Some("close")));
    });
}

#[test]
fn a_target_in_absolute_form_names_the_host() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        let port = if protocol.scheme() == "https" { 443 } else { 80 };
        let target = format!("{}://shop.example.com/a?b", protocol.scheme());
        for host in ["shop.example.com".to_owned(), "Shop.Example.com.".to_owned(), format!("shop.example.com:{port}")]
        {
            let answer = gateway.connect().ask(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
            let seen = answer.text();
            assert!(seen.starts_with("GET /a?b HTTP/1.1\r\n"), "{seen}");
            assert!(
                seen.contains("\r\nhost: shop.example.com\r\n") && !seen.contains(&format!("{host}\r\nHost")),
                "{seen}"
            );
            assert_eq!(seen.to_ascii_lowercase().matches("\r\nhost:").count(), 1, "{seen}");
        }
        let answer = gateway.connect().ask(format!("GET {target} HTTP/1.0\r\n\r\n"));
        assert!(answer.text().contains("\r\nhost: shop.example.com\r\n"), "{}", answer.text());
    });
}

/// A limit and an upstream could each read another of the two.
#[test]
fn a_target_that_names_another_host_than_the_host_header_is_refused() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        let (scheme, port) = (protocol.scheme(), if protocol.scheme() == "https" { 443 } else { 80 });
        for (authority, host) in [
            ("other".to_owned(), "h".to_owned()),
            ("h".to_owned(), format!("h:{}", 523 - port)),
            ("h:81".to_owned(), "h".to_owned()),
            ("h".to_owned(), "h.h".to_owned()),
        ] {
            for version in ["1.1", "1.0"] {
                let request = format!("GET {scheme}://{authority}/ HTTP/{version}\r\nHost: {host}\r\n\r\n");
                let mut connection = gateway.connect();
                let answer = connection.ask(request);
                assert_eq!(answer.status, 400, "{authority} {host}: {}", answer.text());
                assert!(answer.text().contains(r#""reason":"several_hosts""#), "{authority} {host}: {}", answer.text());
                assert!(connection.is_closed(), "{authority} {host}");
            }
        }
        assert_eq!(upstream.requests(), 0);
    });
}

#[test]
fn connect_and_the_asterisk_have_their_answers() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        assert_eq!(gateway.connect().ask("CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n").status, 405);
        assert_eq!(upstream.accepted(), 0);
        let answer = gateway.connect().ask("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n");
        assert!(answer.text().starts_with("OPTIONS * HTTP/1.1\r\n"), "{}: {}", answer.status, answer.text());
    });
}

#[test]
fn a_client_that_goes_away_ends_the_request_to_the_upstream() {
    each_http1(|protocol| {
        let has_ended = Arc::new(AtomicBool::new(false));
        let sees_end = Arc::clone(&has_ended);
        let upstream = Raw::start(move |conversation| {
            _ = conversation.request();
            conversation.await_end();
            sees_end.store(true, Relaxed);
        });
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, timeout: 1h, upstream: {} }}", upstream.url())], ""));
        let mut connection = gateway.connect();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        until("a request at the upstream", || upstream.requests() == 1);
        assert!(!has_ended.load(Relaxed));
        drop(connection);
        until("the end of the request at the upstream", || has_ended.load(Relaxed));
    });
}
