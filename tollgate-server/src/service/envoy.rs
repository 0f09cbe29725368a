//! Descriptors of a request, looked up in configuration of envoyproxy/ratelimit.
//!
//! The configuration is a part of the gate's rules, so that both change together: look up and check on the same
//! [`Gate::pinned`](tollgate_rules::Gate::pinned). A limit in quota mode that is exceeded denies the request only if all
//! descriptors in quota mode exceed theirs. Otherwise the request is decided, and counted, by the remaining descriptors.

use prost_types::value::Kind;
use prost_types::{ListValue, Struct};
use serde_json::Value;
use tollgate_rules::RuleSet;
use tollgate_rules::internal::envoy::{DescriptorMatch, Unit};

use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as ProtoUnit;

/// Returns what the configuration says about each descriptor, in their order. Limits that another one replaces are
/// found.
pub(crate) fn find_all<'d>(
    rules: &RuleSet,
    domain: &str,
    descriptors: &'d [RateLimitDescriptor],
) -> Vec<DescriptorMatch<'d>> {
    let entries = |descriptor: &'d RateLimitDescriptor| {
        descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str()))
    };
    rules.domains().find_all(domain, descriptors.iter().map(entries))
}

/// Returns the unit of a limit for a response.
pub(crate) fn unit(unit: Option<Unit>) -> ProtoUnit {
    match unit {
        None => ProtoUnit::Unknown,
        Some(Unit::Second) => ProtoUnit::Second,
        Some(Unit::Minute) => ProtoUnit::Minute,
        Some(Unit::Hour) => ProtoUnit::Hour,
        Some(Unit::Day) => ProtoUnit::Day,
        Some(Unit::Week) => ProtoUnit::Week,
        Some(Unit::Month) => ProtoUnit::Month,
        Some(Unit::Year) => ProtoUnit::Year,
    }
}

/// Returns the metadata of a limit for a response, or `None` if it is not a map.
pub(crate) fn metadata(metadata: &Value) -> Option<Struct> {
    match value(metadata).kind? {
        Kind::StructValue(fields) => Some(fields),
        _ => None,
    }
}

fn value(from: &Value) -> prost_types::Value {
    let kind = match from {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(values) => Kind::ListValue(ListValue { values: values.iter().map(value).collect() }),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, field)| (name.clone(), value(field))).collect();
            Kind::StructValue(Struct { fields })
        }
    };
    prost_types::Value { kind: Some(kind) }
}
