//! The limits of envoyproxy/ratelimit's rule files, found by domain and descriptor.
#![allow(dead_code, reason = "filled by rule files of envoyproxy/ratelimit")]

use std::sync::Arc;

use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;

/// The domains of all rule files. The gate has a rule for every limit in them.
#[derive(Default)]
pub(crate) struct Domains {}

/// The entry of a rule file that applies to a descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// The limit, or `None` if the entry is `unlimited`.
    pub(crate) limit: Option<FoundLimit>,
    /// The name by which other entries replace this one.
    pub(crate) name: Option<Arc<str>>,
    /// The names of the entries that are not checked beside this one.
    pub(crate) replaces: Arc<[Box<str>]>,
    /// For the dynamic metadata of a response.
    pub(crate) metadata: Option<Arc<prost_types::Struct>>,
}

/// The limit of an entry.
#[derive(Clone, Debug)]
pub(crate) struct FoundLimit {
    /// The name of the rule of the gate.
    pub(crate) rule: Arc<str>,
    /// The key to check by that rule.
    pub(crate) key: Vec<u8>,
    pub(crate) mode: Mode,
    /// The numbers of the file, for responses.
    pub(crate) requests_per_unit: u32,
    pub(crate) unit: Unit,
}

/// The effect of a limit that is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Denies the request.
    Enforced,
    /// Denies nothing. The rule of the gate is a shadow rule.
    Shadow,
    /// Denies the request if all its descriptors with this mode exceed their limits.
    Quota,
}

impl Domains {
    /// Returns the entry that applies to a descriptor, or `None` if no rule file has the domain or an entry for it.
    pub(crate) fn find(&self, _domain: &str, _descriptor: &RateLimitDescriptor) -> Option<Found> {
        None
    }
}
