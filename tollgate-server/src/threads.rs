//! Whether the process may have the threads that it is about to start.
//!
//! tokio panics where it cannot start a thread. So they are tried first, all at the same time, and a process that may not
//! have them ends with a message.

use std::fmt;
use std::io;
use std::sync::Mutex;
use std::thread;

/// For blocking calls beside the workers of a runtime, such as looking up names and reading files.
const BLOCKING: usize = 2;

/// The process may not have the threads that it needs.
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

/// The workers of the runtime that commands run on.
pub(crate) fn runtime_workers() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns whether as many threads can run beside those that do, with some for blocking calls.
pub(crate) fn check(workers: usize) -> Result<(), TooFewThreads> {
    let needed = workers + BLOCKING;
    let gate = Mutex::new(());
    thread::scope(|scope| {
        // All of them wait here, so that they are there at the same time.
        let _held = gate.lock();
        (0..needed).try_for_each(|_| thread::Builder::new().spawn_scoped(scope, || drop(gate.lock())).map(drop))
    })
    .map_err(|source| TooFewThreads { needed, source })
}
