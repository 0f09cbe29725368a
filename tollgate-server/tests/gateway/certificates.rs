//! Certificates for tests, and authorities that issue them.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::RootCertStore;
use time::OffsetDateTime;

/// An authority that issues certificates.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
pub(crate) struct Signed {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl Signed {
    /// Returns a self-signed certificate, as `openssl req -x509` creates it.
    pub(crate) fn by_itself(params: &CertificateParams) -> Self {
        let key = KeyPair::generate().unwrap();
        Self { cert: params.self_signed(&key).unwrap().pem(), key: key.serialize_pem() }
    }
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Some treat a certificate with the name of its authority as self-signed.
        params.distinguished_name.push(DnType::CommonName, "an authority of tests");
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn sign(&self, names: &[&str]) -> Signed {
        self.sign_params(params(names))
    }

    pub(crate) fn sign_for(&self, names: &[&str], from: OffsetDateTime, to: OffsetDateTime) -> Signed {
        let mut params = params(names);
        (params.not_before, params.not_after) = (from, to);
        self.sign_params(params)
    }

    pub(crate) fn sign_params(&self, params: CertificateParams) -> Signed {
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        Signed { cert: cert.pem(), key: key.serialize_pem() }
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    pub(crate) fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        roots
    }
}

pub(crate) fn params(names: &[&str]) -> CertificateParams {
    CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap()
}
