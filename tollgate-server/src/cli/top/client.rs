//! The client of the admin API. Each update has a deadline, and each answer a bound on its size. One connection is kept for
//! all requests.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST};
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tollgate_net::pem;
use tollgate_telemetry::limited::printable;

use super::{Query, Snapshot};

/// The longest time that an update takes.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The largest answer.
const MAX_BODY_BYTES: usize = 16 << 20;
/// The limits of an answer: more than a screen shows.
const LIMITS: usize = 200;

/// A server, and how to reach it.
pub(super) struct Client {
    url: String,
    host: String,
    port: u16,
    authority: HeaderValue,
    authorization: Option<HeaderValue>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// The connection, while no request is under way.
    kept: Mutex<Option<SendRequest<Empty<Bytes>>>>,
}

/// Why there is no answer.
#[derive(Clone, Debug)]
pub(super) struct ClientError(String);

impl fmt::Display for ClientError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Client {
    pub(super) fn new(url: &str, token_file: Option<&Path>, ca: Option<&Path>) -> Result<Self, String> {
        let fix = "use one such as http://127.0.0.1:8099";
        let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let uri: Uri = with_scheme.parse().map_err(|error| format!("`{url}` is not a URL: {error}: {fix}"))?;
        let is_https = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(format!("`{url}` has neither http nor https: {fix}")),
        };
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(format!("`{url}` has a path: remove it"));
        }
        let authority = uri.authority().ok_or_else(|| format!("`{url}` has no host: {fix}"))?;
        if authority.as_str().contains('@') {
            return Err(format!("`{url}` has a user name: use --token-file"));
        }
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let tls = is_https.then(|| connector(&host, ca)).transpose()?;
        if !is_https && ca.is_some() {
            return Err("--ca is only for https: remove it, or use an https URL".to_owned());
        }
        Ok(Self {
            url: with_scheme.trim_end_matches('/').to_owned(),
            port: authority.port_u16().unwrap_or(if is_https { 443 } else { 80 }),
            authority: HeaderValue::from_str(authority.as_str()).map_err(|_| format!("`{url}` is not a URL: {fix}"))?,
            authorization: token_file.map(token).transpose()?,
            host,
            tls,
            kept: Mutex::new(None),
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Returns the answers of the server.
    pub(super) async fn snapshot(&self, query: &Query) -> Result<Snapshot, ClientError> {
        let late = |_| ClientError(format!("{} did not answer within {} s: is it busy?", self.url, TIMEOUT.as_secs()));
        timeout(TIMEOUT, self.read(query)).await.map_err(late)?
    }

    async fn read(&self, query: &Query) -> Result<Snapshot, ClientError> {
        let status = self.get("/v1/status").await?;
        if status["rules"]["version"].as_str().is_none() {
            let fix = "name the admin listener of a tollgate server";
            return Err(ClientError(format!("{} answers, but is no admin listener: {fix}", self.url)));
        }
        let live = self.get(&format!("/v1/live?order=denied&count={LIMITS}")).await?;
        let top = self.get(&query.target()).await?;
        Ok(Snapshot { status, live, top })
    }

    async fn get(&self, target: &str) -> Result<Value, ClientError> {
        let mut kept = self.kept.lock().await;
        if let Some(mut connection) = kept.take()
            && let Ok((status, body)) = self.send(&mut connection, target).await
        {
            *kept = Some(connection);
            return self.answer(status, &body);
        }
        // The server closes connections that are idle or old.
        let mut connection = self.connect().await?;
        let (status, body) = self.send(&mut connection, target).await?;
        *kept = Some(connection);
        self.answer(status, &body)
    }

    async fn connect(&self) -> Result<SendRequest<Empty<Bytes>>, ClientError> {
        let stream = TcpStream::connect((&*self.host, self.port)).await.map_err(|error| {
            let fix =
                "start the server with an admin listener, such as `admin: { listen: 127.0.0.1:8099 }`, or name its URL";
            ClientError(format!("{} does not answer: {error}: {fix}", self.url))
        })?;
        match &self.tls {
            None => self.speak_http(stream).await,
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await.map_err(|error| self.no_tls(&error))?;
                self.speak_http(stream).await
            }
        }
    }

    async fn speak_http<S>(&self, stream: S) -> Result<SendRequest<Empty<Bytes>>, ClientError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| self.broken(&error))?;
        // It ends with the sender, or when the server closes it.
        tokio::spawn(connection);
        Ok(sender)
    }

    /// Sends a request, and returns the status and the body of the response.
    async fn send(
        &self,
        connection: &mut SendRequest<Empty<Bytes>>,
        target: &str,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let mut request = Request::get(target).header(HOST, &self.authority).header(ACCEPT, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| ClientError(error.to_string()))?;
        connection.ready().await.map_err(|error| self.broken(&error))?;
        let response = connection.send_request(request).await.map_err(|error| self.broken(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_BODY_BYTES).collect().await;
        let body = body.map_err(|error| ClientError(format!("{}: {error}", self.url)))?.to_bytes();
        Ok((status, body))
    }

    /// Returns the JSON of a response.
    fn answer(&self, status: StatusCode, body: &[u8]) -> Result<Value, ClientError> {
        let answer: Option<Value> = serde_json::from_slice(body).ok();
        if status == StatusCode::OK {
            let fix = "name the admin listener of a tollgate server";
            return answer.ok_or_else(|| ClientError(format!("{} does not answer in JSON: {fix}", self.url)));
        }
        let message = answer.as_ref().and_then(|answer| answer["message"].as_str()).unwrap_or("it is no admin API");
        let fix = match (status, &self.authorization) {
            (StatusCode::UNAUTHORIZED, None) => ": use --token-file",
            (StatusCode::UNAUTHORIZED, Some(_)) => ": check the token in the file",
            _ => "",
        };
        Err(ClientError(format!("{} answers {}: {}{fix}", self.url, status.as_u16(), printable(message))))
    }

    /// Explains why there is no TLS.
    fn no_tls(&self, error: &io::Error) -> ClientError {
        let of_tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
        let plain = self.url.replacen("https", "http", 1);
        ClientError(match of_tls {
            // The answer of a plain HTTP server.
            Some(rustls::Error::InvalidMessage(_)) => {
                format!("{} does not speak TLS: use {plain}, or set admin.tls in the rule file of the server", self.url)
            }
            Some(_) => format!("{}: {error}: use --ca for a private certificate authority", self.url),
            // A plain server may also close the connection without an answer.
            None => format!("{}: the TLS handshake failed: {error}: is {plain} its URL?", self.url),
        })
    }

    fn broken(&self, error: &hyper::Error) -> ClientError {
        ClientError(format!("{}: {error}: name the admin listener of a tollgate server", self.url))
    }
}

/// Reads a token from the first line of a file that has one.
fn token(path: &Path) -> Result<HeaderValue, String> {
    let name = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| format!("--token-file {name}: {error}: name a file"))?;
    let token = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    let token = token.ok_or_else(|| format!("--token-file {name} has no token: write one into its first line"))?;
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
        .map_err(|_| format!("--token-file {name} has a token with invalid characters: use letters and digits"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn connector(host: &str, ca: Option<&Path>) -> Result<(TlsConnector, ServerName<'static>), String> {
    let mut roots = RootCertStore::empty();
    match ca {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            let bad =
                |problem: String| format!("--ca {}: {problem}: name a PEM file with certificates", path.display());
            for certificate in pem::certificates(path).map_err(bad)? {
                roots.add(certificate).map_err(|error| bad(error.to_string()))?;
            }
        }
    }
    let name = ServerName::try_from(host.to_owned()).map_err(|_| format!("`{host}` is not a host name: use one"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| error.to_string())?.with_root_certificates(roots).with_no_client_auth();
    Ok((TlsConnector::from(Arc::new(config)), name))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn one_connection_is_kept_until_the_server_closes_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Client::new(&listener.local_addr().unwrap().to_string(), None, None).unwrap();
        // Answers two requests on each connection, and then closes it.
        let server = tokio::spawn(async move {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().await.unwrap();
                for _ in 0..2 {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        head.push(stream.read_u8().await.unwrap());
                    }
                    assert!(!head.to_ascii_lowercase().windows(5).any(|word| word == b"close"));
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ntrue").await.unwrap();
                }
            }
        });
        for _ in 0..4 {
            assert_eq!(client.get("/v1/status").await.unwrap(), Value::Bool(true));
        }
        server.await.expect("two connections were enough");
    }

    #[test]
    fn urls_that_cannot_work_are_refused_with_the_fix() {
        let problem = |url: &str| Client::new(url, None, None).map(|client| client.url).unwrap_err();
        assert!(problem("ftp://a").contains("neither http nor https: use one such as"));
        assert!(problem("http://a/metrics").contains("has a path: remove it"));
        assert!(problem("http://me:secret@a").contains("use --token-file"));
        assert!(problem("http://").contains("use one such as"));
        let client = Client::new("[::1]:8099", None, None).unwrap();
        assert_eq!((client.url(), &*client.host, client.port), ("http://[::1]:8099", "::1", 8099));
        assert_eq!(Client::new("https://a.example", None, None).unwrap().port, 443);
    }
}
