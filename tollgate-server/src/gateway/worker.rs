//! The state of a worker that all its connections share.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use arc_swap::ArcSwap;
use tokio::sync::Notify;
use tollgate::rules::Facts;
use tollgate::{Check, Gate, Outcome};

use super::deadline::Ticks;
use super::failure::Failure;
use super::head::upstream_head::RequestIds;
use super::listener::per_address::{self, PerAddress};
use super::site::Site;
use super::tally::Tally;
use super::upstream::slots::UpstreamSlots;

/// The state that all requests of a worker share.
pub(super) struct Worker {
    pub(super) number: usize,
    pub(super) gate: Gate,
    pub(super) site: Arc<ArcSwap<Site>>,
    pub(super) ticks: Arc<Ticks>,
    pub(super) tally: Arc<Tally>,
    pub(super) ids: RequestIds,
    /// Requests of all workers that wait in the queue of a limit.
    pub(super) queued: Arc<AtomicU32>,
    /// Whether clients are asked to close their connections, because the gateway stops.
    pub(super) closing: Arc<AtomicBool>,
    /// Open connections by client address, of all workers.
    pub(super) per_address: Arc<PerAddress>,
    pub(super) upstream_slots: Arc<UpstreamSlots>,
}

impl Worker {
    /// Counts a malformed request as a strike against the client.
    pub(super) fn strike(&self, facts: &Facts<'_>) {
        if let Check::Pending(strike) = self.gate.strike(facts) {
            // It ends at the store's deadline.
            tokio::spawn(strike);
        }
    }

    /// Counts a connection of an address. Fails if the address has too many. Trusted proxies are not counted, since
    /// they serve many clients.
    pub(super) fn enter(&self, address: IpAddr) -> io::Result<Option<per_address::Counted>> {
        let site = self.site.load();
        if site.proxies.trusts(address) {
            return Ok(None);
        }
        let entered = self.per_address.enter(address, site.max_per_address);
        if entered.is_none() {
            self.tally.turned_away_by_address.add(1);
            self.per_address.warn(address, site.max_per_address, self.ticks.now());
        }
        entered.map(Some).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
    }

    /// Returns whether clients are asked to close their connections.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Waits for the delay that a limit imposes.
    pub(super) async fn wait_in_queue(&self, outcome: &Outcome, site: &Site) -> Result<(), Failure> {
        let _permit = QueuePermit::enter(&self.queued, site.max_queued).ok_or(Failure::QueueFull)?;
        tokio::time::sleep(outcome.delay()).await;
        Ok(())
    }
}

/// A slot among the requests that wait in a queue.
struct QueuePermit<'a>(&'a AtomicU32);

impl<'a> QueuePermit<'a> {
    fn enter(count: &'a AtomicU32, max: u32) -> Option<Self> {
        let queued = count.fetch_add(1, Relaxed);
        let permit = Self(count);
        (queued < max).then_some(permit)
    }
}

impl Drop for QueuePermit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The shutdown signal for all connections.
#[derive(Debug, Default)]
pub(super) struct Stop {
    /// Notified when idle connections have to close.
    pub(super) idle: Notify,
    pub(super) is_idle: AtomicBool,
    /// Notified when HTTP/2 clients have to be sent GOAWAY.
    pub(super) goaway: Notify,
    pub(super) is_goaway: AtomicBool,
}

impl Stop {
    /// Closes idle connections, and sends GOAWAY to HTTP/2 clients.
    pub(super) fn end_idle(&self) {
        self.is_idle.store(true, Relaxed);
        self.idle.notify_waiters();
        self.send_goaway();
    }

    /// Sends GOAWAY to HTTP/2 clients, which send further requests over other connections.
    pub(super) fn send_goaway(&self) {
        self.is_goaway.store(true, Relaxed);
        self.goaway.notify_waiters();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_idle.load(Relaxed)
    }
}
