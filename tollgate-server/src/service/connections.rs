//! Accepts connections of the decision service and the admin listener, bounds their number and lifetime, and drains
//! them.
//!
//! No client can keep a connection open forever, whatever it sends or does not send. The handler reads the body of a
//! request, with its own timeout. The client's address is in the extensions of every request, as
//! [`ConnectInfo<SocketAddr>`](axum::extract::ConnectInfo).
//!
//! A listener stops in stages. First it still accepts connections, and asks clients to close theirs. Then it closes,
//! and with it all idle connections. At last the connections that are still busy are cut. A listener that hands its
//! socket over to another, of this process or of one that takes over, accepts no more connections, and drains its own in
//! the same way.
//!
//! At the bound, `room.rs` closes idle connections for new ones.

mod activity;
mod body_budget;
mod close_notify;
mod http;
mod interrupts;
mod leased;
mod room;
mod streams;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tollgate_config::internal::Listener;
use tollgate_net::descriptors::MAX_LISTENER_CONNECTIONS;
use tollgate_net::listening::Stop;
use tollgate_net::proxy_protocol::ProxyProtocol;
use tollgate_net::stream::MaybeTls;
use tollgate_net::tls::{CertificateLease, TlsInUse};

pub(crate) use self::activity::TICK;
pub(crate) use self::body_budget::{BodyError, CountedBody};
use self::close_notify::CloseNotify;
pub(crate) use self::http::{Begun, Handler, IDLE_DEADLINE, Requests, refuse as refuse_http, serve as serve_http};
pub(crate) use self::interrupts::{Interrupt, Interrupts};
use self::room::Room;
pub(crate) use self::room::Usage;
use super::surfaces::{Surface, Surfaces};
use crate::net_settings;

/// The longest time from the first byte of a request to the end of its head, and from the start of a connection to its
/// first byte.
pub(crate) const HEAD_DEADLINE: Duration = Duration::from_secs(10);

/// The longest time that a client may take to read responses.
pub(crate) const WRITE_DEADLINE: Duration = Duration::from_secs(10);

/// Clients reconnect once in this time, so that they spread over servers that were added.
pub(crate) const MAX_CONNECTION_AGE: Duration = Duration::from_secs(600);

/// How long a listener that stops still accepts connections and answers clients on open ones. Clients that send
/// requests all the time notice that they have to reconnect.
const GRACE: Duration = Duration::from_millis(400);

/// How long idle HTTP connections stay open when another process has taken over. They hold up nothing, and a client that
/// sends its next request in this time is asked to reconnect with the response.
const TAKEN_OVER_GRACE: Duration = Duration::from_secs(5);

/// The time for pending requests when the server or the connection ends. Container managers kill after 10 s.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// The pause after a failed accept. A process without free descriptors would otherwise use a full core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The most clients of a listener that are being refused at a time. For a further one, the connection of the first one is
/// closed.
const MAX_REFUSING: usize = 64;

/// The longest time that a refusal takes.
pub(crate) const REFUSAL_DEADLINE: Duration = Duration::from_secs(1);

/// The length of the listen queue. The kernel has its own bound.
const BACKLOG: u32 = 4_096;

/// The stages of a listener, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Serving,
    /// Clients are asked to close their connections.
    Closing,
    /// Connections close as soon as they are idle.
    Ending,
    /// Connections close at once.
    Cut,
}

/// Options of a listener.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) proxy_protocol: ProxyProtocol,
    pub(crate) max_connections: u32,
    /// The protocol, for metrics and log lines.
    pub(crate) surface: Surface,
    /// Counts of all listeners.
    pub(crate) surfaces: Arc<Surfaces>,
    /// TLS with the certificates in use.
    pub(crate) tls: Option<watch::Receiver<TlsInUse>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            proxy_protocol: ProxyProtocol::default(),
            max_connections: MAX_LISTENER_CONNECTIONS,
            surface: Surface::Http,
            surfaces: Arc::default(),
            tls: None,
        }
    }
}

impl Options {
    /// Returns the options of a listener in a rule file.
    pub(crate) fn of(listener: &Listener) -> Self {
        let proxy_protocol = net_settings::proxy_protocol(&listener.proxy_protocol);
        let max_connections = listener.max_connections.unwrap_or(MAX_LISTENER_CONNECTIONS);
        Self { proxy_protocol, max_connections, ..Self::default() }
    }

    /// Returns these options for a protocol, with the counts of all listeners.
    pub(crate) fn with_surface(self, surface: Surface, surfaces: &Arc<Surfaces>) -> Self {
        Self { surface, surfaces: Arc::clone(surfaces), ..self }
    }
}

/// A protocol on the connections of a listener.
pub(crate) trait Protocol: Clone + Send + 'static {
    /// Serves a connection until the client, a deadline or `stage` ends it.
    fn serve<Io>(self, io: Io, begun: Begun, stage: watch::Receiver<Stage>) -> impl Future<Output = ()> + Send
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Tells a client that there is no room for its connection.
    fn refuse<Io>(self, io: Io, peer: SocketAddr) -> impl Future<Output = ()> + Send
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static;
}

/// HTTP/1.1 and HTTP/2.
#[derive(Clone)]
struct Http<H> {
    handler: H,
    requests: Requests,
    /// Whether connections beyond the bound are answered nevertheless. Health checks are.
    answers_all: bool,
}

impl<H: Handler> Protocol for Http<H> {
    async fn serve<Io>(self, io: Io, begun: Begun, stage: watch::Receiver<Stage>)
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        http::serve(io, begun, (self.handler, self.requests), stage).await;
    }

    async fn refuse<Io>(self, io: Io, peer: SocketAddr)
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        if self.answers_all {
            // The client is asked to close the connection with its first response.
            let (_serving, stage) = watch::channel(Stage::Closing);
            _ = timeout(REFUSAL_DEADLINE, self.serve(io, Begun::new(peer, Arc::default()), stage)).await;
        } else {
            http::refuse(io).await;
        }
    }
}

/// Binds an address with a long listen queue.
pub(crate) async fn bind(address: &str) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address).await?;
    rustix::net::listen(&listener, BACKLOG.cast_signed())?;
    Ok(listener)
}

/// Serves HTTP until `shutdown` resolves, then drains connections, for at most [`GRACE`] and [`DRAIN_DEADLINE`].
pub(crate) async fn serve(
    listener: Arc<TcpListener>,
    handler: impl Handler,
    options: Options,
    shutdown: impl Future<Output = Stop>,
) {
    let answers_all = options.surface == Surface::Admin;
    let requests = Requests { surface: options.surface, surfaces: Arc::clone(&options.surfaces) };
    serve_protocol(listener, Http { handler, requests, answers_all }, options, shutdown).await;
}

/// Serves a protocol until `shutdown` resolves, then drains connections, for at most [`GRACE`] and [`DRAIN_DEADLINE`].
pub(crate) async fn serve_protocol<P: Protocol>(
    listener: Arc<TcpListener>,
    protocol: P,
    options: Options,
    shutdown: impl Future<Output = Stop>,
) {
    let max_connections = options.max_connections;
    let slots = Arc::new(Semaphore::new(max_connections as usize));
    let (serving, stage) = watch::channel(Stage::Serving);
    let (room, refusing) = (Mutex::new(Room::new(max_connections)), Mutex::default());
    let acceptor = Acceptor { protocol, options, slots: Arc::clone(&slots), room, refusing, stage };
    let stop = tokio::select! {
        // Polled first: a listener that hands its socket over accepts nothing after that.
        biased;
        stop = shutdown => stop,
        never = acceptor.run(&listener) => match never {},
    };
    _ = serving.send(Stage::Closing);
    match stop {
        Stop::Close => {
            _ = timeout(GRACE, acceptor.run(&listener)).await;
            acceptor.take_rest(&listener);
            drop(listener);
        }
        Stop::HandOver => {
            drop(listener);
            sleep(GRACE).await;
        }
        Stop::TakenOver => {
            drop(listener);
            // Clients of the Redis protocol cannot be asked to reconnect.
            let grace = if acceptor.options.surface == Surface::Resp { GRACE } else { TAKEN_OVER_GRACE };
            _ = timeout(grace, slots.acquire_many(max_connections)).await;
        }
    }
    _ = serving.send(Stage::Ending);
    // Each connection returns its slot when it ends, so all slots are free after the last one.
    if timeout(DRAIN_DEADLINE, slots.acquire_many(max_connections)).await.is_err() {
        let busy = max_connections as usize - slots.available_permits();
        let surface = acceptor.options.surface;
        tollgate_telemetry::notice::warn(format_args!(
            "{busy} connections of {surface} with requests in flight cut off {} s after the stop",
            DRAIN_DEADLINE.as_secs()
        ));
        _ = serving.send(Stage::Cut);
    }
}

/// Accepts the connections of a listener.
struct Acceptor<P> {
    protocol: P,
    options: Options,
    slots: Arc<Semaphore>,
    /// The connections that have a slot.
    room: Mutex<Room>,
    /// Clients that are being refused, the first one first.
    refusing: Mutex<VecDeque<AbortHandle>>,
    stage: watch::Receiver<Stage>,
}

impl<P: Protocol> Acceptor<P> {
    async fn run(&self, listener: &TcpListener) -> std::convert::Infallible {
        loop {
            match listener.accept().await {
                Ok((io, peer)) => self.take(io, peer),
                // Only this client is gone.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    /// Accepts the connections in the queue of a listener that is about to close. Their handshakes are complete, and
    /// closing the listener would reset them. The runtime may not know of them yet, so the kernel is queried.
    fn take_rest(&self, listener: &TcpListener) {
        let Ok(socket) = listener.as_fd().try_clone_to_owned() else { return };
        let listener = std::net::TcpListener::from(socket);
        // The queue does not grow in the meantime.
        _ = rustix::net::listen(&listener, 0);
        for _ in 0..BACKLOG {
            let Ok((io, peer)) = listener.accept() else { return };
            if io.set_nonblocking(true).is_ok()
                && let Ok(io) = TcpStream::from_std(io)
            {
                self.take(io, peer);
            }
        }
    }

    fn take(&self, io: TcpStream, peer: SocketAddr) {
        // A response is one small write; Nagle's algorithm would only delay it.
        _ = io.set_nodelay(true);
        let protocol = self.protocol.clone();
        let Options { ref proxy_protocol, max_connections, surface, .. } = self.options;
        let proxy_protocol = proxy_protocol.clone();
        let tls = self.options.tls.clone();
        if let Some(slot) = self.slot() {
            let open = self.options.surfaces.open(surface);
            let usage = Arc::new(Usage::new(slot));
            self.room.lock().unwrap_or_else(PoisonError::into_inner).add(&usage);
            let mut stage = self.stage.clone();
            tokio::spawn(async move {
                let serving = async {
                    let begun = tokio::select! {
                        begun = begin_secured(io, peer, proxy_protocol, tls) => begun,
                        () = without_request(&mut stage) => None,
                    };
                    match begun {
                        Some((io, peer, None)) => protocol.serve(io, Begun::new(peer, Arc::clone(&usage)), stage).await,
                        Some((io, peer, Some(lease))) => {
                            let (ends, stage) = leased::stage(lease, stage);
                            let served = protocol.serve(io, Begun::new(peer, Arc::clone(&usage)), stage);
                            // Boxed, so that connections without a certificate need no memory for it.
                            let ends = Box::pin(ends);
                            tokio::select! {
                                () = served => {}
                                () = ends => {}
                            }
                        }
                        None => {}
                    }
                };
                tokio::select! {
                    () = serving => {}
                    () = usage.closed() => {}
                }
                // Streams of HTTP/2 may last longer than their connection.
                drop((usage.take_slot(), open));
            });
            return;
        }
        self.options.surfaces.refused(surface, max_connections);
        let mut refusing = self.refusing.lock().unwrap_or_else(PoisonError::into_inner);
        while refusing.front().is_some_and(|first| first.is_finished() || refusing.len() >= MAX_REFUSING) {
            // In a flood, a client has a moment to send its request.
            if let Some(first) = refusing.pop_front() {
                first.abort();
            }
        }
        let refusal = tokio::spawn(refuse(protocol, (io, peer), (proxy_protocol, tls)));
        refusing.push_back(refusal.abort_handle());
    }

    /// Returns a slot for a new connection: a free one, or that of an idle connection, which is closed.
    fn slot(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
            return Some(slot);
        }
        let slot = self.room.lock().unwrap_or_else(PoisonError::into_inner).make()?;
        self.options.surfaces.closed_idle(self.options.surface, self.options.max_connections);
        Some(slot)
    }
}

async fn refuse<P: Protocol>(
    protocol: P,
    (io, peer): (TcpStream, SocketAddr),
    (proxy_protocol, tls): (ProxyProtocol, Option<watch::Receiver<TlsInUse>>),
) {
    let refusal = async {
        if let Some((io, peer, _)) = begin_secured(io, peer, proxy_protocol, tls).await {
            protocol.refuse(io, peer).await;
        }
    };
    _ = timeout(2 * REFUSAL_DEADLINE, refusal).await;
}

/// Resolves when a connection without a request has to close. A client that connected just before the listener was
/// closed has a moment to send its request.
async fn without_request(stage: &mut watch::Receiver<Stage>) {
    _ = stage.wait_for(|stage| *stage >= Stage::Ending).await;
    sleep(GRACE).await;
}

/// Reads the PROXY header and makes the TLS handshake, if they are required. Returns the client's certificate, too, and
/// `None` if the connection has to be closed.
async fn begin_secured(
    io: TcpStream,
    peer: SocketAddr,
    proxy_protocol: ProxyProtocol,
    tls: Option<watch::Receiver<TlsInUse>>,
) -> Option<(MaybeTls<CloseNotify>, SocketAddr, Option<Box<CertificateLease>>)> {
    let (io, peer) = begin(io, peer, proxy_protocol).await?;
    let Some(mut current) = tls else { return Some((MaybeTls::Plain(io), peer, None)) };
    let tls = current.borrow_and_update().clone();
    let io = timeout(HEAD_DEADLINE, tls.acceptor.accept(io)).await.ok()?.ok()?;
    let lease = CertificateLease::new(io.get_ref().1, &tls, current);
    Some((MaybeTls::Tls(Box::new(CloseNotify::new(io))), peer, lease))
}

/// Reads the PROXY header, if one is required. Returns `None` if the connection has to be closed.
async fn begin<Io>(mut io: Io, peer: SocketAddr, proxy_protocol: ProxyProtocol) -> Option<(Io, SocketAddr)>
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let caller = proxy_protocol.caller(&mut io, peer).await.ok()?;
    // Limits of the decision service take the client's address from the request, never from the connection.
    Some((io, caller.nearest()))
}

/// These tests run on tokio's paused clock, which advances whenever all tasks wait.
#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::extract::ConnectInfo;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::Instant;
    use tollgate_net::proxy_protocol::Senders;
    use tollgate_rules::Networks;

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: tollgate\r\n\r\n";
    const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)), 1234);
    const RESPONSE_BYTES: usize = 1024;

    /// Connects to a server that begins to stop when the sender is changed.
    fn connect(buffer_bytes: usize) -> (DuplexStream, watch::Sender<Stage>) {
        let router = Router::new().route("/", get(|| async { "x".repeat(RESPONSE_BYTES) }));
        connect_to(router, ProxyProtocol::Off, buffer_bytes)
    }

    /// An HTTP/2 client cannot make the server hold more than a few bodies at a time. Other requests are answered.
    #[tokio::test]
    async fn bodies_of_a_connection_share_a_bound() {
        let received = |body: axum::body::Bytes| async move { body.len().to_string() };
        let (client, _serving) = connect_to(Router::new().route("/", post(received)), ProxyProtocol::Off, 64 << 10);
        let (mut send, connection) = h2::client::handshake(client).await.unwrap();
        tokio::spawn(connection);
        let request = || ::http::Request::post("http://tollgate/").body(()).unwrap();
        let mut bodies = Vec::new();
        for _ in 0..8 {
            let (response, mut body) = send.send_request(request(), false).unwrap();
            body.send_data(vec![b'x'; 1 << 20].into(), false).unwrap();
            bodies.push((response, body));
        }
        let (first, others) = futures_util::future::select_ok(
            bodies.into_iter().map(|(response, body)| Box::pin(async { Ok::<_, h2::Error>((response.await?, body)) })),
        )
        .await
        .unwrap();
        assert_eq!(first.0.status(), 400, "a body that has no room ends");
        drop((first, others));
        let (response, mut body) = send.send_request(request(), false).unwrap();
        body.send_data(vec![b'x'; 1 << 20].into(), true).unwrap();
        let mut answer = response.await.unwrap().into_body();
        assert_eq!(answer.data().await.unwrap().unwrap(), "1048576");
    }

    /// Connects to a server that responds with the client's address, behind a load balancer.
    fn connect_through_balancer() -> (DuplexStream, watch::Sender<Stage>) {
        connect_to(caller_echo(), required(), 8192)
    }

    fn connect_to(
        router: Router,
        proxy_protocol: ProxyProtocol,
        buffer_bytes: usize,
    ) -> (DuplexStream, watch::Sender<Stage>) {
        let (client, server) = duplex(buffer_bytes);
        let (serving, stage) = watch::channel(Stage::Serving);
        tokio::spawn(async move {
            if let Some((io, peer)) = begin(server, PEER, proxy_protocol).await {
                let requests = Requests { surface: Surface::Http, surfaces: Arc::default() };
                http::serve(io, Begun::new(peer, Arc::default()), (router, requests), stage).await;
            }
        });
        (client, serving)
    }

    fn required() -> ProxyProtocol {
        let networks = Networks::parse(["10.0.0.0/8", "127.0.0.1"]).unwrap();
        ProxyProtocol::From(Senders::new(move |address| networks.contains(address)))
    }

    fn caller_echo() -> Router {
        Router::new().route("/", get(|ConnectInfo(caller): ConnectInfo<SocketAddr>| async move { caller.to_string() }))
    }

    async fn until(stopped: tokio::sync::oneshot::Receiver<()>) -> Stop {
        _ = stopped.await;
        Stop::Close
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

    /// Checks that a deadline has passed, and not much more. The watchdog looks twice.
    #[track_caller]
    fn assert_about(elapsed: Duration, deadline: Duration) {
        assert!((deadline..=deadline + 2 * TICK).contains(&elapsed), "{elapsed:?} is not about {deadline:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn silent_client_is_cut_off_at_the_head_deadline() {
        let (client, _serving) = connect(8192);
        assert_about(until_closed(client).await, HEAD_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn trickled_head_is_cut_off_at_the_head_deadline() {
        let (mut client, _serving) = connect(8192);
        let start = Instant::now();
        while client.write_all(b"G").await.is_ok() {
            sleep(Duration::from_millis(700)).await;
        }
        assert_about(start.elapsed(), HEAD_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_is_cut_off_at_the_idle_deadline_after_its_last_answer() {
        let (mut client, _serving) = connect(8192);
        sleep(Duration::from_secs(5)).await;
        client.write_all(REQUEST).await.unwrap();
        assert!(read_answer(&mut client).await.starts_with("HTTP/1.1 200 OK"));
        assert_about(until_closed(client).await, IDLE_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_never_reads_is_cut_off_at_the_write_deadline() {
        // Smaller than one response, so the server can never finish writing it.
        let (mut client, _serving) = connect(256);
        let start = Instant::now();
        while client.write_all(REQUEST).await.is_ok() {}
        assert_about(start.elapsed(), WRITE_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn busy_client_reads_at_the_greatest_age_that_it_has_to_reconnect() {
        let (mut client, _serving) = connect(8192);
        let start = Instant::now();
        loop {
            client.write_all(REQUEST).await.expect("no request is lost");
            let answer = read_answer(&mut client).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK"));
            if answer.contains("connection: close") {
                break;
            }
            sleep(Duration::from_secs(7)).await;
        }
        assert!((MAX_CONNECTION_AGE..MAX_CONNECTION_AGE + Duration::from_secs(8)).contains(&start.elapsed()));
        assert_eq!(until_closed(client).await, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn request_on_an_idle_connection_is_answered_while_the_server_stops() {
        let (mut client, serving) = connect(8192);
        client.write_all(REQUEST).await.unwrap();
        assert!(!read_answer(&mut client).await.contains("connection: close"));
        serving.send(Stage::Closing).unwrap();
        sleep(Duration::from_millis(300)).await;
        client.write_all(REQUEST).await.unwrap();
        let answer = read_answer(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("connection: close"), "{answer}");
        assert_eq!(until_closed(client).await, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_clients_do_not_hold_up_a_stop() {
        let (mut client, serving) = connect(8192);
        client.write_all(REQUEST).await.unwrap();
        read_answer(&mut client).await;
        let (silent, other) = connect(8192);
        sleep(Duration::from_secs(1)).await;
        for serving in [&serving, &other] {
            serving.send(Stage::Ending).unwrap();
        }
        assert_eq!(until_closed(client).await, Duration::ZERO);
        assert_eq!(until_closed(silent).await, GRACE);
    }

    #[tokio::test(start_paused = true)]
    async fn every_request_of_a_connection_carries_the_caller_that_the_balancer_named() {
        for (header, caller) in [
            ("PROXY TCP4 203.0.113.9 10.0.0.1 4321 80\r\n", "203.0.113.9:4321"),
            ("PROXY UNKNOWN\r\n", "10.0.0.1:1234"),
        ] {
            let (mut client, _serving) = connect_through_balancer();
            client.write_all(&[header.as_bytes(), REQUEST].concat()).await.unwrap();
            assert!(read_answer(&mut client).await.ends_with(caller));
            client.write_all(REQUEST).await.unwrap();
            assert!(read_answer(&mut client).await.ends_with(caller));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_no_balancer_is_closed_without_an_answer() {
        let (mut client, _serving) = connect_through_balancer();
        client.write_all(REQUEST).await.unwrap();
        assert_eq!(read_answer(&mut client).await, "");
    }

    #[tokio::test]
    async fn a_header_ahead_of_a_request_is_understood_over_a_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let options = Options { proxy_protocol: required(), ..Options::default() };
        let server = tokio::spawn(serve(Arc::new(listener), caller_echo(), options, until(stopped)));
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

    /// Requests over HTTP/2 with prior knowledge are answered, and a client that is connected at a stop gets GOAWAY.
    #[tokio::test]
    async fn http2_is_served_and_drained_over_a_socket() {
        let listener = bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let server = tokio::spawn(serve(Arc::new(listener), caller_echo(), Options::default(), until(stopped)));
        let io = TcpStream::connect(address).await.unwrap();
        let own = io.local_addr().unwrap().to_string();
        let (mut send, connection) = h2::client::handshake(io).await.unwrap();
        let connection = tokio::spawn(connection);
        let request = || ::http::Request::get("http://tollgate/").body(()).unwrap();
        for _ in 0..3 {
            let (response, _) = send.send_request(request(), true).unwrap();
            let mut body = response.await.unwrap().into_body();
            assert_eq!(body.data().await.unwrap().unwrap(), own.as_bytes());
        }
        drop(stop);
        // The server closes the connection in order: the client sees no error.
        connection.await.unwrap().unwrap();
        drop(send);
        server.await.unwrap();
    }
}
