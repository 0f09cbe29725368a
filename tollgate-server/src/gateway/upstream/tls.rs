//! TLS to upstreams: trusted certificates, server names and client certificates.

use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{AlertDescription, CertificateError, ClientConfig, Error as TlsError, InvalidMessage, RootCertStore};
use time::OffsetDateTime;
use tokio_rustls::TlsConnector;
use tollgate_config::internal::{SettingError, UpstreamTlsRule};
use tollgate_net::pem;
use tollgate_net::tls::MAX_NAMES;
use tollgate_telemetry::notice::join_up_to;
use tollgate_telemetry::seconds::rfc3339;

/// The TLS settings of an upstream.
pub(in crate::gateway) struct UpstreamTls {
    /// Offers HTTP/2 and HTTP/1.1.
    pub(super) connector: TlsConnector,
    /// Offers only HTTP/1.1, which upgrades need.
    pub(in crate::gateway) http1: TlsConnector,
    pub(in crate::gateway) name: ServerName<'static>,
    pub(in crate::gateway) identity: TlsIdentity,
}

/// The parts of TLS settings that make two upstreams differ.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::gateway) struct TlsIdentity {
    /// The authorities that a file names.
    ca: Option<Vec<CertificateDer<'static>>>,
    client_cert: Option<Vec<CertificateDer<'static>>>,
    server_name: Option<String>,
}

impl UpstreamTls {
    pub(in crate::gateway) fn new(rule: &UpstreamTlsRule, host: &str, folder: &Path) -> Result<Self, SettingError> {
        let read = |setting, file: &Option<String>| {
            file.as_ref().map(|file| certificates(setting, &folder.join(file))).transpose()
        };
        let identity = TlsIdentity {
            ca: read("ca", &rule.ca)?,
            client_cert: read("client_cert", &rule.client_cert)?,
            server_name: rule.server_name.clone(),
        };
        let mut roots = RootCertStore::empty();
        match (&identity.ca, &rule.ca) {
            (Some(trusted), Some(file)) => {
                trusted.iter().try_for_each(|one| roots.add(one.clone())).map_err(|error| {
                    refused("ca", &folder.join(file), &error.to_string(), "name a PEM file with certificates")
                })?
            }
            _ => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
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
        let config = config.with_root_certificates(roots);
        let mut config = match (&identity.client_cert, &rule.client_key) {
            (None, None) => config.with_no_client_auth(),
            (Some(chain), Some(key)) => {
                let path = folder.join(key);
                let private_key = pem::private_key(&path).map_err(|problem| {
                    let fix = "name a PEM file with a private key that is not encrypted";
                    refused("client_key", &path, &problem, fix)
                })?;
                config.with_client_auth_cert(chain.clone(), private_key).map_err(|error| {
                    let cert = rule.client_cert.as_deref().unwrap_or_default();
                    let problem = format!("it is not the key of {cert} ({error})");
                    refused("client_key", &path, &problem, "name the file with the key of that certificate")
                })?
            }
            (Some(_), None) => return Err(missing("client_cert", "client_key")),
            (None, Some(_)) => return Err(missing("client_key", "client_cert")),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let http1 = TlsConnector::from(Arc::new(config.clone()));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), http1, name, identity })
    }
}

/// Reads the certificates in a PEM file that a setting names.
fn certificates(setting: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, SettingError> {
    let refused = |problem: &str| refused(setting, path, problem, "name a PEM file with certificates");
    pem::certificates(path).map_err(|problem| refused(&problem))
}

fn refused(setting: &'static str, path: &Path, problem: &str, fix: &str) -> SettingError {
    let problem = format!("upstream_tls.{setting} {}: {problem}", path.display());
    SettingError::new(problem, fix).of(setting).of("upstream_tls")
}

fn missing(present: &'static str, absent: &str) -> SettingError {
    let problem = format!("`{present}` needs `{absent}`");
    SettingError::new(problem, format!("add `{absent}`, or remove `{present}`")).of(present).of("upstream_tls")
}

/// The alerts of upstreams that refuse a connection without a client certificate, or with this one. They cannot mean
/// the certificate of the upstream.
const WANTS_CERTIFICATE: [AlertDescription; 8] = [
    AlertDescription::CertificateRequired,
    AlertDescription::BadCertificate,
    AlertDescription::UnsupportedCertificate,
    AlertDescription::CertificateRevoked,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateUnknown,
    AlertDescription::UnknownCA,
    // A signature does not verify: the upstream trusts another authority of the same name.
    AlertDescription::DecryptError,
];

/// The maximum length of a quoted text. DNS names are shorter.
const MAX_CHARS: usize = 300;

#[derive(Debug)]
pub(in crate::gateway) enum TlsFault {
    /// The certificate was issued by an unknown authority.
    UnknownAuthority,
    /// A signature does not verify. Most often the authority has a new key and the same name. Or the upstream does not
    /// have the key of its certificate; the library does not distinguish them.
    OtherSignature,
    /// The certificate is a CA certificate.
    CaCertificate,
    Expired(UnixTime),
    NotYet(UnixTime),
    /// The certificate is for other names.
    OtherName {
        expected: ServerName<'static>,
        /// As the library formats them, such as `DnsName("api.internal")`.
        presented: Vec<String>,
    },
    /// The certificate is invalid for another reason.
    BadCertificate(CertificateError),
    NoTls,
    HungUp,
    WantsCertificate,
    /// Upstreams send this alert if a client certificate is missing, and also if there is no common protocol version or
    /// cipher.
    NothingInCommon,
    Other(TlsError),
}

impl TlsFault {
    /// Returns the TLS error of a failed handshake, if it is one.
    pub(super) fn of_handshake(error: &io::Error) -> Option<Self> {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Some(Self::HungUp),
            _ => error.get_ref()?.downcast_ref().map(Self::of),
        }
    }

    /// Returns the TLS error that an upstream sent after the handshake: in TLS 1.3 it cannot send it earlier.
    pub(in crate::gateway) fn of_connection(error: &h2::Error) -> Option<Self> {
        Self::of_alert(error.get_io()?)
    }

    /// Returns the TLS error that an upstream sent after the handshake, from the error of its connection.
    pub(in crate::gateway) fn of_alert(error: &io::Error) -> Option<Self> {
        // HTTP/2 keeps only the message.
        let (words, alerts) = (error.get_ref()?.to_string(), WANTS_CERTIFICATE.map(TlsError::AlertReceived));
        alerts.iter().any(|alert| alert.to_string() == words).then_some(Self::WantsCertificate)
    }

    fn of(error: &TlsError) -> Self {
        match error {
            TlsError::InvalidCertificate(error) => Self::of_certificate(error),
            TlsError::InvalidMessage(InvalidMessage::InvalidContentType) => Self::NoTls,
            TlsError::AlertReceived(alert) if WANTS_CERTIFICATE.contains(alert) => Self::WantsCertificate,
            TlsError::AlertReceived(AlertDescription::HandshakeFailure) => Self::NothingInCommon,
            error => Self::Other(error.clone()),
        }
    }

    fn of_certificate(error: &CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer => Self::UnknownAuthority,
            CertificateError::BadSignature => Self::OtherSignature,
            CertificateError::ExpiredContext { not_after, .. } => Self::Expired(*not_after),
            CertificateError::NotValidYetContext { not_before, .. } => Self::NotYet(*not_before),
            CertificateError::NotValidForNameContext { expected, presented } => {
                Self::OtherName { expected: expected.clone(), presented: presented.clone() }
            }
            CertificateError::Other(other)
                if matches!(other.0.downcast_ref(), Some(webpki::Error::CaUsedAsEndEntity)) =>
            {
                Self::CaCertificate
            }
            error => Self::BadCertificate(error.clone()),
        }
    }

    /// Returns whether the upstream speaks none of the protocols that it was offered.
    pub(in crate::gateway) fn lacks_protocol(&self) -> bool {
        matches!(self, Self::Other(TlsError::AlertReceived(AlertDescription::NoApplicationProtocol)))
    }

    /// Returns whether the upstream was reached and its certificate is not trusted.
    pub(in crate::gateway) fn is_certificates(&self) -> bool {
        matches!(
            self,
            Self::UnknownAuthority
                | Self::OtherSignature
                | Self::CaCertificate
                | Self::Expired(_)
                | Self::NotYet(_)
                | Self::OtherName { .. }
                | Self::BadCertificate(_)
        )
    }
}

impl fmt::Display for TlsFault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownAuthority => out.write_str(
                "its certificate was issued by an unknown authority: name that authority in upstream_tls.ca",
            ),
            Self::OtherSignature => out.write_str(
                "a signature in its certificate or handshake does not verify: it does not have the key of that certificate, or another authority of the same name has issued it: check its key, and that upstream_tls.ca contains its authority",
            ),
            Self::CaCertificate => out.write_str(
                "its certificate is a CA certificate (CA:TRUE): create it with CA:FALSE (openssl req -x509 -addext \
                 basicConstraints=CA:FALSE), or have that authority issue one for it",
            ),
            Self::Expired(at) => write!(out, "its certificate expired on {}: install a new one", date(*at)),
            Self::NotYet(at) => write!(
                out,
                "its certificate is not valid before {}: install one that is valid now, or set the clock of this machine",
                date(*at)
            ),
            Self::OtherName { expected, presented } if presented.is_empty() => {
                let expected = expected.to_str();
                write!(
                    out,
                    "its certificate has no name, and {expected} was expected: create one with subjectAltName for {expected}"
                )
            }
            Self::OtherName { expected, presented } => {
                let names: Vec<String> = presented.iter().map(|name| bare(name)).collect();
                let (expected, names) = (expected.to_str(), join_up_to(&names, MAX_NAMES));
                write!(
                    out,
                    "its certificate is for {names}, and {expected} was expected: set upstream_tls.server_name to one of its names, or create one for {expected}"
                )
            }
            Self::BadCertificate(error) => {
                write!(out, "its certificate is invalid: {}: install another one", cut(error.to_string()))
            }
            Self::NoTls => out.write_str("it does not speak TLS: use http://, or h2c:// for HTTP/2"),
            Self::HungUp => {
                out.write_str("it closed the connection during the TLS handshake: if it does not speak TLS, use http://")
            }
            Self::WantsCertificate => out.write_str(
                "it requires a client certificate that it trusts: set upstream_tls.client_cert and client_key to one that its authority has issued",
            ),
            Self::NothingInCommon => out.write_str(
                "it supports no TLS version or cipher of the gateway (TLS 1.2 and 1.3), or it requires a client certificate: enable one of these versions, or set upstream_tls.client_cert and client_key",
            ),
            Self::Other(error) => write!(out, "the TLS handshake failed: {}", cut(error.to_string())),
        }
    }
}

/// Removes the type that the library writes around a name. The name is untrusted, and must not control a terminal.
fn bare(name: &str) -> String {
    let name = name.split_once('(').map_or(name, |(_kind, name)| name);
    cut(name.trim_end_matches(')').trim_matches('"').escape_debug().to_string())
}

/// Truncates a text that contains untrusted data of the upstream.
fn cut(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MAX_CHARS) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Formats a date as for the gateway's own certificates.
fn date(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    match OffsetDateTime::from_unix_timestamp(seconds) {
        Ok(date) => format!("{}Z", rfc3339(&date)),
        // No certificate has such a date.
        Err(_) => format!("{seconds} s of the Unix epoch"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn tls_errors_of_upstreams_end_with_the_fix() {
        let day = UnixTime::since_unix_epoch(Duration::from_secs(24 * 60 * 60));
        let expected = || ServerName::try_from("api.internal").expect("it is a host name");
        let presented = vec![r#"DnsName("shop.internal")"#.to_owned()];
        let faults = [
            TlsFault::UnknownAuthority,
            TlsFault::OtherSignature,
            TlsFault::CaCertificate,
            TlsFault::Expired(day),
            TlsFault::NotYet(day),
            TlsFault::OtherName { expected: expected(), presented: Vec::new() },
            TlsFault::OtherName { expected: expected(), presented },
            TlsFault::BadCertificate(CertificateError::Revoked),
            TlsFault::NoTls,
            TlsFault::HungUp,
            TlsFault::WantsCertificate,
            TlsFault::NothingInCommon,
        ];
        insta::assert_snapshot!(faults.map(|fault| fault.to_string()).join("\n"));
    }
}
