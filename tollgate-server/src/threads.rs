//! Checks that the process may start the threads that it needs.
//!
//! tokio panics if it cannot start a thread. So all threads are started once beforehand, at the same time, and a
//! process that may not have them exits with a message.

use std::fmt;
use std::io;
use std::sync::Mutex;
use std::thread;

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
    let gate = Mutex::new(());
    thread::scope(|scope| {
        // All of them wait for this lock, so that they exist at the same time.
        let _held = gate.lock();
        (0..needed).try_for_each(|_| thread::Builder::new().spawn_scoped(scope, || drop(gate.lock())).map(drop))
    })
    .map_err(|source| TooFewThreads { needed, source })
}
