//! The wall clock, for times from other machines, such as the expiry of a token.
//!
//! The limiter's time does not fit: it follows the monotonic clock, so after a sleep or a correction of the wall clock
//! it would accept expired tokens.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::units::Timestamp;

/// Returns the time of the operating system's wall clock.
#[expect(clippy::disallowed_methods, reason = "this is part of the module that may read clocks")]
pub(crate) fn now() -> Timestamp {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(Timestamp::EPOCH, |since| Timestamp::EPOCH.saturating_add(since))
}
