//! The built binary as a gateway, started and stopped.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::Duration;

use tempfile::TempDir;

use crate::client::{Answer, Connection};

/// Longer than any of this takes on a busy machine: a test fails rather than hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

const RULES: &str = "tollgate.yaml";
const STDOUT: &str = "stdout.txt";
const STDERR: &str = "stderr.txt";

/// A running gateway on a port of its own. It is killed when the test ends.
pub(crate) struct Gateway {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) first_line: String,
    folder: TempDir,
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

    /// In a folder that has a rule file.
    pub(crate) fn in_folder(folder: TempDir) -> Self {
        let file = |name| File::create(folder.path().join(name)).expect("the folder is writable");
        let child = command(folder.path(), &["serve", "--config", RULES])
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
        let address = address_in(&first_line).unwrap_or_else(|| panic!("no address in {first_line:?}: {said}"));
        Self { child, address, first_line, folder }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// The answer to a GET on a connection of its own.
    pub(crate) fn get(&self, target: &str) -> Answer {
        self.connect().get(target)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Saves the rule file.
    pub(crate) fn save(&self, rules: &str) {
        // In one step, so that no half of it is read.
        std::fs::write(self.path("draft"), rules).expect("the folder is writable");
        std::fs::rename(self.path("draft"), self.path(RULES)).expect("the folder is writable");
    }

    /// All that was said on stderr so far.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(self.path(STDERR)).expect("stderr is a file")
    }

    /// Waits until this was said on stderr, so many times.
    #[track_caller]
    pub(crate) fn await_said(&self, text: &str, times: usize) -> String {
        wait_until(|| Some(self.said()).filter(|said| said.matches(text).count() >= times))
            .unwrap_or_else(|| panic!("it did not say {text:?} {times} times, but: {}", self.said()))
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.child.id())]).status();
        assert!(sent.expect("sh runs").success());
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("it can be waited for")
    }

    /// What the process has of memory now.
    pub(crate) fn memory_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("Linux tells it");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
    }

    /// How many files and sockets it has open.
    pub(crate) fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("it runs").count()
    }

    /// The most memory that it has had at once.
    pub(crate) fn peak_memory_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux tells it");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as good.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn address_in(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once("gateway http")?;
    rest.split_once("://")?.1.split([',', ';']).next()?.parse().ok()
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

/// A folder with these files in it.
pub(crate) fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("the folder is writable");
    }
    folder
}

/// Serves these rules, which are expected not to be served: what was said on stderr, and the exit code.
pub(crate) fn fails(files: &[(&str, &str)]) -> (String, Option<i32>) {
    let folder = folder_with(files);
    let output: Output = command(folder.path(), &["serve", "--config", RULES]).output().expect("the binary starts");
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(arguments).current_dir(folder);
    command
}

/// What comes of it within the patience of a test.
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
