//! [`LimitDecision`] as an axum extractor.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use super::LimitDecision;

/// The rejection of a [`LimitDecision`] that the request does not have. It is a programming error, answered with 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoLimitDecision;

impl std::fmt::Display for NoLimitDecision {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(
            "no rate limit decision in the request's extensions: call `share_decision` on a `RateLimitLayer` around this \
             handler, or extract `Option<LimitDecision>` if not every request meets a limit",
        )
    }
}

impl std::error::Error for NoLimitDecision {}

impl IntoResponse for NoLimitDecision {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

impl<S: Sync> FromRequestParts<S> for LimitDecision {
    type Rejection = NoLimitDecision;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoLimitDecision> {
        parts.extensions.get::<Self>().cloned().ok_or(NoLimitDecision)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for LimitDecision {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}
