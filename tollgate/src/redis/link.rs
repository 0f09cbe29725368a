//! The connection to Redis, whatever Redis is: made when it is needed, dropped when it fails, made again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection, PubSub};
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{AsyncConnectionConfig, Client, Cmd, RedisError, TlsCertificates, TlsMode, Value};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::target::Target;
use super::worker::PATIENCE;
use super::{ConnectError, StoreError};

/// Where to connect, and the connection if there is one.
pub(super) struct Link {
    door: Door,
    /// For people.
    address: String,
    timeout: Duration,
    current: Mutex<Option<Current>>,
}

enum Door {
    Single(Box<Client>),
    /// Asks the sentinels for the master each time.
    Sentinel(Sentinels),
    Cluster {
        client: Box<ClusterClient>,
        seeds: Vec<Client>,
    },
}

/// A client for each sentinel: one that hangs shall not stand before the others.
struct Sentinels {
    each: Vec<Mutex<SentinelClient>>,
    /// The one to ask first.
    first: AtomicUsize,
}

impl Sentinels {
    /// The master, from the first sentinel that answers. Whoever gives up waiting asks another first next time.
    async fn master(&self) -> Result<Client, RedisError> {
        let mut last = None;
        for _ in 0..self.each.len() {
            let index = self.first.fetch_add(1, Ordering::Relaxed) % self.each.len();
            // Another who waits for this one has it: the next may be quicker.
            let Ok(mut sentinel) = self.each[index].try_lock() else { continue };
            match sentinel.async_get_client().await {
                Ok(master) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(master);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| std::io::Error::from(std::io::ErrorKind::WouldBlock).into()))
    }
}

/// A connection, told from the next by when it was made, so that who finds one broken does not drop the other.
#[derive(Clone)]
struct Current {
    made: Instant,
    wire: Wire,
}

/// One connection that many tasks may use at once.
#[derive(Clone)]
enum Wire {
    One(MultiplexedConnection),
    Many(ClusterConnection),
}

impl Wire {
    async fn run(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let reply = match self {
            Self::One(connection) => connection.req_packed_command(command).await,
            Self::Many(connection) => connection.req_packed_command(command).await,
        };
        reply.and_then(Value::extract_error)
    }
}

impl Link {
    pub(super) fn new(target: Target, ca: Option<Vec<u8>>, timeout: Duration) -> Result<Self, ConnectError> {
        let certificates = || ca.clone().map(|root| TlsCertificates { client_tls: None, root_cert: Some(root) });
        let client = |info: redis::ConnectionInfo| match certificates() {
            Some(certificates) => Client::build_with_tls(info, certificates),
            None => Client::open(info),
        };
        let refused = |error: RedisError| ConnectError::new(format!("the store's address is not usable: {error}"));
        let address = target.to_string();
        let door = match target {
            Target::Single(info) => Door::Single(Box::new(client(info).map_err(refused)?)),
            Target::Cluster(nodes) => {
                // Retries are ours to make, within the deadline of a decision.
                let mut builder = ClusterClientBuilder::new(nodes.clone())
                    .retries(3)
                    .min_retry_wait(1)
                    .max_retry_wait(20)
                    .connection_timeout(timeout.max(PATIENCE))
                    .response_timeout(timeout);
                if let Some(certificates) = certificates() {
                    builder = builder.certs(certificates);
                }
                let seeds = nodes.into_iter().map(client).collect::<Result<_, _>>().map_err(refused)?;
                Door::Cluster { client: Box::new(builder.build().map_err(refused)?), seeds }
            }
            Target::Sentinel { sentinels, service, master, tls } => {
                let settings = master.redis_settings();
                let one = |sentinel: &redis::ConnectionInfo| {
                    let address = [sentinel.addr().clone()];
                    let mut builder = SentinelClientBuilder::new(address, service.clone(), SentinelServerType::Master)
                        .map_err(refused)?
                        .set_client_to_redis_db(settings.db());
                    if let Some(username) = settings.username() {
                        builder = builder.set_client_to_redis_username(username);
                    }
                    if let Some(password) = settings.password() {
                        builder = builder.set_client_to_redis_password(password);
                    }
                    if tls {
                        builder = builder
                            .set_client_to_redis_tls_mode(TlsMode::Secure)
                            .set_client_to_sentinel_tls_mode(TlsMode::Secure);
                    }
                    if let Some(certificates) = certificates() {
                        builder = builder
                            .set_client_to_redis_certificates(certificates.clone())
                            .set_client_to_sentinel_certificates(certificates);
                    }
                    Ok(Mutex::new(builder.build().map_err(refused)?))
                };
                let each = sentinels.iter().map(one).collect::<Result<_, ConnectError>>()?;
                Door::Sentinel(Sentinels { each, first: AtomicUsize::new(0) })
            }
        };
        Ok(Self { door, address, timeout, current: Mutex::new(None) })
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.door, Door::Cluster { .. })
    }

    /// Runs a command on the connection, and drops the connection if it proves broken.
    pub(super) async fn run(&self, command: &Cmd) -> Result<Value, RunError> {
        let Current { made, mut wire } = self.connected().await.map_err(RunError::Lost)?;
        match wire.run(command).await {
            Ok(value) => Ok(value),
            Err(error) if error.code() == Some("NOSCRIPT") => Err(RunError::NoScript),
            Err(error) => {
                if is_broken(&error) {
                    self.drop_made_at(made).await;
                }
                Err(if is_answer(&error) { RunError::Refused(error) } else { RunError::Lost(error) })
            }
        }
    }

    /// Gives up on the connection that was there at `began`: it has not answered since. That of a cluster mends
    /// itself, node by node.
    pub(super) async fn give_up(&self, began: Instant) {
        let mut current = self.current.lock().await;
        if !self.is_cluster() && current.as_ref().is_some_and(|current| current.made <= began) {
            *current = None;
        }
    }

    async fn drop_made_at(&self, made: Instant) {
        let mut current = self.current.lock().await;
        if current.as_ref().is_some_and(|current| current.made == made) {
            *current = None;
        }
    }

    async fn connected(&self) -> Result<Current, RedisError> {
        let mut current = self.current.lock().await;
        if let Some(current) = &*current {
            return Ok(current.clone());
        }
        let wire = self.connect().await?;
        Ok(current.insert(Current { made: Instant::now(), wire }).clone())
    }

    async fn connect(&self) -> Result<Wire, RedisError> {
        // Replies are waited for as long as the decision may, and that is watched elsewhere.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout.max(PATIENCE)))
            .set_response_timeout(None);
        Ok(match &self.door {
            Door::Single(client) => Wire::One(client.get_multiplexed_async_connection_with_config(&config).await?),
            Door::Sentinel(sentinels) => {
                let master = sentinels.master().await?;
                Wire::One(master.get_multiplexed_async_connection_with_config(&config).await?)
            }
            Door::Cluster { client, .. } => Wire::Many(client.get_async_connection().await?),
        })
    }

    /// A connection that hears what is published. On a cluster any node hears it all.
    pub(super) async fn ear(&self) -> Result<PubSub, RedisError> {
        match &self.door {
            Door::Single(client) => client.get_async_pubsub().await,
            Door::Sentinel(sentinels) => sentinels.master().await?.get_async_pubsub().await,
            Door::Cluster { seeds, .. } => {
                let mut last = None;
                for seed in seeds {
                    match tokio::time::timeout(self.timeout.max(Duration::from_millis(500)), seed.get_async_pubsub())
                        .await
                    {
                        Ok(Ok(ear)) => return Ok(ear),
                        Ok(Err(error)) => last = Some(error),
                        Err(_) => {}
                    }
                }
                Err(last.unwrap_or_else(|| std::io::Error::from(std::io::ErrorKind::TimedOut).into()))
            }
        }
    }
}

/// Why a command did not run.
pub(super) enum RunError {
    /// Redis has forgotten the script.
    NoScript,
    /// Redis answered, and the answer is no.
    Refused(RedisError),
    /// Redis did not answer.
    Lost(RedisError),
}

impl From<RunError> for StoreError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::NoScript => Self::unavailable("the script is gone again"),
            RunError::Refused(error) => Self::refused(&error.to_string()),
            RunError::Lost(error) => Self::unavailable(&error.to_string()),
        }
    }
}

/// Whether the connection is of no more use: it is gone, or it leads to a server that is no master any more.
fn is_broken(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_connection_dropped()
        || error.is_unrecoverable_error()
        || error.is_timeout()
        || matches!(error.code(), Some("READONLY" | "MASTERDOWN" | "LOADING" | "NOAUTH" | "NOREPLICAS" | "MISCONF"))
}

/// Whether Redis is there and says no to this very command.
fn is_answer(error: &RedisError) -> bool {
    matches!(error.code(), Some("OOM" | "WRONGTYPE" | "NOPERM" | "CROSSSLOT")) || error.code() == Some("ERR")
}
