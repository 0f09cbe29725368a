//! Memory that all connections of a worker use by turns: what is in it is read and written between two waits.
//!
//! So a connection that waits holds no buffers, and what a request is worked on with is in the cache already.

use std::cell::{RefCell, RefMut};
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::{ArcSwap, Cache};
use tollgate::internal::{CachedGate, ReusedResponse};

use super::super::exchange::Worker;
use super::super::site::Site;
use super::super::ticks::Tick;
use crate::decisions::LastLimit;

/// As much is read at once. A longer head is not read in the lane.
pub(super) const INPUT_BYTES: usize = 64 << 10;

/// A buffer that one message has made longer than this is not kept.
const KEPT_BYTES: usize = 128 << 10;

/// What a worker reads into, and what it works on.
pub(in super::super) struct Scratch {
    pub(super) input: Box<[u8]>,
    pub(super) buffers: WorkerBuffers,
    pub(super) current: CurrentConfig,
}

/// What a message is worked on with.
#[derive(Default)]
pub(super) struct WorkerBuffers {
    /// What is about to be written.
    pub(super) out: Vec<u8>,
    pub(super) date: Date,
    /// What a client was refused with last.
    pub(super) last_refusal: ReusedResponse,
    /// The limit that decided last, which is often the one that decides next.
    pub(super) last_noted: LastLimit,
}

/// The site and the rules in force, at hand: they are looked for only when they have changed.
#[derive(Default)]
pub(in super::super) struct CurrentConfig(Option<(CachedSite, CachedGate)>);

type CachedSite = Cache<Arc<ArcSwap<Site>>, Arc<Site>>;

thread_local! {
    /// That of this thread's worker. It lives as long as the process, as workers do.
    static SCRATCH: &'static RefCell<Scratch> = Box::leak(Box::new(RefCell::new(Scratch::new())));
}

/// What this thread works with. It has to be given back before anybody else asks.
pub(in super::super) fn scratch() -> RefMut<'static, Scratch> {
    SCRATCH.with(|scratch| scratch.borrow_mut())
}

/// The date of answers, as a line of their heads.
#[derive(Default)]
pub(super) struct Date {
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

    /// Lets go of a site that is not in force any more, so that its connections end, and of such rules.
    pub(in super::super) fn renew(&mut self, worker: &Worker) {
        self.current.load(worker).1.renew();
    }
}

impl CurrentConfig {
    /// That of the worker, of which a thread has one.
    pub(super) fn load(&mut self, worker: &Worker) -> (&Arc<Site>, &mut CachedGate) {
        let cached_pair = || (Cache::new(Arc::clone(&worker.site)), worker.gate.cached());
        let (site, cached) = self.0.get_or_insert_with(cached_pair);
        (site.load(), cached)
    }
}

impl WorkerBuffers {
    /// Nothing of the message before stays, but for the memory.
    pub(super) fn clear(&mut self) {
        self.out.clear();
        self.out.shrink_to(KEPT_BYTES);
    }
}

impl Date {
    pub(super) fn line(&mut self, now: Tick) -> &[u8] {
        if self.of != Some(now) {
            self.line = format!("date: {}\r\n", httpdate::fmt_http_date(wall_clock()));
            self.of = Some(now);
        }
        self.line.as_bytes()
    }
}

#[expect(clippy::disallowed_methods, reason = "the date of an answer is the wall clock's, and decides nothing")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
