//! Failures of requests: the texts of error responses that the gateway itself sends, other than those of limits, and errors
//! of upstreams, described for operators. Clients get fewer details ([`Failure`]) than operators ([`Fault`]), and metrics count
//! them by kind.

use std::fmt;
use std::io;
use std::time::Duration;

use http::StatusCode;
use rustix::io::Errno;
use rustls::{CertificateError, Error as TlsError};
use tollgate_telemetry::limit_summary::span;

use super::upstream::tls::TlsFault;

/// The reason why no upstream answered a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    NoHost,
    BadTarget,
    BadLength,
    UnderscoreHeader,
    Connect,
    /// The request has passed this gateway before.
    Loop,
    BodyTooLong,
    BodyLate,
    BodyBroken,
    NoRoute,
    QueueFull,
    Overloaded,
    CannotConnect,
    BadCertificate,
    ConnectTimeout,
    Disconnected,
    /// The upstream has closed a connection of HTTP/2, and says that it has not processed the request.
    NotProcessed,
    InvalidResponse,
    ResponseHeadTooLong,
    ResponseHeadRefused,
    UpstreamTimeout,
    /// The gateway has no descriptors, ports or memory left for a connection. The upstream is not at fault.
    Exhausted,
    /// The maximum number of connections to upstreams is open.
    UpstreamConnections,
}

/// The status, the reason and the body of an error response.
macro_rules! text {
    ($status:ident, $error:literal; $message:literal) => {
        (StatusCode::$status, None, concat!(r#"{"error":""#, $error, r#"","message":""#, $message, r#""}"#))
    };
    ($status:ident, $error:literal, $reason:literal; $message:literal) => {
        (
            StatusCode::$status,
            Some($reason),
            concat!(r#"{"error":""#, $error, r#"","reason":""#, $reason, r#"","message":""#, $message, r#""}"#),
        )
    };
}

impl Failure {
    /// Returns whether the upstream is at fault.
    pub(super) const fn is_upstreams(self) -> bool {
        matches!(
            self,
            Self::CannotConnect
                | Self::BadCertificate
                | Self::ConnectTimeout
                | Self::Disconnected
                | Self::InvalidResponse
                | Self::ResponseHeadTooLong
                | Self::ResponseHeadRefused
                | Self::UpstreamTimeout
        )
    }

    /// Returns whether the gateway lacks the resources for a connection to an upstream.
    pub(super) const fn is_gateways(self) -> bool {
        matches!(self, Self::Exhausted | Self::UpstreamConnections)
    }

    /// Returns whether a request that fails before its limits are checked is a strike against its client. It is not if
    /// someone else may be at fault, or if well-behaved clients cause it now and then: with a long file, a slow network
    /// or an old link.
    pub(super) const fn is_strike(self) -> bool {
        match self {
            Self::NoHost | Self::BadTarget | Self::BadLength | Self::UnderscoreHeader | Self::Connect => true,
            Self::BodyTooLong | Self::BodyLate | Self::BodyBroken | Self::NoRoute => false,
            Self::Loop
            | Self::QueueFull
            | Self::Overloaded
            | Self::CannotConnect
            | Self::BadCertificate
            | Self::ConnectTimeout
            | Self::Disconnected
            | Self::NotProcessed
            | Self::InvalidResponse
            | Self::ResponseHeadTooLong
            | Self::ResponseHeadRefused
            | Self::UpstreamTimeout
            | Self::Exhausted
            | Self::UpstreamConnections => false,
        }
    }

    /// Returns the status, the reason of a 400 or 508, and the body of the response.
    const fn text(self) -> (StatusCode, Option<&'static str>, &'static str) {
        match self {
            Self::NoHost => text!(BAD_REQUEST, "bad_request", "no_host"; "The request has no Host header: send one."),
            Self::BadTarget => text!(BAD_REQUEST, "bad_request", "bad_target";
                "The request target is not a valid URI: percent-encode it."),
            Self::BadLength => text!(BAD_REQUEST, "bad_request", "bad_length";
                "The request has duplicate or invalid Content-Length headers: send one valid length."),
            Self::UnderscoreHeader => text!(BAD_REQUEST, "bad_request", "underscore_header";
                "A header name has a character other than letters, digits and hyphens, which gateway.underscore_headers refuses: \
                 use hyphens."),
            Self::Connect => text!(METHOD_NOT_ALLOWED, "method_not_allowed";
                "CONNECT is not supported: this is not a forward proxy."),
            Self::Loop => text!(LOOP_DETECTED, "loop_detected", "loop";
                "The request has passed this gateway before: correct the route or proxy that sends it back."),
            Self::BodyTooLong => text!(PAYLOAD_TOO_LARGE, "body_too_long";
                "The request body exceeds the maximum size: send a smaller one."),
            Self::BodyLate => text!(REQUEST_TIMEOUT, "request_timeout";
                "The request body did not arrive in time: send it without long pauses."),
            Self::BodyBroken => text!(BAD_REQUEST, "bad_request", "broken_body";
                "The request body is malformed or incomplete: send all of it, as Content-Length or chunked announces."),
            Self::NoRoute => text!(NOT_FOUND, "no_route";
                "No route matches this request: check its host, path and method."),
            Self::QueueFull => text!(SERVICE_UNAVAILABLE, "queue_full";
                "Too many requests are waiting: try again later."),
            Self::Overloaded => text!(SERVICE_UNAVAILABLE, "overloaded";
                "The gateway's buffers are full (gateway.max_buffered): try again later."),
            // The client need not know which certificates the gateway trusts.
            Self::CannotConnect | Self::BadCertificate => text!(BAD_GATEWAY, "bad_gateway";
                "The upstream cannot be reached."),
            Self::ConnectTimeout => text!(GATEWAY_TIMEOUT, "gateway_timeout";
                "The upstream could not be reached in time."),
            Self::Disconnected => text!(BAD_GATEWAY, "bad_gateway";
                "The upstream closed the connection before the end of its response."),
            Self::NotProcessed => text!(BAD_GATEWAY, "bad_gateway";
                "The upstream closed the connection before it processed the request: send it again."),
            Self::InvalidResponse => text!(BAD_GATEWAY, "bad_gateway"; "The upstream sent an invalid response."),
            Self::ResponseHeadTooLong => text!(BAD_GATEWAY, "bad_gateway";
                "The upstream's response has more than 100 headers, or more than 64 KiB of headers."),
            Self::ResponseHeadRefused => text!(BAD_GATEWAY, "bad_gateway";
                "The upstream's response has more than 64 KiB of headers, or headers that HTTP/2 forbids."),
            Self::UpstreamTimeout => text!(GATEWAY_TIMEOUT, "gateway_timeout"; "The upstream did not respond in time."),
            Self::Exhausted => text!(SERVICE_UNAVAILABLE, "gateway_exhausted";
                "The gateway has no resources left for this request: try again later."),
            Self::UpstreamConnections => text!(SERVICE_UNAVAILABLE, "too_many_upstream_connections";
                "The gateway has too many connections to upstreams open: try later, or send fewer requests at the same time."),
        }
    }

    pub(super) const fn status(self) -> StatusCode {
        self.text().0
    }

    /// Returns the reason of a 400 or 508, as it appears in the response and in the access log.
    pub(super) const fn reason(self) -> Option<&'static str> {
        self.text().1
    }

    /// Returns the body of the response.
    pub(super) const fn body(self) -> &'static str {
        self.text().2
    }
}

/// The reason of a request head that is not HTTP, as it appears in the response and in the access log.
pub(super) const MALFORMED: &str = "malformed";

/// Describes the failure for operators: its subject is the upstream.
impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Disconnected => "it closed the connection before the end of its response",
            Self::NotProcessed => "it closed the connection before it processed the request",
            Self::InvalidResponse => "its response is invalid",
            Self::ResponseHeadTooLong => "its response has more than 100 headers, or more than 64 KiB of headers",
            Self::ResponseHeadRefused => "its response has more than 64 KiB of headers, or headers that HTTP/2 forbids",
            Self::UpstreamTimeout => "no response within the route's timeout",
            _ => "it cannot be used",
        })
    }
}

/// Bodies that end early end with this error.
impl std::error::Error for Failure {}

/// The reason why an attempt at an upstream failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// No connection could be opened, or it broke.
    Unreached(ConnectError),
    /// The upstream sent no valid response.
    Failed(Failure),
    /// The upstream did not finish its response in time.
    Stalled,
    /// The upstream responded with an error status.
    Status(StatusCode),
    /// A health check took too long.
    LateForCheck(Duration),
}

impl Fault {
    /// Returns whether the upstream is at fault, not the request or its client.
    pub(super) fn is_upstreams(&self) -> bool {
        self.failure().is_upstreams()
    }

    /// Returns the resource that the gateway has run out of, if that is the cause.
    pub(super) fn exhausted(&self) -> Option<Exhausted> {
        match self {
            Self::Unreached(error) => error.exhausted(),
            Self::Failed(_) | Self::Stalled | Self::Status(_) | Self::LateForCheck(_) => None,
        }
    }

    /// Returns the failure that the client is sent.
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Unreached(ConnectError::Exhausted(Exhausted::UpstreamConnections)) => Failure::UpstreamConnections,
            Self::Unreached(error) if error.exhausted().is_some() => Failure::Exhausted,
            Self::Unreached(ConnectError::Timeout) => Failure::ConnectTimeout,
            Self::Unreached(ConnectError::Tls(fault)) if fault.is_certificates() => Failure::BadCertificate,
            Self::Unreached(_) => Failure::CannotConnect,
            Self::Failed(failure) => *failure,
            Self::Status(_) => Failure::InvalidResponse,
            Self::Stalled | Self::LateForCheck(_) => Failure::UpstreamTimeout,
        }
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<ConnectError> for Fault {
    fn from(error: ConnectError) -> Self {
        Self::Unreached(error)
    }
}

impl From<h2::Error> for Fault {
    fn from(error: h2::Error) -> Self {
        Self::Unreached(error.into())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreached(error) => error.fmt(out),
            Self::Stalled => out.write_str("no more of its response within the route's timeout"),
            Self::Status(status) => write!(out, "it responded with {}", status.as_u16()),
            Self::LateForCheck(within) => write!(out, "no response within {}", span(*within)),
            Self::Failed(failure) => failure.fmt(out),
        }
    }
}

/// The reason why a connection could not be opened.
#[derive(Debug)]
pub(super) enum ConnectError {
    Io(io::Error),
    Tls(TlsFault),
    Http2(h2::Error),
    Timeout,
    /// The gateway has run out of a resource.
    Exhausted(Exhausted),
}

impl fmt::Display for ConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(out),
            Self::Tls(fault) => fault.fmt(out),
            Self::Http2(error) => match error.get_io() {
                Some(error) => error.fmt(out),
                None => write!(out, "HTTP/2 error: {error}"),
            },
            Self::Exhausted(exhausted) => exhausted.fmt(out),
            Self::Timeout => out.write_str("no connection within the route's connect_timeout"),
        }
    }
}

impl ConnectError {
    /// Returns the resource that the gateway has run out of, if that is the cause.
    pub(super) fn exhausted(&self) -> Option<Exhausted> {
        match self {
            Self::Io(error) => Exhausted::of(error),
            Self::Exhausted(exhausted) => Some(*exhausted),
            Self::Tls(_) | Self::Http2(_) | Self::Timeout => None,
        }
    }
}

/// A resource that a connection needs and the gateway has run out of. The upstream is not at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exhausted {
    /// Slots for connections to upstreams.
    UpstreamConnections,
    Descriptors,
    SystemDescriptors,
    LocalAddresses,
    Memory,
}

impl Exhausted {
    pub(super) fn of(error: &io::Error) -> Option<Self> {
        match Errno::from_io_error(error)? {
            Errno::MFILE => Some(Self::Descriptors),
            Errno::NFILE => Some(Self::SystemDescriptors),
            Errno::ADDRNOTAVAIL => Some(Self::LocalAddresses),
            Errno::NOBUFS | Errno::NOMEM => Some(Self::Memory),
            _ => None,
        }
    }
}

/// Describes the missing resource and the fix.
impl fmt::Display for Exhausted {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::UpstreamConnections => {
                "the limit of open files allows no more connections to upstreams: raise it (LimitNOFILE=, \
                 ulimit -n), or lower gateway.max_connections"
            }
            Self::Descriptors => {
                "the gateway has no file descriptors left: raise its limit of open files (LimitNOFILE=, ulimit -n), or \
                 lower gateway.max_connections"
            }
            Self::SystemDescriptors => {
                "the system has no file descriptors left: raise fs.file-max, or lower gateway.max_connections"
            }
            Self::LocalAddresses => {
                "no local address or port is left to connect from: widen net.ipv4.ip_local_port_range, raise \
                 upstream_connections.idle, or give this machine an address that reaches the upstream"
            }
            Self::Memory => {
                "the system has no memory left for connections: free some, or lower gateway.max_connections"
            }
        })
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<h2::Error> for ConnectError {
    fn from(error: h2::Error) -> Self {
        TlsFault::of_connection(&error).map_or(Self::Http2(error), Self::Tls)
    }
}

/// The reason why the server closes a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misuse {
    /// Too many frames that do nothing.
    ControlFrameFlood,
    /// Too many requests that were reset before their responses were complete.
    PrematureResets,
}

/// The reasons with their labels in metrics.
pub(super) const MISUSES: [(Misuse, &str); 2] =
    [(Misuse::ControlFrameFlood, "control_frame_flood"), (Misuse::PrematureResets, "premature_resets")];

/// The reason why a TLS handshake with a client failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandshakeFailure {
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
pub(super) const HANDSHAKE_FAILURES: [(HandshakeFailure, &str); 7] = [
    (HandshakeFailure::Timeout, "timeout"),
    (HandshakeFailure::Disconnected, "disconnected"),
    (HandshakeFailure::RefusedByClient, "refused_by_client"),
    (HandshakeFailure::ClientCertificate, "client_certificate"),
    (HandshakeFailure::PlainHttp, "plain_http"),
    (HandshakeFailure::TlsHello, "tls_hello"),
    (HandshakeFailure::Protocol, "protocol"),
];

impl HandshakeFailure {
    pub(super) fn of(error: &io::Error) -> Self {
        let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>());
        match (of_tls, error.kind()) {
            (Some(TlsError::AlertReceived(_)), _) => Self::RefusedByClient,
            (Some(TlsError::NoCertificatesPresented | TlsError::InvalidCertificate(_)), _) => Self::ClientCertificate,
            (Some(_), _) => Self::Protocol,
            (None, io::ErrorKind::TimedOut) => Self::Timeout,
            (None, _) => Self::Disconnected,
        }
    }
}

/// The problem with a client's certificate that a handshake failed for. Its texts are fixed: rustls describes a certificate
/// with all that it contains, and any client can send one of 64 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CertificateProblem {
    Missing,
    UnknownAuthority,
    Expired,
    NotValidYet,
    BadSignature,
    BadEncoding,
    /// It has extended key usages, and none of them is that of clients.
    Purpose,
    SignatureAlgorithm,
    Other,
}

impl CertificateProblem {
    /// Returns the problem, if it is the cause of this error.
    pub(super) fn of(error: &io::Error) -> Option<Self> {
        let problem = match error.get_ref()?.downcast_ref::<TlsError>()? {
            TlsError::NoCertificatesPresented => return Some(Self::Missing),
            TlsError::InvalidCertificate(problem) => problem,
            _ => return None,
        };
        Some(match problem {
            CertificateError::UnknownIssuer => Self::UnknownAuthority,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotValidYet,
            CertificateError::BadSignature => Self::BadSignature,
            CertificateError::BadEncoding => Self::BadEncoding,
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => Self::Purpose,
            CertificateError::UnsupportedSignatureAlgorithmContext { .. }
            | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => Self::SignatureAlgorithm,
            _ => Self::Other,
        })
    }

    /// Returns the problem and the fix.
    pub(super) const fn texts(self) -> (&'static str, &'static str) {
        match self {
            Self::Missing => (
                "it has no client certificate",
                "give the client a certificate of an authority in gateway.tls.client_ca",
            ),
            Self::UnknownAuthority => (
                "its client certificate was issued by an unknown authority",
                "give the client a certificate of an authority in gateway.tls.client_ca, or add its authority there",
            ),
            Self::Expired => ("its client certificate has expired", "renew the certificate"),
            Self::NotValidYet => {
                ("its client certificate is not valid yet", "check the clocks of this machine and of the authority")
            }
            Self::BadSignature => (
                "a signature in its client certificate or handshake does not verify",
                "check that the client has the key of its certificate, or issue the certificate again",
            ),
            Self::BadEncoding => ("its client certificate is not encoded correctly", "issue the certificate again"),
            Self::Purpose => {
                ("its certificate is not for clients", "issue a certificate with the extended key usage clientAuth")
            }
            Self::SignatureAlgorithm => (
                "its client certificate has an unsupported signature algorithm",
                "issue a certificate with an ECDSA, Ed25519 or RSA signature with SHA-256 or better",
            ),
            Self::Other => ("its client certificate is invalid", "check it with `openssl verify -purpose sslclient`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustls::ExtendedKeyPurpose;

    use super::*;

    #[test]
    fn error_responses_are_json_and_name_the_problem() {
        let all = [
            Failure::NoHost,
            Failure::BadTarget,
            Failure::BadLength,
            Failure::UnderscoreHeader,
            Failure::Connect,
            Failure::Loop,
            Failure::BodyTooLong,
            Failure::BodyLate,
            Failure::BodyBroken,
            Failure::NoRoute,
            Failure::QueueFull,
            Failure::Overloaded,
            Failure::CannotConnect,
            Failure::BadCertificate,
            Failure::ConnectTimeout,
            Failure::Disconnected,
            Failure::NotProcessed,
            Failure::InvalidResponse,
            Failure::ResponseHeadTooLong,
            Failure::ResponseHeadRefused,
            Failure::UpstreamTimeout,
            Failure::Exhausted,
            Failure::UpstreamConnections,
        ];
        let lines = all.map(|failure| {
            let body: serde_json::Value = serde_json::from_str(failure.body()).expect("the body is JSON");
            assert_eq!(body.get("reason").and_then(serde_json::Value::as_str), failure.reason(), "{body}");
            format!("{} {}", failure.status().as_u16(), failure.body())
        });
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn errors_of_upstreams_are_described_for_operators() {
        let exhausted = [
            Exhausted::UpstreamConnections,
            Exhausted::Descriptors,
            Exhausted::SystemDescriptors,
            Exhausted::LocalAddresses,
            Exhausted::Memory,
        ];
        let failures = [
            Failure::Disconnected,
            Failure::NotProcessed,
            Failure::InvalidResponse,
            Failure::ResponseHeadTooLong,
            Failure::ResponseHeadRefused,
            Failure::UpstreamTimeout,
        ];
        let others = [
            ConnectError::Timeout.into(),
            Fault::Stalled,
            Fault::Status(StatusCode::SERVICE_UNAVAILABLE),
            Fault::LateForCheck(Duration::from_millis(200)),
        ];
        let faults = exhausted.map(|exhausted| Fault::from(ConnectError::Exhausted(exhausted))).into_iter();
        let faults = faults.chain(failures.map(Fault::from)).chain(others);
        insta::assert_snapshot!(faults.map(|fault| fault.to_string()).collect::<Vec<_>>().join("\n"));
    }

    #[test]
    fn problems_of_client_certificates_have_a_short_text_and_a_fix() {
        // A client chooses the number of usages.
        let presented = vec![ExtendedKeyPurpose::Other(vec![1, 3, 6, 1]); 10_000];
        let purpose = CertificateError::InvalidPurposeContext { required: ExtendedKeyPurpose::ClientAuth, presented };
        let algorithm = CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
            signature_algorithm_id: vec![7; 10_000],
            public_key_algorithm_id: vec![7; 10_000],
        };
        let problems = [
            CertificateError::UnknownIssuer,
            CertificateError::Expired,
            CertificateError::NotValidYet,
            CertificateError::BadSignature,
            CertificateError::BadEncoding,
            purpose,
            algorithm,
            CertificateError::UnhandledCriticalExtension,
        ];
        let errors = problems.map(TlsError::InvalidCertificate).into_iter();
        let lines = errors.chain([TlsError::NoCertificatesPresented]).map(|error| {
            let problem = CertificateProblem::of(&io::Error::other(error)).expect("it is about the certificate");
            let (problem, fix) = problem.texts();
            format!("{problem}: {fix}")
        });
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
        assert_eq!(CertificateProblem::of(&io::Error::other(TlsError::HandshakeNotComplete)), None);
    }
}
