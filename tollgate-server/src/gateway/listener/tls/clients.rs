//! Certificates of clients: who may sign them, and how long a connection may rely on one.
//!
//! A handshake verifies a certificate once, but a connection can outlive it. So sessions are not resumed where
//! certificates are verified, and an open connection ends when its certificate expires, or when `client_ca` is replaced
//! by authorities that do not verify it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tollgate_config::internal::{ClientCertificates, SettingError};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{bad, read};

/// The interval in which an open connection compares the end of its certificate with the clock. The clock may be set, and
/// timers do not count the time in which a machine is suspended.
const CLOCK_CHECK_EVERY: Duration = Duration::from_secs(60);

/// How long requests in flight may take after the certificate of their connection has ended. Most take less, and a
/// tunnel or an endless response would otherwise never end.
pub(crate) const CERTIFICATE_GRACE: Duration = Duration::from_secs(10);

/// The TLS settings of a listener for new connections.
#[derive(Clone)]
pub(crate) struct TlsInUse {
    pub(crate) acceptor: TlsAcceptor,
    /// The authorities of client certificates, if they are verified.
    pub(super) authorities: Option<Arc<ClientAuthorities>>,
}

impl TlsInUse {
    /// Ends the leases of all certificates: the listener verifies none any more.
    pub(crate) fn end_leases(&mut self) {
        self.authorities = None;
    }
}

/// The authorities of a `client_ca` file.
pub(crate) struct ClientAuthorities {
    /// The content of the file.
    pem: Vec<u8>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl fmt::Debug for ClientAuthorities {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ClientAuthorities").finish_non_exhaustive()
    }
}

impl ClientAuthorities {
    /// Reads the authorities in a file.
    pub(super) fn read(
        named: (&Path, &str),
        mode: ClientCertificates,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, SettingError> {
        let pem = read(named.0).map_err(|error| bad(named, "client_ca", &error.to_string()))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|error| bad(named, "client_ca", &error.to_string()))?;
            roots.add(certificate).map_err(|error| bad(named, "client_ca", &error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(bad(named, "client_ca", "it contains no certificate"));
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
        let verifier = match mode {
            ClientCertificates::Optional => verifier.allow_unauthenticated(),
            _ => verifier,
        };
        let verifier = verifier.build().map_err(|error| bad(named, "client_ca", &error.to_string()))?;
        Ok(Self { pem, verifier })
    }

    pub(super) fn verifier(&self) -> Arc<dyn ClientCertVerifier> {
        Arc::clone(&self.verifier)
    }

    /// Returns whether these authorities verify a certificate now.
    fn verify(&self, chain: &[CertificateDer<'_>]) -> bool {
        let [own, intermediates @ ..] = chain else { return false };
        self.verifier.verify_client_cert(own, intermediates, UnixTime::now()).is_ok()
    }
}

/// Forbids the resumption of sessions: it skips the certificate, which may have expired since, or have lost its authority.
pub(super) fn forbid_resumption(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
}

/// The certificate of a client, for as long as its connection may rely on it.
pub(crate) struct CertificateLease {
    chain: Vec<CertificateDer<'static>>,
    authorities: Arc<ClientAuthorities>,
    current: watch::Receiver<TlsInUse>,
}

impl CertificateLease {
    /// Returns the lease of a connection, if its client has a certificate. `current` is from before the handshake, which
    /// used `tls`.
    pub(crate) fn new(
        connection: &ServerConnection,
        tls: &TlsInUse,
        current: watch::Receiver<TlsInUse>,
    ) -> Option<Box<Self>> {
        let chain = connection.peer_certificates()?.iter().map(|one| one.clone().into_owned()).collect();
        let authorities = Arc::clone(tls.authorities.as_ref()?);
        // Boxed, because few clients have one.
        Some(Box::new(Self { chain, authorities, current }))
    }

    /// Resolves when the certificate is no longer valid.
    pub(crate) async fn ended(mut self: Box<Self>) {
        let ends = self.ends();
        loop {
            let now = UnixTime::now().as_secs();
            let next_end = ends.iter().copied().filter(|end| *end > now).min();
            let left = next_end.map_or(CLOCK_CHECK_EVERY, |end| Duration::from_secs(end - now).min(CLOCK_CHECK_EVERY));
            match timeout(left, self.current.changed()).await {
                Ok(Ok(())) => {
                    let Some(next) = self.current.borrow_and_update().authorities.clone() else { return };
                    if next.pem == self.authorities.pem {
                        continue;
                    }
                    self.authorities = next;
                }
                // The listener stops, and closes its connections itself.
                Ok(Err(_)) => std::future::pending().await,
                // Verifying costs more than a comparison, so it waits for the end of a certificate.
                Err(_) if next_end.is_some_and(|end| end > UnixTime::now().as_secs()) => continue,
                Err(_) => {}
            }
            if !self.authorities.verify(&self.chain) {
                return;
            }
        }
    }

    /// Returns the Unix times from which on certificates of the chain have expired. A client may send certificates that its
    /// chain does not need, so these times alone decide nothing.
    fn ends(&self) -> Vec<u64> {
        let end = |certificate: &CertificateDer<'_>| {
            let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
            // A certificate is valid until the end of its last second.
            u64::try_from(parsed.validity().not_after.timestamp()).ok()?.checked_add(1)
        };
        self.chain.iter().filter_map(end).collect()
    }
}
