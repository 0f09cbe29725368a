//! What the other crates of this workspace need of this one and users do not.
//!
//! **Not part of the public API.** Anything in here can change or disappear in any release, and is not covered by
//! semantic versioning. Use [`Gate`](crate::Gate) and [`RuleSet`](crate::RuleSet) instead.

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
pub use crate::gate::CachedGate;
/// Checks of the tower layer, which keeps less of a decision than an outcome.
pub mod layer {
    pub use crate::facts::Finders;
    pub use crate::gate::check::RemoteCheck;
    pub use crate::gate::check::by_address::{Admitted, ByAddress, Unchecked};
    pub use crate::gate::settle::{CostMistake, ReportedCost};
}
#[cfg(feature = "file")]
pub use crate::gate::report::{CountedAs, CountedHit};
/// What the rule file needs beyond the rules that users write in code.
#[cfg(feature = "file")]
pub mod config {
    pub use crate::envoy::{Child, Counting, DescriptorNode, joined};
    pub use crate::expression_errors::ErrorCount;
    pub use crate::matching::header_pattern;
    pub use crate::named_key::{InvalidPart, counted};
    pub use crate::pattern::{FILE_TOO_LARGE, MAX_PATTERN_BYTES, PatternBudget, PatternError};
    pub use crate::request::{Token, Tokens};
    pub use crate::response::CountWhen;
    pub use crate::rule::{TokenUse, check_in_flight};
    pub use crate::set::MAX_KEY_PARTS;
    pub use crate::shadowing::{Shadowed, can_begin_with, shadowed};

    /// Expressions.
    pub mod cel {
        pub use crate::cel::{EvaluationError, Expression, ExpressionError, Input, TextPosition, UnguardedRead};
    }
    /// Checks of rules.
    pub mod checks {
        pub use crate::checks::{
            PLAN_MISSING, after_with_queue, constant_cost, cost_fits, every_address_exempt, key_name,
            missing_without_key, no_effect_with_queue, override_fits,
        };
    }
    /// Signed tokens.
    pub mod jwt {
        pub use crate::jwt::{Algorithm, Claims, InvalidKeys, TokenSource, Verification, Verifier};
    }
}
/// Lookup of descriptors in configuration of envoyproxy/ratelimit.
#[cfg(feature = "file")]
pub mod envoy {
    pub use crate::envoy::{DescriptorLimit, DescriptorMatch, Domains, FoundLimit, Unit, matches_wildcard};
}
pub use crate::client::hop_address;
#[cfg(feature = "file")]
pub use crate::header_fact::{HeaderFact, HeaderFacts};
pub use crate::normal::{
    CleanPath, PathReadings, Unreadable, check_host, check_method, is_padded, is_same_host, without_case,
    without_names_of,
};
#[cfg(feature = "file")]
pub use crate::regular_file::{open_regular, read_bounded, read_up_to};
