//! A child process that does not outlive its owner.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Child, Command, Stdio};

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
