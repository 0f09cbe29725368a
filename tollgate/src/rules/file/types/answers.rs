//! Which answers spend a limit.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use crate::rules::file::forms::{StatusClass, schema_of};

/// Which answers spend a limit.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
#[non_exhaustive]
pub enum CountRule {
    /// By a word.
    Named(CountName),
    /// Those of these statuses and classes: `[401, 5xx]`.
    Listed(#[schemars(length(min = 1))] Vec<StatusRule>),
}

/// Which answers spend a limit, in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CountName {
    /// Every answer.
    All,
    /// Those of status 400 and above.
    Failures,
    /// Those of a status below 400.
    Successes,
}

/// A status, or a class of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum StatusRule {
    /// One status.
    Status(u64),
    /// All that begin with the same digit.
    Class(StatusClass),
}

/// The statuses that answers have.
pub(in crate::rules::file) const STATUSES: std::ops::RangeInclusive<u64> = 100..=599;

/// Written out, so that a list of them is seen to be one of single values.
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
