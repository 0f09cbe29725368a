//! Requests that keep what they took from a limit that counts responses: an upstream may have done the work, and only its
//! own response can give the units back.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::client::{Client, Protocol, each_http1, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::port::unused_address;
use testkit::upstream::{AnyBody, Raw, Speaks, accepting};
use testkit::wait::until;

use crate::upgrades::HANDSHAKE;

/// A user has one success. A request whose charge is given back can be repeated.
const ONE_SUCCESS: &str = "{ name: jobs, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: 1, \
    window: 1h, count: successes }";

/// The same limit, which counts requests after their responses.
const ONE_SUCCESS_AFTER: &str = "{ name: jobs, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, \
    limit: 1, window: 1h, count: { statuses: successes, when: after } }";

/// A route whose response does not count.
const PROBE: &str = "{ path: /probe, respond: { status: 500 } }";

const GET: &str = "GET / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n";

/// A request whose body does not end, with a job that an upstream can begin.
const JOB: &str = "POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\nTransfer-Encoding: chunked\r\n\r\n3\r\njob\r\n";

/// What an upstream does after it has begun a job.
#[derive(Clone, Copy)]
enum Then {
    Nothing,
    /// Closes the connection, or resets the stream.
    Disconnect,
}

/// An upstream that begins every job and sends no response.
struct Silent {
    url: String,
    begun: Arc<AtomicUsize>,
}

impl Silent {
    fn start(speaks: Speaks, then: Then) -> Self {
        let begun = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&begun);
        let (address, _) = accepting(move |stream| {
            let count = Arc::clone(&count);
            let service = service_fn(move |request| begin(request, then, Arc::clone(&count)));
            let io = TokioIo::new(stream);
            async move {
                _ = match speaks {
                    Speaks::Http1 => hyper::server::conn::http1::Builder::new().serve_connection(io, service).await,
                    Speaks::Http2 => {
                        let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                        builder.serve_connection(io, service).await
                    }
                };
            }
        });
        let scheme = if matches!(speaks, Speaks::Http2) { "h2c" } else { "http" };
        Self { url: format!("'{scheme}://{address}'"), begun }
    }

    fn begun(&self) -> usize {
        self.begun.load(Relaxed)
    }
}

/// Counts a request once its head and the first part of its body have arrived.
async fn begin(request: Request<Incoming>, then: Then, count: Arc<AtomicUsize>) -> io::Result<Response<AnyBody>> {
    let mut body = request.into_body();
    if !body.is_end_stream() {
        _ = body.frame().await;
    }
    count.fetch_add(1, Relaxed);
    match then {
        Then::Nothing => std::future::pending().await,
        Then::Disconnect => Err(io::Error::other("no response")),
    }
}

/// Runs `attempt` with upstreams of both protocols. The request that it sends must keep its charge.
fn keeps_its_charge(
    protocol: Protocol,
    (settings, route, then): (&str, &str, Then),
    attempt: impl Fn(&mut Client, &Silent),
) {
    for (speaks, limit) in [Speaks::Http1, Speaks::Http2]
        .into_iter()
        .flat_map(|speaks| [(speaks, ONE_SUCCESS), (speaks, ONE_SUCCESS_AFTER)])
    {
        let upstream = Silent::start(speaks, then);
        let route = format!("{{ path: /**, retries: 0, {route} upstream: {} }}", upstream.url);
        let gateway = protocol.start(&site(settings, &[PROBE.to_owned(), route], limit));
        attempt(&mut gateway.client(), &upstream);
        assert_spent(&gateway);
        assert_eq!(upstream.begun(), 1);
    }
}

#[track_caller]
fn assert_spent(gateway: &Gateway) {
    let probe = GET.replacen("/", "/probe", 1);
    // A request that counts after its response counts once the gateway knows that its client has left.
    until("the request is charged", || gateway.send(&probe).status == 429);
}

#[track_caller]
fn send_job(client: &mut Client, upstream: &Silent) {
    client.send(JOB);
    until("the job has begun", || upstream.begun() == 1);
}

#[test]
fn malformed_chunk_after_the_upstream_has_begun_keeps_the_charge() {
    each_http1(|protocol| {
        keeps_its_charge(protocol, ("", "", Then::Nothing), |client, upstream| {
            send_job(client, upstream);
            client.send("ZZ\r\n");
            assert_eq!(client.receive().status, 400);
        });
    });
}

#[test]
fn body_that_ends_early_keeps_the_charge() {
    each_http1(|protocol| {
        keeps_its_charge(protocol, ("", "", Then::Nothing), |client, upstream| {
            send_job(client, upstream);
            let Client::Http1(connection) = client else { panic!("it speaks HTTP/1") };
            connection.end_sending();
            assert_eq!(connection.receive().status, 400);
        });
    });
}

#[test]
fn body_beyond_the_maximum_keeps_the_charge() {
    each_protocol(|protocol| {
        keeps_its_charge(protocol, ("max_body: 1KiB", "", Then::Nothing), |client, upstream| {
            send_job(client, upstream);
            _ = client.try_send(format!("800\r\n{}\r\n", "x".repeat(0x800)));
            assert_eq!(client.receive().status, 413);
        });
    });
}

#[test]
fn body_that_stalls_keeps_the_charge() {
    each_protocol(|protocol| {
        keeps_its_charge(protocol, ("timeouts: { body: 1s }", "", Then::Nothing), |client, upstream| {
            send_job(client, upstream);
            assert_eq!(client.receive().status, 408);
        });
    });
}

#[test]
fn upstream_that_disconnects_gives_nothing_back() {
    each_protocol(|protocol| {
        for request in [GET, JOB] {
            keeps_its_charge(protocol, ("", "", Then::Disconnect), |client, _| {
                client.send(request);
                assert_eq!(client.receive().status, 502);
            });
        }
    });
}

#[test]
fn upstream_that_is_late_gives_nothing_back() {
    each_protocol(|protocol| {
        keeps_its_charge(protocol, ("", "timeout: 1s,", Then::Nothing), |client, _| {
            assert_eq!(client.ask(GET).status, 504);
        });
    });
}

#[test]
fn client_that_leaves_keeps_its_charge() {
    each_protocol(|protocol| {
        for request in [GET, JOB] {
            keeps_its_charge(protocol, ("", "", Then::Nothing), |client, upstream| {
                client.send(request);
                until("the job has begun", || upstream.begun() == 1);
                client.abandon();
            });
        }
    });
}

#[test]
fn invalid_response_gives_nothing_back() {
    each_protocol(|protocol| {
        for response in ["HTTP/1.1 500 No\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 101 No\r\n\r\n"]
        {
            let upstream = Raw::answering(response);
            let route = format!("{{ path: /**, retries: 0, upstream: {} }}", upstream.url());
            let gateway = protocol.start(&site("", &[route], ONE_SUCCESS));
            assert_eq!(gateway.send(GET).status, 502);
            assert_spent(&gateway);
        }
    });
}

#[test]
fn refused_upgrade_gives_nothing_back() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| _ = conversation.request());
        let route = format!("{{ path: /**, retries: 0, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], ONE_SUCCESS));
        assert_eq!(gateway.send(HANDSHAKE).status, 502);
        assert_spent(&gateway);
    });
}

/// One attempt has reached an upstream, and the last one cannot reach any.
#[test]
fn request_that_is_retried_in_vain_keeps_its_charge() {
    each_protocol(|protocol| {
        for speaks in [Speaks::Http1, Speaks::Http2] {
            let upstream = Silent::start(speaks, Then::Disconnect);
            let upstreams = format!("[{}, 'http://{}']", upstream.url, unused_address());
            let settings = "retries: 1, balance: round_robin, eject: { after: 1000, for: 1s }";
            let route = format!("{{ path: /**, {settings}, upstream: {upstreams} }}");
            let gateway = protocol.start(&site("workers: 1", &[route], ONE_SUCCESS));
            let mut client = gateway.client();
            // The first attempts alternate.
            for user in ["ann", "bob", "cid", "dan"] {
                assert_eq!([client.get_as(user, "/").status, client.get_as(user, "/").status], [502, 429], "{user}");
            }
            assert_eq!(upstream.begun(), 4);
        }
    });
}
