//! The settings of the xDS client, and its connections.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tollgate_config::internal::{SettingError, XdsRule};
use tollgate_config::{Parsed, Problems};
use tollgate_net::pem;
use tonic::codegen::Service;
use tonic::transport::{Channel, Endpoint};

use tollgate_telemetry::notice;

/// The longest time to connect, with the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A server that does not answer a ping in time is considered lost. Configuration may not change for days, so an idle
/// connection is pinged, too.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Checked settings.
#[derive(Clone)]
pub(crate) struct XdsSettings {
    url: String,
    /// The host and port to connect to.
    authority: String,
    node_id: String,
    tls: Option<Tls>,
}

/// TLS to the server. Its files are read again for every connection, because short-lived certificates are replaced
/// while the client runs.
#[derive(Clone)]
struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
    rule: XdsRule,
    host: String,
    folder: PathBuf,
    /// The last problem with the files.
    problem: Option<String>,
}

impl Tls {
    fn read(rule: &XdsRule, host: &str, folder: &Path) -> Result<Self, Invalid> {
        let (connector, name) = tls(rule, host, folder)?;
        let (rule, host, folder) = (rule.clone(), host.to_owned(), folder.to_owned());
        Ok(Self { connector, name, rule, host, folder, problem: None })
    }

    /// Reads the files again. If they cannot be used, the ones from before stay in use.
    fn refresh(&mut self) {
        match Self::read(&self.rule, &self.host, &self.folder) {
            Ok(next) => *self = next,
            Err(Invalid(problem, fix)) => {
                let problem = format!("service.xds: {problem}: {fix}; the files from before stay in use");
                if self.problem.as_ref() != Some(&problem) {
                    notice::warn(&problem);
                    self.problem = Some(problem);
                }
            }
        }
    }
}

/// A setting that cannot be used: the problem and the fix.
struct Invalid(String, &'static str);

impl XdsSettings {
    /// Returns the settings of a rule file, if it names an xDS server.
    pub(crate) fn of(file: &Parsed) -> Result<Option<Self>, Problems> {
        let Some(rule) = &file.service.xds else { return Ok(None) };
        Self::new(rule, file.folder()).map(Some).map_err(|Invalid(problem, fix)| {
            let error = SettingError::new(format!("service.xds: {problem}"), fix);
            file.problems([error.of("xds").of("service")])
        })
    }

    fn new(rule: &XdsRule, folder: &Path) -> Result<Self, Invalid> {
        const EXAMPLE: &str = "use one such as http://127.0.0.1:18000 or https://xds.example.com:18000";
        let invalid = || Invalid(format!("`{}` is not the URL of a server", rule.url), EXAMPLE);
        let uri: Uri = rule.url.parse().map_err(|_| invalid())?;
        let (scheme, authority) = (uri.scheme_str(), uri.authority().ok_or_else(invalid)?);
        if authority.port_u16().is_none()
            || authority.as_str().contains('@')
            || uri.path() != "/"
            || uri.query().is_some()
        {
            return Err(Invalid(format!("`{}` is not a host with a port", rule.url), EXAMPLE));
        }
        let tls = match scheme {
            Some("https") => Some(Tls::read(rule, authority.host(), folder)?),
            Some("http") => {
                let named = [&rule.ca, &rule.client_cert, &rule.client_key, &rule.server_name];
                if named.iter().any(|setting| setting.is_some()) {
                    let problem = "the settings of TLS have no effect with an http:// URL".to_owned();
                    return Err(Invalid(problem, "use an https:// URL, or remove them"));
                }
                None
            }
            _ => return Err(invalid()),
        };
        let authority = authority.to_string();
        Ok(Self {
            url: format!("{}://{authority}", scheme.unwrap_or("http")),
            authority,
            node_id: rule.node_id.clone(),
            tls,
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn node_id(&self) -> &str {
        &self.node_id
    }

    /// Connects to the server.
    pub(super) async fn connect(&mut self) -> Result<Channel, String> {
        if let Some(tls) = &mut self.tls {
            tls.refresh();
        }
        let invalid = |error: http::uri::InvalidUri| error.to_string();
        let origin: Uri = self.url.parse().map_err(invalid)?;
        // TLS is the connector's job, so the endpoint must not see it.
        let address: Uri = format!("http://{}", self.authority).parse().map_err(invalid)?;
        let endpoint = Endpoint::from(address)
            .origin(origin)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true);
        let dial = Dial(self.clone());
        endpoint.connect_with_connector(dial).await.map_err(|error| root_cause(&error))
    }

    async fn dial(self) -> Result<Stream, String> {
        let tcp = TcpStream::connect(&self.authority).await.map_err(|error| error.to_string())?;
        _ = tcp.set_nodelay(true);
        Ok(match self.tls {
            None => Box::new(tcp),
            Some(Tls { connector, name, .. }) => {
                let handshake = connector.connect(name, tcp).await;
                Box::new(handshake.map_err(|error| format!("TLS handshake failed: {error}"))?)
            }
        })
    }
}

/// Returns the innermost error, which has the reason.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

type Stream = Box<dyn Transport>;

/// Opens connections for tonic.
struct Dial(XdsSettings);

impl Service<Uri> for Dial {
    type Response = TokioIo<Stream>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let dial = self.0.clone().dial();
        Box::pin(async move {
            match timeout(CONNECT_TIMEOUT, dial).await {
                Ok(Ok(stream)) => Ok(TokioIo::new(stream)),
                Ok(Err(problem)) => Err(std::io::Error::other(problem)),
                Err(_) => Err(std::io::Error::other(format!("no connection after {} s", CONNECT_TIMEOUT.as_secs()))),
            }
        })
    }
}

fn tls(rule: &XdsRule, host: &str, folder: &Path) -> Result<(TlsConnector, ServerName<'static>), Invalid> {
    let mut roots = RootCertStore::empty();
    match &rule.ca {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(file) => {
            let path = folder.join(file);
            for certificate in certificates("ca", &path)? {
                roots.add(certificate).map_err(|error| unreadable("ca", &path, &error))?;
            }
        }
    }
    let name = rule.server_name.as_deref().unwrap_or(host.trim_matches(['[', ']']));
    let name = ServerName::try_from(name.to_owned())
        .map_err(|_| Invalid(format!("server_name `{name}` is not a host name"), "use one such as xds.internal"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Invalid(error.to_string(), "use http://"))?
        .with_root_certificates(roots);
    let mut config = match (&rule.client_cert, &rule.client_key) {
        (Some(certificate), Some(key)) => {
            let (certificate, key) = (folder.join(certificate), folder.join(key));
            let secret = pem::private_key(&key).map_err(|problem| unreadable("client_key", &key, &problem))?;
            config
                .with_client_auth_cert(certificates("client_cert", &certificate)?, secret)
                .map_err(|error| unreadable("client_cert", &certificate, &error))?
        }
        (None, None) => config.with_no_client_auth(),
        _ => {
            let problem = "client_cert and client_key belong together".to_owned();
            return Err(Invalid(problem, "set both of them, or none"));
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok((TlsConnector::from(Arc::new(config)), name))
}

fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Invalid> {
    pem::certificates(path).map_err(|problem| unreadable(setting, path, &problem))
}

fn unreadable(setting: &str, path: &Path, problem: &dyn std::fmt::Display) -> Invalid {
    Invalid(format!("{setting} {}: {problem}", path.display()), "name a PEM file that the server can read")
}
