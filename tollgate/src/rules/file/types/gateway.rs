//! The gateway: where it listens, what it bears, and what it writes down.

mod routes;

use schemars::JsonSchema;
use serde::Deserialize;

pub use self::routes::{
    Balance, EjectRule, HeaderEdits, HealthCheckRule, HostHeader, RespondRule, RewriteRule, RouteRule,
    UpstreamConnectionsRule, UpstreamRule, UpstreamTlsRule,
};
use super::OneOrMany;
use crate::rules::file::forms::{Address, ByteSize, Cidr, DurationText};
use crate::rules::{EncodedSlash, ForwardingHeader, PathCase, PathParameters, PathReading};

/// The gateway.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct GatewayRule {
    /// Where it listens.
    pub listen: Address,
    /// TLS: on `listen`, or beside it.
    pub tls: Option<TlsRule>,
    /// Networks whose `X-Forwarded-For` and `Forwarded` are believed; nobody's by default.
    pub trusted_proxies: Vec<Cidr>,
    /// In which header those proxies name their clients. A proxy that maintains one of them may pass the other on as
    /// the client sent it.
    pub forwarding_header: ForwardingName,
    /// How upstreams read paths; a route may say otherwise.
    pub paths: PathsRule,
    /// Whether connections begin with the header of the PROXY protocol.
    pub proxy_protocol: bool,
    /// What becomes of request headers with an underscore in their name: `drop` (the default), `keep` or `refuse`.
    /// Many upstreams take `X_User_Id` for `X-User-Id`, which limits do not.
    pub underscore_headers: UnderscoreHeaders,
    /// What upstreams are told of the client and of the way.
    #[schemars(length(max = 4))]
    pub tell_upstreams: Vec<UpstreamHeader>,
    /// How many threads serve connections; one for each processor if left out.
    #[schemars(range(min = 1, max = 1024))]
    pub workers: Option<u16>,
    /// How many connections of clients it holds at most; as many as its open files allow if left out.
    #[schemars(range(min = 1))]
    pub max_connections: Option<u32>,
    /// How many connections one client address holds at most; of IPv6, one /64. A quarter of `max_connections`, but at
    /// least 64, if left out. Trusted proxies are not counted.
    #[schemars(range(min = 1))]
    pub max_connections_per_address: Option<u32>,
    /// The longest head of a request.
    pub max_head: ByteSize,
    /// The longest body of a request; any length if left out.
    pub max_body: Option<ByteSize>,
    /// How much of bodies is held at most, of all connections together, while one side does not read what the other
    /// sends; half of the memory that the process may have if left out.
    pub max_buffered: Option<ByteSize>,
    /// How many requests queues of limits hold at most, all together.
    pub max_queued: u32,
    /// How long it waits for clients.
    pub timeouts: TimeoutsRule,
    /// Where a line for every request is written; nowhere if left out.
    pub access_log: Option<AccessLogRule>,
    /// Which requests go where.
    #[schemars(length(max = 10_000))]
    pub routes: Vec<RouteRule>,
}

impl Default for GatewayRule {
    fn default() -> Self {
        Self {
            listen: Address::new("127.0.0.1:8080"),
            tls: None,
            trusted_proxies: Vec::new(),
            forwarding_header: ForwardingName::default(),
            paths: PathsRule::default(),
            proxy_protocol: false,
            underscore_headers: UnderscoreHeaders::default(),
            tell_upstreams: vec![
                UpstreamHeader::XForwarded,
                UpstreamHeader::Forwarded,
                UpstreamHeader::Via,
                UpstreamHeader::RequestId,
            ],
            workers: None,
            max_connections: None,
            max_connections_per_address: None,
            max_head: ByteSize::new(64 << 10),
            max_body: None,
            max_buffered: None,
            max_queued: 10_000,
            timeouts: TimeoutsRule::default(),
            access_log: None,
            routes: Vec::new(),
        }
    }
}

/// How upstreams read paths. See `docs/normal-form.md` for the setting that fits a framework.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct PathsRule {
    /// How they read `%2F` and `%5C`: `any` (a limit applies if any reading matches it), `refuse`, `decode` or `keep`.
    pub encoded_slash: Option<EncodedSlash>,
    /// How they read `;` in a path: `any` (a limit applies if any reading matches it), `refuse`, `strip` or `keep`.
    pub parameters: Option<PathParameters>,
    /// Whether they tell `/API` from `/api`: `sensitive` or `insensitive`.
    pub case: Option<PathCase>,
}

impl PathsRule {
    /// Returns the reading that these settings make of another, which stands where they say nothing.
    #[must_use]
    pub fn over(&self, reading: PathReading) -> PathReading {
        PathReading {
            encoded_slash: self.encoded_slash.unwrap_or(reading.encoded_slash),
            parameters: self.parameters.unwrap_or(reading.parameters),
            case: self.case.unwrap_or(reading.case),
        }
    }
}

/// The header in which proxies name their clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[non_exhaustive]
pub enum ForwardingName {
    /// `X-Forwarded-For` if it is there, or else `Forwarded`.
    #[default]
    #[serde(rename = "either")]
    Either,
    /// `X-Forwarded-For` alone.
    #[serde(rename = "x-forwarded-for")]
    XForwardedFor,
    /// `Forwarded` alone (RFC 7239).
    #[serde(rename = "forwarded")]
    Forwarded,
}

impl From<ForwardingName> for ForwardingHeader {
    fn from(name: ForwardingName) -> Self {
        match name {
            ForwardingName::Either => Self::Either,
            ForwardingName::XForwardedFor => Self::XForwardedFor,
            ForwardingName::Forwarded => Self::Forwarded,
        }
    }
}

/// What becomes of request headers with an underscore in their name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum UnderscoreHeaders {
    /// Neither limits nor upstreams see them.
    #[default]
    Drop,
    /// Limits and upstreams see them, unless the same name with hyphens is one that the gateway handles itself.
    Keep,
    /// A request with one is answered with 400.
    Refuse,
}

/// Something that upstreams are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, JsonSchema)]
#[non_exhaustive]
pub enum UpstreamHeader {
    /// `X-Forwarded-For`, `X-Forwarded-Proto` and `X-Forwarded-Host`.
    #[serde(rename = "x-forwarded")]
    XForwarded,
    /// `Forwarded` (RFC 7239).
    #[serde(rename = "forwarded")]
    Forwarded,
    /// `Via`, to the upstream and to the client.
    #[serde(rename = "via")]
    Via,
    /// `X-Request-Id`: the client's, or a new one; the client gets it back.
    #[serde(rename = "request-id")]
    RequestId,
}

/// TLS for clients.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TlsRule {
    /// Where TLS is spoken; if left out, at the gateway's `listen`, and nothing else is spoken there.
    pub listen: Option<Address>,
    /// Certificates. A client gets the first that is for the name it asks for, or else the first.
    #[schemars(extend("examples" = [{ "cert": "server.pem", "key": "server.key" }]))]
    pub certificates: OneOrMany<CertificateRule>,
    /// A file in PEM with the authorities whose client certificates are believed; relative to the rule file.
    pub client_ca: Option<String>,
    /// Whether a client must have a certificate, where `client_ca` is given.
    #[serde(default)]
    pub client_certificates: ClientCertificates,
}

/// Whether a client must have a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ClientCertificates {
    /// It must.
    #[default]
    Required,
    /// It may.
    Optional,
}

/// A certificate and its key. Both files are read again when they change.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct CertificateRule {
    /// A file in PEM with the certificate and those between it and its authority; relative to the rule file.
    pub cert: String,
    /// A file in PEM with its private key; relative to the rule file.
    pub key: String,
}

/// How long the gateway waits for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct TimeoutsRule {
    /// For the whole head of a request, from its first byte on.
    pub head: DurationText,
    /// For the next bytes of a body.
    pub body: DurationText,
    /// For the next request on a connection.
    pub idle: DurationText,
    /// For a client to read some of what it is sent.
    pub write: DurationText,
    /// For either side of a connection that was upgraded, such as to WebSocket, to say something.
    pub upgraded: DurationText,
    /// For what is under way when the gateway stops.
    pub drain: DurationText,
}

impl Default for TimeoutsRule {
    fn default() -> Self {
        let seconds = |seconds| DurationText::new(std::time::Duration::from_secs(seconds));
        Self {
            head: seconds(10),
            body: seconds(30),
            idle: seconds(60),
            write: seconds(30),
            upgraded: seconds(3600),
            drain: seconds(30),
        }
    }
}

/// Where a line for every request is written, and how.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(from = "AccessLogText")]
#[schemars(with = "AccessLogText", inline)]
#[non_exhaustive]
pub struct AccessLogRule {
    /// How a line looks.
    pub format: LogFormat,
    /// The file that lines are added to, relative to the rule file; the standard output if there is none.
    pub file: Option<String>,
}

/// How an access log is written.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
enum AccessLogText {
    /// The format alone: lines go to the standard output.
    Format(LogFormat),
    /// The format with a file.
    Settings(AccessLogSettings),
}

/// An access log with settings.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AccessLogSettings {
    /// How a line looks.
    #[serde(default)]
    format: LogFormat,
    /// The file that lines are added to, relative to the rule file; the standard output if left out.
    file: Option<String>,
}

impl From<AccessLogText> for AccessLogRule {
    fn from(text: AccessLogText) -> Self {
        match text {
            AccessLogText::Format(format) => Self { format, file: None },
            AccessLogText::Settings(AccessLogSettings { format, file }) => Self { format, file },
        }
    }
}

/// How a line of the access log looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LogFormat {
    /// An object in JSON.
    #[default]
    Json,
    /// The combined format of Apache and nginx, with the limit that decided at its end.
    Combined,
}
