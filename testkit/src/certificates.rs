//! Certificates for tests, and authorities that issue them.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::RootCertStore;
use time::OffsetDateTime;

/// An authority that issues certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
pub struct Signed {
    /// The certificate.
    pub cert: String,
    /// The key.
    pub key: String,
}

impl Signed {
    /// Returns a self-signed certificate, as `openssl req -x509` creates it.
    pub fn by_itself(params: &CertificateParams) -> Self {
        let key = KeyPair::generate().expect("the certificate is valid");
        Self { cert: params.self_signed(&key).expect("the certificate is valid").pem(), key: key.serialize_pem() }
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

impl Authority {
    /// Makes an authority with a new key.
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("the certificate is valid");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Some treat a certificate with the name of its authority as self-signed.
        params.distinguished_name.push(DnType::CommonName, "an authority of tests");
        Self(
            CertifiedIssuer::self_signed(params, KeyPair::generate().expect("the certificate is valid"))
                .expect("the certificate is valid"),
        )
    }

    /// Issues a certificate for these names.
    pub fn sign(&self, names: &[&str]) -> Signed {
        self.sign_params(params(names))
    }

    /// Issues a certificate that is valid from one time to another.
    pub fn sign_for(&self, names: &[&str], from: OffsetDateTime, to: OffsetDateTime) -> Signed {
        let mut params = params(names);
        (params.not_before, params.not_after) = (from, to);
        self.sign_params(params)
    }

    /// Issues a certificate.
    pub fn sign_params(&self, params: CertificateParams) -> Signed {
        let key = KeyPair::generate().expect("the certificate is valid");
        let cert = params.signed_by(&key, &self.0).expect("the certificate is valid");
        Signed { cert: cert.pem(), key: key.serialize_pem() }
    }

    /// Returns the certificate of the authority, in PEM.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Returns a store that trusts this authority alone.
    pub fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).expect("the certificate is valid");
        roots
    }
}

/// Returns the parameters of a certificate for these names.
pub fn params(names: &[&str]) -> CertificateParams {
    CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
        .expect("the certificate is valid")
}
