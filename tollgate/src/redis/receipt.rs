//! Receipts record where each hit of a request took its units, and when. Refunds and corrections go back there.
//!
//! The limits of one request may take their units in different places: from the store, whose servers have different
//! clocks, from slices that were charged earlier, and from this process's memory while a server fails.

use futures_util::future::{join, join_all};
use smallvec::SmallVec;

use super::lease::SliceUnits;
use super::script::ScriptRequest;
use super::{RedisHit, RedisHits, RedisLimiter, StoreError};
use crate::units::Timestamp;

/// Where the units of a hit were taken, and when.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Receipt {
    /// Nothing was taken: the request was denied, or the failure policy allowed it without counting.
    #[default]
    Nothing,
    /// The store took them, at this time by its clock.
    Store { at: Timestamp },
    /// They were taken from a slice of this process.
    Slice(SliceUnits),
    /// They were counted in this process's memory while the store failed.
    Local { at: Timestamp, wall_offset: i64 },
}

impl Receipt {
    /// Returns whether the store counts the units.
    pub(super) fn is_on_store(&self) -> bool {
        matches!(self, Self::Store { .. } | Self::Slice(_))
    }
}

impl RedisLimiter {
    /// Gives the cost of each hit back where it was taken, as far as it still counts there.
    pub(super) async fn give_back(&self, hits: &[RedisHit]) -> Result<(), StoreError> {
        // Hits that were charged together are refunded together.
        let mut charges: SmallVec<[(Timestamp, RedisHits); 1]> = SmallVec::new();
        for hit in hits {
            match hit.receipt {
                Receipt::Store { at } => match charges.iter_mut().find(|(charged_at, _)| *charged_at == at) {
                    Some((_, together)) => together.push(hit.clone()),
                    None => charges.push((at, SmallVec::from_iter([hit.clone()]))),
                },
                Receipt::Local { at, wall_offset } => {
                    self.give_back_locally(hit, at, wall_offset);
                }
                Receipt::Slice(_) | Receipt::Nothing => {}
            }
        }
        let at_store = charges
            .iter()
            .map(|(at, hits)| self.send_each(hits, |script_hits| ScriptRequest::Refund(script_hits, *at)));
        let to_slices = hits.iter().filter_map(|hit| match hit.receipt {
            Receipt::Slice(held) => Some(self.give_back_to_slice(hit, held)),
            _ => None,
        });
        let (at_store, to_slices) = join(join_all(at_store), join_all(to_slices)).await;
        at_store.into_iter().chain(to_slices).collect()
    }

    /// Puts units back into their slice. The units of a slice that has expired go to the store, by the time at which
    /// the slice was charged: units that a bucket has refilled since then are not given back a second time.
    async fn give_back_to_slice(&self, hit: &RedisHit, held: SliceUnits) -> Result<(), StoreError> {
        let shared = &*self.0.shared;
        if shared.leases.refund(&hit.script_hit, held, shared.clock.now_with_gaps()) {
            return Ok(());
        }
        if !shared.is_still_charged(&hit.script_hit, held.connection()) {
            return Ok(());
        }
        let (at, before) = held.charge();
        shared.undo(hit.script_hit.clone(), at, before).await
    }
}
