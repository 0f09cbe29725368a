//! Opens connections to Redis: TCP and its options, Unix sockets, TLS, and the login.
//!
//! Connections are opened here and not by the Redis client, so that we know when one is closed: a request on a closed
//! connection was never sent, and can be sent on the next one. The caller sets deadlines.
//!
//! What a server sends has [bounds](super::bounds), which depend on what the connection is for.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use futures_util::future::select_ok;
use futures_util::{FutureExt, StreamExt};
use redis::aio::{ConnectionLike, MultiplexedConnection, PubSub, PubSubSink, PubSubStream};
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use redis::{AsyncConnectionConfig, Cmd, Msg, RedisError, Value};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::Tasks;
use super::bounds::{Bounded, Received, ReplyBounds};
use super::credentials::{Login, Tls};
use super::stats::Traffic;
use super::warnings::{RecentWarnings, StoreWarning};

/// TCP keepalive: idle time before the first probe, time between probes, and unanswered probes that end the connection.
/// The probes of `node.rs` are faster, but do not cover subscriptions.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 3);
/// Time after which unacknowledged data ends the connection, for example after a power failure of the host.
#[cfg(target_os = "linux")]
const USER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of addresses of one host name that are tried at once.
const MAX_ADDRESSES: usize = 8;
/// Maximum length of a host, which is that of a name in DNS.
const MAX_HOST_BYTES: usize = 255;
/// Maximum length of an error that a server sends before any command.
const MAX_GREETING: usize = 256;
/// Capacity of the client's queue to the socket: larger than the number of calls in flight.
const PIPELINE: usize = 256;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Tcp {
        host: Arc<str>,
        port: u16,
    },
    /// The path of a Unix socket.
    Unix(Arc<Path>),
}

impl Address {
    pub(super) fn tcp(host: impl Into<Arc<str>>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port }
    }

    /// Returns the address that a server has named. Returns `None` if its host is neither an IP address nor a name in DNS.
    pub(super) fn named(host: &str, port: u16) -> Option<Self> {
        let is_host = (1..=MAX_HOST_BYTES).contains(&host.len()) && host.bytes().all(|byte| byte.is_ascii_graphic());
        is_host.then(|| Self::tcp(host, port))
    }

    /// Returns the address of another port on the same host.
    pub(super) fn with_port(&self, port: u16) -> Option<Self> {
        match self {
            Self::Tcp { host, .. } => Some(Self::tcp(host.clone(), port)),
            Self::Unix(_) => None,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } => write!(out, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(out),
        }
    }
}

/// Opens connections with the same login and TLS settings.
pub(super) struct Dialer {
    tls: Option<Arc<Tls>>,
    login: Login,
    traffic: Arc<Traffic>,
    /// The store's name in logs.
    store: Arc<str>,
    /// The bounds on replies, but not on messages of subscriptions.
    bounds: ReplyBounds,
    warnings: Arc<RecentWarnings>,
}

/// A connection that many tasks may use at once. The last clone closes it.
#[derive(Clone)]
pub(super) struct Connection {
    requests: MultiplexedConnection,
    received: Arc<Received>,
    /// Its sender is dropped when the connection is closed.
    open: watch::Receiver<()>,
    _driver: Arc<Tasks>,
}

impl Dialer {
    pub(super) fn new(
        tls: Option<Arc<Tls>>,
        login: Login,
        traffic: Arc<Traffic>,
        store: Arc<str>,
        bounds: ReplyBounds,
        warnings: Arc<RecentWarnings>,
    ) -> Self {
        Self { tls, login, traffic, store, bounds, warnings }
    }

    /// Connects and logs in.
    pub(super) async fn connect(&self, to: &Address) -> Result<Connection, RedisError> {
        let (login, received) = (self.login.current(&self.store).await, Arc::default());
        let stream = self.open(to, self.bounds, &received).await?;
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(PIPELINE);
        let (closes, open) = watch::channel(());
        let connecting = MultiplexedConnection::new_with_config(&login, stream, config).await;
        let (requests, driver) = connecting.map_err(|error| received.cause(error))?;
        let driver = tokio::spawn(until_closed(driver, closes));
        Ok(Connection { requests, received, open, _driver: Arc::new(Tasks(vec![driver.abort_handle()])) })
    }

    /// Connects and logs in, for a subscription.
    pub(super) async fn subscriber(&self, to: &Address) -> Result<Subscription, RedisError> {
        let (login, received) = (self.login.current(&self.store).await, Arc::default());
        let stream = self.open(to, ReplyBounds::MESSAGES, &received).await?;
        let (requests, messages) = PubSub::new(&login, stream).await.map_err(|error| received.cause(error))?.split();
        Ok(Subscription { requests, messages, received })
    }

    /// Returns the error that a server sends before any command, without the `-` at its beginning. Waits for it.
    pub(super) async fn greeting(&self, to: &Address) -> io::Result<String> {
        let stream = self.open(to, ReplyBounds::SENTINELS, &Arc::default()).await;
        let (mut stream, mut greeting) = (stream.map_err(io::Error::other)?, [0; MAX_GREETING]);
        let length = stream.read(&mut greeting).await?;
        match greeting[..length].split_first() {
            Some((b'-', text)) => Ok(String::from_utf8_lossy(text).into_owned()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Reads the files of the login and the certificates, for [`problems`](Self::problems).
    pub(super) async fn read_files(&self) {
        let certificates = async {
            if let Some(tls) = &self.tls {
                tls.current(&self.store).await;
            }
        };
        tokio::join!(certificates, self.login.current(&self.store));
    }

    /// Returns why files of the login and the certificates cannot be used. Their last content stays in use.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        self.tls.as_ref().and_then(|tls| tls.problem()).into_iter().chain(self.login.problem())
    }

    async fn open(
        &self,
        to: &Address,
        bounds: ReplyBounds,
        received: &Arc<Received>,
    ) -> Result<Box<dyn Stream>, RedisError> {
        let (host, port) = match to {
            Address::Tcp { host, port } => (host, *port),
            Address::Unix(path) => {
                return Ok(self.bounded(open_socket(path, &self.traffic).await?, to, bounds, received));
            }
        };
        let tcp = Counted { stream: open_tcp(host, port).await?, traffic: self.traffic.clone() };
        Ok(match &self.tls {
            None => self.bounded(tcp, to, bounds, received),
            Some(tls) => {
                let tls = tls.current(&self.store).await.connect(server_name(host)?, tcp).await?;
                self.bounded(tls, to, bounds, received)
            }
        })
    }

    /// Closes the connection if the server exceeds a bound, and logs that.
    fn bounded(
        &self,
        stream: impl Stream + 'static,
        to: &Address,
        bounds: ReplyBounds,
        received: &Arc<Received>,
    ) -> Box<dyn Stream> {
        let (warnings, store, server) = (self.warnings.clone(), self.store.clone(), to.clone());
        Box::new(Bounded::new(stream, bounds, received.clone(), move |error| {
            let warning = StoreWarning::InvalidReply { server: server.to_string(), problem: error.to_string() };
            warnings.log(&store, warning);
        }))
    }
}

/// A stream of bytes to a server. The cost of dynamic dispatch is negligible beside the system call.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A stream that counts its bytes.
struct Counted<S> {
    stream: S,
    traffic: Arc<Traffic>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, into);
        let received = into.filled().len() - before;
        if received > 0 {
            self.traffic.received.fetch_add(received as u64, Ordering::Relaxed);
        }
        result
    }
}

impl<S> Counted<S> {
    fn count_sent(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(sent)) = result {
            self.traffic.sent.fetch_add(sent as u64, Ordering::Relaxed);
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.count_sent(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.count_sent(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Connection {
    pub(super) fn is_closed(&self) -> bool {
        self.open.has_changed().is_err()
    }

    /// Waits until the connection is closed.
    pub(super) async fn closed(&self) {
        let mut open = self.open.clone();
        while open.changed().await.is_ok() {}
    }

    pub(super) async fn run(&self, command: &Cmd) -> Result<Value, RedisError> {
        let reply = self.requests.clone().req_packed_command(command).await;
        reply.map_err(|error| self.received.cause(error)).and_then(Value::extract_error)
    }

    /// Runs a command on a slot that is being moved to this server. `ASKING` and the command are sent together.
    pub(super) async fn run_asking(&self, command: &Cmd) -> Result<Value, RedisError> {
        let mut both = redis::pipe();
        both.cmd("ASKING").ignore().add_command(command.clone());
        let replies = self.requests.clone().req_packed_commands(&both, 1, 1).await;
        let replies = replies.map_err(|error| self.received.cause(error))?;
        replies.into_iter().next().unwrap_or(Value::Nil).extract_error()
    }
}

/// A connection for subscriptions. Messages that are not yet handled have a bound: the client queues them.
pub(super) struct Subscription {
    requests: PubSubSink,
    messages: PubSubStream,
    received: Arc<Received>,
}

impl Subscription {
    pub(super) async fn subscribe(&mut self, channel: String) -> Result<(), RedisError> {
        self.requests.subscribe(channel).await.map_err(|error| self.received.cause(error))
    }

    /// Waits for the next message. Returns `None` once the connection is closed.
    pub(super) async fn next(&mut self) -> Option<Msg> {
        let message = self.messages.next().await?;
        self.received.handled(bytes_of(&message));
        Some(message)
    }

    /// Discards the messages that have arrived. Returns whether the connection is still open.
    pub(super) fn discard_arrived(&mut self) -> bool {
        while let Some(message) = self.next().now_or_never() {
            if message.is_none() {
                return false;
            }
        }
        true
    }

    /// Checks that the server replies.
    pub(super) async fn ping(&mut self) -> Result<(), RedisError> {
        let reply: Result<Value, RedisError> = self.requests.ping().await;
        self.received.handled(PONG.len() as u64);
        reply.map(drop).map_err(|error| self.received.cause(error))
    }
}

/// The reply to `PING` on a connection with a subscription.
const PONG: &str = "*2\r\n$4\r\npong\r\n$0\r\n\r\n";

/// Returns the size of a message on the wire.
fn bytes_of(message: &Msg) -> u64 {
    let of_string = |length: usize| "$\r\n\r\n".len() + length.max(1).ilog10() as usize + 1 + length;
    let strings = ["message".len(), message.get_channel_name().len(), message.get_payload_bytes().len()];
    ("*3\r\n".len() + strings.map(of_string).iter().sum::<usize>()) as u64
}

/// Drives a connection until it is closed; `closes` is dropped with it, also if this is aborted.
async fn until_closed(driver: impl Future<Output = ()>, closes: watch::Sender<()>) {
    driver.await;
    drop(closes);
}

#[cfg(unix)]
async fn open_socket(path: &Path, traffic: &Arc<Traffic>) -> Result<Counted<tokio::net::UnixStream>, RedisError> {
    Ok(Counted { stream: tokio::net::UnixStream::connect(path).await?, traffic: traffic.clone() })
}

#[cfg(not(unix))]
async fn open_socket(_: &Path, _: &Arc<Traffic>) -> Result<Counted<TcpStream>, RedisError> {
    Err(std::io::Error::other("this platform has no Unix sockets: use redis://host:6379").into())
}

async fn open_tcp(host: &str, port: u16) -> Result<TcpStream, RedisError> {
    // Try all addresses of the name at once: the first that connects is used, and a dead one costs no time.
    let addresses = tokio::net::lookup_host((host, port)).await?;
    let connecting: Vec<_> = addresses.take(MAX_ADDRESSES).map(|address| TcpStream::connect(address).boxed()).collect();
    if connecting.is_empty() {
        return Err(std::io::Error::other(format!("{host} has no address")).into());
    }
    let (stream, _) = select_ok(connecting).await?;
    // Small requests must not wait for the acknowledgement of earlier ones.
    stream.set_nodelay(true)?;
    let (time, interval, retries) = KEEPALIVE;
    let keepalive = TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries);
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    Ok(stream)
}

fn server_name(host: &str) -> Result<ServerName<'static>, RedisError> {
    ServerName::try_from(host.to_owned()).map_err(|error| std::io::Error::other(error).into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_have_the_options_that_find_a_dead_server() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = open_tcp("127.0.0.1", listener.local_addr().unwrap().port()).await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        let (time, interval, retries) = KEEPALIVE;
        let times = (socket.tcp_keepalive_time().unwrap(), socket.tcp_keepalive_interval().unwrap());
        assert_eq!((times, socket.tcp_keepalive_retries().unwrap()), ((time, interval), retries));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(USER_TIMEOUT));
    }
}
