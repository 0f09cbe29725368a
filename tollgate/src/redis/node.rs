//! One Redis server: its connection, its breaker, and the task that maintains both.
//!
//! A server that hangs is treated like one that is gone. The task connects, probes the connection when a call failed or
//! when there was no reply for a while, drops it when a probe fails, and connects again, so that requests do not have
//! to detect dead connections. While there is no connection, requests wait for one until their deadline. Once an
//! attempt to connect has failed, the breaker is open and requests do not wait at all.
//!
//! A probe finds out whether the server serves, refuses or fails, and reads its memory. The address of a master comes
//! from its sentinels.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, ErrorKind, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::breaker::{Breaker, BreakerCounts};
use super::dial::{Address, Connection, Dialer, Subscription};
use super::names::Names;
use super::stats::{EVICTS, ServerMemory, memory_command};
use super::warnings::{RecentWarnings, StoreWarning};
use super::{StoreError, script};

/// Minimum timeout of a connection attempt, and of a lookup of the server before it.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// Round trips of a connection attempt: TCP, two for TLS, the login, a database, a first command, the scripts, and one
/// to spare. A store whose calls may take long may be far away.
const CONNECT_ROUND_TRIPS: u32 = 8;
/// Maximum timeout of a connection attempt, unless a call may take longer.
const MAX_CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time for a server to send an error before any command: the least, and the most.
const GREETING_LIMITS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));
/// Timeout of a probe while the breaker is closed. Forks of a large Redis take nearly as long.
const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// Time without a reply after which the connection is probed.
const IDLE: Duration = Duration::from_secs(1);
/// Time between two probes of a failed server: the shortest, which doubles each time, and the longest.
const PROBE_EVERY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// Number of failed servers of a store up to which they are probed at that pace. More servers are probed less often, so that
/// they cause at most 300 connection attempts a second.
const MAX_DOWN: u32 = 64;
/// Time between two inspections of a server's memory.
const INSPECT_EVERY: Duration = Duration::from_secs(30);

/// Time for which a server must be available before its probes start again with the shortest pause.
const STEADY: Duration = Duration::from_secs(5);

/// The number of the next connection of this process.
static CONNECTIONS: AtomicU64 = AtomicU64::new(1);

/// The role of a server in its topology.
pub(super) enum ServerRole {
    At(Address),
    /// The master that the sentinels name.
    Master(Box<Sentinels>),
    /// A node of a cluster, which has only some of the slots.
    ClusterNode(Address),
}

/// Settings and state that the nodes of one store share.
#[derive(Clone)]
pub(super) struct Common {
    /// The name of the store, for logs.
    pub(super) store: Arc<str>,
    pub(super) dialer: Arc<Dialer>,
    /// Timeout of a call.
    pub(super) timeout: Duration,
    /// Whether the scripts for decisions are loaded into every server.
    pub(super) loads_scripts: bool,
    pub(super) breaker_counts: Arc<BreakerCounts>,
    pub(super) names: Names,
    /// Notified when a call to a node fails, or its connection is lost.
    pub(super) trouble: Arc<Notify>,
    pub(super) recent: Arc<RecentWarnings>,
    /// Number of nodes that cannot be connected to.
    pub(super) down: Arc<AtomicU32>,
}

/// Counts a node that cannot be connected to, until it is dropped.
struct DownNode(Arc<AtomicU32>);

impl DownNode {
    fn counted(count: &Arc<AtomicU32>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }
}

impl Drop for DownNode {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Common {
    /// Returns the timeout of a connection attempt.
    pub(super) fn connect_limit(&self) -> Duration {
        connect_limit(self.timeout)
    }
}

/// Returns the timeout of a connection attempt to a store whose calls have that timeout.
pub(super) fn connect_limit(timeout: Duration) -> Duration {
    CONNECT_LIMIT.max(timeout * CONNECT_ROUND_TRIPS).min(timeout.max(MAX_CONNECT_LIMIT))
}

pub(super) struct Node {
    pub(super) role: ServerRole,
    pub(super) common: Common,
    pub(super) breaker: Breaker,
    state: watch::Sender<ConnectionState>,
    /// The number of the latest connection.
    connection_number: AtomicU64,
    /// The latest address of the server.
    last_address: Mutex<Option<Address>>,
    /// Notified when a call fails, so that the connection is probed.
    suspect: Notify,
    /// Number of calls with a reply.
    reply_count: AtomicU64,
    pub(super) memory: Mutex<Option<ServerMemory>>,
}

#[derive(Clone)]
enum ConnectionState {
    /// A connection attempt is in progress, and requests wait for it.
    Connecting,
    Up(Connection),
    /// The last attempt to connect has failed.
    Down(StoreError),
}

/// The reason why a command has no result.
pub(super) enum RunError {
    /// The server does not have the script.
    NoScript,
    /// The server refused the command.
    Refused(StoreError),
    /// The slot has moved to another node.
    Moved(Address),
    /// The slot is being moved to another node, which has the key already.
    Ask(Address),
    /// Some keys of the command have moved and some have not.
    TryAgain,
    /// The server did not reply, or cannot serve. Without a reply, the command may have been executed.
    Lost(StoreError),
}

impl From<RunError> for StoreError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::NoScript => Self::unavailable("the server has lost the script again"),
            RunError::Refused(error) | RunError::Lost(error) => error,
            RunError::Moved(to) | RunError::Ask(to) => Self::unavailable(&format!("the key has moved to {to}")),
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
            reply_count: AtomicU64::new(0),
            memory: Mutex::new(None),
        }
    }

    /// Runs a command. The reply must arrive by the deadline. The caller [records](Self::refused) refusals that keep the
    /// server from deciding.
    pub(super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, RunError> {
        self.run_with(deadline, async |connection| connection.run(command).await).await
    }

    /// Runs a command whose failure does not count towards the breaker. Returns `None` at once if the breaker is open.
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

    /// Triggers a refresh of the map of slots if the key has moved.
    fn note_redirection(&self, error: &RedisError) {
        if let RunError::Moved(_) = self.classified(error) {
            self.common.trouble.notify_one();
        }
    }

    /// Runs a command on a slot that is being moved to this node.
    pub(super) async fn run_asking(&self, command: &Cmd, deadline: Instant) -> Result<Value, RunError> {
        self.run_with(deadline, async |connection| connection.run_asking(command).await).await
    }

    async fn run_with(
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
        self.reply_count.fetch_add(1, Ordering::Relaxed);
        self.breaker.succeeded();
        result
    }

    /// Returns the connection, or waits for an attempt in progress.
    async fn connection(&self) -> Result<Connection, StoreError> {
        if let ConnectionState::Up(connection) = &*self.state.borrow()
            && !connection.is_closed()
        {
            return Ok(connection.clone());
        }
        let mut state = self.state.subscribe();
        let usable = state.wait_for(|state| match state {
            ConnectionState::Connecting => false,
            // Nothing was sent on it: wait for the next connection.
            ConnectionState::Up(connection) => !connection.is_closed(),
            ConnectionState::Down(_) => true,
        });
        match &*usable.await.map_err(|_| StoreError::unavailable("the limiter is being dropped"))? {
            ConnectionState::Up(connection) => Ok(connection.clone()),
            ConnectionState::Down(why) => Err(why.clone()),
            ConnectionState::Connecting => Err(StoreError::unavailable("there is no connection yet")),
        }
    }

    /// Records the failure of a call that began at that time.
    pub(super) fn failed(&self, began: Instant, why: &StoreError) {
        if self.breaker.failed(began, why) {
            self.log_failure(why);
        }
        self.suspect.notify_one();
        self.common.trouble.notify_one();
    }

    /// Records a refusal, unless it is about a single key.
    pub(super) fn refused(&self, why: &StoreError) {
        if why.refuses_all() && self.breaker.refused(why) {
            self.log_failure(why);
            self.suspect.notify_one();
        }
    }

    /// Records a request for a key that holds foreign data.
    pub(super) fn found_foreign_data(&self, limit: &str) {
        let warning = StoreWarning::ForeignData { limit: limit.to_owned() };
        if self.common.recent.record(warning.clone()) {
            tracing::warn!(store = %self.common.store, node = %self, limit, "{warning}");
        }
    }

    fn classified(&self, error: &RedisError) -> RunError {
        let redirected = |make: fn(Address) -> RunError| match error.redirect_node() {
            Some((to, _)) => self.address_of(to).map_or_else(|| lost(error), make),
            None => lost(error),
        };
        let refused = || RunError::Refused(StoreError::refused_by(error));
        let is_in_cluster = matches!(self.role, ServerRole::ClusterNode(_));
        match error.code() {
            Some("NOSCRIPT") => RunError::NoScript,
            Some("MOVED" | "ASK" | "TRYAGAIN") if !is_in_cluster => refused(),
            Some("MOVED") => redirected(RunError::Moved),
            Some("ASK") => redirected(RunError::Ask),
            Some("TRYAGAIN") => RunError::TryAgain,
            Some("OOM" | "WRONGTYPE" | "NOPERM" | "CROSSSLOT" | "ERR") => refused(),
            _ => lost(error),
        }
    }

    /// Parses the `host:port` of a redirect. Without a host, it is that of this server.
    fn address_of(&self, text: &str) -> Option<Address> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok()?;
        if host.is_empty() { self.last_address()?.with_port(port) } else { Address::named(host, port) }
    }

    pub(super) fn last_address(&self) -> Option<Address> {
        self.last_address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn is_available(&self) -> bool {
        !self.breaker.is_open()
    }

    /// Returns whether there is an open connection.
    pub(super) fn is_connected(&self) -> bool {
        matches!(&*self.state.borrow(), ConnectionState::Up(connection) if !connection.is_closed())
    }

    /// Returns the number of the open connection. Numbers are unique within the process, so an unchanged number means
    /// an unchanged connection.
    pub(super) fn connection_number(&self) -> Option<u64> {
        self.is_connected().then(|| self.connection_number.load(Ordering::Relaxed))
    }

    /// Returns a connection for subscriptions.
    pub(super) async fn subscriber(&self) -> Result<Subscriber, StoreError> {
        subscriber(&self.common, self.locate().await?).await
    }

    /// Returns whether requests are sent to that address now, as far as is known.
    pub(super) fn is_at(&self, address: &Address) -> bool {
        !self.is_connected() || self.last_address().is_none_or(|current| current == *address)
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

    /// Maintains the connection, after a delay. Never returns.
    pub(super) async fn keep(self: Arc<Self>, delay: Duration) {
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let (mut pause, mut as_down) = (PROBE_EVERY.0, None);
        loop {
            let began = Instant::now();
            match self.connect().await {
                Ok((connection, probed)) => {
                    as_down = None;
                    self.connection_number.store(CONNECTIONS.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
                    self.state.send_replace(ConnectionState::Up(connection.clone()));
                    self.close_breaker(probed);
                    self.tend(&connection).await;
                    self.state.send_replace(ConnectionState::Connecting);
                    self.common.trouble.notify_one();
                    // After a connection that did not last, pause before the next attempt.
                    if began.elapsed() > STEADY {
                        pause = PROBE_EVERY.0;
                        continue;
                    }
                }
                Err(error) => {
                    // Open the breaker first: a request that sees the failure may read the reason.
                    if self.breaker.open(&error) {
                        self.log_failure(&error);
                        self.common.trouble.notify_one();
                    }
                    self.state.send_replace(ConnectionState::Down(error));
                    as_down.get_or_insert_with(|| DownNode::counted(&self.common.down));
                }
            }
            tokio::time::sleep(jittered(pause)).await;
            let longest = PROBE_EVERY.1 * (1 + self.common.down.load(Ordering::Relaxed) / MAX_DOWN);
            pause = (pause * 2).min(longest);
        }
    }

    /// Connects, and checks that the server replies in time and accepts writes.
    async fn connect(&self) -> Result<(Connection, ProbeResult), StoreError> {
        let address = self.locate().await?;
        *self.last_address.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
        let connecting = timeout(self.common.connect_limit(), async {
            let connection = match self.common.dialer.connect(&address).await {
                // The reply shows that the server accepts the connection.
                Ok(connection) if self.common.loads_scripts => {
                    connection.run(&redis::cmd("PING")).await.map(|_| connection)
                }
                connected => connected,
            };
            let connection = match connection {
                Ok(connection) => connection,
                Err(error) => return Err(self.why_not_accepted(&address, &error).await),
            };
            if self.common.loads_scripts {
                // A server without the scripts gets them with the first call, but two such calls could be reordered.
                let commands = script::load();
                join_all(commands.iter().map(|command| connection.run(command))).await;
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

    /// Returns why a server has not accepted a connection. If it accepts no more clients, it sends an error before any
    /// command and closes the connection, so that the reason may be lost.
    async fn why_not_accepted(&self, address: &Address, error: &RedisError) -> StoreError {
        if error.is_connection_dropped() || error.kind() == ErrorKind::AuthenticationFailed {
            let limit = self.common.timeout.clamp(GREETING_LIMITS.0, GREETING_LIMITS.1);
            if let Ok(Ok(greeting)) = timeout(limit, self.common.dialer.greeting(address)).await {
                return StoreError::of_greeting(&greeting);
            }
        }
        unavailable(error)
    }

    /// Returns the timeout of a probe. While the breaker is open, a probe has to be as fast as a decision.
    fn probe_limit(&self) -> Duration {
        if self.breaker.is_open() { self.common.timeout } else { PROBE_LIMIT.max(self.common.timeout) }
    }

    /// Probes a connection until it is closed or a probe fails.
    async fn tend(&self, connection: &Connection) {
        let (mut pause, mut closed_at) = (PROBE_EVERY.0, Instant::now());
        let mut inspect_at = Instant::now();
        loop {
            let idle = if self.breaker.is_refusing() { PROBE_EVERY.1 } else { IDLE };
            let reply_count = self.reply_count.load(Ordering::Relaxed);
            tokio::select! {
                // A failure that opens the breaker also notifies `suspect`: the pause must come first.
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
                    if self.reply_count.load(Ordering::Relaxed) != reply_count && !self.breaker.is_refusing() {
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

    /// Returns the memory of the server, if it has been read.
    pub(super) fn memory(&self) -> Option<ServerMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn log_failure(&self, why: &StoreError) {
        tracing::warn!(store = %self.common.store, node = %self, %why, "the store fails: limits use their failure policy until it recovers");
    }
}

/// Shows the address, or the name of the master while it is unknown.
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

/// Returns half to one and a half of a pause at random, so that processes do not act at the same time.
pub(super) fn jittered(pause: Duration) -> Duration {
    let random = std::hash::BuildHasher::hash_one(&ahash::RandomState::new(), pause);
    pause / 2 + pause.mul_f64((random >> 11) as f64 / (1_u64 << 53) as f64)
}

/// The result of a probe with a reply.
pub(super) enum ProbeResult {
    Serves,
    /// The server replies, but cannot decide.
    Refuses(StoreError),
}

impl Node {
    /// Checks that the server replies and accepts writes.
    pub(super) async fn probe(&self, connection: &Connection, limit: Duration) -> Result<ProbeResult, StoreError> {
        let (key, is_in_cluster) = match self.role {
            ServerRole::ClusterNode(_) => (None, true),
            ServerRole::At(_) | ServerRole::Master(_) => (Some(self.common.names.of("{probe}")), false),
        };
        match timeout(limit, connection.run(&script::probe(key.as_deref()))).await {
            Ok(Ok(_)) if is_in_cluster => self.probe_slots(connection, limit).await,
            Ok(Ok(_)) => Ok(ProbeResult::Serves),
            Ok(Err(error)) => match self.classified(&error) {
                RunError::Refused(why) => Ok(ProbeResult::Refuses(why)),
                // A node that has become a replica has no slots any more: the next map of slots will not list it.
                RunError::Lost(why) if is_in_cluster && why.is_read_only() => Ok(ProbeResult::Serves),
                error => Err(error.into()),
            },
            Err(_) => Err(StoreError::timed_out()),
        }
    }

    /// Checks that a node of a cluster serves keys. While slots are not covered, it replies `CLUSTERDOWN` to every
    /// command with a key, whatever the slot. So the slot of the probe's key does not matter.
    async fn probe_slots(&self, connection: &Connection, limit: Duration) -> Result<ProbeResult, StoreError> {
        let mut command = redis::cmd("EXISTS");
        command.arg(self.common.names.of("{probe}"));
        match timeout(limit, connection.run(&command)).await {
            Ok(Ok(_)) => Ok(ProbeResult::Serves),
            Ok(Err(error)) => match self.classified(&error) {
                RunError::Lost(why) => Err(why),
                RunError::Refused(why) => Ok(ProbeResult::Refuses(why)),
                _ => Ok(ProbeResult::Serves),
            },
            Err(_) => Err(StoreError::timed_out()),
        }
    }

    /// Closes the breaker after a probe that was as fast as a decision has to be.
    fn close_breaker(&self, probed: ProbeResult) {
        let was_open = self.breaker.close();
        if self.note(probed) || (was_open && !self.breaker.is_refusing()) {
            self.log_recovery();
        }
    }

    /// Records a probe while the breaker is closed. Failures of decisions still count: a server can be fast enough for
    /// a probe and too slow for decisions.
    fn note_probe(&self, probed: ProbeResult) {
        if self.note(probed) {
            self.log_recovery();
        }
    }

    /// Records the result of a probe. Returns whether the server has stopped refusing requests.
    fn note(&self, probed: ProbeResult) -> bool {
        match probed {
            ProbeResult::Refuses(why) => {
                self.refused(&why);
                false
            }
            ProbeResult::Serves => self.breaker.served(),
        }
    }

    fn log_recovery(&self) {
        tracing::info!(store = %self.common.store, node = %self, "the store has recovered");
    }

    /// Reads the files of the connection and of those to sentinels, and the memory of the server with its eviction policy.
    /// A server that does not report them is used anyway.
    async fn inspect(&self, connection: &Connection) {
        let of_sentinels = async {
            if let ServerRole::Master(sentinels) = &self.role {
                sentinels.dialer.read_files().await;
            }
        };
        tokio::join!(self.common.dialer.read_files(), of_sentinels);
        let Ok(Ok(reply)) = timeout(PROBE_LIMIT, connection.run(&memory_command())).await else { return };
        let Some(memory) = ServerMemory::read(&reply) else { return };
        let mut known = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.evicts() && !known.as_ref().is_some_and(ServerMemory::evicts) {
            tracing::warn!(store = %self.common.store, node = %self, policy = memory.eviction_policy, "{}", EVICTS);
        }
        *known = Some(memory);
    }
}

/// Timeout for other sentinels once one has named a server.
const OTHERS_WITHIN: Duration = Duration::from_millis(500);

pub(super) struct Sentinels {
    addresses: Vec<Address>,
    service: String,
    dialer: Dialer,
    /// Timeout of the first reply.
    limit: Duration,
    /// The server that was returned last, until it is confirmed.
    tried: Mutex<Option<Address>>,
}

impl Sentinels {
    pub(super) fn new(addresses: Vec<Address>, service: String, dialer: Dialer, limit: Duration) -> Self {
        Self { addresses, service, dialer, limit, tried: Mutex::new(None) }
    }

    /// Returns why files of the login at the sentinels cannot be used.
    pub(super) fn file_problems(&self) -> impl Iterator<Item = String> {
        self.dialer.problems()
    }

    /// Returns the master's name.
    pub(super) fn service(&self) -> &str {
        &self.service
    }

    /// Returns the address of the master. Queries all sentinels at once, so that one that hangs causes no delay.
    ///
    /// The server that most of them name is the master: a sentinel that is partitioned from the others may name an
    /// earlier master. Right after a failover it is the other way round: most sentinels may not know the new master
    /// yet. So if the server that was returned last is not [confirmed](Self::confirm), another one is returned next, if
    /// a sentinel names one.
    pub(super) async fn master(&self) -> Result<Address, StoreError> {
        let mut replies: FuturesUnordered<_> = self.addresses.iter().map(|sentinel| self.query(sentinel)).collect();
        let (mut named, mut last): (Vec<(Address, usize)>, _) = (Vec::new(), None);
        let tried = self.tried();
        loop {
            let limit = if named.is_empty() { self.limit } else { OTHERS_WITHIN };
            let Ok(Some(reply)) = timeout(limit, replies.next()).await else { break };
            match reply {
                Ok(Some(address)) => {
                    let votes = match named.iter_mut().find(|(other, _)| *other == address) {
                        Some((_, votes)) => {
                            *votes += 1;
                            *votes
                        }
                        None => {
                            named.push((address.clone(), 1));
                            1
                        }
                    };
                    if votes > self.addresses.len() / 2 && tried.as_ref() != Some(&address) {
                        return Ok(self.try_next(address));
                    }
                }
                Ok(None) => {
                    let service = &self.service;
                    last = Some(StoreError::unavailable(&format!("the sentinels know no master named {service}")));
                }
                Err(error) => last = Some(unavailable(&error)),
            }
        }
        let best = named.into_iter().max_by_key(|(address, votes)| (tried.as_ref() != Some(address), *votes));
        match best {
            Some((address, _)) => Ok(self.try_next(address)),
            None => Err(last.unwrap_or_else(|| StoreError::unavailable("no sentinel answers"))),
        }
    }

    /// Confirms that the server that was returned last is a master that replies.
    fn confirm(&self) {
        *self.tried.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn tried(&self) -> Option<Address> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn try_next(&self, address: Address) -> Address {
        *self.tried.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
        address
    }

    async fn query(&self, sentinel: &Address) -> Result<Option<Address>, RedisError> {
        let connection = self.dialer.connect(sentinel).await?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        read_master(connection.run(&command).await?)
    }
}

/// Reads the reply of a sentinel. It is `None` if the sentinel does not know the master.
pub(super) fn read_master(reply: Value) -> Result<Option<Address>, RedisError> {
    let found: Option<(String, u16)> = redis::from_redis_value(reply)?;
    let named = |(host, port): (String, u16)| {
        let invalid =
            || RedisError::from((ErrorKind::Parse, "invalid reply", "a sentinel named an invalid host".to_owned()));
        Address::named(&host, port).ok_or_else(invalid)
    };
    found.map(named).transpose()
}

/// A connection for subscriptions, and its server.
pub(super) struct Subscriber {
    pub(super) connection: Subscription,
    pub(super) address: Address,
}

/// Connects to a server for subscriptions.
pub(super) async fn subscriber(common: &Common, address: Address) -> Result<Subscriber, StoreError> {
    match timeout(common.connect_limit(), common.dialer.subscriber(&address)).await {
        Ok(Ok(connection)) => Ok(Subscriber { connection, address }),
        Ok(Err(error)) => Err(unavailable(&error)),
        Err(_) => Err(StoreError::timed_out()),
    }
}
