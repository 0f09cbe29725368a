//! Responses to refused requests, and the handling of their bodies.

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Body;
use tollgate::Outcome;
use tollgate::http::Refusal;
use tollgate::internal::Unreadable;
use tollgate::rules::Facts;

use super::super::body::{ClientBody, ToClient, ToUpstream};
use super::super::failure::{self, Failure};
use super::super::framing::Ambiguity;
use super::super::head::RequestHead;
use super::super::request_guard::RequestGuard;
use super::{Exchange, bodiless};

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
        (head, body): (&RequestHead<'_>, ClientBody),
        outcome: &Outcome,
        guard: RequestGuard,
    ) -> Response<ToClient> {
        if is_malformed(outcome) {
            self.strike(head);
        }
        let refusal = if head.is_grpc {
            outcome.grpc_response().map(|response| response.map(|()| Bytes::new()))
        } else {
            outcome.response(head.headers.lines)
        };
        let refusal = refusal.unwrap_or_default();
        let refusal = if head.is_head() { bodiless(refusal) } else { refusal };
        self.drain(body);
        refusal.map(|text| ToClient::local(text, guard))
    }

    /// Returns the response to a request with more than one interpretation.
    pub(super) fn refuse_unreadable(
        &self,
        (head, body): (&RequestHead<'_>, ClientBody),
        problem: &Unreadable,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        guard.note_reason(problem.reason());
        self.worker.tally.note_unreadable(problem.number());
        self.strike(head);
        self.drain(body);
        failure::unreadable_response(problem).map(|text| ToClient::local(text, guard))
    }

    /// Refuses a request before any limit is checked.
    pub(super) fn refuse_malformed(
        &self,
        (head, body): (&RequestHead<'_>, ClientBody),
        failure: Failure,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        if failure == Failure::UnderscoreHeader {
            self.worker.tally.note_ambiguity(Ambiguity::UnderscoreHeader);
        }
        if let Some(reason) = failure.reason() {
            guard.note_reason(reason);
        }
        if failure.is_malformed_request() {
            self.strike(head);
        }
        self.fail(body, failure, guard)
    }

    /// Counts a malformed request as a strike against the client.
    fn strike(&self, head: &RequestHead<'_>) {
        self.worker.strike(&self.client.peer().add_to(Facts::new("", "/").headers(head.headers.lines)));
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
