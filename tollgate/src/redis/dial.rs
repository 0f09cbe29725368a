//! Opens connections to Redis: TCP with its options, TLS, and the login.
//!
//! Connections are opened here and not by the Redis client, so that we know when one is closed: a request on a closed
//! connection was never sent and can be sent on the next one. Deadlines are the caller's.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::select_ok;
use redis::aio::{ConnectionLike, MultiplexedConnection, PubSub};
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use redis::{AsyncConnectionConfig, Cmd, RedisConnectionInfo, RedisError, Value};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;

use super::{ConnectError, Tasks};

/// When TCP starts to ask a silent peer, how often, and how many unanswered probes end the connection. A backstop: the
/// probes of `node.rs` are quicker, but nobody probes while a subscriber waits.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 3);
/// How long sent data may stay unacknowledged before the connection ends, as when a host was powered off.
#[cfg(target_os = "linux")]
const USER_TIMEOUT: Duration = Duration::from_secs(10);
/// Addresses of one name that are tried at once.
const MAX_ADDRESSES: usize = 8;
/// Requests that may wait for the socket of one connection: more than one trip has calls.
const PIPELINE: usize = 256;

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: Arc<str>,
    pub(super) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.host, self.port)
    }
}

/// Opens connections with one login.
pub(super) struct Dialer {
    tls: Option<TlsConnector>,
    login: RedisConnectionInfo,
}

/// A connection that many tasks may use at once. The last clone closes it.
#[derive(Clone)]
pub(super) struct Connection {
    requests: MultiplexedConnection,
    /// Ends when the connection is closed.
    open: watch::Receiver<()>,
    _driver: Arc<Tasks>,
}

impl Dialer {
    /// `ca` is the certificate authority of the servers, in PEM; without it, the public ones are trusted.
    pub(super) fn new(tls: bool, ca: Option<&[u8]>, login: RedisConnectionInfo) -> Result<Self, ConnectError> {
        let tls = if tls { Some(connector(ca)?) } else { None };
        Ok(Self { tls, login })
    }

    /// Connects and logs in.
    pub(super) async fn connect(&self, to: &Address) -> Result<Connection, RedisError> {
        let tcp = open_tcp(to).await?;
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(PIPELINE);
        let (closes, open) = watch::channel(());
        let (requests, driver) = match &self.tls {
            None => {
                let (requests, driver) = MultiplexedConnection::new_with_config(&self.login, tcp, config).await?;
                (requests, tokio::spawn(until_closed(driver, closes)))
            }
            Some(tls) => {
                let stream = tls.connect(server_name(to)?, tcp).await?;
                let (requests, driver) = MultiplexedConnection::new_with_config(&self.login, stream, config).await?;
                (requests, tokio::spawn(until_closed(driver, closes)))
            }
        };
        Ok(Connection { requests, open, _driver: Arc::new(Tasks(vec![driver.abort_handle()])) })
    }

    /// Connects and logs in, for messages that are published.
    pub(super) async fn subscriber(&self, to: &Address) -> Result<PubSub, RedisError> {
        let tcp = open_tcp(to).await?;
        match &self.tls {
            None => PubSub::new(&self.login, tcp).await,
            Some(tls) => PubSub::new(&self.login, tls.connect(server_name(to)?, tcp).await?).await,
        }
    }
}

impl Connection {
    pub(super) fn is_closed(&self) -> bool {
        self.open.has_changed().is_err()
    }

    /// Waits until the connection is closed.
    pub(super) async fn closed(&self) {
        let mut open = self.open.clone();
        while open.changed().await.is_ok() {}
    }

    pub(super) async fn run(&self, command: &Cmd) -> Result<Value, RedisError> {
        self.requests.clone().req_packed_command(command).await.and_then(Value::extract_error)
    }

    /// Runs a command on a slot that is on its way to this server. The two commands are sent as one.
    pub(super) async fn run_asking(&self, command: &Cmd) -> Result<Value, RedisError> {
        let mut both = redis::pipe();
        both.cmd("ASKING").ignore().add_command(command.clone());
        let replies = self.requests.clone().req_packed_commands(&both, 1, 1).await?;
        replies.into_iter().next().unwrap_or(Value::Nil).extract_error()
    }
}

/// Drives a connection until it is closed; `closes` is dropped with it, also if this is aborted.
async fn until_closed(driver: impl Future<Output = ()>, closes: watch::Sender<()>) {
    driver.await;
    drop(closes);
}

async fn open_tcp(to: &Address) -> Result<TcpStream, RedisError> {
    // All addresses of a name at once: the first that answers is as good as any, and one that is dead costs no time.
    let addresses = tokio::net::lookup_host((&*to.host, to.port)).await?;
    let connecting: Vec<_> = addresses.take(MAX_ADDRESSES).map(|address| TcpStream::connect(address).boxed()).collect();
    if connecting.is_empty() {
        return Err(std::io::Error::other(format!("{} has no address", to.host)).into());
    }
    let (stream, _) = select_ok(connecting).await?;
    // Small requests must not wait for the acknowledgement of those before them.
    stream.set_nodelay(true)?;
    let (time, interval, retries) = KEEPALIVE;
    let keepalive = TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries);
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    Ok(stream)
}

fn server_name(to: &Address) -> Result<ServerName<'static>, RedisError> {
    ServerName::try_from(to.host.to_string()).map_err(|error| std::io::Error::other(error).into())
}

fn connector(ca: Option<&[u8]>) -> Result<TlsConnector, ConnectError> {
    let mut roots = RootCertStore::empty();
    match ca {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(pem) => {
            let (added, _) =
                roots.add_parsable_certificates(CertificateDer::pem_slice_iter(pem).filter_map(Result::ok));
            if added == 0 {
                return Err(ConnectError::new("tls_ca has no certificate in it; give it one in PEM".into()));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| ConnectError::new(format!("TLS cannot be set up: {error}")))?;
    Ok(TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth())))
}
