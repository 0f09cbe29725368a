//! The built binary, started and stopped.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use crate::client::Connection;

/// A running server on a port of its own. It is killed when the test ends.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) first_line: String,
}

impl Server {
    pub(crate) fn start() -> Self {
        let mut child = command(&["serve", "--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the built binary starts");
        let mut first_line = String::new();
        let stdout = child.stdout.as_mut().expect("stdout is piped");
        BufReader::new(stdout).read_line(&mut first_line).expect("the server says where it listens");
        let address = first_line
            .split_once("http://")
            .and_then(|(_, rest)| rest.split_once('/'))
            .and_then(|(address, _)| address.parse().ok())
            .unwrap_or_else(|| panic!("no address in {first_line:?}"));
        Self { child, address, first_line }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.child.id())]).status();
        assert!(sent.expect("sh runs").success());
    }

    pub(crate) fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("the server can be waited for")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as good.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Runs the command to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the built binary starts")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(arguments);
    command
}
