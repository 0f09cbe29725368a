//! Signed tokens: JWT (RFC 7515, RFC 7516), and sessions such as Flask's, which have the same form.
//!
//! What is signed is compared as text, so it has one spelling. The signature is decoded first, by decoders that ignore
//! spare bits, padding and characters of no alphabet; and anyone can replace the second half of an ECDSA signature
//! without the private key. So a key has what is signed, and the first characters of the signature, which nobody can
//! guess or change.

use std::borrow::Cow;

use super::base64::{self, Alphabet};

/// 120 bits, in the first half of every signature that is in use. The shortest is HMAC-SHA1's, of 27 characters.
const SIGNATURE_CHARACTERS: usize = 20;

/// Returns the normal form of a signed token, or the text itself if it is none.
pub(in crate::rules) fn normal(text: &[u8]) -> Cow<'_, [u8]> {
    match Kind::of(text) {
        Some(Kind::Signed { signature }) => without_signature_end(text, signature),
        Some(Kind::Encrypted) => encrypted(text),
        None => Cow::Borrowed(text),
    }
}

/// Returns `true` for a signed or encrypted token.
pub(super) fn is_one(text: &[u8]) -> bool {
    Kind::of(text).is_some()
}

enum Kind {
    /// The signature begins at this byte.
    Signed {
        signature: usize,
    },
    Encrypted,
}

impl Kind {
    fn of(text: &[u8]) -> Option<Self> {
        // JSON that begins with `{`. A compressed session begins with a dot.
        if !matches!(text, [b'e', b'y' | b'w', ..] | [b'.', b'e', b'J', ..]) {
            return None;
        }
        let dots = text.iter().skip(1).filter(|byte| **byte == b'.').count();
        let signature = text.iter().rposition(|byte| *byte == b'.')? + 1;
        let is_clean = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        match dots {
            // What is signed has one spelling. Other texts only look alike.
            2 if text[..signature].iter().all(is_clean) => Some(Self::Signed { signature }),
            4 => Some(Self::Encrypted),
            _ => None,
        }
    }
}

/// Returns the normal form of a text that may be owned.
pub(in crate::rules) fn normal_of(text: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => normal(text),
        Cow::Owned(text) => match normal(&text) {
            Cow::Borrowed(form) if form.len() == text.len() => Cow::Owned(text),
            form => Cow::Owned(form.into_owned()),
        },
    }
}

/// Shortens the signature that begins at `start`.
fn without_signature_end(text: &[u8], start: usize) -> Cow<'_, [u8]> {
    let (signed, signature) = text.split_at(start);
    match base64::first_characters(signature, SIGNATURE_CHARACTERS) {
        Cow::Borrowed(first) => Cow::Borrowed(&text[..start + first.len()]),
        Cow::Owned(first) => Cow::Owned([signed, &first].concat()),
    }
}

/// Spells the parts of an encrypted token in one way. Its header is authenticated as text.
fn encrypted(text: &[u8]) -> Cow<'_, [u8]> {
    let mut parts = text.split(|byte| *byte == b'.');
    let mut normal = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        normal.push(b'.');
        normal.extend_from_slice(&base64::canonical(part, Alphabet::UrlSafe).unwrap_or(Cow::Borrowed(part)));
    }
    Cow::Owned(normal)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(value: &str) -> String {
        String::from_utf8(normal(value.as_bytes()).into_owned()).unwrap()
    }

    #[test]
    fn the_end_of_a_signature_is_no_part_of_the_form() {
        let signature = "q83vEjRWeJCrze8SNFZ4kKvN7xI";
        for spelling in
            [signature, "q83vEjRWeJCrze8SNFZ4DDDD", "q8!3v=EjRWeJ.Crze8SNFZ4kKvN7xI=".replace('.', ":").as_str()]
        {
            assert_eq!(text(&format!("eyJh.eyJi.{spelling}")), "eyJh.eyJi.q83vEjRWeJCrze8SNFZ4");
        }
        assert_eq!(text(&format!("eyJh.eyJi.{}", "+/".repeat(30))), format!("eyJh.eyJi.{}", "-_".repeat(10)));
        assert_eq!(text(".eJyr.aLRx.q83vEjRWeJCrze8SNFZ4kKvN7xI"), ".eJyr.aLRx.q83vEjRWeJCrze8SNFZ4");
        assert_eq!(text("eyJh.YR.YQ==.Y!Q.YQ"), "eyJh.YQ.YQ.YQ.YQ");
    }

    #[test]
    fn other_texts_are_their_own_form() {
        for value in ["", "ey", "eyJh.eyJi", "eyJh.a.b.c", "10.0.0.1", "a.b.c==", "user-1"] {
            assert_eq!(text(value), value);
        }
    }

    proptest! {
        #[test]
        fn a_normal_form_is_its_own(value in "\\.?e[ywJ][a-z0-9+/_=.!-]{0,60}") {
            let once = text(&value);
            prop_assert_eq!(text(&once), once);
        }
    }
}
