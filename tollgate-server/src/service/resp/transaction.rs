//! Transactions: the commands that a client queues between `MULTI` and `EXEC`.
//!
//! Clients send a pipeline as a transaction by default. Its commands are executed in order by `EXEC`, each by itself. If
//! one of them could not be queued, none is executed.

use super::frame::{self, Arguments};

/// The most commands in a queue: as many as the checks in one array over HTTP.
const MAX_COMMANDS: usize = 1_000;
/// The most bytes in a queue. Every connection may have one.
const MAX_BYTES: usize = 256 * 1024;

/// The commands of a client since `MULTI`.
#[derive(Default)]
pub(super) struct Transaction {
    /// The requests, as the client sent them.
    requests: Vec<u8>,
    commands: usize,
    is_aborted: bool,
}

/// Queued commands that have to be executed.
pub(super) struct Queued {
    requests: Vec<u8>,
    pub(super) commands: usize,
}

impl Transaction {
    /// Queues a request. Returns the problem if there is no room for it.
    pub(super) fn push(&mut self, request: &[u8]) -> Result<(), String> {
        if self.is_aborted {
            // It will not be executed.
            return Ok(());
        }
        if self.commands == MAX_COMMANDS {
            return Err(format!("the transaction has more than {MAX_COMMANDS} commands: send EXEC earlier"));
        }
        if self.requests.len() + request.len() > MAX_BYTES {
            return Err(format!("the transaction has more than {MAX_BYTES} bytes: send EXEC earlier"));
        }
        self.requests.extend_from_slice(request);
        self.commands += 1;
        Ok(())
    }

    /// Drops the queued commands: `EXEC` executes none.
    pub(super) fn abort(&mut self) {
        *self = Self { is_aborted: true, ..Self::default() };
    }

    /// Returns the commands to execute, or `None` if one could not be queued.
    pub(super) fn into_queued(self) -> Option<Queued> {
        (!self.is_aborted).then_some(Queued { requests: self.requests, commands: self.commands })
    }
}

impl Queued {
    /// Returns the commands in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Arguments<'_>> {
        let mut rest = &self.requests[..];
        std::iter::from_fn(move || {
            // They were parsed when they were queued.
            let (arguments, used) = frame::parse(rest).ok()??;
            rest = &rest[used..];
            Some(arguments)
        })
    }
}
