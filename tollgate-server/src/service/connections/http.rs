//! One HTTP connection, HTTP/1.1 or HTTP/2 with prior knowledge, from its first byte to its end.
//!
//! At the end of its time or of the server's, an HTTP/1 client reads `Connection: close` in its next response, and an
//! HTTP/2 client gets GOAWAY. So a request that was sent before the client knew is still answered.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::ConnectInfo;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::{BoxError, Router};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::activity::{Activity, CountedFrames, Deadlines, Finding, InFlight, Watchdog, Watched};
use super::body_budget::CountedBody;
use super::interrupts::{Interrupt, Interrupts};
use super::room::Usage;
use super::streams::NewStreams;
use super::{
    DRAIN_DEADLINE, HEAD_DEADLINE, MAX_CONNECTION_AGE, REFUSAL_DEADLINE, Stage, WRITE_DEADLINE, without_request,
};
use crate::service::error_body::ErrorBody;
use crate::service::surfaces::{RequestOutcome, Surface, Surfaces};

/// The longest time between two requests of an HTTP/1 client, as in nginx.
pub(crate) const IDLE_DEADLINE: Duration = Duration::from_secs(75);

/// The longest time without a request on an HTTP/2 connection. gRPC clients keep one connection open.
const HTTP2_IDLE_DEADLINE: Duration = Duration::from_secs(300);

/// Enough for 100 headers.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// The maximum of concurrent streams of an HTTP/2 connection. Decisions take microseconds in memory and a millisecond on
/// Redis, so this is enough for 100,000 per second and connection.
const MAX_STREAMS: u32 = 128;

/// How much of a request body is received before the handler reads it.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;

/// The same for all streams together, which bounds the memory of a connection.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// The interval of HTTP/2 keep-alive pings, and the longest wait for their acknowledgement.
const PING_EVERY: Duration = Duration::from_secs(20);

/// Every HTTP/2 connection begins with this.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Bytes that are read to detect the protocol. Most requests fit.
const FIRST_READ_BYTES: usize = 512;

/// The largest body that is read before a refusal. Closing with unread bytes could destroy the response.
const MAX_REFUSED_BODY_BYTES: usize = 64 * 1024;

/// The counts of requests on a listener.
#[derive(Clone)]
pub(crate) struct Requests {
    pub(crate) surface: Surface,
    pub(crate) surfaces: Arc<Surfaces>,
}

impl Requests {
    /// Returns the surface of a request: requests of proxies are counted separately.
    fn surface_of<B>(&self, request: &Request<B>) -> Surface {
        match self.surface {
            Surface::Http if request.uri().path().starts_with("/v1/authorize") => Surface::Authorize,
            surface => surface,
        }
    }
}

/// Answers the requests of a listener.
pub(crate) trait Handler: Clone + Send + Sync + 'static {
    /// The body of a response.
    type Body: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static;

    /// Whether responses have a `Date` header.
    const SENDS_DATE: bool;

    fn handle(
        self,
        request: Request<CountedBody>,
        peer: SocketAddr,
    ) -> impl Future<Output = Response<Self::Body>> + Send + 'static;
}

impl Handler for Router {
    type Body = Body;

    const SENDS_DATE: bool = true;

    async fn handle(self, mut request: Request<CountedBody>, peer: SocketAddr) -> Response<Body> {
        request.extensions_mut().insert(ConnectInfo(peer));
        match TowerToHyperService::new(self).call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

/// The beginning of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Begun {
    pub(crate) peer: SocketAddr,
    /// The time for which it was served already.
    pub(crate) age: Duration,
    pub(crate) usage: Arc<Usage>,
}

impl Begun {
    pub(crate) fn new(peer: SocketAddr, usage: Arc<Usage>) -> Self {
        Self { peer, age: Duration::ZERO, usage }
    }
}

/// Serves a connection until the client, a deadline or the server ends it.
pub(crate) async fn serve<Io, H>(
    mut io: Io,
    Begun { peer, age, usage }: Begun,
    (handler, counted): (H, Requests),
    mut stage: watch::Receiver<Stage>,
) where
    Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Handler,
{
    let detected = tokio::select! {
        // Bytes that have arrived are served, even at the end.
        biased;
        first = timeout(HEAD_DEADLINE, read_first(&mut io)) => first,
        () = without_request(&mut stage) => return,
    };
    let Ok(Some(first)) = detected else { return };
    let is_http2 = first.starts_with(PREFACE);
    let activity = Arc::new(Activity::new(usage));
    if !matches!(*stage.borrow(), Stage::Serving) || age >= MAX_CONNECTION_AGE {
        activity.close();
    }
    let mut io = Watched::new(io, first, Arc::clone(&activity));
    if is_http2 {
        let Requests { surface, surfaces } = counted.clone();
        io = io.counting_frames(CountedFrames::new(move || surfaces.closed(surface, peer)));
    }
    let io = TokioIo::new(io);
    let requests = Arc::clone(&activity);
    let service = service_fn(move |request: Request<Incoming>| {
        let in_flight = requests.begin();
        let (surface, surfaces) = (counted.surface_of(&request), Arc::clone(&counted.surfaces));
        let began = surfaces.now();
        let request = request.map(|body| CountedBody::new(body, Arc::clone(&requests)));
        let response = handler.clone().handle(request, peer);
        async move {
            let mut response = response.await;
            surfaces.observe(surface, RequestOutcome::of(&response), began);
            if !is_http2 && in_flight.is_closing() {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, std::convert::Infallible>(response.map(|body| Tracked { body, _in_flight: in_flight }))
        }
    });
    let deadlines = Deadlines {
        idle: if is_http2 { HTTP2_IDLE_DEADLINE } else { IDLE_DEADLINE },
        head: HEAD_DEADLINE,
        stalled: WRITE_DEADLINE,
        age: MAX_CONNECTION_AGE,
    };
    let streams = NewStreams::default();
    let executor = streams.executor();
    let mut driver = Driver {
        activity,
        watchdog: Watchdog::new(deadlines, age),
        interrupts: Interrupts::new(stage),
        streams,
        is_http2,
        cut_at: None,
    };
    // Errors are ignored: the client went away, or did not speak HTTP.
    if is_http2 {
        let connection = http2_builder(executor).auto_date_header(H::SENDS_DATE).serve_connection(io, service);
        driver.drive(connection, |connection| connection.graceful_shutdown()).await;
    } else {
        let connection = http1_builder().serve_connection(io, service);
        driver.drive(connection, |connection| connection.graceful_shutdown()).await;
    }
}

/// Answers the first request with 503, over HTTP/1 and HTTP/2, and closes the connection.
pub(crate) async fn refuse<Io>(mut io: Io)
where
    Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answer = async {
        let Some(first) = read_first(&mut io).await else { return };
        let is_http2 = first.starts_with(PREFACE);
        let io = TokioIo::new(Watched::new(io, first, Arc::default()));
        let service = service_fn(|request: Request<Incoming>| async {
            let is_grpc = is_grpc(&request);
            _ = Limited::new(request.into_body(), MAX_REFUSED_BODY_BYTES).collect().await;
            Ok::<_, std::convert::Infallible>(refusal(is_grpc))
        });
        if is_http2 {
            let mut connection = pin!(http2_builder(TokioExecutor::new()).serve_connection(io, service));
            // GOAWAY is sent after the requests that the client sends at once.
            connection.as_mut().graceful_shutdown();
            _ = connection.await;
        } else {
            _ = http1_builder().keep_alive(false).serve_connection(io, service).await;
        }
    };
    _ = timeout(REFUSAL_DEADLINE, answer).await;
}

fn is_grpc<B>(request: &Request<B>) -> bool {
    let media_type = request.headers().get(header::CONTENT_TYPE);
    media_type.is_some_and(|media_type| media_type.as_bytes().starts_with(b"application/grpc"))
}

fn refusal(is_grpc: bool) -> Response<Body> {
    const MESSAGE: &str = "the listener has no room for another connection: try again later";
    if is_grpc {
        let unavailable = [("content-type", "application/grpc"), ("grpc-status", "14"), ("grpc-message", MESSAGE)];
        return (unavailable, Body::empty()).into_response();
    }
    let (status, error) = (StatusCode::SERVICE_UNAVAILABLE, "too_many_connections");
    ([(header::RETRY_AFTER, "1")], ErrorBody { status, error, message: MESSAGE.to_owned() }).into_response()
}

fn http1_builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    // The watchdog has the deadlines.
    builder.timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(MAX_HEAD_BYTES);
    builder
}

fn http2_builder<E: Clone>(executor: E) -> http2::Builder<E> {
    let mut builder = http2::Builder::new(executor);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_HEAD_BYTES as u32)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_EVERY);
    builder
}

/// Reads until the protocol is known. Returns `None` if the client disconnects before.
async fn read_first<Io: AsyncRead + Unpin>(io: &mut Io) -> Option<Bytes> {
    let mut first = [0; FIRST_READ_BYTES];
    let mut length = 0;
    loop {
        match io.read(&mut first[length..]).await {
            Ok(0) | Err(_) => return None,
            Ok(read) => length += read,
        }
        let common = length.min(PREFACE.len());
        if length >= PREFACE.len() || first[..common] != PREFACE[..common] {
            return Some(Bytes::copy_from_slice(&first[..length]));
        }
    }
}

/// A response body. Its request is in flight until it is sent.
struct Tracked<B> {
    body: B,
    _in_flight: InFlight,
}

impl<B: HttpBody + Unpin> HttpBody for Tracked<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Polls a connection, and ends it in time.
struct Driver {
    activity: Arc<Activity>,
    watchdog: Watchdog,
    interrupts: Interrupts,
    /// The streams that an HTTP/2 client has opened.
    streams: NewStreams,
    is_http2: bool,
    /// The time at which the connection is closed although requests are in flight.
    cut_at: Option<Instant>,
}

impl Driver {
    async fn drive<C: Future>(&mut self, connection: C, end: impl Fn(Pin<&mut C>)) {
        let mut connection = pin!(connection);
        let mut is_first = true;
        poll_fn(|context| {
            // hyper has to see the request that has arrived before it is asked to end, or it would drop it.
            if std::mem::replace(&mut is_first, false)
                && let Poll::Ready(_ended) = connection.as_mut().poll(context)
            {
                return Poll::Ready(());
            }
            loop {
                // Interrupts come first, so that no later response promises to keep the connection.
                if let Poll::Ready(interrupt) = self.interrupts.poll(context) {
                    match self.handle(interrupt) {
                        Step::Continue => {}
                        Step::End => end(connection.as_mut()),
                        Step::Cut => return Poll::Ready(()),
                    }
                    continue;
                }
                let polled = connection.as_mut().poll(context);
                if polled.is_pending() {
                    self.streams.run(context);
                }
                return polled.map(|_ended| ());
            }
        })
        .await;
    }

    fn handle(&mut self, interrupt: Interrupt) -> Step {
        match interrupt {
            Interrupt::Stage(Stage::Serving) => Step::Continue,
            // An idle HTTP/1 connection would be closed at once, and a request on its way would be lost.
            Interrupt::Stage(Stage::Closing) if !self.is_http2 => {
                self.activity.close();
                Step::Continue
            }
            Interrupt::Stage(Stage::Closing | Stage::Ending) => Step::End,
            Interrupt::Stage(Stage::Cut) => Step::Cut,
            Interrupt::Tick => match self.watchdog.look(&self.activity) {
                Finding::InTime => Step::Continue,
                Finding::Late => Step::Cut,
                Finding::Old if !self.is_http2 => {
                    self.activity.close();
                    Step::Continue
                }
                Finding::Old | Finding::Idle => {
                    let cut_at = *self.cut_at.get_or_insert(Instant::now() + DRAIN_DEADLINE);
                    if Instant::now() >= cut_at { Step::Cut } else { Step::End }
                }
            },
        }
    }
}

/// What to do with a connection.
enum Step {
    Continue,
    /// No further requests.
    End,
    Cut,
}
