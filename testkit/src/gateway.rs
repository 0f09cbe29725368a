//! The built binary as a gateway.

use std::net::SocketAddr;
use std::ops::Deref;
use std::path::Path;
use std::process::ExitStatus;

use tempfile::TempDir;

use crate::client::{Client, Protocol, Stream};
use crate::folder::folder_with;
use crate::http1::{Connection, Response};
use crate::tollgate::{Process, RULES};
use crate::wait::wait_until;

/// A running gateway on its own port.
pub struct Gateway {
    process: Process,
    /// The address of the gateway.
    pub address: SocketAddr,
    /// The protocol of its clients.
    pub protocol: Protocol,
}

impl Gateway {
    /// Starts a gateway with this rule file.
    pub fn start(rules: &str) -> Self {
        Self::in_folder(folder_with(&[(RULES, rules)]))
    }

    /// Starts a gateway with a route for every path to one upstream, and no limits.
    pub fn before(upstream: &str) -> Self {
        Self::start(&site("", &[format!("{{ path: /**, upstream: {upstream} }}")], ""))
    }

    /// Starts a gateway with its own hosts file, in the format of `/etc/hosts`.
    pub fn with_hosts(protocol: Protocol, hosts: &str, rules: &str) -> Self {
        let folder = folder_with(&[(RULES, rules), ("hosts", hosts)]);
        protocol.prepare(&folder);
        Self::from_process(Process::start_with_hosts(folder, &["serve", "--config", RULES]), protocol)
    }

    /// Starts a gateway in a folder that has a rule file.
    pub fn in_folder(folder: TempDir) -> Self {
        Self::with_protocol(folder, Protocol::Http1)
    }

    pub(crate) fn with_protocol(folder: TempDir, protocol: Protocol) -> Self {
        Self::from_process(Process::start(folder, &["serve", "--config", RULES]), protocol)
    }

    fn from_process(process: Process, protocol: Protocol) -> Self {
        Self { address: process.address_of("gateway"), process, protocol }
    }

    /// Opens a connection for any bytes, with TLS if this gateway's clients use it.
    #[track_caller]
    pub fn connect(&self) -> Connection<Stream> {
        let has_tls = self.protocol.scheme() == "https";
        let stream = if has_tls { Stream::tls(self.address) } else { Stream::tcp(self.address) };
        Connection::on(stream.expect("the gateway accepts"))
    }

    /// Opens a connection with the protocol of this gateway's clients.
    #[track_caller]
    pub fn client(&self) -> Client {
        Client::to(self.address, self.protocol)
    }

    /// Sends a GET on a new connection.
    #[track_caller]
    pub fn get(&self, target: &str) -> Response {
        self.client().get(target)
    }

    /// Sends a request on a new connection.
    #[track_caller]
    pub fn send(&self, request: impl AsRef<[u8]>) -> Response {
        self.client().ask(request)
    }

    /// Saves the rule file.
    pub fn save(&self, rules: &str) {
        // Atomically, so that no half of it is read.
        std::fs::write(self.path("draft"), self.protocol.rules(rules)).expect("the folder is writable");
        std::fs::rename(self.path("draft"), self.path(RULES)).expect("the folder is writable");
    }

    /// Starts a gateway with these rules and an admin listener, on free ports.
    pub fn with_admin(rules: &str) -> Self {
        Self::with_admin_at("127.0.0.1:0", rules)
    }

    /// Starts a gateway that listens on this address, with an admin listener.
    pub fn with_admin_at(listen: &str, rules: &str) -> Self {
        let arguments = ["serve", "--config", RULES, "--listen", listen, "--admin", "127.0.0.1:0"];
        let process = Process::start(folder_with(&[(RULES, rules)]), &arguments);
        Self::from_process(process, Protocol::Http1)
    }

    /// Returns the address of the admin listener.
    pub fn admin(&self) -> SocketAddr {
        self.address_of("admin")
    }

    /// Sends a GET to the admin listener.
    pub fn get_admin(&self, path: &str) -> Response {
        Connection::to(self.admin()).get(path)
    }

    /// Returns the value of a metric.
    pub fn metric(&self, series: &str) -> Option<f64> {
        let response = self.get_admin("/metrics");
        let line = response.text().lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map(|value| value.parse().expect("a number"))
    }

    /// Waits until a metric has that value. Counts at the end of a response may change after the client has read it.
    #[track_caller]
    pub fn await_metric(&self, series: &str, wanted: u64) {
        let found = wait_until(|| self.metric(series).filter(|value| (value - wanted as f64).abs() < 1e-9));
        assert!(found.is_some(), "{series} is not {wanted} in:\n{}", self.get_admin("/metrics").text());
    }

    /// Returns the lines of a log, once there are this many.
    #[track_caller]
    pub fn await_lines(&self, path: &Path, count: usize) -> Vec<String> {
        let lines = || -> Vec<String> {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            whole.map(|line| line.trim_end().to_owned()).filter(|line| !line.starts_with("tollgate ")).collect()
        };
        wait_until(|| Some(lines()).filter(|lines| lines.len() >= count))
            .unwrap_or_else(|| panic!("there are not {count} lines, but: {:?}", lines()))
    }

    /// Waits for its end.
    pub fn wait(mut self) -> ExitStatus {
        self.process.wait()
    }

    /// Waits for its end, and checks that it is successful.
    pub fn ended(mut self) -> Self {
        assert_eq!(self.process.wait().code(), Some(0));
        self
    }
}

impl Deref for Gateway {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

/// Returns a rule file with settings of the gateway, routes, and limits.
pub fn site(settings: &str, routes: &[impl AsRef<str>], limits: &str) -> String {
    let routes: String = routes.iter().map(|route| format!("    - {}\n", route.as_ref())).collect();
    format!("gateway:\n  listen: 127.0.0.1:0\n  {settings}\n  routes:\n{routes}limits: [{limits}]\n")
}

/// Returns a limit per user, with a window that does not end before the test does.
pub fn per_user(limit: u64) -> String {
    format!(
        "{{ name: user, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: {limit}, window: 1h }}"
    )
}
