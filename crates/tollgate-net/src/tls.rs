//! TLS for clients: certificates by server name, reloaded when their files change, and their validity.
//!
//! A certificate outside its period is still served: a client that
//! does not check it is better off, and others report the problem.

mod clients;
mod settings;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use time::OffsetDateTime;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tollgate_rules::internal::read_bounded;
use tollgate_telemetry::notice::{self, join_up_to};
use tollgate_telemetry::seconds::{rfc3339, unix_now};
use x509_parser::prelude::{ASN1Time, FromDer, GeneralName, X509Certificate};

use self::clients::ClientAuthorities;
pub use self::clients::{CERTIFICATE_GRACE, CertificateLease, TlsInUse};
pub use self::settings::{CertificateFiles, ClientCertificates, Settings, Step, TlsProblem};
use crate::pem::MAX_FILE_BYTES;
use crate::stream::{LINGER, Stream};

/// The maximum number of names in a log line.
pub const MAX_NAMES: usize = 5;

/// The interval of checks for changed files. Certificates are replaced days before they expire.
const CHECK_EVERY: Duration = Duration::from_secs(2);

/// The ALPN protocols, in order of preference.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The TLS settings of a listener, and the files they were read from.
pub struct Tls {
    /// The settings for new connections.
    pub in_use: TlsInUse,
    /// The validity of each certificate.
    pub validities: Arc<Vec<Validity>>,
    settings: Settings,
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
    /// Reads the files of the settings. Returns all problems with them, not only the first.
    pub fn new(settings: Settings) -> Result<Self, Vec<TlsProblem>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut errors = Vec::new();
        let (mut certificates, mut validities) = (Vec::new(), Vec::new());
        for (index, files) in settings.certificates.iter().enumerate() {
            match certified(files, settings.setting, &provider) {
                Ok(certificate) => {
                    let own = certificate.cert.first();
                    validities.extend(own.and_then(|own| Validity::of(&files.cert, &files.configured, own)));
                    certificates.push(Arc::new(certificate));
                }
                Err(found) => errors.extend(found.into_iter().map(|error| error.of(index).of("certificates"))),
            }
        }
        let authorities = settings.client_ca.as_ref().map(|file| {
            let read = ClientAuthorities::read((file, settings.setting), settings.client_certificates, &provider);
            read.map(Arc::new).map_err(|error| errors.push(error.of("client_ca")))
        });
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| errors.push(TlsProblem::new(error.to_string(), "leave tls out")));
        let (Ok(builder), Ok(authorities), []) = (builder, authorities.transpose(), &*errors) else {
            return Err(errors);
        };
        let builder = match &authorities {
            None => builder.with_no_client_auth(),
            Some(authorities) => builder.with_client_cert_verifier(authorities.verifier()),
        };
        let mut config = builder.with_cert_resolver(Arc::new(Certificates(certificates)));
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
        if authorities.is_some() {
            clients::forbid_resumption(&mut config);
        }
        let in_use = TlsInUse { acceptor: TlsAcceptor::from(Arc::new(config)), authorities };
        Ok(Self { in_use, validities: Arc::new(validities), settings })
    }

    /// Reloads all files when one changes, forever, and passes them to `apply`, for new connections. Files that cannot be used
    /// change nothing. Logs certificates that expire.
    pub async fn watch_files(self, apply: impl Fn(TlsInUse), reloads: Arc<CertificateReloads>) {
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
            match Self::new(self.settings.clone()) {
                Ok(other) => {
                    apply(other.in_use.clone());
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
        let of_certificates = self.settings.certificates.iter().flat_map(|files| [&files.cert, &files.key]);
        let of_clients = self.settings.client_ca.iter();
        of_certificates.chain(of_clients).map(|path| read(path).ok()).collect()
    }
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    read_bounded(path, MAX_FILE_BYTES)
}

fn bad((path, setting): (&Path, &str), key: &str, problem: &str) -> TlsProblem {
    TlsProblem::new(format!("{setting}.{key} {}: {problem}", path.display()), "name a readable PEM file")
}

/// Reads a certificate and its key. Returns the problems with both.
fn certified(
    files: &CertificateFiles,
    setting: &str,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, Vec<TlsProblem>> {
    let chain = chain((&files.cert, setting)).map_err(|error| error.of("cert"));
    let key = private_key((&files.key, setting)).map_err(|error| error.of("key"));
    match (chain, key) {
        (Ok(chain), Ok(key)) => {
            CertifiedKey::from_der(chain, key, provider).map_err(|error| vec![unfit(files, setting, &error)])
        }
        (chain, key) => Err(chain.err().into_iter().chain(key.err()).collect()),
    }
}

fn chain(named: (&Path, &str)) -> Result<Vec<CertificateDer<'static>>, TlsProblem> {
    let text = read(named.0).map_err(|error| bad(named, "certificates", &error.to_string()))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|error| bad(named, "certificates", &error.to_string()))?;
    if chain.is_empty() {
        return Err(bad(named, "certificates", "it contains no certificate"));
    }
    Ok(chain)
}

fn private_key(named: (&Path, &str)) -> Result<PrivateKeyDer<'static>, TlsProblem> {
    let text = read(named.0).map_err(|error| bad(named, "certificates", &error.to_string()))?;
    PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| bad(named, "certificates", &format!("it contains no private key ({error})")))
}

/// Describes why a certificate and a key cannot be used together.
fn unfit(files: &CertificateFiles, setting: &str, error: &rustls::Error) -> TlsProblem {
    let (cert, key) = (files.cert.display(), files.key.display());
    match error {
        rustls::Error::InconsistentKeys(_) => TlsProblem::new(
            format!("{setting}.certificates {cert}: the key in {key} does not belong to it"),
            "name the key of this certificate, or the certificate of this key; a chain starts with the server's own certificate",
        )
        .of("key"),
        rustls::Error::InvalidCertificate(_) => {
            let problem = format!("{setting}.certificates {cert}: it cannot be used ({error})");
            TlsProblem::new(problem, "name an X.509 certificate in PEM").of("cert")
        }
        _ => {
            let problem = format!("{setting}.certificates {key}: it cannot be used ({error})");
            TlsProblem::new(problem, "name an RSA, ECDSA or Ed25519 private key without a password").of("key")
        }
    }
}

/// Counts the reloads of one listener.
#[derive(Debug, Default)]
pub struct CertificateReloads {
    /// Reloads whose certificates are in use.
    pub applied: AtomicU64,
    /// Reloads that failed.
    pub refused: AtomicU64,
    last_was_refused: AtomicBool,
    /// The certificates in use.
    pub in_force: ArcSwap<Vec<Validity>>,
}

impl CertificateReloads {
    /// Starts with the certificates that a listener has at first.
    pub fn of(tls: &Tls) -> Self {
        let reloads = Self::default();
        reloads.note_good(&tls.validities);
        reloads
    }

    /// Records a reload.
    pub fn note_applied(&self, certificates: &Arc<Vec<Validity>>) {
        self.applied.fetch_add(1, Relaxed);
        self.note_good(certificates);
    }

    /// Records a reload that failed.
    pub fn note_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
        self.last_was_refused.store(true, Relaxed);
    }

    /// Records certificates that were read with the rule file.
    pub fn note_good(&self, certificates: &Arc<Vec<Validity>>) {
        self.in_force.store(Arc::clone(certificates));
        self.last_was_refused.store(false, Relaxed);
    }

    /// Returns whether the last reload succeeded.
    pub fn last_was_good(&self) -> bool {
        !self.last_was_refused.load(Relaxed)
    }
}

/// The response to plain HTTP on a TLS port.
const USE_HTTPS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\
    content-length: 69\r\n\r\n\
    {\"error\":\"plain_http\",\"message\":\"This port requires TLS: use https.\"}";

/// Returns whether the first byte is a letter, as in HTTP and never in TLS. The bytes stay unread.
pub async fn begins_with_a_letter(tcp: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    Ok(tcp.peek(&mut first).await? > 0 && first[0].is_ascii_alphabetic())
}

/// Sends a plain HTTP client the instruction to use https.
pub async fn send_use_https(mut tcp: TcpStream) -> io::Result<()> {
    let reply = async {
        tcp.write_all(USE_HTTPS).await?;
        Stream::Plain(tcp).end().await
    };
    timeout(LINGER, reply).await?
}

/// How long before the end a warning is logged. Automatic renewal happens a month before the end, so this means that it
/// failed.
const SOON_SECONDS: i64 = 14 * DAY_SECONDS;

/// Certificates with a short lifetime are renewed when less than this part of it is left.
const SOON_PART: i64 = 3;

const DAY_SECONDS: i64 = 24 * 60 * 60;

/// The validity of a certificate. Intermediate certificates are not included.
#[derive(Debug)]
pub struct Validity {
    file: String,
    /// The label in metrics.
    pub label: String,
    names: Vec<String>,
    begins: OffsetDateTime,
    /// The last second in which it is valid.
    pub ends: OffsetDateTime,
}

/// The state of a certificate at a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CertificateState {
    NotYet,
    Good,
    EndsSoon,
    Expired,
}

/// Returns the label of a certificate in metrics, which are more widely readable than the machine's files: the path as
/// written in the rule file, or its last two parts if it is absolute.
fn label(configured: &str) -> String {
    let path = Path::new(configured);
    if !path.is_absolute() {
        return configured.to_owned();
    }
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match path.parent().and_then(Path::file_name) {
        Some(folder) => format!("{}/{file}", folder.to_string_lossy()),
        None => file,
    }
}

impl Validity {
    /// Reads the validity of a certificate. `configured` is its path as written in the rule file.
    fn of(file: &Path, configured: &str, certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let validity = parsed.validity();
        let [begins, ends] = [validity.not_before, validity.not_after].map(|time| ASN1Time::to_datetime(&time));
        Some(Self { file: file.display().to_string(), label: label(configured), names: names(&parsed), begins, ends })
    }

    fn state(&self, now: i64) -> CertificateState {
        let (begins, ends) = (self.begins.unix_timestamp(), self.ends.unix_timestamp());
        match now {
            _ if ends < now => CertificateState::Expired,
            _ if now < begins => CertificateState::NotYet,
            _ if ends - now < SOON_SECONDS.min((ends - begins) / SOON_PART) => CertificateState::EndsSoon,
            _ => CertificateState::Good,
        }
    }

    /// Describes the state and the fix.
    fn message(&self, state: CertificateState, now: i64) -> Option<String> {
        match state {
            CertificateState::Good => None,
            CertificateState::NotYet => Some(format!(
                "{self} is not valid before {}Z, so clients reject it: install one that is valid now, or set the clock of this machine",
                rfc3339(&self.begins)
            )),
            CertificateState::EndsSoon => {
                let left = match (self.ends.unix_timestamp() - now) / DAY_SECONDS {
                    0 => "less than a day".to_owned(),
                    1 => "1 day".to_owned(),
                    days => format!("{days} days"),
                };
                Some(format!("{self} expires on {}Z, in {left}: install a new one", rfc3339(&self.ends)))
            }
            CertificateState::Expired => {
                Some(format!("{self} expired on {}Z, so clients reject it: install a new one", rfc3339(&self.ends)))
            }
        }
    }
}

impl fmt::Display for Validity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "gateway.tls.certificates {}", self.file)?;
        if self.names.is_empty() { Ok(()) } else { write!(out, " for {}", join_up_to(&self.names, MAX_NAMES)) }
    }
}

/// Returns the host names of a certificate, or its common name if it has none.
fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let found = certificate.subject_alternative_name().ok().flatten();
    let found = found.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => address(bytes).map(|address| address.to_string()),
        _ => None,
    });
    let hosts: Vec<String> = found.collect();
    if hosts.is_empty() {
        let subject = certificate.subject().iter_common_name();
        return subject.filter_map(|name| name.as_str().ok()).map(str::to_owned).collect();
    }
    hosts
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let of_four = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    of_four.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// Logs certificates that are not valid or expire soon: once when they come into use, and whenever their state changes.
struct ExpiryWarnings {
    certificates: Arc<Vec<Validity>>,
    logged: Vec<CertificateState>,
}

impl ExpiryWarnings {
    fn new(certificates: &Arc<Vec<Validity>>) -> Self {
        Self { certificates: Arc::clone(certificates), logged: vec![CertificateState::Good; certificates.len()] }
    }

    /// Logs what has changed, at a time in seconds since the Unix epoch.
    fn log(&mut self, now: i64) {
        self.changes(now).iter().for_each(notice::warn);
    }

    fn changes(&mut self, now: i64) -> Vec<String> {
        let each = self.certificates.iter().zip(&mut self.logged);
        let changes = each.filter_map(|(certificate, logged)| {
            let state = certificate.state(now);
            if state == std::mem::replace(logged, state) { None } else { certificate.message(state, now) }
        });
        changes.collect()
    }
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

    fn warnings(begins: i64, ends: i64) -> ExpiryWarnings {
        let time = |seconds| OffsetDateTime::from_unix_timestamp(seconds).unwrap();
        let names = vec!["a.example".to_owned(), "b.example".to_owned()];
        let validity = Validity {
            file: "cert.pem".to_owned(),
            label: String::new(),
            names,
            begins: time(begins),
            ends: time(ends),
        };
        ExpiryWarnings::new(&Arc::new(vec![validity]))
    }

    #[test]
    fn metrics_do_not_show_where_files_are_on_the_machine() {
        for (configured, shown) in [
            ("cert.pem", "cert.pem"),
            ("tls/cert.pem", "tls/cert.pem"),
            ("/etc/letsencrypt/live/example.com/fullchain.pem", "example.com/fullchain.pem"),
            ("/cert.pem", "cert.pem"),
        ] {
            assert_eq!(label(configured), shown);
        }
    }

    #[test]
    fn certificate_is_logged_whenever_its_state_changes() {
        let day = |day: i64| day * DAY_SECONDS;
        let mut certificate = warnings(day(10), day(100));
        let begins_with = "gateway.tls.certificates cert.pem for a.example, b.example ";
        let mut lines = Vec::new();
        for now in [day(9), day(9) + 1, day(10), day(86), day(86) + 1, day(98), day(100), day(100) + 1, day(200)] {
            let changes = certificate.changes(now);
            lines.extend(changes.into_iter().map(|line| format!("{now}: {}", line.replace(begins_with, "it "))));
        }
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn short_lifetime_is_logged_in_its_last_third() {
        let mut of_six_days = warnings(0, 6 * DAY_SECONDS);
        assert_eq!(of_six_days.changes(4 * DAY_SECONDS), Vec::<String>::new());
        assert_eq!(of_six_days.changes(4 * DAY_SECONDS + 1).len(), 1);
    }

    #[test]
    fn days_left_are_rounded_down() {
        for (left, words) in [(0, "less than a day"), (DAY_SECONDS, "1 day"), (2 * DAY_SECONDS + 1, "2 days")] {
            let lines = warnings(0, 100 * DAY_SECONDS).changes(100 * DAY_SECONDS - left);
            assert!(lines[0].contains(&format!(", in {words}: ")), "{lines:?}");
        }
    }
}
