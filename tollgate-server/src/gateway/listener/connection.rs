//! A client connection, from accept to close.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tollgate::rules::Certificate;

use super::per_address;
use super::tls;
use crate::gateway::client::{Client, ConnectionInfo, LINGER, SEND_BUFFER_BYTES, STREAM_WINDOW_BYTES, Scheme};
use crate::gateway::deadline::{Expired, TICK};
use crate::gateway::failure::HandshakeFailure;
use crate::gateway::http1::server::Lane;
use crate::gateway::http2::exchange::Exchange;
use crate::gateway::io::{ClientIo, Stream};
use crate::gateway::streams::Streams;
use crate::gateway::tally::Tally;
use crate::gateway::worker::{Stop, Worker};
use crate::service::proxy_protocol;

/// The maximum of concurrent streams of an HTTP/2 connection: the minimum that RFC 9113 recommends, since each stream
/// may hold memory.
const MAX_STREAMS: u32 = 100;

/// Room for all streams at once, so that stalled uploads do not block the others.
const CONNECTION_WINDOW_BYTES: u32 = MAX_STREAMS * STREAM_WINDOW_BYTES;

/// The interval of HTTP/2 keep-alive pings.
const PING_EVERY: Duration = Duration::from_secs(20);

/// The settings of a listener that apply to new connections.
pub(in crate::gateway) struct ListenerConfig {
    pub(in crate::gateway) proxy_protocol: bool,
    pub(in crate::gateway) tls: Option<TlsAcceptor>,
}

impl ListenerConfig {
    /// Returns whether the first bytes of a connection are those of a request.
    pub(in crate::gateway) fn is_plain(&self) -> bool {
        !self.proxy_protocol && self.tls.is_none()
    }
}

/// A connection that is counted.
pub(in crate::gateway) struct Counted(Arc<Tally>);

impl Counted {
    pub(in crate::gateway) fn new(tally: Arc<Tally>) -> Self {
        tally.connections.fetch_add(1, Relaxed);
        tally.all_connections.fetch_add(1, Relaxed);
        Self(tally)
    }

    /// Counts a connection, unless there are `most` already. Other workers count at the same time, so it is counted
    /// first.
    pub(in crate::gateway) fn within(most: i64, tally: &Arc<Tally>) -> Option<Self> {
        let counted = Self::new(Arc::clone(tally));
        (tally.all_connections.load(Relaxed) <= most).then_some(counted)
    }
}

impl Drop for Counted {
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
pub(in crate::gateway) fn serve(
    counted: Counted,
    stream: Stream,
    client: Arc<Client>,
    worker: Arc<Worker>,
    stop: Arc<Stop>,
) -> impl Future<Output = io::Result<()>> + Send {
    async move {
        let http2 = Lane::new(stream, &client, &worker).serve(&stop).await?;
        if let Some((stream, first)) = http2 {
            let client = Arc::new(client.over_http2());
            // Few connections need this large future.
            Box::pin(serve_http2((stream, first), client, worker, stop)).await;
        }
        drop(counted);
        Ok(())
    }
}

/// Serves a connection that begins with a header of the PROXY protocol or a TLS handshake.
pub(in crate::gateway) async fn begin_and_serve(
    counted: Counted,
    tcp: TcpStream,
    (peer, entered): (SocketAddr, Option<per_address::Counted>),
    config: Arc<ListenerConfig>,
    worker: Arc<Worker>,
    stop: Arc<Stop>,
) -> io::Result<()> {
    let begun = Box::pin(begin(tcp, (peer, entered), config, &worker)).await?;
    let Some((stream, client)) = begun else { return Ok(()) };
    if !client.is_http2 {
        return serve(counted, stream, client, worker, stop).await;
    }
    Box::pin(serve_http2((stream, Bytes::new()), client, worker, stop)).await;
    Ok(())
}

/// Reads what precedes the first request: the PROXY protocol header and the TLS handshake. Returns `None` if the
/// connection is closed.
async fn begin(
    mut tcp: TcpStream,
    (mut peer, mut entered): (SocketAddr, Option<per_address::Counted>),
    config: Arc<ListenerConfig>,
    worker: &Worker,
) -> io::Result<Option<(Stream, Arc<Client>)>> {
    let head_timeout = worker.site.load().timeouts.head.duration();
    if config.proxy_protocol {
        let caller = timeout(head_timeout, proxy_protocol::read(&mut tcp)).await?.map_err(unusable)?;
        peer = caller.unwrap_or(peer);
        entered = worker.enter(peer.ip())?;
    }
    let Some(tls) = &config.tls else {
        return Ok(Some((Stream::Plain(tcp), plain_client(worker, (peer, entered)))));
    };
    let accepted = timeout(head_timeout, accept(tcp, tls)).await;
    let accepted = accepted.unwrap_or_else(|late| Err(late.into()));
    let note = |error: &io::Error| worker.tally.note_failed_handshake(HandshakeFailure::of(error));
    let tls = match accepted.inspect_err(note)? {
        Accepted::Tls(tls) => tls,
        Accepted::PlainHttp(tcp) => {
            worker.tally.note_failed_handshake(HandshakeFailure::PlainHttp);
            return tls::send_use_https(tcp).await.map(|()| None);
        }
    };
    let is_http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
    let certificate = tls::client_certificate(tls.get_ref().1);
    let client = client(worker, (peer, entered), (Scheme::Https, certificate), is_http2);
    Ok(Some((Stream::Tls(tls), client)))
}

/// Creates the client of a connection without TLS.
pub(in crate::gateway) fn plain_client(
    worker: &Worker,
    address: (SocketAddr, Option<per_address::Counted>),
) -> Arc<Client> {
    client(worker, address, (Scheme::Http, None), false)
}

fn client(
    worker: &Worker,
    (address, entered): (SocketAddr, Option<per_address::Counted>),
    (scheme, certificate): (Scheme, Option<Certificate>),
    is_http2: bool,
) -> Arc<Client> {
    let site = worker.site.load();
    let (max_head, timeouts, is_trusted_proxy) = (site.max_head, site.timeouts, site.proxies.trusts(address.ip()));
    let entered = entered.map(Arc::new);
    let info = ConnectionInfo { address, is_trusted_proxy, scheme, certificate, max_head, timeouts, entered };
    Arc::new(Client::new(info, is_http2, Arc::clone(&worker.ticks), Arc::clone(&worker.tally)))
}

/// The first bytes on a TLS listener.
enum Accepted {
    Tls(Box<TlsStream<TcpStream>>),
    PlainHttp(TcpStream),
}

async fn accept(tcp: TcpStream, tls: &TlsAcceptor) -> io::Result<Accepted> {
    if tls::begins_with_a_letter(&tcp).await? {
        return Ok(Accepted::PlainHttp(tcp));
    }
    Ok(Accepted::Tls(Box::new(tls.accept(tcp).await?)))
}

/// Serves a connection of HTTP/2 with hyper.
async fn serve_http2((stream, first): (Stream, Bytes), client: Arc<Client>, worker: Arc<Worker>, stop: Arc<Stop>) {
    let io = TokioIo::new(ClientIo::new(stream, first, Arc::clone(&client)));
    let ticks = Arc::clone(&worker.ticks);
    let service = Exchange { worker, client: Arc::clone(&client) };
    let mut builder = http2::Builder::new(Streams { ticks });
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(u32::try_from(client.max_head).unwrap_or(u32::MAX))
        .keep_alive_interval(PING_EVERY);
    let connection = builder.serve_connection(io, service);
    // Errors are the client's: it disconnected or did not speak HTTP/2.
    _ = drive(connection, |connection| connection.graceful_shutdown(), &client, &stop).await;
}

/// Closes connections without a valid PROXY protocol header.
fn unusable(_: proxy_protocol::HeaderError) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Drives a connection, checks its deadlines periodically, and calls `end` at shutdown.
async fn drive<Connection: Future<Output = hyper::Result<()>>>(
    connection: Connection,
    end: impl Fn(Pin<&mut Connection>),
    client: &Client,
    stop: &Stop,
) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    let mut alarm = pin!(sleep(client.check_every()));
    let (notify, has_stopped) =
        if client.is_http2 { (&stop.goaway, &stop.is_goaway) } else { (&stop.idle, &stop.is_idle) };
    let mut stopped = pin!(notify.notified());
    let (mut is_set, mut is_ending) = (false, false);
    poll_fn(|context| {
        if let Poll::Ready(ended) = connection.as_mut().poll(context) {
            return Poll::Ready(ended);
        }
        let is_first = !std::mem::replace(&mut is_set, true);
        if is_first {
            // A later stop wakes this task; an earlier one is noticed below.
            stopped.as_mut().enable();
            _ = stopped.as_mut().poll(context);
        }
        if !is_ending && has_stopped.load(Relaxed) {
            is_ending = true;
            end(connection.as_mut());
            if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
        }
        // Once set, the timer wakes this task, so it need not be polled every time.
        if !is_first && !alarm.is_elapsed() {
            return Poll::Pending;
        }
        check_deadlines(connection.as_mut(), &end, &mut is_ending, (alarm.as_mut(), client), context)
    })
    .await
}

fn check_deadlines<Connection: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<&mut Connection>,
    end: impl Fn(Pin<&mut Connection>),
    is_ending: &mut bool,
    (mut alarm, client): (Pin<&mut tokio::time::Sleep>, &Client),
    context: &mut Context<'_>,
) -> Poll<hyper::Result<()>> {
    while alarm.as_mut().poll(context).is_ready() {
        let next = match client.check_deadlines() {
            // The client is sent GOAWAY first: requests that it has sent by then are served, and it may send others
            // elsewhere.
            Expired::NoRequest if !std::mem::replace(is_ending, true) => {
                end(connection.as_mut());
                client.note_goaway_sent();
                if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                    return Poll::Ready(ended);
                }
                client.check_every().min(LINGER)
            }
            Expired::Close | Expired::NoRequest => return Poll::Ready(Ok(())),
            Expired::NotYet { ticks } => TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX)),
        };
        alarm.as_mut().reset(Instant::now() + next.min(client.check_every()));
    }
    Poll::Pending
}
