//! The decision service with its rate limits in the format of envoyproxy/ratelimit, the admin listener, and the
//! verification of tokens.

use schemars::JsonSchema;
use serde::Deserialize;
use tollgate_rules::internal::config::jwt;

use super::notation::{between, or_value, or_value_of, seconds};
use super::{AlgorithmName, ClientCertificates, OneOrMany, ProxyProtocolRule, TlsRule};
use crate::forms::{Address, DurationText, HostGlob, TokenSource};

/// The decision service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
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
    /// The answer to a request that no limit applies to, and to one under a plan that a limit has no numbers for.
    pub unknown: UnknownPolicy,
}

/// The answer to a request that no limit applies to, or whose plan is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnknownPolicy {
    /// Allows it, with a warning. Under an unknown plan, the limit's own numbers apply.
    #[default]
    Allow,
    /// Denies it.
    Deny,
}

/// A listener of the decision service: an address, with or without settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = or_value_of("listen"))]
pub struct Listener {
    /// The address to listen on.
    pub listen: Address,
    /// The load balancers that begin every connection with a header of the PROXY protocol.
    #[serde(default)]
    pub proxy_protocol: ProxyProtocolRule,
    /// Allowed host names, such as `limits.example.com` or `*.example.com`. Addresses and `localhost` are always
    /// allowed. Only for HTTP.
    #[serde(default)]
    pub hosts: Vec<HostGlob>,
    /// A file with one token in each line. Clients send one of them in `Authorization: Bearer`, or in `AUTH` over the
    /// Redis protocol.
    pub tokens_file: Option<String>,
    /// Whether clients on other machines need no authentication.
    #[serde(default)]
    pub open: bool,
    /// Most client connections at once. As many as open files allow, up to 4,096, if left out.
    #[schemars(range(min = 1))]
    pub max_connections: Option<u32>,
    /// TLS. With `client_ca`, clients authenticate by certificates. `tls.listen` is not allowed here.
    pub tls: Option<TlsRule>,
}

or_value!(Listener, "listen");

impl Listener {
    /// Returns whether clients must have a certificate.
    pub fn requires_certificates(&self) -> bool {
        requires_certificates(self.tls.as_ref())
    }

    /// Returns a listener with default settings.
    pub fn new(listen: Address) -> Self {
        let (hosts, tokens_file) = (Vec::new(), None);
        let proxy_protocol = ProxyProtocolRule::default();
        Self { listen, proxy_protocol, hosts, tokens_file, open: false, max_connections: None, tls: None }
    }
}

/// Rate limits in the format of envoyproxy/ratelimit, from files or by xDS.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EnvoyRule {
    /// Files, such as `ratelimit/*.yaml`, or folders of `*.yaml` and `*.yml` files; relative to the rule file.
    pub files: Option<OneOrMany<String>>,
    /// The algorithm of the rate limits. envoyproxy/ratelimit has fixed windows only.
    pub algorithm: AlgorithmName,
    /// Whether files with the same domain are merged. Otherwise they are refused.
    pub merge_domains: bool,
}

impl Default for EnvoyRule {
    fn default() -> Self {
        Self { files: None, algorithm: AlgorithmName::FixedWindow, merge_domains: false }
    }
}

/// The server that sends rate limits by xDS: its URL, with or without settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = or_value_of("url"))]
pub struct XdsRule {
    /// The URL: `http://HOST:PORT`, or `https://HOST:PORT` for TLS.
    pub url: String,
    /// The node id by which the server selects the configuration. Envoy Gateway expects `envoy-ratelimit`.
    #[serde(default = "node_id")]
    pub node_id: String,
    /// A file with the certificate authorities of the server, in PEM. Without it, the public ones are used.
    pub ca: Option<String>,
    /// A file with the client certificate, in PEM.
    pub client_cert: Option<String>,
    /// A file with the key of the client certificate, in PEM.
    pub client_key: Option<String>,
    /// The name in the server's certificate, if it is not the host of the URL.
    pub server_name: Option<String>,
}

or_value!(XdsRule, "url");

/// The default of envoyproxy/ratelimit.
fn node_id() -> String {
    "default".to_owned()
}

/// The admin listener: health checks, metrics, the admin API and the dashboard.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
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
pub struct JwtRule {
    /// A file with a public key in PEM or with a shared secret, relative to the rule file.
    pub key_file: Option<String>,
    /// A file with a JSON Web Key Set, relative to the rule file.
    pub jwks_file: Option<String>,
    /// Accepted algorithms. Needed with `key_file`.
    #[serde(default)]
    pub algorithms: Vec<jwt::Algorithm>,
    /// Required issuer.
    pub issuer: Option<String>,
    /// Accepted audiences; a token must have one of them.
    pub audience: Option<OneOrMany<String>>,
    /// Tolerated difference between clocks.
    #[serde(default = "seconds::<30>")]
    #[schemars(transform = between("0s", "1h"))]
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
