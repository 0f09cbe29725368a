//! How far the server is: not yet ready, ready, or about to end.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use crate::gateway::Gateway;

/// Where the server stands.
#[derive(Default)]
pub(crate) struct Readiness {
    /// Everything listens; the gateway is there if the rule file has one.
    started: OnceLock<Option<Arc<Gateway>>>,
    stopping: AtomicBool,
}

impl Readiness {
    /// Everything listens.
    pub(crate) fn set_started(&self, gateway: Option<Arc<Gateway>>) {
        // A server starts once.
        _ = self.started.set(gateway);
    }

    /// From here on no more requests are wanted.
    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Relaxed);
    }

    pub(crate) fn gateway(&self) -> Option<&Arc<Gateway>> {
        self.started.get().and_then(Option::as_ref)
    }

    /// Whether requests are wanted, or else why not.
    pub(crate) fn check_ready(&self) -> Result<(), &'static str> {
        match (self.stopping.load(Relaxed), self.started.get()) {
            (true, _) => Err("stopping"),
            (false, None) => Err("starting"),
            (false, Some(_)) => Ok(()),
        }
    }
}
