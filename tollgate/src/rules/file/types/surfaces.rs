//! Where limits are applied: the gateway, the decision service, the admin page; and whose tokens are believed.

use schemars::JsonSchema;
use serde::Deserialize;

use super::Several;
use crate::rules::ForwardingHeader;
use crate::rules::file::forms::{Address, Cidr, PathGlob, Span, TokenSource, Upstream};

/// The gateway.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct GatewayRule {
    /// Where it listens.
    pub listen: Address,
    /// Networks whose `X-Forwarded-For` and `Forwarded` are believed; nobody's by default.
    pub trusted_proxies: Vec<Cidr>,
    /// In which header those proxies name their clients. A proxy that maintains one of them may pass the other on as
    /// the client sent it.
    pub forwarding_header: ForwardingName,
    /// Whether connections begin with the header of the PROXY protocol.
    pub proxy_protocol: bool,
    /// Which requests go where.
    pub routes: Vec<RouteRule>,
}

impl Default for GatewayRule {
    fn default() -> Self {
        let listen = Address::new("127.0.0.1:8080");
        let forwarding_header = ForwardingName::default();
        Self { listen, trusted_proxies: Vec::new(), forwarding_header, proxy_protocol: false, routes: Vec::new() }
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

/// A route of the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RouteRule {
    /// Which paths it serves: `*` is anything within a segment, `**` any number of segments.
    pub path: PathGlob,
    /// Where they go: one URL, or several to balance over.
    pub upstream: Several<Upstream>,
}

/// The decision service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct ServiceRule {
    /// JSON over HTTP.
    pub http: Option<Listener>,
    /// Envoy's rate limit service.
    pub grpc: Option<Listener>,
    /// The protocol of Redis.
    pub resp: Option<Listener>,
}

/// An address to listen on, with or without the PROXY protocol.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(from = "ListenerText")]
#[schemars(with = "ListenerText", inline)]
#[non_exhaustive]
pub struct Listener {
    /// Where it listens.
    pub listen: Address,
    /// Whether connections begin with the header of the PROXY protocol.
    pub proxy_protocol: bool,
}

/// How a listener is written.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
enum ListenerText {
    /// The address alone.
    Address(Address),
    /// The address with settings.
    Settings(ListenerSettings),
}

/// A listener with settings.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListenerSettings {
    /// Where it listens.
    listen: Address,
    /// Whether connections begin with the header of the PROXY protocol.
    #[serde(default)]
    proxy_protocol: bool,
}

impl From<ListenerText> for Listener {
    fn from(text: ListenerText) -> Self {
        match text {
            ListenerText::Address(listen) => Self { listen, proxy_protocol: false },
            ListenerText::Settings(ListenerSettings { listen, proxy_protocol }) => Self { listen, proxy_protocol },
        }
    }
}

/// The admin page.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct AdminRule {
    /// Where it listens.
    pub listen: Address,
}

/// How tokens are verified: by one key, or by a set of keys.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct JwtRule {
    /// A file with a public key in PEM, or with the bytes of a secret; relative to the rule file.
    pub key_file: Option<String>,
    /// A file with a JSON Web Key Set; relative to the rule file.
    pub jwks_file: Option<String>,
    /// Which algorithms are believed; needed with `key_file`.
    #[serde(default)]
    pub algorithms: Vec<JwtAlgorithm>,
    /// Who must have issued the token.
    pub issuer: Option<String>,
    /// For whom it must be; one of these.
    pub audience: Option<Several<String>>,
    /// How far clocks may be apart.
    #[serde(default = "leeway")]
    pub leeway: Span,
    /// Where a request carries its token: `header:NAME`, `cookie:NAME` or `query:NAME`.
    #[serde(default)]
    pub from: TokenSource,
}

fn leeway() -> Span {
    Span::new(std::time::Duration::from_secs(30))
}

/// An algorithm that signs tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, JsonSchema)]
#[non_exhaustive]
pub enum JwtAlgorithm {
    /// HMAC with SHA-256 and a shared secret.
    HS256,
    /// RSA with SHA-256.
    RS256,
    /// ECDSA on P-256.
    ES256,
    /// Ed25519.
    EdDSA,
}
