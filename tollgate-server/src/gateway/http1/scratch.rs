//! Buffers that all connections of a worker share. They are used only between two waits.
//!
//! So a waiting connection holds no buffers, and the buffers stay in the CPU cache.

use std::cell::{RefCell, RefMut};
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::{ArcSwap, Cache};
use tollgate::internal::{CachedGate, ReusedResponse};

use crate::decisions::LastLimit;
use crate::gateway::deadline::Tick;
use crate::gateway::site::Site;
use crate::gateway::socket::INPUT_BYTES;
use crate::gateway::worker::Worker;

/// The maximum size of a buffer that is kept for the next message.
const KEPT_BYTES: usize = 128 << 10;

/// The shared buffers of a worker.
pub(in crate::gateway) struct Scratch {
    pub(in crate::gateway) input: Box<[u8]>,
    pub(in crate::gateway) buffers: WorkerBuffers,
    pub(in crate::gateway) current: CurrentConfig,
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

/// The `Date` header line of responses.
#[derive(Default)]
pub(in crate::gateway) struct Date {
    line: String,
    of: Option<Tick>,
}

impl Scratch {
    fn new() -> Self {
        Self {
            input: vec![0; INPUT_BYTES].into(),
            buffers: WorkerBuffers::default(),
            current: CurrentConfig::default(),
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
    pub(in crate::gateway) fn line(&mut self, now: Tick) -> &[u8] {
        if self.of != Some(now) {
            self.line = format!("date: {}\r\n", httpdate::fmt_http_date(wall_clock()));
            self.of = Some(now);
        }
        self.line.as_bytes()
    }
}

#[expect(clippy::disallowed_methods, reason = "the `Date` header is wall-clock time; no decision depends on it")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
