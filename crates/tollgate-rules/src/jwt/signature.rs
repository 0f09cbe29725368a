//! Verifies signatures with ring, which is an order of magnitude faster than portable Rust.

use ring::agreement::{self, ECDH_P256, EphemeralPrivateKey};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};

/// The minimum of RFC 7518 for HS256 (section 3.2). A shorter secret can be brute-forced from a single token.
pub(super) const MIN_SECRET_BYTES: usize = 32;

/// At least the minimum of RFC 7518 for RS256 (section 3.3). Keys above the maximum would make verification several
/// times as expensive.
const RSA_BYTES: std::ops::RangeInclusive<usize> = 256..=512;

/// Exponents that ring supports.
const RSA_EXPONENTS: std::ops::RangeInclusive<u64> = 3..=(1 << 33) - 1;

/// The length of every Ed25519 key.
const ED25519_BYTES: usize = 32;

/// An uncompressed P-256 point: a tag and two coordinates.
const P256_POINT_BYTES: usize = 65;

/// A valid key of sufficient strength.
pub(super) enum PublicKey {
    Hmac(ring::hmac::Key),
    Rsa(RsaPublicKeyComponents<Box<[u8]>>),
    P256(UnparsedPublicKey<Box<[u8]>>),
    Ed25519(UnparsedPublicKey<Box<[u8]>>),
}

impl PublicKey {
    pub(super) fn hmac(secret: &[u8]) -> Option<Self> {
        (secret.len() >= MIN_SECRET_BYTES).then(|| Self::Hmac(ring::hmac::Key::new(ring::hmac::HMAC_SHA256, secret)))
    }

    /// Creates a key from modulus and exponent, which may have leading zeros.
    pub(super) fn rsa(n: &[u8], e: &[u8]) -> Option<Self> {
        let (n, e) = (without_zeros(n), without_zeros(e));
        if e.len() > 8 || !RSA_BYTES.contains(&n.len()) {
            return None;
        }
        let exponent = e.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        let is_odd = |bytes: &[u8]| bytes.last().is_some_and(|byte| byte % 2 == 1);
        let is_sound = is_odd(n) && is_odd(e) && RSA_EXPONENTS.contains(&exponent);
        is_sound.then(|| Self::Rsa(RsaPublicKeyComponents { n: n.into(), e: e.into() }))
    }

    /// Parses the DER of an `RSAPublicKey` (RFC 8017, appendix A.1.1).
    pub(super) fn rsa_der(der: &[u8]) -> Option<Self> {
        let (sequence, rest) = der_element(0x30, der)?;
        let (n, after) = der_element(0x02, sequence)?;
        let (e, end) = der_element(0x02, after)?;
        let is_positive = |number: &[u8]| number.first().is_some_and(|byte| *byte < 0x80);
        let is_whole = rest.is_empty() && end.is_empty() && is_positive(n) && is_positive(e);
        if is_whole { Self::rsa(n, e) } else { None }
    }

    /// Creates a key from an uncompressed point.
    pub(super) fn p256(point: &[u8]) -> Option<Self> {
        if point.len() != P256_POINT_BYTES || point.first() != Some(&4) {
            return None;
        }
        // ring checks that a point is on the curve when it agrees on a secret with it.
        let ours = EphemeralPrivateKey::generate(&ECDH_P256, &SystemRandom::new()).ok()?;
        agreement::agree_ephemeral(ours, &agreement::UnparsedPublicKey::new(&ECDH_P256, point), |_| ()).ok()?;
        Some(Self::P256(UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point.into())))
    }

    pub(super) fn ed25519(key: &[u8]) -> Option<Self> {
        (key.len() == ED25519_BYTES).then(|| Self::Ed25519(UnparsedPublicKey::new(&ED25519, key.into())))
    }

    /// Returns `true` if this key signed the message.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Hmac(key) => ring::hmac::verify(key, message, signature).is_ok(),
            Self::Rsa(key) => key.verify(&RSA_PKCS1_2048_8192_SHA256, message, signature).is_ok(),
            Self::P256(key) | Self::Ed25519(key) => key.verify(message, signature).is_ok(),
        }
    }
}

fn without_zeros(number: &[u8]) -> &[u8] {
    &number[number.iter().take_while(|byte| **byte == 0).count()..]
}

/// Parses a DER element with this tag. Returns its value and the rest.
fn der_element(tag: u8, input: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&[found, first], rest) = input.split_first_chunk()?;
    if found != tag {
        return None;
    }
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81 => rest.split_first().map(|(byte, rest)| (usize::from(*byte), rest))?,
        0x82 => rest.split_first_chunk().map(|(bytes, rest)| (usize::from(u16::from_be_bytes(*bytes)), rest))?,
        _ => return None,
    };
    rest.split_at_checked(length)
}
