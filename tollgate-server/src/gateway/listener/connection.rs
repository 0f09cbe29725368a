//! A client connection, from accept to close.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tollgate::rules::Certificate;

use super::tls;
use crate::gateway::client::{Client, Scheme};
use crate::gateway::failure::HandshakeFailure;
use crate::gateway::http1::server::Http1Server;
use crate::gateway::http2;
use crate::gateway::per_address;
use crate::gateway::stream::Stream;
use crate::gateway::tally::Tally;
use crate::gateway::worker::{Shutdown, Worker};
use crate::service::proxy_protocol;

/// The settings of a listener that apply to new connections.
pub(in crate::gateway) struct ListenerConfig {
    pub(super) proxy_protocol: bool,
    pub(in crate::gateway) tls: Option<TlsAcceptor>,
}

impl ListenerConfig {
    /// Returns whether the first bytes of a connection are those of a request.
    pub(in crate::gateway) fn is_plain(&self) -> bool {
        !self.proxy_protocol && self.tls.is_none()
    }
}

/// A connection that is counted.
pub(in crate::gateway) struct OpenConnection(Arc<Tally>);

impl OpenConnection {
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
pub(in crate::gateway) fn serve(
    counted: OpenConnection,
    stream: Stream,
    client: Arc<Client>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
) -> impl Future<Output = io::Result<()>> + Send {
    async move {
        let http2 = Http1Server::new(stream, &client, &worker).serve(&stop).await?;
        if let Some((stream, first)) = http2 {
            client.use_http2();
            // Few connections need this large future.
            Box::pin(http2::serve((stream, first), client, worker, stop)).await;
        }
        drop(counted);
        Ok(())
    }
}

/// Serves a connection that begins with a header of the PROXY protocol or a TLS handshake.
pub(super) async fn begin_and_serve(
    counted: OpenConnection,
    tcp: TcpStream,
    (peer, entered): (SocketAddr, Option<per_address::Counted>),
    config: Arc<ListenerConfig>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
) -> io::Result<()> {
    let begun = Box::pin(begin(tcp, (peer, entered), config, &worker)).await?;
    let Some((stream, client)) = begun else { return Ok(()) };
    if !client.is_http2() {
        return serve(counted, stream, client, worker, stop).await;
    }
    Box::pin(http2::serve((stream, Bytes::new()), client, worker, stop)).await;
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
    let address = peer.ip().to_canonical();
    let note = |error: &io::Error| worker.tally.note_handshake_error(error, address, worker.ticks.now());
    let tls = match accepted.inspect_err(note)? {
        Accepted::Tls(tls) => tls,
        Accepted::PlainHttp(tcp) => {
            worker.tally.failed_handshakes.note(HandshakeFailure::PlainHttp);
            return tls::send_use_https(tcp).await.map(|()| None);
        }
    };
    let is_http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
    let certificate = tls::client_certificate(tls.get_ref().1).map(Box::new);
    let client = client(worker, (peer, entered), (Scheme::Https, certificate));
    if is_http2 {
        client.use_http2();
    }
    Ok(Some((Stream::Tls(tls), client)))
}

/// Creates the client of a connection without TLS.
pub(super) fn plain_client(worker: &Worker, address: (SocketAddr, Option<per_address::Counted>)) -> Arc<Client> {
    client(worker, address, (Scheme::Http, None))
}

fn client(
    worker: &Worker,
    (address, entered): (SocketAddr, Option<per_address::Counted>),
    security: (Scheme, Option<Box<Certificate>>),
) -> Arc<Client> {
    let site = worker.site.load();
    let settings = (site.proxies.trusts(address.ip()), site.max_head, site.timeouts);
    let shared = (Arc::clone(&worker.ticks), Arc::clone(&worker.tally));
    Arc::new(Client::new((address, entered), security, settings, shared))
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

/// Closes connections without a valid PROXY protocol header.
fn unusable(_: proxy_protocol::HeaderError) -> io::Error {
    io::ErrorKind::InvalidData.into()
}
