//! Forwards a request to its upstreams, and the response to the client.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio::time::timeout;
use tollgate::Outcome;

use super::{Http1Server, UnsettledResponse};
use crate::gateway::client::Client;
use crate::gateway::deadline::{TICK, Wait};
use crate::gateway::failure::{self, Failure, Fault};
use crate::gateway::head::upstream_head::Destination;
use crate::gateway::http1::body::ResponseBody;
use crate::gateway::http1::request::PlainRequest;
use crate::gateway::http1::sender::{Http1Body, ResponseStart, receive};
use crate::gateway::http1::upgrade::Tunnel;
use crate::gateway::request_guard::{RequestGuard, UpstreamProgress};
use crate::gateway::site::{Attempts, Route, Site};
use crate::gateway::upstream::abandoned::{self, Abandoned, has_event_stream};
use crate::gateway::upstream::conn::{Http1Conn, Repeatable, UpstreamIo};
use crate::gateway::upstream::connect::{self, ConnUse, UpstreamConn};
use crate::gateway::upstream::{ConnPool, Target};
use crate::gateway::worker::{Worker, WorkerBuffers};

/// An allowed request that is being forwarded.
pub(super) struct Forwarding {
    pub(super) site: Arc<Site>,
    pub(super) route: usize,
    pub(super) outcome: Outcome,
    pub(super) guard: RequestGuard,
    pub(super) attempts: Attempts,
    /// The current upstream and the connection to it.
    target: Option<Arc<Target>>,
    conn: Option<Box<Http1Conn>>,
    /// The rest of a response that has started, and whether its connection stays open. Kept here, because in the task's
    /// future it would take room for as long as the client is connected.
    pub(super) begun: Option<(ResponseBody, bool)>,
    /// The reason why it cannot be sent to any upstream.
    failed: Option<Failure>,
    pub(super) is_head: bool,
    /// Whether the client wants to switch to another protocol.
    pub(super) upgrades: bool,
    /// The bytes that the upstream has sent after it switched to another protocol.
    pub(super) switched: Option<Bytes>,
    /// Whether the client accepts trailers.
    pub(super) wants_trailers: bool,
    pub(super) may_repeat: bool,
    may_desync: bool,
    pub(super) settling: Settling,
    /// Whether the connection keeps bytes of the response that were not parsed: because they follow an interim response,
    /// or because limits have counted the head in the meantime.
    pub(super) has_unparsed: bool,
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
    pub(super) fn new(
        plain: &PlainRequest<'_>,
        (site, route): (Arc<Site>, usize),
        outcome: Outcome,
        guard: RequestGuard,
    ) -> Self {
        let settling = if outcome.awaits_response() { Settling::AwaitsHead } else { Settling::Done };
        // HTTP/2 has no upgrades.
        let upgrades = plain.head.upgrade.is_some() && site.routes[route].can_upgrade();
        let attempts =
            if upgrades { Attempts::without(site.routes[route].http2_upstreams()) } else { Attempts::default() };
        Self {
            site,
            route,
            outcome,
            guard,
            attempts,
            target: None,
            conn: None,
            begun: None,
            failed: None,
            is_head: plain.head.is_head(),
            upgrades,
            switched: None,
            wants_trailers: plain.head.wants_trailers,
            may_repeat: plain.head.may_repeat(),
            may_desync: plain.head.may_desync(),
            settling,
            has_unparsed: false,
        }
    }

    pub(super) fn route(&self) -> &Route {
        &self.site.routes[self.route]
    }

    /// Returns the response to a request that no upstream has answered.
    fn into_failed(self, failure: Failure) -> Box<UnsettledResponse> {
        let mut response = failure::response(failure);
        let map = response.headers_mut();
        self.route().response_edits.apply(map);
        let Self { is_head, outcome, guard, failed, .. } = self;
        let outcome = (failed != Some(Failure::Overloaded)).then_some(outcome);
        Box::new(UnsettledResponse { response, is_head, outcome, guard })
    }

    /// Returns how long the upstream may take for the next step.
    pub(super) fn timeout(&self) -> Wait {
        self.route().timeout
    }

    /// Returns whether the client was sent the head of a response.
    pub(super) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }
}

impl Http1Server<'_> {
    /// Sends a request at once, if a connection is available.
    pub(super) fn start_forward(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        mut forwarding: Box<Forwarding>,
        context: &mut Context<'_>,
    ) -> Box<Forwarding> {
        self.save(plain);
        if let Some(body) = &mut self.body {
            // Until an upstream reads it, the part that has arrived is buffered.
            let is_overloaded = body.buffered.set(plain.bytes.len()).is_err();
            forwarding.failed = body.failure.or(is_overloaded.then_some(Failure::Overloaded));
            if forwarding.failed.is_some() {
                return forwarding;
            }
        }
        self.choose(&mut forwarding);
        if self.needs_http2(&forwarding) {
            return forwarding;
        }
        if let Err(failure) = self.write_request(plain, buffers, &mut forwarding) {
            forwarding.failed = Some(failure);
            return forwarding;
        }
        let conn = forwarding.target.as_ref().and_then(|target| self.take_idle(target, &forwarding));
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
        let chosen = forwarding.attempts.choose(route, self.worker.number, self.worker.ticks.now());
        forwarding.target = chosen.map(|(upstream, attempt)| {
            let target = &upstream.target;
            forwarding.guard.note_upstream(target);
            forwarding.guard.set_upstream(attempt);
            Arc::clone(target)
        });
    }

    /// Returns whether the chosen upstream is known to use HTTP/2. Then hyper's client sends the request.
    fn needs_http2(&self, forwarding: &Forwarding) -> bool {
        let is_http2 = |target: &Arc<Target>| target.speaks_http2(self.worker.number);
        forwarding.conn.is_none() && !forwarding.upgrades && forwarding.target.as_ref().is_some_and(is_http2)
    }

    fn take_idle(&self, target: &Target, forwarding: &Forwarding) -> Option<Box<Http1Conn>> {
        let (now, policy) = (self.worker.ticks.now(), &forwarding.route().reuse);
        target.take_idle(self.worker.number, now, policy, forwarding.may_repeat.into())
    }

    fn write_request(
        &self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        forwarding: &mut Forwarding,
    ) -> Result<(), Failure> {
        let (site, route) = (&*forwarding.site, forwarding.route());
        let upstream = forwarding.attempts.current(route).ok_or(Failure::NoRoute)?;
        plain.write(&mut buffers.out, Destination { site, route, upstream }, self.client, &forwarding.guard)
    }

    /// Forwards a request to upstreams until one responds, and the response to the client.
    pub(super) async fn forward(&mut self, mut forwarding: Box<Forwarding>) -> ForwardResult {
        let fault: Box<Fault> = loop {
            let target = match (forwarding.failed, &forwarding.target) {
                (None, Some(target)) => Arc::clone(target),
                (failed, _) => {
                    let failure = failed.unwrap_or(Failure::NoRoute);
                    if failure == Failure::Overloaded {
                        // Nothing was sent.
                        _ = Box::pin(forwarding.outcome.refund()).await;
                    }
                    forwarding.route().tally(self.worker.number).note_failure(failure);
                    break Box::new(failure.into());
                }
            };
            if self.needs_http2(&forwarding) {
                return Box::pin(self.forward_by_hyper(forwarding)).await;
            }
            let (fault, repeatable) = match self.attempt(&target, &mut forwarding).await {
                Ok(None) => return ForwardResult::Answered,
                Ok(Some(switched)) => return ForwardResult::Switched(self.open_tunnel(*switched, *forwarding)),
                Err(AttemptError::Http2) => return Box::pin(self.forward_by_hyper(forwarding)).await,
                Err(AttemptError::ClientGone | AttemptError::Aborted) => return ForwardResult::Close,
                Err(AttemptError::Failed { fault, repeatable }) => (fault, repeatable),
            };
            let at = (self.worker.number, self.worker.ticks.now());
            if !forwarding.attempts.note_failed((forwarding.route(), &target), &fault, repeatable, at) {
                break fault;
            }
            self.choose(&mut forwarding);
        };
        let failure = fault.failure();
        forwarding.guard.note_fault(&fault);
        match Box::pin(self.settle_and_respond(forwarding.into_failed(failure))).await {
            Ok(()) => ForwardResult::Answered,
            Err(_gone) => ForwardResult::Close,
        }
    }

    /// Forwards a request to one upstream. Returns the connection if it switches to another protocol, and the bytes
    /// that have arrived in it.
    async fn attempt(
        &mut self,
        target: &Arc<Target>,
        forwarding: &mut Forwarding,
    ) -> Result<Option<Box<(UpstreamIo, Bytes)>>, AttemptError> {
        let mut conn = match forwarding.conn.take() {
            Some(conn) => conn,
            None => Box::pin(self.connect_and_send(target, forwarding)).await?,
        };
        if forwarding.may_desync {
            conn.usage.end();
        }
        self.set_deadline(forwarding.timeout());
        if let Some(body) = &mut self.body {
            // A request with a body is not sent again.
            self.saved = Vec::new();
            if body.buffered.set(conn.unsent_bytes()).is_err() {
                return Err(self.fail_body(Failure::Overloaded, forwarding));
            }
        }
        let relayed = loop {
            let relayed = poll_fn(|context| self.poll_relay(target, &mut conn, forwarding, context)).await;
            let Settling::Head(head) = &forwarding.settling else { break relayed };
            // If settling fails, the estimate stands.
            _ = Box::pin(forwarding.outcome.settle_response(head.0, &head.1)).await;
            (forwarding.settling, forwarding.has_unparsed) = (Settling::Done, true);
        };
        let begun = forwarding.begun.take();
        if let Err(AttemptError::ClientGone) = relayed {
            self.abandon(conn, begun, forwarding);
            return Err(AttemptError::ClientGone);
        }
        relayed?;
        forwarding.guard.note_upstream_progress(UpstreamProgress::All);
        if let Some(first) = forwarding.switched.take() {
            return Ok(Some(Box::new((conn.into_io(), first))));
        }
        if let Some((_, true)) = begun {
            target.keep_idle(self.worker.number, conn, self.worker.ticks.now(), &forwarding.route().reuse);
        }
        Ok(None)
    }

    /// Ends a request that was answered with a switch to another protocol.
    fn open_tunnel(&mut self, (upstream, first): (UpstreamIo, Bytes), forwarding: Forwarding) -> Box<Tunnel> {
        let Forwarding { site, mut guard, .. } = forwarding;
        Box::new(Tunnel {
            upstream,
            from_upstream: first,
            from_client: Bytes::from(std::mem::take(&mut self.ahead)),
            attempt: guard.take_upstream(),
            permit: guard.take_permit(),
            max_idle: site.upgraded,
            ticks: Arc::clone(&self.worker.ticks),
        })
    }

    /// Sends a request on another idle connection, or on a new one.
    async fn connect_and_send(
        &mut self,
        target: &Arc<Target>,
        forwarding: &mut Forwarding,
    ) -> Result<Box<Http1Conn>, AttemptError> {
        let mut conn = match self.take_idle(target, forwarding) {
            Some(conn) => conn,
            None => {
                let dialled = dial(target, forwarding, (self.worker, self.client));
                let dialled = self.unless_gone(dialled).await;
                // A client that breaks off its body may still read.
                let is_in_body = self.body.is_some();
                let gone =
                    || if is_in_body { AttemptError::failed(Failure::BodyBroken) } else { AttemptError::ClientGone };
                dialled.ok_or_else(gone)??
            }
        };
        poll_fn(|context| Poll::Ready(self.send_again(&mut conn, forwarding, context))).await?;
        Ok(conn)
    }

    /// Sends a saved request.
    fn send_again(
        &mut self,
        conn: &mut Http1Conn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        let (site, route) = (Arc::clone(&forwarding.site), Some(forwarding.route));
        let sent = self.with_saved((&site, route), |server, plain, buffers| {
            server.write_request(plain, buffers, forwarding).map_err(AttemptError::failed)?;
            let not_sent =
                |_| AttemptError::Failed { fault: Box::new(Failure::Disconnected.into()), repeatable: Repeatable::Yes };
            conn.send(&buffers.out, context).map_err(not_sent)
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
        Ok(UpstreamConn::H2(..)) if forwarding.upgrades => Err(failed(Failure::CannotConnect.into())),
        // It is in the pool now.
        Ok(UpstreamConn::H2(..)) => Err(AttemptError::Http2),
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

/// The rest of a response, and whether its connection stays open; `None` if the response has not started.
type ResponseProgress = Option<(ResponseBody, bool)>;

impl Http1Server<'_> {
    /// Abandons a request whose client has left. If it has a permit, that is held until the upstream is done. Otherwise
    /// the connection is closed.
    ///
    /// The connection is also closed in the middle of a body, because an upstream that waits for the rest of one is
    /// blocked. A timer holds the permit then.
    pub(super) fn abandon(&self, conn: Box<Http1Conn>, begun: ResponseProgress, forwarding: &mut Forwarding) {
        if self.body.is_some() {
            return forwarding.guard.hold_permit();
        }
        let Some(abandoned) = forwarding.guard.abandon() else { return };
        let ticks = &self.worker.ticks;
        let left = u32::try_from(self.deadline.saturating_sub(ticks.now())).unwrap_or(u32::MAX);
        let pool = abandoned.attempt().pool(ticks);
        let rest = AbandonedResponse { conn, is_head: forwarding.is_head, abandoned, pool };
        abandoned::spawn(rest.drain(begun, TICK.saturating_mul(left)));
    }
}

impl AbandonedResponse {
    /// Reads the response to its end. The head has to arrive in the time that the upstream had left, and the body
    /// within the route's timeout.
    async fn drain(self, begun: ResponseProgress, head_within: Duration) {
        let Self { conn, is_head, abandoned, pool } = self;
        let body = match begun {
            Some((rest, stays_open)) => Http1Body::resume(conn, ResponseStart::resume(rest, stays_open), pool),
            None => match timeout(head_within, receive(conn, None, (is_head, Repeatable::No), Some(pool))).await {
                // An event stream has no end.
                Ok(Ok(response)) if !has_event_stream(response.headers()) => response.into_body(),
                _ => return,
            },
        };
        abandoned.drain(body).await;
    }
}
