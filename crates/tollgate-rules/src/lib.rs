//! Rules: which limits apply to a request, with which keys, and at what cost.
//!
//! A [`Rule`] is a limit with the requests it applies to ([`Match`]), their key ([`KeyPart`]) and [`Cost`], and with
//! exemptions, blocks and overrides. A [`RuleSet`] is a compiled set of rules. A server describes a request as
//! [`Facts`], and the rule set turns the facts into hits.
//!
//! ```
//! use tollgate::{FixedWindow, Limit, MINUTE, Rate, TokenBucket};
//! use tollgate_rules::{Facts, Gate, KeyPart, Match, Rule, RuleSet};
//!
//! let per_ip = Rule::new(Limit::new("per-ip", TokenBucket::new(100, Rate::per_second(10)))?).key(KeyPart::ip());
//! let logins = Rule::new(Limit::new("logins", FixedWindow::new(5, MINUTE))?)
//!     .matching(Match::everything().path("/login").method("POST"))
//!     .key(KeyPart::ip());
//! let gate = Gate::in_memory(RuleSet::builder().rule(per_ip).rule(logins).build()?)?;
//!
//! let facts = Facts::new("POST", "/login").peer([192, 0, 2, 7].into());
//! let outcome = gate.decide_now(&facts).expect("the store is in memory");
//! assert_eq!(outcome.limit(), Some("logins"));
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! `docs/rules.md` in the repository describes the same rules in a file, and `docs/normal-form.md` how requests are
//! read.
//!
//! A [`Gate`] is a rule set with a store: it finds the limits of a request, checks them all or nothing, and describes the
//! response. Its rules can be replaced while it runs, and counts survive.
//!
//! This is a separate crate because limits that depend on requests need HTTP, and limits alone do not. Deliberately not
//! here: a server, and the rule file, which is the crate `tollgate-config`.

// Shows on each item the feature that it needs. Only docs.rs sets `docsrs`, with a nightly compiler.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "file"), allow(unreachable_pub, dead_code, reason = "only the rule file uses some items"))]

#[cfg(feature = "file")]
pub(crate) mod cel;
mod certificate;
pub(crate) mod checks;
mod claims;
pub(crate) mod client;
mod coverage;
#[cfg(feature = "file")]
mod demand;
#[cfg(feature = "file")]
pub(crate) mod envoy;
pub(crate) mod expression_errors;
pub(crate) mod facts;
mod gate;
mod head;
#[cfg(feature = "file")]
pub(crate) mod header_fact;
mod host;
mod index;
#[doc(hidden)]
pub mod internal;
#[cfg(feature = "file")]
pub(crate) mod jwt;
mod key_map;
pub(crate) mod key_part;
#[cfg(feature = "file")]
mod limited_keys;
pub(crate) mod matching;
pub(crate) mod named_key;
pub(crate) mod networks;
pub(crate) mod normal;
mod path;
#[cfg(feature = "file")]
pub(crate) mod pattern;
#[cfg(feature = "file")]
mod regular_file;
pub(crate) mod request;
pub(crate) mod response;
mod routes;
pub(crate) mod rule;
pub(crate) mod set;
#[cfg(feature = "file")]
pub(crate) mod shadowing;

pub use self::certificate::{Certificate, CertificateField};
pub use self::client::{ForwardingHeader, TrustedProxies};
pub(crate) use self::expression_errors::FailedExpressions;
pub use self::expression_errors::{ExpressionField, FailedExpression};
pub use self::facts::Facts;
pub use self::gate::{
    Check, Checks, Explanation, Gate, InFlightPermit, JointCheck, KeyBan, Outcome, RuleExplained, RuleState,
    StoreUnavailable,
};
#[cfg(feature = "file")]
pub use self::gate::{MAX_RESERVATION, ReservationError, Reserved};
pub use self::host::HostGlob;
pub use self::key_part::KeyPart;
pub use self::matching::Match;
pub use self::named_key::{KeyError, NamedRule};
pub(crate) use self::named_key::{KeyReadings, NamedKey, OtherKeys, with_key};
pub use self::networks::{InvalidNetwork, Networks};
#[cfg(feature = "file")]
pub(crate) use self::normal::ReadErrors;
pub use self::normal::{EncodedSlash, PathCase, PathParameters, PathReading};
pub use self::path::{InvalidGlob, PathGlob};
pub use self::request::{Request, TokenStatus};
pub use self::response::StatusSet;
pub use self::routes::Routes;
pub use self::rule::{Cost, Listing, Missing, Mode, Rule};
pub(crate) use self::set::PerAddress;
#[doc(hidden)]
pub use self::set::UnknownPlan;
pub(crate) use self::set::{Phase, Refused, RuleHit, RuleMatch};
pub use self::set::{RuleSet, RuleSetBuilder};
pub use tollgate;
pub use tollgate_http;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
