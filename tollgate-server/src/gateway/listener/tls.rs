//! TLS for clients: certificates by server name, reloaded when their files change.

mod validity;

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tollgate::rules::Certificate;
use tollgate::rules::file::internal::{CertificateRule, ClientCertificates, SettingError, TlsRule};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use self::validity::ExpiryWarnings;
pub(in crate::gateway) use self::validity::Validity;
use crate::gateway::client::LINGER;
use crate::gateway::stream::Stream;
use crate::notice;
use crate::seconds::unix_now;

/// The interval of checks for changed files. Certificates are replaced days before they expire.
const CHECK_EVERY: Duration = Duration::from_secs(2);

/// The maximum size of a file. Certificate chains have a few thousand bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The ALPN protocols, in order of preference.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The TLS settings of a listener, and the files they were read from.
pub(crate) struct Tls {
    pub(crate) acceptor: TlsAcceptor,
    pub(super) validities: Arc<Vec<Validity>>,
    rule: TlsRule,
    folder: PathBuf,
    /// The key of the rule file.
    setting: &'static str,
}

/// The files of a certificate.
struct Files {
    cert: PathBuf,
    key: PathBuf,
    /// The certificate's path as written in the rule file.
    configured: String,
}

/// The certificates in the order of the rule file.
struct Certificates(Vec<Arc<CertifiedKey>>);

impl fmt::Debug for Certificates {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Certificates").finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let Self(certificates) = self;
        let requested = hello.server_name().and_then(|name| ServerName::try_from(name).ok());
        let is_for = |certificate: &&Arc<CertifiedKey>| {
            let parsed = certificate.cert.first().and_then(|first| ParsedCertificate::try_from(first).ok());
            requested.as_ref().zip(parsed).is_some_and(|(name, parsed)| verify_server_name(&parsed, name).is_ok())
        };
        certificates.iter().find(is_for).or_else(|| certificates.first()).cloned()
    }
}

impl Tls {
    /// Creates the TLS settings, which `setting` names in the rule file. Returns all problems with the files, not only the first.
    pub(crate) fn new(rule: &TlsRule, folder: &Path, setting: &'static str) -> Result<Self, Vec<SettingError>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut errors = Vec::new();
        let (mut certificates, mut validities) = (Vec::new(), Vec::new());
        for (index, files) in files(rule, folder).iter().enumerate() {
            match certified(files, setting, &provider) {
                Ok(certificate) => {
                    let own = certificate.cert.first();
                    validities.extend(own.and_then(|own| Validity::of(&files.cert, &files.configured, own)));
                    certificates.push(Arc::new(certificate));
                }
                Err(found) => errors.extend(found.into_iter().map(|error| error.of(index).of("certificates"))),
            }
        }
        let verifier = rule.client_ca.as_ref().map(|file| {
            let verifies = verifier((&folder.join(file), setting), rule.client_certificates, &provider);
            verifies.map_err(|error| errors.push(error.of("client_ca")))
        });
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| errors.push(SettingError::new(error.to_string(), "leave tls out")));
        let (Ok(builder), Ok(verifier), []) = (builder, verifier.transpose(), &*errors) else { return Err(errors) };
        let builder = match verifier {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(verifier),
        };
        let mut config = builder.with_cert_resolver(Arc::new(Certificates(certificates)));
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
        let (acceptor, validities) = (TlsAcceptor::from(Arc::new(config)), Arc::new(validities));
        Ok(Self { acceptor, validities, rule: rule.clone(), folder: folder.to_owned(), setting })
    }

    /// Reloads all files when one changes, forever, and passes them to `apply`, for new connections. Files that cannot be used
    /// change nothing. Logs certificates that expire.
    pub(crate) async fn watch_files(self, apply: impl Fn(TlsAcceptor), reloads: Arc<CertificateReloads>) {
        let (mut contents, mut warnings) = (self.file_contents(), ExpiryWarnings::new(&self.validities));
        loop {
            warnings.log(unix_now());
            sleep(CHECK_EVERY).await;
            let now = self.file_contents();
            if now == contents {
                continue;
            }
            // A certificate and its key are not written at the same moment: the next check may find both.
            contents = now;
            match Self::new(&self.rule, &self.folder, self.setting) {
                Ok(other) => {
                    apply(other.acceptor.clone());
                    reloads.note_applied(&other.validities);
                    warnings = ExpiryWarnings::new(&other.validities);
                    notice::log("certificates reloaded: new connections use them");
                }
                Err(errors) => {
                    reloads.note_refused();
                    for error in errors {
                        notice::error(format_args!(
                            "certificates not reloaded, the previous ones stay in use: {error}"
                        ));
                    }
                }
            }
        }
    }

    /// Returns the content of all files.
    fn file_contents(&self) -> Vec<Option<Vec<u8>>> {
        let of_certificates = files(&self.rule, &self.folder).into_iter().flat_map(|files| [files.cert, files.key]);
        let of_clients = self.rule.client_ca.iter().map(|file| self.folder.join(file));
        of_certificates.chain(of_clients).map(|path| read(&path).ok()).collect()
    }
}

fn files(rule: &TlsRule, folder: &Path) -> Vec<Files> {
    let at = |rule: &CertificateRule| Files {
        cert: folder.join(&rule.cert),
        key: folder.join(&rule.key),
        configured: rule.cert.clone(),
    };
    rule.certificates.iter().map(at).collect()
}

/// Returns the verified certificate of a client.
pub(in crate::gateway) fn client_certificate(connection: &ServerConnection) -> Option<Certificate> {
    let der = connection.peer_certificates()?.first()?;
    let mut certificate = Certificate::new(format!("{:x}", Sha256::digest(der)));
    let (_, parsed) = X509Certificate::from_der(der).ok()?;
    certificate.cn = parsed.subject().iter_common_name().find_map(|name| name.as_str().ok()).map(str::to_owned);
    let names = parsed.subject_alternative_name().ok().flatten();
    certificate.san = names.iter().flat_map(|names| &names.value.general_names).find_map(|name| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) | GeneralName::RFC822Name(name) => Some((*name).to_owned()),
        _ => None,
    });
    Some(certificate)
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut text = Vec::new();
    fs::File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

fn bad((path, setting): (&Path, &str), key: &str, problem: &str) -> SettingError {
    SettingError::new(format!("{setting}.{key} {}: {problem}", path.display()), "name a readable PEM file")
}

/// Reads a certificate and its key. Returns the problems with both.
fn certified(files: &Files, setting: &str, provider: &CryptoProvider) -> Result<CertifiedKey, Vec<SettingError>> {
    let chain = chain((&files.cert, setting)).map_err(|error| error.of("cert"));
    let key = private_key((&files.key, setting)).map_err(|error| error.of("key"));
    match (chain, key) {
        (Ok(chain), Ok(key)) => {
            CertifiedKey::from_der(chain, key, provider).map_err(|error| vec![unfit(files, setting, &error)])
        }
        (chain, key) => Err(chain.err().into_iter().chain(key.err()).collect()),
    }
}

fn chain(named: (&Path, &str)) -> Result<Vec<CertificateDer<'static>>, SettingError> {
    let text = read(named.0).map_err(|error| bad(named, "certificates", &error.to_string()))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|error| bad(named, "certificates", &error.to_string()))?;
    if chain.is_empty() {
        return Err(bad(named, "certificates", "it contains no certificate"));
    }
    Ok(chain)
}

fn private_key(named: (&Path, &str)) -> Result<PrivateKeyDer<'static>, SettingError> {
    let text = read(named.0).map_err(|error| bad(named, "certificates", &error.to_string()))?;
    PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| bad(named, "certificates", &format!("it contains no private key ({error})")))
}

/// Describes why a certificate and a key cannot be used together.
fn unfit(files: &Files, setting: &str, error: &rustls::Error) -> SettingError {
    let (cert, key) = (files.cert.display(), files.key.display());
    match error {
        rustls::Error::InconsistentKeys(_) => SettingError::new(
            format!("{setting}.certificates {cert}: the key in {key} does not belong to it"),
            "name the key of this certificate, or the certificate of this key; a chain starts with the server's own certificate",
        )
        .of("key"),
        rustls::Error::InvalidCertificate(_) => {
            let problem = format!("{setting}.certificates {cert}: it cannot be used ({error})");
            SettingError::new(problem, "name an X.509 certificate in PEM").of("cert")
        }
        _ => {
            let problem = format!("{setting}.certificates {key}: it cannot be used ({error})");
            SettingError::new(problem, "name an RSA, ECDSA or Ed25519 private key without a password").of("key")
        }
    }
}

/// Returns a verifier for client certificates issued by the authorities in a file.
fn verifier(
    named: (&Path, &str),
    mode: ClientCertificates,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, SettingError> {
    let roots = Arc::new(authorities(named)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider));
    let verifier = match mode {
        ClientCertificates::Optional => verifier.allow_unauthenticated(),
        _ => verifier,
    };
    verifier.build().map_err(|error| bad(named, "client_ca", &error.to_string()))
}

fn authorities(named: (&Path, &str)) -> Result<RootCertStore, SettingError> {
    let text = read(named.0).map_err(|error| bad(named, "client_ca", &error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let certificate = certificate.map_err(|error| bad(named, "client_ca", &error.to_string()))?;
        roots.add(certificate).map_err(|error| bad(named, "client_ca", &error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(bad(named, "client_ca", "it contains no certificate"));
    }
    Ok(roots)
}

/// Counts the reloads of one listener.
#[derive(Debug, Default)]
pub(crate) struct CertificateReloads {
    pub(crate) applied: AtomicU64,
    pub(crate) refused: AtomicU64,
    last_was_refused: AtomicBool,
    /// The certificates in use.
    pub(crate) in_force: ArcSwap<Vec<Validity>>,
}

impl CertificateReloads {
    /// Starts with the certificates that a listener has at first.
    pub(crate) fn of(tls: &Tls) -> Self {
        let reloads = Self::default();
        reloads.note_good(&tls.validities);
        reloads
    }

    pub(super) fn note_applied(&self, certificates: &Arc<Vec<Validity>>) {
        self.applied.fetch_add(1, Relaxed);
        self.note_good(certificates);
    }

    pub(super) fn note_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
        self.last_was_refused.store(true, Relaxed);
    }

    /// Records certificates that were read with the rule file.
    pub(super) fn note_good(&self, certificates: &Arc<Vec<Validity>>) {
        self.in_force.store(Arc::clone(certificates));
        self.last_was_refused.store(false, Relaxed);
    }

    pub(crate) fn last_was_good(&self) -> bool {
        !self.last_was_refused.load(Relaxed)
    }
}

/// The response to plain HTTP on a TLS port.
const USE_HTTPS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\
    content-length: 69\r\n\r\n\
    {\"error\":\"plain_http\",\"message\":\"This port requires TLS: use https.\"}";

/// Returns whether the first byte is a letter, as in HTTP and never in TLS. The bytes stay unread.
pub(super) async fn begins_with_a_letter(tcp: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    Ok(tcp.peek(&mut first).await? > 0 && first[0].is_ascii_alphabetic())
}

/// Sends a plain HTTP client the instruction to use https.
pub(super) async fn send_use_https(mut tcp: TcpStream) -> io::Result<()> {
    let reply = async {
        tcp.write_all(USE_HTTPS).await?;
        Stream::Plain(tcp).end().await
    };
    timeout(LINGER, reply).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_has_the_length_that_it_announces() {
        let text = std::str::from_utf8(USE_HTTPS).expect("the response is text");
        let (head, body) = text.split_once("\r\n\r\n").expect("the head has an end");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        serde_json::from_str::<serde_json::Value>(body).expect("the body is JSON");
    }
}
