//! Forwards a request to its upstreams, and the response to the client.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio::time::timeout;
use tollgate_http1::{BodyDecoder, Framing};
use tollgate_net::deadline::Wait;
use tollgate_rules::Outcome;

use super::{Http1Server, UnsettledResponse, WAITING_BYTES};
use crate::gateway::client::Client;
use crate::gateway::failure::{ConnectError, Failure, Fault};
use crate::gateway::http1::codec::PlainRequest;
use crate::gateway::http1::sender::{Http1Response, receive};
use crate::gateway::http1::upgrade::Tunnel;
use crate::gateway::local_response;
use crate::gateway::proxy::{ProxyRequest, Responder, UpstreamProgress};
use crate::gateway::site::{Attempts, Route};
use crate::gateway::upstream::abandoned::{self, Abandoned, has_event_stream};
use crate::gateway::upstream::conn::{Http1Conn, Repeatable, UpstreamIo};
use crate::gateway::upstream::connect::{self, ConnUse, UpstreamConn};
use crate::gateway::upstream::{ConnPool, Target};
use crate::gateway::worker::{Worker, WorkerBuffers};

/// An allowed request that is being forwarded.
pub(super) struct Forwarding {
    pub(super) request: ProxyRequest,
    pub(super) route: usize,
    pub(super) outcome: Outcome,
    pub(super) attempts: Attempts,
    /// The current upstream and the connection to it.
    target: Option<Arc<Target>>,
    conn: Option<Box<Http1Conn>>,
    /// Kept here, because in the task's future it would take room for as long as the client is connected.
    pub(super) begun: Option<BegunResponse>,
    /// The reason why it cannot be sent to any upstream.
    failed: Option<Failure>,
    /// Whether the client wants to switch to another protocol.
    pub(super) upgrades: bool,
    /// The bytes that the upstream has sent after it switched to another protocol.
    pub(super) switched: Option<Bytes>,
    /// Whether the client accepts trailers.
    pub(super) wants_trailers: bool,
    pub(super) may_repeat: bool,
    may_desync: bool,
    pub(super) settling: Settling,
}

/// A response whose head was sent to the client.
pub(super) struct BegunResponse {
    /// The decoder of the part of the body that has not arrived.
    pub(super) rest: BodyDecoder,
    /// How the client gets the body.
    pub(super) framing: Framing,
    /// Whether the connection to the upstream stays open.
    pub(super) stays_open: bool,
}

impl BegunResponse {
    /// Returns whether the client takes the end of the connection for the end of the body.
    fn ends_with_connection(&self) -> bool {
        matches!(self.framing, Framing::Raw) && !matches!(self.rest, BodyDecoder::Length(_))
    }
}

/// Whether limits count the response.
pub(super) enum Settling {
    /// None does, or all have done so.
    Done,
    /// Some do, once its head has arrived.
    AwaitsHead,
    /// The head has arrived.
    Head(Box<(StatusCode, HeaderMap)>),
}

/// The result of forwarding.
pub(super) enum ForwardResult {
    Answered,
    /// Both sides switch to another protocol.
    Switched(Box<Tunnel>),
    /// The connection has to be closed.
    Close,
}

impl From<io::Result<()>> for ForwardResult {
    fn from(responded: io::Result<()>) -> Self {
        match responded {
            Ok(()) => Self::Answered,
            Err(_gone) => Self::Close,
        }
    }
}

/// The reason why an attempt ended without a complete response.
pub(super) enum AttemptError {
    Failed {
        /// Boxed, because the task of a client holds room for it as long as the client is connected.
        fault: Box<Fault>,
        /// Whether the request may be sent again.
        repeatable: Repeatable,
    },
    /// The upstream uses HTTP/2.
    Http2,
    /// The upstream uses only HTTP/2, which has no upgrades.
    NoUpgrade,
    /// The client has left.
    ClientGone,
    /// The client connection has to be closed: a response has started that cannot be completed.
    Aborted,
}

impl AttemptError {
    pub(super) fn failed(failure: Failure) -> Self {
        Self::Failed { fault: Box::new(failure.into()), repeatable: Repeatable::No }
    }
}

impl Forwarding {
    pub(super) fn new(plain: &PlainRequest<'_>, route: usize, outcome: Outcome, request: ProxyRequest) -> Self {
        let settings = &request.site.routes[route];
        let settling = if outcome.awaits_response() { Settling::AwaitsHead } else { Settling::Done };
        // HTTP/2 has no upgrades.
        let upgrades = plain.head.upgrade.is_some() && settings.can_upgrade();
        let attempts = if upgrades { Attempts::without(settings.http2_upstreams()) } else { Attempts::default() };
        Self {
            request,
            route,
            outcome,
            attempts,
            target: None,
            conn: None,
            begun: None,
            failed: None,
            upgrades,
            switched: None,
            wants_trailers: plain.head.wants_trailers,
            may_repeat: plain.head.may_repeat(),
            may_desync: plain.head.may_desync(),
            settling,
        }
    }

    pub(super) fn route(&self) -> &Route {
        &self.request.site.routes[self.route]
    }

    /// Returns the response to a request that no upstream has answered.
    fn into_failed(self, failure: Failure) -> Box<UnsettledResponse> {
        let Self { request, outcome, .. } = self;
        Box::new(UnsettledResponse { response: local_response::failure(failure), request, outcome })
    }

    /// Returns how long the upstream may take for the next step.
    pub(super) fn timeout(&self) -> Wait {
        self.route().timeout
    }

    /// Sends a request at once, if a connection is available.
    pub(super) fn start(
        mut self: Box<Self>,
        server: &mut Http1Server<'_>,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> Box<Self> {
        server.save(plain);
        if let Some(body) = &mut server.body {
            // Until an upstream reads it, the part that has arrived is buffered.
            let is_overloaded = body.buffered.set(plain.bytes.len()).is_err();
            self.failed = body.failure.or(is_overloaded.then_some(Failure::Overloaded));
            if self.failed.is_some() {
                return self;
            }
        }
        self.choose(server.worker);
        if self.needs_http2(server.worker) {
            return self;
        }
        if let Err(failure) = self.write_request(plain, buffers) {
            self.failed = Some(failure);
            return self;
        }
        let conn = self.target.as_ref().and_then(|target| self.take_idle(server.worker, target));
        if let Some(mut conn) = conn
            && conn.send(&buffers.out, self.request.begin_delivery(&self.outcome), context).is_ok()
        {
            self.conn = Some(conn);
        }
        self
    }

    /// Chooses the next upstream.
    fn choose(&mut self, worker: &Worker) {
        let route = &self.request.site.routes[self.route];
        let chosen = self.attempts.choose(route, worker.number, worker.ticks.now());
        let chosen = chosen.map(|(upstream, attempt)| (Arc::clone(&upstream.target), attempt));
        self.target = chosen.map(|(target, attempt)| {
            self.request.note_upstream(&target);
            self.request.upstream = Some(attempt);
            target
        });
    }

    /// Returns whether the chosen upstream is known to use HTTP/2. Then the request is converted.
    fn needs_http2(&self, worker: &Worker) -> bool {
        let is_http2 = |target: &Arc<Target>| target.speaks_http2(worker.number);
        self.conn.is_none() && !self.upgrades && self.target.as_ref().is_some_and(is_http2)
    }

    fn take_idle(&self, worker: &Worker, target: &Target) -> Option<Box<Http1Conn>> {
        // If the connection is closed meanwhile, only a request that may be repeated is not lost.
        let now = if self.may_repeat { worker.ticks.now() } else { worker.ticks.exact() };
        target.take_idle(worker.number, now, &self.route().reuse, self.may_repeat.into())
    }

    fn write_request(&self, plain: &PlainRequest<'_>, buffers: &mut WorkerBuffers) -> Result<(), Failure> {
        let route = self.route();
        let upstream = self.attempts.current(route).ok_or(Failure::NoRoute)?;
        plain.write(&mut buffers.out, (route, upstream), self.request.context(&self.outcome))
    }

    /// Forwards a request to upstreams until one responds, and the response to the client.
    pub(super) async fn run(mut self: Box<Self>, server: &mut Http1Server<'_>) -> ForwardResult {
        let fault: Box<Fault> = loop {
            let target = match (self.failed, &self.target) {
                (None, Some(target)) => Arc::clone(target),
                (failed, _) => {
                    let failure = failed.unwrap_or(Failure::NoRoute);
                    if failure == Failure::Overloaded {
                        return Box::pin(self.refund_and_respond(server, failure)).await;
                    }
                    break Box::new(failure.into());
                }
            };
            if self.needs_http2(server.worker) {
                return Box::pin(server.forward_to_http2(self)).await;
            }
            let (fault, repeatable) = match self.attempt(server, &target).await {
                Ok(None) => return ForwardResult::Answered,
                Ok(Some(switched)) => return ForwardResult::Switched(self.into_tunnel(server, *switched)),
                Err(AttemptError::NoUpgrade) if self.attempts.exclude_last(&self.request.site.routes[self.route]) => {
                    self.choose(server.worker);
                    continue;
                }
                // If no upstream is left that could upgrade, this one gets the request without that wish.
                Err(AttemptError::Http2 | AttemptError::NoUpgrade) => {
                    return Box::pin(server.forward_to_http2(self)).await;
                }
                Err(AttemptError::ClientGone | AttemptError::Aborted) => return ForwardResult::Close,
                Err(AttemptError::Failed { fault, repeatable }) => (fault, repeatable),
            };
            let at = (server.worker.number, server.worker.ticks.now());
            if !self.attempts.note_failed(self.route(), &fault, repeatable, at) {
                break fault;
            }
            self.choose(server.worker);
        };
        let failure = fault.failure();
        self.request.note_fault(&fault);
        Box::pin(server.settle_and_respond(self.into_failed(failure))).await.into()
    }

    /// Responds to a request of which nothing was sent to an upstream.
    async fn refund_and_respond(mut self: Box<Self>, server: &mut Http1Server<'_>, failure: Failure) -> ForwardResult {
        self.request.note_fault(&failure.into());
        let Self { request, outcome, .. } = *self;
        let response = request.refund(&outcome, failure).await;
        server.respond_now(&response, request).await.into()
    }

    /// Forwards a request to one upstream. Returns the connection if it switches to another protocol, and the bytes
    /// that have arrived in it.
    async fn attempt(
        &mut self,
        server: &mut Http1Server<'_>,
        target: &Arc<Target>,
    ) -> Result<Option<Box<(UpstreamIo, Bytes)>>, AttemptError> {
        let mut conn = match self.conn.take() {
            Some(conn) => conn,
            None => Box::pin(self.connect_and_send(server, target)).await?,
        };
        if self.may_desync {
            conn.usage.end();
        }
        server.set_deadline(self.timeout());
        if !self.may_repeat {
            // It may have a long body, and the response may take long.
            server.saved.clear();
            server.saved.shrink_to(WAITING_BYTES);
        }
        if let Some(body) = &mut server.body
            && body.buffered.set(conn.unsent_bytes()).is_err()
        {
            return Err(self.fail_body(server, Failure::Overloaded));
        }
        let relayed = loop {
            let relayed = poll_fn(|context| self.poll_relay(server, &mut conn, context)).await;
            let Settling::Head(head) = &self.settling else { break relayed };
            self.request.settle(&self.outcome, Responder::Upstream, (head.0, &head.1)).await;
            self.settling = Settling::Done;
        };
        let begun = self.begun.take();
        if relayed.is_err() && begun.as_ref().is_some_and(BegunResponse::ends_with_connection) {
            server.stream.reset_at_close();
        }
        if let Err(AttemptError::ClientGone) = relayed {
            self.abandon(server, conn, begun);
            return Err(AttemptError::ClientGone);
        }
        relayed?;
        self.request.note_upstream_progress(UpstreamProgress::All);
        if let Some(first) = self.switched.take() {
            return Ok(Some(Box::new((conn.into_io(), first))));
        }
        if begun.is_some_and(|begun| begun.stays_open) {
            target.keep_idle(server.worker.number, conn, server.worker.ticks.now(), &self.route().reuse);
        }
        Ok(None)
    }

    /// Ends a request that was answered with a switch to another protocol.
    fn into_tunnel(
        self: Box<Self>,
        server: &mut Http1Server<'_>,
        (upstream, first): (UpstreamIo, Bytes),
    ) -> Box<Tunnel> {
        let mut request = self.request;
        server.saved = Vec::new();
        Box::new(Tunnel {
            upstream,
            from_upstream: first,
            from_client: Bytes::from(std::mem::take(&mut server.ahead)).slice(std::mem::take(&mut server.served)..),
            attempt: request.upstream.take(),
            permit: request.permit.take(),
            max_idle: request.site.upgraded,
            ticks: Arc::clone(&server.worker.ticks),
        })
    }

    /// Sends a request on another idle connection, or on a new one.
    async fn connect_and_send(
        &mut self,
        server: &mut Http1Server<'_>,
        target: &Arc<Target>,
    ) -> Result<Box<Http1Conn>, AttemptError> {
        let mut conn = match self.take_idle(server.worker, target) {
            Some(conn) => conn,
            None => {
                let dialled = dial(target, self, (server.worker, server.client));
                let dialled = server.unless_gone(dialled).await;
                // A client that breaks off its body may still read.
                let is_in_body = server.body.is_some();
                let gone =
                    || if is_in_body { AttemptError::failed(Failure::BodyBroken) } else { AttemptError::ClientGone };
                dialled.ok_or_else(gone)??
            }
        };
        poll_fn(|context| Poll::Ready(self.send_again(server, &mut conn, context))).await?;
        Ok(conn)
    }

    /// Sends a saved request.
    fn send_again(
        &mut self,
        server: &mut Http1Server<'_>,
        conn: &mut Http1Conn,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        let (site, route) = (Arc::clone(&self.request.site), Some(self.route));
        let sent = server.with_saved((&site, route), |_, plain, buffers| {
            self.write_request(plain, buffers).map_err(AttemptError::failed)?;
            let not_sent =
                |_| AttemptError::Failed { fault: Box::new(Failure::Disconnected.into()), repeatable: Repeatable::Yes };
            conn.send(&buffers.out, self.request.begin_delivery(&self.outcome), context).map_err(not_sent)
        });
        sent.unwrap_or(Err(AttemptError::Aborted))
    }
}

async fn dial(
    target: &Target,
    forwarding: &Forwarding,
    (worker, client): (&Arc<Worker>, &Client),
) -> Result<Box<Http1Conn>, AttemptError> {
    let failed = |fault| AttemptError::Failed { fault: Box::new(fault), repeatable: Repeatable::Yes };
    let conn_use = if forwarding.upgrades { ConnUse::Upgrade } else { ConnUse::Request };
    match connect::obtain(target, conn_use, (worker, client), forwarding.route()).await {
        Ok(UpstreamConn::H1(conn)) => Ok(conn),
        // It is in the pool now, or another one has room.
        Ok(UpstreamConn::H2(..)) => Err(AttemptError::Http2),
        Err(ConnectError::Tls(fault)) if forwarding.upgrades && fault.lacks_protocol() => Err(AttemptError::NoUpgrade),
        Err(error) => Err(failed(error.into())),
    }
}

/// A response in progress whose client has left, and its permit.
struct AbandonedResponse {
    conn: Box<Http1Conn>,
    is_head: bool,
    abandoned: Abandoned,
    pool: ConnPool,
}

impl Forwarding {
    /// Abandons a request whose client has left. If it has a permit, that is held until the upstream is done. Otherwise
    /// the connection is closed.
    ///
    /// The connection is also closed in the middle of a body, because an upstream that waits for the rest of one is
    /// blocked. A timer holds the permit then.
    fn abandon(&mut self, server: &Http1Server<'_>, conn: Box<Http1Conn>, begun: Option<BegunResponse>) {
        if server.body.is_some() {
            return self.request.hold_permit();
        }
        let Some(abandoned) = self.request.abandon() else { return };
        let ticks = &server.worker.ticks;
        let left = Wait::between(ticks.now(), server.deadline);
        let pool = abandoned.attempt().pool(ticks);
        let rest = AbandonedResponse { conn, is_head: server.is_head, abandoned, pool };
        abandoned::spawn(rest.drain(begun, left.duration()));
    }
}

impl AbandonedResponse {
    /// Reads the response to its end. The head has to arrive in the time that the upstream had left, and the body
    /// within the route's timeout.
    async fn drain(self, begun: Option<BegunResponse>, head_within: Duration) {
        let Self { conn, is_head, abandoned, pool } = self;
        let body = match begun {
            Some(BegunResponse { rest, stays_open, .. }) => Http1Response::resume(conn, (rest, stays_open), pool),
            None => match timeout(head_within, receive(conn, None, (is_head, Repeatable::No), Some(pool))).await {
                // An event stream has no end.
                Ok(Ok(response)) if !has_event_stream(response.headers()) => response.into_body(),
                _ => return,
            },
        };
        abandoned.drain(body).await;
    }
}
