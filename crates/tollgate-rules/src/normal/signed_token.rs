//! Signed tokens: JWT (RFC 7515, RFC 7516), and sessions such as Flask's, which have the same form.
//!
//! What is signed is compared as text, so it has one spelling. The signature is decoded first, by decoders that ignore
//! spare bits and padding. So a key has the signature in one spelling. A signature that decoders read differently is
//! [`Ambiguous`]: Python ignores everything behind padding, and PHP goes on.
//!
//! Anyone can replace the second half of an ECDSA signature, or of an EdDSA signature where a verifier is lenient,
//! without the private key. Of such a signature the key has the beginning.
//!
//! Other values may begin like base64 of JSON, as in `eyewear.eu.customer-1`. So the first part is decoded.

use std::borrow::Cow;

use super::base64::{self, Ambiguous};

/// 240 bits, in the first half of every signature whose second half can be replaced. Whole groups of base64, so that the
/// beginning has no spare bits.
const FIRST_CHARACTERS: usize = 40;

/// The shortest signature in use: HMAC-SHA1's.
const MIN_SIGNATURE_BYTES: usize = 20;

/// The signatures of sessions: HMAC with SHA-1 and SHA-2.
const SESSION_SIGNATURE_BYTES: [usize; 5] = [20, 28, 32, 48, 64];

/// The characters of the time of a session, which is a number of seconds in a few bytes.
const SESSION_TIME_CHARACTERS: std::ops::RangeInclusive<usize> = 2..=11;

/// The first bytes of data that zlib compressed with its default settings, as in large sessions.
const ZLIB: [u8; 2] = [0x78, 0x9C];

/// Returns the normal form of a signed token, or the text itself if it is something else.
#[inline]
pub(crate) fn normal(text: &[u8]) -> Result<Cow<'_, [u8]>, Ambiguous> {
    Ok(form(text)?.unwrap_or(Cow::Borrowed(text)))
}

/// Returns the normal form of a signed or encrypted token, or `None` if the text is something else.
#[inline]
pub(super) fn form(text: &[u8]) -> Result<Option<Cow<'_, [u8]>>, Ambiguous> {
    // JSON that begins with `{`. A compressed session begins with a dot.
    match text {
        [b'e', b'y' | b'w', ..] => form_of_parts(text, text, false),
        [b'.', b'e', b'J', ..] => form_of_parts(text, &text[1..], true),
        _ => Ok(None),
    }
}

/// Returns the normal form of a text that may be a token, with its parts in `rest`.
#[inline(never)]
fn form_of_parts<'t>(text: &'t [u8], rest: &'t [u8], is_compressed: bool) -> Result<Option<Cow<'t, [u8]>>, Ambiguous> {
    let dots = rest.iter().filter(|byte| **byte == b'.').count();
    if !matches!((dots, is_compressed), (2, _) | (4, false)) {
        return Ok(None);
    }
    let mut parts = rest.split(|byte| *byte == b'.');
    let mut part = || parts.next().unwrap_or_default();
    let first = base64::decoded(part()).and_then(|decoded| First::of(&decoded, is_compressed));
    match (dots, first) {
        (2, Some(first)) => signed(text, &first, part(), part()),
        (_, Some(First::Encryption)) => encrypted(text).map(Some),
        _ => Ok(None),
    }
}

/// The first part of a token.
enum First {
    /// The header of a JWT (JWS).
    Signature { is_replaceable: bool },
    /// The header of an encrypted JWT (JWE).
    Encryption,
    /// The content of a session.
    Session,
}

impl First {
    fn of(decoded: &[u8], is_compressed: bool) -> Option<Self> {
        if is_compressed {
            return decoded.starts_with(&ZLIB).then_some(Self::Session);
        }
        let text = std::str::from_utf8(decoded).ok()?.trim_ascii();
        // Not parsed: Python writes and reads JSON with `NaN`.
        let inner = text.strip_prefix('{')?.strip_suffix('}')?.trim_ascii();
        let is_object = inner.is_empty() || (inner.starts_with('"') && inner.contains(':'));
        let is_text = text.chars().all(|letter| !letter.is_control() || letter.is_ascii_whitespace());
        if !is_object || !is_text {
            return None;
        }
        Some(match (text_member(inner, "\"alg\""), text_member(inner, "\"enc\"")) {
            (Some(_), Some(_)) => Self::Encryption,
            // ES256, ES384, ES512, ES256K, EdDSA, Ed25519, Ed448.
            (Some(algorithm), None) => {
                Self::Signature { is_replaceable: algorithm.starts_with("ES") || algorithm.starts_with("Ed") }
            }
            (None, _) => Self::Session,
        })
    }
}

/// Returns the text that begins with the value of a member, if that is a string.
fn text_member<'t>(object: &'t str, quoted_name: &str) -> Option<&'t str> {
    let (_, behind) = object.split_once(quoted_name)?;
    behind.trim_ascii_start().strip_prefix(':')?.trim_ascii_start().strip_prefix('"')
}

/// Returns the normal form of a text that may be owned.
pub(crate) fn normal_of(text: Cow<'_, [u8]>) -> Result<Cow<'_, [u8]>, Ambiguous> {
    match text {
        Cow::Borrowed(text) => normal(text),
        Cow::Owned(text) => Ok(match normal(&text)? {
            Cow::Borrowed(form) if form.len() == text.len() => Cow::Owned(text),
            form => Cow::Owned(form.into_owned()),
        }),
    }
}

/// Spells the signature of a token in one way. Returns `None` if the last part cannot be a signature.
fn signed<'t>(
    text: &'t [u8],
    first: &First,
    second: &[u8],
    signature: &'t [u8],
) -> Result<Option<Cow<'t, [u8]>>, Ambiguous> {
    let is_clean = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    // What is signed has one spelling. Other texts only look alike.
    if !second.iter().all(is_clean) {
        return Ok(None);
    }
    let has_time = SESSION_TIME_CHARACTERS.contains(&second.len());
    let is_signature = |bytes: &usize| match first {
        First::Signature { .. } => *bytes >= MIN_SIGNATURE_BYTES,
        First::Session => has_time && SESSION_SIGNATURE_BYTES.contains(bytes),
        First::Encryption => false,
    };
    let spelled = match base64::url_safe(signature) {
        Ok(spelled) => spelled,
        Err(Ambiguous) if base64::possible_lengths(signature).iter().any(is_signature) => return Err(Ambiguous),
        Err(Ambiguous) => return Ok(None),
    };
    if !is_signature(&(spelled.len() * 6 / 8)) {
        return Ok(None);
    }
    let kept = if matches!(first, First::Signature { is_replaceable: true }) {
        spelled.len().min(FIRST_CHARACTERS)
    } else {
        spelled.len()
    };
    let start = text.len() - signature.len();
    Ok(Some(match spelled {
        Cow::Borrowed(_) => Cow::Borrowed(&text[..start + kept]),
        Cow::Owned(spelled) => Cow::Owned([&text[..start], &spelled[..kept]].concat()),
    }))
}

/// Spells the parts of an encrypted token in one way. Its header is authenticated as text.
fn encrypted(text: &[u8]) -> Result<Cow<'_, [u8]>, Ambiguous> {
    let mut parts = text.split(|byte| *byte == b'.');
    let mut normal = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        normal.push(b'.');
        normal.extend_from_slice(&base64::url_safe(part)?);
    }
    Ok(Cow::Owned(normal))
}

#[cfg(test)]
mod tests {
    use ::base64::Engine as _;
    use ::base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use proptest::prelude::*;

    use super::*;

    const HMAC: &str = "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA";

    fn text(value: &str) -> String {
        String::from_utf8(normal(value.as_bytes()).unwrap().into_owned()).unwrap()
    }

    fn encoded(text: &str) -> String {
        URL_SAFE_NO_PAD.encode(text)
    }

    #[test]
    fn a_signature_has_one_spelling_and_keeps_its_characters() {
        for header in [r#"{"alg":"HS256"}"#, r#"{ "typ" : "JWT", "alg" : "RS256" }"#, "{\n\"alg\":\"PS256\"}"] {
            let signed = encoded(header) + ".eyJi.";
            for spelling in [HMAC, "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJB=="] {
                assert_eq!(text(&format!("{signed}{spelling}")), format!("{signed}{HMAC}"), "{header}");
            }
            for spelling in
                [format!("{HMAC}=AAAA"), format!("{HMAC}!"), format!("q8!{}", &HMAC[2..]), format!("q8={HMAC}")]
            {
                assert_eq!(normal(format!("{signed}{spelling}").as_bytes()), Err(Ambiguous), "{header} {spelling}");
            }
            let slashes = "+/".repeat(30);
            assert_eq!(text(&format!("{signed}{slashes}")), format!("{signed}{}", "-_".repeat(30)));
        }
        for session in [encoded(r#"{"user":1,"x":NaN}"#), ".eJyr".to_owned()] {
            let sha1 = "q83vEjRWeJCrze8SNFZ4kKvN7xI";
            assert_eq!(text(&format!("{session}.aLRxYg.{sha1}=")), format!("{session}.aLRxYg.{sha1}"));
            for junk in ["=AAAA", "!", "==!"] {
                let value = format!("{session}.aLRxYg.{sha1}{junk}");
                assert_eq!(normal(value.as_bytes()), Err(Ambiguous), "{value}");
            }
        }
    }

    #[test]
    fn a_signature_whose_second_half_can_be_replaced_is_its_beginning() {
        for algorithm in ["ES256", "ES384", "ES512", "ES256K", "EdDSA", "Ed25519"] {
            let signed = encoded(&format!(r#"{{"typ":"JWT","alg":"{algorithm}"}}"#)) + ".eyJi.";
            let given = format!("{signed}{HMAC}{HMAC}");
            assert_eq!(text(&given), format!("{signed}{}", &HMAC[..FIRST_CHARACTERS]), "{algorithm}");
            assert_eq!(text(&text(&given)), text(&given), "{algorithm}");
        }
    }

    #[test]
    fn the_parts_of_an_encrypted_token_have_one_spelling() {
        let header = encoded(r#"{"alg":"dir","enc":"A128GCM"}"#);
        assert_eq!(text(&format!("{header}.YR.YQ==.YQ.YQ=")), format!("{header}.YQ.YQ.YQ.YQ"));
        assert_eq!(normal(format!("{header}.YQ.YQ.Y!Q.YQ").as_bytes()), Err(Ambiguous));
    }

    #[test]
    fn other_texts_are_their_own_form() {
        let not_objects = ["{alg}", "{'alg':1}", "{\"alg\"", "{\"a\u{1}\":1}"].map(encoded);
        let others = not_objects.iter().map(|first| format!("{first}.eyJi.{HMAC}="));
        let short = encoded(r#"{"alg":"HS256"}"#) + ".eyJi.customer-0001";
        let without_time = encoded(r#"{"a":1}"#) + ".customer-production." + HMAC + "=";
        let uncompressed = format!(".eJewels.aLRxYg.{HMAC}=");
        let five_parts = encoded(r#"{"alg":"HS256"}"#) + ".a.b.c.customer-0001";
        let plain = ["", "ey", "eyJh.eyJi", "eyJh.a.b.c", "10.0.0.1", "a.b.c==", "user-1", "eyewear.eu.a.b.c-0001"];
        for value in others.chain([short, without_time, uncompressed, five_parts]).chain(plain.map(String::from)) {
            assert_eq!(text(&value), value);
        }
    }

    proptest! {
        #[test]
        fn a_normal_form_is_its_own(
            first in r#"\{"alg":"(ES256|HS256)"\}|\{"alg":"dir","enc":"A"\}|\{"a":1\}"#,
            rest in "\\.[a-zA-Z0-9_-]{0,8}\\.[a-zA-Z0-9+/_=!-]{0,99}(\\.[a-z=]{0,5}\\.[a-z=]{0,5})?",
            looks_alike in "\\.?e[ywJ][a-z0-9+/_=.!-]{0,60}",
        ) {
            for value in [encoded(&first) + &rest, looks_alike] {
                let Ok(once) = normal(value.as_bytes()) else { continue };
                prop_assert_eq!(&*normal(&once).unwrap(), &*once);
            }
        }
    }
}
