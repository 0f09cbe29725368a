//! The Redis server of the benchmark: one process on a loopback port, without persistence.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, InfoDict};

/// An idle machine has it up within 50 ms.
const READY_TRIES: usize = 500;
const TRY_EVERY: Duration = Duration::from_millis(20);

/// No redis-server was found.
#[derive(Debug)]
pub(crate) struct NoServer(String);

impl std::fmt::Display for NoServer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(binary) = self;
        write!(out, "`{binary}` cannot be found: run tools/install-redis, or set REDIS_SERVER to the path of one")
    }
}

impl std::error::Error for NoServer {}

/// A running server. Dropping it stops the process.
pub(super) struct Server {
    pub(super) url: String,
    /// The benchmark's own connection, for `INFO` and the like.
    connection: MultiplexedConnection,
    _process: Process,
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that the process has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let binary = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".into());
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?.port();
        let mut command = Command::new(&binary);
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--daemonize", "no"]);
        command.args(["--save", "", "--appendonly", "no"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(NoServer(binary).into()),
            started => Process(started.with_context(|| format!("`{binary}` could not be started"))?),
        };
        let url = format!("redis://127.0.0.1:{port}");
        for _ in 0..READY_TRIES {
            if let Ok(mut connection) = connect(&url).await
                && let Ok(info) = redis::cmd("INFO").arg("server").query_async::<InfoDict>(&mut connection).await
            {
                // Another process may have taken the port before the server bound it.
                if info.get::<u32>("process_id") != Some(process.0.id()) {
                    bail!("port {port} was taken by another Redis: run it again");
                }
                return Ok(Self { url, connection, _process: process });
            }
            tokio::time::sleep(TRY_EVERY).await;
        }
        bail!("`{binary}` did not answer on port {port}: see whether it starts by hand")
    }

    /// A connection for a contender.
    pub(super) async fn connect(&self) -> anyhow::Result<MultiplexedConnection> {
        Ok(connect(&self.url).await?)
    }

    pub(super) async fn flush(&self) -> anyhow::Result<()> {
        Ok(redis::cmd("FLUSHALL").arg("SYNC").exec_async(&mut self.connection.clone()).await?)
    }

    /// Returns the number of keys, without the sets in which limiters register as nodes every two seconds.
    pub(super) async fn key_count(&self) -> anyhow::Result<usize> {
        let mut pipe = redis::pipe();
        pipe.atomic().cmd("DBSIZE").cmd("EXISTS").arg("rate_limit:{nodes}").arg("rate_limit:{nodes}:layouts");
        let (keys, of_nodes): (usize, usize) = pipe.query_async(&mut self.connection.clone()).await?;
        Ok(keys - of_nodes)
    }

    pub(super) async fn any_key(&self) -> anyhow::Result<String> {
        Ok(redis::cmd("RANDOMKEY").query_async(&mut self.connection.clone()).await?)
    }

    pub(super) async fn version(&self) -> anyhow::Result<String> {
        self.info("server", "redis_version").await
    }

    /// Returns the user and system time of the process so far.
    pub(super) async fn cpu(&self) -> anyhow::Result<Duration> {
        let user: f64 = self.info("cpu", "used_cpu_user").await?;
        let system: f64 = self.info("cpu", "used_cpu_sys").await?;
        Ok(Duration::from_secs_f64(user + system))
    }

    /// The time of all script calls so far.
    pub(super) async fn script_time(&self) -> anyhow::Result<Duration> {
        let info: InfoDict = redis::cmd("INFO").arg("commandstats").query_async(&mut self.connection.clone()).await?;
        let Some(stats) = info.get::<String>("cmdstat_evalsha") else { return Ok(Duration::ZERO) };
        let mut fields = stats.split(',').filter_map(|field| field.split_once('='));
        let micros = fields.find(|(name, _)| *name == "usec").and_then(|(_, value)| value.parse().ok());
        micros.map(Duration::from_micros).context("INFO commandstats does not report the time of EVALSHA")
    }

    /// Records every call in the slow log from now on.
    pub(super) async fn record_calls(&self) -> anyhow::Result<()> {
        let mut set = redis::cmd("CONFIG");
        set.arg("SET").arg("slowlog-log-slower-than").arg(0).arg("slowlog-max-len").arg(1000);
        Ok(set.exec_async(&mut self.connection.clone()).await?)
    }

    /// Returns the time of the longest recorded script call, and starts a new record.
    pub(super) async fn longest_call(&self) -> anyhow::Result<Duration> {
        let mut connection = self.connection.clone();
        let calls: Vec<redis::Value> = redis::cmd("SLOWLOG").arg("GET").arg(1000).query_async(&mut connection).await?;
        redis::cmd("SLOWLOG").arg("RESET").exec_async(&mut connection).await?;
        let mut longest = 0;
        for call in calls {
            let (_, _, micros, command, ..): (u64, u64, u64, Vec<redis::Value>, redis::Value, redis::Value) =
                redis::from_redis_value(call)?;
            if let Some(redis::Value::BulkString(verb)) = command.first()
                && verb.eq_ignore_ascii_case(b"EVALSHA")
            {
                longest = longest.max(micros);
            }
        }
        Ok(Duration::from_micros(longest))
    }

    pub(super) async fn used_memory_bytes(&self) -> anyhow::Result<u64> {
        self.info("memory", "used_memory").await
    }

    async fn info<T: redis::FromRedisValue>(&self, section: &str, field: &str) -> anyhow::Result<T> {
        let info: InfoDict = redis::cmd("INFO").arg(section).query_async(&mut self.connection.clone()).await?;
        info.get(field).with_context(|| format!("INFO {section} has no field {field}"))
    }
}

async fn connect(url: &str) -> redis::RedisResult<MultiplexedConnection> {
    // A timer for every reply would slow down the contenders that make a call per decision.
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}
