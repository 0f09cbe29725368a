//! Failures of requests: error responses that the gateway itself sends, other than those of limits, and errors of
//! upstreams, described for operators. Clients get fewer details ([`Failure`]) than operators ([`Fault`]), and metrics count
//! them by kind.

use std::error::Error as _;
use std::fmt;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use rustix::io::Errno;
use rustls::{CertificateError, Error as TlsError};
use tollgate::internal::Unreadable;

use super::http1::request::InvalidHead;
use super::tally::reason_of;
use super::upstream::tls::TlsFault;
use crate::limit_summary::span;

/// The reason why no upstream answered a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    NoHost,
    SeveralHosts,
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
    InvalidResponse,
    ResponseHeadTooLong,
    ResponseHeadRefused,
    UpstreamTimeout,
    /// The gateway has no descriptors, ports or memory left for a connection. The upstream is not at fault.
    Exhausted,
    /// The maximum number of connections to upstreams is open.
    UpstreamConnections,
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

    /// Returns whether the head of the request is malformed.
    pub(super) const fn is_malformed_request(self) -> bool {
        matches!(self, Self::NoHost | Self::SeveralHosts | Self::BadTarget | Self::BadLength | Self::UnderscoreHeader)
    }

    /// Returns the reason of a 400 or 508, as it appears in the response and in the access log.
    pub(super) const fn reason(self) -> Option<&'static str> {
        match self {
            Self::NoHost => Some("no_host"),
            Self::SeveralHosts => Some("several_hosts"),
            Self::BadTarget => Some("bad_target"),
            Self::BadLength => Some("bad_length"),
            Self::UnderscoreHeader => Some("underscore_header"),
            Self::BodyBroken => Some("broken_body"),
            Self::Loop => Some("loop"),
            _ => None,
        }
    }

    const fn status(self) -> StatusCode {
        match self {
            Self::NoHost
            | Self::SeveralHosts
            | Self::BadTarget
            | Self::BadLength
            | Self::UnderscoreHeader
            | Self::BodyBroken => StatusCode::BAD_REQUEST,
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyLate => StatusCode::REQUEST_TIMEOUT,
            Self::NoRoute => StatusCode::NOT_FOUND,
            Self::QueueFull | Self::Exhausted | Self::UpstreamConnections | Self::Overloaded => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::CannotConnect
            | Self::BadCertificate
            | Self::Disconnected
            | Self::InvalidResponse
            | Self::ResponseHeadTooLong
            | Self::ResponseHeadRefused => StatusCode::BAD_GATEWAY,
            Self::ConnectTimeout | Self::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Loop => StatusCode::LOOP_DETECTED,
        }
    }

    const fn body(self) -> &'static str {
        match self {
            Self::NoHost => {
                r#"{"error":"bad_request","reason":"no_host","message":"The request has no Host header: send one."}"#
            }
            Self::SeveralHosts => {
                r#"{"error":"bad_request","reason":"several_hosts","message":"The request names more than one host: send one Host header, or the same host as in :authority."}"#
            }
            Self::BadLength => {
                r#"{"error":"bad_request","reason":"bad_length","message":"The request has duplicate or invalid Content-Length headers: send one valid length."}"#
            }
            Self::UnderscoreHeader => {
                r#"{"error":"bad_request","reason":"underscore_header","message":"A header name has an underscore, which gateway.underscore_headers refuses: use hyphens."}"#
            }
            Self::BadTarget => {
                r#"{"error":"bad_request","reason":"bad_target","message":"The request target is not a valid URI: percent-encode it."}"#
            }
            Self::Connect => {
                r#"{"error":"method_not_allowed","message":"CONNECT is not supported: this is not a forward proxy."}"#
            }
            Self::Loop => {
                r#"{"error":"loop_detected","reason":"loop","message":"The request has passed this gateway before: correct the route or proxy that sends it back."}"#
            }
            Self::BodyTooLong => {
                r#"{"error":"body_too_long","message":"The request body exceeds the maximum size: send a smaller one."}"#
            }
            Self::BodyLate => {
                r#"{"error":"request_timeout","message":"The request body did not arrive in time: send it without long pauses."}"#
            }
            Self::BodyBroken => {
                r#"{"error":"bad_request","reason":"broken_body","message":"The request body is malformed or incomplete: send all of it, as Content-Length or chunked announces."}"#
            }
            Self::NoRoute => {
                r#"{"error":"no_route","message":"No route matches this request: check its host, path and method."}"#
            }
            Self::Overloaded => {
                r#"{"error":"overloaded","message":"The gateway's buffers are full (gateway.max_buffered): try again later."}"#
            }
            Self::QueueFull => r#"{"error":"queue_full","message":"Too many requests are waiting: try again later."}"#,
            // The client need not know which certificates the gateway trusts.
            Self::CannotConnect | Self::BadCertificate => {
                r#"{"error":"bad_gateway","message":"The upstream cannot be reached."}"#
            }
            Self::Disconnected => {
                r#"{"error":"bad_gateway","message":"The upstream closed the connection before the end of its response."}"#
            }
            Self::InvalidResponse => r#"{"error":"bad_gateway","message":"The upstream sent an invalid response."}"#,
            Self::ResponseHeadTooLong => {
                r#"{"error":"bad_gateway","message":"The upstream's response has more than 100 headers, or more than 64 KiB of headers."}"#
            }
            Self::ResponseHeadRefused => {
                r#"{"error":"bad_gateway","message":"The upstream's response has more than 64 KiB of headers, or headers that HTTP/2 forbids."}"#
            }
            Self::ConnectTimeout => {
                r#"{"error":"gateway_timeout","message":"The upstream could not be reached in time."}"#
            }
            Self::Exhausted => {
                r#"{"error":"gateway_exhausted","message":"The gateway has no resources left for this request: try again later."}"#
            }
            Self::UpstreamConnections => {
                r#"{"error":"too_many_upstream_connections","message":"The gateway has too many connections to upstreams open: try later, or send fewer requests at the same time."}"#
            }
            Self::UpstreamTimeout => r#"{"error":"gateway_timeout","message":"The upstream did not respond in time."}"#,
        }
    }
}

/// The reason of a request head that is not HTTP, as it appears in the response and in the access log.
pub(super) const MALFORMED: &str = "malformed";

/// Describes the failure for operators: its subject is the upstream.
impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Disconnected => "it closed the connection before the end of its response",
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

/// The methods in the `Allow` header. Others are accepted, too.
pub(super) const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE";

/// Returns the response to a request with more than one interpretation. It names the ambiguous part, and the reason as
/// metrics do.
pub(super) fn unreadable_response(problem: &Unreadable) -> Response<Bytes> {
    let body = serde_json::json!({
        "error": "bad_request",
        "reason": problem.reason(),
        "message": problem.to_string(),
    });
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = StatusCode::BAD_REQUEST;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    // The rest of the connection may have more than one interpretation, too.
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Returns the response to a head that cannot be parsed. The caller closes the connection.
pub(super) fn unparsed_response(invalid: InvalidHead) -> Response<Bytes> {
    let (error, reason, message) = match invalid {
        InvalidHead::TooLong => (
            "head_too_long",
            None,
            "The request head is longer than gateway.max_head, or has more than 100 headers: send fewer or shorter headers."
                .to_owned(),
        ),
        InvalidHead::TargetTooLong => {
            ("target_too_long", None, "The request target is longer than 65,534 bytes: send a shorter one.".to_owned())
        }
        InvalidHead::Malformed => (
            "bad_request",
            Some(MALFORMED),
            "The request is not valid HTTP/1: send a request line and headers as in RFC 9112.".to_owned(),
        ),
        InvalidHead::Ambiguous(ambiguity) => {
            ("bad_request", reason_of(ambiguity), format!("The request is refused, because {ambiguity}: {}.", ambiguity.fix()))
        }
    };
    let mut body = serde_json::json!({ "error": error });
    if let Some(reason) = reason {
        body["reason"] = reason.into();
    }
    body["message"] = message.into();
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = invalid.status();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Returns the response for a failure.
pub(super) fn response(failure: Failure) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from_static(failure.body().as_bytes()));
    *response.status_mut() = failure.status();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if failure.status() == StatusCode::BAD_REQUEST {
        // The rest of the connection may have more than one interpretation, too.
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if failure == Failure::Connect {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(METHODS));
    }
    if failure.status() == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

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

impl From<hyper::Error> for Fault {
    fn from(error: hyper::Error) -> Self {
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
    Http(hyper::Error),
    Timeout,
    /// The gateway has run out of a resource.
    Exhausted(Exhausted),
}

impl fmt::Display for ConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(out),
            Self::Tls(fault) => fault.fmt(out),
            Self::Http(error) => match error.source() {
                Some(source) => write!(out, "{error}: {source}"),
                None => error.fmt(out),
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
            Self::Tls(_) | Self::Http(_) | Self::Timeout => None,
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

impl From<hyper::Error> for ConnectError {
    fn from(error: hyper::Error) -> Self {
        TlsFault::of_connection(&error).map_or(Self::Http(error), Self::Tls)
    }
}

/// The reason why a request is refused whose framing has more than one interpretation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ambiguity {
    BareLf,
    Nul,
    SpaceBeforeColon,
    FoldedLine,
    BadLength,
    SeveralLengths,
    BothLengths,
    BadTransferCoding,
    BadChunk,
    HeadTooLong,
    /// Found later, for every version of HTTP.
    UnderscoreHeader,
}

impl fmt::Display for Ambiguity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::BareLf => "a line ends without a CR",
            Self::Nul => "the head contains a NUL",
            Self::SpaceBeforeColon => "a header name is followed by a space",
            Self::FoldedLine => "a header is folded over several lines",
            Self::BadLength => "Content-Length is not a number below 2^63",
            Self::SeveralLengths => "there is more than one Content-Length",
            Self::BothLengths => "there are both Content-Length and Transfer-Encoding",
            Self::BadTransferCoding => "Transfer-Encoding is not exactly chunked",
            Self::BadChunk => "the chunked body is malformed",
            Self::HeadTooLong => "the head is too long",
            Self::UnderscoreHeader => "a header name has an underscore",
        })
    }
}

impl Ambiguity {
    /// Returns what a client can do about it.
    pub(super) const fn fix(self) -> &'static str {
        match self {
            Self::BareLf => "end every line with CR LF",
            Self::Nul => "remove it",
            Self::SpaceBeforeColon => "remove the space",
            Self::FoldedLine => "write it in one line",
            Self::BadLength => "send the length in decimal digits",
            Self::SeveralLengths => "send one",
            Self::BothLengths => "send one of them",
            Self::BadTransferCoding => "send `Transfer-Encoding: chunked`, or Content-Length",
            Self::BadChunk => "send chunks as in section 7.1 of RFC 9112",
            Self::HeadTooLong => "send fewer or shorter headers",
            Self::UnderscoreHeader => "use hyphens",
        }
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

    /// Describes the problem.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Missing => "it has no client certificate",
            Self::UnknownAuthority => "its client certificate was issued by an unknown authority",
            Self::Expired => "its client certificate has expired",
            Self::NotValidYet => "its client certificate is not valid yet",
            Self::BadSignature => "a signature in its client certificate or handshake does not verify",
            Self::BadEncoding => "its client certificate is not encoded correctly",
            Self::Purpose => "its certificate is not for clients",
            Self::SignatureAlgorithm => "its client certificate has an unsupported signature algorithm",
            Self::Other => "its client certificate is invalid",
        }
    }

    /// Returns the way to fix the problem.
    pub(super) const fn fix(self) -> &'static str {
        match self {
            Self::Missing => "give the client a certificate of an authority in gateway.tls.client_ca",
            Self::UnknownAuthority => {
                "give the client a certificate of an authority in gateway.tls.client_ca, or add its authority there"
            }
            Self::Expired => "renew the certificate",
            Self::NotValidYet => "check the clocks of this machine and of the authority",
            Self::BadSignature => {
                "check that the client has the key of its certificate, or issue the certificate again"
            }
            Self::BadEncoding => "issue the certificate again",
            Self::Purpose => "issue a certificate with the extended key usage clientAuth",
            Self::SignatureAlgorithm => {
                "issue a certificate with an ECDSA, Ed25519 or RSA signature with SHA-256 or better"
            }
            Self::Other => "check it with `openssl verify -purpose sslclient`",
        }
    }
}

#[cfg(test)]
mod tests {
    use rustls::ExtendedKeyPurpose;

    use super::*;
    use crate::gateway::tally::AMBIGUITIES;

    #[test]
    fn error_responses_are_json_and_name_the_problem() {
        let all = [
            Failure::NoHost,
            Failure::SeveralHosts,
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
    fn responses_to_heads_that_cannot_be_parsed_name_the_problem_and_the_fix() {
        let ambiguous = AMBIGUITIES.map(|(ambiguity, _)| InvalidHead::Ambiguous(ambiguity));
        let all =
            [InvalidHead::TooLong, InvalidHead::TargetTooLong, InvalidHead::Malformed].into_iter().chain(ambiguous);
        let lines = all.map(|invalid| {
            let response = unparsed_response(invalid);
            format!("{} {}", response.status().as_u16(), String::from_utf8_lossy(response.body()))
        });
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
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
            format!("{}: {}", problem.text(), problem.fix())
        });
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
        assert_eq!(CertificateProblem::of(&io::Error::other(TlsError::HandshakeNotComplete)), None);
    }
}
