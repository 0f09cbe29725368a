//! The built binary, started and stopped.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::Duration;

use tempfile::TempDir;

use crate::client::Connection;

/// Longer than any of this takes on a busy machine: a test fails rather than hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running server on a port of its own. It is killed when the test ends.
pub(crate) struct Server {
    child: Child,
    /// Of the decision service.
    pub(crate) address: SocketAddr,
    pub(crate) first_line: String,
    folder: TempDir,
}

impl Server {
    /// Without a rule file.
    pub(crate) fn start() -> Self {
        let free = "127.0.0.1:0";
        Self::run(folder(), &["serve", "--listen", free, "--admin", free, "--http", free])
    }

    /// With a rule file of these limits and whatever else the text names, on a free port.
    pub(crate) fn with_rules(rules: &str) -> Self {
        Self::in_folder(folder_with(&[(RULES, &served(rules))]))
    }

    /// In a folder that has a rule file.
    pub(crate) fn in_folder(folder: TempDir) -> Self {
        Self::run(folder, &["serve", "--config", RULES])
    }

    fn run(folder: TempDir, arguments: &[&str]) -> Self {
        let file = |name| File::create(folder.path().join(name)).expect("the folder is writable");
        let child = command(folder.path(), arguments)
            .stdout(file(STDOUT))
            .stderr(file(STDERR))
            .spawn()
            .expect("the built binary starts");
        let first_line = wait_until(|| {
            let text = std::fs::read_to_string(folder.path().join(STDOUT)).expect("stdout is a file");
            text.split_inclusive('\n').next().filter(|line| line.ends_with('\n')).map(str::to_owned)
        });
        let first_line = first_line.unwrap_or_default();
        let said = std::fs::read_to_string(folder.path().join(STDERR)).unwrap_or_default();
        let address = address_of("decisions POST", &first_line)
            .unwrap_or_else(|| panic!("no address in {first_line:?}; it said: {said}"));
        Self { child, address, first_line, folder }
    }

    /// Where something listens, by what it is called in the first line.
    pub(crate) fn address_of(&self, name: &str) -> SocketAddr {
        address_of(name, &self.first_line).expect("it listens")
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// The lines after the first.
    pub(crate) fn rest_of_stdout(&self, lines: usize) -> String {
        wait_until(|| {
            let text = std::fs::read_to_string(self.path(STDOUT)).expect("stdout is a file");
            let rest = text.split_once('\n')?.1.to_owned();
            (rest.lines().count() == lines).then_some(rest)
        })
        .expect("it says what is in force")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Saves the rule file as `echo` would.
    pub(crate) fn save_rules(&self, rules: &str) {
        std::fs::write(self.path(RULES), served(rules)).expect("the folder is writable");
    }

    /// All that the server said on stderr so far.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(self.path(STDERR)).expect("stderr is a file")
    }

    /// Waits until the server has said this on stderr, so many times.
    #[track_caller]
    pub(crate) fn await_said(&self, text: &str, times: usize) -> String {
        wait_until(|| Some(self.said()).filter(|said| said.matches(text).count() >= times))
            .unwrap_or_else(|| panic!("it did not say {text:?} {times} times, but: {}", self.said()))
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

fn address_of(name: &str, line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once(&format!("{name} http://"))?;
    rest.split(['/', ',', ';']).next()?.parse().ok()
}

/// The rule file in the folder of a server or a command.
pub(crate) const RULES: &str = "tollgate.yaml";
const STDOUT: &str = "stdout.txt";
const STDERR: &str = "stderr.txt";

/// Rules with a listener on a free port.
pub(crate) fn served(rules: &str) -> String {
    format!("service: {{ http: '127.0.0.1:0' }}\n{rules}")
}

pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder can be made")
}

/// A folder with these files in it.
pub(crate) fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = folder();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("the folder is writable");
    }
    folder
}

/// What comes of it within the patience of a test.
#[expect(clippy::disallowed_methods, reason = "another process is waited for, which nothing here can wake up for")]
pub(crate) fn wait_until<T>(mut found: impl FnMut() -> Option<T>) -> Option<T> {
    const STEP: Duration = Duration::from_millis(10);
    (0..PATIENCE.as_millis() / STEP.as_millis()).find_map(|_| {
        let found = found();
        if found.is_none() {
            std::thread::sleep(STEP);
        }
        found
    })
}

/// Runs the command to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    run_in(Path::new("."), arguments)
}

/// Runs the command to its end in a folder.
pub(crate) fn run_in(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().expect("the built binary starts")
}

/// What a command said and how it ended, for people to compare.
pub(crate) fn told(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let code = output.status.code().expect("no signal ended it");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    match stderr.is_empty() {
        true => format!("{stdout}exit code {code}"),
        false => format!("{stdout}on stderr:\n{stderr}exit code {code}"),
    }
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(arguments).current_dir(folder);
    command
}
