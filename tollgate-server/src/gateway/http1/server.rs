//! The server of HTTP/1: from a client to an upstream and back in one task.
//!
//! Requests are served with buffers that all connections of a worker share, over connections to upstreams without a
//! task of their own. A client that is refused again and again costs one read and one write per request. A body is
//! streamed in both directions at once, each as fast as the other side reads.
//!
//! ADR 14 and 32 say why it does not use hyper.
//!
//! Deliberately not here: HTTP/2. A client that begins with its preface is passed on, and requests to upstreams with
//! HTTP/2 are converted.

mod client_io;
mod forward;
mod relay;
mod respond;
mod to_http2;

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Response;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tollgate_http1::BodyDecoder;
use tollgate_net::deadline::{Alarm, Tick, Wait};
use tollgate_net::stream::{INPUT_BYTES, LINGER, Stream};
use tollgate_rules::{Check, Outcome};
use tollgate_telemetry::traces;

use self::client_io::PendingBody;
use self::forward::{ForwardResult, Forwarding};
use super::codec::PlainRequest;
use crate::gateway::client::{BufferedBytes, Client, Peer};
use crate::gateway::failure::Failure;
use crate::gateway::head::headers::{self, HeaderBuffer};
use crate::gateway::proxy::{self, Action, ProxyRequest};
use crate::gateway::site::Site;
use crate::gateway::worker::{CurrentConfig, Scratch, Shutdown, Worker, WorkerBuffers, scratch};

/// The maximum size of the buffers of a connection that waits for the rest of a request or of a response to be written.
const WAITING_BYTES: usize = 2 << 10;

/// The maximum number of reads after which a partial head is parsed. After that it is parsed once it is complete, so
/// that a client that sends byte by byte costs little.
const MAX_PIECES: u32 = 16;

/// The server of one connection.
pub(in crate::gateway) struct Http1Server<'a> {
    stream: Stream,
    client: &'a Arc<Client>,
    worker: &'a Arc<Worker>,
    stop: &'a Shutdown,
    /// Copied from the client, so that a refusal need not fetch it.
    peer: Peer<'a>,
    max_head: usize,
    idle: Wait,
    /// Bytes that were read and not served yet, behind `served` bytes: a part of a request, or pipelined requests. Empty once
    /// all of them are served.
    ahead: Vec<u8>,
    served: usize,
    /// Whether `ahead` holds bytes that were not parsed yet.
    has_unparsed: bool,
    pieces: u32,
    /// The body of the request in flight, until all of it has arrived.
    body: Option<Box<PendingBody>>,
    /// The request in flight, for a retry.
    saved: Vec<u8>,
    /// The unwritten rest of a response.
    unsent: Vec<u8>,
    /// Bytes that were written and may still be in the buffer of TLS.
    unflushed: usize,
    /// `unsent` and `unflushed` in the buffer budget.
    unsent_held: BufferedBytes,
    /// Whether the client does not read.
    is_blocked: bool,
    /// Whether the last read returned bytes.
    has_read: bool,
    /// Whether the connection closes after the response.
    is_last: bool,
    /// Whether the client uses HTTP/1.0.
    is_http10: bool,
    /// Whether the request in flight is HEAD, whose response has no body.
    is_head: bool,
    has_served: bool,
    alarm: Alarm,
    deadline: Tick,
    /// The timeout to restore when a blocked client reads again.
    wait: Wait,
}

/// A request whose check waits for a remote store.
struct PendingCheck {
    request: ProxyRequest,
    check: Check,
}

/// An allowed request whose bytes are saved.
struct AllowedRequest {
    request: ProxyRequest,
    outcome: Outcome,
    action: Action,
}

/// A response of the gateway that limits have not counted.
struct UnsettledResponse {
    response: Response<Bytes>,
    request: ProxyRequest,
    outcome: Outcome,
}

/// The next step for a connection.
enum NextStep {
    /// A request was answered.
    Answered,
    /// Wait for a remote store to check a request.
    AwaitCheck(Box<PendingCheck>),
    /// Wait for the delay that a limit imposes on a request.
    AwaitTurn(Box<AllowedRequest>),
    /// Forward a request.
    Forward(Box<Forwarding>),
    /// Respond to a request with its echo.
    Echo(Box<AllowedRequest>),
    /// Settle limits that count responses, and send a response of the gateway.
    Settle(Box<UnsettledResponse>),
    /// Pass the connection on, because the client uses HTTP/2.
    Http2,
    /// Close the connection.
    Close,
}

impl<'a> Http1Server<'a> {
    pub(in crate::gateway) fn new(
        stream: Stream,
        client: &'a Arc<Client>,
        worker: &'a Arc<Worker>,
        stop: &'a Shutdown,
    ) -> Self {
        Self {
            stream,
            client,
            worker,
            stop,
            peer: client.peer(),
            max_head: client.max_head,
            idle: client.timeouts.idle,
            ahead: Vec::new(),
            served: 0,
            has_unparsed: false,
            pieces: 0,
            body: None,
            saved: Vec::new(),
            unsent: Vec::new(),
            unsent_held: BufferedBytes::none(client),
            unflushed: 0,
            is_blocked: false,
            has_read: false,
            is_last: false,
            is_http10: false,
            is_head: false,
            has_served: false,
            alarm: Alarm::default(),
            deadline: worker.ticks.after(client.timeouts.idle),
            wait: client.timeouts.idle,
        }
    }

    /// Serves the requests of a connection. Returns the connection and the bytes that were read if the client uses
    /// HTTP/2.
    #[expect(clippy::manual_async_fn, reason = "an async function holds its arguments twice")]
    pub(in crate::gateway) fn serve(mut self) -> impl Future<Output = io::Result<Option<(Stream, Bytes)>>> + Send {
        async move {
            let mut stopped = pin!(self.stop.idle.notified());
            // A later stop wakes this task, whatever it waits for.
            poll_fn(|context| Poll::Ready(_ = stopped.as_mut().poll(context))).await;
            loop {
                let mut next = poll_fn(|context| self.poll_next(context)).await?;
                if let NextStep::AwaitCheck(checked) = next {
                    next = Box::pin(self.after_check(checked)).await?;
                }
                if let NextStep::AwaitTurn(request) = next {
                    next = Box::pin(self.after_turn(request)).await?;
                }
                if let NextStep::Echo(request) = next {
                    next = Box::pin(self.echo(request)).await?;
                }
                match next {
                    NextStep::Answered => {}
                    NextStep::Settle(response) => Box::pin(self.settle_and_respond(response)).await?,
                    // Boxed like the others, because most connections are idle, and hold the largest of these futures.
                    NextStep::Forward(forwarding) => match Box::pin(forwarding.run(&mut self)).await {
                        ForwardResult::Answered => {}
                        ForwardResult::Switched(tunnel) => {
                            let Self { stream, .. } = self;
                            Box::pin(tunnel.relay(stream)).await;
                            return Ok(None);
                        }
                        ForwardResult::Close => return Ok(None),
                    },
                    NextStep::Http2 => return Ok(Some((self.stream, Bytes::from(self.ahead)))),
                    NextStep::Close | NextStep::AwaitCheck(_) | NextStep::AwaitTurn(_) | NextStep::Echo(_) => {
                        if self.stream.is_buffered() {
                            // `close_notify` distinguishes the end from a broken connection.
                            _ = Box::pin(timeout(LINGER, self.stream.shutdown())).await;
                        }
                        return Ok(None);
                    }
                }
                self.has_served = true;
                if self.body.is_some() && !self.is_last {
                    self.is_last = !Box::pin(self.drain_body()).await;
                }
                self.reset_idle();
                if self.has_unparsed {
                    // A client that sends many requests at once shares the worker with others.
                    tokio::task::coop::consume_budget().await;
                }
                if self.is_last {
                    poll_fn(|context| self.poll_sent(context)).await?;
                    return Box::pin(timeout(LINGER, self.stream.end())).await?.map(|()| None);
                }
            }
        }
    }

    /// Returns whether the client is asked to close the connection with the next response: the gateway stops, or the
    /// client's certificate has ended.
    fn is_closing(&self) -> bool {
        self.worker.is_closing() || self.stop.is_over()
    }

    /// Prepares for the next request.
    fn reset_idle(&mut self) {
        self.restart_deadline(self.idle);
        self.pieces = 0;
        self.body = None;
        self.saved.clear();
        for buffer in [&mut self.saved, &mut self.ahead, &mut self.unsent] {
            // Most connections are idle most of the time, and an allocation is cheap beside a request.
            buffer.shrink_to(if buffer.is_empty() { 0 } else { WAITING_BYTES });
        }
        self.has_unparsed = !self.ahead.is_empty();
    }

    fn set_deadline(&mut self, wait: Wait) {
        self.wait = wait;
        self.deadline = self.worker.ticks.after(wait);
    }

    /// Sets the deadline, but not while the client does not read: it has its own deadline then.
    fn restart_deadline(&mut self, wait: Wait) {
        self.wait = wait;
        if !self.is_blocked {
            self.deadline = self.worker.ticks.after(wait);
        }
    }

    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.alarm.poll_passed(self.deadline, &self.worker.ticks, context)
    }

    /// Reads the next request and serves it, as far as that is possible without waiting.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<io::Result<NextStep>> {
        loop {
            ready!(self.poll_sent(context))?;
            let mut scratch = scratch();
            let Scratch { input, buffers, current, .. } = &mut *scratch;
            let has_unparsed = std::mem::take(&mut self.has_unparsed);
            let mut read = 0;
            if !has_unparsed {
                if self.served > 0 {
                    // Only a part of a request is left, so that little is moved. The client may wait with the rest.
                    self.ahead.drain(..std::mem::take(&mut self.served));
                    self.ahead.shrink_to(WAITING_BYTES);
                }
                match self.poll_read(input, context)? {
                    Poll::Ready(0) => return Poll::Ready(Ok(NextStep::Close)),
                    Poll::Ready(bytes) => read = bytes,
                    Poll::Pending => {
                        drop(scratch);
                        // There is nothing to serve: a part of a head is not a request.
                        if self.stop.is_over() {
                            return Poll::Ready(Ok(NextStep::Close));
                        }
                        ready!(self.poll_late(context));
                        return Poll::Ready(Ok(NextStep::Close));
                    }
                }
            }
            let mut ahead = std::mem::take(&mut self.ahead);
            let is_ahead = !ahead.is_empty();
            if is_ahead {
                let is_long = self.pieces >= MAX_PIECES || ahead.len() >= INPUT_BYTES;
                ahead.extend_from_slice(&input[..read]);
                if is_long && !has_unparsed && !ends_head(&ahead, read) && ahead.len() < self.max_head {
                    self.ahead = ahead;
                    continue;
                }
            }
            let bytes = if is_ahead { &ahead[self.served..] } else { &input[..read] };
            let next = self.handle_input(bytes, buffers, current, context)?;
            if !is_ahead {
                ahead.extend_from_slice(&input[std::mem::take(&mut self.served)..read]);
            }
            if self.served == ahead.len() {
                // A request may take long, so that the memory is freed.
                (ahead, self.served) = (Vec::new(), 0);
            }
            self.ahead = ahead;
            match next {
                Some(next) => return Poll::Ready(Ok(next)),
                None => {
                    if self.pieces == 0 {
                        self.deadline = self.worker.ticks.after(self.client.timeouts.head);
                    }
                    self.pieces += 1;
                }
            }
        }
    }

    /// Serves the bytes that were read. Returns `None` if the request is incomplete.
    fn handle_input(
        &mut self,
        bytes: &[u8],
        buffers: &mut WorkerBuffers,
        current: &mut CurrentConfig,
        context: &mut Context<'_>,
    ) -> io::Result<Option<NextStep>> {
        buffers.clear();
        let mut header_buffer = HeaderBuffer::default();
        let (site, cached) = current.load(self.worker);
        let filter = site.header_filter(self.peer.address);
        let mut plain = match PlainRequest::read(bytes, &mut header_buffer, self.max_head, &filter) {
            Ok(Some(plain)) => plain,
            Ok(None) => return Ok(None),
            Err(invalid) => {
                return self.refuse_head(invalid, bytes, (site, buffers), context).map(Some);
            }
        };
        self.begin_body(&mut plain, site.max_body);
        (self.is_last, self.is_http10, self.is_head) =
            (plain.head.is_last, plain.head.is_http10(), plain.head.is_head());
        let (route, check) = match proxy::check(&mut plain.head, site, self.peer, cached) {
            Ok(checked) => checked,
            Err(rejection) => {
                let mut request = ProxyRequest::begin(&plain.head, (self.client, self.worker), (site, None));
                let response = request.reject(&rejection, &plain.head, self.worker);
                self.respond(&response, request, buffers, context)?;
                return Ok(Some(NextStep::Answered));
            }
        };
        if let Check::Ready(outcome) = &check
            && !outcome.is_allowed()
            && site.log.is_none()
            && !plain.head.is_grpc
            && !traces::is_on()
        {
            self.refuse_unlogged(&plain, buffers, (site, route), outcome, context)?;
            return Ok(Some(NextStep::Answered));
        }
        let request = ProxyRequest::begin(&plain.head, (self.client, self.worker), (site, route));
        match check {
            Check::Ready(outcome) => self.apply_outcome(&plain, buffers, request, outcome, context).map(Some),
            check @ Check::Pending(_) => {
                self.save(&plain);
                Ok(Some(NextStep::AwaitCheck(Box::new(PendingCheck { request, check }))))
            }
        }
    }

    /// Counts the bytes of the request as served, and keeps the state of a body that has not arrived completely.
    fn begin_body(&mut self, plain: &mut PlainRequest<'_>, max_body: u64) {
        self.served += plain.bytes.len();
        let rest = std::mem::replace(&mut plain.rest, Ok(BodyDecoder::Length(0)));
        let room = max_body.checked_sub(plain.content_bytes);
        let mut failure = room.is_none().then_some(Failure::BodyTooLong);
        let rest = rest.unwrap_or_else(|ambiguity| {
            self.client.note_ambiguity(ambiguity);
            failure = Some(Failure::BodyBroken);
            BodyDecoder::Length(0)
        });
        if rest.is_over() && failure.is_none() {
            return;
        }
        self.body = Some(Box::new(PendingBody {
            rest,
            room: room.unwrap_or(0),
            failure,
            due: None,
            buffered: BufferedBytes::none(self.client),
            // A client that has begun its body does not wait.
            awaits_continue: plain.head.expects_continue && plain.content_bytes == 0,
        }));
    }

    /// Applies the outcome of the check: sends a response, or the request to an upstream.
    fn apply_outcome(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        mut request: ProxyRequest,
        mut outcome: Outcome,
        context: &mut Context<'_>,
    ) -> io::Result<NextStep> {
        let by = (&**self.worker, self.peer);
        let Some(action) = request.apply(&mut outcome, &plain.head, by, &mut buffers.last_noted) else {
            self.refuse(plain, &outcome, request, buffers, context)?;
            return Ok(NextStep::Answered);
        };
        if !outcome.delay().is_zero() {
            self.save(plain);
            return Ok(NextStep::AwaitTurn(Box::new(AllowedRequest { request, outcome, action })));
        }
        self.pass(plain, buffers, AllowedRequest { request, outcome, action }, context)
    }

    /// Serves an allowed request.
    fn pass(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        allowed: AllowedRequest,
        context: &mut Context<'_>,
    ) -> io::Result<NextStep> {
        let AllowedRequest { request, outcome, action } = allowed;
        let mut response = match action {
            Action::Forward(number) => {
                let forwarding = Box::new(Forwarding::new(plain, number, outcome, request));
                return Ok(NextStep::Forward(forwarding.start(self, plain, buffers, context)));
            }
            Action::Echo => {
                self.save(plain);
                return Ok(NextStep::Echo(Box::new(AllowedRequest { request, outcome, action })));
            }
            Action::Respond(response) => response,
        };
        if outcome.awaits_response() {
            return Ok(NextStep::Settle(Box::new(UnsettledResponse { response, request, outcome })));
        }
        proxy::complete(&outcome, request.route(), &mut response);
        self.respond(&response, request, buffers, context)?;
        Ok(NextStep::Answered)
    }

    /// Keeps a copy of the request in flight.
    fn save(&mut self, plain: &PlainRequest<'_>) {
        self.saved.clear();
        self.saved.extend_from_slice(plain.bytes);
    }

    /// Parses the saved request again, and calls `serve` with it. Returns `None` only if it cannot be parsed, although
    /// it was parsed before.
    fn with_saved<T>(
        &mut self,
        (site, route): (&Site, Option<usize>),
        serve: impl FnOnce(&mut Self, &PlainRequest<'_>, &mut WorkerBuffers) -> T,
    ) -> Option<T> {
        let buffers = &mut scratch().buffers;
        buffers.clear();
        let saved = std::mem::take(&mut self.saved);
        let mut header_buffer = HeaderBuffer::default();
        let filter = site.header_filter(self.peer.address);
        let served = match PlainRequest::read(&saved, &mut header_buffer, self.max_head, &filter) {
            Ok(Some(mut plain)) => {
                plain.head.target.normalize_for(site, route);
                Some(serve(self, &plain, buffers))
            }
            Ok(None) | Err(_) => None,
        };
        drop(header_buffer);
        if self.saved.is_empty() {
            self.saved = saved;
        }
        served
    }

    /// Waits for a remote store, and applies its outcome.
    async fn after_check(&mut self, checked: Box<PendingCheck>) -> io::Result<NextStep> {
        let PendingCheck { request, check } = *checked;
        let (site, route) = (Arc::clone(&request.site), request.route);
        let mut checked = Some((request, check.outcome().await));
        poll_fn(|context| {
            let Some((request, outcome)) = checked.take() else { return Poll::Ready(Ok(NextStep::Close)) };
            let applied = self.with_saved((&site, route), |server, plain, buffers| {
                server.apply_outcome(plain, buffers, request, outcome, context)
            });
            Poll::Ready(applied.unwrap_or(Ok(NextStep::Close)))
        })
        .await
    }

    /// Returns the `Connection` header line of a response. It is empty where the default of the version applies.
    fn connection_line(&self) -> &'static [u8] {
        match (self.is_last, self.is_http10) {
            (true, _) => headers::CLOSE,
            (false, true) => headers::KEEP_ALIVE,
            (false, false) => b"",
        }
    }
}

/// Returns whether the last `new` bytes contain the end of a head, or of an ambiguous one.
fn ends_head(bytes: &[u8], new: usize) -> bool {
    let newest = &bytes[bytes.len().saturating_sub(new + 2)..];
    memchr::memchr_iter(b'\n', newest).any(|at| matches!(newest[at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]))
}
