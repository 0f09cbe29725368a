//! Counts by surface: a protocol that clients of the server use.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use crate::metrics::Page;
use crate::notice;

/// The shortest time between two log lines about a listener without room.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// A protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Surface {
    Http,
    Grpc,
    Resp,
    Admin,
}

impl Surface {
    /// All surfaces, in declaration order.
    pub(crate) const ALL: [Self; 4] = [Self::Http, Self::Grpc, Self::Resp, Self::Admin];

    /// Returns the label in metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Resp => "resp",
            Self::Admin => "admin",
        }
    }
}

/// Writes the key of the rule file.
impl fmt::Display for Surface {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Admin => out.write_str("admin"),
            service => write!(out, "service.{}", service.as_str()),
        }
    }
}

/// The counts of all surfaces.
#[derive(Debug)]
pub(crate) struct Surfaces {
    started: Instant,
    counts: [Counts; Surface::ALL.len()],
}

/// The counts of a surface.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counts {
    /// Open connections.
    connections: AtomicI64,
    /// Connections that were refused because there was no room.
    refused: AtomicU64,
    /// When the last log line about them was written, in seconds after the start, plus 1. 0 if there was none.
    warned: AtomicU64,
}

/// A connection that is counted until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    surfaces: Arc<Surfaces>,
    surface: Surface,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.surfaces.of(self.surface).connections.fetch_sub(1, Relaxed);
    }
}

impl Default for Surfaces {
    fn default() -> Self {
        Self { started: Instant::now(), counts: Default::default() }
    }
}

impl Surfaces {
    fn of(&self, surface: Surface) -> &Counts {
        &self.counts[surface as usize]
    }

    /// Counts a connection.
    pub(crate) fn open(self: &Arc<Self>, surface: Surface) -> OpenConnection {
        self.of(surface).connections.fetch_add(1, Relaxed);
        OpenConnection { surfaces: Arc::clone(self), surface }
    }

    /// Counts a connection that was refused because there are `most` already, and warns about it once a minute.
    pub(crate) fn refused(&self, surface: Surface, most: u32) {
        let counts = self.of(surface);
        counts.refused.fetch_add(1, Relaxed);
        let (now, last) = (self.started.elapsed().as_secs() + 1, counts.warned.load(Relaxed));
        if last != 0 && now < last + WARN_INTERVAL.as_secs() {
            return;
        }
        if counts.warned.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            notice::warn(format_args!(
                "{surface} has {most} connections and refuses further ones: raise {surface}.max_connections, or look \
                 for clients that do not reuse or close connections"
            ));
        }
    }

    pub(crate) fn write_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        let each = || Surface::ALL.iter().map(|surface| ([("surface", surface.as_str())], self.of(*surface)));
        let rows = each().map(|(labels, counts)| (labels, counts.connections.load(Relaxed)));
        page.gauges("tollgate_service_connections", "Open connections, by surface", rows)?;
        let rows = each().map(|(labels, counts)| (labels, counts.refused.load(Relaxed)));
        let help = "Connections refused because max_connections was reached, by surface";
        page.counters("tollgate_service_connections_refused", help, rows)
    }
}
