//! Client certificates.
//!
//! Not here: parsing and verifying certificates, which is done where the TLS connection ends.

use super::named_key::{InvalidPart, shown};

/// The length of a SHA-256 in hexadecimal.
const FINGERPRINT_DIGITS: usize = 64;

/// A verified client certificate of a TLS connection.
///
/// ```
/// use tollgate_rules::Certificate;
///
/// let mut certificate = Certificate::new("5d41402abc4b2a76b9719d911017c592ae2b2e5f6c1c0f3f7a1e3a1c2b3d4e5f");
/// certificate.cn = Some("billing".to_owned());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Certificate {
    /// The common name of the subject.
    pub cn: Option<String>,
    /// The first subject alternative name that is a DNS name, a URI or an email address.
    pub san: Option<String>,
    /// The SHA-256 of the DER encoding, in lower-case hexadecimal.
    pub fingerprint: String,
    /// The fingerprint of the same certificate with the other signature that its owner can compute.
    ///
    /// For every ECDSA signature (r, s), the signature (r, n - s) is valid too, and needs no private key. So the owner of
    /// a certificate that was signed with ECDSA has two encodings of it. Both are one key: set the other fingerprint, or
    /// the owner gets past a limit or a block list with it.
    pub other_fingerprint: Option<String>,
}

impl Certificate {
    /// Creates a certificate with a fingerprint and without names.
    #[must_use]
    pub fn new(fingerprint: impl Into<String>) -> Self {
        Self { cn: None, san: None, fingerprint: fingerprint.into(), other_fingerprint: None }
    }

    /// Returns the fingerprint that a key uses: the same one for both signatures. A rule that lists one of the two uses
    /// that one, because nobody can tell which one the authority has issued.
    pub(super) fn key_fingerprint(&self, listed: &[Box<[u8]>]) -> &str {
        self.key_fingerprints(listed).0
    }

    /// Returns the fingerprint that a key uses, and the other one of the same certificate.
    pub(super) fn key_fingerprints(&self, listed: &[Box<[u8]>]) -> (&str, Option<&str>) {
        let Some(other) = &self.other_fingerprint else { return (&self.fingerprint, None) };
        let (first, second) = (other.min(&self.fingerprint), other.max(&self.fingerprint));
        let is_listed = |fingerprint: &str| listed.iter().any(|listed| **listed == *fingerprint.as_bytes());
        if is_listed(second) && !is_listed(first) { (second, Some(first)) } else { (first, Some(second)) }
    }
}

/// Returns a fingerprint that a caller names in its normal form. OpenSSL prints it in upper case, with colons.
///
/// # Errors
///
/// If it is not a SHA-256 in hexadecimal.
pub(super) fn named_fingerprint(text: &[u8]) -> Result<Vec<u8>, InvalidPart> {
    let digits: Vec<u8> = text.iter().filter(|byte| **byte != b':').map(u8::to_ascii_lowercase).collect();
    if digits.len() == FINGERPRINT_DIGITS && digits.iter().all(u8::is_ascii_hexdigit) {
        return Ok(digits);
    }
    let problem = format!("`{}` is not a SHA-256 fingerprint", shown(text));
    Err(InvalidPart::new(problem, "write its 64 hexadecimal digits, with or without colons"))
}

/// The field of a certificate that a key uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CertificateField {
    /// The fingerprint: one key per certificate.
    Fingerprint,
    /// The common name.
    Cn,
    /// The subject alternative name.
    San,
}

impl CertificateField {
    /// Returns the name of the field in the rule file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fingerprint => "fingerprint",
            Self::Cn => "cn",
            Self::San => "san",
        }
    }

    pub(super) fn of(self, certificate: &Certificate) -> Option<&str> {
        match self {
            Self::Fingerprint => Some(certificate.key_fingerprint(&[])),
            Self::Cn => certificate.cn.as_deref(),
            Self::San => certificate.san.as_deref(),
        }
    }
}
