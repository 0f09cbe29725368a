//! The reasons why TLS handshakes with clients fail, as far as an operator can act on them.

use std::io;

use rustls::Error;

/// The reason why a handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum HandshakeFailure {
    /// It took longer than `gateway.timeouts.head`.
    Timeout,
    /// The client disconnected. Port scans look like this, too.
    Disconnected,
    /// The client aborted: it does not trust our certificate, or supports none of our protocol versions.
    RefusedByClient,
    /// The client certificate is missing or not trusted.
    ClientCertificate,
    /// The client sent plain HTTP to a TLS port.
    PlainHttp,
    /// The client sent TLS to a plain HTTP port.
    TlsHello,
    /// It is not TLS, or there is no common protocol version.
    Protocol,
}

/// The reasons with their labels in metrics.
pub(in super::super) const HANDSHAKE_FAILURES: [(HandshakeFailure, &str); 7] = [
    (HandshakeFailure::Timeout, "timeout"),
    (HandshakeFailure::Disconnected, "disconnected"),
    (HandshakeFailure::RefusedByClient, "refused_by_client"),
    (HandshakeFailure::ClientCertificate, "client_certificate"),
    (HandshakeFailure::PlainHttp, "plain_http"),
    (HandshakeFailure::TlsHello, "tls_hello"),
    (HandshakeFailure::Protocol, "protocol"),
];

impl HandshakeFailure {
    pub(in super::super) fn of(error: &io::Error) -> Self {
        let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        match (of_tls, error.kind()) {
            (Some(Error::AlertReceived(_)), _) => Self::RefusedByClient,
            (Some(Error::NoCertificatesPresented | Error::InvalidCertificate(_)), _) => Self::ClientCertificate,
            (Some(_), _) => Self::Protocol,
            (None, io::ErrorKind::TimedOut) => Self::Timeout,
            (None, _) => Self::Disconnected,
        }
    }
}
