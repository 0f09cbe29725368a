//! The certificate of a client as limits count it.

mod fingerprint;

use rustls::ServerConnection;
use tollgate_rules::Certificate;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use self::fingerprint::Fingerprints;

/// Returns the verified certificate of a client.
pub(super) fn client_certificate(connection: &ServerConnection) -> Option<Certificate> {
    let der = connection.peer_certificates()?.first()?;
    let Fingerprints { sent, other } = fingerprint::fingerprints(der);
    let mut certificate = Certificate::new(sent);
    certificate.other_fingerprint = other;
    let (_, parsed) = X509Certificate::from_der(der).ok()?;
    certificate.cn = parsed.subject().iter_common_name().find_map(|name| name.as_str().ok()).map(str::to_owned);
    let names = parsed.subject_alternative_name().ok().flatten();
    certificate.san = names.iter().flat_map(|names| &names.value.general_names).find_map(|name| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) | GeneralName::RFC822Name(name) => Some((*name).to_owned()),
        _ => None,
    });
    Some(certificate)
}
