//! Credentials: the values of `Authorization` and `Proxy-Authorization` (RFC 9110, section 11.4).
//!
//! Schemes ignore case, and any number of blanks may follow them: one token has endless spellings. Many handlers do not
//! look at the scheme at all, but take the second word of the value (`header.split(' ')[1]`), so the scheme is no part of
//! a key.
//!
//! Upstreams disagree about everything that is not a token of RFC 6750 or base64: Rails removes quotes, and the usual
//! expression for `Bearer` ends a token at a character that the RFC does not allow. A key has no such value.

use std::borrow::Cow;

use super::base64::{self, Ambiguous, Login};
use super::header::{is_blank_within, trimmed};
use super::signed_token;

/// A value, split into the scheme and the rest. All are trimmed.
pub(super) struct Credentials<'a> {
    value: &'a [u8],
    scheme: Option<&'a [u8]>,
    rest: &'a [u8],
}

impl<'a> Credentials<'a> {
    pub(super) fn new(value: &'a [u8]) -> Self {
        let value = trimmed(value);
        let end = value.iter().position(|byte| !IN_SCHEMES[usize::from(*byte)]).unwrap_or(value.len());
        let (scheme, behind) = value.split_at(end);
        match behind {
            // Nearly always.
            [b' ', rest @ ..] if rest.first().is_some_and(u8::is_ascii_graphic) => {
                Self { value, scheme: Some(scheme), rest }
            }
            _ => {
                // Something follows, because the value is trimmed at its end.
                let rest = trimmed(behind);
                let has_scheme = !scheme.is_empty() && rest.len() < behind.len();
                match has_scheme {
                    true => Self { value, scheme: Some(scheme), rest },
                    false => Self { value, scheme: None, rest: value },
                }
            }
        }
    }

    fn is_basic(&self) -> bool {
        self.scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"Basic"))
    }

    /// Returns `true` if an expression that looks for `Bearer` finds it, such as `/Bearer\s(\S+)/i`.
    fn is_bearer(&self) -> bool {
        const BEARER: &[u8] = b"Bearer";
        self.scheme
            .and_then(|scheme| scheme.last_chunk::<{ BEARER.len() }>())
            .is_some_and(|end| end.eq_ignore_ascii_case(BEARER))
    }

    /// Checks that all upstreams decode the same name and password from `Basic`.
    pub(super) fn check(&self) -> Result<(), Ambiguous> {
        match self.is_basic() {
            true => base64::standard(self.rest).map(|_| ()),
            false => Ok(()),
        }
    }

    /// Returns credentials for conditions: the scheme as in `Bearer`, one space, and the rest. Those of `Basic` are
    /// encoded in one way. If a condition reads some that can be decoded in several ways, the request is refused
    /// ([`check`](Self::check)).
    pub(super) fn text(&self) -> Cow<'a, [u8]> {
        let Self { value, scheme: Some(scheme), .. } = *self else { return Cow::Borrowed(self.value) };
        let rest = match self.is_basic() {
            true => Some(base64::lenient(self.rest)).filter(|encoded| !encoded.is_empty()),
            false => None,
        };
        let rest = rest.unwrap_or(Cow::Borrowed(self.rest));
        let is_normal = matches!(rest, Cow::Borrowed(_))
            && is_capitalized(scheme)
            && value.len() == scheme.len() + 1 + rest.len()
            && value.get(scheme.len()) == Some(&b' ');
        if is_normal { Cow::Borrowed(value) } else { Cow::Owned([&*capitalized(scheme), b" ", &rest].concat()) }
    }
}

/// Returns credentials for a key: without the scheme, and in one spelling of base64.
///
/// # Errors
///
/// If they are several words, or parameters, or have characters at which some upstreams end a token: anything could be
/// sent beside it.
pub(super) fn key(value: &[u8]) -> Result<Cow<'_, [u8]>, Ambiguous> {
    let credentials = Credentials::new(value);
    if credentials.is_basic() {
        return base64::standard(credentials.rest);
    }
    let word = parameter_value(credentials.rest);
    if !is_token68(word) && !is_unusual_token(word, credentials.is_bearer()) {
        return Err(Ambiguous);
    }
    if let Some(form) = signed_token::form(word)? {
        return Ok(form);
    }
    match base64::login(word) {
        Login::Absent => Ok(Cow::Borrowed(word)),
        Login::Possible => Ok(base64::standard(word).unwrap_or(Cow::Borrowed(word))),
        Login::Evident => base64::standard(word),
    }
}

/// Returns `true` for tokens as `Bearer` has them (RFC 6750, section 2.1) and other schemes may (RFC 9110, section
/// 11.2).
fn is_token68(word: &[u8]) -> bool {
    let end = word.iter().rposition(|byte| *byte != b'=').map_or(0, |last| last + 1);
    word[..end]
        .iter()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'+' | b'/'))
}

/// Returns `true` for other tokens that upstreams read alike: `Bearer 1|T` of Laravel, and one word without quotes behind
/// any other scheme.
fn is_unusual_token(word: &[u8], is_bearer: bool) -> bool {
    if is_bearer {
        let number = word.iter().take_while(|byte| byte.is_ascii_digit()).count();
        return number > 0 && word.get(number) == Some(&b'|') && is_token68(&word[number + 1..]);
    }
    !is_blank_within(word) && !word.iter().any(|byte| matches!(byte, b',' | b';' | b'"' | b'\\'))
}

/// Returns the value of `token="value"`, which Rails reads as `value`. Returns any other text unchanged.
fn parameter_value(mut word: &[u8]) -> &[u8] {
    while let Some(value) = word.strip_prefix(b"token=") {
        word = match value {
            [b'"', inner @ .., b'"'] => inner,
            value => value,
        };
    }
    word
}

/// The bytes of a scheme (RFC 9110, section 5.6.2), in a table because every request with a token has one.
static IN_SCHEMES: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < table.len() {
        let letter = byte as u8;
        let is_mark = matches!(
            letter,
            b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~'
        );
        table[byte] = letter.is_ascii_alphanumeric() || is_mark;
        byte += 1;
    }
    table
};

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

    fn text(value: &[u8]) -> Cow<'_, [u8]> {
        Credentials::new(value).text()
    }

    #[test]
    fn the_text_has_one_scheme_and_one_space() {
        for (given, expected) in [
            ("Bearer T", "Bearer T"),
            ("bearer \t T ", "Bearer T"),
            ("BASIC YW5uOh", "Basic YW5uOg=="),
            ("Basic YW5u!Oh==x", "Basic YW5uOg=="),
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

    #[test]
    fn values_that_upstreams_read_differently_have_no_key() {
        for value in [
            "Bearer \"T\"",
            "Bearer \"T",
            "Bearer T\"",
            "Token \"T\"",
            "Token token=\"T",
            "Token token=\"\"T\"\"",
            "Token token=\"\\T\"",
            "\"T\"",
            "Bearer T!x",
            "Bearer T|x",
            "Bearer 1|T|x",
            "Bearer T:x",
            "Bearer T=x",
            "bearer T%20",
            "x-bearer T!x",
            "Bearer T\u{e9}",
            "Basic YW5u!Og==",
            "Basic YW5u-Og==",
            "Basic YW5uOg==YQ",
            "x YW5-uO_nBh",
            "YW5u.OnBh",
        ] {
            assert_eq!(key(value.as_bytes()), Err(Ambiguous), "{value}");
        }
        for (value, expected) in [
            ("Bearer A-._~+/z09==", "A-._~+/z09=="),
            ("Bearer 12|abc", "12|abc"),
            ("Token token=\"T\"", "T"),
            ("Token token=T", "T"),
            ("key=AAAA:b-c", "key=AAAA:b-c"),
            ("ApiKey a:b", "a:b"),
            ("Basic YW5uOh", "YW5uOg=="),
            ("x YW5uOh", "YW5uOg=="),
            ("Bearer my-token", "my-token"),
        ] {
            assert_eq!(key(value.as_bytes()).as_deref(), Ok(expected.as_bytes()), "{value}");
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
