//! Readiness of the server for `/readyz`: starting, ready or stopping.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use crate::gateway::Gateway;

/// The state that `/readyz` reports.
#[derive(Default)]
pub(crate) struct Readiness {
    /// Set once everything listens. Holds the gateway, if the rule file has one.
    started: OnceLock<Option<Arc<Gateway>>>,
    stopping: AtomicBool,
}

impl Readiness {
    /// Marks the server as started: everything listens.
    pub(crate) fn set_started(&self, gateway: Option<Arc<Gateway>>) {
        // Only the first call counts.
        _ = self.started.set(gateway);
    }

    /// Marks the server as stopping: load balancers should send no more requests.
    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Relaxed);
    }

    pub(crate) fn gateway(&self) -> Option<&Arc<Gateway>> {
        self.started.get().and_then(Option::as_ref)
    }

    /// Returns an error with the reason if the server is not ready for requests.
    pub(crate) fn check_ready(&self) -> Result<(), &'static str> {
        match (self.stopping.load(Relaxed), self.started.get()) {
            (true, _) => Err("stopping"),
            (false, None) => Err("starting"),
            (false, Some(_)) => Ok(()),
        }
    }
}
