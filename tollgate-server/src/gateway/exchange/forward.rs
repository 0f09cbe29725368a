//! Forwards requests to upstreams and returns their responses.

use std::error::Error as _;
use std::future::poll_fn;
use std::sync::Arc;

use http::header::{CONNECTION, HOST, TRAILER};
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use hyper::client::conn::TrySendError;
use smallvec::SmallVec;
use tollgate::Outcome;
use tollgate::rules::file::internal::{HostHeader, UpstreamHeader};

use super::super::abandoned::{self, PermittedRequest, ResponseStart, SendResult};
use super::super::body::{ClientBody, ToClient, ToUpstream, UpstreamBody};
use super::super::buffer_budget::BufferedBytes;
use super::super::connect::{self, ConnUse, ConnectError, UpstreamConn};
use super::super::deadline::UpstreamDeadline;
use super::super::failure::{Failure, Fault};
use super::super::lane::{self, SendError};
use super::super::reuse::{Repeatable, reads_body};
use super::super::site::{Route, Site};
use super::super::target::Target;
use super::super::upstream_tls::TlsFault;
use super::super::{failure, headers};
use super::request_guard::UpstreamAttempt;
use super::{Exchange, RequestGuard, UpstreamRequest};
use crate::traces::{TRACEPARENT, TRACESTATE};

/// The numbers of upstreams that were tried.
type Tried = SmallVec<[usize; 4]>;

/// The result of one attempt.
enum AttemptResult {
    Answered(Response<UpstreamBody>, UpstreamAttempt),
    /// The request was not sent, or may be sent again.
    Retry(UpstreamRequest, Fault),
    Failed(Fault),
}

impl From<SendError> for AttemptResult {
    fn from(error: SendError) -> Self {
        match error.retry {
            Some(request) => Self::Retry(*request, error.fault),
            None => Self::Failed(error.fault),
        }
    }
}

impl Exchange {
    /// Forwards a request to upstreams until one responds. Some may have been tried, and one may have been chosen.
    pub(in super::super) async fn forward(
        &self,
        (mut request, attempt): (Request<ClientBody>, Option<BufferedBytes>),
        (site, route): (&Arc<Site>, &Route),
        (tried, first): (Tried, Option<usize>),
        outcome: &Outcome,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        self.prepare(&mut request, site, route, &guard);
        let sent = |body| ToUpstream::new(body, &self.client, site.max_body).with_underscores(site.underscores);
        let request = request.map(sent).map(|body| body.holding(attempt));
        let id = guard.id().map(|id| owned_if_streaming(id, request.body()));
        guard.set_id(id);
        let answered = self.try_upstreams(request, route, (tried, first), &mut guard).await;
        let (answered, attempt) = match answered {
            Ok(answered) => answered,
            Err(fault) => {
                guard.note_fault(&fault);
                let mut response = failure::response(fault.failure()).map(|text| ToClient::local(text, guard));
                route.response_edits.apply(response.headers_mut());
                return self.settle_and_write_headers(outcome, response).await;
            }
        };
        if abandoned::has_event_stream(answered.headers()) {
            guard.note_endless();
        }
        guard.note_upstream_answered();
        let (mut parts, body) = answered.into_parts();
        headers::remove_hop_by_hop(&mut parts.headers);
        // hyper sets the version that it speaks with the client.
        let version = std::mem::replace(&mut parts.version, Version::HTTP_11);
        if site.adds_header(UpstreamHeader::Via) {
            headers::append_via(version, &mut parts.headers);
        }
        route.response_edits.apply(&mut parts.headers);
        guard.set_upstream(attempt);
        let response = Response::from_parts(parts, ToClient::upstream(body, guard));
        self.settle_and_write_headers(outcome, response).await
    }

    /// Turns a client's request into the one for the upstream.
    fn prepare(&self, request: &mut Request<ClientBody>, site: &Site, route: &Route, guard: &RequestGuard) {
        if let Some(authority) = request.uri().authority()
            && let Ok(host) = HeaderValue::try_from(authority.as_str())
        {
            request.headers_mut().insert(HOST, host);
        }
        let version = request.version();
        let map = request.headers_mut();
        headers::remove_hop_by_hop(map);
        headers::add_proxy_headers(version, map, site, &self.client, guard.id());
        if let Some(parent) = guard.span().traceparent().and_then(|parent| HeaderValue::try_from(parent).ok()) {
            map.insert(TRACEPARENT, parent);
            if !guard.span().continues_trace() {
                map.remove(TRACESTATE);
            }
        }
        route.request_edits.apply(map);
    }

    async fn try_upstreams(
        &self,
        mut request: UpstreamRequest,
        route: &Route,
        (mut tried, mut first): (Tried, Option<usize>),
        guard: &mut RequestGuard,
    ) -> Result<(Response<UpstreamBody>, UpstreamAttempt), Fault> {
        let tally = route.tally(self.worker.number);
        // An attempt over HTTP/2 moves it into the target.
        let host = request.headers().get(HOST).map(|host| owned_if_streaming(host, request.body()));
        // An attempt changes the path, and another upstream may need a different one.
        let original_uri = route.changes_paths().then(|| request.uri().clone());
        loop {
            let chosen = first.take().and_then(|number| Some((number, route.upstream(number)?)));
            let chosen = chosen.or_else(|| route.choose(&tried, self.worker.ticks.now()));
            let (number, upstream) = chosen.ok_or(Failure::NoRoute)?;
            if let Some(original_uri) = &original_uri {
                *request.uri_mut() = route.rewritten_uri(upstream, original_uri)?;
            }
            let target = &upstream.target;
            tried.push(number);
            guard.note_upstream(target);
            let left = usize::from(route.retries) + 1 - tried.len().min(usize::from(route.retries) + 1);
            match self.try_one(request, (route, target), guard).await {
                AttemptResult::Answered(response, attempt) => {
                    // Success is known only at the end of the response.
                    if route.eject.counts(response.status()) {
                        target.failed(&Fault::Status(response.status()), &route.eject, self.worker.ticks.now());
                    }
                    return Ok((response, attempt));
                }
                AttemptResult::Retry(retry, fault) => {
                    target.failed(&fault, &route.eject, self.worker.ticks.now());
                    let failure = fault.failure();
                    tally.note_failure(failure);
                    if left == 0 || would_fail_again(failure, route) {
                        return Err(fault);
                    }
                    tally.note_retry();
                    request = retry;
                    match &host {
                        Some(host) => request.headers_mut().insert(HOST, host.clone()),
                        None => request.headers_mut().remove(HOST),
                    };
                }
                AttemptResult::Failed(fault) => {
                    let failure = fault.failure();
                    tally.note_failure(failure);
                    if failure.is_upstreams() {
                        target.failed(&fault, &route.eject, self.worker.ticks.now());
                    }
                    return Err(fault);
                }
            }
        }
    }

    async fn try_one(
        &self,
        mut request: UpstreamRequest,
        (route, target): (&Route, &Arc<Target>),
        guard: &mut RequestGuard,
    ) -> AttemptResult {
        let worker = self.worker.number;
        target.begin();
        let mut attempt = UpstreamAttempt::new(target, route, worker);
        let may_repeat = request.body().is_empty() && request.method().is_idempotent();
        let repeatable = if may_repeat { Repeatable::Yes } else { Repeatable::No };
        if !may_repeat && target.has_shared(worker) {
            // The runtime polls the kernel for events and runs the tasks that they wake before it returns here. So a
            // connection that the upstream has closed by now is known to be closed.
            tokio::task::yield_now().await;
        }
        let conn = match target.take_idle(worker, self.worker.ticks.now(), &route.reuse, repeatable) {
            Some(conn) => UpstreamConn::H1(conn),
            None => {
                match Box::pin(connect::obtain(target, ConnUse::Request, (&self.worker, &self.client), route)).await {
                    Ok(conn) => conn,
                    Err(error) => return AttemptResult::Retry(request, error.into()),
                }
            }
        };
        let deadline = Arc::new(UpstreamDeadline::new(Arc::clone(&self.worker.ticks)));
        attempt.deadline = Some(Arc::clone(&deadline));
        request.body_mut().read_by(&deadline, route.timeout);
        match conn {
            UpstreamConn::H1(mut conn) => {
                self.set_target(&mut request, route, target, Version::HTTP_11);
                if !request.body().is_empty() && !reads_body(request.method().as_str()) {
                    conn.usage.end();
                    request.headers_mut().append(CONNECTION, HeaderValue::from_static("close"));
                }
                // On a new connection to the only upstream there is no retry: the request may be what broke the
                // connection.
                let is_retried = may_repeat && (conn.usage.is_used() || route.has_several());
                let repeatable = if is_retried { Repeatable::Yes } else { Repeatable::No };
                let (pool, deadline_of_body) = (attempt.pool(&self.worker.ticks), Arc::clone(&deadline));
                let sending = async move {
                    let answer = lane::send(conn, request, repeatable, (Some(pool), deadline_of_body)).await;
                    answer.map(|response| response.map(UpstreamBody::Http1))
                };
                self.await_response(sending, deadline, (attempt, guard)).await
            }
            UpstreamConn::H2(mut sender, stream_permit) => {
                attempt.stream_permit = Some(stream_permit);
                self.set_target(&mut request, route, target, Version::HTTP_2);
                let copy = may_repeat.then(|| request.clone_without_body());
                let sending = async move {
                    match sender.try_send_request(request).await {
                        Ok(response) => Ok(response.map(UpstreamBody::Http2)),
                        Err(error) => Err(failed(error, copy)),
                    }
                };
                Box::pin(self.await_response(sending, deadline, (attempt, guard))).await
            }
        }
    }

    /// Waits for the head of a response. A request with a permit that is given up before keeps its permit until the
    /// upstream is done.
    async fn await_response(
        &self,
        sending: impl Future<Output = SendResult> + Send + 'static,
        deadline: Arc<UpstreamDeadline>,
        (mut attempt, guard): (UpstreamAttempt, &mut RequestGuard),
    ) -> AttemptResult {
        let late = || AttemptResult::Failed(Failure::UpstreamTimeout.into());
        let answered = match guard.take_permit() {
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
                    Some(ResponseStart::ClientFailed(failure)) => {
                        sent.note_broken_body(failure);
                        return AttemptResult::Failed(failure.into());
                    }
                    Some(ResponseStart::Answered(answered)) => {
                        let Some((returned, permit)) = sent.into_parts() else {
                            return AttemptResult::Failed(Failure::Disconnected.into());
                        };
                        attempt = returned;
                        guard.keep_permit(Some(permit));
                        answered
                    }
                }
            }
        };
        match (answered, deadline.body_failure()) {
            // No upgrade was requested, and HTTP/2 has none.
            (Ok(response), _) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                AttemptResult::Failed(Failure::BadAnswer.into())
            }
            (Ok(response), _) => AttemptResult::Answered(response, attempt),
            (Err(_), Some(failure)) => AttemptResult::Failed(failure.into()),
            (Err(error), None) => error.into(),
        }
    }

    /// Sets the request line and the host for an upstream.
    fn set_target(&self, request: &mut UpstreamRequest, route: &Route, target: &Target, version: Version) {
        // HTTP/1.0 requests may lack it, HTTP/1.1 requests may not.
        if route.host == HostHeader::Upstream || !request.headers().contains_key(HOST) {
            request.headers_mut().insert(HOST, target.host.clone());
        }
        if version == Version::HTTP_2 {
            // An earlier attempt over HTTP/1 added it.
            request.headers_mut().remove(CONNECTION);
            return target.set_http2_target(request);
        }
        *request.version_mut() = version;
        headers::set_connection_options(request.headers_mut());
        // HTTP/1 upstreams get no trailers, so none are announced.
        request.headers_mut().remove(TRAILER);
        if request.uri().scheme().is_some() || request.uri().authority().is_some() {
            let path = request.uri().path_and_query().cloned();
            *request.uri_mut() = path.map_or_else(|| Uri::from_static("/"), Uri::from);
        }
    }
}

/// Returns a header value to keep until the response. While a body is uploaded, it is copied.
fn owned_if_streaming(value: &HeaderValue, body: &ToUpstream) -> HeaderValue {
    if body.is_empty() { value.clone() } else { copied(value) }
}

/// Copies a value. All values of a request share the buffer of its head, and an upload may take long: the copy lets the
/// buffer be freed once the head is forwarded.
pub(super) fn copied(value: &HeaderValue) -> HeaderValue {
    HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_invalid| value.clone())
}

/// Returns whether another attempt is pointless: the route has one upstream, and it cannot be reached.
pub(in super::super) fn would_fail_again(failure: Failure, route: &Route) -> bool {
    let is_unreached = matches!(failure, Failure::CannotConnect | Failure::BadCertificate | Failure::ConnectTimeout)
        || failure.is_gateways();
    is_unreached && !route.has_several()
}

/// Returns the error of a request over HTTP/2 that could not be sent or got no valid response. A request that was not
/// sent can be retried. One that was sent can be retried if there is a copy, unless its response was invalid: it would
/// be the same again.
fn failed(mut error: TrySendError<UpstreamRequest>, copy: Option<UpstreamRequest>) -> SendError {
    let unsent = error.take_message();
    let error = error.error();
    let hung_up = || match TlsFault::of_connection(error) {
        Some(fault) => ConnectError::Tls(fault).into(),
        None => Fault::from(Failure::Disconnected),
    };
    let (fault, retry) = match RejectedHead::of(error) {
        _ if unsent.is_some() => (hung_up(), unsent),
        Some(RejectedHead::OfThisRequest) => (Failure::RefusedAnswerHead.into(), None),
        Some(RejectedHead::OfAnotherRequest) => (Failure::LongAnswerHead.into(), copy),
        None => (hung_up(), copy),
    };
    SendError { fault, retry: retry.map(Box::new) }
}

/// The response whose head our HTTP/2 implementation rejected.
enum RejectedHead {
    /// The response to this request. An oversized head and an invalid one look the same here.
    OfThisRequest,
    /// A response on the same connection, oversized enough to end the connection. It is unknown which
    /// request it belongs to.
    OfAnotherRequest,
}

impl RejectedHead {
    fn of(error: &hyper::Error) -> Option<Self> {
        let error: &h2::Error = error.source()?.downcast_ref()?;
        match error.reason()? {
            _ if !error.is_library() => None,
            h2::Reason::PROTOCOL_ERROR if error.is_reset() => Some(Self::OfThisRequest),
            // There are other causes for this reason, and only the message distinguishes them.
            h2::Reason::ENHANCE_YOUR_CALM if error.is_go_away() => {
                let text = error.to_string();
                TOO_LONG.iter().any(|reason| text.contains(reason)).then_some(Self::OfAnotherRequest)
            }
            _ => None,
        }
    }
}

/// The messages of h2 when it ends a connection because of an oversized head.
const TOO_LONG: [&str; 2] = ["header_list_way_too_large", "too_many_continuations"];

trait CloneWithoutBody {
    fn clone_without_body(&self) -> Self;
}

impl CloneWithoutBody for UpstreamRequest {
    fn clone_without_body(&self) -> Self {
        let mut copy = Request::new(ToUpstream::Empty);
        *copy.method_mut() = self.method().clone();
        *copy.uri_mut() = self.uri().clone();
        *copy.version_mut() = self.version();
        *copy.headers_mut() = self.headers().clone();
        copy
    }
}
