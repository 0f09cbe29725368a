//! Credentials: the values of `Authorization` and `Proxy-Authorization` (RFC 9110, section 11.4).
//!
//! Schemes ignore case, any number of blanks may follow them, and decoders of base64 skip what they do not know: one
//! token has endless spellings. Many handlers do not look at the scheme at all, but take the second word of the value
//! (`header.split(' ')[1]`), so the scheme is no part of a key.

use std::borrow::Cow;

use super::base64::{self, Alphabet};
use super::header::{is_blank_within, trimmed};
use super::signed_token;

/// The problem of a value that upstreams read differently.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ambiguous;

/// A value, split into the scheme and the rest. Both are trimmed.
struct Credentials<'a> {
    scheme: Option<&'a [u8]>,
    rest: &'a [u8],
}

impl<'a> Credentials<'a> {
    fn new(value: &'a [u8]) -> Self {
        let value = trimmed(value);
        let end = value.iter().position(|byte| !is_token(*byte)).unwrap_or(value.len());
        let (scheme, behind) = value.split_at(end);
        match behind {
            // Nearly always.
            [b' ', rest @ ..] if rest.first().is_some_and(u8::is_ascii_graphic) => Self { scheme: Some(scheme), rest },
            _ => {
                // Something follows, because the value is trimmed at its end.
                let rest = trimmed(behind);
                let has_scheme = !scheme.is_empty() && rest.len() < behind.len();
                if has_scheme { Self { scheme: Some(scheme), rest } } else { Self { scheme: None, rest: value } }
            }
        }
    }

    fn is_basic(&self) -> bool {
        self.scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"Basic"))
    }
}

/// Returns credentials for conditions: the scheme as in `Bearer`, one space, and the rest. Those of `Basic` are encoded
/// in one way, if they can be decoded in one way.
pub(super) fn text(value: &[u8]) -> Cow<'_, [u8]> {
    let value = trimmed(value);
    let credentials = Credentials::new(value);
    let Some(scheme) = credentials.scheme else { return Cow::Borrowed(value) };
    let rest = match base64::canonical(credentials.rest, Alphabet::Standard) {
        Some(encoded) if credentials.is_basic() && !encoded.is_empty() => encoded,
        _ => Cow::Borrowed(credentials.rest),
    };
    let is_normal = matches!(rest, Cow::Borrowed(_))
        && is_capitalized(scheme)
        && value.len() == scheme.len() + 1 + rest.len()
        && value.get(scheme.len()) == Some(&b' ');
    if is_normal { Cow::Borrowed(value) } else { Cow::Owned([&*capitalized(scheme), b" ", &rest].concat()) }
}

/// Returns credentials for a key: without the scheme, and in one spelling of base64.
///
/// # Errors
///
/// If they are several words, or parameters: upstreams disagree where a token ends, and could be sent any others beside
/// it.
pub(super) fn key(value: &[u8]) -> Result<Cow<'_, [u8]>, Ambiguous> {
    let credentials = Credentials::new(value);
    let word = parameter_value(credentials.rest);
    if is_blank_within(word) || word.iter().any(|byte| matches!(byte, b',' | b';')) {
        return Err(Ambiguous);
    }
    if !credentials.is_basic()
        && let Some(form) = signed_token::form(word)
    {
        return Ok(form);
    }
    if credentials.is_basic() || base64::hides_password(word) {
        return base64::canonical(word, Alphabet::Standard).ok_or(Ambiguous);
    }
    Ok(Cow::Borrowed(word))
}

/// Returns the value of `token="value"`, which Rails reads as `value`. Returns any other text unchanged.
fn parameter_value(mut word: &[u8]) -> &[u8] {
    while let Some(mut value) = word.strip_prefix(b"token=") {
        while let Some(inner) = value.strip_prefix(b"\"") {
            value = inner;
        }
        while let Some(inner) = value.strip_suffix(b"\"") {
            value = inner;
        }
        word = value;
    }
    word
}

/// Returns `true` for the bytes of a scheme (RFC 9110, section 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

fn is_capitalized(scheme: &[u8]) -> bool {
    scheme
        .split_first()
        .is_none_or(|(first, others)| !first.is_ascii_lowercase() && !others.iter().any(u8::is_ascii_uppercase))
}

fn capitalized(scheme: &[u8]) -> Vec<u8> {
    let mut scheme = scheme.to_ascii_lowercase();
    if let Some(first) = scheme.first_mut() {
        first.make_ascii_uppercase();
    }
    scheme
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_text_has_one_scheme_and_one_space() {
        for (given, expected) in [
            ("Bearer T", "Bearer T"),
            ("bearer \t T ", "Bearer T"),
            ("BASIC YW5u!Og", "Basic YW5uOg=="),
            ("Basic ==a", "Basic ==a"),
            ("AWS4-HMAC-SHA256 Credential=a,  b", "Aws4-hmac-sha256 Credential=a,  b"),
            ("T", "T"),
            ("key=T", "key=T"),
            ("", ""),
        ] {
            assert_eq!(text(given.as_bytes()), expected.as_bytes(), "{given}");
        }
    }

    #[test]
    fn normal_spellings_are_not_copied() {
        for value in ["Bearer T", "Basic YW5uOg==", "T", "Bearer"] {
            assert!(matches!(text(value.as_bytes()), Cow::Borrowed(_)), "{value}");
            assert!(matches!(key(value.as_bytes()), Ok(Cow::Borrowed(_))), "{value}");
        }
    }

    proptest! {
        #[test]
        fn a_normal_form_is_its_own(value in "[Bb]asic [a-zA-Z0-9+/_=.: -]{0,12}|(x|Bearer)?[ \t]{0,2}[a-zA-Z0-9+/_=.:-]{0,12}") {
            let once = text(value.as_bytes()).into_owned();
            prop_assert_eq!(&*text(&once), &*once);
            let Ok(of_key) = key(value.as_bytes()) else { return Ok(()) };
            // The key of the text is that of the value.
            prop_assert!(key(&once).is_ok_and(|key| key == of_key));
            // A key that a report shows can be named.
            prop_assert!(key(&of_key).is_ok_and(|key| key == of_key));
        }

        #[test]
        fn no_bytes_panic(value in prop::collection::vec(any::<u8>(), 0..60)) {
            _ = (text(&value).len(), key(&value).is_ok());
        }
    }
}
