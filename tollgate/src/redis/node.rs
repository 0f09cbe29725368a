//! One Redis server: its connection, its breaker, and the task that keeps both.
//!
//! A server that hangs is treated like one that is gone. The task connects, probes the connection when a call failed or
//! nothing was answered for a while, drops it when a probe gets no answer, and connects again, so that no request has to
//! find out that a connection is dead. While there is no connection, requests wait for one within their deadline; once
//! an attempt to connect has failed, the breaker is open and they do not wait at all.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::PubSub;
use redis::{Cmd, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::StoreError;
use super::breaker::{Breaker, BreakerCounts};
use super::dial::{Address, Connection, Dialer};
use super::memory::ServerMemory;
use super::names::Names;
use super::probe::ProbeResult;
use super::script;
use super::sentinels::Sentinels;
use super::topology::subscriber;

/// How long finding a server, connecting, TLS and the login may take together.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// How long a probe of a server may take that was not given up. Forks of a large Redis take nearly as long.
pub(super) const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// How long nothing may be answered before the connection is probed.
const IDLE: Duration = Duration::from_secs(1);
/// How often to see whether a server that failed is back: at first, and at most.
const PROBE_EVERY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// How often the memory of a server is looked at.
const INSPECT_EVERY: Duration = Duration::from_secs(30);

/// How long a server that came back has to be well before it is probed as soon as at first when it fails again.
const STEADY: Duration = Duration::from_secs(5);

/// Connections that this process has made.
static CONNECTIONS: AtomicU64 = AtomicU64::new(1);

/// Where a server is found.
pub(super) enum ServerRole {
    At(Address),
    /// Wherever the sentinels say.
    Master(Sentinels),
    /// A node of a cluster, which answers for some slots alone.
    ClusterNode(Address),
}

/// What nodes of one limiter have in common.
#[derive(Clone)]
pub(super) struct Common {
    /// The name of the store, for logs.
    pub(super) store: Arc<str>,
    pub(super) dialer: Arc<Dialer>,
    /// The longest that a call may take.
    pub(super) timeout: Duration,
    /// Whether the scripts for decisions are loaded into every server.
    pub(super) loads_scripts: bool,
    pub(super) breaker_counts: Arc<BreakerCounts>,
    pub(super) names: Names,
    /// Rung when a call to a node failed, or its connection was lost.
    pub(super) trouble: Arc<Notify>,
}

pub(super) struct Node {
    pub(super) role: ServerRole,
    pub(super) common: Common,
    pub(super) breaker: Breaker,
    state: watch::Sender<ConnectionState>,
    /// The number of the connection that was made last.
    connection_number: AtomicU64,
    /// Where the server was found last.
    last_address: Mutex<Option<Address>>,
    /// Rung when a call got no answer, or one that speaks against the connection.
    suspect: Notify,
    /// Calls that were answered.
    answered: AtomicU64,
    pub(super) memory: Mutex<Option<ServerMemory>>,
}

#[derive(Clone)]
enum ConnectionState {
    /// A connection is being made, and worth waiting for.
    Connecting,
    Up(Connection),
    /// The last attempt to connect has failed.
    Down(StoreError),
}

/// Why a command has no reply.
pub(super) enum RunError {
    /// The server does not have the script.
    NoScript,
    /// The server answered that it will not.
    Refused(StoreError),
    /// The slot is elsewhere now.
    Moved(Address),
    /// The key is elsewhere, where its slot is moving to.
    ScriptHit(Address),
    /// Some keys of the command have moved and some have not.
    TryAgain,
    /// The server did not answer, or cannot serve. Unless it said so, the command may have run.
    Lost(StoreError),
}

impl From<RunError> for StoreError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::NoScript => Self::unavailable("the script is gone again"),
            RunError::Refused(error) | RunError::Lost(error) => error,
            RunError::Moved(to) | RunError::ScriptHit(to) => Self::unavailable(&format!("the key is at {to}")),
            RunError::TryAgain => Self::unavailable("the slot is being moved"),
        }
    }
}

impl Node {
    pub(super) fn new(role: ServerRole, common: Common) -> Self {
        Self {
            role,
            breaker: Breaker::new(common.breaker_counts.clone()),
            common,
            state: watch::Sender::new(ConnectionState::Connecting),
            connection_number: AtomicU64::new(0),
            last_address: Mutex::new(None),
            suspect: Notify::new(),
            answered: AtomicU64::new(0),
            memory: Mutex::new(None),
        }
    }

    /// Runs a command, which has to be answered by the deadline.
    pub(super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, RunError> {
        self.answer(deadline, async |connection| connection.run(command).await).await
    }

    /// Runs a command whose failure says nothing about the server. A server that was given up is not asked.
    pub(super) async fn run_in_background(&self, command: &Cmd, limit: Duration) -> Option<Value> {
        if self.breaker.is_open() {
            return None;
        }
        let reply = timeout(limit, async {
            let connection = self.connection().await.ok()?;
            connection.run(command).await.inspect_err(|error| self.note_redirection(error)).ok()
        });
        reply.await.ok().flatten()
    }

    /// Has the map of slots refreshed if the key was not here.
    fn note_redirection(&self, error: &RedisError) {
        if let RunError::Moved(_) = self.classified(error) {
            self.common.trouble.notify_one();
        }
    }

    /// Runs a command on a slot that is moving here.
    pub(super) async fn run_asking(&self, command: &Cmd, deadline: Instant) -> Result<Value, RunError> {
        self.answer(deadline, async |connection| connection.run_asking(command).await).await
    }

    async fn answer(
        &self,
        deadline: Instant,
        call: impl AsyncFnOnce(&Connection) -> Result<Value, RedisError>,
    ) -> Result<Value, RunError> {
        let began = Instant::now();
        let result = timeout_at(deadline, async {
            let connection = self.connection().await.map_err(RunError::Lost)?;
            call(&connection).await.map_err(|error| self.classified(&error))
        });
        let result = result.await.unwrap_or_else(|_| Err(RunError::Lost(StoreError::timed_out())));
        if let Err(RunError::Lost(error)) = &result {
            self.failed(began, error);
            return result;
        }
        self.answered.fetch_add(1, Ordering::Relaxed);
        self.breaker.succeeded();
        if let Err(RunError::Refused(error)) = &result {
            self.refused(error);
        }
        result
    }

    /// Returns the connection, or waits for the one that is being made.
    async fn connection(&self) -> Result<Connection, StoreError> {
        if let ConnectionState::Up(connection) = &*self.state.borrow()
            && !connection.is_closed()
        {
            return Ok(connection.clone());
        }
        let mut state = self.state.subscribe();
        let usable = state.wait_for(|state| match state {
            ConnectionState::Connecting => false,
            // Nothing was sent on it yet: wait for the next.
            ConnectionState::Up(connection) => !connection.is_closed(),
            ConnectionState::Down(_) => true,
        });
        match &*usable.await.map_err(|_| StoreError::unavailable("the limiter is being dropped"))? {
            ConnectionState::Up(connection) => Ok(connection.clone()),
            ConnectionState::Down(why) => Err(why.clone()),
            ConnectionState::Connecting => Err(StoreError::unavailable("there is no connection yet")),
        }
    }

    /// Counts a failure of a call that began then.
    pub(super) fn failed(&self, began: Instant, why: &StoreError) {
        if self.breaker.failed(began, why) {
            self.log_failure(why);
        }
        self.suspect.notify_one();
        self.common.trouble.notify_one();
    }

    /// Notes a refusal, if it is one of more than a single key.
    pub(super) fn refused(&self, why: &StoreError) {
        if why.refuses_all() && self.breaker.refused(why) {
            self.log_failure(why);
            self.suspect.notify_one();
        }
    }

    pub(super) fn classified(&self, error: &RedisError) -> RunError {
        let redirected = |make: fn(Address) -> RunError| match error.redirect_node() {
            Some((to, _)) => self.address_of(to).map_or_else(|| lost(error), make),
            None => lost(error),
        };
        match error.code() {
            Some("NOSCRIPT") => RunError::NoScript,
            Some("MOVED") => redirected(RunError::Moved),
            Some("ASK") => redirected(RunError::ScriptHit),
            Some("TRYAGAIN") => RunError::TryAgain,
            Some("OOM" | "WRONGTYPE" | "NOPERM" | "CROSSSLOT" | "ERR") => {
                RunError::Refused(StoreError::refused_by(error))
            }
            _ => lost(error),
        }
    }

    /// A `host:port` as a server writes it. Without a host, it is this server's.
    fn address_of(&self, text: &str) -> Option<Address> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok()?;
        if host.is_empty() { self.last_address()?.with_port(port) } else { Some(Address::tcp(host, port)) }
    }

    pub(super) fn last_address(&self) -> Option<Address> {
        self.last_address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn is_available(&self) -> bool {
        !self.breaker.is_open()
    }

    /// Whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        matches!(&*self.state.borrow(), ConnectionState::Up(connection) if !connection.is_closed())
    }

    /// Returns the number of the connection, if there is one. No two connections of this process have the same number, so
    /// while it is the same, so is the server.
    pub(super) fn connection_number(&self) -> Option<u64> {
        self.is_connected().then(|| self.connection_number.load(Ordering::Relaxed))
    }

    /// Returns a connection for what is published there.
    pub(super) async fn subscriber(&self) -> Result<PubSub, StoreError> {
        let address = self.locate().await?;
        subscriber(&self.common.dialer, &address).await
    }

    async fn locate(&self) -> Result<Address, StoreError> {
        match &self.role {
            ServerRole::At(address) | ServerRole::ClusterNode(address) => Ok(address.clone()),
            ServerRole::Master(sentinels) => match self.last_address() {
                Some(address) if self.is_connected() => Ok(address),
                _ => sentinels.master().await,
            },
        }
    }

    /// Waits until the first attempt to connect has succeeded or failed.
    pub(super) async fn settled(&self) {
        let _ = self.state.subscribe().wait_for(|state| !matches!(state, ConnectionState::Connecting)).await;
    }

    /// Keeps the connection for ever.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut pause = PROBE_EVERY.0;
        loop {
            let began = Instant::now();
            match self.connect().await {
                Ok((connection, probed)) => {
                    self.connection_number.store(CONNECTIONS.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
                    self.state.send_replace(ConnectionState::Up(connection.clone()));
                    self.close_breaker(probed);
                    self.tend(&connection).await;
                    self.state.send_replace(ConnectionState::Connecting);
                    self.common.trouble.notify_one();
                    // One that does not last is not made again at once.
                    if began.elapsed() > STEADY {
                        pause = PROBE_EVERY.0;
                        continue;
                    }
                }
                Err(error) => {
                    // First the breaker: a request that hears of the failure can be asked why.
                    if self.breaker.open(&error) {
                        self.log_failure(&error);
                        self.common.trouble.notify_one();
                    }
                    self.state.send_replace(ConnectionState::Down(error));
                }
            }
            tokio::time::sleep(jittered(pause)).await;
            pause = (pause * 2).min(PROBE_EVERY.1);
        }
    }

    /// Connects, and makes sure that the server answers in time and can be written to.
    async fn connect(&self) -> Result<(Connection, ProbeResult), StoreError> {
        let connecting = timeout(CONNECT_LIMIT.max(self.common.timeout), async {
            let address = self.locate().await?;
            *self.last_address.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
            let connection = self.common.dialer.connect(&address).await.map_err(|error| unavailable(&error))?;
            if self.common.loads_scripts {
                // A server without the scripts gets them with the first call, but two such calls may change places.
                for command in script::load() {
                    let _ = connection.run(&command).await;
                }
            }
            Ok::<_, StoreError>(connection)
        });
        let connection = connecting.await.map_err(|_| StoreError::timed_out())??;
        let probed = self.probe(&connection, self.probe_limit()).await?;
        if let ServerRole::Master(sentinels) = &self.role {
            sentinels.confirm();
        }
        Ok((connection, probed))
    }

    /// How long a probe may take. A server that was given up has to answer as quickly as decisions need it.
    fn probe_limit(&self) -> Duration {
        if self.breaker.is_open() { self.common.timeout } else { PROBE_LIMIT.max(self.common.timeout) }
    }

    /// Watches over a connection until it is of no more use.
    async fn tend(&self, connection: &Connection) {
        let (mut pause, mut closed_at) = (PROBE_EVERY.0, Instant::now());
        let mut inspect_at = Instant::now();
        loop {
            let idle = if self.breaker.is_refusing() { PROBE_EVERY.1 } else { IDLE };
            let answered = self.answered.load(Ordering::Relaxed);
            tokio::select! {
                // What opens the breaker is suspect too, and then the pause must not be left out.
                biased;
                () = connection.closed() => return,
                () = self.breaker.opened() => {
                    tokio::time::sleep(jittered(pause)).await;
                    pause = (pause * 2).min(PROBE_EVERY.1);
                }
                () = self.suspect.notified() => {}
                () = tokio::time::sleep_until(inspect_at) => {
                    self.inspect(connection).await;
                    inspect_at = Instant::now() + jittered(INSPECT_EVERY);
                    continue;
                }
                () = tokio::time::sleep(jittered(idle)) => {
                    if self.answered.load(Ordering::Relaxed) != answered && !self.breaker.is_refusing() {
                        continue;
                    }
                }
            }
            let is_open = self.breaker.is_open();
            let Ok(probed) = self.probe(connection, self.probe_limit()).await else { return };
            if is_open {
                self.close_breaker(probed);
                closed_at = Instant::now();
                continue;
            }
            self.note_probe(probed);
            if closed_at.elapsed() > STEADY {
                pause = PROBE_EVERY.0;
            }
        }
    }

    /// The memory of the server, if it has said.
    pub(super) fn memory(&self) -> Option<ServerMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn log_failure(&self, why: &StoreError) {
        tracing::warn!(store = %self.common.store, node = %self, %why, "the store fails: limits answer by their failure policy until it is back");
    }
}

/// Where it is, for people.
impl fmt::Display for Node {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.role, &self.last_address()) {
            (ServerRole::At(address) | ServerRole::ClusterNode(address), _)
            | (ServerRole::Master(_), Some(address)) => address.fmt(out),
            (ServerRole::Master(sentinels), None) => out.write_str(sentinels.service()),
        }
    }
}

fn lost(error: &RedisError) -> RunError {
    RunError::Lost(unavailable(error))
}

pub(super) fn unavailable(error: &RedisError) -> StoreError {
    StoreError::of(error)
}

/// Half to one and a half of a pause, so that many processes do not knock at once.
pub(super) fn jittered(pause: Duration) -> Duration {
    let random = std::hash::BuildHasher::hash_one(&ahash::RandomState::new(), pause);
    pause / 2 + pause.mul_f64((random >> 11) as f64 / (1_u64 << 53) as f64)
}
