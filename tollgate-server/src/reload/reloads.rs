//! How often rules have changed, and whether the last try was good.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

use crate::metrics::Page;
use crate::seconds::unix_now;

/// Counts reloads.
#[derive(Debug)]
pub(crate) struct Reloads {
    applied: AtomicU64,
    refused: AtomicU64,
    last_was_refused: AtomicBool,
    /// Seconds since the Unix epoch.
    last_at: AtomicI64,
    in_force_since: AtomicI64,
}

impl Reloads {
    /// The rules of the start are in force.
    pub(crate) fn new() -> Self {
        let now = unix_now();
        Self {
            applied: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            last_was_refused: AtomicBool::new(false),
            last_at: AtomicI64::new(now),
            in_force_since: AtomicI64::new(now),
        }
    }

    pub(super) fn note_applied(&self) {
        let now = unix_now();
        self.applied.fetch_add(1, Relaxed);
        self.last_was_refused.store(false, Relaxed);
        self.last_at.store(now, Relaxed);
        self.in_force_since.store(now, Relaxed);
    }

    pub(super) fn note_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
        self.last_was_refused.store(true, Relaxed);
        self.last_at.store(unix_now(), Relaxed);
    }

    /// Rules are in force that once were. Nothing was read: what was refused last still is.
    pub(super) fn note_put_back(&self) {
        self.in_force_since.store(unix_now(), Relaxed);
    }

    pub(crate) fn tell_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        let counts = [("applied", &self.applied), ("refused", &self.refused)];
        let counts = counts.into_iter().map(|(result, count)| ([("result", result)], count.load(Relaxed)));
        page.counters("tollgate_reloads", "Rules that were read again or published, by what became of them", counts)?;
        let is_good = i64::from(!self.last_was_refused.load(Relaxed));
        let help = "1 if the newest rules are in force, 0 if they were refused and those before them are";
        page.gauge("tollgate_last_reload_successful", help, is_good)?;
        let (last, since) = (self.last_at.load(Relaxed), self.in_force_since.load(Relaxed));
        page.gauge("tollgate_last_reload_timestamp_seconds", "When rules were last read, good or bad", last)?;
        page.gauge("tollgate_rules_in_force_timestamp_seconds", "When the rules in force were taken", since)
    }
}
