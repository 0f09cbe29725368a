//! The fast path for plain requests: from a client to an upstream and back in one task, without hyper on either side.
//!
//! Most requests of most gateways are alike: HTTP/1.1, a head that arrives in one piece, a small body or none. They
//! need none of the hard parts of HTTP, so the lane serves them with buffers that all connections of a worker share,
//! over connections to upstreams without a task of their own. A client that is refused again and again costs one read
//! and one write per request.
//!
//! Deliberately not here: everything else. At the first request that is not plain, by its bytes, its limits or its
//! route, the connection is handed over to hyper with the bytes as they arrived. If the request was checked already,
//! the result waits for hyper in the [`Client`]. Ambiguous requests are never plain.

mod abandoned;
mod conn;
mod forwarding;
mod refusal;
mod request;
mod response;
mod scratch;
mod stream;
mod text;

use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Response, Version};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tollgate::rules::{Certificate, Facts};
use tollgate::{Check, Outcome};

pub(super) use self::conn::LaneConn;
use self::forwarding::{ForwardResult, Forwarding};
use self::request::{HeaderBuffer, PlainRequest, RequestParse};
pub(super) use self::scratch::scratch;
use self::scratch::{INPUT_BYTES, Scratch, WorkerBuffers};
use super::alarm::Alarm;
use super::buffer_budget::BufferedBytes;
use super::client::{Client, LINGER};
use super::connection::{HTTP2_PREFACE, Stop};
use super::exchange::{RequestGuard, Worker, bodiless};
use super::failure::{self, Failure};
use super::header_names::HeaderFilter;
use super::io::Stream;
use super::log::Record;
use super::site::{RouteAction, Site};
use super::ticks::{Tick, Wait};

/// The maximum number of reads for the head of a plain request.
const MAX_PIECES: u32 = 16;

/// The maximum size of the buffers that an idle connection keeps.
const KEPT_BYTES: usize = 2 << 10;

/// A connection in the lane.
struct Lane<'a> {
    stream: Stream,
    client: &'a Arc<Client>,
    worker: &'a Worker,
    /// Copied from the client, so that a refusal need not fetch it.
    peer: IpAddr,
    certificate: Option<&'a Certificate>,
    max_head: usize,
    idle: Wait,
    /// Bytes that were read and not served yet: a part of a request, or pipelined requests.
    ahead: Vec<u8>,
    /// Whether `ahead` holds bytes that were not parsed yet.
    has_unparsed: bool,
    pieces: u32,
    /// The request in flight, for a retry.
    saved: Vec<u8>,
    /// The unwritten rest of a response.
    unsent: Vec<u8>,
    /// The same bytes in the buffer budget.
    unsent_held: BufferedBytes,
    /// Whether all written bytes have left the stream's buffer.
    is_flushed: bool,
    /// Whether the client does not read.
    is_blocked: bool,
    /// Whether the last read returned bytes.
    has_read: bool,
    /// Whether the connection closes after the response.
    is_last: bool,
    has_served: bool,
    alarm: Alarm,
    deadline: Tick,
    /// The timeout to restore when a blocked client reads again.
    wait: Wait,
}

/// A connection that leaves the lane.
pub(super) struct Handover {
    pub(super) stream: Stream,
    /// The bytes that were read.
    pub(super) first: Bytes,
    pub(super) is_http2: bool,
    /// Whether no request was served on it.
    pub(super) is_fresh: bool,
}

/// A request that was checked before hyper has read it.
pub(super) struct CheckedRequest {
    pub(super) site: Arc<Site>,
    pub(super) route: Option<usize>,
    pub(super) check: Check,
}

/// The next step for a connection.
enum NextStep {
    /// A request was answered.
    Answered,
    /// Wait for a remote store to check a request.
    AwaitCheck(Box<CheckedRequest>),
    /// Forward a request.
    Forward(Box<Forwarding>),
    /// Hand the connection over to hyper.
    HandOver,
    /// Close the connection.
    Close,
}

/// Serves the plain requests of a connection. Returns `None` if the connection was closed.
pub(super) async fn serve(
    stream: Stream,
    client: &Arc<Client>,
    worker: &Arc<Worker>,
    stop: &Stop,
) -> io::Result<Option<Handover>> {
    let mut lane = Lane::new(stream, client, worker);
    let mut stopped = pin!(stop.idle.notified());
    // A later stop wakes this task, whatever it waits for.
    poll_fn(|context| Poll::Ready(_ = stopped.as_mut().poll(context))).await;
    loop {
        let mut next = poll_fn(|context| lane.poll_next(stop, context)).await?;
        if let NextStep::AwaitCheck(checked) = next {
            next = lane.after_check(checked).await?;
        }
        match next {
            NextStep::Answered => {}
            NextStep::Forward(forwarding) => match lane.forward(forwarding).await {
                ForwardResult::Answered => {}
                ForwardResult::Close => return Ok(None),
            },
            NextStep::HandOver => {
                let is_http2 = !lane.has_served && lane.ahead.starts_with(HTTP2_PREFACE);
                let first = Bytes::from(std::mem::take(&mut lane.ahead));
                let is_fresh = !lane.has_served;
                return Ok(Some(Handover { stream: lane.stream, first, is_http2, is_fresh }));
            }
            NextStep::Close | NextStep::AwaitCheck(_) => {
                if lane.stream.is_buffered() {
                    // `close_notify` distinguishes the end from a broken connection.
                    _ = Box::pin(timeout(LINGER, lane.stream.shutdown())).await;
                }
                return Ok(None);
            }
        }
        lane.has_served = true;
        lane.reset_idle();
        if lane.is_last {
            poll_fn(|context| lane.poll_sent(context)).await?;
            return Box::pin(timeout(LINGER, lane.stream.end())).await?.map(|()| None);
        }
    }
}

impl<'a> Lane<'a> {
    fn new(stream: Stream, client: &'a Arc<Client>, worker: &'a Arc<Worker>) -> Self {
        Self {
            stream,
            client,
            worker,
            peer: client.address.ip(),
            certificate: client.certificate.as_ref(),
            max_head: client.max_head,
            idle: client.timeouts.idle,
            ahead: Vec::new(),
            has_unparsed: false,
            pieces: 0,
            saved: Vec::new(),
            unsent: Vec::new(),
            unsent_held: BufferedBytes::none(client),
            is_flushed: true,
            is_blocked: false,
            has_read: false,
            is_last: false,
            has_served: false,
            alarm: Alarm::new(),
            deadline: worker.ticks.after(client.timeouts.idle),
            wait: client.timeouts.idle,
        }
    }

    /// Prepares for the next request.
    fn reset_idle(&mut self) {
        self.set_deadline(self.idle);
        self.pieces = 0;
        self.saved.clear();
        for buffer in [&mut self.saved, &mut self.ahead, &mut self.unsent] {
            buffer.shrink_to(KEPT_BYTES);
        }
        self.has_unparsed = !self.ahead.is_empty();
    }

    fn set_deadline(&mut self, wait: Wait) {
        self.wait = wait;
        self.deadline = self.worker.ticks.after(wait);
    }

    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.alarm.poll_passed(self.deadline, &self.worker.ticks, context)
    }

    /// Reads the next request and serves it, as far as that is possible without waiting.
    fn poll_next(&mut self, stop: &Stop, context: &mut Context<'_>) -> Poll<io::Result<NextStep>> {
        loop {
            ready!(self.poll_sent(context))?;
            let mut scratch = scratch();
            let before = self.ahead.len();
            scratch.input[..before].copy_from_slice(&self.ahead);
            let mut filled = before;
            if !std::mem::take(&mut self.has_unparsed) {
                match self.poll_read(&mut scratch.input[before..], context)? {
                    Poll::Ready(0) => return Poll::Ready(Ok(NextStep::Close)),
                    Poll::Ready(read) => filled += read,
                    Poll::Pending => {
                        drop(scratch);
                        if before == 0 && stop.is_over() {
                            return Poll::Ready(Ok(NextStep::Close));
                        }
                        ready!(self.poll_late(context));
                        return Poll::Ready(Ok(NextStep::Close));
                    }
                }
            }
            self.ahead.clear();
            match self.handle_input(&mut scratch, filled, context)? {
                Some(NextStep::HandOver) => {
                    self.ahead.extend_from_slice(&scratch.input[..filled]);
                    return Poll::Ready(Ok(NextStep::HandOver));
                }
                Some(next) => return Poll::Ready(Ok(next)),
                None => {
                    self.ahead.extend_from_slice(&scratch.input[..filled]);
                    if self.pieces == 0 {
                        self.deadline = self.worker.ticks.after(self.client.timeouts.head);
                    }
                    self.pieces += 1;
                    if self.pieces > MAX_PIECES || filled == INPUT_BYTES {
                        return Poll::Ready(Ok(NextStep::HandOver));
                    }
                }
            }
        }
    }

    /// Serves the bytes that were read. Returns `None` if the request is incomplete.
    fn handle_input(
        &mut self,
        scratch: &mut Scratch,
        filled: usize,
        context: &mut Context<'_>,
    ) -> io::Result<Option<NextStep>> {
        let Scratch { input, buffers, current } = scratch;
        let bytes = &input[..filled];
        buffers.clear();
        let mut header_buffer = HeaderBuffer::default();
        let (site, cached) = current.load(self.worker);
        let plain =
            match PlainRequest::read(bytes, &mut header_buffer, self.max_head, &HeaderFilter::new(site, self.peer)) {
                RequestParse::Complete(plain) => plain,
                RequestParse::Partial => return Ok(None),
                RequestParse::NotPlain => return Ok(Some(NextStep::HandOver)),
            };
        if plain.body_bytes() > site.max_body {
            return Ok(Some(NextStep::HandOver));
        }
        // As in `Client::add_to`.
        let facts = Facts::new(plain.method, plain.target).headers(plain.headers.lines).peer(self.peer);
        let facts = self.certificate.map_or(facts, |certificate| facts.certificate(certificate));
        let route = site.find(&facts);
        let check = cached.check(&site.with_route(facts, route));
        if let Check::Ready(outcome) = &check
            && !outcome.is_allowed()
            && site.log.is_none()
        {
            self.refuse_unlogged(&plain, buffers, (site, route), outcome, context)?;
            return Ok(Some(NextStep::Answered));
        }
        match check {
            Check::Ready(outcome) => {
                self.apply_outcome(&plain, buffers, (Arc::clone(site), route), outcome, context).map(Some)
            }
            check @ Check::Pending(_) => {
                self.save(&plain);
                let site = Arc::clone(site);
                Ok(Some(NextStep::AwaitCheck(Box::new(CheckedRequest { site, route, check }))))
            }
        }
    }

    /// Keeps a copy of the request in flight.
    fn save(&mut self, plain: &PlainRequest<'_>) {
        self.saved.clear();
        self.saved.extend_from_slice(plain.bytes);
    }

    /// Waits for a remote store, and applies its outcome.
    async fn after_check(&mut self, checked: Box<CheckedRequest>) -> io::Result<NextStep> {
        let CheckedRequest { site, route, check } = *checked;
        let mut outcome = Some((check.outcome().await, site));
        poll_fn(|context| {
            let buffers = &mut scratch().buffers;
            buffers.clear();
            let saved = std::mem::take(&mut self.saved);
            let mut header_buffer = HeaderBuffer::default();
            let Some((outcome, site)) = outcome.take() else { return Poll::Ready(Ok(NextStep::Close)) };
            let filter = HeaderFilter::new(&site, self.peer);
            let RequestParse::Complete(plain) = PlainRequest::read(&saved, &mut header_buffer, self.max_head, &filter)
            else {
                return Poll::Ready(Ok(NextStep::Close));
            };
            let next = self.apply_outcome(&plain, buffers, (Arc::clone(&site), route), outcome, context);
            if let Ok(NextStep::HandOver) = next {
                self.ahead.splice(..0, saved.iter().copied());
            }
            Poll::Ready(next)
        })
        .await
    }

    /// Applies the outcome of the check: sends a response, or the request to an upstream.
    fn apply_outcome(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        (site, route): (Arc<Site>, Option<usize>),
        mut outcome: Outcome,
        context: &mut Context<'_>,
    ) -> io::Result<NextStep> {
        if outcome.is_allowed() && !is_plain(&outcome, &site, route) {
            self.client.hand_over(CheckedRequest { site, route, check: Check::Ready(outcome) });
            return Ok(NextStep::HandOver);
        }
        self.is_last = plain.is_last;
        self.client.request_began();
        self.worker.tally.note_dropped_headers(plain.dropped);
        let mut guard = RequestGuard::new(self.client);
        if let Some(log) = &site.log
            && let Some(uri) = plain.uri()
        {
            let line = (plain.method.parse().unwrap_or_default(), uri, Version::HTTP_11);
            let headers = plain.headers.lines.into();
            guard.keep_record(Record::new(line, headers, self.client, &site.proxies, (log, self.worker.number)));
        }
        if let Some(number) = route {
            guard.enter(site.routes[number].tally(self.worker.number));
        }
        self.worker.tally.note_outcome_after(&mut buffers.last_noted, &outcome);
        guard.record_outcome(&outcome);
        guard.keep_permit(outcome.take_permit());
        if !outcome.is_allowed() {
            self.refuse(plain, &outcome, guard, buffers, context)?;
            return Ok(NextStep::Answered);
        }
        let mut response = match route.map(|number| (number, &site.routes[number].action)) {
            Some((number, RouteAction::Respond(written))) => {
                let mut response = written.response();
                site.routes[number].response_edits.apply(response.headers_mut());
                response
            }
            Some((number, _)) => {
                let forwarding = Box::new(Forwarding::new(plain, (site, number), outcome, guard));
                return Ok(NextStep::Forward(self.start_forward(plain, buffers, forwarding, context)));
            }
            None => failure::response(Failure::NoRoute),
        };
        outcome.write_headers(response.headers_mut());
        let response = if plain.is_head() { bodiless(response) } else { response };
        self.respond(&response, guard, buffers, context)?;
        Ok(NextStep::Answered)
    }

    /// Sends a response of the gateway.
    fn respond(
        &mut self,
        response: &Response<Bytes>,
        mut guard: RequestGuard,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        self.is_last |= self.worker.is_closing();
        guard.note_status(response.status());
        guard.note_sent(response.body().len());
        buffers.out.clear();
        text::put_answer(&mut buffers.out, response, buffers.date.line(self.worker.ticks.now()), self.is_last);
        self.put(&buffers.out, &[], context)
    }
}

/// Returns whether an allowed request can stay in the lane: it need not wait in a queue, no limit counts its response,
/// and its upstreams use neither TLS nor HTTP/2.
fn is_plain(outcome: &Outcome, site: &Site, route: Option<usize>) -> bool {
    let is_plain_route = route.is_none_or(|number| match &site.routes[number].action {
        RouteAction::Upstreams(_) => site.routes[number].is_plain(),
        RouteAction::Respond(_) => true,
        RouteAction::Echo => false,
    });
    is_plain_route && outcome.delay().is_zero() && !outcome.awaits_response()
}
