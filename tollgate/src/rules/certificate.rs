//! Client certificates.
//!
//! Not here: parsing and verifying certificates, which is done where the TLS connection ends.

/// A verified client certificate of a TLS connection.
///
/// ```
/// use tollgate::rules::Certificate;
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
}

impl Certificate {
    /// Creates a certificate with a fingerprint and without names.
    #[must_use]
    pub fn new(fingerprint: impl Into<String>) -> Self {
        Self { cn: None, san: None, fingerprint: fingerprint.into() }
    }
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
            Self::Fingerprint => Some(&certificate.fingerprint),
            Self::Cn => certificate.cn.as_deref(),
            Self::San => certificate.san.as_deref(),
        }
    }
}
