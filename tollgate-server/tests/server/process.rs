//! The built binary as a decision service, and as a command.

use std::net::SocketAddr;
use std::ops::Deref;
use std::path::Path;
use std::process::{ExitStatus, Output};

use tempfile::TempDir;

use crate::client::Connection;
use crate::common::Process;
pub(crate) use crate::common::{RULES, folder, folder_with, run_in, wait_until};

/// A running server on its own port.
pub(crate) struct Server {
    process: Process,
    /// The address of the decision service.
    pub(crate) address: SocketAddr,
}

impl Server {
    /// Starts a server without a rule file.
    pub(crate) fn start() -> Self {
        let free = "127.0.0.1:0";
        Self::run(folder(), &["serve", "--listen", free, "--admin", free, "--http", free])
    }

    /// Starts a server with these rules, on a free port.
    pub(crate) fn with_rules(rules: &str) -> Self {
        Self::in_folder(folder_with(&[(RULES, &served(rules))]))
    }

    /// Starts a server in a folder that has a rule file.
    pub(crate) fn in_folder(folder: TempDir) -> Self {
        Self::run(folder, &["serve", "--config", RULES])
    }

    /// Starts a server with these arguments in a folder.
    pub(crate) fn run(folder: TempDir, arguments: &[&str]) -> Self {
        let process = Process::start(folder, arguments);
        let address = process.address_of("decisions POST");
        Self { process, address }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// Returns the output after the first line, once it has this many lines.
    pub(crate) fn rest_of_stdout(&self, lines: usize) -> String {
        wait_until(|| {
            let text = std::fs::read_to_string(self.stdout()).expect("stdout is a file");
            let rest = text.split_once('\n')?.1.to_owned();
            (rest.lines().count() == lines).then_some(rest)
        })
        .expect("it says what is in force")
    }

    /// Saves the rule file in place, as `echo` would.
    pub(crate) fn save_rules(&self, rules: &str) {
        std::fs::write(self.path(RULES), served(rules)).expect("the folder is writable");
    }

    pub(crate) fn wait(mut self) -> ExitStatus {
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
pub(crate) fn served(rules: &str) -> String {
    format!("service: {{ http: '127.0.0.1:0' }}\n{rules}")
}

/// Runs the command until it ends.
pub(crate) fn run(arguments: &[&str]) -> Output {
    run_in(Path::new("."), arguments)
}

/// Returns the output and the exit code of a command, for snapshots.
pub(crate) fn transcript(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let code = output.status.code().expect("no signal ended it");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    match stderr.is_empty() {
        true => format!("{stdout}exit code {code}"),
        false => format!("{stdout}on stderr:\n{stderr}exit code {code}"),
    }
}
