//! The state of a worker that all its connections share.

pub(super) mod thread;

use std::cell::{RefCell, RefMut};
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use arc_swap::{ArcSwap, Cache};
use http::HeaderValue;
use tokio::sync::Notify;
use tollgate_http::Refusal;
use tollgate_http::internal::{HeaderLine, ReusedResponse};
use tollgate_http1::InvalidHead;
use tollgate_net::deadline::{Tick, Ticks};
use tollgate_net::stream::INPUT_BYTES;
use tollgate_rules::Facts;
use tollgate_rules::internal::CachedGate;
use tollgate_rules::{Check, Gate, Outcome};
use tollgate_telemetry::decisions::LastLimit;

use super::client::Peer;
use super::failure::Failure;
use super::head::upstream_head::RequestIds;
use super::per_address::{self, PerAddress};
use super::proxy::Rejection;
use super::site::Site;
use super::splice::WorkerPipe;
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

/// A refused request.
#[derive(Clone, Copy)]
pub(super) enum Refused<'a> {
    /// Its head could not be parsed.
    Unparsed(InvalidHead),
    /// Its head is malformed or ambiguous.
    Rejected(&'a Rejection),
    /// By the limits.
    Denied(&'a Outcome),
}

impl Refused<'_> {
    fn is_strike(self) -> bool {
        match self {
            Self::Unparsed(invalid) => invalid.is_strike(),
            Self::Rejected(Rejection::Failure(failure)) => failure.is_strike(),
            Self::Rejected(Rejection::Unreadable(_)) => true,
            // Several values of one key part. Other refusals count in the limit itself.
            Self::Denied(outcome) => matches!(outcome.refusal(), Some(Refusal::Unreadable(_))),
        }
    }
}

impl Worker {
    /// Counts a refused request with these headers as a strike against its client, if no limit has counted it and the
    /// client is at fault. To be called for every request that is refused before a limit has counted it.
    pub(super) fn note_refused(&self, refused: Refused<'_>, peer: Peer<'_>, lines: &[HeaderLine<'_>]) {
        if !refused.is_strike() {
            return;
        }
        if let Check::Pending(strike) = self.gate.strike(&peer.add_to(Facts::new("", "/").headers(lines))) {
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
            self.tally.refused_by_address.add(1);
            self.per_address.warn(address, site.max_per_address, self.ticks.now());
        }
        entered.map(Some).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
    }

    /// Returns whether clients are asked to close their connections.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Waits for the delay that a limit imposes. Fails if too many requests wait.
    pub(super) async fn wait_in_queue(&self, delay: Duration, max_queued: u32) -> Result<(), Failure> {
        let _permit = QueuePermit::enter(&self.queued, max_queued).ok_or(Failure::QueueFull)?;
        tokio::time::sleep(delay).await;
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
pub(super) struct Shutdown {
    /// Notified when idle connections have to close.
    pub(super) idle: Notify,
    pub(super) is_idle: AtomicBool,
    /// Notified when HTTP/2 clients have to be sent GOAWAY.
    pub(super) goaway: Notify,
    pub(super) is_goaway: AtomicBool,
}

impl Shutdown {
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

    /// Waits for a future. Returns `None` if idle connections have to close before.
    pub(super) async fn unless_over<T>(&self, something: impl Future<Output = T>) -> Option<T> {
        let mut over = pin!(self.idle.notified());
        // A later stop wakes this task; an earlier one is noticed here.
        over.as_mut().enable();
        if self.is_over() {
            return None;
        }
        tokio::select! {
            something = something => Some(something),
            () = over => None,
        }
    }

    /// Passes this signal on to another one, forever.
    pub(super) async fn pass_on(&self, other: &Self) {
        let (mut goaway, mut idle) = (pin!(self.goaway.notified()), pin!(self.idle.notified()));
        // A signal from now on resolves them; an earlier one has set its flag.
        goaway.as_mut().enable();
        idle.as_mut().enable();
        if !self.is_goaway.load(Relaxed) {
            goaway.await;
        }
        other.send_goaway();
        if !self.is_over() {
            idle.await;
        }
        other.end_idle();
        std::future::pending().await
    }
}

/// The maximum size of a buffer that is kept for the next message.
const KEPT_BYTES: usize = 128 << 10;

/// The shared buffers of a worker.
pub(in crate::gateway) struct Scratch {
    pub(in crate::gateway) input: Box<[u8]>,
    pub(in crate::gateway) buffers: WorkerBuffers,
    pub(in crate::gateway) current: CurrentConfig,
    /// For long bodies.
    pub(in crate::gateway) pipe: WorkerPipe,
}

/// The buffers for one message.
#[derive(Default)]
pub(in crate::gateway) struct WorkerBuffers {
    /// The bytes to be written.
    pub(in crate::gateway) out: Vec<u8>,
    pub(in crate::gateway) date: Date,
    /// The last refusal, which is reused if the next one is the same.
    pub(in crate::gateway) last_refusal: ReusedResponse,
    /// The limit that decided last. It often decides next, too.
    pub(in crate::gateway) last_noted: LastLimit,
}

/// The current site and rules, cached until they change.
#[derive(Default)]
pub(in crate::gateway) struct CurrentConfig(Option<(CachedSite, CachedGate)>);

type CachedSite = Cache<Arc<ArcSwap<Site>>, Arc<Site>>;

thread_local! {
    /// The buffers of this thread's worker. Never freed, since workers live as long as the process.
    static SCRATCH: &'static RefCell<Scratch> = Box::leak(Box::new(RefCell::new(Scratch::new())));
}

/// Borrows the buffers of this thread. They must be returned before the next borrow.
pub(in crate::gateway) fn scratch() -> RefMut<'static, Scratch> {
    SCRATCH.with(|scratch| scratch.borrow_mut())
}

/// The `Date` header of responses.
pub(in crate::gateway) struct Date {
    line: String,
    value: HeaderValue,
    of: Option<Tick>,
}

impl Scratch {
    fn new() -> Self {
        Self {
            input: vec![0; INPUT_BYTES].into(),
            buffers: WorkerBuffers::default(),
            current: CurrentConfig::default(),
            pipe: WorkerPipe::default(),
        }
    }

    /// Drops a site and rules that are no longer current, so that the site's connections are closed.
    pub(in crate::gateway) fn renew(&mut self, worker: &Worker) {
        self.current.load(worker).1.renew();
    }
}

impl CurrentConfig {
    /// Returns the current site and gate of the worker.
    pub(in crate::gateway) fn load(&mut self, worker: &Worker) -> (&Arc<Site>, &mut CachedGate) {
        let cached_pair = || (Cache::new(Arc::clone(&worker.site)), worker.gate.cached());
        let (site, cached) = self.0.get_or_insert_with(cached_pair);
        (site.load(), cached)
    }
}

impl WorkerBuffers {
    /// Clears the content and keeps the memory.
    pub(in crate::gateway) fn clear(&mut self) {
        self.out.clear();
        self.out.shrink_to(KEPT_BYTES);
    }
}

impl Date {
    /// Returns the whole line, as HTTP/1 sends it.
    pub(in crate::gateway) fn line(&mut self, now: Tick) -> &[u8] {
        self.renew(now);
        self.line.as_bytes()
    }

    pub(in crate::gateway) fn value(&mut self, now: Tick) -> HeaderValue {
        self.renew(now);
        self.value.clone()
    }

    fn renew(&mut self, now: Tick) {
        if self.of != Some(now) {
            let date = httpdate::fmt_http_date(wall_clock());
            self.line = format!("date: {date}\r\n");
            // A date is always a valid header value.
            self.value = HeaderValue::try_from(date).unwrap_or(HeaderValue::from_static(""));
            self.of = Some(now);
        }
    }
}

impl Default for Date {
    fn default() -> Self {
        Self { line: String::new(), value: HeaderValue::from_static(""), of: None }
    }
}

#[expect(clippy::disallowed_methods, reason = "the `Date` header is wall-clock time; no decision depends on it")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
