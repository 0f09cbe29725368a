//! The built binary as a gateway.

use std::net::SocketAddr;
use std::ops::Deref;
use std::process::ExitStatus;

use tempfile::TempDir;

use crate::client::{Answer, Connection};
pub(crate) use crate::common::{PATIENCE, folder_with, wait_until};
use crate::common::{Process, RULES, run_in};

/// A running gateway on a port of its own.
pub(crate) struct Gateway {
    process: Process,
    pub(crate) address: SocketAddr,
}

impl Gateway {
    /// With a rule file of this text.
    pub(crate) fn start(rules: &str) -> Self {
        Self::in_folder(folder_with(&[(RULES, rules)]))
    }

    /// With a route for every path to one upstream, and no limits.
    pub(crate) fn before(upstream: &str) -> Self {
        Self::start(&site("", &[format!("{{ path: /**, upstream: {upstream} }}")], ""))
    }

    /// With these names of hosts, in the form of `/etc/hosts`, for this gateway alone.
    pub(crate) fn with_hosts(hosts: &str, rules: &str) -> Self {
        let folder = folder_with(&[(RULES, rules), ("hosts", hosts)]);
        let process = Process::start_with_hosts(folder, &["serve", "--config", RULES]);
        let address = process.address_of("gateway");
        Self { process, address }
    }

    /// In a folder that has a rule file.
    pub(crate) fn in_folder(folder: TempDir) -> Self {
        let process = Process::start(folder, &["serve", "--config", RULES]);
        let address = process.address_of("gateway");
        Self { process, address }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// The answer to a GET on a connection of its own.
    pub(crate) fn get(&self, target: &str) -> Answer {
        self.connect().get(target)
    }

    /// Saves the rule file.
    pub(crate) fn save(&self, rules: &str) {
        // In one step, so that no half of it is read.
        std::fs::write(self.path("draft"), rules).expect("the folder is writable");
        std::fs::rename(self.path("draft"), self.path(RULES)).expect("the folder is writable");
    }

    /// Waits until a metric has that value. The rules have an admin listener.
    #[track_caller]
    pub(crate) fn await_metric(&self, series: &str, wanted: u64) {
        let admin = self.address_of("admin");
        let wanted = format!("{series} {wanted}");
        let told = || Connection::to(admin).get("/metrics").text().to_string();
        let found = wait_until(|| told().lines().any(|line| line == wanted).then_some(()));
        assert!(found.is_some(), "{wanted} is not in:\n{}", told());
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> ExitStatus {
        self.process.wait()
    }

    /// Waits for its end, which is a good one.
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

/// A rule file: settings of the gateway, its routes, and limits.
pub(crate) fn site(settings: &str, routes: &[impl AsRef<str>], limits: &str) -> String {
    let routes: String = routes.iter().map(|route| format!("    - {}\n", route.as_ref())).collect();
    format!("gateway:\n  listen: 127.0.0.1:0\n  {settings}\n  routes:\n{routes}limits: [{limits}]\n")
}

/// A limit of so many requests for each user, in a window that does not end before the test does.
pub(crate) fn per_user(limit: u64) -> String {
    format!(
        "{{ name: user, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: {limit}, window: 1h }}"
    )
}

/// Serves these rules, which are expected not to be served: what was said on stderr, and the exit code.
pub(crate) fn fails(files: &[(&str, &str)]) -> (String, Option<i32>) {
    let folder = folder_with(files);
    let output = run_in(folder.path(), &["serve", "--config", RULES]);
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}
