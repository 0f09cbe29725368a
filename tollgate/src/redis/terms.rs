//! Terms: a limit in the form that the scripts take.

use std::sync::atomic::{AtomicU32, Ordering};

use smallvec::SmallVec;

use super::lean;
use super::stores::StoreIndex;
use crate::algorithm::portable::Shape;
use crate::algorithm::succession::Signature;
use crate::algorithm::{Compiled, MAX_QUOTA};

/// A limit in the form that the scripts take.
#[derive(Debug)]
pub(super) struct Terms {
    /// The store that has the keys.
    pub(super) store: StoreIndex,
    /// Whether the keys are fields of hashes.
    pub(super) is_compact: bool,
    pub(super) compiled: Compiled,
    pub(super) parameters: SmallVec<[i64; 9]>,
    /// The parameters in the form of the small script.
    lean: SmallVec<[u8; 48]>,
    /// The prefix of every state written under these terms.
    pub(super) signature: Signature,
    /// The signatures of the limit's variants; empty if all have the same.
    pub(super) variants: Vec<Signature>,
    pub(super) shape: Shape,
    /// The number of further requests that go directly to the full script, because a log was too long for the small
    /// one.
    long: AtomicU32,
}

/// Requests after which the small script is tried again on a limit whose log was too long for it.
const LONG_FOR: u32 = 4096;

impl Terms {
    /// Creates the terms of a limit whose keys may have spent up to `ceiling` units, under other configurations.
    pub(super) fn new(compiled: &Compiled, ceiling: u64, variants: Vec<Signature>) -> Self {
        let parameters = compiled.with_ceiling(ceiling).parameters(ceiling);
        let signature = compiled.meaning().signature();
        // The script has already reduced debts that a clock stepping back has left. Other nodes may have raised the
        // quota since, so the reported state must not be reduced again.
        let compiled = compiled.with_ceiling(MAX_QUOTA).with_room();
        let lean = lean::parameters(&compiled, &parameters);
        let (store, shape, long) = (StoreIndex::default(), compiled.shape(), AtomicU32::new(0));
        Self { store, is_compact: false, parameters, lean, signature, variants, shape, compiled, long }
    }

    /// Sets the store that has the keys, and whether they are fields of hashes there.
    pub(super) fn on(self, store: StoreIndex, is_compact: bool) -> Self {
        Self { store, is_compact, ..self }
    }

    pub(super) fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Returns whether the limit's variants have these signatures.
    pub(super) fn has_variants(&self, signatures: &[Signature]) -> bool {
        self.variants == signatures
    }

    /// Encodes the limit for the small script.
    pub(super) fn encode_lean(&self, bytes: &mut Vec<u8>) {
        let kind = self.parameters.first().copied().unwrap_or(0);
        bytes.extend([kind as u8, self.signature.len() as u8]);
        bytes.extend_from_slice(&self.signature);
        bytes.extend_from_slice(&self.lean);
    }

    /// Returns whether the small script is likely to decide a request under these terms.
    pub(super) fn is_taken_lean(&self) -> bool {
        let long = self.long.load(Ordering::Relaxed);
        if long > 0 {
            // A race between two requests counts one of them only: harmless.
            self.long.store(long - 1, Ordering::Relaxed);
        }
        long == 0 && self.compiled.is_taken_lean()
    }

    /// Records that the small script could not decide a request, perhaps because a log is too long for it.
    pub(super) fn expect_long_log(&self) {
        if self.compiled.may_be_long_log() {
            self.long.store(LONG_FOR, Ordering::Relaxed);
        }
    }

    /// Returns whether a denial leaves the state unchanged, so that it can be cached.
    pub(super) fn keeps_denials(&self) -> bool {
        !self.compiled.counts_denied()
    }
}
