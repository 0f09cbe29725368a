//! Opens connections to upstreams.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::time::timeout;

use super::conn::Http1Conn;
use super::dial;
use super::http2_pool::{Sender, StreamPermit, UNKNOWN_STREAMS};
use super::reuse::Usage;
use super::slots::{Evicted, UpstreamIo, UpstreamSlot};
use super::tls::TlsFault;
use super::{Target, UpstreamProtocol};
use crate::gateway::client::Client;
use crate::gateway::deadline::Tick;
use crate::gateway::failure::ConnectError;
use crate::gateway::maybe_tls::MaybeTls;
use crate::gateway::site::Route;
use crate::gateway::socket::INPUT_BYTES;
use crate::gateway::worker::Worker;

/// The interval of HTTP/2 keep-alive pings, and the timeout of a reply.
const PING_EVERY: Duration = Duration::from_secs(15);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How much of one response an upstream may send while the client does not read. This is memory that a stalled client
/// holds.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// How much an upstream may send for all streams together. More than all streams can hold, so that stalled clients do
/// not block the others. The maximum of HTTP/2.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// How much of each body is buffered while the upstream does not read, in addition to the client's window: two frames,
/// so that one is available while another is written.
const SEND_BUFFER_BYTES: usize = 32 << 10;

/// The maximum size of a response head, as in HTTP/1.
const MAX_HEAD_BYTES: u32 = INPUT_BYTES as u32;

/// The purpose of a connection to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum ConnUse {
    Request,
    /// Switching to another protocol.
    Upgrade,
}

/// A connection to an upstream.
pub(in crate::gateway) enum UpstreamConn {
    /// HTTP/1: one request at a time.
    H1(Box<Http1Conn>),
    /// HTTP/2: many requests at a time.
    H2(Sender, StreamPermit),
}

/// Returns a connection to an upstream: a shared one that has room, or a new one.
pub(in crate::gateway) async fn obtain(
    target: &Target,
    conn_use: ConnUse,
    (worker, client): (&Arc<Worker>, &Client),
    route: &Route,
) -> Result<UpstreamConn, ConnectError> {
    let connect_timeout = route.connect_timeout;
    let may_share = target.address.scheme != UpstreamProtocol::Http1 && conn_use == ConnUse::Request;
    let reserve = || target.http2_pool(worker.number).reserve(worker.ticks.now(), &route.reuse, &target.addresses);
    if may_share && let Some((sender, stream_permit)) = reserve() {
        return Ok(UpstreamConn::H2(sender, stream_permit));
    }
    let opened = async {
        let turn = if may_share { target.opening_turn(worker.number).await } else { None };
        // The previous holder of the turn may have opened one.
        match turn.as_ref().and_then(|_| reserve()) {
            Some((sender, stream_permit)) => Ok(UpstreamConn::H2(sender, stream_permit)),
            None => open(target, conn_use, (worker, client)).await,
        }
    };
    timeout(connect_timeout, opened).await.map_err(|_elapsed| ConnectError::Timeout)?
}

/// A new connection by protocol, with the address it leads to.
pub(in crate::gateway) enum Dialled {
    Http1(UpstreamIo, IpAddr),
    Http2(UpstreamIo, IpAddr),
}

/// Connects to an upstream and negotiates the protocol.
pub(in crate::gateway) async fn dial(
    target: &Target,
    conn_use: ConnUse,
    now: Tick,
    slot: UpstreamSlot,
) -> Result<Dialled, ConnectError> {
    let addresses = target.addresses.to_try(now).await?;
    let avoid = |failed: SocketAddr| target.addresses.avoid(failed.ip(), now);
    let (tcp, reached, slot) = dial::connect(&addresses, slot, avoid).await?;
    let ip = reached.ip();
    // Nagle's algorithm would delay small requests.
    tcp.set_nodelay(true)?;
    Ok(match (&target.tls, target.address.scheme) {
        (Some(tls), _) => {
            let connector = if conn_use == ConnUse::Upgrade { &tls.http1 } else { &tls.connector };
            let stream = Box::new(connector.connect(tls.name.clone(), tcp).await.map_err(handshake_error)?);
            let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            let io = UpstreamIo::new(MaybeTls::Tls(stream), slot);
            if is_http2 { Dialled::Http2(io, ip) } else { Dialled::Http1(io, ip) }
        }
        (None, UpstreamProtocol::Http2) => Dialled::Http2(UpstreamIo::new(MaybeTls::Plain(tcp), slot), ip),
        (None, _) => Dialled::Http1(UpstreamIo::new(MaybeTls::Plain(tcp), slot), ip),
    })
}

fn handshake_error(error: io::Error) -> ConnectError {
    TlsFault::of_handshake(&error).map_or(ConnectError::Io(error), ConnectError::Tls)
}

async fn open(
    target: &Target,
    conn_use: ConnUse,
    (worker, client): (&Arc<Worker>, &Client),
) -> Result<UpstreamConn, ConnectError> {
    let slot = worker.upstream_slots.take(client.requests(), || evict_idle(worker)).await?;
    let now = worker.ticks.now();
    match dial(target, conn_use, now, slot).await? {
        Dialled::Http1(io, ip) => {
            Ok(UpstreamConn::H1(Box::new(Http1Conn::new(io, Usage::new(now, target.origin(ip))))))
        }
        Dialled::Http2(io, ip) => share(io, ip, target, worker).await,
    }
}

async fn share(
    io: UpstreamIo,
    ip: IpAddr,
    target: &Target,
    worker: &Arc<Worker>,
) -> Result<UpstreamConn, ConnectError> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .initial_max_send_streams(UNKNOWN_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        // Not adaptive: that would make both windows the same size, and one stalled stream would fill both.
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    let (sender, connection) = builder.handshake(TokioIo::new(io)).await?;
    let (sender, stream_permit) = target
        .http2_pool(worker.number)
        .add(sender, connection, Usage::new(worker.ticks.now(), target.origin(ip)))
        .await?;
    Ok(UpstreamConn::H2(sender, stream_permit))
}

/// Closes an idle connection, first of those of this worker.
fn evict_idle(worker: &Worker) -> Evicted {
    let site = worker.site.load();
    let targets = || site.routes.iter().flat_map(Route::targets);
    let workers = targets().next().map_or(0, |target| target.workers());
    let own_first = (0..workers).map(|step| (worker.number + step) % workers);
    let evicted = own_first.flat_map(|worker| targets().map(move |target| target.evict_idle(worker)));
    evicted.into_iter().find(|evicted| *evicted != Evicted::Nothing).unwrap_or(Evicted::Nothing)
}
