//! One spelling of base64.
//!
//! Decoders are lenient: they take both alphabets, need no padding, ignore the spare bits of the last character, and
//! Python's and Node's skip every character of no alphabet. Text that all of them decode alike gets one spelling.

use std::borrow::Cow;

use smallvec::SmallVec;

/// The alphabet of the normal spelling. The standard one is padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alphabet {
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

/// Returns the normal spelling, or `None` if padding is not at the end: some decoders stop there, and others skip it.
pub(super) fn canonical(text: &[u8], alphabet: Alphabet) -> Option<Cow<'_, [u8]>> {
    if is_canonical(text, alphabet) {
        return Some(Cow::Borrowed(text));
    }
    let end = text.iter().position(|byte| *byte == b'=').unwrap_or(text.len());
    let (data, padding) = text.split_at(end);
    if padding.iter().any(|byte| value(*byte).is_some()) {
        return None;
    }
    Some(Cow::Owned(spelled(data, alphabet)))
}

/// Spells text in one way, and skips padding and characters of no alphabet.
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

/// Returns the normal spelling in the URL-safe alphabet, where all decoders skip padding or reject the text.
pub(super) fn unpadded(text: &[u8]) -> Cow<'_, [u8]> {
    if is_canonical(text, Alphabet::UrlSafe) {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(spelled(text, Alphabet::UrlSafe))
    }
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

/// Returns `true` if a text decodes to printable text with a colon: the name and the password of `Basic`, under whatever
/// scheme they are sent.
pub(super) fn hides_password(text: &[u8]) -> bool {
    let (mut bits, mut count, mut has_colon) = (0_u32, 0, false);
    for value in text.iter().filter_map(|byte| value(*byte)) {
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            let byte = (bits >> count) as u8;
            // Most tokens end here.
            if byte.is_ascii_control() {
                return false;
            }
            has_colon |= byte == b':';
        }
    }
    has_colon
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
    fn padding_before_the_end_is_ambiguous() {
        for text in ["YQ==YQ", "Y=Q", "=YQ", "YQ==YQ=="] {
            assert_eq!(canonical(text.as_bytes(), Alphabet::Standard), None, "{text}");
        }
        assert_eq!(canonical(b"YQ==!.", Alphabet::Standard).as_deref(), Some(&b"YQ=="[..]));
    }

    #[test]
    fn a_name_with_a_password_is_recognised() {
        for (text, is_login) in [("ann:pa", true), (":", true), ("ann", false), ("a\0:b", false), ("", false)] {
            assert_eq!(hides_password(PADDED.encode(text).as_bytes()), is_login, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn every_spelling_of_some_bytes_is_their_encoding(
            bytes in prop::collection::vec(any::<u8>(), 0..20),
            junk in "[!. ~:]{0,3}",
            at in any::<prop::sample::Index>(),
            is_url_safe: bool,
            spare in 0_u8..16,
        ) {
            let (padded, plain) = (PADDED.encode(&bytes), URL_SAFE_NO_PAD.encode(&bytes));
            prop_assert_eq!(canonical(padded.as_bytes(), Alphabet::Standard), Some(Cow::Borrowed(padded.as_bytes())));
            prop_assert_eq!(canonical(plain.as_bytes(), Alphabet::UrlSafe), Some(Cow::Borrowed(plain.as_bytes())));
            let mut other = if is_url_safe { plain.clone() } else { padded.trim_end_matches('=').to_owned() };
            if let Some(last) = other.pop() {
                let mask = [0, 0, 15, 3][(other.len() + 1) % 4];
                let last = letter(value(last as u8).unwrap() | spare & mask, Alphabet::Standard);
                other.push(char::from(last));
            }
            other.insert_str(at.index(other.len() + 1), &junk);
            prop_assert_eq!(&*canonical(other.as_bytes(), Alphabet::Standard).unwrap(), padded.as_bytes());
            prop_assert_eq!(&*canonical(other.as_bytes(), Alphabet::UrlSafe).unwrap(), plain.as_bytes());
            let padded = [b"=", other.as_bytes(), b"="].concat();
            prop_assert_eq!(&*unpadded(&padded), plain.as_bytes());
            prop_assert_eq!(decoded(plain.as_bytes()).unwrap().to_vec(), bytes);
        }
    }
}
