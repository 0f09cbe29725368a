//! Connections that a handler takes over, such as WebSockets. They hold their permit until the handler drops the
//! connection.
//!
//! An upgraded connection goes from hyper to the handler and bypasses the layer: the handler takes hyper's
//! [`OnUpgrade`] from the request and spawns a task that uses the connection long after the response (101) has been
//! sent. A request with a permit therefore gets the [`OnUpgrade`] of an in-memory pipe, and the layer copies bytes
//! between the pipe and the client. When the handler drops its end, the permit is returned. Only requests with a permit
//! need this, and hyper creates an `OnUpgrade` only for requests that ask for one.
//!
//! hyper has no constructor for an `OnUpgrade`, but it creates one for the server side of any connection. So we upgrade
//! an in-memory connection.

use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use http::{Extensions, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, copy, duplex, split};
use tokio::sync::oneshot;
use tokio::task::coop::unconstrained;
use tokio::time::timeout;
use tollgate_rules::InFlightPermit;

/// Bytes in the pipe in each direction: two frames of the largest size that most WebSocket libraries write at once.
const PIPE_BYTES: usize = 16 << 10;

/// The time a client has to read the last bytes that the handler wrote.
const LAST_WORDS: Duration = Duration::from_secs(10);

const HANDSHAKE: &[u8] = b"GET / HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: tunnel\r\n\r\n";
const END_OF_HEAD: &[u8] = b"\r\n\r\n";

/// The layer's end of the pipe to a handler that may take over the connection.
pub(super) struct Tunnel {
    client: OnUpgrade,
    handler: DuplexStream,
    /// Resolves when the handler has dropped its end.
    handler_gone: oneshot::Receiver<Infallible>,
    is_connect: bool,
}

impl Tunnel {
    /// Returns `true` if the client asks for another protocol.
    pub(super) fn is_requested(extensions: &Extensions) -> bool {
        extensions.get::<OnUpgrade>().is_some()
    }

    /// Inserts a pipe between the client's connection and the handler.
    pub(super) fn before<B>(request: &mut Request<B>) -> Option<Self> {
        let is_connect = request.method() == Method::CONNECT;
        let client = request.extensions_mut().remove::<OnUpgrade>()?;
        let pipe = pipe();
        debug_assert!(pipe.is_some(), "hyper upgrades a connection in memory without waiting");
        // Without a pipe there is no upgrade: a connection without a permit must not be taken over.
        let (handler, handler_gone, promise) = pipe?;
        request.extensions_mut().insert(promise);
        Some(Self { client, handler, handler_gone, is_connect })
    }

    /// Returns `true` if a response with this status hands over the connection.
    pub(super) fn is_opened_by(&self, status: StatusCode) -> bool {
        status == StatusCode::SWITCHING_PROTOCOLS || self.is_connect && status.is_success()
    }

    /// Copies bytes between the client and the handler, and holds the permit until the handler drops its end.
    pub(super) fn open(self, permit: Option<InFlightPermit>) {
        let Self { client, handler, handler_gone, .. } = self;
        tokio::spawn(async move {
            match client.await {
                Ok(client) => carry(TokioIo::new(client), handler, handler_gone).await,
                Err(_) => {
                    // The handler notices when it reads.
                    drop(handler);
                    _ = handler_gone.await;
                }
            }
            drop(permit);
        });
    }
}

/// Copies bytes in both directions until the handler drops its end.
async fn carry(client: TokioIo<Upgraded>, handler: DuplexStream, mut handler_gone: oneshot::Receiver<Infallible>) {
    if !copy_while_client_reads(client, handler, &mut handler_gone).await {
        // Without the other end of the pipe, the handler's next write fails.
        _ = handler_gone.await;
    }
}

/// Copies bytes in both directions. Returns `true` once the handler has dropped its end, or `false` if the client
/// accepts no more bytes: a handler that only writes must not fill the pipe and wait forever.
async fn copy_while_client_reads(
    client: TokioIo<Upgraded>,
    handler: DuplexStream,
    handler_gone: &mut oneshot::Receiver<Infallible>,
) -> bool {
    let (mut from_client, mut to_client) = split(client);
    let (mut from_handler, mut to_handler) = split(handler);
    let mut outgoing = pin!(async {
        let copied = copy(&mut from_handler, &mut to_client).await;
        _ = to_client.shutdown().await;
        copied.is_ok()
    });
    let mut incoming = pin!(async {
        let copied = async {
            _ = copy(&mut from_client, &mut to_handler).await;
            _ = to_handler.shutdown().await;
        };
        // A handler may continue after its client has closed the connection.
        tokio::select! {
            () = copied => { _ = handler_gone.await; }
            _ = &mut *handler_gone => {}
        }
    });
    tokio::select! {
        client_reads = &mut outgoing => {
            if client_reads {
                incoming.await;
            }
            client_reads
        }
        () = &mut incoming => {
            _ = timeout(LAST_WORDS, outgoing).await;
            true
        }
    }
}

/// The handler's end of a pipe.
struct HandlerEnd {
    io: DuplexStream,
    /// Dropped together with `io`.
    _alive: oneshot::Sender<Infallible>,
}

/// Creates a pipe. Returns the layer's end, a receiver that resolves when the other end is dropped, and the `OnUpgrade`
/// of the other end.
fn pipe() -> Option<(DuplexStream, oneshot::Receiver<Infallible>, OnUpgrade)> {
    let (mut near, far) = duplex(PIPE_BYTES);
    let (alive, gone) = oneshot::channel();
    let promise = Arc::new(Mutex::new(None));
    let promised = Arc::clone(&promise);
    let service = service_fn(move |request: Request<Incoming>| {
        *promised.lock().unwrap_or_else(PoisonError::into_inner) = Some(hyper::upgrade::on(request));
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        ready(Ok::<_, Infallible>(response))
    });
    let far = TokioIo::new(HandlerEnd { io: far, _alive: alive });
    let upgraded = async {
        near.write_all(HANDSHAKE).await?;
        let connection = http1::Builder::new().serve_connection(far, service).with_upgrades();
        connection.await.map_err(io::Error::other)?;
        let mut head = Vec::new();
        while !head.ends_with(END_OF_HEAD) {
            head.push(near.read_u8().await?);
        }
        io::Result::Ok(())
    };
    // Everything is in memory, so this never waits.
    let mut context = Context::from_waker(Waker::noop());
    let Poll::Ready(Ok(())) = pin!(unconstrained(upgraded)).poll(&mut context) else { return None };
    let promise = promise.lock().unwrap_or_else(PoisonError::into_inner).take()?;
    Some((near, gone, promise))
}

impl AsyncRead for HandlerEnd {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl AsyncWrite for HandlerEnd {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
