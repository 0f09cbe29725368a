//! What the other crates of this workspace need of this one and users do not.
//!
//! **Not part of the public API.** Anything in here can change or disappear in any release, and is not covered by
//! semantic versioning.

pub use crate::algorithm::refill::Refill;
pub use crate::algorithm::{Charge, MAX_QUOTA};
pub use crate::clock::wall_now;
pub use crate::decision::{Admission, CombinedDecision, Generation, Verdict};
pub use crate::invisible::is_control_or_format;
pub use crate::limit::check_name;
pub use crate::limiter::hashed::{FewHits, hit_of_limit};
pub use crate::limiter::reservation::ReservedCharge;
pub use crate::limiter::{CombinedHits, HashedHits, Place};
pub use crate::open_charges::Held;
pub use crate::rate::parse_period;
pub use crate::store::memory::HashedHit;
pub use crate::sync::Mutex;
pub use crate::units::whole_micros;

/// Hits on Redis.
#[cfg(feature = "redis")]
pub mod redis {
    pub use crate::redis::hits::{
        cost, decided, key_name, key_parts, looks, may_be_pending, only, set_cost, set_decided, set_receipts,
        take_from_store,
    };
    pub use crate::redis::{RedisHit, RedisHits};
}
/// The readers of replies of Redis, for the fuzzer.
#[cfg(feature = "redis")]
pub mod redis_replies {
    pub use crate::redis::fuzzing::{ReplyScanner, read_reply};
}
