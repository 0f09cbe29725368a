//! Restarts while clients of every protocol send requests: none fails. `make test-restarts` makes 20 of them.

use std::error::Error;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::Scope;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use testkit::certificates::Authority;
use testkit::folder::folder_with;
use testkit::http1::{Connection, head};
use testkit::tollgate::{Process, RULES, run_in};
use testkit::upstream::{Raw, runtime};
use testkit::wait::{SetOnDrop, until};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::restart::echo_upgraded;
use crate::successor::Successor;

/// The number of restarts without the variable `RESTARTS`.
const RESTARTS: usize = 3;

/// The longest wait of a client for a response.
const PATIENCE: Duration = Duration::from_secs(30);

/// One kind of client.
#[derive(Default)]
struct Clients {
    answered: AtomicUsize,
    /// Connections that ended because the server asked for it.
    closed: AtomicUsize,
    /// HTTP/2 requests that were sent again, because they met the GOAWAY of the server and were not processed.
    resent: AtomicUsize,
}

struct Load {
    done: AtomicBool,
}

impl Load {
    /// Sends requests over connections that stay open until the server asks to close them.
    fn keep_alive<S: io::Read + io::Write>(
        &self,
        clients: &Clients,
        request: &str,
        connect: impl Fn() -> io::Result<Connection<S>>,
    ) {
        while !self.done.load(Relaxed) {
            let mut connection = connect().expect("no connection is refused");
            while !self.done.load(Relaxed) {
                connection.try_send(request).expect("an open connection takes a request");
                let response = connection.try_receive().expect("every request is answered");
                assert_eq!(response.status, 200);
                clients.answered.fetch_add(1, Relaxed);
                if response.header("connection") == Some("close") {
                    clients.closed.fetch_add(1, Relaxed);
                    break;
                }
            }
        }
    }

    /// Sends each request over its own connection.
    fn one_request_each(&self, clients: &Clients, address: SocketAddr) {
        while !self.done.load(Relaxed) {
            let mut connection = Connection::on(connect(address).expect("no connection is refused"));
            connection.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
            assert_eq!(connection.try_receive().expect("every request is answered").status, 200);
            clients.answered.fetch_add(1, Relaxed);
        }
    }

    /// Opens WebSockets, and exchanges a few messages over each.
    fn websockets(&self, clients: &Clients, address: SocketAddr) {
        while !self.done.load(Relaxed) {
            let mut socket = Connection::on(connect(address).expect("no connection is refused"));
            socket.send(
                "GET /chat HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                 Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            );
            assert_eq!(socket.receive_head().expect("every handshake is answered").status, 101);
            for _ in 0..20 {
                socket.send("message");
                assert_eq!(socket.bytes(7), b"message");
                clients.answered.fetch_add(1, Relaxed);
            }
        }
    }

    /// Sends requests over HTTP/2, and reconnects after GOAWAY.
    async fn http2(&self, clients: &Clients, address: SocketAddr) {
        while !self.done.load(Relaxed) {
            let stream = tokio::net::TcpStream::connect(address).await.expect("no connection is refused");
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                    .await
                    .expect("the server speaks HTTP/2");
            let connection = tokio::spawn(connection);
            // Fails after GOAWAY, before a request is sent.
            while !self.done.load(Relaxed) && sender.ready().await.is_ok() {
                let request = Request::get(format!("http://{address}/")).body(Empty::<Bytes>::new());
                let response = match sender.send_request(request.expect("it is valid")).await {
                    Ok(response) => response,
                    Err(error) if is_unprocessed(&error) => {
                        clients.resent.fetch_add(1, Relaxed);
                        break;
                    }
                    Err(error) => panic!("a request failed: {error:?}"),
                };
                assert_eq!(response.status(), 200);
                response.into_body().collect().await.expect("every response is complete");
                clients.answered.fetch_add(1, Relaxed);
            }
            clients.closed.fetch_add(1, Relaxed);
            connection.abort();
        }
    }

    /// Calls a method of gRPC with a client that reconnects by itself.
    async fn grpc(&self, clients: &Clients, address: SocketAddr) {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("it is valid");
        let mut client = HealthClient::new(endpoint.connect().await.expect("no connection is refused"));
        while !self.done.load(Relaxed) {
            match client.check(HealthCheckRequest::default()).await {
                Ok(_) => clients.answered.fetch_add(1, Relaxed),
                // tonic leaves it to its callers to send such calls again.
                Err(status) if is_unprocessed(&status) => clients.resent.fetch_add(1, Relaxed),
                Err(status) => panic!("a call failed: {status:?}"),
            };
        }
    }
}

/// Returns whether the server has not processed the request, so that a client may send it again: it was never sent, or
/// GOAWAY names an earlier one as the last.
fn is_unprocessed(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |&error| error.source()).any(|error| {
        let is_unsent = error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled);
        let is_refused = |error: &h2::Error| {
            let is_goaway = error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR);
            is_goaway || error.reason() == Some(h2::Reason::REFUSED_STREAM)
        };
        is_unsent || error.downcast_ref::<h2::Error>().is_some_and(is_refused)
    })
}

fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn upstream() -> Raw {
    Raw::start(|conversation| {
        while let Some(request) = conversation.request() {
            if request.values("upgrade") != ["websocket"] {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
                continue;
            }
            echo_upgraded(conversation);
        }
    })
}

#[test]
#[expect(clippy::print_stdout, reason = "`make test-restarts` shows the numbers")]
fn restarts_under_load_fail_no_request() {
    let restarts = std::env::var("RESTARTS").map_or(RESTARTS, |count| count.parse().expect("RESTARTS is a number"));
    let upstream = upstream();
    let authority = Authority::new();
    let signed = authority.sign(&["localhost"]);
    let rules = format!(
        "gateway:\n  listen: 127.0.0.1:0\n  tls: {{ listen: 127.0.0.1:0, certificates: {{ cert: cert.pem, key: key.pem }} }}\n  \
         routes: [{{ path: /**, upstream: {} }}]\n\
         service: {{ http: '127.0.0.1:0', grpc: '127.0.0.1:0' }}\nadmin: {{ listen: '127.0.0.1:0' }}\n\
         limits: [{{ name: all, key: const:all, limit: 100000000 }}]\n",
        upstream.url()
    );
    let folder = folder_with(&[(RULES, &rules), ("cert.pem", &signed.cert), ("key.pem", &signed.key)]);
    let server = Process::start(folder, &["serve", "--config", RULES, "--control", "control"]);
    let (http, https) = (server.address_of("gateway"), server.address_of("gateway https"));
    let (service, grpc) = (server.address_of("decisions POST"), server.address_of("decisions grpc"));
    let admin = server.address_of("admin");
    let tls = Arc::new(
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has them")
            .with_root_certificates(authority.roots())
            .with_no_client_auth(),
    );
    let connect_tls = || {
        let name = ServerName::try_from("localhost").expect("it is a name");
        let client = ClientConnection::new(Arc::clone(&tls), name).expect("the settings are valid");
        connect(https).map(|tcp| Connection::on(StreamOwned::new(client, tcp)))
    };
    let get = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let body = r#"{"limit":"all","key":"all"}"#;
    let check = format!("{}{body}", head(body.len()));
    let kinds: [(&str, Clients); 8] =
        ["keep-alive", "one request", "TLS", "HTTP/2", "WebSocket", "decision service", "gRPC", "admin"]
            .map(|name| (name, Clients::default()));
    let [plain, single, secured, http2, sockets, checks, calls, health] = kinds.each_ref().map(|(_, clients)| clients);
    let load = Load { done: AtomicBool::new(false) };
    // Kept, because dropping one kills it, and each has requests to finish.
    let mut successors = Vec::new();
    std::thread::scope(|scope: &Scope<'_, '_>| {
        for _ in 0..2 {
            scope.spawn(|| load.keep_alive(plain, get, || connect(http).map(Connection::on)));
        }
        scope.spawn(|| load.one_request_each(single, http));
        scope.spawn(|| load.keep_alive(secured, get, connect_tls));
        scope.spawn(|| load.websockets(sockets, http));
        scope.spawn(|| load.keep_alive(checks, &check, || connect(service).map(Connection::on)));
        let ready = "GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n";
        scope.spawn(|| load.keep_alive(health, ready, || connect(admin).map(Connection::on)));
        scope.spawn(|| runtime().block_on(load.http2(http2, http)));
        scope.spawn(|| runtime().block_on(load.grpc(calls, grpc)));
        let _done = SetOnDrop(&load.done);
        for _ in 0..restarts {
            let before = kinds.each_ref().map(|(_, clients)| clients.answered.load(Relaxed));
            for ((name, clients), before) in kinds.iter().zip(before) {
                until(&format!("requests of {name}"), || clients.answered.load(Relaxed) > before + 5);
            }
            let output = run_in(&server.path("."), &["restart", "--control", "control"]);
            successors.push(Successor::from(&output));
        }
    });
    for (name, clients) in &kinds {
        let count = |counter: &AtomicUsize| counter.load(Relaxed);
        let (answered, closed, resent) = (count(&clients.answered), count(&clients.closed), count(&clients.resent));
        println!("{name}: {answered} requests answered, {closed} reconnections, {resent} sent again, none failed");
    }
    assert!(plain.closed.load(Relaxed) >= restarts && http2.closed.load(Relaxed) >= restarts);
    let latest = successors.last().expect("there is a restart");
    latest.signal("TERM");
    until("the end of all processes", || !successors.iter().any(Successor::runs));
}
