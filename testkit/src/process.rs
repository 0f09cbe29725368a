//! Child processes that do not outlive their owner.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::wait::wait_until;

/// Signals that freeze and continue a process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGSTOP
    Stop,
    /// SIGCONT
    Continue,
}

/// A child process. It is killed when it is dropped.
pub struct ChildProcess {
    // Not reaped while signals can be sent, so its id cannot have passed to another process.
    child: Child,
    is_stopped: bool,
}

impl ChildProcess {
    /// Runs in `dir`; all it prints is added to `log` there.
    pub fn spawn(binary: &Path, args: &[&str], dir: &Path, log: &str) -> Self {
        let log = OpenOptions::new().create(true).append(true).open(dir.join(log)).expect("the log can be opened");
        let errors = log.try_clone().expect("the log can be opened twice");
        let child = Command::new(binary)
            .args(args)
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .unwrap_or_else(|error| {
                panic!("cannot run {}: {error}: install it, for Redis with tools/install-redis", binary.display())
            });
        Self { child, is_stopped: false }
    }

    /// For a start that is awaited: once this has said yes, the process must not be signalled.
    pub fn has_exited(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns whether [`Signal::Stop`] was the last signal.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Sends a signal.
    pub fn signal(&mut self, signal: Signal) {
        let name = match signal {
            Signal::Stop => "STOP",
            Signal::Continue => "CONT",
        };
        // The shell's own `kill`: the standard library has none that needs no unsafe code.
        let status = Command::new("sh")
            .args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &self.child.id().to_string()])
            .status()
            .expect("there is a shell");
        assert!(status.success(), "SIG{name} reaches a child that runs");
        self.is_stopped = signal == Signal::Stop;
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // SIGKILL ends a stopped process too. Continued first, it could still answer what had queued up.
        // Neither call can fail but for a child that is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server that is not ours, in its own folder, with the processes that it starts. All are killed when it is dropped.
pub struct ForeignServer {
    process: Child,
    folder: TempDir,
}

impl ForeignServer {
    const OUTPUT: &str = "output.txt";

    /// Starts it in a folder. Everything that it prints is in a file there.
    pub fn spawn(mut command: Command, folder: TempDir) -> io::Result<Self> {
        let output = File::create(folder.path().join(Self::OUTPUT))?;
        let errors = output.try_clone()?;
        // Worker processes end with their process group.
        let command = command.current_dir(folder.path()).stdout(output).stderr(errors).process_group(0);
        Ok(Self { process: command.spawn()?, folder })
    }

    /// Waits until it listens on an address. Returns `false` if it ends before that.
    pub fn listens_on(&mut self, address: SocketAddr) -> bool {
        let listens = wait_until(|| {
            if self.process.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Some(false);
            }
            TcpStream::connect(address).is_ok().then_some(true)
        });
        listens == Some(true)
    }

    /// Returns everything that it printed.
    pub fn output(&self) -> String {
        std::fs::read_to_string(self.folder.path().join(Self::OUTPUT)).unwrap_or_default()
    }
}

impl Drop for ForeignServer {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        _ = Command::new("sh").args(["-c", &format!("kill -KILL -{}", self.process.id())]).status();
        _ = self.process.wait();
    }
}
