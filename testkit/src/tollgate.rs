//! The built binary as a separate process, which is killed when the test ends.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use tempfile::TempDir;

use crate::folder::folder_with;
use crate::wait::wait_until;

/// The rule file in the folder of a process or a command.
pub const RULES: &str = "tollgate.yaml";
const STDOUT: &str = "stdout.txt";
const STDERR: &str = "stderr.txt";

/// A running `tollgate serve`, with its own folder for the rule file and the output.
pub struct Process {
    child: Child,
    /// The first line of output, with the addresses.
    pub first_line: String,
    folder: TempDir,
}

impl Process {
    /// Starts it in a folder and waits until it prints its addresses.
    pub fn start(folder: TempDir, arguments: &[&str]) -> Self {
        let command = command(folder.path(), arguments);
        Self::start_by(folder, command)
    }

    /// Starts it with environment variables.
    pub fn start_with_variables(folder: TempDir, variables: &[(&str, &str)], arguments: &[&str]) -> Self {
        let mut command = command(folder.path(), arguments);
        command.envs(variables.iter().copied());
        Self::start_by(folder, command)
    }

    /// Starts it with a limit on open files.
    pub fn start_with_open_files(folder: TempDir, most: u32, arguments: &[&str]) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {most}; exec \"$0\" \"$@\""), &binary()]);
        command.args(arguments).current_dir(folder.path());
        Self::start_by(folder, command)
    }

    /// Starts it in its own mount namespace, where the file `hosts` of the folder is `/etc/hosts`.
    pub fn start_with_hosts(folder: TempDir, arguments: &[&str]) -> Self {
        let mut command = Command::new("unshare");
        let script = r#"mount --bind hosts /etc/hosts && exec "$0" "$@""#;
        command.args(["--map-root-user", "--mount", "sh", "-c", script, &binary()]);
        command.args(arguments).current_dir(folder.path());
        Self::start_by(folder, command)
    }

    /// Starts it with a listening socket that it has not bound, as a service manager does.
    pub fn start_with_socket(folder: TempDir, socket: &TcpListener, arguments: &[&str]) -> Self {
        let mut command = Command::new("sh");
        let script = r#"exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" "$@""#;
        command.args(["-c", script, &binary()]).args(arguments).current_dir(folder.path());
        command.stdin(OwnedFd::from(socket.try_clone().expect("a descriptor is free")));
        Self::start_by(folder, command)
    }

    /// Starts it with another program, which runs it.
    pub fn start_command(folder: TempDir, command: Command) -> Self {
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
    pub fn address_of(&self, name: &str) -> SocketAddr {
        let found = self.first_line.split_once(name).and_then(|(_, rest)| rest.split_once("://"));
        let address = found.and_then(|(_, rest)| rest.split(['/', ',', ';']).next()?.trim().parse().ok());
        address.unwrap_or_else(|| panic!("no address of {name} in {:?}; it said: {}", self.first_line, self.said()))
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of a file in its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the path of the file with its output.
    pub fn stdout(&self) -> PathBuf {
        self.path(STDOUT)
    }

    /// Returns everything that was logged to stderr so far, in the plain form of [`without_times`].
    pub fn said(&self) -> String {
        without_times(&self.log())
    }

    /// Returns everything that was written to stderr so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path(STDERR)).expect("stderr is a file")
    }

    /// Waits until `text` was logged to stderr this many times, and returns everything that was logged.
    #[track_caller]
    pub fn await_said(&self, text: &str, times: usize) -> String {
        wait_until(|| Some(self.said()).filter(|said| said.matches(text).count() >= times))
            .unwrap_or_else(|| panic!("it did not say {text:?} {times} times, but: {}", self.said()))
    }

    /// Sends a signal, such as `HUP`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.child.id())]).status();
        assert!(sent.expect("sh runs").success());
    }

    /// Waits until it ends. Its folder stays.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("it can be waited for")
    }

    /// Returns the resident memory of the process.
    pub fn memory_kib(&self) -> u64 {
        self.status_kib("VmRSS:")
    }

    /// Returns the largest resident memory that the process has had.
    pub fn peak_memory_kib(&self) -> u64 {
        self.status_kib("VmHWM:")
    }

    fn status_kib(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("Linux tells it");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// Returns the number of open files and sockets.
    pub fn open_files(&self) -> usize {
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

/// Runs the command in a folder until it ends.
pub fn run_in(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().expect("the built binary starts")
}

/// Runs the command in a folder, with an input in a pipe, until it ends.
pub fn run_with_stdin(folder: &Path, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = command(folder, arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the built binary starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    std::thread::scope(|scope| {
        // The command may exit before it has read everything.
        scope.spawn(move || _ = std::io::Write::write_all(&mut stdin, input));
        child.wait_with_output().expect("it ends")
    })
}

/// Runs the command until it ends.
pub fn run(arguments: &[&str]) -> Output {
    run_in(Path::new("."), arguments)
}

/// Runs `tollgate serve` with rules that are expected to be refused. Returns the standard error and the exit code.
pub fn fails(files: &[(&str, &str)]) -> (String, Option<i32>) {
    let folder = folder_with(files);
    let output = run_in(folder.path(), &["serve", "--config", RULES]);
    (without_times(&String::from_utf8_lossy(&output.stderr)), output.status.code())
}

/// Returns the output and the exit code of a command, for snapshots.
pub fn transcript(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let code = output.status.code().expect("no signal ended it");
    let (stdout, stderr) = (text(&output.stdout), without_times(&text(&output.stderr)));
    match stderr.is_empty() {
        true => format!("{stdout}exit code {code}"),
        false => format!("{stdout}on stderr:\n{stderr}exit code {code}"),
    }
}

/// Returns the lines of a server's log in the form of the other commands: `tollgate: ` and `warning: ` in place of time and
/// level, and `file:line:column` at the beginning of problems of a rule file. Other lines stay as they are.
pub fn without_times(log: &str) -> String {
    log.split_inclusive('\n').map(|line| without_time(line).unwrap_or_else(|| line.to_owned())).collect()
}

fn without_time(line: &str) -> Option<String> {
    let (time, rest) = line.split_once(' ')?;
    let is_time = time.len() == "2026-11-15T12:25:53.218Z".len() && time.starts_with("20") && time.ends_with('Z');
    let (level, message) = rest.split_once(": ").filter(|_| is_time)?;
    let warning = match level {
        "info" | "error" => "",
        "warning" => "warning: ",
        _ => return None,
    };
    Some(match position(message) {
        Some(end) => format!("{}{warning}{}", &message[..end], &message[end..]),
        None => format!("tollgate: {warning}{message}"),
    })
}

/// Returns the end of `file:line:column: ` at the beginning of a message.
fn position(message: &str) -> Option<usize> {
    let (place, _) = message.split_once(": ")?;
    let mut parts = place.rsplit(':');
    let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<u32>().is_ok());
    let is_position = is_number(parts.next()) && is_number(parts.next()) && parts.next().is_some();
    // The name of published rules has spaces.
    is_position.then_some(place.len() + 2)
}

/// Returns the path of the built binary. Cargo builds it for the tests of the server, and names it in a variable since
/// version 1.94. Before, it is in the directory above that of the test.
pub fn binary() -> String {
    const NAME: &str = "tollgate";
    let named = std::env::var_os(format!("CARGO_BIN_EXE_{NAME}")).map(PathBuf::from);
    let path = named.unwrap_or_else(|| {
        let test = std::env::current_exe().expect("a test knows its path");
        test.ancestors().nth(2).expect("a test is in a directory of the build").join(NAME)
    });
    assert!(path.exists(), "{} does not exist: run `cargo build -p tollgate-server`", path.display());
    path.into_os_string().into_string().expect("the path is UTF-8")
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments).current_dir(folder);
    command
}
