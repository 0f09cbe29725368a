//! The servers and the requests for them. All have the same keys and the same limit, which allows every request.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use super::load::Replies;
use super::{EMPTY_HANDLER, THROTTLECRAB, TOLLGATE};
use crate::cores::{Cores, pinned};
use crate::programs::{build_tollgate, find, workspace};
use crate::server::{Server, free_port};

/// The keys. Every request picks one of them at random, all equally likely.
const USERS: usize = 10_000;
/// More than a user sends in a run.
const BURST: u64 = 1_000_000;
/// Units per second. Slow enough that a key is not full again, and so forgotten, after each request.
const REFILL: u64 = 20;
/// Installs the programs of this benchmark.
const SCRIPT: &str = "install-service-peers";

/// The paths of all programs.
pub(super) struct Programs {
    pub(super) tollgate: PathBuf,
    pub(super) throttlecrab: PathBuf,
    pub(super) h2load: PathBuf,
    bench: PathBuf,
}

impl Programs {
    /// Installs missing programs, and builds Tollgate unless a binary is given.
    pub(super) fn find(tollgate: Option<&Path>) -> anyhow::Result<Self> {
        let root = workspace().join("target/bench-peers/throttlecrab");
        let throttlecrab = root.join("bin/throttlecrab-server");
        if !throttlecrab.is_file() || ["h2load", "taskset"].iter().any(|name| find(name, SCRIPT).is_err()) {
            // The script reports its own errors, and the programs are searched for again below.
            let _ = Command::new(workspace().join("tools").join(SCRIPT)).arg(&root).status();
        }
        ensure!(throttlecrab.is_file(), "throttlecrab-server could not be installed: run tools/{SCRIPT} and see why");
        find("taskset", SCRIPT)?;
        Ok(Self {
            h2load: find("h2load", SCRIPT)?,
            throttlecrab,
            tollgate: tollgate.map_or_else(build_tollgate, |path| Ok(path.to_owned()))?,
            bench: std::env::current_exe().context("this program cannot find itself")?,
        })
    }
}

/// A running contender. Dropping it stops the process.
pub(super) struct ServiceServer {
    pub(super) process: Server,
    pub(super) resp: SocketAddr,
    /// Of a gRPC server, its only address.
    pub(super) http: SocketAddr,
    _folder: TempDir,
}

/// The servers that speak the Redis protocol and HTTP.
pub(super) struct Servers {
    pub(super) tollgate: ServiceServer,
    pub(super) throttlecrab: ServiceServer,
}

impl Servers {
    pub(super) fn start(programs: &Programs, cores: Cores) -> anyhow::Result<Self> {
        let [resp, http] = [free_port()?, free_port()?];
        let rules = format!(
            "service:\n  resp: {{ listen: \"127.0.0.1:{resp}\" }}\n  http: {{ listen: \"127.0.0.1:{http}\" }}\n{}",
            limit("header:x-user-id")
        );
        let tollgate = start_tollgate(programs, cores, &rules, [resp, http])?;
        let [resp, http] = [free_port()?, free_port()?];
        let mut command = pinned(cores.contender(), &programs.throttlecrab);
        // The other settings are its defaults.
        command.args(["--log-level", "error", "--redis", "--redis-host", "127.0.0.1", "--http", "--http-host"]);
        command.args(["127.0.0.1", "--redis-port", &resp.to_string(), "--http-port", &http.to_string()]);
        let throttlecrab = start(command, tempfile::tempdir()?, [resp, http]).context(THROTTLECRAB)?;
        Ok(Self { tollgate, throttlecrab })
    }

    /// Starts Tollgate with Envoy's rate limit service, and the handler that decides nothing.
    pub(super) fn start_grpc(programs: &Programs, cores: Cores) -> anyhow::Result<(ServiceServer, ServiceServer)> {
        let port = free_port()?;
        let rules = format!("service:\n  grpc: {{ listen: \"127.0.0.1:{port}\" }}\n{}", limit("descriptor:user"));
        let tollgate = start_tollgate(programs, cores, &rules, [port, port])?;
        let port = free_port()?;
        let mut command = pinned(cores.contender(), &programs.bench);
        command.args(["empty-handler", "--port", &port.to_string()]);
        Ok((tollgate, start(command, tempfile::tempdir()?, [port, port]).context(EMPTY_HANDLER)?))
    }
}

fn start_tollgate(programs: &Programs, cores: Cores, rules: &str, ports: [u16; 2]) -> anyhow::Result<ServiceServer> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tollgate.yaml");
    fs::write(&file, rules)?;
    let mut command = pinned(cores.contender(), &programs.tollgate);
    command.args(["serve", "--config"]).arg(&file);
    start(command, folder, ports).context(TOLLGATE)
}

fn start(command: Command, folder: TempDir, [resp, http]: [u16; 2]) -> anyhow::Result<ServiceServer> {
    let log = folder.path().join("log");
    let mut process = Server::start(command, resp, &log)?;
    let http = SocketAddr::from(([127, 0, 0, 1], http));
    process.wait_for(http, &log)?;
    Ok(ServiceServer { resp: process.address, http, process, _folder: folder })
}

fn limit(key: &str) -> String {
    format!(
        "limits:\n  - name: per-user\n    key: {key}\n    algorithm: token_bucket\n    capacity: {BURST}\n    \
         refill: {REFILL}/s\n"
    )
}

fn users() -> impl Iterator<Item = String> {
    (0..USERS).map(|user| format!("user:{user:06}"))
}

/// One command for each user.
pub(super) fn resp_requests(replies: Replies) -> Vec<Vec<u8>> {
    let command = |words: &[&str]| {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        words.iter().for_each(|word| bytes.extend(format!("${}\r\n{word}\r\n", word.len()).bytes()));
        bytes
    };
    match replies {
        Replies::Pong => vec![command(&["PING"])],
        Replies::Throttle | Replies::Check => {
            let (burst, count) = (BURST.to_string(), REFILL.to_string());
            users().map(|user| command(&["THROTTLE", &user, &burst, &count, "1"])).collect()
        }
    }
}

/// One request for each user.
pub(super) fn http_requests(contender: &str) -> Vec<Vec<u8>> {
    let request = |user: String| {
        let (path, body) = if contender == TOLLGATE {
            ("/v1/check", format!(r#"{{"limit":"per-user","key":"{user}"}}"#))
        } else {
            let numbers = format!(r#""max_burst":{BURST},"count_per_period":{REFILL},"period":1"#);
            ("/throttle", format!(r#"{{"key":"{user}",{numbers}}}"#))
        };
        let head = "host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length:";
        format!("POST {path} HTTP/1.1\r\n{head} {}\r\n\r\n{body}", body.len()).into_bytes()
    };
    users().map(request).collect()
}
