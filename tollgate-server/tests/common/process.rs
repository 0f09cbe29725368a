//! The built binary as a separate process, which is killed when the test ends.

#![allow(dead_code, reason = "each test crate uses what it needs")]
#![allow(clippy::disallowed_methods, reason = "another process is waited for, which nothing here can wake up for")]

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::Duration;

use tempfile::TempDir;

/// The longest wait of a test. Nothing takes this long, even on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The rule file in the folder of a process or a command.
pub(crate) const RULES: &str = "tollgate.yaml";
const STDOUT: &str = "stdout.txt";
const STDERR: &str = "stderr.txt";

/// A running server.
pub(crate) struct Process {
    child: Child,
    pub(crate) first_line: String,
    folder: TempDir,
}

impl Process {
    /// Starts it in a folder and waits until it prints its addresses.
    pub(crate) fn start(folder: TempDir, arguments: &[&str]) -> Self {
        let command = command(folder.path(), arguments);
        Self::start_by(folder, command)
    }

    /// Starts it with a limit on open files.
    pub(crate) fn start_with_open_files(folder: TempDir, most: u32, arguments: &[&str]) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {most}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_tollgate")]);
        command.args(arguments).current_dir(folder.path());
        Self::start_by(folder, command)
    }

    /// Starts it in its own mount namespace, where the file `hosts` of the folder is `/etc/hosts`.
    pub(crate) fn start_with_hosts(folder: TempDir, arguments: &[&str]) -> Self {
        let mut command = Command::new("unshare");
        let script = r#"mount --bind hosts /etc/hosts && exec "$0" "$@""#;
        command.args(["--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_tollgate")]);
        command.args(arguments).current_dir(folder.path());
        Self::start_by(folder, command)
    }

    fn start_by(folder: TempDir, mut command: Command) -> Self {
        let file = |name| File::create(folder.path().join(name)).expect("the folder is writable");
        let child = command.stdout(file(STDOUT)).stderr(file(STDERR)).spawn().expect("the built binary starts");
        let mut process = Self { child, first_line: String::new(), folder };
        let first_line = wait_until(|| {
            let text = std::fs::read_to_string(process.stdout()).expect("stdout is a file");
            text.split_inclusive('\n').next().filter(|line| line.ends_with('\n')).map(str::to_owned)
        });
        process.first_line = first_line.unwrap_or_else(|| panic!("it did not start; it said: {}", process.said()));
        process
    }

    /// Returns the address of a listener, by its name in the first line of output.
    #[track_caller]
    pub(crate) fn address_of(&self, name: &str) -> SocketAddr {
        let found = self.first_line.split_once(name).and_then(|(_, rest)| rest.split_once("://"));
        let address = found.and_then(|(_, rest)| rest.split(['/', ',', ';']).next()?.trim().parse().ok());
        address.unwrap_or_else(|| panic!("no address of {name} in {:?}; it said: {}", self.first_line, self.said()))
    }

    /// Returns the process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn stdout(&self) -> PathBuf {
        self.path(STDOUT)
    }

    /// Returns everything that was logged to stderr so far.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(self.path(STDERR)).expect("stderr is a file")
    }

    /// Waits until `text` was logged to stderr this many times, and returns everything that was logged.
    #[track_caller]
    pub(crate) fn await_said(&self, text: &str, times: usize) -> String {
        wait_until(|| Some(self.said()).filter(|said| said.matches(text).count() >= times))
            .unwrap_or_else(|| panic!("it did not say {text:?} {times} times, but: {}", self.said()))
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.child.id())]).status();
        assert!(sent.expect("sh runs").success());
    }

    /// Waits until it ends. Its folder stays.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("it can be waited for")
    }

    /// Returns the resident memory of the process.
    pub(crate) fn memory_kib(&self) -> u64 {
        self.status_kib("VmRSS:")
    }

    /// Returns the largest resident memory that the process has had.
    pub(crate) fn peak_memory_kib(&self) -> u64 {
        self.status_kib("VmHWM:")
    }

    fn status_kib(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("Linux tells it");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// Returns the number of open files and sockets.
    pub(crate) fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("it runs").count()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail if the process has ended already, which is fine.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder can be made")
}

/// Returns a folder with these files.
pub(crate) fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = folder();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("the folder is writable");
    }
    folder
}

/// Runs the command in a folder until it ends.
pub(crate) fn run_in(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().expect("the built binary starts")
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(arguments).current_dir(folder);
    command
}

/// Calls `found` until it returns a value, for at most [`PATIENCE`].
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
