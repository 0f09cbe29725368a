//! Requests that may not pass, and what becomes of their bodies.

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tollgate::Outcome;
use tollgate::http::{Refusal, is_grpc};
use tollgate::internal::Unreadable;
use tollgate::rules::Facts;

use super::super::body::ToClient;
use super::super::failure::{self, Failure};
use super::{Exchange, RequestGuard, bodiless};

/// A body that nobody wants is read up to here, so that the connection can go on; a longer one ends the connection.
const MAX_DRAINED_BYTES: usize = 256 << 10;

/// Whether a limit refused a request as one that no honest client sends. A browser may have several cookies of one name,
/// and a page several parameters.
pub(in super::super) fn is_malformed(outcome: &Outcome) -> bool {
    matches!(outcome.refusal(), Some(Refusal::Unreadable(request)) if request.reason == "duplicate_header")
}

impl Exchange {
    /// Tells the client why its request does not pass.
    pub(super) fn refuse(
        &self,
        request: Request<Incoming>,
        outcome: &Outcome,
        guard: RequestGuard,
    ) -> Response<ToClient> {
        if is_malformed(outcome) {
            self.worker.strike(&self.client.with_client(Facts::new("", "/").headers(request.headers())));
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

    /// Tells the client what of its request cannot be read in one way.
    pub(super) fn refuse_unreadable(
        &self,
        request: Request<Incoming>,
        problem: &Unreadable,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        guard.note_reason(problem.reason());
        self.worker.tally.note_unreadable(problem.number());
        self.worker.strike(&self.client.with_client(Facts::new("", "/").headers(request.headers())));
        self.drain(request.into_body());
        failure::unreadable_response(problem).map(|text| ToClient::local(text, guard))
    }

    /// Refuses a request before any limit has seen it. A malformed one counts towards bans of its sender.
    pub(super) fn refuse_malformed(
        &self,
        request: Request<Incoming>,
        failure: Failure,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        if let Some(reason) = failure.reason() {
            guard.note_reason(reason);
        }
        if failure.is_malformed_request() {
            self.worker.strike(&self.client.with_client(Facts::new("", "/").headers(request.headers())));
        }
        self.fail(request.into_body(), failure, guard)
    }

    /// Reads what nobody wants, beside the answer, so that neither waits for the other.
    pub(super) fn drain(&self, body: Incoming) {
        // Nothing is left to read, or too much.
        if body.is_end_stream() || body.size_hint().lower() > MAX_DRAINED_BYTES as u64 {
            return;
        }
        let client = std::sync::Arc::clone(&self.client);
        tokio::spawn(async move {
            let (mut body, mut left) =
                (super::super::body::ToUpstream::new(body, &client, u64::MAX), MAX_DRAINED_BYTES);
            while let Some(Ok(frame)) = body.frame().await {
                match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                    Some(rest) => left = rest,
                    None => return,
                }
            }
        });
    }
}
