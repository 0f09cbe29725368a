//! TLS to upstreams: trusted certificates and server names.

mod fault;

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;
use tollgate::rules::file::internal::{SettingError, UpstreamTlsRule};

pub(super) use self::fault::TlsFault;

/// The TLS settings of an upstream.
pub(super) struct UpstreamTls {
    /// Offers HTTP/2 and HTTP/1.1.
    pub(super) connector: TlsConnector,
    /// Offers only HTTP/1.1, which upgrades need.
    pub(super) http1: TlsConnector,
    pub(super) name: ServerName<'static>,
}

impl UpstreamTls {
    pub(super) fn new(rule: &UpstreamTlsRule, host: &str, folder: &Path) -> Result<Self, SettingError> {
        let mut roots = RootCertStore::empty();
        match &rule.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(file) => {
                let path = folder.join(file);
                let bad = |problem: String| {
                    let problem = format!("upstream_tls.ca {}: {problem}", path.display());
                    SettingError::new(problem, "name a PEM file with certificates").of("ca").of("upstream_tls")
                };
                let certificates = CertificateDer::pem_file_iter(&path).map_err(|error| bad(error.to_string()))?;
                for certificate in certificates {
                    let certificate = certificate.map_err(|error| bad(error.to_string()))?;
                    roots.add(certificate).map_err(|error| bad(error.to_string()))?;
                }
                if roots.is_empty() {
                    return Err(bad("it contains no certificate".to_owned()));
                }
            }
        }
        let name = rule.server_name.as_deref().unwrap_or(host.trim_matches(['[', ']']));
        let name = ServerName::try_from(name.to_owned()).map_err(|_| {
            let problem = format!("upstream_tls.server_name `{name}` is not a host name");
            SettingError::new(problem, "use one such as api.internal").of("server_name").of("upstream_tls")
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| SettingError::new(error.to_string(), "use https:// where TLS is possible"))?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let http1 = TlsConnector::from(Arc::new(config.clone()));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), http1, name })
    }
}
