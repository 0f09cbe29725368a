//! Facts about a request as values of headers, for the upstreams of a gateway.
//!
//! Only facts that clients do not choose become headers (`file/forms/key.rs`), so upstreams can trust them.

use tollgate_http::internal::percent_encoded;

use super::key_part::KeyPart;
use super::{Facts, Request, RuleSet};

/// The longest value of a header. Upstreams refuse or cut longer ones.
const MAX_BYTES: usize = 4 << 10;

/// The fact that a header has as its value.
#[derive(Clone, Debug)]
pub enum HeaderFact {
    /// A part of a key.
    Part(KeyPart),
    /// The name of the limit that decided.
    Limit,
}

/// The facts about a decided request. A token is verified when the first fact needs it.
#[derive(Debug)]
pub struct HeaderFacts<'a> {
    request: Request<'a>,
    limit: Option<&'a str>,
}

impl<'a> HeaderFacts<'a> {
    /// Creates the facts about a request that `limit` decided.
    #[must_use]
    pub fn new(rules: &'a RuleSet, facts: &'a Facts<'a>, limit: Option<&'a str>) -> Self {
        Self { request: rules.request(facts), limit }
    }

    /// Returns a fact as the value of a header, or `None` if the request lacks it, has two different ones, or the value is
    /// longer than 4 KiB.
    #[must_use]
    pub fn value(&self, fact: &HeaderFact) -> Option<String> {
        match fact {
            HeaderFact::Part(part) => {
                // The upstream compares it with those that other programs compute.
                if let Some(sent) = part.sent_fingerprint(&self.request) {
                    return Some(header_value(sent)).filter(|value| value.len() <= MAX_BYTES);
                }
                let piece = part.of(&self.request);
                // A request with two different tokens has none that upstreams could trust.
                let is_ambiguous = self.request.errors().take().is_some();
                let piece = piece.filter(|_| !is_ambiguous)?;
                Some(header_value(&String::from_utf8_lossy(piece.as_bytes())))
            }
            HeaderFact::Limit => self.limit.map(header_value),
        }
        .filter(|value| value.len() <= MAX_BYTES)
    }
}

/// Returns a text as the value of a header. A server that reads it trims it, and may take the bytes of other characters for
/// other text. So everything but printable ASCII is percent-encoded, and so are spaces at both ends and percent signs:
/// different texts stay different.
fn header_value(text: &str) -> String {
    let encoded = percent_encoded(text, |byte| matches!(byte, b' '..=b'~') && byte != b'%');
    let inner = encoded.trim_matches(' ');
    if inner.len() == encoded.len() {
        return encoded;
    }
    let before = encoded.len() - encoded.trim_start_matches(' ').len();
    let after = encoded.len() - before - inner.len();
    ["%20".repeat(before).as_str(), inner, &"%20".repeat(after)].concat()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn values_are_printable_and_keep_their_spaces() {
        for (text, expected) in [
            ("ann@example.com", "ann@example.com"),
            ("Ann Lee", "Ann Lee"),
            (" ann ", "%20ann%20"),
            ("  ", "%20%20"),
            ("a\r\nx-admin: 1", "a%0D%0Ax-admin: 1"),
            ("100%", "100%25"),
            ("café", "caf%C3%A9"),
        ] {
            assert_eq!(header_value(text), expected);
        }
    }

    proptest! {
        #[test]
        fn every_text_has_its_own_valid_value(texts in proptest::collection::hash_set("[ %\\r\\na2é0\\t]{0,4}", 0..20)) {
            let values: HashSet<String> = texts.iter().map(|text| header_value(text)).collect();
            prop_assert_eq!(values.len(), texts.len());
            for value in values {
                prop_assert!(HeaderValue::try_from(&*value).is_ok());
                prop_assert_eq!(value.trim(), &*value);
            }
        }
    }
}
