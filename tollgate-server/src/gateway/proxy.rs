//! The pipeline of every request: route → check → refuse, or forward and settle.
//!
//! The servers of HTTP/1 and HTTP/2 call these steps in this order. The servers differ in how bytes arrive and leave,
//! and in where a request waits. Only the gate decides: a refused request never reaches an upstream, and a request that
//! is retried at another upstream is counted once.

use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use tollgate::http::Refusal;
use tollgate::internal::Unreadable;
use tollgate::rules::Facts;
use tollgate::{Check, Outcome};

use super::client::{Client, Peer};
use super::failure::{self, Failure};
use super::head::RequestHead;
use super::local_response;
use super::request_guard::RequestGuard;
use super::site::{Route, RouteAction, Site};
use super::worker::Worker;
use crate::decisions::LastLimit;

/// The reason why a request is refused before limits are checked.
pub(super) enum Rejection {
    Failure(Failure),
    /// It has more than one interpretation.
    Unreadable(Unreadable),
}

/// Finds the route of a request, and calls `check` with the facts for its limits.
///
/// # Errors
///
/// Fails if the request is malformed or ambiguous.
#[inline(always)]
pub(super) fn check(
    head: &mut RequestHead<'_>,
    site: &Site,
    peer: Peer<'_>,
    check: impl FnOnce(&Facts<'_>) -> Check,
) -> Result<(Option<usize>, Check), Rejection> {
    if let Some(failure) = head.failure(site.max_body) {
        return Err(Rejection::Failure(failure));
    }
    let route = head.find_route(site, peer).map_err(Rejection::Unreadable)?;
    Ok((route, check(&site.with_route(head.facts(peer), route))))
}

/// A request with its route.
pub(super) struct RoutedRequest {
    pub(super) site: Arc<Site>,
    pub(super) route: Option<usize>,
    pub(super) guard: RequestGuard,
}

/// The next step of an allowed request.
pub(super) enum Action {
    /// The gateway responds.
    Respond(Response<Bytes>),
    /// The gateway responds with the request, once its body has arrived.
    Echo,
    /// It is sent to the upstreams of this route.
    Forward(usize),
}

impl RoutedRequest {
    /// Starts the count, the access log entry and the span of a request.
    pub(super) fn begin(
        head: &RequestHead<'_>,
        (client, worker): (&Arc<Client>, &Worker),
        (site, route): (&Arc<Site>, Option<usize>),
    ) -> Self {
        worker.tally.note_dropped_headers(head.dropped);
        let mut guard = RequestGuard::begin(head, client, worker, site);
        if let Some(number) = route {
            guard.enter(site.routes[number].tally(worker.number));
        }
        Self { site: Arc::clone(site), route, guard }
    }

    /// Records why the request is rejected, and returns the response.
    pub(super) fn reject(&mut self, rejection: &Rejection, head: &RequestHead<'_>, worker: &Worker) -> Response<Bytes> {
        match rejection {
            Rejection::Failure(failure) => {
                self.guard.note_refused(*failure, head, worker);
                failure::response(*failure)
            }
            Rejection::Unreadable(problem) => {
                self.guard.note_unreadable(problem, head, worker);
                failure::unreadable_response(problem)
            }
        }
    }

    /// Records the outcome of the check. Returns the next step, or `None` if a limit refuses the request.
    pub(super) fn apply(
        &mut self,
        outcome: &mut Outcome,
        head: &RequestHead<'_>,
        (worker, peer): (&Worker, Peer<'_>),
        last_noted: &mut LastLimit,
    ) -> Option<Action> {
        worker.tally.note_outcome(last_noted, outcome);
        self.guard.note_outcome(outcome);
        if self.site.log.is_some() {
            self.guard.note_key(outcome, &self.site.with_route(head.facts(peer), self.route));
        }
        self.guard.keep_permit(outcome.take_permit());
        if !outcome.is_allowed() {
            strike_if_malformed(outcome, head, (worker, peer));
            return None;
        }
        let Some(number) = self.route else {
            return Some(Action::Respond(failure::response(Failure::NoRoute)));
        };
        Some(match &self.site.routes[number].action {
            RouteAction::Respond(fixed) => Action::Respond(fixed.response()),
            RouteAction::Echo => Action::Echo,
            RouteAction::Upstreams(_) if head.forwards_left() == Some(0) => {
                Action::Respond(local_response::final_recipient(head))
            }
            RouteAction::Upstreams(_) => Action::Forward(number),
        })
    }

    /// Waits for the delay that a limit imposes. Fails if too many requests wait.
    pub(super) async fn wait_in_queue(&self, outcome: &Outcome, worker: &Worker) -> Result<(), Failure> {
        worker.wait_in_queue(outcome.delay(), self.site.max_queued).await
    }

    /// Refunds a request that the gateway has no room for, and returns the response.
    pub(super) async fn refund(&self, outcome: &Outcome, failure: Failure) -> Response<Bytes> {
        _ = outcome.refund().await;
        let mut response = failure::response(failure);
        if let Some(route) = self.route() {
            route.response_edits.apply(response.headers_mut());
        }
        response
    }

    pub(super) fn route(&self) -> Option<&Route> {
        self.route.map(|number| &self.site.routes[number])
    }
}

/// Counts a refused request as a strike against its client if no well-behaved client sends such a request. Several
/// cookies or parameters of one name are common.
pub(super) fn strike_if_malformed(outcome: &Outcome, head: &RequestHead<'_>, (worker, peer): (&Worker, Peer<'_>)) {
    if matches!(outcome.refusal(), Some(Refusal::Unreadable(request)) if request.reason == "duplicate_header") {
        worker.strike(peer, head.headers.lines);
    }
}

/// Settles limits that count responses, and completes the head of the response.
pub(super) async fn settle<B>(outcome: &Outcome, route: Option<&Route>, response: &mut Response<B>) {
    if outcome.awaits_response() {
        // Before the route removes the header with the cost. If settling fails, the estimate stands.
        _ = Box::pin(outcome.settle_response(response.status(), response.headers())).await;
    }
    complete(outcome, route, response);
}

/// Applies the changes of the route, and adds the rate limit headers.
pub(super) fn complete<B>(outcome: &Outcome, route: Option<&Route>, response: &mut Response<B>) {
    if let Some(route) = route {
        route.response_edits.apply(response.headers_mut());
    }
    outcome.write_headers(response.headers_mut());
}
