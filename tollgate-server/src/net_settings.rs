//! Settings of `tollgate-net` from the rule file, for the gateway, the decision service and the admin listener.

use std::path::Path;

use tollgate_config::internal::{
    ClientCertificates as ClientCertificatesRule, ProxyProtocolRule, SettingError, TlsRule,
};
use tollgate_net::proxy_protocol::{ProxyProtocol, Senders};
use tollgate_net::tls::{CertificateFiles, ClientCertificates, Settings, Step, Tls, TlsProblem};
use tollgate_rules::Networks;

/// Returns which connections begin with a PROXY header.
pub(crate) fn proxy_protocol(rule: &ProxyProtocolRule) -> ProxyProtocol {
    let networks = match rule {
        ProxyProtocolRule::Off => return ProxyProtocol::Off,
        // Refused when the file is loaded; without senders, every connection is closed.
        ProxyProtocolRule::Unrestricted => Networks::default(),
        // Their number is bounded when the file is loaded.
        ProxyProtocolRule::From(networks) => {
            Networks::parse(networks.iter().map(ToString::to_string)).unwrap_or_default()
        }
    };
    ProxyProtocol::From(Senders::new(move |address| networks.contains(address)))
}

/// Reads the files of a TLS rule, which `setting` names in the rule file. Returns all problems with the files, not only
/// the first.
pub(crate) fn tls(rule: &TlsRule, folder: &Path, setting: &'static str) -> Result<Tls, Vec<SettingError>> {
    let certificates = rule.certificates.iter().map(|rule| CertificateFiles {
        cert: folder.join(&rule.cert),
        key: folder.join(&rule.key),
        configured: rule.cert.clone(),
    });
    let settings = Settings {
        certificates: certificates.collect(),
        client_ca: rule.client_ca.as_ref().map(|file| folder.join(file)),
        client_certificates: match rule.client_certificates {
            ClientCertificatesRule::Optional => ClientCertificates::Optional,
            _ => ClientCertificates::Required,
        },
        setting,
    };
    Tls::new(settings).map_err(|problems| problems.into_iter().map(setting_error).collect())
}

fn setting_error(problem: TlsProblem) -> SettingError {
    let TlsProblem { message, fix, path } = problem;
    path.into_iter().fold(SettingError::new(message, fix), |error, step| match step {
        Step::Key(key) => error.of(key),
        Step::Index(index) => error.of(index),
    })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tollgate_net::proxy_protocol::HeaderError;

    use super::*;

    #[tokio::test]
    async fn without_senders_no_header_is_accepted() {
        let balancer: SocketAddr = "10.0.0.1:1".parse().unwrap();
        let setting = proxy_protocol(&ProxyProtocolRule::Unrestricted);
        assert_eq!(setting.caller(&mut &b""[..], balancer).await, Err(HeaderError::Stranger));
    }
}
