//! What a worker counts. Each has its own, so that no two processors fight for a counter.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use super::guard::Ambiguity;

/// The counters of one worker.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) connections: AtomicI64,
    pub(super) accepted: AtomicU64,
    pub(super) turned_away: AtomicU64,
    pub(super) ambiguous: AtomicU64,
    /// Answers by the hundreds of their status, from 1xx on.
    pub(super) answers: [AtomicU64; 5],
}

impl Tally {
    pub(super) fn note_ambiguity(&self, _ambiguity: Ambiguity) {
        self.ambiguous.fetch_add(1, Relaxed);
    }

    pub(super) fn note_answer(&self, status: hyper::StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, 5);
        self.answers[class - 1].fetch_add(1, Relaxed);
    }
}
