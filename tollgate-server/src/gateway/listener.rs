//! The listeners of the gateway, and client connections up to their first request. On reload, new ports are bound before
//! removed ones are closed.

mod certificate;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::server::TlsStream;
use tollgate_config::Parsed;
use tollgate_config::internal::{Address, GatewayRule, SettingError};
use tollgate_net::listening::{Flag, ListenError, Setting, Stop};
use tollgate_net::passed_sockets::{ListenerName, ListenerSockets, Owner, PassedSocket, PassedSockets};
use tollgate_net::proxy_protocol::{Caller, HeaderError, ProxyProtocol};
use tollgate_net::stream::Stream;
use tollgate_net::tls::{self, CERTIFICATE_GRACE, CertificateLease, CertificateReloads, Tls, TlsInUse};
use tollgate_rules::Certificate;

use super::client::{Client, Scheme};
use super::failure::HandshakeFailure;
use super::http1::server::Http1Server;
use super::tally::Tally;
use super::worker::{Shutdown, Worker};
use super::{StartError, http2, per_address};
use crate::net_settings;

/// The pause after a failed accept. A process out of descriptors gets one back soon; retrying at once would only burn
/// CPU.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The length of the listen queue. The kernel has its own bound.
const BACKLOG: u32 = 4096;

/// The most ports that the system is asked for, if the port of a listener is 0.
const MAX_PORT_CHOICES: usize = 10;

/// The response when there is no room for another connection.
const NO_ROOM: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
    connection: close\r\ncontent-length: 83\r\n\r\n\
    {\"error\":\"too_many_connections\",\"message\":\"Too many connections: try again later.\"}";

/// The maximum number of clients that a listener of a worker sends this response at a time; each takes a descriptor.
/// Other connections are just closed.
const MAX_REJECTING: i64 = 128;

/// All of them together take this part of `max_connections`. Descriptors are set aside for them.
const REJECTING_SHARE: i64 = 8;

/// A gateway has at most two ports: with and without TLS.
const MAX_PORTS: i64 = 2;

/// How long listeners stay open after a stop. Clients may send one more request, and are asked to close the connection.
pub(super) const GRACE: Duration = Duration::from_millis(400);

/// A bound port. Dropping it closes the listener, once all waiting connections are accepted.
pub(super) struct Port {
    /// The configured address.
    pub(super) configured: String,
    pub(super) bound: SocketAddr,
    /// The key of its listener, for another process.
    key: &'static str,
    sockets: Vec<StdListener>,
    owner: Owner,
    config: Arc<ArcSwap<ListenerConfig>>,
    /// The TLS settings in use, also for connections that are open.
    tls: Option<watch::Sender<TlsInUse>>,
    watcher: Option<AbortHandle>,
    reloads: Arc<CertificateReloads>,
    until: watch::Sender<Stop>,
}

impl Port {
    /// Returns the scheme and the bound address.
    pub(super) fn address(&self) -> (&'static str, SocketAddr) {
        (if self.config.load().tls.is_some() { "https" } else { "http" }, self.bound)
    }

    /// Returns copies of its sockets, for another process. It gets those of the service manager elsewhere.
    pub(super) fn copies(&self) -> io::Result<Vec<PassedSocket>> {
        let own = self.sockets.iter().filter(|_| self.owner == Owner::Server);
        own.map(|socket| {
            let listener = ListenerName { key: self.key.to_owned(), address: self.configured.clone() };
            PassedSocket::new(socket.try_clone()?, Owner::Server, Some(listener))
        })
        .collect()
    }

    /// Accepts no more connections: another process does.
    pub(super) fn hand_over(&self) {
        self.until.send_replace(Stop::TakenOver);
    }

    /// Returns the certificate reloads of a TLS listener.
    pub(super) fn certificate_reloads(&self) -> Option<(SocketAddr, Arc<CertificateReloads>)> {
        self.config.load().tls.is_some().then(|| (self.bound, Arc::clone(&self.reloads)))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
    }
}

/// A port to be opened.
pub(super) struct NextPort {
    configured: String,
    key: &'static str,
    config: ListenerConfig,
    tls: Option<Tls>,
    /// The bound sockets; `None` if the port is open already.
    listening: Option<Listening>,
}

/// Binds the configured addresses that are not bound yet.
pub(super) async fn prepare(
    file: &Parsed,
    listen: Option<&Address>,
    bound_already: &[String],
    (workers, passed): (usize, &PassedSockets),
) -> Result<Vec<NextPort>, StartError> {
    let rule = file.gateway.clone().unwrap_or_default();
    let mut ports = Vec::new();
    for ListenAddress { address: configured, setting, key, is_tls } in listen_addresses(&rule, listen) {
        let tls = rule.tls.as_ref().filter(|_| is_tls).map(|tls| net_settings::tls(tls, file.folder(), "gateway.tls"));
        let of_tls = |errors: Vec<SettingError>| errors.into_iter().map(|error| error.of("tls").of("gateway"));
        let tls = tls.transpose().map_err(|errors| StartError::Refused(file.problems(of_tls(errors))))?;
        let config = ListenerConfig { proxy_protocol: net_settings::proxy_protocol(&rule.proxy_protocol), tls: None };
        let listening = if bound_already.contains(&configured) {
            None
        } else {
            let bound = match passed.find(key, &configured).await {
                Ok(Some(sockets)) => Listening::assign(sockets, workers),
                Ok(None) => Listening::bind(&configured, workers).await,
                Err(error) => Err(error),
            };
            let cannot_listen = |source| ListenError { setting, address: configured.clone(), source };
            Some(bound.map_err(|source| StartError::Listen(cannot_listen(source)))?)
        };
        ports.push(NextPort { configured, key, config, tls, listening });
    }
    Ok(ports)
}

/// The keys of the addresses.
const KEY: &str = "gateway.listen";
const TLS_KEY: &str = "gateway.tls.listen";

/// A configured address.
pub(super) struct ListenAddress {
    pub(super) address: String,
    setting: Setting,
    key: &'static str,
    is_tls: bool,
}

/// Returns the configured addresses.
pub(super) fn listen_addresses(rule: &GatewayRule, listen: Option<&Address>) -> Vec<ListenAddress> {
    let listen_address = |address: &Address, setting, is_tls| {
        let key = if is_tls && rule.tls.as_ref().is_some_and(|tls| tls.listen.is_some()) { TLS_KEY } else { KEY };
        ListenAddress { address: address.as_str().to_owned(), setting, key, is_tls }
    };
    let setting = Setting::key_or_flag(KEY, Flag::LISTEN, listen);
    let address = listen.unwrap_or(&rule.listen);
    match rule.tls.as_ref().map(|tls| &tls.listen) {
        None => vec![listen_address(address, setting, false)],
        Some(None) => vec![listen_address(address, setting, true)],
        Some(Some(tls_listen)) => {
            vec![listen_address(address, setting, false), listen_address(tls_listen, Setting::Key(TLS_KEY, None), true)]
        }
    }
}

/// Opens the next ports, and closes those that are not among them. `listen` passes a socket to the worker of that number.
pub(super) fn open(next: Vec<NextPort>, mut before: Vec<Port>, listen: impl Fn(usize, WorkerSocket)) -> Vec<Port> {
    let mut ports = Vec::new();
    for NextPort { configured, key, mut config, tls, listening } in next {
        let mut kept =
            before.iter().position(|port| port.configured == configured).map(|found| before.swap_remove(found));
        let in_use = replace_tls(kept.as_mut().and_then(|port| port.tls.take()), tls.as_ref());
        config.tls = in_use.as_ref().map(watch::Sender::subscribe);
        let watch_files = |reloads: &Arc<CertificateReloads>| {
            reloads.note_good(&tls.as_ref().map(|tls| Arc::clone(&tls.validities)).unwrap_or_default());
            let (tls, in_use, reloads) = (tls?, in_use.clone()?, Arc::clone(reloads));
            let apply = move |next| _ = in_use.send_replace(next);
            Some(tokio::spawn(tls.watch_files(apply, reloads)).abort_handle())
        };
        match (listening, kept) {
            (Some(listening), _) => {
                let Listening { sockets, accepting, bound, owner } = listening;
                let (until, ends) = watch::channel(match owner {
                    Owner::Server => Stop::Close,
                    // The connections in its queue are for the next process.
                    Owner::ServiceManager => Stop::HandOver,
                });
                let config = Arc::new(ArcSwap::from_pointee(config));
                for (worker, socket) in accepting {
                    listen(worker, WorkerSocket { socket, config: Arc::clone(&config), until: ends.clone() });
                }
                let reloads = Arc::default();
                let watcher = watch_files(&reloads);
                ports.push(Port {
                    configured,
                    bound,
                    key,
                    sockets,
                    owner,
                    config,
                    tls: in_use,
                    watcher,
                    reloads,
                    until,
                });
            }
            (None, Some(mut port)) => {
                // Otherwise the old task could apply the old files again.
                if let Some(old) = port.watcher.take() {
                    old.abort();
                }
                port.config.store(Arc::new(config));
                port.watcher = watch_files(&port.reloads);
                port.tls = in_use;
                ports.push(port);
            }
            // The port was open when it was prepared, and only this function closes ports.
            (None, None) => {}
        }
    }
    for port in before {
        // Its connections stay open, but nothing verifies their certificates any more.
        _ = replace_tls(port.tls.clone(), None);
    }
    ports
}

/// Replaces the TLS settings of a port. Open connections whose certificates the new ones do not verify end.
fn replace_tls(before: Option<watch::Sender<TlsInUse>>, next: Option<&Tls>) -> Option<watch::Sender<TlsInUse>> {
    match (before, next) {
        (Some(before), Some(next)) => {
            before.send_replace(next.in_use.clone());
            Some(before)
        }
        (Some(before), None) => {
            before.send_modify(TlsInUse::end_leases);
            None
        }
        (None, next) => next.map(|next| watch::Sender::new(next.in_use.clone())),
    }
}

/// A bound address, with its sockets: one for each worker, or those that another process has passed.
struct Listening {
    sockets: Vec<StdListener>,
    /// A copy of a socket for each worker, with the number of the worker. Every worker has one, and every socket is
    /// there.
    accepting: Vec<(usize, StdListener)>,
    bound: SocketAddr,
    owner: Owner,
}

impl Listening {
    /// Binds an address, once for each worker.
    async fn bind(address: &str, workers: usize) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address");
        for address in tokio::net::lookup_host(address).await? {
            match bind_all(address, workers) {
                Ok((sockets, bound)) => {
                    return Self::assign(ListenerSockets { sockets, bound, owner: Owner::Server }, workers);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Divides sockets between the workers. The process before may have had another number of them, and a service manager
    /// passes one socket, which all workers share.
    fn assign(passed: ListenerSockets, workers: usize) -> io::Result<Self> {
        let ListenerSockets { sockets, bound, owner } = passed;
        let pairs = (0..workers.max(sockets.len())).map(|number| (number % workers, &sockets[number % sockets.len()]));
        let copies = pairs.map(|(worker, socket)| Ok((worker, socket.try_clone()?)));
        let accepting = copies.collect::<io::Result<_>>()?;
        Ok(Self { sockets, accepting, bound, owner })
    }
}

/// Binds an address, once for each worker. If the system chooses the port, another one is chosen when a process takes it
/// between the first bind and the others.
fn bind_all(address: SocketAddr, workers: usize) -> io::Result<(Vec<StdListener>, SocketAddr)> {
    let mut choices = if address.port() == 0 { MAX_PORT_CHOICES } else { 1 };
    loop {
        choices -= 1;
        match bind_each(address, workers) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && choices > 0 => {}
            bound => return bound,
        }
    }
}

fn bind_each(address: SocketAddr, workers: usize) -> io::Result<(Vec<StdListener>, SocketAddr)> {
    // The sockets of the workers share a port, and would share it with another gateway, too. This bind fails if another
    // process uses the port.
    let alone = StdListener::bind(address)?;
    let bound = alone.local_addr()?;
    drop(alone);
    let sockets = (0..workers).map(|_| bind_one(bound)).collect::<io::Result<_>>()?;
    Ok((sockets, bound))
}

fn bind_one(address: SocketAddr) -> io::Result<StdListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    #[cfg(all(unix, not(target_os = "solaris"), not(target_os = "illumos")))]
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)?.into_std()
}

/// A socket on which a worker accepts connections.
pub(super) struct WorkerSocket {
    socket: StdListener,
    config: Arc<ArcSwap<ListenerConfig>>,
    /// Changes when the socket has to be closed. Its last value decides about connections that wait.
    until: watch::Receiver<Stop>,
}

impl WorkerSocket {
    /// Accepts and serves connections until the socket has to be closed. `max_connections` is the bound of all workers
    /// together.
    pub(super) async fn accept(
        self,
        worker: Arc<Worker>,
        stop: Arc<Shutdown>,
        (max_connections, workers): (i64, i64),
    ) -> io::Result<()> {
        let Self { socket, config, until } = self;
        let share = max_connections / (REJECTING_SHARE * MAX_PORTS * workers.max(1));
        let rejecting = usize::try_from(share.clamp(1, MAX_REJECTING)).unwrap_or(1);
        let rejecting = Arc::new(Semaphore::new(rejecting));
        Acceptor { config, worker, stop, max_connections, rejecting }.run(socket, until).await
    }
}

/// Accepts connections from one listener.
struct Acceptor {
    config: Arc<ArcSwap<ListenerConfig>>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
    max_connections: i64,
    /// Bounds the rejections that are being sent.
    rejecting: Arc<Semaphore>,
}

impl Acceptor {
    async fn run(self, socket: StdListener, mut until: watch::Receiver<Stop>) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let listener = TcpListener::from_std(socket)?;
        loop {
            tokio::select! {
                // A waiting connection is accepted before the stop is checked: the kernel has completed its handshake.
                biased;
                accepted = listener.accept() => match accepted {
                    Ok((tcp, peer)) => self.take(tcp, peer),
                    // Only this client is gone; the next may be waiting.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                    Err(_) => sleep(ACCEPT_PAUSE).await,
                },
                _ = until.changed() => return match *until.borrow() {
                    Stop::Close => self.take_rest(listener),
                    // The queue belongs to the socket, which another process has.
                    Stop::HandOver | Stop::TakenOver => Ok(()),
                },
            }
        }
    }

    /// Accepts the connections in the queue of a listener that is about to close. Their handshakes are complete, and
    /// closing the listener would reset them. The runtime may not know of them yet, so the kernel is queried.
    fn take_rest(&self, listener: TcpListener) -> io::Result<()> {
        let listener = listener.into_std()?;
        // The queue does not grow in the meantime.
        _ = rustix::net::listen(&listener, 0);
        loop {
            match listener.accept() {
                Ok((tcp, peer)) => {
                    tcp.set_nonblocking(true)?;
                    self.take(TcpStream::from_std(tcp)?, peer);
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&self, tcp: TcpStream, peer: SocketAddr) {
        let tally = Arc::clone(&self.worker.tally);
        tally.accepted.add(1);
        let Some(counted) = OpenConnection::within(self.max_connections, &tally) else {
            tally.refused_connections.add(1);
            // In a flood, only some clients get a response. A client with TLS would take it for another protocol.
            if self.config.load().tls.is_none()
                && let Ok(permit) = Arc::clone(&self.rejecting).try_acquire_owned()
            {
                tokio::spawn(async move {
                    turn_away(tcp).await;
                    drop(permit);
                });
            }
            return;
        };
        let config = self.config.load_full();
        // Behind a load balancer, the client is known only after the PROXY protocol header.
        let entered = if config.proxy_protocol.is_off() { self.worker.enter(peer.ip()) } else { Ok(None) };
        let Ok(entered) = entered else { return };
        // A response is one small write; Nagle's algorithm would only delay it.
        _ = tcp.set_nodelay(true);
        let (worker, stop) = (Arc::clone(&self.worker), Arc::clone(&self.stop));
        // Not from within an async block: its captures would take room twice.
        if config.is_plain() {
            let client = plain_client(&worker, (Caller::At(peer), entered));
            tokio::spawn(serve(counted, Stream::Plain(tcp), client, worker, stop));
        } else {
            tokio::spawn(begin_and_serve(counted, tcp, (peer, entered), config, worker, stop));
        }
    }
}

/// Sends the rejection.
async fn turn_away(mut tcp: TcpStream) {
    const TIMEOUT: Duration = Duration::from_secs(1);
    let reply = async {
        tcp.write_all(NO_ROOM).await?;
        tcp.shutdown().await?;
        // Reads what the client has sent, so that closing does not destroy the response.
        tokio::io::copy(&mut tcp, &mut tokio::io::sink()).await
    };
    _ = timeout(TIMEOUT, reply).await;
}

/// The settings of a listener that apply to new connections.
struct ListenerConfig {
    proxy_protocol: ProxyProtocol,
    tls: Option<watch::Receiver<TlsInUse>>,
}

impl ListenerConfig {
    /// Returns whether the first bytes of a connection are those of a request.
    fn is_plain(&self) -> bool {
        self.proxy_protocol.is_off() && self.tls.is_none()
    }
}

/// A connection that is counted.
struct OpenConnection(Arc<Tally>);

impl OpenConnection {
    fn new(tally: Arc<Tally>) -> Self {
        tally.connections.fetch_add(1, Relaxed);
        tally.all_connections.fetch_add(1, Relaxed);
        Self(tally)
    }

    /// Counts a connection, unless there are `most` already. Other workers count at the same time, so it is counted
    /// first.
    fn within(most: i64, tally: &Arc<Tally>) -> Option<Self> {
        let counted = Self::new(Arc::clone(tally));
        (tally.all_connections.load(Relaxed) <= most).then_some(counted)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
        self.0.all_connections.fetch_sub(1, Relaxed);
    }
}

/// Serves a connection from its first request on, until the client, a deadline or the gateway ends it. Clients that use
/// HTTP/2 without ALPN begin here, too. `counted` is dropped last.
///
/// Most connections are idle most of the time, and each holds the maximum size of this future. So rare or short steps
/// are boxed, and nothing is held twice: an async function would copy its arguments.
#[expect(clippy::manual_async_fn, reason = "an async function holds its arguments twice")]
fn serve(
    counted: OpenConnection,
    stream: Stream,
    client: Arc<Client>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
) -> impl Future<Output = io::Result<()>> + Send {
    async move {
        let http2 = Http1Server::new(stream, &client, &worker, &stop).serve().await?;
        if let Some((stream, first)) = http2 {
            client.use_http2();
            // Few connections need this large future.
            Box::pin(http2::serve((stream, first), client, worker, stop)).await;
        }
        drop(counted);
        Ok(())
    }
}

/// Serves a connection that begins with a header of the PROXY protocol or a TLS handshake. A client that has not completed
/// them when idle connections have to close has no request that could be served.
async fn begin_and_serve(
    counted: OpenConnection,
    tcp: TcpStream,
    (peer, entered): (SocketAddr, Option<per_address::Counted>),
    config: Arc<ListenerConfig>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
) -> io::Result<()> {
    let begun = Box::pin(stop.unless_over(begin(tcp, (peer, entered), config, &worker))).await.transpose()?;
    let Some((stream, client, lease)) = begun.flatten() else { return Ok(()) };
    let Some(lease) = lease else { return serve_begun(counted, stream, client, worker, stop).await };
    let own = Arc::new(Shutdown::default());
    let ends = end_with_lease(lease, stop, Arc::clone(&own));
    // Boxed, because few clients have a certificate.
    let served = Box::pin(serve_begun(counted, stream, client, worker, own));
    tokio::select! {
        served = served => served,
        () = Box::pin(ends) => Ok(()),
    }
}

async fn serve_begun(
    counted: OpenConnection,
    stream: Stream,
    client: Arc<Client>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
) -> io::Result<()> {
    if !client.is_http2() {
        return serve(counted, stream, client, worker, stop).await;
    }
    Box::pin(http2::serve((stream, Bytes::new()), client, worker, stop)).await;
    drop(counted);
    Ok(())
}

/// Shuts one connection down when its worker stops or the certificate of its client ends. Resolves when the requests in
/// flight have had their time.
async fn end_with_lease(lease: Box<CertificateLease>, stop: Arc<Shutdown>, own: Arc<Shutdown>) {
    tokio::select! {
        () = lease.ended() => {
            own.end_idle();
            sleep(CERTIFICATE_GRACE).await;
        }
        () = stop.pass_on(&own) => {}
    }
}

/// Reads what precedes the first request: the PROXY protocol header and the TLS handshake. Returns the lease of a client
/// certificate, too, and `None` if the connection is closed.
async fn begin(
    mut tcp: TcpStream,
    (peer, mut entered): (SocketAddr, Option<per_address::Counted>),
    config: Arc<ListenerConfig>,
    worker: &Worker,
) -> io::Result<Option<(Stream, Arc<Client>, Option<Box<CertificateLease>>)>> {
    let head_timeout = worker.site.load().timeouts.head.duration();
    let mut caller = Caller::At(peer);
    if !config.proxy_protocol.is_off() {
        caller = timeout(head_timeout, config.proxy_protocol.caller(&mut tcp, peer)).await?.map_err(unusable)?;
        entered = worker.enter(caller.nearest().ip())?;
    }
    let Some(current) = &config.tls else {
        return Ok(Some((Stream::Plain(tcp), plain_client(worker, (caller, entered)), None)));
    };
    let mut current = current.clone();
    let in_use = current.borrow_and_update().clone();
    let accepted = timeout(head_timeout, accept_tls(tcp, &in_use.acceptor)).await;
    let accepted = accepted.unwrap_or_else(|late| Err(late.into()));
    let address = caller.nearest().ip().to_canonical();
    let note = |error: &io::Error| worker.tally.note_handshake_error(error, address, worker.ticks.now());
    let tls = match accepted.inspect_err(note)? {
        Accepted::Tls(tls) => tls,
        Accepted::PlainHttp(tcp) => {
            worker.tally.failed_handshakes.note(HandshakeFailure::PlainHttp);
            return tls::send_use_https(tcp).await.map(|()| None);
        }
    };
    let is_http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
    let certificate = certificate::client_certificate(tls.get_ref().1).map(Box::new);
    let client = client(worker, (caller, entered), (Scheme::Https, certificate));
    if is_http2 {
        client.use_http2();
    }
    let lease = CertificateLease::new(tls.get_ref().1, &in_use, current);
    Ok(Some((Stream::Tls(tls), client, lease)))
}

/// Creates the client of a connection without TLS.
fn plain_client(worker: &Worker, caller: (Caller, Option<per_address::Counted>)) -> Arc<Client> {
    client(worker, caller, (Scheme::Http, None))
}

fn client(
    worker: &Worker,
    (caller, entered): (Caller, Option<per_address::Counted>),
    security: (Scheme, Option<Box<Certificate>>),
) -> Arc<Client> {
    let site = worker.site.load();
    // A trusted proxy that does not name its client may not do so in headers either: they may be the client's.
    let is_trusted_proxy = matches!(caller, Caller::At(address) if site.proxies.trusts(address.ip()));
    let settings = (is_trusted_proxy, site.max_head, site.timeouts);
    let shared = (Arc::clone(&worker.ticks), Arc::clone(&worker.tally));
    Arc::new(Client::new((caller, entered), security, settings, shared))
}

/// The first bytes on a TLS listener.
enum Accepted {
    Tls(Box<TlsStream<TcpStream>>),
    PlainHttp(TcpStream),
}

async fn accept_tls(tcp: TcpStream, tls: &tokio_rustls::TlsAcceptor) -> io::Result<Accepted> {
    if tls::begins_with_a_letter(&tcp).await? {
        return Ok(Accepted::PlainHttp(tcp));
    }
    Ok(Accepted::Tls(Box::new(tls.accept(tcp).await?)))
}

/// Closes connections without a valid PROXY protocol header.
fn unusable(_: HeaderError) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejection_has_the_length_that_it_announces() {
        let text = std::str::from_utf8(NO_ROOM).expect("the response is text");
        let (head, body) = text.split_once("\r\n\r\n").expect("the head has an end");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        serde_json::from_str::<serde_json::Value>(body).expect("the body is JSON");
    }
}
