//! The wall clock, for moments that somebody else has written down, such as the expiry of a token.
//!
//! The clock of decisions is not for that: it only goes forward at the pace of this machine, and a machine that was
//! asleep, or whose clock was set right, would keep expired tokens alive.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::units::Timestamp;

/// The time of day, as the operating system has it now.
#[expect(clippy::disallowed_methods, reason = "this is part of the module that may read clocks")]
pub(crate) fn now() -> Timestamp {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(Timestamp::EPOCH, |since| Timestamp::EPOCH.saturating_add(since))
}
