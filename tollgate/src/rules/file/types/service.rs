//! The decision service, the admin page, and whose tokens are believed.

use schemars::JsonSchema;
use serde::Deserialize;

use super::OneOrMany;
use crate::rules::file::forms::{Address, DurationText, HostGlob, TokenSource};

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
    /// Host names that it may be asked for; addresses and `localhost` always.
    pub hosts: Vec<HostGlob>,
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
    /// Host names that it may be asked for, such as `limits.example.com` or `*.example.com`; addresses and `localhost`
    /// always.
    #[serde(default)]
    hosts: Vec<HostGlob>,
}

impl From<ListenerText> for Listener {
    fn from(text: ListenerText) -> Self {
        match text {
            ListenerText::Address(listen) => Self { listen, proxy_protocol: false, hosts: Vec::new() },
            ListenerText::Settings(ListenerSettings { listen, proxy_protocol, hosts }) => {
                Self { listen, proxy_protocol, hosts }
            }
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
    /// Host names that it may be asked for, such as `metrics.example.com` or `*.example.com`; addresses and `localhost`
    /// always.
    #[serde(default)]
    pub hosts: Vec<HostGlob>,
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
    pub audience: Option<OneOrMany<String>>,
    /// How far clocks may be apart.
    #[serde(default = "leeway")]
    pub leeway: DurationText,
    /// Where a request carries its token: `header:NAME`, `cookie:NAME` or `query:NAME`.
    #[serde(default)]
    pub from: TokenSource,
    /// Whether a request that `missing: deny` refuses for want of a valid token gets a 401 with `WWW-Authenticate:
    /// Bearer` (RFC 6750) rather than a 403.
    #[serde(default)]
    pub challenge: bool,
    /// The realm that the challenge names; printable ASCII without quotes and backslashes.
    pub realm: Option<String>,
}

fn leeway() -> DurationText {
    DurationText::new(std::time::Duration::from_secs(30))
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
