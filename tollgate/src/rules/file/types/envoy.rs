//! Rate limits in the format of envoyproxy/ratelimit, from files and by xDS.

use schemars::JsonSchema;
use serde::Deserialize;

use super::{AlgorithmName, OneOrMany};

/// Rate limits in the format of envoyproxy/ratelimit, from files or by xDS.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
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

/// The server that sends rate limits by xDS.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(from = "XdsText")]
#[schemars(with = "XdsText", inline)]
#[non_exhaustive]
pub struct XdsRule {
    /// The URL: `http://HOST:PORT`, or `https://HOST:PORT` for TLS.
    pub url: String,
    /// The node id by which the server selects the configuration.
    pub node_id: String,
    /// A file with the certificate authorities of the server, in PEM.
    pub ca: Option<String>,
    /// A file with the client certificate, in PEM.
    pub client_cert: Option<String>,
    /// A file with the key of the client certificate, in PEM.
    pub client_key: Option<String>,
    /// The name in the server's certificate, if it is not the host of the URL.
    pub server_name: Option<String>,
}

/// The notations of an xDS server.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
enum XdsText {
    /// The URL alone.
    Url(String),
    /// The URL with settings.
    Settings(XdsSettings),
}

/// An xDS server with settings.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct XdsSettings {
    /// The URL: `http://HOST:PORT`, or `https://HOST:PORT` for TLS.
    url: String,
    /// The node id by which the server selects the configuration. Envoy Gateway expects `envoy-ratelimit`.
    #[serde(default = "node_id")]
    node_id: String,
    /// A file with the certificate authorities of the server, in PEM. Without it, the public ones are used.
    ca: Option<String>,
    /// A file with the client certificate, in PEM.
    client_cert: Option<String>,
    /// A file with the key of the client certificate, in PEM.
    client_key: Option<String>,
    /// The name in the server's certificate, if it is not the host of the URL.
    server_name: Option<String>,
}

/// The default of envoyproxy/ratelimit.
fn node_id() -> String {
    "default".to_owned()
}

impl From<XdsText> for XdsRule {
    fn from(text: XdsText) -> Self {
        let settings = match text {
            XdsText::Settings(settings) => settings,
            XdsText::Url(url) => XdsSettings {
                url,
                node_id: node_id(),
                ca: None,
                client_cert: None,
                client_key: None,
                server_name: None,
            },
        };
        let XdsSettings { url, node_id, ca, client_cert, client_key, server_name } = settings;
        Self { url, node_id, ca, client_cert, client_key, server_name }
    }
}
