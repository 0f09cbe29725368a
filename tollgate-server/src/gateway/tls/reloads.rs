//! The certificates in use, and the results of reloads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;

use super::Validity;

/// Counts the reloads of one listener.
#[derive(Debug, Default)]
pub(crate) struct CertificateReloads {
    pub(in super::super) applied: AtomicU64,
    pub(in super::super) refused: AtomicU64,
    last_was_refused: AtomicBool,
    /// The certificates in use.
    pub(in super::super) in_force: ArcSwap<Vec<Validity>>,
}

impl CertificateReloads {
    pub(in super::super) fn note_applied(&self, certificates: &Arc<Vec<Validity>>) {
        self.applied.fetch_add(1, Relaxed);
        self.note_good(certificates);
    }

    pub(in super::super) fn note_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
        self.last_was_refused.store(true, Relaxed);
    }

    /// Records certificates that were read with the rule file.
    pub(in super::super) fn note_good(&self, certificates: &Arc<Vec<Validity>>) {
        self.in_force.store(Arc::clone(certificates));
        self.last_was_refused.store(false, Relaxed);
    }

    pub(in super::super) fn last_was_good(&self) -> bool {
        !self.last_was_refused.load(Relaxed)
    }
}
