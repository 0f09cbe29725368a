//! Fingerprints of client certificates: the SHA-256 of the DER encoding.
//!
//! The owner of a certificate can change its encoding in one way. For an ECDSA signature (r, s), the signature (r, n - s)
//! is valid too, where n is the order of the authority's curve, and computing it needs no private key. So a certificate
//! that was signed with ECDSA has two fingerprints, and limits count both as one. Signatures with RSA and Ed25519 have
//! one valid encoding, and rustls accepts DER only.
//!
//! Deliberately not here: verifying certificates. rustls has done so.

use sha2::{Digest, Sha256};

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;

/// The object identifiers `ecdsa-with-…` begin with this arc: 1.2.840.10045.4.
const ECDSA: [u8; 6] = [0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x04];

/// The orders of the curves P-256, P-384 and P-521, the curves that rustls verifies.
const ORDERS: [&[u8]; 3] = [
    &[
        0xFF, 0xFF, 0xFF, 0xFF, 0x00, 0x00, 0x00, 0x00, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xBC, 0xE6,
        0xFA, 0xAD, 0xA7, 0x17, 0x9E, 0x84, 0xF3, 0xB9, 0xCA, 0xC2, 0xFC, 0x63, 0x25, 0x51,
    ],
    &[
        0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
        0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xC7, 0x63, 0x4D, 0x81, 0xF4, 0x37, 0x2D, 0xDF, 0x58, 0x1A, 0x0D, 0xB2,
        0x48, 0xB0, 0xA7, 0x7A, 0xEC, 0xEC, 0x19, 0x6A, 0xCC, 0xC5, 0x29, 0x73,
    ],
    &[
        0x01, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
        0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFA, 0x51, 0x86,
        0x87, 0x83, 0xBF, 0x2F, 0x96, 0x6B, 0x7F, 0xCC, 0x01, 0x48, 0xF7, 0x09, 0xA5, 0xD0, 0x3B, 0xB5, 0xC9, 0xB8,
        0x89, 0x9C, 0x47, 0xAE, 0xBB, 0x6F, 0xB7, 0x1E, 0x91, 0x38, 0x64, 0x09,
    ],
];

/// The fingerprints of a certificate, in lower-case hexadecimal.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fingerprints {
    /// Of the certificate as the client sent it.
    pub(super) sent: String,
    /// Of the certificate with the other valid signature.
    pub(super) other: Option<String>,
}

/// Returns the fingerprints of a verified certificate.
pub(super) fn fingerprints(der: &[u8]) -> Fingerprints {
    let fingerprint = |der: &[u8]| format!("{:x}", Sha256::digest(der));
    let Some(parts) = Parts::of(der).filter(|parts| parts.is_signed_with_ecdsa()) else {
        return Fingerprints { sent: fingerprint(der), other: None };
    };
    match parts.other_signature() {
        Some(other) => Fingerprints { sent: fingerprint(der), other: Some(fingerprint(&parts.with_signature(&other))) },
        // No certificate that rustls has verified. What is signed cannot be changed, whatever the signature is.
        None => Fingerprints { sent: fingerprint(parts.signed), other: None },
    }
}

/// The parts of a certificate (RFC 5280, section 4.1).
struct Parts<'a> {
    /// The encoding of the `TBSCertificate`.
    signed: &'a [u8],
    /// The encoding of the signature's algorithm.
    algorithm: &'a [u8],
    signature: &'a [u8],
}

impl<'a> Parts<'a> {
    fn of(der: &'a [u8]) -> Option<Self> {
        let (_, certificate, []) = element(der, SEQUENCE)? else { return None };
        let (signed, _, rest) = element(certificate, SEQUENCE)?;
        let (algorithm, _, rest) = element(rest, SEQUENCE)?;
        let (_, [0, signature @ ..], []) = element(rest, BIT_STRING)? else { return None };
        Some(Self { signed, algorithm, signature })
    }

    fn is_signed_with_ecdsa(&self) -> bool {
        // The tag and the length of the sequence and of the identifier, which are all short.
        self.algorithm.get(4..).is_some_and(|identifier| identifier.starts_with(&ECDSA))
    }

    /// Returns the encoding of (r, n - s).
    fn other_signature(&self) -> Option<Vec<u8>> {
        let (_, numbers, []) = element(self.signature, SEQUENCE)? else { return None };
        let (r, r_number, rest) = element(numbers, INTEGER)?;
        let (_, s, []) = element(rest, INTEGER)? else { return None };
        let (r_number, s) = (without_zeros(r_number), without_zeros(s));
        // A number that is a byte shorter than its curve allows is rare, and that both are so much shorter is impossible.
        let order = ORDERS.into_iter().find(|order| r_number.len().max(s.len()) <= order.len())?;
        let negated = difference(order, s)?;
        let negated = without_zeros(&negated);
        let sign = if negated.first().is_some_and(|first| first & 0x80 != 0) { &[0][..] } else { &[] };
        Some(encoded(SEQUENCE, &[r, &encoded(INTEGER, &[sign, negated])]))
    }

    fn with_signature(&self, signature: &[u8]) -> Vec<u8> {
        encoded(SEQUENCE, &[self.signed, self.algorithm, &encoded(BIT_STRING, &[&[0], signature])])
    }
}

/// Splits an element with this tag from the rest. Returns it, its content, and the rest.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8], &[u8])> {
    let (found, [first, ..]) = der.split_first()? else { return None };
    let length_bytes = if *first < 0x80 { 0 } else { usize::from(first & 0x7F) };
    let length = match length_bytes {
        0 => usize::from(*first),
        1..=4 => der.get(2..2 + length_bytes)?.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)),
        _ => return None,
    };
    let start = 2 + length_bytes;
    let (whole, rest) = der.split_at_checked(start.checked_add(length)?)?;
    (*found == tag).then_some((whole, &whole[start..], rest))
}

fn encoded(tag: u8, contents: &[&[u8]]) -> Vec<u8> {
    let length: usize = contents.iter().map(|part| part.len()).sum();
    let mut out = vec![tag];
    match u8::try_from(length) {
        Ok(short) if short < 0x80 => out.push(short),
        _ => {
            let bytes = length.to_be_bytes();
            let bytes = without_zeros(&bytes);
            out.push(0x80 | bytes.len() as u8);
            out.extend_from_slice(bytes);
        }
    }
    contents.iter().for_each(|part| out.extend_from_slice(part));
    out
}

fn without_zeros(number: &[u8]) -> &[u8] {
    &number[number.iter().take_while(|byte| **byte == 0).count()..]
}

/// Returns `minuend - subtrahend`, or `None` if it is not positive.
fn difference(minuend: &[u8], subtrahend: &[u8]) -> Option<Vec<u8>> {
    let mut borrow = 0;
    let mut digits: Vec<u8> = Vec::with_capacity(minuend.len());
    let mut lower = subtrahend.iter().rev();
    for digit in minuend.iter().rev() {
        let value = i16::from(*digit) - i16::from(lower.next().copied().unwrap_or(0)) - borrow;
        borrow = i16::from(value < 0);
        digits.push(value.rem_euclid(256) as u8);
    }
    digits.reverse();
    (borrow == 0 && digits.iter().any(|digit| *digit != 0)).then_some(digits)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SignatureAlgorithm};
    use rustls::pki_types::{CertificateDer, UnixTime};
    use rustls::server::WebPkiClientVerifier;
    use rustls::{RootCertStore, crypto};

    use super::*;

    /// Returns the certificate of an authority with this kind of key, and one that it has issued.
    fn issued(algorithm: &'static SignatureAlgorithm) -> (CertificateDer<'static>, CertificateDer<'static>) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate_for(algorithm).unwrap();
        let authority = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let client = CertificateParams::new(vec!["client".to_owned()]).unwrap();
        let client = client.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap();
        (authority.der().clone(), client.der().clone())
    }

    /// Returns a certificate with the other valid signature, which rustls verifies, too.
    fn with_other_signature(authority: CertificateDer<'static>, certificate: &[u8]) -> Vec<u8> {
        let parts = Parts::of(certificate).unwrap();
        let other = parts.with_signature(&parts.other_signature().unwrap());
        let mut roots = RootCertStore::empty();
        roots.add(authority).unwrap();
        let provider = Arc::new(crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        verifier.verify_client_cert(&other.clone().into(), &[], UnixTime::now()).expect("the signature is valid");
        other
    }

    #[test]
    fn both_signatures_of_ecdsa_have_the_same_fingerprints() {
        for algorithm in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384] {
            // The lengths of encoded numbers vary.
            for _ in 0..8 {
                let (authority, certificate) = issued(algorithm);
                let other = with_other_signature(authority, &certificate);
                assert_ne!(*certificate, *other);
                let (one, two) = (fingerprints(&certificate), fingerprints(&other));
                assert_eq!(one.sent, format!("{:x}", Sha256::digest(&certificate)), "as OpenSSL prints it");
                assert_eq!((Some(&one.sent), &one.other), (two.other.as_ref(), &Some(two.sent)));
            }
        }
    }

    #[test]
    fn other_signatures_have_one_fingerprint() {
        let (_, certificate) = issued(&rcgen::PKCS_ED25519);
        let expected = format!("{:x}", Sha256::digest(&certificate));
        assert_eq!(fingerprints(&certificate), Fingerprints { sent: expected, other: None });
    }

    #[test]
    fn orders_are_those_of_the_curves() {
        // An order is odd, and begins with ones.
        for (order, bits) in ORDERS.into_iter().zip([256, 384, 521]) {
            assert_eq!(order.len(), usize::div_ceil(bits, 8));
            assert_eq!(difference(order, order), None);
            let one = difference(order, &difference(order, &[1]).unwrap()).unwrap();
            assert_eq!(without_zeros(&one), [1]);
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(der in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..80), cut in 0..600_usize) {
            _ = fingerprints(&der);
            let (_, certificate) = issued(&rcgen::PKCS_ECDSA_P256_SHA256);
            _ = fingerprints(&certificate[..cut.min(certificate.len())]);
        }
    }
}
