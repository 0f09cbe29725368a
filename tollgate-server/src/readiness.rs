//! Readiness of the server for `/readyz`: starting, ready or stopping.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::gateway::Gateway;
use crate::service::xds::XdsStatus;

/// The longest wait for the first configuration of the xDS server. After that, the limits of the rule file have to do,
/// so that a server that is away does not keep all nodes from starting.
const XDS_WAIT: Duration = Duration::from_secs(30);

/// The state that `/readyz` reports, and gRPC health checks.
#[derive(Default)]
pub(crate) struct Readiness {
    /// Set once everything listens. Holds the gateway, if the rule file has one.
    started: OnceLock<Option<Arc<Gateway>>>,
    stopping: AtomicBool,
    /// The xDS server that sends limits, and the start of the wait for its first configuration.
    xds: OnceLock<(XdsStatus, Instant)>,
    /// Whether the server was ready at its last change, for [`changes`](Self::changes).
    is_ready: watch::Sender<bool>,
}

impl Readiness {
    /// Marks the server as started: everything listens.
    pub(crate) fn set_started(&self, gateway: Option<Arc<Gateway>>) {
        // Only the first call counts.
        _ = self.started.set(gateway);
        self.is_ready.send_replace(self.check_ready().is_ok());
    }

    /// Waits for the first configuration of the xDS server before the server is ready.
    pub(crate) fn await_xds(&self, status: XdsStatus) {
        // Only the first call counts.
        _ = self.xds.set((status, Instant::now()));
    }

    fn awaits_xds(&self) -> bool {
        self.xds.get().is_some_and(|(status, since)| !status.has_configuration() && since.elapsed() < XDS_WAIT)
    }

    /// Marks the server as stopping: load balancers should send no more requests.
    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Relaxed);
        self.is_ready.send_replace(false);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    /// Returns a receiver that changes when the server has started, and when it begins to stop.
    pub(crate) fn changes(&self) -> watch::Receiver<bool> {
        self.is_ready.subscribe()
    }

    pub(crate) fn gateway(&self) -> Option<&Arc<Gateway>> {
        self.started.get().and_then(Option::as_ref)
    }

    /// Returns an error with the reason if the server is not ready for requests.
    pub(crate) fn check_ready(&self) -> Result<(), &'static str> {
        match (self.stopping.load(Relaxed), self.started.get()) {
            (true, _) => Err("stopping"),
            (false, None) => Err("starting"),
            (false, Some(_)) if self.awaits_xds() => Err("waiting for the first configuration of the xDS server"),
            (false, Some(_)) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn xds_server_that_is_away_delays_readiness_for_a_while() {
        let readiness = Readiness::default();
        assert_eq!(readiness.check_ready(), Err("starting"));
        readiness.await_xds(XdsStatus::default());
        readiness.set_started(None);
        assert_eq!(readiness.check_ready(), Err("waiting for the first configuration of the xDS server"));
        tokio::time::advance(XDS_WAIT).await;
        assert_eq!(readiness.check_ready(), Ok(()));
    }
}
