//! Counts by surface: a protocol that clients of the server use.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::http::Response;
use tokio::time::Instant;
use tollgate_net::tls::CertificateReloads;
use tollgate_telemetry::notice;
use tollgate_telemetry::page::Page;

use crate::gateway::{Closings, Misuse};
use crate::service::tokens::Tokens;

/// The shortest time between two log lines about a listener without room.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// A protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Surface {
    Http,
    Grpc,
    Resp,
    /// Requests of proxies at `/v1/authorize`. Their connections are those of HTTP.
    Authorize,
    Admin,
}

impl Surface {
    /// All surfaces, in declaration order.
    pub(crate) const ALL: [Self; 5] = [Self::Http, Self::Grpc, Self::Resp, Self::Authorize, Self::Admin];

    /// Returns the label in metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Resp => "resp",
            Self::Authorize => "authorize",
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

/// The result of a request, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// Answered. A decision of the service may be a denial.
    Ok,
    /// Denied at `/v1/authorize`.
    Denied,
    /// The request is invalid.
    Invalid,
    Unauthenticated,
    /// The server or the store failed.
    Failed,
}

impl RequestOutcome {
    /// All outcomes, in declaration order.
    const ALL: [Self; 5] = [Self::Ok, Self::Denied, Self::Invalid, Self::Unauthenticated, Self::Failed];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Denied => "denied",
            Self::Invalid => "invalid",
            Self::Unauthenticated => "unauthenticated",
            Self::Failed => "failed",
        }
    }

    /// Returns the outcome of a request by its response. gRPC has its own status, in the head if there is no message.
    pub(crate) fn of<B>(response: &Response<B>) -> Self {
        if let Some(status) = response.headers().get("grpc-status") {
            return match status.as_bytes() {
                b"0" => Self::Ok,
                b"16" => Self::Unauthenticated,
                b"2" | b"4" | b"13" | b"14" | b"15" => Self::Failed,
                _ => Self::Invalid,
            };
        }
        match response.status().as_u16() {
            ..400 => Self::Ok,
            401 => Self::Unauthenticated,
            403 | 429 => Self::Denied,
            400..500 => Self::Invalid,
            _ => Self::Failed,
        }
    }
}

/// The upper bounds of the buckets of durations, in nanoseconds.
const BUCKETS: [u64; 13] = [
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    1_000_000_000,
];

/// A reading of the processor's counter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment(u64);

/// The counts of all surfaces.
#[derive(Debug)]
pub(crate) struct Surfaces {
    started: Instant,
    clock: quanta::Clock,
    closings: Closings,
    counts: [Counts; Surface::ALL.len()],
    /// The certificates of listeners with TLS, which own them.
    certificates: Mutex<Vec<(SocketAddr, Weak<CertificateReloads>)>>,
    /// The tokens of listeners, which own them.
    tokens: Mutex<Vec<(Surface, Weak<Tokens>)>>,
}

/// The counts of a surface.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counts {
    /// Open connections.
    connections: AtomicI64,
    /// Connections that were refused because there was no room.
    refused: AtomicU64,
    /// HTTP/2 connections that were closed because of too many frames without effect.
    closed: AtomicU64,
    /// Idle connections that were closed to make room for new ones.
    closed_idle: AtomicU64,
    /// When the last log line about refused connections was written, in seconds after the start, plus 1. 0 if there was
    /// none.
    warned_of_refused: AtomicU64,
    /// The same for idle connections that were closed.
    warned_of_idle: AtomicU64,
    /// Requests, by [`RequestOutcome::ALL`].
    requests: [AtomicU64; RequestOutcome::ALL.len()],
    /// Requests by duration; the last bucket has no upper bound.
    durations: [AtomicU64; BUCKETS.len() + 1],
    /// The sum of all durations.
    nanos: AtomicU64,
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
        Self {
            started: Instant::now(),
            clock: quanta::Clock::new(),
            closings: Closings::default(),
            counts: Default::default(),
            certificates: Mutex::default(),
            tokens: Mutex::default(),
        }
    }
}

impl Surfaces {
    fn of(&self, surface: Surface) -> &Counts {
        &self.counts[surface as usize]
    }

    /// Includes the certificates of a listener in the metrics, until the listener drops them.
    pub(crate) fn watch_certificates(&self, address: SocketAddr, reloads: &Arc<CertificateReloads>) {
        let mut all = self.certificates.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, reloads)| reloads.strong_count() > 0);
        all.push((address, Arc::downgrade(reloads)));
    }

    /// Returns the certificate reloads of each TLS listener, by its address.
    pub(crate) fn certificate_reloads(&self) -> Vec<(SocketAddr, Arc<CertificateReloads>)> {
        let all = self.certificates.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(|(address, reloads)| Some((*address, reloads.upgrade()?))).collect()
    }

    /// Includes the tokens of a listener in the metrics, until the listener drops them.
    pub(crate) fn watch_tokens(&self, surface: Surface, tokens: &Arc<Tokens>) {
        let mut all = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(other, tokens)| *other != surface && tokens.strong_count() > 0);
        all.push((surface, Arc::downgrade(tokens)));
    }

    /// Returns the current time, for [`observe`](Self::observe).
    pub(crate) fn now(&self) -> Moment {
        Moment(self.clock.raw())
    }

    /// Counts a request that ends now.
    pub(crate) fn observe(&self, surface: Surface, outcome: RequestOutcome, began: Moment) {
        self.observe_all(surface, (outcome, 1), began);
    }

    /// Counts requests that were answered together.
    pub(crate) fn observe_all(&self, surface: Surface, (outcome, count): (RequestOutcome, u64), began: Moment) {
        let nanos = self.clock.delta_as_nanos(began.0, self.clock.raw());
        let bucket = BUCKETS.iter().position(|bound| nanos <= *bound).unwrap_or(BUCKETS.len());
        let counts = self.of(surface);
        counts.requests[outcome as usize].fetch_add(count, Relaxed);
        counts.durations[bucket].fetch_add(count, Relaxed);
        counts.nanos.fetch_add(nanos.saturating_mul(count), Relaxed);
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
        self.warn_of_bound(&counts.warned_of_refused, surface, (most, "refuses further ones"));
    }

    /// Counts an idle connection that was closed for a new one, because there are `most` already, and warns about it once a
    /// minute.
    pub(crate) fn closed_idle(&self, surface: Surface, most: u32) {
        let counts = self.of(surface);
        counts.closed_idle.fetch_add(1, Relaxed);
        self.warn_of_bound(&counts.warned_of_idle, surface, (most, "closes idle ones for new clients"));
    }

    fn warn_of_bound(&self, warned: &AtomicU64, surface: Surface, (most, what_it_does): (u32, &str)) {
        let (now, last) = (self.started.elapsed().as_secs() + 1, warned.load(Relaxed));
        if last != 0 && now < last + WARN_INTERVAL.as_secs() {
            return;
        }
        if warned.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            notice::warn(format_args!(
                "{surface} has {most} connections and {what_it_does}: raise {surface}.max_connections, or look \
                 for clients that do not reuse or close connections"
            ));
        }
    }

    /// Counts and logs an HTTP/2 connection that is closed because of too many frames without effect.
    pub(crate) fn closed(&self, surface: Surface, peer: SocketAddr) {
        self.of(surface).closed.fetch_add(1, Relaxed);
        let tenths = self.started.elapsed().as_millis() / 100;
        self.closings.log(
            Misuse::ControlFrameFlood,
            peer.ip().to_canonical(),
            u64::try_from(tenths).unwrap_or(u64::MAX),
        );
    }

    pub(crate) fn write_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        let each = || Surface::ALL.iter().map(|surface| ([("surface", surface.as_str())], self.of(*surface)));
        // The connections of `authorize` are those of `http`.
        let listening = || each().zip(Surface::ALL).filter(|(_, surface)| *surface != Surface::Authorize);
        let rows = listening().map(|((labels, counts), _)| (labels, counts.connections.load(Relaxed)));
        page.gauges("tollgate_service_connections", "Open connections, by surface", rows)?;
        let rows = listening().map(|((labels, counts), _)| (labels, counts.refused.load(Relaxed)));
        let help = "Connections refused because max_connections was reached, by surface";
        page.counters("tollgate_service_connections_refused", help, rows)?;
        let rows = listening().flat_map(|(([surface], counts), _)| {
            let reasons = [("control_frame_flood", &counts.closed), ("idle", &counts.closed_idle)];
            reasons.map(|(reason, count)| ([surface, ("reason", reason)], count.load(Relaxed)))
        });
        let help = "Connections closed because of HTTP/2 frames without effect, or idle at max_connections, by surface";
        page.counters("tollgate_service_connections_closed", help, rows)?;
        let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let rows = tokens.iter().filter_map(|(surface, tokens)| {
            let count = i64::try_from(tokens.upgrade()?.count()).unwrap_or(i64::MAX);
            Some(([("surface", surface.as_str())], count))
        });
        page.gauges("tollgate_valid_tokens", "Valid tokens in the tokens_file of a listener, by surface", rows)?;
        let rows = each().flat_map(|([surface], counts)| {
            let outcomes = RequestOutcome::ALL.iter().zip(&counts.requests);
            outcomes.map(move |(outcome, count)| ([surface, ("outcome", outcome.as_str())], count.load(Relaxed)))
        });
        page.counters("tollgate_service_requests", "Requests by surface and outcome", rows)?;
        #[expect(clippy::cast_precision_loss, reason = "a rounded sum is precise enough")]
        let seconds = |nanos: u64| nanos as f64 / 1e9;
        let rows = each().map(|(labels, counts)| {
            let bounds = BUCKETS.iter().map(|bound| seconds(*bound)).chain([f64::INFINITY]);
            let buckets = bounds.zip(&counts.durations).map(|(bound, count)| (bound, count.load(Relaxed)));
            (labels, seconds(counts.nanos.load(Relaxed)), buckets.collect())
        });
        page.histograms("tollgate_service_duration_seconds", "Time to answer a request, by surface", rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_telemetry::notice::captured::lines_of;

    #[test]
    fn listeners_with_all_their_connections_are_logged_once_a_minute_with_the_fix() {
        let surfaces = Surfaces::default();
        let lines = lines_of(|| {
            for _ in 0..2 {
                surfaces.refused(Surface::Http, 4096);
                surfaces.closed_idle(Surface::Resp, 2000);
            }
            surfaces.refused(Surface::Admin, 8);
        });
        insta::assert_snapshot!(lines);
    }
}
