//! A limit in the form in which the scripts read it.

use std::sync::atomic::{AtomicU32, Ordering};

use smallvec::SmallVec;

use super::lean;
use super::stores::StoreIndex;
use crate::algorithm::portable::Shape;
use crate::algorithm::succession::Signature;
use crate::algorithm::{Compiled, MAX_QUOTA};

/// A limit as the script knows it.
#[derive(Debug)]
pub(super) struct Terms {
    /// The store that has the keys.
    pub(super) store: StoreIndex,
    pub(super) compiled: Compiled,
    pub(super) parameters: SmallVec<[i64; 9]>,
    /// The same for the smaller script.
    lean: SmallVec<[u8; 48]>,
    /// The beginning of every state that these terms write.
    pub(super) signature: Signature,
    /// The signatures of the limit's variants; empty if there are none of another meaning.
    pub(super) variants: Vec<Signature>,
    pub(super) shape: Shape,
    /// How many more requests go to the larger script at once, because a log was longer than the smaller one decides.
    long: AtomicU32,
}

/// Requests after which the smaller script is tried again on a limit whose log was too long for it.
const LONG_FOR: u32 = 4096;

impl Terms {
    /// A limit whose keys may have spent up to `ceiling` units, under other numbers.
    pub(super) fn new(compiled: &Compiled, ceiling: u64, variants: Vec<Signature>) -> Self {
        let parameters = compiled.with_ceiling(ceiling).parameters(ceiling);
        let signature = compiled.meaning().signature();
        // The script has cut what a clock that stepped back has left. Other nodes may have raised the quota since, so
        // that what it reports is never cut again.
        let compiled = compiled.with_ceiling(MAX_QUOTA).with_room();
        let lean = lean::parameters(&compiled, &parameters);
        let (store, shape, long) = (StoreIndex::default(), compiled.shape(), AtomicU32::new(0));
        Self { store, parameters, lean, signature, variants, shape, compiled, long }
    }

    /// Sets the store that has the keys, if that is not the default one.
    pub(super) fn on(self, store: StoreIndex) -> Self {
        Self { store, ..self }
    }

    pub(super) fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Whether the limit's variants have these signatures.
    pub(super) fn has_variants(&self, signatures: &[Signature]) -> bool {
        self.variants == signatures
    }

    /// Writes what the smaller script reads of the limit.
    pub(super) fn encode_lean(&self, bytes: &mut Vec<u8>) {
        let kind = self.parameters.first().copied().unwrap_or(0);
        bytes.extend([kind as u8, self.signature.len() as u8]);
        bytes.extend_from_slice(&self.signature);
        bytes.extend_from_slice(&self.lean);
    }

    /// Whether the smaller script is likely to decide a request under these terms.
    pub(super) fn is_taken_lean(&self) -> bool {
        let long = self.long.load(Ordering::Relaxed);
        if long > 0 {
            // Requests that are lost in a race make it a little longer.
            self.long.store(long - 1, Ordering::Relaxed);
        }
        long == 0 && self.compiled.is_taken_lean()
    }

    /// Notes that the smaller script did not decide a request, perhaps because a log is too long for it.
    pub(super) fn expect_long_log(&self) {
        if self.compiled.may_be_long_log() {
            self.long.store(LONG_FOR, Ordering::Relaxed);
        }
    }

    /// Whether a denial changes nothing, so that it stays true for a while.
    pub(super) fn keeps_denials(&self) -> bool {
        !self.compiled.counts_denied()
    }
}
