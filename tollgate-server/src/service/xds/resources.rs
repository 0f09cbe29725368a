//! Reads the resources of a response into the form that files have, too.

use prost::Message;
use prost_types::value::Kind;
use prost_types::{Any, Struct};
use serde_json::{Map, Number, Value};
use tollgate_config::internal::{DescriptorConfig, DomainConfig, RateLimitConfig as LimitConfig};

use super::TYPE_URL;
use super::bounds::MAX_METADATA_DEPTH;
use crate::service::proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};

/// Reads all resources.
pub(super) fn read(resources: &[Any]) -> Result<Vec<DomainConfig>, String> {
    resources.iter().map(resource).collect()
}

fn resource(any: &Any) -> Result<DomainConfig, String> {
    if any.type_url != TYPE_URL {
        return Err(format!("unexpected resource of type `{}`: send only those of type {TYPE_URL}", any.type_url));
    }
    let config = RateLimitConfig::decode(&*any.value)
        .map_err(|error| format!("a resource cannot be decoded: {error}: send a valid RateLimitConfig"))?;
    let source = if config.name.is_empty() { format!("domain {}", config.domain) } else { config.name };
    let descriptors = descriptors(config.descriptors)?;
    Ok(DomainConfig { source, domain: config.domain, descriptors, ..DomainConfig::default() })
}

fn descriptors(list: Vec<RateLimitDescriptor>) -> Result<Vec<DescriptorConfig>, String> {
    list.into_iter().map(descriptor).collect()
}

fn descriptor(from: RateLimitDescriptor) -> Result<DescriptorConfig, String> {
    let metadata = from.metadata.filter(|metadata| !metadata.fields.is_empty());
    let metadata = metadata.map(|metadata| object(metadata, MAX_METADATA_DEPTH)).transpose()?;
    Ok(DescriptorConfig {
        key: from.key,
        value: from.value,
        rate_limit: from.rate_limit.map(rate_limit).transpose()?,
        descriptors: descriptors(from.descriptors)?,
        shadow_mode: from.shadow_mode,
        quota_mode: from.quota_mode,
        metadata,
        ..DescriptorConfig::default()
    })
}

fn rate_limit(from: RateLimitPolicy) -> Result<LimitConfig, String> {
    let unit = match RateLimitUnit::try_from(from.unit) {
        Ok(RateLimitUnit::Unknown) => String::new(),
        Ok(unit) => unit.as_str_name().to_ascii_lowercase(),
        Err(_) => return Err(format!("unknown unit {}: use a unit from SECOND to YEAR", from.unit)),
    };
    Ok(LimitConfig {
        requests_per_unit: from.requests_per_unit,
        unit,
        unlimited: from.unlimited,
        name: from.name,
        replaces: from.replaces.into_iter().map(|replaced| replaced.name).collect(),
        ..LimitConfig::default()
    })
}

fn object(from: Struct, depth: usize) -> Result<Value, String> {
    let fields = from.fields.into_iter().map(|(key, field)| Ok((key, value(field, depth)?)));
    fields.collect::<Result<Map<_, _>, String>>().map(Value::Object)
}

fn value(from: prost_types::Value, depth: usize) -> Result<Value, String> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(format!("metadata nests more than {MAX_METADATA_DEPTH} values: use fewer levels"));
    };
    Ok(match from.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(value)) => Value::Bool(value),
        Some(Kind::NumberValue(number)) => Number::from_f64(number).map_or(Value::Null, Value::Number),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::StructValue(inner)) => object(inner, depth)?,
        Some(Kind::ListValue(list)) => {
            let values = list.values.into_iter().map(|inner| value(inner, depth));
            Value::Array(values.collect::<Result<_, _>>()?)
        }
    })
}
