//! Why TLS with a client does not come about, as far as an operator can do something about it.

use std::io;

use rustls::Error;

/// Why a handshake fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum HandshakeFailure {
    /// It took longer than a head may take.
    Timeout,
    /// The client went away; so do those that only look whether somebody listens.
    Disconnected,
    /// The client gave us up: it does not believe our certificate, or cannot speak as we do.
    RefusedByClient,
    /// The client has no certificate where one is wanted, or one that is not believed.
    ClientCertificate,
    /// The client speaks plain HTTP where TLS is spoken.
    PlainHttp,
    /// The client wants to speak TLS where plain HTTP is spoken.
    TlsHello,
    /// It is no TLS, or none that both sides speak.
    Protocol,
}

/// All of them, and what they are called.
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
