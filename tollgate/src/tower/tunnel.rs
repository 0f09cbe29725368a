//! Connections that a handler takes over, as WebSockets do: they hold their permit until the handler lets go of them.
//!
//! An upgraded connection goes from hyper to the handler, past the layer: a handler takes hyper's [`OnUpgrade`] from the
//! request and spawns a task that talks to the client long after the answer (101) is over. So a request with a permit
//! gets another [`OnUpgrade`], of a pipe in memory, and the layer carries bytes between the pipe and the client. When the
//! handler drops its end, the permit ends. Only requests with a permit take this detour, and hyper makes an `OnUpgrade`
//! only for requests that want one.
//!
//! hyper has no constructor for an `OnUpgrade`. It makes one for the server's end of any connection, so a connection in
//! memory is upgraded for it.

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

use crate::gate::InFlightPermit;

/// Bytes in the pipe in each direction: two frames of the largest size that most WebSocket libraries write at once.
const PIPE_BYTES: usize = 16 << 10;

/// How long a client may take to read the handler's last words.
const LAST_WORDS: Duration = Duration::from_secs(10);

const HANDSHAKE: &[u8] = b"GET / HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: tunnel\r\n\r\n";
const END_OF_HEAD: &[u8] = b"\r\n\r\n";

/// The layer's end of a pipe to a handler that may take over the connection of its request.
pub(super) struct Tunnel {
    client: OnUpgrade,
    handler: DuplexStream,
    /// Resolves when the handler has dropped its end.
    handler_gone: oneshot::Receiver<Infallible>,
    is_connect: bool,
}

impl Tunnel {
    /// Whether the client of a request wants another protocol.
    pub(super) fn is_requested(extensions: &Extensions) -> bool {
        extensions.get::<OnUpgrade>().is_some()
    }

    /// Puts a pipe between the client's connection and the handler.
    pub(super) fn before<B>(request: &mut Request<B>) -> Option<Self> {
        let is_connect = request.method() == Method::CONNECT;
        let client = request.extensions_mut().remove::<OnUpgrade>()?;
        let pipe = pipe();
        debug_assert!(pipe.is_some(), "hyper upgrades a connection in memory without waiting");
        // Without a pipe there is no upgrade: a connection that holds no permit must not be taken over.
        let (handler, handler_gone, promise) = pipe?;
        request.extensions_mut().insert(promise);
        Some(Self { client, handler, handler_gone, is_connect })
    }

    /// Whether an answer of this status hands the connection over.
    pub(super) fn is_opened_by(&self, status: StatusCode) -> bool {
        status == StatusCode::SWITCHING_PROTOCOLS || self.is_connect && status.is_success()
    }

    /// Carries bytes between the client and the handler, and holds the permit until the handler is gone.
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

/// Carries bytes in both directions until the handler is gone.
async fn carry(client: TokioIo<Upgraded>, handler: DuplexStream, mut handler_gone: oneshot::Receiver<Infallible>) {
    let (mut from_client, mut to_client) = split(client);
    let (mut from_handler, mut to_handler) = split(handler);
    let mut outgoing = pin!(async {
        _ = copy(&mut from_handler, &mut to_client).await;
        _ = to_client.shutdown().await;
    });
    let mut incoming = pin!(async {
        let copied = async {
            _ = copy(&mut from_client, &mut to_handler).await;
            _ = to_handler.shutdown().await;
        };
        // A handler may work on after its client has closed the connection.
        tokio::select! {
            () = copied => { _ = handler_gone.await; }
            _ = &mut handler_gone => {}
        }
    });
    tokio::select! {
        () = &mut outgoing => incoming.await,
        () = &mut incoming => { _ = timeout(LAST_WORDS, outgoing).await; }
    }
}

/// The handler's end of a pipe.
struct HandlerEnd {
    io: DuplexStream,
    /// Dropped with it.
    _alive: oneshot::Sender<Infallible>,
}

/// A pipe: the layer's end, what resolves when the other end is dropped, and the promise of the other end.
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
    // Everything is in memory, so there is nothing to wait for.
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
