//! The limit in force when nobody configured one: 10 requests per minute for each user.

use axum::http::HeaderMap;
use tollgate::{InvalidLimit, Limit, MINUTE, SlidingWindowCounter};

pub(crate) const NAME: &str = "per-user";
pub(crate) const DESCRIPTION: &str = "limit per-user: 10 per 60 s (sliding_window_counter), key header:x-user-id";

/// Requests without the header share this key.
const MISSING: &[u8] = b"anonymous";

pub(crate) fn limit() -> Result<Limit, InvalidLimit> {
    Limit::new(NAME, SlidingWindowCounter::new(10, MINUTE))
}

/// The key that a request with these headers falls under: `header:x-user-id` in a rule file.
pub(crate) fn key(headers: &HeaderMap) -> &[u8] {
    headers.get("x-user-id").map_or(MISSING, |value| value.as_bytes())
}
