//! Parts of the library that the server of this workspace uses to avoid allocations and double parsing.
//!
//! **Not part of the public API.** Anything in here can change or disappear in any release, and is not covered by
//! semantic versioning. Use [`Gate`](crate::Gate), [`rules`](crate::rules) and [`http`](crate::http) instead.

/// Demand: the limits that clients would need, and limits that learn from it.
#[cfg(feature = "file")]
pub mod demand {
    pub use crate::demand::{
        Activity, Commit, Cover, Demand, Evaluation, LearnSettings, LearnedState, Learner, Learning, LearningLimit,
        LearningLimits, Measure, Needs, Observer, Phase, Sketch, TICK, candidate_rates,
    };
}
/// The keys that limits deny or nearly deny.
#[cfg(feature = "file")]
pub mod limited {
    pub use crate::limited_keys::{
        KeyTexts, LimitedKey, LimitedKeys, LimitedKind, TakenKey, TakenKeys, TakenLimit, key_hash,
    };
}
#[cfg(feature = "rules")]
pub use crate::gate::CachedGate;
/// Checks of the tower layer, which keeps less of a decision than an outcome.
#[cfg(feature = "rules")]
pub mod layer {
    pub use crate::gate::{Admitted, ByAddress, CostMistake, RemoteCheck, ReportedCost};
    pub use crate::http::UNKNOWN_ADDRESS;
    pub use crate::rules::Finders;
}
#[cfg(feature = "file")]
pub use crate::gate::report::{CountedAs, CountedHit};
/// Lookup of descriptors in configuration of envoyproxy/ratelimit.
#[cfg(feature = "file")]
pub mod envoy {
    pub use crate::rules::envoy::{DescriptorLimit, DescriptorMatch, Domains, FoundLimit, Unit, matches_wildcard};
}
/// The readers of replies of Redis, for the fuzzer.
#[cfg(all(feature = "file", feature = "redis"))]
pub mod redis_replies {
    pub use crate::redis::fuzzing::{ReplyScanner, read_reply};
}
pub use crate::http::headers::{HeaderLine, HeaderValues};
pub use crate::http::headers::{is_folded_by_servers, is_forwarding_header, reads_as};
pub use crate::http::response::ReusedResponse;
pub use crate::http::response::WrittenResponse;
#[cfg(feature = "file")]
pub use crate::regular_file::{open_regular, read_bounded, read_up_to};
#[cfg(feature = "rules")]
pub use crate::rules::client::hop_address;
#[cfg(feature = "file")]
pub use crate::rules::header_fact::{HeaderFact, HeaderFacts};
#[cfg(feature = "rules")]
pub use crate::rules::normal::{
    CleanPath, PathReadings, Unreadable, check_host, check_method, is_padded, is_same_host, without_case,
    without_names_of,
};

/// Returns whether a character controls the text around it, and is escaped in messages.
#[must_use]
pub fn is_control_or_format(letter: char) -> bool {
    crate::invisible::is_control_or_format(letter)
}
