//! Responses to refused requests, and the handling of their bodies.

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use hyper::body::Body;
use tollgate::Outcome;
use tollgate::http::{Refusal, is_grpc};
use tollgate::internal::Unreadable;
use tollgate::rules::Facts;

use super::super::body::{ClientBody, ToClient, ToUpstream};
use super::super::failure::{self, Failure};
use super::{Exchange, RequestGuard, bodiless};

/// The maximum length of an unwanted body that is read, so that the connection stays usable. A longer body closes the
/// connection.
pub(in super::super) const MAX_DRAINED_BYTES: usize = 256 << 10;

/// Returns whether a limit refused a request as one that no well-behaved client sends. Several cookies or parameters of
/// one name are common.
pub(in super::super) fn is_malformed(outcome: &Outcome) -> bool {
    matches!(outcome.refusal(), Some(Refusal::Unreadable(request)) if request.reason == "duplicate_header")
}

impl Exchange {
    /// Returns the response of a limit that refuses the request.
    pub(super) fn refuse(
        &self,
        request: Request<ClientBody>,
        outcome: &Outcome,
        guard: RequestGuard,
    ) -> Response<ToClient> {
        if is_malformed(outcome) {
            self.worker.strike(&self.client.add_to(Facts::new("", "/").headers(request.headers())));
        }
        let refusal = if is_grpc(request.headers()) {
            outcome.grpc_response().map(|response| response.map(|()| Bytes::new()))
        } else {
            outcome.response(request.headers())
        };
        let refusal = refusal.unwrap_or_default();
        let refusal = if request.method() == Method::HEAD { bodiless(refusal) } else { refusal };
        self.drain(request.into_body());
        refusal.map(|text| ToClient::local(text, guard))
    }

    /// Returns the response to a request with more than one interpretation.
    pub(super) fn refuse_unreadable(
        &self,
        request: Request<ClientBody>,
        problem: &Unreadable,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        guard.note_reason(problem.reason());
        self.worker.tally.note_unreadable(problem.number());
        self.worker.strike(&self.client.add_to(Facts::new("", "/").headers(request.headers())));
        self.drain(request.into_body());
        failure::unreadable_response(problem).map(|text| ToClient::local(text, guard))
    }

    /// Refuses a request before any limit is checked. A malformed request counts as a strike.
    pub(super) fn refuse_malformed(
        &self,
        request: Request<ClientBody>,
        failure: Failure,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        if let Some(reason) = failure.reason() {
            guard.note_reason(reason);
        }
        if failure.is_malformed_request() {
            self.worker.strike(&self.client.add_to(Facts::new("", "/").headers(request.headers())));
        }
        self.fail(request.into_body(), failure, guard)
    }

    /// Reads and discards a body in the background, so that it does not delay the response.
    pub(super) fn drain(&self, body: ClientBody) {
        // Nothing is left to read, or too much.
        if body.is_end_stream() || body.size_hint().lower() > MAX_DRAINED_BYTES as u64 {
            return;
        }
        let client = std::sync::Arc::clone(&self.client);
        tokio::spawn(async move {
            let (mut body, mut left) = (ToUpstream::new(body, &client, u64::MAX), MAX_DRAINED_BYTES);
            while let Some(Ok(frame)) = body.frame().await {
                match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                    Some(rest) => left = rest,
                    None => return,
                }
            }
        });
    }
}
