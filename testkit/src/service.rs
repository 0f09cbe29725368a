//! The built binary as a decision service.

use std::net::SocketAddr;
use std::ops::Deref;
use std::process::ExitStatus;

use tempfile::TempDir;

use crate::folder::{folder, folder_with};
use crate::http1::Connection;
use crate::tollgate::{Process, RULES};
use crate::wait::wait_until;

/// A running server on its own port.
pub struct Server {
    process: Process,
    /// The address of the decision service.
    pub address: SocketAddr,
}

impl Server {
    /// Starts a server without a rule file.
    pub fn start() -> Self {
        let free = "127.0.0.1:0";
        Self::run(folder(), &["serve", "--listen", free, "--admin", free, "--http", free])
    }

    /// Starts a server with these rules, on a free port.
    pub fn with_rules(rules: &str) -> Self {
        Self::in_folder(folder_with(&[(RULES, &served(rules))]))
    }

    /// Starts a server in a folder that has a rule file.
    pub fn in_folder(folder: TempDir) -> Self {
        Self::run(folder, &["serve", "--config", RULES])
    }

    /// Starts a server with these arguments in a folder.
    pub fn run(folder: TempDir, arguments: &[&str]) -> Self {
        let process = Process::start(folder, arguments);
        let address = process.address_of("decisions POST");
        Self { process, address }
    }

    /// Opens a connection to the decision service.
    pub fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// Returns the output after the first line, once it has this many lines.
    pub fn rest_of_stdout(&self, lines: usize) -> String {
        wait_until(|| {
            let text = std::fs::read_to_string(self.stdout()).expect("stdout is a file");
            let rest = text.split_once('\n')?.1.to_owned();
            (rest.lines().count() == lines).then_some(rest)
        })
        .expect("it says what is in force")
    }

    /// Saves the rule file in place, as `echo` would.
    pub fn save_rules(&self, rules: &str) {
        std::fs::write(self.path(RULES), served(rules)).expect("the folder is writable");
    }

    /// Waits for its end.
    pub fn wait(mut self) -> ExitStatus {
        self.process.wait()
    }
}

impl Deref for Server {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

/// Returns the rules with a decision service on a free port.
pub fn served(rules: &str) -> String {
    format!("service: {{ http: '127.0.0.1:0' }}\n{rules}")
}
