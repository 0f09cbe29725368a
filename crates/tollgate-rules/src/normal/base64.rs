//! One spelling of base64.
//!
//! Decoders are lenient: many need no padding, and ignore the spare bits of the last character. Text that all of them
//! decode alike gets one spelling.
//!
//! They disagree about other text. At a character of no alphabet, Apache stops, and Python, PHP and Node skip it. Of `-`
//! and `_` among characters of the standard alphabet, Node makes `+` and `/`, Python and PHP skip them, and Apache stops.
//! After padding, Python and Node stop, and PHP goes on. Such text is [`Ambiguous`].

use std::borrow::Cow;

use smallvec::SmallVec;

/// A text that upstreams read differently.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ambiguous;

/// The alphabet of the normal spelling. The standard one is padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alphabet {
    Standard,
    UrlSafe,
}

/// The value of each character in either alphabet, or `OTHER`.
static VALUES: [u8; 256] = {
    let mut values = [OTHER; 256];
    let mut number = 0;
    while number < 64 {
        values[STANDARD[number] as usize] = number as u8;
        number += 1;
    }
    values[b'-' as usize] = 62;
    values[b'_' as usize] = 63;
    values
};
const STANDARD: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const OTHER: u8 = 255;

/// Returns the normal spelling of text in the standard alphabet.
pub(super) fn standard(text: &[u8]) -> Result<Cow<'_, [u8]>, Ambiguous> {
    if is_canonical(text, Alphabet::Standard) {
        return Ok(Cow::Borrowed(text));
    }
    let data = without_padding(text);
    if !data.iter().all(|byte| is_of(*byte, Alphabet::Standard)) {
        return Err(Ambiguous);
    }
    Ok(Cow::Owned(spelled(data, Alphabet::Standard)))
}

/// Returns the normal spelling of text in either alphabet: that in the URL-safe one, without padding.
pub(super) fn url_safe(text: &[u8]) -> Result<Cow<'_, [u8]>, Ambiguous> {
    if is_canonical(text, Alphabet::UrlSafe) {
        return Ok(Cow::Borrowed(text));
    }
    let data = without_padding(text);
    if !data.iter().all(|byte| value(*byte).is_some()) {
        return Err(Ambiguous);
    }
    Ok(Cow::Owned(spelled(data, Alphabet::UrlSafe)))
}

/// Returns a spelling of any text, in the standard alphabet: as Node decodes it up to its padding. It is compared where
/// ambiguous text is refused anyway.
pub(super) fn lenient(text: &[u8]) -> Cow<'_, [u8]> {
    if is_canonical(text, Alphabet::Standard) {
        return Cow::Borrowed(text);
    }
    let data = text.split(|byte| *byte == b'=').next().unwrap_or_default();
    Cow::Owned(spelled(data, Alphabet::Standard))
}

/// Returns the lengths in bytes that decoders may find in a text: all of it, or what precedes its padding.
pub(super) fn possible_lengths(text: &[u8]) -> [usize; 2] {
    let length = |text: &[u8]| text.iter().filter(|byte| value(**byte).is_some()).count() * 6 / 8;
    [length(text), length(text.split(|byte| *byte == b'=').next().unwrap_or_default())]
}

fn without_padding(text: &[u8]) -> &[u8] {
    let end = text.iter().rposition(|byte| *byte != b'=').map_or(0, |last| last + 1);
    &text[..end]
}

/// Spells text in one way, and skips characters of no alphabet.
fn spelled(text: &[u8], alphabet: Alphabet) -> Vec<u8> {
    let mut out: Vec<u8> = text.iter().filter_map(|byte| value(*byte)).collect();
    // A single character of a group has less than a byte.
    let spare_bits = match out.len() % 4 {
        0 => 0,
        1 => 6,
        2 => 4,
        _ => 2,
    };
    if let Some(last) = out.last_mut() {
        *last = *last >> spare_bits << spare_bits;
    }
    if spare_bits == 6 {
        out.pop();
    }
    out.iter_mut().for_each(|value| *value = letter(*value, alphabet));
    if alphabet == Alphabet::Standard {
        out.resize(out.len().next_multiple_of(4), b'=');
    }
    out
}

/// Returns `true` if a text is in its normal spelling.
fn is_canonical(text: &[u8], alphabet: Alphabet) -> bool {
    let data = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let padding = text.len() - data.len();
    let expected = if alphabet == Alphabet::Standard { data.len().next_multiple_of(4) - data.len() } else { 0 };
    let spare_bits = match data.len() % 4 {
        0 => 0,
        1 => return false,
        2 => 0x0F,
        _ => 0x03,
    };
    padding == expected
        && data.last().is_none_or(|last| VALUES[usize::from(*last)] & spare_bits == 0)
        && data.iter().all(|byte| is_of(*byte, alphabet))
}

/// Decodes text that has only characters of the URL-safe alphabet. Spare bits are ignored.
pub(super) fn decoded(text: &[u8]) -> Option<SmallVec<[u8; 128]>> {
    let (mut bits, mut count) = (0_u32, 0);
    let mut bytes = SmallVec::new();
    for byte in text {
        if !is_of(*byte, Alphabet::UrlSafe) {
            return None;
        }
        bits = bits << 6 | u32::from(VALUES[usize::from(*byte)]);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

/// The name and the password of `Basic` in a text that is sent under another scheme, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Login {
    /// There is none.
    Absent,
    /// Some bytes could be one.
    Possible,
    /// Text that no other token is likely to be.
    Evident,
}

/// Finds a name and a password: printable text with a colon. Decoders disagree about `-` and `_`.
pub(super) fn login(text: &[u8]) -> Login {
    let found = login_in(text.iter().filter_map(|byte| value(*byte)));
    if found == Login::Evident {
        return found;
    }
    let skipping = |byte: &u8| value(*byte).filter(|_| is_of(*byte, Alphabet::Standard));
    match login_in(text.iter().filter_map(skipping)) {
        Login::Evident => Login::Evident,
        _ => found,
    }
}

fn login_in(values: impl Iterator<Item = u8>) -> Login {
    let (mut bits, mut count, mut has_colon) = (0_u32, 0, false);
    let mut bytes = SmallVec::<[u8; 64]>::new();
    for value in values {
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            let byte = (bits >> count) as u8;
            // Most tokens end here.
            if byte.is_ascii_control() {
                return Login::Absent;
            }
            has_colon |= byte == b':';
            bytes.push(byte);
        }
    }
    match has_colon {
        false => Login::Absent,
        true if std::str::from_utf8(&bytes).is_ok() => Login::Evident,
        true => Login::Possible,
    }
}

fn value(byte: u8) -> Option<u8> {
    Some(VALUES[usize::from(byte)]).filter(|value| *value != OTHER)
}

fn letter(value: u8, alphabet: Alphabet) -> u8 {
    match (value, alphabet) {
        (62, Alphabet::UrlSafe) => b'-',
        (63, Alphabet::UrlSafe) => b'_',
        _ => STANDARD[usize::from(value & 63)],
    }
}

fn is_of(byte: u8, alphabet: Alphabet) -> bool {
    byte.is_ascii_alphanumeric()
        || match alphabet {
            Alphabet::Standard => matches!(byte, b'+' | b'/'),
            Alphabet::UrlSafe => matches!(byte, b'-' | b'_'),
        }
}

#[cfg(test)]
mod tests {
    use ::base64::Engine as _;
    use ::base64::engine::general_purpose::{STANDARD as PADDED, URL_SAFE_NO_PAD};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_that_decoders_read_differently_is_ambiguous() {
        for text in ["YQ==YQ", "Y=Q", "=YQ", "YQ==YQ==", "YQ==!", "Y!Q", "YQ ", "Y.Q", "YQ:", "Y\tQ", "Y~Q="] {
            assert_eq!(standard(text.as_bytes()), Err(Ambiguous), "{text}");
            assert_eq!(url_safe(text.as_bytes()), Err(Ambiguous), "{text}");
        }
        for text in ["-Q", "Y_Q"] {
            assert_eq!(standard(text.as_bytes()), Err(Ambiguous), "{text}");
            assert!(url_safe(text.as_bytes()).is_ok(), "{text}");
        }
        assert_eq!(standard(b"YR===").as_deref(), Ok(&b"YQ=="[..]));
        assert_eq!(url_safe(b"+R===").as_deref(), Ok(&b"-Q"[..]));
        assert_eq!(lenient(b"Y!R=junk").as_ref(), b"YQ==");
    }

    #[test]
    fn a_name_with_a_password_is_recognised() {
        for (text, expected) in [
            (&b"ann:pa"[..], Login::Evident),
            (b":", Login::Evident),
            ("ann:ä".as_bytes(), Login::Evident),
            (b"ann:\xE4", Login::Possible),
            (b"ann", Login::Absent),
            (b"a\0:b", Login::Absent),
            (b"", Login::Absent),
        ] {
            assert_eq!(login(PADDED.encode(text).as_bytes()), expected, "{text:?}");
        }
        for text in ["YW5-uO_nBh", "YW5.uOnBh", "YW5uOj8_Pz8"] {
            assert_eq!(login(text.as_bytes()), Login::Evident, "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_spelling_of_some_bytes_is_their_encoding(
            bytes in prop::collection::vec(any::<u8>(), 0..20),
            padding in "={0,3}",
            spare in 0_u8..16,
        ) {
            let (padded, plain) = (PADDED.encode(&bytes), URL_SAFE_NO_PAD.encode(&bytes));
            prop_assert_eq!(standard(padded.as_bytes()), Ok(Cow::Borrowed(padded.as_bytes())));
            prop_assert_eq!(url_safe(plain.as_bytes()), Ok(Cow::Borrowed(plain.as_bytes())));
            for (other, is_url_safe) in [(plain.clone(), true), (padded.trim_end_matches('=').to_owned(), false)] {
                let mut other = other;
                if let Some(last) = other.pop() {
                    let mask = [0, 0, 15, 3][(other.len() + 1) % 4];
                    let alphabet = if is_url_safe { Alphabet::UrlSafe } else { Alphabet::Standard };
                    other.push(char::from(letter(value(last as u8).unwrap() | spare & mask, alphabet)));
                }
                other.push_str(&padding);
                prop_assert_eq!(&*url_safe(other.as_bytes()).unwrap(), plain.as_bytes());
                if !other.contains(['-', '_']) {
                    prop_assert_eq!(&*standard(other.as_bytes()).unwrap(), padded.as_bytes());
                }
                prop_assert_eq!(&*lenient(other.as_bytes()), padded.as_bytes());
            }
            prop_assert_eq!(decoded(plain.as_bytes()).unwrap().to_vec(), bytes);
        }
    }
}
