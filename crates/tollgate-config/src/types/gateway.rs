//! The gateway: listeners, bounds, timeouts and the access log.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use tollgate_rules::ForwardingHeader;

use super::notation::{at_least, between, or_value, or_value_of, wait};
use super::{OneOrMany, PathsRule, RouteRule};
use crate::forms::{Address, ByteSize, Cidr, DurationText};

/// The gateway.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayRule {
    /// The address to listen on.
    pub listen: Address,
    /// TLS, on `listen` or on an address of its own.
    pub tls: Option<TlsRule>,
    /// Networks of proxies whose `X-Forwarded-For` and `Forwarded` are trusted. None by default.
    pub trusted_proxies: Vec<Cidr>,
    /// The header in which trusted proxies name their clients. A proxy that maintains one header may forward the other
    /// unchanged from the client.
    pub forwarding_header: ForwardingHeader,
    /// How upstreams interpret paths. A route can override it.
    pub paths: PathsRule,
    /// The load balancers that begin every connection with a header of the PROXY protocol.
    pub proxy_protocol: ProxyProtocolRule,
    /// The treatment of request headers with an underscore, a dot or another character than letters, digits and hyphens in
    /// their name: `drop` (the default), `keep` or `refuse`. Many upstreams take `X_User_Id` for `X-User-Id`, and PHP takes
    /// `X.User.Id` for it; limits do not.
    pub underscore_headers: UnderscoreHeaders,
    /// Headers about the client and the connection that are added to requests for upstreams.
    #[schemars(length(max = 4))]
    pub tell_upstreams: Vec<UpstreamHeader>,
    /// Number of worker threads. One per processor if left out.
    #[schemars(range(min = 1, max = 1024))]
    pub workers: Option<u16>,
    /// Most client connections at once. As many as open files allow if left out.
    #[schemars(range(min = 1))]
    pub max_connections: Option<u32>,
    /// Most connections of one client address, or of one IPv6 /64. A quarter of `max_connections`, but at least 64, if
    /// left out. Trusted proxies are not counted.
    #[schemars(range(min = 1))]
    pub max_connections_per_address: Option<u32>,
    /// Largest request head.
    // hyper's smallest buffer, and more than any legitimate head.
    #[schemars(transform = between("8KiB", "1MiB"))]
    pub max_head: ByteSize,
    /// Largest request body. Unlimited if left out.
    pub max_body: Option<ByteSize>,
    /// Most memory for buffered bodies, of all connections together, while one side reads more slowly than the other
    /// sends. Half of the memory available to the process if left out.
    // Fits several bodies at once.
    #[schemars(transform = at_least("1MiB"))]
    pub max_buffered: Option<ByteSize>,
    /// Most requests that wait in queues of limits, all together.
    pub max_queued: u32,
    /// Timeouts for clients.
    pub timeouts: TimeoutsRule,
    /// The access log. Off if left out.
    pub access_log: Option<AccessLogRule>,
    /// The routes.
    #[schemars(length(max = 10_000))]
    pub routes: Vec<RouteRule>,
}

impl Default for GatewayRule {
    fn default() -> Self {
        Self {
            listen: Address::new("127.0.0.1:8080"),
            tls: None,
            trusted_proxies: Vec::new(),
            forwarding_header: ForwardingHeader::default(),
            paths: PathsRule::default(),
            proxy_protocol: ProxyProtocolRule::default(),
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

/// The PROXY protocol on a listener: `false`, or the networks of the load balancers that send its headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "WrittenProxyProtocol")]
pub enum ProxyProtocolRule {
    /// Connections begin with their first request.
    #[default]
    Off,
    /// `true`, which is refused because it does not name the senders of headers.
    Unrestricted,
    /// Connections begin with a header. Those from other networks are closed.
    From(Vec<Cidr>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenProxyProtocol {
    Switch(bool),
    Senders(ProxyProtocolSenders),
}

/// The senders of headers of the PROXY protocol.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ProxyProtocolSenders {
    /// The networks of the load balancers. Connections from other addresses are closed.
    #[schemars(extend("examples" = [["10.0.0.0/8"]]))]
    from: OneOrMany<Cidr>,
}

impl From<WrittenProxyProtocol> for ProxyProtocolRule {
    fn from(written: WrittenProxyProtocol) -> Self {
        match written {
            WrittenProxyProtocol::Switch(false) => Self::Off,
            WrittenProxyProtocol::Switch(true) => Self::Unrestricted,
            WrittenProxyProtocol::Senders(senders) => Self::From(senders.from.to_vec()),
        }
    }
}

impl JsonSchema for ProxyProtocolRule {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "ProxyProtocolRule".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let senders = generator.subschema_for::<ProxyProtocolSenders>();
        json_schema!({ "anyOf": [senders, { "type": "boolean", "const": false }] })
    }
}

/// The treatment of request headers whose name has a character other than letters, digits and hyphens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnderscoreHeaders {
    /// Removed before limits and upstreams see them.
    #[default]
    Drop,
    /// Kept, unless the same name with hyphens is a header that the gateway handles itself.
    Keep,
    /// Refused: a request with one gets 400.
    Refuse,
}

/// A header, or a group of headers, that the gateway adds to requests for upstreams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, JsonSchema)]
pub enum UpstreamHeader {
    /// `X-Forwarded-For`, `X-Forwarded-Proto` and `X-Forwarded-Host`.
    #[serde(rename = "x-forwarded")]
    XForwarded,
    /// `Forwarded` (RFC 7239).
    #[serde(rename = "forwarded")]
    Forwarded,
    /// `Via`, in the request and in the response.
    #[serde(rename = "via")]
    Via,
    /// `X-Request-Id`: that of the client, or a new one. The response has it too.
    #[serde(rename = "request-id")]
    RequestId,
}

/// TLS for clients.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TlsRule {
    /// The address for TLS. If left out, the gateway's `listen` is TLS only.
    pub listen: Option<Address>,
    /// Certificates. A client gets the first one that is valid for the requested name, else the first.
    #[schemars(extend("examples" = [{ "cert": "server.pem", "key": "server.key" }]))]
    pub certificates: OneOrMany<CertificateRule>,
    /// A PEM file with the authorities of client certificates, relative to the rule file.
    pub client_ca: Option<String>,
    /// Whether a client must have a certificate. Needs `client_ca`.
    #[serde(default)]
    pub client_certificates: ClientCertificates,
}

/// Whether a client must have a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientCertificates {
    /// Connections without a certificate are refused.
    #[default]
    Required,
    /// Connections without a certificate are accepted.
    Optional,
}

/// A certificate and its key. Both files are reloaded when they change.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CertificateRule {
    /// A PEM file with the certificate and its intermediate certificates, relative to the rule file.
    pub cert: String,
    /// A PEM file with the private key, relative to the rule file.
    pub key: String,
}

/// Timeouts for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TimeoutsRule {
    /// For a whole request head, from its first byte.
    #[schemars(transform = wait())]
    pub head: DurationText,
    /// For the next bytes of a request body.
    #[schemars(transform = wait())]
    pub body: DurationText,
    /// For the next request on a connection.
    #[schemars(transform = wait())]
    pub idle: DurationText,
    /// For a client to read some of its response.
    #[schemars(transform = wait())]
    pub write: DurationText,
    /// For either side of an upgraded connection, such as a WebSocket, to send something.
    #[schemars(transform = wait())]
    pub upgraded: DurationText,
    /// For requests in progress when the gateway stops.
    #[schemars(transform = wait())]
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

/// The access log: one line for each request. Its format, with or without settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = or_value_of("format"))]
pub struct AccessLogRule {
    /// The format of a line.
    #[serde(default)]
    pub format: LogFormat,
    /// The file to append to, relative to the rule file. Standard output if left out.
    pub file: Option<String>,
    /// How JSON lines contain the key that the limit counted by: `hash` or `plain`. Not at all if left out.
    pub key: Option<LoggedKey>,
}

or_value!(AccessLogRule, "format");

/// A key in the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoggedKey {
    /// Its hash, as in the admin API.
    Hash,
    /// Its parts, separated by commas.
    Plain,
}

/// The format of a line of the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// A JSON object.
    #[default]
    Json,
    /// The combined format of Apache and nginx, followed by the limit that decided.
    Combined,
}
