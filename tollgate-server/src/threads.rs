//! Checks that the process may start the threads that it needs.
//!
//! tokio panics if it cannot start a thread, and may then wait forever for those that it has started. So all threads are
//! started once beforehand, at the same time, and a process that may not have them exits with a message.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

/// Threads for blocking calls, such as DNS lookups and reading files, in addition to the workers of a runtime.
const BLOCKING: usize = 2;

/// The process may not start enough threads.
#[derive(Debug)]
pub(crate) struct TooFewThreads {
    needed: usize,
    source: io::Error,
}

impl fmt::Display for TooFewThreads {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, source } = self;
        write!(
            out,
            "cannot start {needed} more threads: {source}: raise the limit (`ulimit -u` in a shell, TasksMax= under \
             systemd, --pids-limit with Docker), or set fewer gateway.workers"
        )
    }
}

/// Returns the number of workers of the runtime that commands run on.
pub(crate) fn runtime_workers() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Checks that `workers` more threads can run, and a few for blocking calls.
pub(crate) fn check(workers: usize) -> Result<(), TooFewThreads> {
    let needed = workers + BLOCKING;
    let (gate, started) = (Mutex::new(()), Mutex::new(Vec::new()));
    let wait = || {
        let id = kernel_name();
        // All of them wait for this lock, so that they exist at the same time.
        drop(gate.lock());
        if let (Some(id), Ok(mut started)) = (id, started.lock()) {
            started.push(id);
        }
    };
    let checked = thread::scope(|scope| {
        let _held = gate.lock();
        (0..needed).try_for_each(|_| thread::Builder::new().spawn_scoped(scope, wait).map(drop))
    });
    started.into_inner().unwrap_or_default().iter().for_each(|thread| wait_until_gone(thread));
    checked.map_err(|source| TooFewThreads { needed, source })
}

/// Returns the folder in which Linux describes this thread.
fn kernel_name() -> Option<PathBuf> {
    Some(PathBuf::from("/proc").join(fs::read_link("/proc/thread-self").ok()?))
}

/// Waits until a thread that has ended no longer counts against the limit: the kernel forgets it only some time after it
/// was joined.
#[expect(clippy::disallowed_methods, reason = "no runtime exists yet, and nothing else happens at this point")]
fn wait_until_gone(thread: &Path) {
    const STEP: Duration = Duration::from_millis(1);
    const STEPS: u32 = 1000;
    for _ in 0..STEPS {
        if !thread.exists() {
            return;
        }
        thread::sleep(STEP);
    }
}
