//! Requests whose client leaves while an upstream still works on them: `in_flight` bounds the work of upstreams.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::certificates::Authority;
use testkit::client::{each_http1, each_protocol};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, site};
use testkit::upstream::{Raw, Served, Speaks, accepting, full};
use testkit::wait::until;
use tokio_rustls::TlsAcceptor;

use crate::upgrades::{HANDSHAKE, SWITCH};
use crate::upstream_tls::server;

const GET: &str = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";

/// Requests beyond the two that are allowed at once.
const RESETS: u32 = 50;
const PACE: Duration = Duration::from_millis(5);

const AT_ONCE: &str = "{ name: at-once, key: const:all, in_flight: 2 }";

/// Handlers of an upstream that run at the same time. They run to their end, even if their client hangs up.
#[derive(Clone, Default)]
struct Work(Arc<Counts>);

#[derive(Default)]
struct Counts {
    begun: AtomicUsize,
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Work {
    /// Works in a task of its own, so that nothing ends the work early.
    async fn run(&self) {
        let this = self.clone();
        let working = tokio::spawn(async move {
            this.begin();
            tokio::time::sleep(Duration::from_secs(1)).await;
            this.end();
        });
        working.await.unwrap();
    }

    fn begin(&self) {
        self.0.begun.fetch_add(1, SeqCst);
        let running = self.0.running.fetch_add(1, SeqCst) + 1;
        self.0.most.fetch_max(running, SeqCst);
    }

    fn end(&self) {
        self.0.running.fetch_sub(1, SeqCst);
    }

    fn begun(&self) -> usize {
        self.0.begun.load(SeqCst)
    }

    fn running(&self) -> usize {
        self.0.running.load(SeqCst)
    }

    #[track_caller]
    fn never_exceeded_two(&self) {
        let most = self.0.most.load(SeqCst);
        assert!(most <= 2, "{most} requests are at the upstream at once");
    }
}

/// An upstream that works for a second on every request, and answers then.
fn working(speaks: Speaks) -> (Served, Work) {
    let work = Work::default();
    let counted = work.clone();
    let upstream = Served::start(speaks, move |_: Request<Incoming>| {
        let work = counted.clone();
        async move {
            work.run().await;
            Response::new(full("done"))
        }
    });
    (upstream, work)
}

/// Sends request after request and abandons each of them a moment later: a client of HTTP/1 closes its connection, one of
/// HTTP/2 resets the stream.
fn abandon_over_and_over(gateway: &Gateway, request: &str) {
    let mut client = gateway.client();
    for _ in 0..RESETS {
        client.send(request);
        std::thread::sleep(PACE);
        client.abandon();
        std::thread::sleep(PACE);
        if !gateway.protocol.is_http2() {
            client = gateway.client();
        }
    }
}

/// Abandons requests with and without a body, for any protocol of the upstream.
#[track_caller]
fn abandon_requests(gateway: &Gateway, work: &Work) {
    // From here on there is an open connection for requests.
    assert_eq!(gateway.get("/").status, 200);
    // On a busy machine, the others may all be abandoned before an upstream has them.
    let mut client = gateway.client();
    client.send(GET);
    until("the upstream has the request", || work.begun() > 1);
    client.abandon();
    // The rest of the second body never arrives.
    for request in [GET, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf"] {
        abandon_over_and_over(gateway, request);
        work.never_exceeded_two();
    }
    // Permits are returned.
    until("the upstream has nothing to do", || work.running() == 0);
    until("there is a permit again", || gateway.get("/").status == 200);
    assert!(work.begun() > 2, "abandoned requests were at the upstream");
}

#[test]
fn resets_and_hang_ups_never_put_more_requests_at_an_http_1_upstream_than_are_allowed() {
    each_protocol(|protocol| {
        let (upstream, work) = working(Speaks::Http1);
        let route = format!("{{ path: /**, timeout: 3s, upstream: 'http://{}' }}", upstream.address);
        let gateway = protocol.start(&site("", &[route], AT_ONCE));
        abandon_requests(&gateway, &work);
    });
}

#[test]
fn resets_and_hang_ups_never_put_more_requests_at_an_http_2_upstream_than_are_allowed() {
    each_protocol(|protocol| {
        let (upstream, work) = working(Speaks::Http2);
        let route = format!("{{ path: /**, timeout: 3s, upstream: 'h2c://{}' }}", upstream.address);
        let gateway = protocol.start(&site("", &[route], AT_ONCE));
        abandon_requests(&gateway, &work);
    });
}

#[test]
fn resets_and_hang_ups_never_put_more_requests_at_a_tls_upstream_than_are_allowed() {
    each_protocol(|protocol| {
        for speaks in [Speaks::Http1, Speaks::Http2] {
            let authority = Authority::new();
            let mut config = server(&authority.sign(&["api.internal"]));
            config.alpn_protocols = vec![match speaks {
                Speaks::Http1 => b"http/1.1".to_vec(),
                Speaks::Http2 => b"h2".to_vec(),
            }];
            let (tls, work) = (TlsAcceptor::from(Arc::new(config)), Work::default());
            let counted = work.clone();
            let (address, _) = accepting(move |tcp| {
                let (tls, work) = (tls.clone(), counted.clone());
                let service = service_fn(move |_: Request<Incoming>| {
                    let work = work.clone();
                    async move {
                        work.run().await;
                        Ok::<_, Infallible>(Response::new(full("done")))
                    }
                });
                async move {
                    let Ok(stream) = tls.accept(tcp).await else { return };
                    let io = TokioIo::new(stream);
                    _ = match speaks {
                        Speaks::Http1 => http1::Builder::new().serve_connection(io, service).await,
                        Speaks::Http2 => http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await,
                    };
                }
            });
            let tls = "{ ca: ca.pem, server_name: api.internal }";
            let route = format!("{{ path: /**, timeout: 3s, upstream: 'https://{address}', upstream_tls: {tls} }}");
            let folder = folder_with(&[("tollgate.yaml", &site("", &[route], AT_ONCE)), ("ca.pem", &authority.pem())]);
            abandon_requests(&protocol.start_in(folder), &work);
        }
    });
}

/// Returns an upstream that starts its response at once, and works for a second before the rest of it.
fn begins_early(head: &'static str) -> (Raw, Work) {
    let work = Work::default();
    let counted = work.clone();
    let upstream = Raw::start(move |conversation| {
        while conversation.request().is_some() {
            counted.begin();
            let is_sent = conversation.send(head);
            std::thread::sleep(Duration::from_secs(1));
            counted.end();
            if !is_sent || !conversation.send("done") {
                return;
            }
        }
    });
    (upstream, work)
}

#[test]
fn a_client_that_leaves_in_the_middle_of_an_answer_keeps_its_permit_until_the_end_of_it() {
    each_protocol(|protocol| {
        let (upstream, work) = begins_early("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n");
        let connections = "upstream_connections: { idle: 1m }";
        let route = format!("{{ path: /**, timeout: 3s, {connections}, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], AT_ONCE));
        abandon_over_and_over(&gateway, GET);
        work.never_exceeded_two();
        until("there is a permit again", || gateway.get("/").text() == "done");
        // On a busy machine, some clients leave before their connection to the upstream is open.
        let used = upstream.seen().iter().filter(|seen| !seen.is_empty()).count();
        assert!(used <= 8, "connections are used again: {used}");
    });
}

#[test]
fn an_event_stream_is_closed_when_its_client_leaves() {
    each_protocol(|protocol| {
        let closed = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&closed);
        let upstream = Raw::start(move |conversation| {
            _ = conversation.request();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\ndata: 1\n\n");
            conversation.await_end();
            counted.fetch_add(1, SeqCst);
        });
        let route = format!("{{ path: /**, timeout: 1h, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], "{ name: at-once, key: const:all, in_flight: 1 }"));
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(connection.receive_head().unwrap().status, 200);
        drop(connection);
        until("the upstream hears of it", || closed.load(SeqCst) == 1);
        until("there is a permit again", || {
            let mut connection = gateway.client();
            connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
            connection.receive_head().unwrap().status == 200
        });
    });
}

#[test]
fn an_endless_answer_is_closed_after_its_client_has_left() {
    each_protocol(|protocol| {
        let closed = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&closed);
        let upstream = Raw::start(move |conversation| {
            _ = conversation.request();
            conversation.send("HTTP/1.1 200 OK\r\n\r\n");
            while conversation.send([7; 4096]) {}
            counted.fetch_add(1, SeqCst);
        });
        let route = format!("{{ path: /**, timeout: 1h, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], AT_ONCE));
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(connection.receive_head().unwrap().status, 200);
        drop(connection);
        until("the upstream hears of it", || closed.load(SeqCst) == 1);
    });
}

#[test]
fn an_upstream_that_never_answers_gives_the_permit_back_at_the_routes_timeout() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.await_end();
        });
        let route = format!("{{ path: /**, timeout: 4s, retries: 0, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], "{ name: at-once, key: const:all, in_flight: 1 }"));
        until("it is at the upstream", || {
            let mut client = gateway.client();
            client.send(GET);
            std::thread::sleep(PACE);
            client.abandon();
            upstream.requests() > 0
        });
        assert_eq!(gateway.get("/").status, 429);
        until("there is a permit again", || gateway.get("/").status == 504);
    });
}

#[test]
fn a_request_that_was_not_sent_gives_its_permit_back_at_once() {
    each_protocol(|protocol| {
        // No connection is accepted there, and once the queue is full the kernel answers no further attempt.
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.listen(0).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let attempt = || TcpStream::connect_timeout(&address, Duration::from_millis(200));
        let queued: Vec<_> = std::iter::from_fn(|| attempt().ok()).collect();
        let routes = [
            format!("{{ path: /stuck, connect_timeout: 1h, upstream: 'http://{address}' }}"),
            "{ path: /**, respond: { body: ok } }".to_owned(),
        ];
        let gateway = protocol.start(&site("", &routes, "{ name: at-once, key: const:all, in_flight: 1 }"));
        let mut connection = gateway.client();
        until("it is under way", || {
            // The last request may have been refused because the GET below had the permit.
            connection = gateway.client();
            connection.send("GET /stuck HTTP/1.1\r\nHost: h\r\n\r\n");
            std::thread::sleep(PACE);
            gateway.get("/").status == 429
        });
        drop(connection);
        until("there is a permit again", || gateway.get("/").status == 200);
        drop(queued);
    });
}

/// Counts handlers of an upstream that have ended. Those whose connection is closed end early.
struct CountedOnDrop(Arc<AtomicUsize>);

impl Drop for CountedOnDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// An upstream whose handlers read the whole request and do not respond until they are released, except for `/quick`.
struct Held {
    upstream: Served,
    begun: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
    release: tokio::sync::watch::Sender<bool>,
}

fn holding(speaks: Speaks) -> Held {
    let (release, released) = tokio::sync::watch::channel(false);
    let (begun, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counters = (Arc::clone(&begun), Arc::clone(&ended));
    let upstream = Served::start(speaks, move |request: Request<Incoming>| {
        let (mut released, (begun, ended)) = (released.clone(), counters.clone());
        async move {
            if request.uri().path() != "/quick" {
                begun.fetch_add(1, SeqCst);
                let _ended = CountedOnDrop(ended);
                if request.into_body().collect().await.is_ok() {
                    _ = released.wait_for(|released| *released).await;
                }
            }
            Response::new(full("done"))
        }
    });
    Held { upstream, begun, ended, release }
}

#[test]
fn abandoned_requests_beyond_the_bound_lose_their_connection_and_keep_their_permit() {
    each_protocol(|protocol| {
        const BOUND: usize = 256;
        const BEYOND: usize = 8;
        let Held { upstream, begun, ended, release } = holding(Speaks::Http1);
        let address = upstream.address;
        let routes = [
            format!("{{ path: /short, timeout: 4s, upstream: 'http://{address}' }}"),
            format!("{{ path: /**, timeout: 1h, upstream: 'http://{address}' }}"),
        ];
        let limits = "{ name: at-once, key: 'header:x-user-id', in_flight: 1 }";
        let rules = site("workers: 1", &routes, limits) + "admin: { listen: 127.0.0.1:0 }\n";
        let gateway = protocol.start(&rules);
        let leave = |user: &str, path: &str| {
            let before = begun.load(SeqCst);
            let mut connection = gateway.client();
            connection.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\nX-User-Id: {user}\r\n\r\n"));
            until("it is at the upstream", || begun.load(SeqCst) > before);
        };
        let status = |user: &str| gateway.client().get_as(user, "/quick").status;
        for number in 0..BOUND {
            leave(&number.to_string(), "/");
        }
        gateway.await_metric("tollgate_abandoned_requests", BOUND as u64);
        for number in BOUND..BOUND + BEYOND {
            leave(&number.to_string(), "/");
        }
        gateway.await_metric("tollgate_abandoned_requests", (BOUND + BEYOND) as u64);
        until("connections beyond the bound are closed", || ended.load(SeqCst) == BEYOND);
        assert_eq!(status("ann"), 200, "other users are served");
        assert_eq!(["0", "256", "263"].map(status), [429; 3]);
        leave("ben", "/short");
        until("the route's timeout gives the permit back", || status("ben") == 200);
        release.send(true).unwrap();
        gateway.await_metric("tollgate_abandoned_requests", BEYOND as u64);
        assert_eq!((status("0"), status("263")), (200, 429));
    });
}

/// An upstream that waits for the rest of a body is blocked, and nothing shows how long it works on the first half.
#[test]
fn a_broken_body_closes_the_upstream_connection_and_keeps_the_permit() {
    each_protocol(|protocol| {
        for (speaks, scheme) in [(Speaks::Http1, "http"), (Speaks::Http2, "h2c")] {
            let Held { upstream, begun, ended, .. } = holding(speaks);
            let route = format!("{{ path: /**, timeout: 1h, upstream: '{scheme}://{}' }}", upstream.address);
            let gateway = protocol.start(&site("", &[route], "{ name: at-once, key: const:all, in_flight: 1 }"));
            let mut client = gateway.client();
            client.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf");
            until("it is at the upstream", || begun.load(SeqCst) == 1);
            client.abandon();
            until("the request to the upstream is closed", || ended.load(SeqCst) == 1);
            for _ in 0..20 {
                assert_eq!(gateway.get("/quick").status, 429, "{scheme}");
                std::thread::sleep(PACE);
            }
        }
    });
}

#[test]
fn a_body_that_breaks_after_the_answer_has_begun_keeps_the_permit_too() {
    each_protocol(|protocol| {
        let closed = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&closed);
        let upstream = Raw::start(move |conversation| {
            _ = conversation.head();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
            conversation.await_end();
            counted.fetch_add(1, SeqCst);
        });
        let route = format!("{{ path: /**, timeout: 1h, upstream: {} }}", upstream.url());
        let limits = "{ name: at-once, key: const:all, in_flight: 1 }";
        // A client that disconnects, and one that sends more than is allowed and stays.
        for (number, rest) in [None, Some("x".repeat(100))].into_iter().enumerate() {
            let gateway = protocol.start(&site("max_body: 50B", std::slice::from_ref(&route), limits));
            let mut connection = gateway.client();
            connection.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n");
            assert_eq!(connection.receive_head().unwrap().status, 200);
            match rest {
                None => drop(connection),
                Some(rest) => connection.send(format!("64\r\n{rest}\r\n")),
            }
            until("the upstream connection is closed", || closed.load(SeqCst) == number + 1);
            for _ in 0..20 {
                assert_eq!(gateway.get("/").status, 429);
                std::thread::sleep(PACE);
            }
        }
    });
}

/// Whatever was served on the connection before the handshake.
#[test]
fn a_websocket_holds_its_permit_as_long_as_its_tunnel() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                if asked.values("upgrade").is_empty() {
                    conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
                    continue;
                }
                conversation.send(SWITCH);
                return conversation.await_end();
            }
        });
        let limits = "{ name: at-once, key: 'header:x-user-id', in_flight: 1 }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        for before in [0, 1] {
            let mut chatting = gateway.connect();
            for _ in 0..before {
                assert_eq!(chatting.get("/").status, 200);
            }
            until("there is a permit", || chatting.ask(HANDSHAKE).status == 101);
            for _ in 0..3 {
                assert_eq!(gateway.connect().get_as("ann", "/").status, 429);
                assert_eq!(gateway.connect().ask(HANDSHAKE).status, 429);
            }
        }
    });
}

/// The upstream goes on for a while, and must not get another request in the meantime.
#[test]
fn a_websocket_whose_client_breaks_off_holds_its_permit_until_the_upstream_ends() {
    each_http1(|protocol| {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let upstream = Raw::start(move |conversation| {
            if conversation.request().is_some_and(|asked| asked.values("upgrade").is_empty()) {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
                return;
            }
            conversation.send(SWITCH);
            released.lock().unwrap().recv().unwrap();
        });
        let limits = "{ name: at-once, key: 'header:x-user-id', in_flight: 1 }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        let mut chatting = gateway.connect();
        assert_eq!(chatting.ask(HANDSHAKE).status, 101);
        // Closed with a reset, as when a process is killed.
        socket2::SockRef::from(&chatting.tcp()).set_linger(Some(Duration::ZERO)).unwrap();
        drop(chatting);
        for _ in 0..20 {
            assert_eq!(gateway.connect().get_as("ann", "/").status, 429);
            std::thread::sleep(PACE);
        }
        release.send(()).unwrap();
        until("there is a permit again", || gateway.connect().get_as("ann", "/").status == 200);
    });
}
