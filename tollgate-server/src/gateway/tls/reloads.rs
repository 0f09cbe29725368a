//! The certificates in use, and the results of reloads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;

use super::{Tls, Validity};

/// Counts the reloads of one listener.
#[derive(Debug, Default)]
pub(crate) struct CertificateReloads {
    pub(crate) applied: AtomicU64,
    pub(crate) refused: AtomicU64,
    last_was_refused: AtomicBool,
    /// The certificates in use.
    pub(crate) in_force: ArcSwap<Vec<Validity>>,
}

impl CertificateReloads {
    /// Starts with the certificates that a listener has at first.
    pub(crate) fn of(tls: &Tls) -> Self {
        let reloads = Self::default();
        reloads.note_good(&tls.validities);
        reloads
    }

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

    pub(crate) fn last_was_good(&self) -> bool {
        !self.last_was_refused.load(Relaxed)
    }
}
