//! What a client's certificate says of the client.
//!
//! Deliberately not here: reading and verifying certificates, which is the work of whoever ends the TLS connection.

/// A certificate that the client of a TLS connection has shown, and that was verified.
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
    /// The common name of its subject.
    pub cn: Option<String>,
    /// The first of its alternative names that is a DNS name, a URI or a mail address.
    pub san: Option<String>,
    /// The SHA-256 of its DER, in lower-case hexadecimal.
    pub fingerprint: String,
}

impl Certificate {
    /// A certificate of that fingerprint, without names.
    #[must_use]
    pub fn new(fingerprint: impl Into<String>) -> Self {
        Self { cn: None, san: None, fingerprint: fingerprint.into() }
    }
}

/// What of a certificate a key is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CertificateField {
    /// Its fingerprint: one key for each certificate.
    Fingerprint,
    /// Its common name.
    Cn,
    /// Its alternative name.
    San,
}

impl CertificateField {
    /// As a rule file names it.
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
