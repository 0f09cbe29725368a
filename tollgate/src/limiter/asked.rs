//! Questions that were made ready before, for rules.

use super::{AllAsked, Limiter};
use crate::decision::Decision;
use crate::limit::LimitId;
use crate::store::memory::Asked;

impl Limiter {
    /// What would be decided, taking nothing.
    pub(crate) fn look_asked(&self, asked: &AllAsked) -> Decision {
        self.0.store.look(&self.0.limits, asked, self.now())
    }
}

/// One of the limits alone, at another cost.
pub(crate) fn only(asked: &AllAsked, limit: LimitId, cost: u64) -> AllAsked {
    asked.iter().filter(|one| one.limit == limit).map(|one| Asked { cost, ..*one }).collect()
}
