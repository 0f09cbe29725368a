//! Metrics of the xDS client: whether it is connected, and the configuration in force.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tollgate_telemetry::page::Page;

/// The status of the client. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct XdsStatus(Arc<Mutex<Inner>>);

#[derive(Clone, Debug, Default)]
struct Inner {
    /// Whether there has been a client. Without one, there are no metrics.
    is_used: bool,
    is_connected: bool,
    accepted: u64,
    rejected: u64,
    version: String,
}

impl XdsStatus {
    pub(super) fn start(&self) {
        self.change(|inner| inner.is_used = true);
    }

    pub(super) fn connected(&self) {
        self.change(|inner| inner.is_connected = true);
    }

    pub(super) fn disconnected(&self) {
        self.change(|inner| inner.is_connected = false);
    }

    pub(super) fn accepted(&self, version: &str) {
        self.change(|inner| {
            inner.accepted += 1;
            version.clone_into(&mut inner.version);
        });
    }

    /// Returns whether a configuration was accepted.
    pub(crate) fn has_configuration(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).accepted > 0
    }

    pub(super) fn rejected(&self) {
        self.change(|inner| inner.rejected += 1);
    }

    fn change(&self, change: impl FnOnce(&mut Inner)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn write_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if !inner.is_used {
            return Ok(());
        }
        let help = "1 if the xDS server is connected, 0 if it is not";
        page.gauge("tollgate_xds_connected", help, i64::from(inner.is_connected))?;
        let counts = [("accepted", inner.accepted), ("rejected", inner.rejected)];
        let counts = counts.into_iter().map(|(result, count)| ([("result", result)], count));
        page.counters("tollgate_xds_responses", "Configurations that the xDS server sent, by result", counts)?;
        let row = ([("version", inner.version.as_str())], 1);
        let help = "Version of the last configuration that was accepted from the xDS server";
        page.gauges("tollgate_xds_info", help, std::iter::once(row))
    }
}
