//! Forwards a plain request to its upstreams, and the response to the client.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::HeaderValue;
use smallvec::SmallVec;
use tokio::time::timeout;
use tollgate::Outcome;
use tollgate::rules::file::internal::UpstreamHeader;

use super::super::abandoned::is_event_stream;
use super::super::body::UpstreamProgress;
use super::super::client::Client;
use super::super::connect::{self, ConnectError, Dialled};
use super::super::exchange::{RequestGuard, UpstreamAttempt, Worker, would_fail_again};
use super::super::failure::{self, Failure};
use super::super::fault::Fault;
use super::super::header_names::{HeaderFilter, HeaderKind};
use super::super::headers::X_REQUEST_ID;
use super::super::reuse::{Repeatable, Usage};
use super::super::site::{Route, Site};
use super::super::target::Target;
use super::conn::LaneConn;
use super::request::{self, HeaderBuffer, HeadersView, PlainRequest};
use super::response::{InvalidBody, ResponseBody, ResponseHead, ResponseParse};
use super::scratch::{Scratch, WorkerBuffers, scratch};
use super::{Lane, text};

/// The maximum length of a body that is copied behind its head: one write of one buffer is cheaper.
const SMALL_BYTES: usize = 4096;

/// An allowed request that is being forwarded.
pub(super) struct Forwarding {
    site: Arc<Site>,
    route: usize,
    outcome: Outcome,
    pub(super) guard: RequestGuard,
    id: Option<HeaderValue>,
    tried: SmallVec<[usize; 4]>,
    /// The current upstream and the connection to it.
    target: Option<Arc<Target>>,
    conn: Option<Box<LaneConn>>,
    /// The rest of a response that has started, and whether its connection stays open. Kept here, because in the task's
    /// future it would take room for as long as the client is connected.
    begun: Option<(ResponseBody, bool)>,
    /// The reason why it cannot be sent to any upstream.
    failed: Option<Failure>,
    pub(super) is_head: bool,
    may_repeat: bool,
    may_desync: bool,
}

/// The result of forwarding.
pub(super) enum ForwardResult {
    Answered,
    /// The connection has to be closed.
    Close,
}

/// The reason why an attempt ended without a complete response.
enum AttemptError {
    Failed {
        fault: Fault,
        /// Whether the request may be sent again.
        retryable: bool,
    },
    /// The client has left.
    ClientGone,
    /// The client connection has to be closed: a response has started that cannot be completed.
    Aborted,
}

impl AttemptError {
    fn failed(failure: Failure) -> Self {
        Self::Failed { fault: failure.into(), retryable: false }
    }
}

impl Forwarding {
    pub(super) fn new(
        plain: &PlainRequest<'_>,
        (site, route): (Arc<Site>, usize),
        outcome: Outcome,
        guard: RequestGuard,
    ) -> Self {
        Self {
            site,
            route,
            outcome,
            guard,
            id: None,
            tried: SmallVec::new(),
            target: None,
            conn: None,
            begun: None,
            failed: None,
            is_head: plain.is_head(),
            may_repeat: plain.may_repeat(),
            may_desync: plain.may_desync(),
        }
    }

    fn route(&self) -> &Route {
        &self.site.routes[self.route]
    }
}

impl Lane<'_> {
    /// Sends a request at once, if a connection is available.
    pub(super) fn start_forward(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        mut forwarding: Box<Forwarding>,
        context: &mut Context<'_>,
    ) -> Box<Forwarding> {
        self.save(plain);
        self.choose(&mut forwarding);
        if let Err(failure) = self.write_request(plain, buffers, &mut forwarding) {
            forwarding.failed = Some(failure);
            return forwarding;
        }
        let conn = forwarding.target.as_ref().and_then(|target| self.take_lane_conn(target, &forwarding));
        if let Some(mut conn) = conn
            && conn.send(&buffers.out, context).is_ok()
        {
            forwarding.conn = Some(conn);
        }
        forwarding
    }

    /// Chooses the next upstream.
    fn choose(&self, forwarding: &mut Forwarding) {
        let route = &forwarding.site.routes[forwarding.route];
        let chosen = route.choose(&forwarding.tried, self.worker.ticks.now());
        forwarding.target = chosen.map(|(number, upstream)| {
            let target = &upstream.target;
            forwarding.tried.push(number);
            forwarding.guard.note_upstream(target);
            target.begin();
            let (target, worker) = (Arc::clone(target), self.worker.number);
            forwarding.guard.set_upstream(UpstreamAttempt::new(&target, route, worker));
            target
        });
    }

    fn take_lane_conn(&self, target: &Target, forwarding: &Forwarding) -> Option<Box<LaneConn>> {
        let repeatable = if forwarding.may_repeat { Repeatable::Yes } else { Repeatable::No };
        target.take_lane_conn(self.worker.number, self.worker.ticks.now(), &forwarding.route().reuse, repeatable)
    }

    fn write_request(
        &self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        forwarding: &mut Forwarding,
    ) -> Result<(), Failure> {
        let route = forwarding.route();
        let upstream = forwarding.tried.last().and_then(|number| route.upstream(*number)).ok_or(Failure::NoRoute)?;
        let routed = (&*forwarding.site, route);
        let id = plain.write(&mut buffers.out, routed, upstream, (self.client, self.worker), forwarding.id.clone())?;
        forwarding.guard.note_id(id.as_ref());
        forwarding.id = id;
        Ok(())
    }

    /// Forwards a request to upstreams until one responds, and the response to the client.
    pub(super) async fn forward(&mut self, mut forwarding: Box<Forwarding>) -> ForwardResult {
        let fault = loop {
            if let Some(failure) = forwarding.failed {
                break failure.into();
            }
            let Some(target) = forwarding.target.clone() else { break Failure::NoRoute.into() };
            let (fault, retryable) = match self.attempt(&target, &mut forwarding).await {
                Ok(()) => return ForwardResult::Answered,
                Err(AttemptError::ClientGone | AttemptError::Aborted) => return ForwardResult::Close,
                Err(AttemptError::Failed { fault, retryable }) => (fault, retryable),
            };
            let (failure, route) = (fault.failure(), forwarding.route());
            if failure.is_upstreams() || failure.is_gateways() {
                target.failed(&fault, &route.eject, self.worker.ticks.now());
            }
            if !retryable || forwarding.tried.len() > usize::from(route.retries) || would_fail_again(failure, route) {
                break fault;
            }
            let tally = route.tally(self.worker.number);
            tally.note_failure(failure);
            tally.note_retry();
            self.choose(&mut forwarding);
        };
        let failure = fault.failure();
        forwarding.route().tally(self.worker.number).note_failure(failure);
        forwarding.guard.note_fault(&fault);
        let mut forwarding = Some(forwarding);
        let answered = poll_fn(|context| {
            let answered = forwarding.take().map(|forwarding| self.fail(failure, forwarding, context));
            Poll::Ready(answered.is_some_and(|answered| answered.is_ok()))
        });
        if answered.await { ForwardResult::Answered } else { ForwardResult::Close }
    }

    fn fail(
        &mut self,
        failure: Failure,
        forwarding: Box<Forwarding>,
        context: &mut Context<'_>,
    ) -> std::io::Result<()> {
        let mut response = failure::response(failure);
        let map = response.headers_mut();
        forwarding.route().response_edits.apply(map);
        if let Some(id) = &forwarding.id {
            map.insert(X_REQUEST_ID, id.clone());
        }
        forwarding.outcome.write_headers(map);
        let response = if forwarding.is_head { super::bodiless(response) } else { response };
        self.respond(&response, forwarding.guard, &mut scratch().buffers, context)
    }

    /// Forwards a request to one upstream.
    async fn attempt(&mut self, target: &Arc<Target>, forwarding: &mut Forwarding) -> Result<(), AttemptError> {
        let mut conn = match forwarding.conn.take() {
            Some(conn) => conn,
            None => Box::pin(self.connect_and_send(target, forwarding)).await?,
        };
        if forwarding.may_desync {
            conn.usage.end();
        }
        self.set_deadline(forwarding.route().timeout);
        let relayed = poll_fn(|context| self.poll_relay(target, &mut conn, forwarding, context)).await;
        let begun = forwarding.begun.take();
        if let Err(AttemptError::ClientGone) = relayed {
            self.abandon(conn, begun, forwarding);
            return relayed;
        }
        relayed?;
        forwarding.guard.note_upstream_progress(UpstreamProgress::All);
        if let Some((_, true)) = begun {
            target.keep_lane_conn(self.worker.number, conn, self.worker.ticks.now(), &forwarding.route().reuse);
        }
        Ok(())
    }

    /// Sends a request on another idle connection, or on a new one.
    async fn connect_and_send(
        &mut self,
        target: &Arc<Target>,
        forwarding: &mut Forwarding,
    ) -> Result<Box<LaneConn>, AttemptError> {
        let mut conn = match self.take_lane_conn(target, forwarding) {
            Some(conn) => conn,
            None => {
                let dialled = dial(target, forwarding, (self.worker, self.client));
                Box::new(self.unless_gone(dialled).await.ok_or(AttemptError::ClientGone)??)
            }
        };
        poll_fn(|context| Poll::Ready(self.send_again(&mut conn, forwarding, context))).await?;
        Ok(conn)
    }

    /// Sends a saved request.
    fn send_again(
        &mut self,
        conn: &mut LaneConn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        let buffers = &mut scratch().buffers;
        buffers.clear();
        let mut header_buffer = HeaderBuffer::default();
        let site = Arc::clone(&forwarding.site);
        let filter = HeaderFilter::new(&site, self.peer);
        let request::RequestParse::Complete(plain) =
            PlainRequest::read(&self.saved, &mut header_buffer, self.max_head, &filter)
        else {
            return Err(AttemptError::Aborted);
        };
        self.write_request(&plain, buffers, forwarding).map_err(AttemptError::failed)?;
        let not_sent = |_| AttemptError::Failed { fault: Failure::Disconnected.into(), retryable: true };
        conn.send(&buffers.out, context).map_err(not_sent)
    }

    /// Returns ready once the client was sent the whole response.
    fn poll_relay(
        &mut self,
        target: &Target,
        conn: &mut LaneConn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        if forwarding.begun.is_none() {
            ready!(self.poll_answer(target, conn, forwarding, context))?;
        }
        self.poll_body(conn, forwarding, context)
    }

    /// Returns ready once the client was sent the head of the response, and the part of the body that arrived with it.
    fn poll_answer(
        &mut self,
        target: &Target,
        conn: &mut LaneConn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        // On a new connection to the only upstream there is no retry: the request may be what broke the connection.
        let may_repeat = forwarding.may_repeat && (conn.usage.is_used() || forwarding.route().has_several());
        let broken = |head_bytes: usize| AttemptError::Failed {
            fault: Failure::Disconnected.into(),
            retryable: head_bytes == 0 && may_repeat,
        };
        // An upstream may respond before it has read the whole request.
        let sent = conn.poll_send(context);
        let mut scratch = scratch();
        let Scratch { input, buffers, .. } = &mut *scratch;
        loop {
            let before = conn.head_bytes.len();
            input[..before].copy_from_slice(&conn.head_bytes);
            let read = match conn.poll_read(&mut input[before..], context) {
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(broken(before))),
                Poll::Ready(Ok(read)) => read,
                Poll::Pending => break,
            };
            let bytes = &input[..before + read];
            let mut header_buffer = HeaderBuffer::default();
            match ResponseHead::read(bytes, &mut header_buffer, forwarding.is_head) {
                ResponseParse::Complete(head) => {
                    if forwarding.route().eject.counts(head.status) {
                        let fault = Fault::Status(head.status);
                        target.failed(&fault, &forwarding.route().eject, self.worker.ticks.now());
                    }
                    conn.usage.note_keep_alive(head.keep_alive(header_buffer.view()));
                    let begun = self.begin_answer((head, header_buffer.view()), bytes, buffers, forwarding, context);
                    conn.head_bytes = Vec::new();
                    return Poll::Ready(begun);
                }
                ResponseParse::Partial if bytes.len() < input.len() => {
                    conn.head_bytes.clear();
                    conn.head_bytes.extend_from_slice(&input[..before + read]);
                }
                ResponseParse::Partial | ResponseParse::TooManyHeaders => {
                    return Poll::Ready(Err(AttemptError::failed(Failure::LongAnswerHead)));
                }
                ResponseParse::Invalid => return Poll::Ready(Err(AttemptError::failed(Failure::BadAnswer))),
            }
        }
        if let Poll::Ready(Err(_)) = sent {
            return Poll::Ready(Err(broken(conn.head_bytes.len())));
        }
        if self.has_gone(input, context) {
            return Poll::Ready(Err(AttemptError::ClientGone));
        }
        drop(scratch);
        ready!(self.poll_late(context));
        Poll::Ready(Err(AttemptError::failed(Failure::UpstreamTimeout)))
    }

    /// Writes the head of a response, and the part of the body that arrived with it.
    fn begin_answer(
        &mut self,
        (mut head, header_buffer): (ResponseHead<'_>, HeadersView<'_>),
        bytes: &[u8],
        buffers: &mut WorkerBuffers,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        let WorkerBuffers { out, date, .. } = buffers;
        self.is_last |= self.worker.is_closing();
        out.clear();
        let added = (&forwarding.outcome, forwarding.id.as_ref(), forwarding.site.adds_header(UpstreamHeader::Via));
        let date = date.line(self.worker.ticks.now());
        head.write(out, header_buffer, &forwarding.route().response_edits, added, date);
        if self.is_last {
            out.extend_from_slice(text::CLOSE);
        }
        out.extend_from_slice(b"\r\n");
        forwarding.guard.note_status(head.status);
        if forwarding.guard.has_permit() && header_buffer.values(HeaderKind::ContentType).any(is_event_stream) {
            forwarding.guard.note_endless();
        }
        let rest = &bytes[head.bytes..];
        let (taken, content) = head.body.take(rest, out).map_err(|_bad| AttemptError::failed(Failure::BadAnswer))?;
        forwarding.guard.note_sent(content);
        let put = match &head.body {
            ResponseBody::Length(_) if taken > SMALL_BYTES => self.put(out, &rest[..taken], context),
            ResponseBody::Length(_) => {
                out.extend_from_slice(&rest[..taken]);
                self.put(out, &[], context)
            }
            _ => self.put(out, &[], context),
        };
        forwarding.begun = Some((head.body, head.stays_open && taken == rest.len()));
        put.map_err(|_gone| AttemptError::ClientGone)
    }

    /// Returns ready once the client was sent the rest of the response.
    fn poll_body(
        &mut self,
        conn: &mut LaneConn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        let Forwarding { site, route, guard, begun, .. } = forwarding;
        let Some((body, stays_open)) = begun else { return Poll::Ready(Err(AttemptError::Aborted)) };
        loop {
            if ready!(self.poll_sent(context)).is_err() {
                return Poll::Ready(Err(AttemptError::ClientGone));
            }
            // Some upstreams respond before they have read the whole request.
            let sent = conn.poll_send(context);
            if body.is_over() {
                *stays_open &= matches!(sent, Poll::Ready(Ok(())));
                return Poll::Ready(Ok(()));
            }
            let mut scratch = scratch();
            let Scratch { input, buffers, .. } = &mut *scratch;
            let read = match conn.poll_read(input, context) {
                Poll::Ready(read) => read,
                Poll::Pending => {
                    if self.has_gone(input, context) {
                        return Poll::Ready(Err(AttemptError::ClientGone));
                    }
                    drop(scratch);
                    ready!(self.poll_late(context));
                    guard.note_upstream_failed(&Fault::Stalled);
                    return Poll::Ready(Err(AttemptError::Aborted));
                }
            };
            self.set_deadline(site.routes[*route].timeout);
            buffers.out.clear();
            let took = match read {
                Ok(0) => body.end(&mut buffers.out).map(|()| (0, 0)),
                Ok(read) => {
                    body.take(&input[..read], &mut buffers.out).inspect(|(taken, _)| *stays_open &= *taken == read)
                }
                Err(_) => Err(InvalidBody),
            };
            let Ok((taken, content)) = took else {
                guard.note_upstream_failed(&Failure::Disconnected.into());
                return Poll::Ready(Err(AttemptError::Aborted));
            };
            guard.note_sent(content);
            let put = match body {
                ResponseBody::Length(_) => self.put(&input[..taken], &[], context),
                _ => self.put(&buffers.out, &[], context),
            };
            if put.is_err() {
                return Poll::Ready(Err(AttemptError::ClientGone));
            }
        }
    }
}

async fn dial(
    target: &Target,
    forwarding: &Forwarding,
    (worker, client): (&Worker, &Client),
) -> Result<LaneConn, AttemptError> {
    let failed = |fault| AttemptError::Failed { fault, retryable: true };
    let now = worker.ticks.now();
    let dialled = async {
        let slot = worker.take_upstream_slot(client).await?;
        connect::dial(target, now, slot).await
    };
    let (io, ip) = match timeout(forwarding.route().connect_timeout, dialled).await {
        Ok(Ok(Dialled::Http1(io, ip))) => (io, ip),
        Ok(Ok(Dialled::Http2(..))) => return Err(failed(Failure::CannotConnect.into())),
        Ok(Err(error)) => return Err(failed(error.into())),
        Err(_elapsed) => return Err(failed(ConnectError::Timeout.into())),
    };
    let plain = io.into_plain().ok_or_else(|| failed(Failure::CannotConnect.into()))?;
    Ok(LaneConn::new(plain, Usage::new(now, target.origin(ip))))
}
