//! Real servers for tests: a single one, one with TLS, one with sentinels, a cluster; and the network to them.
//!
//! Each server is a child process with a temporary directory, a loopback port and no persistence; dropping its owner
//! kills it. Do not keep one in a `static`, which is never dropped. Failures panic, with the tail of the server's log
//! where that explains them.
//!
//! The suite's own commands (readiness, `INFO`, `CLUSTER`, `SENTINEL`) go over a Unix socket in the server's directory:
//! only the process that was started can reply there, and TLS is left to the code under test.

mod cluster;
mod impostor;
mod link;
mod sentinels;
mod switch;
mod tls;

use std::path::PathBuf;
use std::time::Duration;

use redis::{Client, Cmd, Connection, ConnectionAddr, ConnectionInfo, FromRedisValue, InfoDict, IntoConnectionInfo};
use tempfile::TempDir;

pub use cluster::{Cluster, SlotMove};
pub use impostor::{Impostor, Reply, cluster_slots};
pub use link::{Link, Traffic};
pub use sentinels::Sentinels;
pub use switch::Switch;
use tls::ClientCertificates;

use crate::certificates::Authority;
use crate::folder::folder;
use crate::port::Port;
use crate::process::{ChildProcess, Signal};
use crate::wait;

/// The time that a server may take to start. An idle machine needs 50 ms.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// A free port can be taken before the server binds it. Ten times in a row means something else is wrong.
const START_ATTEMPTS: usize = 10;

/// The timeout of the suite's own commands, so that a test fails rather than hangs.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

const CONF_FILE: &str = "redis.conf";
const LOG_FILE: &str = "server.log";
const SOCKET_FILE: &str = "redis.sock";

const COMMON_ARGS: [&str; 14] = [
    "--bind",
    "127.0.0.1",
    "--unixsocket",
    SOCKET_FILE,
    "--daemonize",
    "no",
    "--logfile",
    "",
    "--save",
    "",
    "--appendonly",
    "no",
    // Saved to disk, a replica's first copy is sent at once; piped, it waits for a timer of a second.
    "--repl-diskless-sync",
    "no",
];

fn redis_server() -> PathBuf {
    std::env::var_os("REDIS_SERVER").map_or_else(|| PathBuf::from("redis-server"), PathBuf::from)
}

#[derive(Clone, Copy)]
enum Transport {
    Plain,
    Tls,
}

/// The arguments of a start, except the port and the directory.
struct Recipe {
    binary: PathBuf,
    args: Vec<String>,
    transport: Transport,
    /// Written to the directory before the first start. A server may rewrite its own `redis.conf` from then on.
    files: Vec<(&'static str, String)>,
}

impl Recipe {
    fn new(binary: PathBuf, args: &[&str]) -> Self {
        let args = args.iter().map(ToString::to_string).collect();
        Self { binary, args, transport: Transport::Plain, files: vec![(CONF_FILE, String::new())] }
    }

    /// A server with TLS, whose certificate and those of its clients are of that authority.
    fn tls(authority: &Authority, clients: ClientCertificates, args: &[&str]) -> Self {
        let args: Vec<&str> = tls::args(clients).iter().chain(args).copied().collect();
        let mut recipe = Self::new(PathBuf::from("redis-server"), &args);
        recipe.transport = Transport::Tls;
        recipe.files.extend(tls::files(authority));
        recipe
    }

    fn password(&self) -> Option<&str> {
        let option = self.args.iter().position(|arg| arg == "--requirepass")?;
        self.args.get(option + 1).map(String::as_str)
    }
}

enum StartError {
    PortTaken,
    Failed { log_tail: String },
}

/// A server process. It runs until it is dropped, unless a test kills it.
pub struct RedisServer {
    // Dropped in this order: the process first, then the directory it writes to, then the claim on its port.
    process: Option<ChildProcess>,
    dir: TempDir,
    port: Port,
    recipe: Recipe,
}

impl RedisServer {
    /// Starts a server and waits until it answers.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// With extra arguments, as on the command line: `&["--requirepass", "secret"]`.
    pub fn with(args: &[&str]) -> Self {
        Self::launch(Recipe::new(redis_server(), args))
    }

    /// Accepts only TLS, for `localhost` and `127.0.0.1`, with a certificate of the authority at [`Self::ca_path`]. Not
    /// every server that `REDIS_SERVER` names is built with TLS, so it is the installed one.
    pub fn start_tls() -> Self {
        Self::launch_tls(ClientCertificates::Unused)
    }

    /// The same, for clients with a certificate of that authority alone: see [`Self::client_files`].
    pub fn start_tls_with_clients() -> Self {
        Self::launch_tls(ClientCertificates::Required)
    }

    fn launch_tls(clients: ClientCertificates) -> Self {
        Self::launch(Recipe::tls(&Authority::new(), clients, &[]))
    }

    fn launch(mut recipe: Recipe) -> Self {
        for _ in 0..START_ATTEMPTS {
            let dir = folder();
            for (name, content) in &recipe.files {
                std::fs::write(dir.path().join(name), content).expect("the temporary directory is writable");
            }
            let mut server = Self { process: None, dir, port: Port::claim(), recipe };
            match server.run() {
                Ok(()) => return server,
                Err(StartError::PortTaken) => recipe = server.recipe,
                Err(StartError::Failed { log_tail }) => panic!("the server did not start; its log ends:\n{log_tail}"),
            }
        }
        panic!("{START_ATTEMPTS} ports in a row were free, then taken");
    }

    fn run(&mut self) -> Result<(), StartError> {
        let port = self.port().to_string();
        let ports = match self.recipe.transport {
            // A server built without TLS knows no `--tls-port`.
            Transport::Plain => &["--port", &port][..],
            Transport::Tls => &["--port", "0", "--tls-port", &port],
        };
        let mut args = vec![CONF_FILE];
        args.extend(COMMON_ARGS.iter().chain(ports));
        args.extend(self.recipe.args.iter().map(String::as_str));
        self.process = Some(ChildProcess::spawn(&self.recipe.binary, &args, self.dir.path(), LOG_FILE));
        self.await_ready()
    }

    fn await_ready(&mut self) -> Result<(), StartError> {
        let ready = wait::poll(READY_LIMIT, || {
            if self.process.as_mut().is_none_or(ChildProcess::has_exited) {
                return Some(false);
            }
            let answered = self.try_connection().and_then(|mut connection| redis::cmd("PING").exec(&mut connection));
            answered.is_ok().then_some(true)
        });
        if ready == Some(true) {
            return Ok(());
        }
        self.process = None;
        let log = std::fs::read_to_string(self.dir.path().join(LOG_FILE)).unwrap_or_default();
        if log.contains("Address already in use") {
            return Err(StartError::PortTaken);
        }
        let lines: Vec<&str> = log.lines().collect();
        Err(StartError::Failed { log_tail: lines[lines.len().saturating_sub(20)..].join("\n") })
    }

    /// The URL for clients, with the password if there is one.
    pub fn url(&self) -> String {
        let scheme = self.scheme();
        let login = self.recipe.password().map(|password| format!(":{password}@")).unwrap_or_default();
        format!("{scheme}://{login}127.0.0.1:{}", self.port())
    }

    fn scheme(&self) -> &'static str {
        match self.recipe.transport {
            Transport::Plain => "redis",
            Transport::Tls => "rediss",
        }
    }

    /// The port of TCP or TLS.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The certificate to trust, in PEM. Only a server started with TLS has one.
    pub fn ca_path(&self) -> PathBuf {
        self.dir.path().join(tls::CA_FILE)
    }

    /// A client's certificate and its key, in PEM.
    pub fn client_files(&self) -> (PathBuf, PathBuf) {
        (self.dir.path().join(tls::CLIENT_FILE), self.dir.path().join(tls::CLIENT_KEY_FILE))
    }

    /// Replaces the authority and all certificates, also those at [`Self::ca_path`] and [`Self::client_files`], while the
    /// server runs. Connections that are open stay open.
    pub fn rotate_certificates(&self) {
        let new = |name: &str| format!("new-{name}");
        for (name, content) in tls::files(&Authority::new()) {
            for name in [name, &new(name)] {
                std::fs::write(self.dir.path().join(name), &content).expect("the temporary directory is writable");
            }
        }
        // A server reads its files again only if their names change.
        let [ca, certificate, key] = [tls::CA_FILE, tls::CERTIFICATE_FILE, tls::KEY_FILE].map(new);
        self.command(&["CONFIG", "SET", "tls-ca-cert-file", &ca, "tls-cert-file", &certificate, "tls-key-file", &key]);
    }

    /// Closes the connections of all clients except this suite.
    pub fn kill_clients(&self) {
        for kind in ["normal", "pubsub"] {
            self.command(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
        }
    }

    /// The path of the server's Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join(SOCKET_FILE)
    }

    /// Returns an authenticated connection over the Unix socket.
    pub fn connection(&self) -> Connection {
        self.try_connection().expect("a running server accepts connections")
    }

    fn try_connection(&self) -> redis::RedisResult<Connection> {
        let mut info: ConnectionInfo =
            ConnectionAddr::Unix(self.dir.path().join(SOCKET_FILE)).into_connection_info()?;
        if let Some(password) = self.recipe.password() {
            let login = info.redis_settings().clone().set_password(password);
            info = info.set_redis_settings(login);
        }
        let connection = Client::open(info)?.get_connection()?;
        connection.set_read_timeout(Some(REPLY_LIMIT))?;
        connection.set_write_timeout(Some(REPLY_LIMIT))?;
        Ok(connection)
    }

    /// Runs one command on a new connection. Panics on an error, which is a bug in the suite.
    fn query<T: FromRedisValue>(&self, command: &Cmd) -> T {
        command.query(&mut self.connection()).unwrap_or_else(|error| {
            panic!("{} on port {}: {error}", String::from_utf8_lossy(&command.get_packed_command()), self.port())
        })
    }

    /// Runs a command, such as `["SET", "key", "value"]`. Panics on an error.
    pub fn command(&self, words: &[&str]) {
        let mut command = Cmd::new();
        for word in words {
            command.arg(*word);
        }
        let _: redis::Value = self.query(&command);
    }

    fn info(&self, section: &str) -> InfoDict {
        self.query(redis::cmd("INFO").arg(section))
    }

    fn is_master(&self) -> bool {
        self.info("replication").get::<String>("role").as_deref() == Some("master")
    }

    /// Processor time the server has used since its start, in user and kernel mode.
    pub fn cpu_micros(&self) -> u64 {
        let info = self.info("cpu");
        let seconds = |field| info.get::<f64>(field).expect("INFO cpu has this field");
        ((seconds("used_cpu_user") + seconds("used_cpu_sys")) * 1e6).round() as u64
    }

    /// A replica of this server that has all of its data.
    pub fn replica(&self) -> Self {
        let replica = Self::start();
        let () = replica.query(redis::cmd("REPLICAOF").arg("127.0.0.1").arg(self.port()));
        wait::within(READY_LIMIT, "the replica has its first copy", || {
            replica.info("replication").get::<String>("master_link_status").as_deref() == Some("up")
        });
        replica
    }

    /// Makes a replica a master. It receives nothing from its former master any more.
    pub fn promote(&self) {
        let () = self.query(redis::cmd("REPLICAOF").arg("NO").arg("ONE"));
    }

    /// Kills the server. Its data is lost.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the server again, empty, on the same port with the same arguments; kills it first if it still runs.
    pub fn restart(&mut self) {
        self.kill();
        match self.run() {
            Ok(()) => {}
            Err(StartError::PortTaken) => panic!("port {} was taken while its server was down", self.port()),
            Err(StartError::Failed { log_tail }) => panic!("the server did not restart; its log ends:\n{log_tail}"),
        }
    }

    /// Freezes the server: connections stay open and are still accepted, but nothing is answered until [`Self::cont`].
    pub fn stop(&mut self) {
        self.process.as_mut().expect("only a running server can be stopped").signal(Signal::Stop);
    }

    /// Continues a server that [`Self::stop`] froze.
    pub fn cont(&mut self) {
        self.process.as_mut().expect("only a running server can be continued").signal(Signal::Continue);
    }

    /// Returns whether the test has neither killed nor stopped the server.
    fn is_running(&self) -> bool {
        self.process.as_ref().is_some_and(|process| !process.is_stopped())
    }
}
