//! A client connection, from accept to close.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tollgate::rules::{Certificate, Facts};

use super::client::{Client, ConnectionInfo, LINGER, Scheme};
use super::client_deadlines::Expired;
use super::exchange::{Exchange, Worker};
use super::framing::FramingGuard;
use super::io::{ClientIo, Stream};
use super::lane::{self, Handover};
use super::log::{Completion, Record};
use super::per_address;
use super::streams::Streams;
use super::ticks::TICK;
use super::tls::{self, HandshakeFailure};
use super::workers::Counted;
use crate::service::proxy_protocol;

/// The start of the HTTP/2 connection preface, for clients that use HTTP/2 without ALPN. No HTTP/1 request starts like
/// this.
pub(super) const HTTP2_PREFACE: &[u8] = b"PRI ";

/// The maximum of concurrent streams of an HTTP/2 connection: the minimum that RFC 9113 recommends, since each stream
/// may hold memory.
const MAX_STREAMS: u32 = 100;

/// How much of a request body is received while the upstream does not read: enough for a megabyte per second around the
/// world.
const STREAM_WINDOW_BYTES: u32 = 128 << 10;

/// Room for all streams at once, so that stalled uploads do not block the others.
const CONNECTION_WINDOW_BYTES: u32 = MAX_STREAMS * STREAM_WINDOW_BYTES;

/// How much of each response is buffered while the client does not read: two frames, so that one is available while
/// another is written.
pub(super) const SEND_BUFFER_BYTES: usize = 32 << 10;

/// How much of an upload is buffered while the upstream does not read: the window and the send buffer.
pub(super) const MAX_UPLOAD_BYTES: usize = STREAM_WINDOW_BYTES as usize + SEND_BUFFER_BYTES;

/// The interval of HTTP/2 keep-alive pings.
const PING_EVERY: Duration = Duration::from_secs(20);

/// The settings of a listener that apply to new connections.
pub(super) struct ListenerConfig {
    pub(super) proxy_protocol: bool,
    pub(super) tls: Option<TlsAcceptor>,
}

/// The shutdown signal for all connections.
#[derive(Debug, Default)]
pub(super) struct Stop {
    /// Notified when idle connections have to close.
    pub(super) idle: Notify,
    is_idle: std::sync::atomic::AtomicBool,
}

impl Stop {
    pub(super) fn end_idle(&self) {
        self.is_idle.store(true, std::sync::atomic::Ordering::Relaxed);
        self.idle.notify_waiters();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_idle.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// A connection that is ready for its first request.
struct ReadyConnection {
    stream: Stream,
    peer: SocketAddr,
    entered: Option<per_address::Counted>,
    scheme: Scheme,
    certificate: Option<Certificate>,
    is_http2: bool,
}

/// Serves a connection until the client, a deadline or the gateway ends it. `_counted` is dropped last.
///
/// Most connections are idle most of the time, and each holds the maximum size of this future. So rare or short steps
/// are boxed.
pub(super) async fn serve(
    _counted: Counted,
    tcp: TcpStream,
    (peer, entered): (SocketAddr, Option<per_address::Counted>),
    config: Arc<ListenerConfig>,
    worker: Arc<Worker>,
    stop: Arc<Stop>,
) -> io::Result<()> {
    let ready = if config.proxy_protocol || config.tls.is_some() {
        Box::pin(begin(tcp, (peer, entered), config, &worker)).await?
    } else {
        let (stream, scheme) = (Stream::Plain(tcp), Scheme::Http);
        Some(ReadyConnection { stream, peer, entered, scheme, certificate: None, is_http2: false })
    };
    let Some(ReadyConnection { stream, peer, entered, scheme, certificate, is_http2 }) = ready else { return Ok(()) };
    let client = Arc::new(client(&worker, (peer, entered), (scheme, certificate), is_http2));
    let handover = if is_http2 {
        Handover { stream, first: Bytes::new(), is_http2, is_fresh: true }
    } else {
        let Some(handover) = lane::serve(stream, &client, &worker, &stop).await? else { return Ok(()) };
        handover
    };
    if handover.is_fresh && !handover.is_http2 && client.scheme == Scheme::Http && tls::is_hello(&handover.first) {
        worker.tally.note_failed_handshake(HandshakeFailure::TlsHello);
        return Ok(());
    }
    let client = if handover.is_http2 && !client.is_http2 { Arc::new(client.over_http2()) } else { client };
    // Few connections need this large future.
    Box::pin(serve_by_hyper(handover, client, worker, stop)).await;
    Ok(())
}

/// Reads what precedes the first request: the PROXY protocol header and the TLS handshake. Returns `None` if the
/// connection is closed.
async fn begin(
    mut tcp: TcpStream,
    (mut peer, mut entered): (SocketAddr, Option<per_address::Counted>),
    config: Arc<ListenerConfig>,
    worker: &Worker,
) -> io::Result<Option<ReadyConnection>> {
    let head_timeout = worker.site.load().timeouts.head.duration();
    if config.proxy_protocol {
        let caller = timeout(head_timeout, proxy_protocol::read(&mut tcp)).await?.map_err(unusable)?;
        peer = caller.unwrap_or(peer);
        entered = worker.enter(peer.ip())?;
    }
    let Some(tls) = &config.tls else {
        let (stream, scheme) = (Stream::Plain(tcp), Scheme::Http);
        return Ok(Some(ReadyConnection { stream, peer, entered, scheme, certificate: None, is_http2: false }));
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
    Ok(Some(ReadyConnection { stream: Stream::Tls(tls), peer, entered, scheme: Scheme::Https, certificate, is_http2 }))
}

fn client(
    worker: &Worker,
    (address, entered): (SocketAddr, Option<per_address::Counted>),
    (scheme, certificate): (Scheme, Option<Certificate>),
    is_http2: bool,
) -> Client {
    let site = worker.site.load();
    let (max_head, timeouts, is_trusted_proxy) = (site.max_head, site.timeouts, site.proxies.trusts(address.ip()));
    let entered = entered.map(Arc::new);
    let info = ConnectionInfo { address, is_trusted_proxy, scheme, certificate, max_head, timeouts, entered };
    Client::new(info, is_http2, Arc::clone(&worker.ticks), Arc::clone(&worker.tally))
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

/// Serves the remaining requests of a connection with hyper.
async fn serve_by_hyper(handover: Handover, client: Arc<Client>, worker: Arc<Worker>, stop: Arc<Stop>) {
    let Handover { stream, first, is_http2, .. } = handover;
    let max_head = client.max_head;
    let framing_guard = (!is_http2).then(FramingGuard::new);
    let io = TokioIo::new(ClientIo::new(stream, first, Arc::clone(&client), framing_guard));
    let ticks = Arc::clone(&worker.ticks);
    let service = Exchange { worker: Arc::clone(&worker), client: Arc::clone(&client) };
    // Errors are the client's: it disconnected or did not speak HTTP.
    if is_http2 {
        let mut builder = http2::Builder::new(Streams { ticks });
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_send_buf_size(SEND_BUFFER_BYTES)
            .max_header_list_size(u32::try_from(max_head).unwrap_or(u32::MAX))
            .keep_alive_interval(PING_EVERY);
        let connection = builder.serve_connection(io, service);
        _ = drive(connection, |connection| connection.graceful_shutdown(), &client, &stop).await;
    } else {
        let mut builder = http1::Builder::new();
        builder.header_read_timeout(None).max_buf_size(max_head.max(MIN_BUFFER_BYTES)).pipeline_flush(false);
        let connection = builder.serve_connection(io, service).with_upgrades();
        let ended = drive(connection, |connection| connection.graceful_shutdown(), &client, &stop).await;
        if let Some(status) = ended.err().as_ref().and_then(answered_by_hyper) {
            note_unparsed(status, &client, &worker);
        }
    }
}

/// Returns the status that hyper has sent for a head that it could not parse, or that the framing checks withheld from
/// it.
fn answered_by_hyper(error: &hyper::Error) -> Option<StatusCode> {
    if !error.is_parse() || error.is_parse_version_h2() {
        return None;
    }
    // hyper distinguishes some of them only by the message.
    let text = error.to_string();
    Some(match error.is_parse_too_large() {
        // hyper sends no response for its own errors.
        false if text.starts_with("internal") => return None,
        false => StatusCode::BAD_REQUEST,
        true if text.starts_with("URI") => StatusCode::URI_TOO_LONG,
        true => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
    })
}

/// The reason in the access log for a head that is not HTTP.
const MALFORMED: &str = "malformed";

/// Counts and logs a request whose head could not be parsed.
fn note_unparsed(status: StatusCode, client: &Client, worker: &Worker) {
    worker.tally.note_unparsed(status);
    let site = worker.site.load();
    // The client behind a trusted proxy is named in the head, which could not be parsed.
    if status == StatusCode::BAD_REQUEST && !site.proxies.trusts(client.address.ip()) {
        worker.strike(&client.add_to(Facts::new("", "/")));
    }
    if let Some(log) = &site.log {
        let mut record = Record::unparsed(client.address.ip().to_canonical(), (log, worker.number));
        let reason = client.ambiguity().or((status == StatusCode::BAD_REQUEST).then_some(MALFORMED));
        if let Some(reason) = reason {
            record.note_reason(reason);
        }
        record.write(&Completion { status: Some(status), sent_bytes: 0, is_broken: false, nanos: 0, route: None });
    }
}

/// Closes connections without a valid PROXY protocol header.
fn unusable(_: proxy_protocol::HeaderError) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// The minimum that hyper accepts.
const MIN_BUFFER_BYTES: usize = 8192;

/// Drives a connection, checks its deadlines periodically, and calls `end` at shutdown.
async fn drive<Connection: Future<Output = hyper::Result<()>>>(
    connection: Connection,
    end: impl Fn(Pin<&mut Connection>),
    client: &Client,
    stop: &Stop,
) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    let mut alarm = pin!(sleep(client.check_every()));
    let mut stopped = pin!(stop.idle.notified());
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
        if !is_ending && stop.is_over() {
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
            // An HTTP/2 client is sent GOAWAY first: requests that it has sent by then are served, and it may send
            // others elsewhere.
            Expired::NoRequest if client.is_http2 && !std::mem::replace(is_ending, true) => {
                end(connection.as_mut());
                client.note_goaway_sent();
                if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                    return Poll::Ready(ended);
                }
                client.check_every().min(LINGER)
            }
            Expired::Close | Expired::NoRequest => return Poll::Ready(Ok(())),
            Expired::BodyLate => {
                // The request in flight notices the timeout and sends a response.
                if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                    return Poll::Ready(ended);
                }
                client.check_every()
            }
            Expired::NotYet { ticks } => TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX)),
        };
        alarm.as_mut().reset(Instant::now() + next.min(client.check_every()));
    }
    Poll::Pending
}
