//! Bounds of responses, checked on their bytes.
//!
//! A decoded response takes up to a hundred times the memory of its bytes: an empty descriptor has two bytes. So a response
//! is counted before it is decoded. One with too many parts is rejected with the bound that it exceeds.

use bytes::{Buf, Bytes};
use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::service::proto::envoy::service::discovery::v3::DiscoveryRequest;

/// The largest response: the default of gRPC, and more than ten thousand limits need.
pub(super) const MAX_RESPONSE_BYTES: usize = 4 << 20;

/// As many domains as files can define.
const MAX_RESOURCES: usize = 1_000;

/// Several times what people configure. Each takes about 5 KB when it is in force.
const MAX_DESCRIPTORS: usize = 20_000;

/// Deeper than requests have entries.
const MAX_DEPTH: usize = 32;

/// The most values of metadata and names in `replaces`, of all descriptors together.
const MAX_VALUES: usize = 50_000;

/// The most values that metadata may nest.
pub(super) const MAX_METADATA_DEPTH: usize = 32;

/// The fields of a response that identify it.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseId {
    #[prost(string, tag = "1")]
    pub(super) version_info: String,
    #[prost(string, tag = "4")]
    pub(super) type_url: String,
    #[prost(string, tag = "5")]
    pub(super) nonce: String,
}

/// Receives responses as bytes.
pub(super) struct UndecodedResponses;

impl Codec for UndecodedResponses {
    type Encode = DiscoveryRequest;
    type Decode = Bytes;
    type Encoder = ProstEncoder<DiscoveryRequest>;
    type Decoder = Undecoded;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        Undecoded
    }
}

pub(super) struct Undecoded;

impl Decoder for Undecoded {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(source.copy_to_bytes(source.remaining())))
    }
}

/// Checks that a response can be decoded with little memory.
pub(super) fn check(response: &[u8]) -> Result<(), String> {
    let mut counts = Counts::default();
    for config in messages(response, field::RESOURCES).map(|any| messages(any, field::ANY_VALUE)) {
        add(&mut counts.resources, MAX_RESOURCES, "resources", "put several domains into one")?;
        for descriptor in config.flat_map(|config| messages(config, field::CONFIG_DESCRIPTORS)) {
            counts.descriptor(descriptor, MAX_DEPTH)?;
        }
    }
    Ok(())
}

/// The numbers of the fields that hold other messages.
mod field {
    pub(super) const RESOURCES: u64 = 2;
    pub(super) const ANY_VALUE: u64 = 2;
    pub(super) const CONFIG_DESCRIPTORS: u64 = 3;
    pub(super) const RATE_LIMIT: u64 = 3;
    pub(super) const DESCRIPTORS: u64 = 4;
    pub(super) const METADATA: u64 = 8;
    pub(super) const REPLACES: u64 = 5;
    pub(super) const STRUCT_FIELDS: u64 = 1;
    pub(super) const ENTRY_VALUE: u64 = 2;
    pub(super) const VALUE_STRUCT: u64 = 5;
    pub(super) const VALUE_LIST: u64 = 6;
    pub(super) const LIST_VALUES: u64 = 1;
}

#[derive(Default)]
struct Counts {
    resources: usize,
    descriptors: usize,
    values: usize,
}

fn add(count: &mut usize, most: usize, what: &str, fix: &str) -> Result<(), String> {
    *count += 1;
    if *count > most { Err(format!("the response has more than {most} {what}: {fix}")) } else { Ok(()) }
}

impl Counts {
    fn descriptor(&mut self, bytes: &[u8], depth_left: usize) -> Result<(), String> {
        let Some(depth_left) = depth_left.checked_sub(1) else {
            return Err(format!("descriptors nest more than {MAX_DEPTH} levels: use fewer"));
        };
        add(
            &mut self.descriptors,
            MAX_DESCRIPTORS,
            "descriptors",
            "send fewer, or divide them between several servers",
        )?;
        for inner in messages(bytes, field::DESCRIPTORS) {
            self.descriptor(inner, depth_left)?;
        }
        let mut replaces = messages(bytes, field::RATE_LIMIT).flat_map(|limit| messages(limit, field::REPLACES));
        replaces.try_for_each(|_| self.value())?;
        messages(bytes, field::METADATA).try_for_each(|metadata| self.object(metadata, MAX_METADATA_DEPTH))
    }

    fn value(&mut self) -> Result<(), String> {
        add(&mut self.values, MAX_VALUES, "values in metadata and names in replaces", "send fewer")
    }

    fn object(&mut self, bytes: &[u8], depth_left: usize) -> Result<(), String> {
        for entry in messages(bytes, field::STRUCT_FIELDS) {
            self.value()?;
            messages(entry, field::ENTRY_VALUE).try_for_each(|value| self.content(value, depth_left))?;
        }
        Ok(())
    }

    fn content(&mut self, value: &[u8], depth_left: usize) -> Result<(), String> {
        let Some(depth_left) = depth_left.checked_sub(1) else {
            return Err(format!("metadata nests more than {MAX_METADATA_DEPTH} values: use fewer levels"));
        };
        messages(value, field::VALUE_STRUCT).try_for_each(|object| self.object(object, depth_left))?;
        for inner in messages(value, field::VALUE_LIST).flat_map(|list| messages(list, field::LIST_VALUES)) {
            self.value()?;
            self.content(inner, depth_left)?;
        }
        Ok(())
    }
}

/// Returns the contents of the fields of a message that have this number and a length. Ends at bytes that are not a
/// message: decoding reports them.
fn messages(bytes: &[u8], number: u64) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        while !rest.is_empty() {
            let (found, content) = next_field(&mut rest)?;
            if found == number
                && let Some(content) = content
            {
                return Some(content);
            }
        }
        None
    })
}

/// Takes the next field. Returns its number, and its content if it has a length.
fn next_field<'b>(rest: &mut &'b [u8]) -> Option<(u64, Option<&'b [u8]>)> {
    let key = varint(rest)?;
    let length = match key & 7 {
        0 => {
            varint(rest)?;
            return Some((key >> 3, None));
        }
        1 => 8,
        2 => usize::try_from(varint(rest)?).ok()?,
        // The decoder skips a group. Its fields are counted like those around it, so that it hides nothing.
        3 | 4 => return Some((key >> 3, None)),
        5 => 4,
        _ => return None,
    };
    let (content, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some((key >> 3, (key & 7 == 2).then_some(content)))
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use prost_types::Any;
    use prost_types::value::Kind;
    use prost_types::{ListValue, Struct, Value};

    use super::*;
    use crate::service::proto::envoy::service::discovery::v3::DiscoveryResponse;
    use crate::service::proto::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace,
    };
    use crate::service::xds::TYPE_URL;

    fn checked(configs: &[RateLimitConfig]) -> Result<(), String> {
        let any = |config: &RateLimitConfig| Any { type_url: TYPE_URL.to_owned(), value: config.encode_to_vec() };
        let resources = configs.iter().map(any).collect();
        let nonce = "n".to_owned();
        let response = DiscoveryResponse { version_info: "1".to_owned(), resources, nonce, ..Default::default() };
        check(&response.encode_to_vec())
    }

    fn domain(descriptors: Vec<RateLimitDescriptor>) -> RateLimitConfig {
        RateLimitConfig { name: "a".to_owned(), domain: "a".to_owned(), descriptors }
    }

    fn descriptor(descriptors: Vec<RateLimitDescriptor>) -> RateLimitDescriptor {
        RateLimitDescriptor { key: "k".to_owned(), value: "v".to_owned(), descriptors, ..Default::default() }
    }

    fn exceeded(what: &str) -> Result<(), String> {
        Err(format!("the response has more than {what}"))
    }

    #[test]
    fn as_many_parts_as_allowed_are_accepted_and_one_more_is_rejected() {
        assert_eq!(checked(&vec![domain(Vec::new()); MAX_RESOURCES]), Ok(()));
        let resources = exceeded("1000 resources: put several domains into one");
        assert_eq!(checked(&vec![domain(Vec::new()); MAX_RESOURCES + 1]), resources);

        let descriptors = |count: usize| {
            let half = vec![descriptor(vec![descriptor(Vec::new()); 9]); count / 20];
            checked(&[domain(half.clone()), domain([half, vec![descriptor(Vec::new()); count % 20]].concat())])
        };
        assert_eq!(descriptors(MAX_DESCRIPTORS), Ok(()));
        let more = exceeded("20000 descriptors: send fewer, or divide them between several servers");
        assert_eq!(descriptors(MAX_DESCRIPTORS + 1), more);

        let nested = |levels: usize| {
            let leaf = descriptor(Vec::new());
            checked(&[domain(vec![(1..levels).fold(leaf, |inner, _| descriptor(vec![inner]))])])
        };
        assert_eq!(nested(MAX_DEPTH), Ok(()));
        let deeper = Err("descriptors nest more than 32 levels: use fewer".to_owned());
        assert_eq!(nested(MAX_DEPTH + 1), deeper);
    }

    #[test]
    fn values_of_metadata_and_replaced_names_are_counted_together() {
        let values = |metadata: usize, replaces: usize| {
            let list = ListValue { values: vec![Value { kind: Some(Kind::BoolValue(true)) }; metadata] };
            let list = Value { kind: Some(Kind::ListValue(list)) };
            let mut one = descriptor(Vec::new());
            one.metadata = Some(Struct { fields: [("list".to_owned(), list)].into() });
            let names = vec![RateLimitReplace { name: "n".to_owned() }; replaces];
            one.rate_limit = Some(RateLimitPolicy { replaces: names, ..Default::default() });
            checked(&[domain(vec![one])])
        };
        assert_eq!(values(MAX_VALUES - 101, 100), Ok(()));
        let more = exceeded("50000 values in metadata and names in replaces: send fewer");
        assert_eq!(values(MAX_VALUES - 100, 100), more);
        assert_eq!(values(0, MAX_VALUES), more);
    }

    #[test]
    fn nested_metadata_is_bounded() {
        let nested = |levels: usize| {
            let leaf = Value { kind: Some(Kind::BoolValue(true)) };
            let wrap = |inner, _| Value { kind: Some(Kind::ListValue(ListValue { values: vec![inner] })) };
            let value = (1..levels).fold(leaf, wrap);
            let mut one = descriptor(Vec::new());
            one.metadata = Some(Struct { fields: [("a".to_owned(), value)].into() });
            checked(&[domain(vec![one])])
        };
        assert_eq!(nested(MAX_METADATA_DEPTH), Ok(()));
        let deeper = Err("metadata nests more than 32 values: use fewer levels".to_owned());
        assert_eq!(nested(MAX_METADATA_DEPTH + 1), deeper);
    }

    /// The decoder continues behind fields that it does not know.
    #[test]
    fn unknown_fields_hide_nothing() {
        let any = |config: RateLimitConfig| Any { type_url: String::new(), value: config.encode_to_vec() };
        let resources = vec![any(domain(Vec::new())); MAX_RESOURCES + 1];
        let flood = DiscoveryResponse { resources, ..Default::default() }.encode_to_vec();
        for unknown in [&b""[..], b"\x7b\x7c", b"\x78\x01", b"\x79abcdefgh", b"\x7dabcd", b"\x7a\x01a"] {
            assert!(check(&[unknown, &flood].concat()).is_err(), "{unknown:?}");
            assert!(DiscoveryResponse::decode(&*[unknown, &flood].concat()).is_ok(), "{unknown:?}");
        }
    }

    #[test]
    fn bytes_that_are_not_a_response_are_left_to_the_decoder() {
        for bytes in [&b"\xff"[..], b"\x12\xff", b"\x12\x05ab", b"\x13\x14", &[0xff; 20], b"\x08"] {
            assert_eq!(check(bytes), Ok(()), "{bytes:?}");
        }
    }
}
