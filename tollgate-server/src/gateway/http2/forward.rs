//! Forwards requests to upstreams and returns their responses.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::header::{Entry, LOCATION};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, Method, Response, StatusCode, Uri, Version};
use tollgate_config::internal::UpstreamHeader;
use tollgate_rules::{InFlightPermit, Outcome};

use super::exchange::{Exchange, ReceivedRequest, with_head};
use super::response_body::{ToClient, UpstreamBody};
use super::sender as http2_sender;
use super::sender::Fallback;
use crate::gateway::deadline::UpstreamDeadline;
use crate::gateway::failure::{Failure, Fault};
use crate::gateway::head::upstream_head::{RequestContext, UpstreamHead, append_via};
use crate::gateway::head::{BodyLength, is_idempotent, reads_body};
use crate::gateway::http1::sender::{self, Upload};
use crate::gateway::local_response;
use crate::gateway::proxy::{self, ProxyRequest, Responder};
use crate::gateway::site::{Attempts, Route, UpstreamAttempt};
use crate::gateway::tally::Tally;
use crate::gateway::upload::{SendError, ToUpstream};
use crate::gateway::upstream::RouteUpstream;
use crate::gateway::upstream::abandoned::{self, Abandoned};
use crate::gateway::upstream::conn::Repeatable;
use crate::gateway::upstream::connect::{self, ConnUse, UpstreamConn};

/// A response, and the attempt that it answers.
type Answered = (Response<UpstreamBody>, UpstreamAttempt);

impl Exchange {
    /// Forwards a request to upstreams until one responds. Some may have been tried, and one may have been chosen.
    pub(in crate::gateway) async fn forward(
        &self,
        received: ReceivedRequest,
        (mut request, number): (ProxyRequest, usize),
        mut attempts: Attempts,
        outcome: &Outcome,
    ) -> Response<ToClient> {
        let site = Arc::clone(&request.site);
        let route = &site.routes[number];
        let ReceivedRequest { parts, body, buffered } = received;
        let body = ToUpstream::new(body, &self.client, site.max_body, buffered);
        let received = (parts, body.screening_trailers(site.underscores, &route.request_edits));
        let answered = self.try_upstreams(received, route, &mut attempts, (outcome, &mut request)).await;
        let (answered, attempt) = match answered {
            Ok(answered) => answered,
            Err(fault) => {
                request.note_fault(&fault);
                let mut response = local_response::failure(fault.failure());
                request.settle(outcome, Responder::Gateway, (response.status(), response.headers())).await;
                proxy::complete(outcome, Some(route), &mut response);
                return response.map(|text| ToClient::local(text, request));
            }
        };
        if abandoned::has_event_stream(answered.headers()) {
            request.is_endless = true;
        }
        request.is_upstreams = true;
        let (mut parts, body) = answered.into_parts();
        // The client gets its own version.
        let version = std::mem::replace(&mut parts.version, Version::HTTP_11);
        if site.adds_header(UpstreamHeader::Via) {
            append_via(version, &mut parts.headers);
        }
        if let (Entry::Occupied(mut locations), Some(upstream)) =
            (parts.headers.entry(LOCATION), attempts.current(route))
        {
            for location in locations.iter_mut() {
                let changed = route.location(upstream, request.https_host.as_deref(), location.as_bytes());
                if let Some(Ok(changed)) = changed.map(HeaderValue::try_from) {
                    *location = changed;
                }
            }
        }
        request.upstream = Some(attempt);
        request.settle(outcome, Responder::Upstream, (parts.status, &parts.headers)).await;
        let mut response = Response::from_parts(parts, ToClient::upstream(body, &route.response_edits, request));
        proxy::complete(outcome, Some(route), &mut response);
        response
    }

    async fn try_upstreams(
        &self,
        (parts, mut body): (Parts, ToUpstream),
        route: &Route,
        attempts: &mut Attempts,
        (outcome, request): (&Outcome, &mut ProxyRequest),
    ) -> Result<Answered, Fault> {
        let mut parts = Some(parts);
        loop {
            let chosen = attempts.choose(route, self.worker.number, self.worker.ticks.now());
            let (upstream, attempt) = chosen.ok_or(Failure::NoRoute)?;
            request.note_upstream(&upstream.target);
            let to = (route, upstream);
            let sent = self.try_one((&mut parts, body), to, attempt, (outcome, request)).await;
            let SendError { fault, retry } = match sent {
                Ok(answered) => {
                    upstream.note_head(answered.0.status(), self.worker.ticks.now());
                    return Ok(answered);
                }
                Err(error) => error,
            };
            let at = (self.worker.number, self.worker.ticks.now());
            let is_retried = attempts.note_failed(route, &fault, retry.is_some().into(), at);
            body = retry.filter(|_| is_retried).ok_or(fault)?;
        }
    }

    /// Sends a request to one upstream. Its head is dropped once it was sent over HTTP/1 with a body: then it cannot be retried.
    async fn try_one(
        &self,
        (kept, mut body): (&mut Option<Parts>, ToUpstream),
        (route, upstream): (&Route, &RouteUpstream),
        mut attempt: UpstreamAttempt,
        (outcome, request): (&Outcome, &mut ProxyRequest),
    ) -> Result<Answered, SendError> {
        let Some(parts) = kept else { return Err(SendError::failed(Failure::BodyBroken)) };
        let (worker, target, to) = (self.worker.number, &upstream.target, (route, upstream));
        let may_repeat = body.is_empty() && is_idempotent(parts.method.as_str());
        let repeatable = Repeatable::from(may_repeat);
        if !may_repeat && target.has_shared(worker) {
            // The runtime polls the kernel for events and runs the tasks that they wake before it returns here. So a
            // connection that the upstream has closed by now is known to be closed.
            tokio::task::yield_now().await;
        }
        // If the connection is closed meanwhile, only a request that may be repeated is not lost.
        let now = if may_repeat { self.worker.ticks.now() } else { self.worker.ticks.exact() };
        let conn = match target.take_idle(worker, now, &route.reuse, repeatable) {
            Some(conn) => UpstreamConn::H1(conn),
            None => {
                let obtained = connect::obtain(target, ConnUse::Request, (&self.worker, &self.client), route);
                match Box::pin(body.wait_for(obtained)).await {
                    Ok(conn) => conn,
                    Err(error) => return Err(SendError { fault: error.into(), retry: Some(body) }),
                }
            }
        };
        let deadline = Arc::new(UpstreamDeadline::new(Arc::clone(&self.worker.ticks)));
        attempt.deadline = Some(Arc::clone(&deadline));
        body.read_by(&deadline, route.timeout);
        match conn {
            UpstreamConn::H1(mut conn) => {
                let is_head = parts.method == Method::HEAD;
                if !body.is_empty() && !reads_body(parts.method.as_str()) {
                    conn.usage.end();
                }
                let length = BodyLength::of(&body);
                let recorded = request.begin_delivery(outcome);
                let sent = sender::send(&mut conn, recorded, |out| {
                    self.with_upstream_head((parts, length), to, request.context(outcome), |head| head.write(out))
                });
                if let Err(fault) = sent.await {
                    let retry = fault.is_upstreams().then_some(body);
                    return Err(SendError { fault, retry });
                }
                if !body.is_empty() {
                    // An upload may take long, and the head holds a buffer of the client's connection.
                    *kept = None;
                }
                let is_retried = may_repeat && route.repeats_lost(conn.usage.is_used());
                let repeatable = Repeatable::from(is_retried);
                let (pool, upload) = (attempt.pool(&self.worker.ticks), Upload::new(body, &deadline));
                let sending = async move {
                    let answer = sender::receive(conn, upload, (is_head, repeatable), Some(pool)).await;
                    answer.map(|response| response.map(UpstreamBody::Http1))
                };
                self.await_response(sending, deadline, (attempt, request)).await
            }
            UpstreamConn::H2(sender, permit) => {
                let fallback = Fallback::of(route, permit.has_answered());
                if !body.is_empty() {
                    copy_text(parts);
                }
                let filter = request.site.header_filter(self.client.address);
                let length = BodyLength::of(&body);
                let head = self.with_upstream_head((parts, length), to, request.context(outcome), |head| {
                    head.to_http2(parts, &filter)
                });
                let sent = (head.map_err(SendError::failed)?, body, request.begin_delivery(outcome));
                let until = Arc::clone(&deadline);
                let sending = async move {
                    let answer = http2_sender::send((sender, permit), sent, until, (repeatable, fallback)).await;
                    answer.map(|response| response.map(|body| UpstreamBody::Http2(Box::new(body))))
                };
                Box::pin(self.await_response(sending, deadline, (attempt, request))).await
            }
        }
    }

    /// Calls `with` with the head that an upstream gets.
    fn with_upstream_head<T>(
        &self,
        received: (&Parts, BodyLength),
        to: (&Route, &RouteUpstream),
        request: RequestContext<'_>,
        with: impl FnOnce(&UpstreamHead<'_>) -> T,
    ) -> T {
        with_head(received, (request.site, &self.client), |head| with(&UpstreamHead::new(head, to, request)))
    }

    /// Waits for the head of a response. A request with a permit that is given up before keeps its permit until the
    /// upstream is done.
    async fn await_response(
        &self,
        sending: impl Future<Output = SendResult> + Send + 'static,
        deadline: Arc<UpstreamDeadline>,
        (mut attempt, request): (UpstreamAttempt, &mut ProxyRequest),
    ) -> Result<Answered, SendError> {
        let late = || Err(SendError::failed(Failure::UpstreamTimeout));
        let answered = match request.permit.take() {
            None => match deadline.limit(Box::pin(sending)).await {
                None => return late(),
                Some(answered) => answered,
            },
            Some(permit) => {
                let sending = Box::pin(sending);
                let mut sent =
                    PermittedRequest::new(sending, (attempt, permit), Arc::clone(&deadline), &self.worker.tally);
                match deadline.limit(poll_fn(|context| sent.poll_start(context))).await {
                    None => return late(),
                    Some(Err(failure)) => return Err(SendError::failed(failure)),
                    Some(Ok(answered)) => {
                        let Some((returned, permit)) = sent.into_parts() else {
                            return Err(SendError::failed(Failure::Disconnected));
                        };
                        attempt = returned;
                        request.permit = Some(permit);
                        answered
                    }
                }
            }
        };
        match (answered, deadline.body_failure()) {
            // No upgrade was requested, and HTTP/2 has none.
            (Ok(response), _) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                Err(SendError::failed(Failure::InvalidResponse))
            }
            (Ok(response), _) => Ok((response, attempt)),
            (Err(_), Some(failure)) => Err(SendError::failed(failure)),
            (Err(error), None) => Err(error),
        }
    }
}

/// Copies the text of a head that is kept for a retry. It shares the buffer of the client's connection, and an upload
/// may take long: the copy lets the buffer be freed.
fn copy_text(parts: &mut Parts) {
    for value in parts.headers.values_mut() {
        if let Ok(copy) = HeaderValue::from_bytes(value.as_bytes()) {
            *value = copy;
        }
    }
    let mut uri = std::mem::take(&mut parts.uri).into_parts();
    uri.authority = uri.authority.and_then(|authority| Authority::try_from(authority.as_str()).ok());
    uri.path_and_query = uri.path_and_query.and_then(|path| PathAndQuery::try_from(path.as_str()).ok());
    parts.uri = Uri::from_parts(uri).unwrap_or_default();
}

type SendResult = Result<Response<UpstreamBody>, SendError>;
type Sending = Pin<Box<dyn Future<Output = SendResult> + Send>>;

/// A request with a permit, sent to an upstream. It is abandoned if this is dropped before the answer begins.
struct PermittedRequest {
    sending: Option<Sending>,
    attempt: Option<UpstreamAttempt>,
    permit: Option<InFlightPermit>,
    deadline: Arc<UpstreamDeadline>,
    tally: Arc<Tally>,
}

impl PermittedRequest {
    fn new(
        sending: Sending,
        (attempt, permit): (UpstreamAttempt, InFlightPermit),
        deadline: Arc<UpstreamDeadline>,
        tally: &Arc<Tally>,
    ) -> Self {
        let (attempt, permit, tally) = (Some(attempt), Some(permit), Arc::clone(tally));
        Self { sending: Some(sending), attempt, permit, deadline, tally }
    }

    /// Returns the response once it has begun, or the reason why the client gets none.
    fn poll_start(&mut self, context: &mut Context<'_>) -> Poll<Result<SendResult, Failure>> {
        let Some(sending) = &mut self.sending else { return Poll::Pending };
        let answer = ready!(sending.as_mut().poll(context));
        self.sending = None;
        Poll::Ready(match self.deadline.body_failure() {
            Some(failure) if answer.is_err() => Err(failure),
            _ => Ok(answer),
        })
    }

    /// Takes the upstream and the permit of a request whose answer has begun.
    fn into_parts(mut self) -> Option<(UpstreamAttempt, InFlightPermit)> {
        Some((self.attempt.take()?, self.permit.take()?))
    }
}

impl Drop for PermittedRequest {
    fn drop(&mut self) {
        let Some((attempt, permit)) = self.attempt.take().zip(self.permit.take()) else { return };
        if self.deadline.body_failure().is_some() {
            return abandoned::hold_permit(permit, attempt.timeout, &self.tally);
        }
        let Some(sending) = self.sending.take() else { return };
        let Some(request) = Abandoned::new(attempt, permit, &self.tally) else { return };
        let deadline = Arc::clone(&self.deadline);
        abandoned::spawn(async move {
            let response = match deadline.limit(sending).await {
                Some(Ok(response)) => response,
                // The gateway may notice a broken body only after the client's connection has ended.
                Some(Err(_)) if request.attempt().has_broken_body() => return request.close(),
                _ => return,
            };
            // Neither has an end: the first is a tunnel by now, the second goes on until it is closed.
            if response.status() != StatusCode::SWITCHING_PROTOCOLS && !abandoned::has_event_stream(response.headers())
            {
                request.drain(response.into_body()).await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn copied_head_does_not_hold_the_buffer_of_its_connection() {
        let buffer = Bytes::from(b"/a?b example.com".to_vec());
        let mut parts = http::Request::new(()).into_parts().0;
        parts.uri = Uri::from_maybe_shared(buffer.slice(..4)).unwrap();
        parts.headers.insert("x-host", HeaderValue::from_maybe_shared(buffer.slice(5..)).unwrap());
        assert!(!buffer.is_unique());
        copy_text(&mut parts);
        assert!(buffer.is_unique());
        assert_eq!(
            (parts.uri.to_string().as_str(), &parts.headers["x-host"]),
            ("/a?b", &HeaderValue::from_static("example.com"))
        );
    }
}
