//! Accepts connections of the decision service and the admin listener, and bounds their number and lifetime.
//!
//! No client can keep a connection open forever, whatever it sends or does not send. The handler reads the body of a
//! request, with its own timeout. The client's address is in the extensions of every request, as
//! [`ConnectInfo<SocketAddr>`].

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};
use tollgate::rules::file::internal::Listener;

use super::proxy_protocol::{self, ProxyProtocol};

/// The default limit. Further clients wait in the kernel's queue.
const MAX_CONNECTIONS: u32 = 512;

/// The longest time from the start of a connection, or the end of the last response, to the end of the next request
/// head. It bounds idle connections too.
const HEAD_DEADLINE: Duration = Duration::from_secs(10);

/// Enough for 100 headers; 512 connections use at most 32 MiB of buffers.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// The only bound on a client that sends requests but does not read responses, so it must not be hours. Other clients
/// reconnect once in this time.
const MAX_CONNECTION_AGE: Duration = Duration::from_secs(600);

/// The time for pending requests when the server or the connection ends. Container managers kill after 10 s.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// The pause after a failed accept. A process without free descriptors would otherwise use a full core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Options of a listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) proxy_protocol: ProxyProtocol,
    pub(crate) max_connections: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { proxy_protocol: ProxyProtocol::default(), max_connections: MAX_CONNECTIONS }
    }
}

impl Options {
    /// Returns the options of a listener in a rule file.
    pub(crate) fn of(listener: &Listener) -> Self {
        let proxy_protocol = if listener.proxy_protocol { ProxyProtocol::Required } else { ProxyProtocol::Off };
        Self { proxy_protocol, ..Self::default() }
    }
}

/// Serves until `shutdown` resolves, then lets pending requests finish, for at most [`DRAIN_DEADLINE`].
pub(crate) async fn serve(listener: TcpListener, router: Router, options: Options, shutdown: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(options.max_connections as usize));
    let (serving, stopped) = watch::channel(());
    let mut shutdown = pin!(shutdown);
    loop {
        let (connection, slot) = tokio::select! {
            accepted = accept(&listener, &slots) => accepted,
            () = shutdown.as_mut() => break,
        };
        let (router, mut stopped) = (router.clone(), stopped.clone());
        tokio::spawn(async move {
            let stop = async move { _ = stopped.changed().await };
            start(connection, router, options, stop).await;
            drop(slot);
        });
    }
    drop(serving);
    drop(listener);
    // Each connection returns its slot when it ends, so all slots are free after the last one.
    _ = slots.acquire_many(options.max_connections).await;
}

/// Returns the next connection and its slot.
async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> (Connection<TcpStream>, OwnedSemaphorePermit) {
    let slot = Arc::clone(slots).acquire_owned().await.expect("the slots are never closed");
    loop {
        match listener.accept().await {
            Ok((io, peer)) => {
                // A response is one small write; Nagle's algorithm would only delay it.
                _ = io.set_nodelay(true);
                return (Connection { io, peer }, slot);
            }
            // Only this client is gone.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// A connection and the client's address.
struct Connection<Io> {
    io: Io,
    peer: SocketAddr,
}

/// Reads the PROXY header, if one is required, and serves the connection.
async fn start<Io>(mut connection: Connection<Io>, router: Router, options: Options, stop: impl Future<Output = ()>)
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let mut stop = pin!(stop);
    if options.proxy_protocol == ProxyProtocol::Required {
        let caller = tokio::select! {
            caller = proxy_protocol::read(&mut connection.io) => caller,
            () = stop.as_mut() => return,
        };
        match caller {
            Ok(Some(caller)) => connection.peer = caller,
            Ok(None) => {}
            Err(_) => return,
        }
    }
    serve_connection(connection, router, stop).await;
}

/// Serves one connection until the client, a deadline or `stop` ends it.
async fn serve_connection<Io>(connection: Connection<Io>, router: Router, stop: impl Future<Output = ()>)
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let Connection { io, peer } = connection;
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(peer));
        router.call(request)
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_DEADLINE)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(io), service)
    );
    // Errors are ignored: the client went away, or did not speak HTTP.
    tokio::select! {
        // `stop` is polled first, so that no later response promises to keep the connection.
        biased;
        () = stop => {}
        () = sleep(MAX_CONNECTION_AGE) => {}
        _ = connection.as_mut() => return,
    }
    connection.as_mut().graceful_shutdown();
    _ = timeout(DRAIN_DEADLINE, connection).await;
}

/// These tests run on tokio's paused clock, which advances whenever all tasks wait.
#[cfg(test)]
mod tests {
    use std::future::pending;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::Instant;

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: tollgate\r\n\r\n";
    const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)), 1234);
    const BALANCED: Options = Options { proxy_protocol: ProxyProtocol::Required, max_connections: 8 };

    fn connect(stop: impl Future<Output = ()> + Send + 'static, buffer_bytes: usize) -> DuplexStream {
        let (client, server) = duplex(buffer_bytes);
        let router = Router::new().route("/", get(|| async { "x".repeat(1024) }));
        tokio::spawn(start(Connection { io: server, peer: PEER }, router, Options::default(), stop));
        client
    }

    /// Connects to a server that responds with the client's address, behind a load balancer.
    fn connect_through_balancer(stop: impl Future<Output = ()> + Send + 'static) -> DuplexStream {
        let (client, server) = duplex(8192);
        tokio::spawn(start(Connection { io: server, peer: PEER }, caller_echo(), BALANCED, stop));
        client
    }

    fn caller_echo() -> Router {
        Router::new().route("/", get(|ConnectInfo(caller): ConnectInfo<SocketAddr>| async move { caller.to_string() }))
    }

    async fn read_answer(client: &mut DuplexStream) -> String {
        let mut answer = vec![0; 4096];
        let length = client.read(&mut answer).await.unwrap();
        String::from_utf8(answer[..length].to_vec()).unwrap()
    }

    /// Returns the time until the server closes the connection.
    async fn until_closed(mut client: DuplexStream) -> Duration {
        let start = Instant::now();
        _ = client.read_to_end(&mut Vec::new()).await;
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn silent_client_is_cut_off_at_the_head_deadline() {
        assert_eq!(until_closed(connect(pending(), 8192)).await, HEAD_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn trickled_head_is_cut_off_at_the_head_deadline() {
        let mut client = connect(pending(), 8192);
        let start = Instant::now();
        while client.write_all(b"G").await.is_ok() {
            sleep(Duration::from_millis(700)).await;
        }
        assert!((HEAD_DEADLINE..HEAD_DEADLINE + Duration::from_millis(700)).contains(&start.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_is_cut_off_at_the_head_deadline_after_its_last_answer() {
        let mut client = connect(pending(), 8192);
        sleep(Duration::from_secs(5)).await;
        client.write_all(REQUEST).await.unwrap();
        assert!(read_answer(&mut client).await.starts_with("HTTP/1.1 200 OK"));
        assert_eq!(until_closed(client).await, HEAD_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_never_reads_is_cut_off_at_the_greatest_age() {
        // Smaller than one response, so the server can never finish writing it.
        let mut client = connect(pending(), 256);
        let start = Instant::now();
        while client.write_all(REQUEST).await.is_ok() {}
        assert_eq!(start.elapsed(), MAX_CONNECTION_AGE + DRAIN_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn busy_client_is_asked_to_reconnect_at_the_greatest_age() {
        let mut client = connect(pending(), 8192);
        let start = Instant::now();
        loop {
            if client.write_all(REQUEST).await.is_err() {
                break;
            }
            let answer = read_answer(&mut client).await;
            if answer.is_empty() {
                break;
            }
            assert!(answer.starts_with("HTTP/1.1 200 OK"));
            sleep(Duration::from_secs(7)).await;
        }
        assert!((MAX_CONNECTION_AGE..MAX_CONNECTION_AGE + Duration::from_secs(8)).contains(&start.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_does_not_hold_up_a_stop() {
        let mut client = connect(sleep(Duration::from_secs(3)), 8192);
        client.write_all(REQUEST).await.unwrap();
        read_answer(&mut client).await;
        assert_eq!(until_closed(client).await, Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_sent_nothing_does_not_hold_up_a_stop() {
        assert_eq!(until_closed(connect(sleep(Duration::from_secs(3)), 8192)).await, Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn every_request_of_a_connection_carries_the_caller_that_the_balancer_named() {
        for (header, caller) in [
            ("PROXY TCP4 203.0.113.9 10.0.0.1 4321 80\r\n", "203.0.113.9:4321"),
            ("PROXY UNKNOWN\r\n", "10.0.0.1:1234"),
        ] {
            let mut client = connect_through_balancer(pending());
            client.write_all(&[header.as_bytes(), REQUEST].concat()).await.unwrap();
            assert!(read_answer(&mut client).await.ends_with(caller));
            client.write_all(REQUEST).await.unwrap();
            assert!(read_answer(&mut client).await.ends_with(caller));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_no_balancer_is_closed_without_an_answer() {
        let mut client = connect_through_balancer(pending());
        client.write_all(REQUEST).await.unwrap();
        assert_eq!(read_answer(&mut client).await, "");
    }

    #[tokio::test(start_paused = true)]
    async fn a_balancer_that_sent_nothing_does_not_hold_up_a_stop() {
        let client = connect_through_balancer(sleep(Duration::from_secs(3)));
        assert_eq!(until_closed(client).await, Duration::from_secs(3));
    }

    #[tokio::test]
    async fn a_header_ahead_of_a_request_is_understood_over_a_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let server = tokio::spawn(serve(listener, caller_echo(), BALANCED, async move { _ = stopped.await }));
        let v2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xcb\0\x71\x09\x0a\0\0\x01\x10\xe1\0\x50";
        for header in [&v2[..], b"PROXY TCP4 203.0.113.9 10.0.0.1 4321 80\r\n"] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(header).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nhost: tollgate\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("203.0.113.9:4321"), "{answer}");
        }
        drop(stop);
        server.await.unwrap();
    }
}
