//! The responses that a limit counts.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use crate::rules::file::forms::{StatusClass, schema_of};

/// The responses that a limit counts.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
#[non_exhaustive]
pub enum CountRule {
    /// All, failures or successes.
    Named(CountName),
    /// The statuses and classes of statuses: `[401, 5xx]`.
    Listed(#[schemars(length(min = 1))] Vec<StatusRule>),
}

/// A named set of responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CountName {
    /// Every response.
    All,
    /// Responses with status 400 and above.
    Failures,
    /// Responses with a status below 400.
    Successes,
}

/// A status, or a class of statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum StatusRule {
    /// A single status.
    Status(u64),
    /// Every status with the same first digit.
    Class(StatusClass),
}

/// The statuses of responses.
pub(in crate::rules::file) const STATUSES: std::ops::RangeInclusive<u64> = 100..=599;

/// Written out, so that `shape` sees a list of single values.
impl JsonSchema for StatusRule {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "StatusRule".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let status = json_schema!({ "type": "integer", "minimum": STATUSES.start(), "maximum": STATUSES.end() });
        json_schema!({ "anyOf": [status, schema_of::<StatusClass>()] })
    }
}
