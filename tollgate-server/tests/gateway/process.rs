//! The built binary as a gateway.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::ops::Deref;
use std::process::ExitStatus;

use tempfile::TempDir;

use crate::client::{Answer, Connection};
pub(crate) use crate::common::{PATIENCE, folder_with, wait_until};
use crate::common::{Process, RULES, run_in};

/// Reports that the running test cannot run on this machine. Written to the standard error itself, because libtest
/// captures `eprintln!` of tests that pass.
pub(crate) fn skipped(reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
}

/// Returns whether this machine has an IPv6 loopback address. If it has one, listening on it must work.
pub(crate) fn has_ipv6() -> bool {
    let interfaces = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let has_loopback = interfaces.lines().any(|line| line.ends_with(" lo"));
    if !has_loopback {
        skipped("this machine has no IPv6 loopback address");
        return false;
    }
    TcpListener::bind("[::1]:0").expect("the IPv6 loopback address accepts listeners");
    true
}

/// A running gateway on its own port.
pub(crate) struct Gateway {
    process: Process,
    pub(crate) address: SocketAddr,
}

impl Gateway {
    /// Starts a gateway with this rule file.
    pub(crate) fn start(rules: &str) -> Self {
        Self::in_folder(folder_with(&[(RULES, rules)]))
    }

    /// Starts a gateway with a route for every path to one upstream, and no limits.
    pub(crate) fn before(upstream: &str) -> Self {
        Self::start(&site("", &[format!("{{ path: /**, upstream: {upstream} }}")], ""))
    }

    /// Starts a gateway with its own hosts file, in the format of `/etc/hosts`.
    pub(crate) fn with_hosts(hosts: &str, rules: &str) -> Self {
        let folder = folder_with(&[(RULES, rules), ("hosts", hosts)]);
        let process = Process::start_with_hosts(folder, &["serve", "--config", RULES]);
        let address = process.address_of("gateway");
        Self { process, address }
    }

    /// Starts a gateway in a folder that has a rule file.
    pub(crate) fn in_folder(folder: TempDir) -> Self {
        let process = Process::start(folder, &["serve", "--config", RULES]);
        let address = process.address_of("gateway");
        Self { process, address }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// Sends a GET on a new connection.
    pub(crate) fn get(&self, target: &str) -> Answer {
        self.connect().get(target)
    }

    /// Saves the rule file.
    pub(crate) fn save(&self, rules: &str) {
        // Atomically, so that no half of it is read.
        std::fs::write(self.path("draft"), rules).expect("the folder is writable");
        std::fs::rename(self.path("draft"), self.path(RULES)).expect("the folder is writable");
    }

    /// Waits until a metric has that value. The rules have an admin listener.
    #[track_caller]
    pub(crate) fn await_metric(&self, series: &str, wanted: u64) {
        let admin = self.address_of("admin");
        let wanted = format!("{series} {wanted}");
        let expected = || Connection::to(admin).get("/metrics").text().to_string();
        let found = wait_until(|| expected().lines().any(|line| line == wanted).then_some(()));
        assert!(found.is_some(), "{wanted} is not in:\n{}", expected());
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> ExitStatus {
        self.process.wait()
    }

    /// Waits for its end, and checks that it is successful.
    pub(crate) fn ended(mut self) -> Self {
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
pub(crate) fn site(settings: &str, routes: &[impl AsRef<str>], limits: &str) -> String {
    let routes: String = routes.iter().map(|route| format!("    - {}\n", route.as_ref())).collect();
    format!("gateway:\n  listen: 127.0.0.1:0\n  {settings}\n  routes:\n{routes}limits: [{limits}]\n")
}

/// Returns a limit per user, with a window that does not end before the test does.
pub(crate) fn per_user(limit: u64) -> String {
    format!(
        "{{ name: user, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: {limit}, window: 1h }}"
    )
}

/// Serves rules that are expected to be refused. Returns the standard error and the exit code.
pub(crate) fn fails(files: &[(&str, &str)]) -> (String, Option<i32>) {
    let folder = folder_with(files);
    let output = run_in(folder.path(), &["serve", "--config", RULES]);
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}
