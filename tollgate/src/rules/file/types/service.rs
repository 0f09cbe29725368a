//! The decision service, the admin listener, and the verification of tokens.

use schemars::JsonSchema;
use serde::Deserialize;

use super::{ClientCertificates, EnvoyRule, OneOrMany, TlsRule, XdsRule};
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
    /// The Redis protocol.
    pub resp: Option<Listener>,
    /// Rate limits in the format of envoyproxy/ratelimit, for `grpc`.
    pub envoy: Option<EnvoyRule>,
    /// The server that sends rate limits in the format of envoyproxy/ratelimit by xDS, for `grpc`.
    pub xds: Option<XdsRule>,
}

/// A listener of the decision service: an address, or a map of settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(from = "ListenerText")]
#[schemars(with = "ListenerText", inline)]
#[non_exhaustive]
pub struct Listener {
    /// The address to listen on.
    pub listen: Address,
    /// Expects the header of the PROXY protocol on every connection.
    pub proxy_protocol: bool,
    /// Allowed host names, for HTTP only. Addresses and `localhost` are always allowed.
    pub hosts: Vec<HostGlob>,
    /// The path of a file with the tokens that clients send in `Authorization: Bearer` or `AUTH`.
    pub tokens_file: Option<String>,
    /// Whether clients on other machines need no authentication.
    pub open: bool,
    /// Most client connections at once. As many as open files allow, up to 4,096, if `None`.
    pub max_connections: Option<u32>,
    /// TLS. Its own `listen` is not allowed here.
    pub tls: Option<TlsRule>,
}

/// The notations of a listener.
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
    /// The address to listen on.
    listen: Address,
    /// Expects the header of the PROXY protocol on every connection.
    #[serde(default)]
    proxy_protocol: bool,
    /// Allowed host names, such as `limits.example.com` or `*.example.com`. Addresses and `localhost` are always
    /// allowed. Only for HTTP.
    #[serde(default)]
    hosts: Vec<HostGlob>,
    /// A file with one token in each line. Clients send one of them in `Authorization: Bearer`, or in `AUTH` over the
    /// Redis protocol.
    tokens_file: Option<String>,
    /// Whether clients on other machines need no authentication.
    #[serde(default)]
    open: bool,
    /// Most client connections at once. As many as open files allow, up to 4,096, if left out.
    #[schemars(range(min = 1))]
    max_connections: Option<u32>,
    /// TLS. With `client_ca`, clients authenticate by certificates. `tls.listen` is not allowed here.
    tls: Option<TlsRule>,
}

impl Listener {
    /// Returns whether clients must have a certificate.
    #[must_use]
    pub fn requires_certificates(&self) -> bool {
        requires_certificates(self.tls.as_ref())
    }

    /// Returns a listener with default settings.
    #[must_use]
    pub fn new(listen: Address) -> Self {
        let (hosts, tokens_file) = (Vec::new(), None);
        Self { listen, proxy_protocol: false, hosts, tokens_file, open: false, max_connections: None, tls: None }
    }
}

impl From<ListenerText> for Listener {
    fn from(text: ListenerText) -> Self {
        match text {
            ListenerText::Address(listen) => Self::new(listen),
            ListenerText::Settings(settings) => {
                let ListenerSettings { listen, proxy_protocol, hosts, tokens_file, open, max_connections, tls } =
                    settings;
                Self { listen, proxy_protocol, hosts, tokens_file, open, max_connections, tls }
            }
        }
    }
}

/// The admin listener: health checks, metrics, the admin API and the dashboard.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct AdminRule {
    /// The address to listen on.
    pub listen: Address,
    /// Allowed host names, such as `metrics.example.com` or `*.example.com`. Addresses and `localhost` are always allowed.
    #[serde(default)]
    pub hosts: Vec<HostGlob>,
    /// A file with one token in each line. Clients of the admin API send one of them in `Authorization: Bearer`. Health
    /// checks and metrics need none. Without it, the API is open on loopback addresses and closed on others.
    pub tokens_file: Option<String>,
    /// Whether the API and the lines that it logs show keys, rather than their hashes.
    #[serde(default)]
    pub show_keys: bool,
    /// TLS. With `client_ca`, clients authenticate by certificates. `tls.listen` is not allowed here.
    pub tls: Option<TlsRule>,
}

impl AdminRule {
    /// Returns whether clients must have a certificate.
    #[must_use]
    pub fn requires_certificates(&self) -> bool {
        requires_certificates(self.tls.as_ref())
    }
}

fn requires_certificates(tls: Option<&TlsRule>) -> bool {
    tls.is_some_and(|tls| tls.client_ca.is_some() && tls.client_certificates == ClientCertificates::Required)
}

/// The verification of tokens, by one key or by a key set.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct JwtRule {
    /// A file with a public key in PEM or with a shared secret, relative to the rule file.
    pub key_file: Option<String>,
    /// A file with a JSON Web Key Set, relative to the rule file.
    pub jwks_file: Option<String>,
    /// Accepted algorithms. Needed with `key_file`.
    #[serde(default)]
    pub algorithms: Vec<JwtAlgorithm>,
    /// Required issuer.
    pub issuer: Option<String>,
    /// Accepted audiences; a token must have one of them.
    pub audience: Option<OneOrMany<String>>,
    /// Tolerated difference between clocks.
    #[serde(default = "leeway")]
    pub leeway: DurationText,
    /// The source of the token: `header:NAME`, `cookie:NAME` or `query:NAME`.
    #[serde(default)]
    pub from: TokenSource,
    /// Whether a request that `missing: deny` refuses because it has no valid token gets a 401 with `WWW-Authenticate:
    /// Bearer` (RFC 6750) instead of a 403.
    #[serde(default)]
    pub challenge: bool,
    /// The realm of the challenge: printable ASCII without quotes and backslashes.
    pub realm: Option<String>,
}

fn leeway() -> DurationText {
    DurationText::new(std::time::Duration::from_secs(30))
}

/// A signature algorithm of tokens.
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
