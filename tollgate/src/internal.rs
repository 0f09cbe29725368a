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
pub use crate::algorithm::MAX_QUOTA;
#[cfg(feature = "rules")]
pub use crate::gate::CachedGate;
/// Checks of the tower layer, which keeps less of a decision than an outcome.
#[cfg(feature = "rules")]
pub mod layer {
    pub use crate::gate::check::RemoteCheck;
    pub use crate::gate::check::by_address::{Admitted, ByAddress, Unchecked};
    pub use crate::gate::settle::{CostMistake, ReportedCost};
    pub use crate::http::refusal::UNKNOWN_ADDRESS;
    pub use crate::rules::facts::Finders;
}
#[cfg(feature = "file")]
pub use crate::gate::report::{CountedAs, CountedHit};
/// What the rule file needs beyond the rules that users write in code.
#[cfg(feature = "file")]
pub mod config {
    pub use crate::http::refusal::Challenge;
    #[cfg(feature = "redis")]
    pub use crate::redis::check_pem_file;
    pub use crate::rules::envoy::{Child, Counting, DescriptorNode, joined};
    pub use crate::rules::expression_errors::ErrorCount;
    pub use crate::rules::matching::header_pattern;
    pub use crate::rules::named_key::{InvalidPart, counted};
    pub use crate::rules::pattern::{FILE_TOO_LARGE, MAX_PATTERN_BYTES, PatternBudget, PatternError};
    pub use crate::rules::request::{Token, Tokens};
    pub use crate::rules::response::CountWhen;
    pub use crate::rules::rule::{TokenUse, check_in_flight};
    pub use crate::rules::set::MAX_KEY_PARTS;
    pub use crate::rules::shadowing::{Shadowed, can_begin_with, shadowed};

    /// Expressions.
    pub mod cel {
        pub use crate::rules::cel::{Expression, ExpressionError, Input, TextPosition, UnguardedRead};
    }
    /// Checks of rules.
    pub mod checks {
        pub use crate::rules::checks::{
            PLAN_MISSING, after_with_queue, constant_cost, cost_fits, every_address_exempt, key_name,
            missing_without_key, no_effect_with_queue, override_fits,
        };
    }
    /// Signed tokens.
    pub mod jwt {
        pub use crate::rules::jwt::{Algorithm, Claims, InvalidKeys, TokenSource, Verification, Verifier};
    }
}
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
pub use crate::limit::check_name;
pub use crate::rate::parse_period;
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
