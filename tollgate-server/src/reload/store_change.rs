//! What a file that was saved means for the store.

use tollgate::rules::file::Parsed;

use crate::notice;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreChange {
    None,
    /// The same Redis under other terms; it has the counts.
    SameRedis,
    /// Counts start anew.
    NewStore,
}

impl StoreChange {
    pub(super) fn between(before: &Parsed, after: &Parsed) -> Self {
        let same_terms = before.store_timeout == after.store_timeout
            && before.on_store_failure == after.on_store_failure
            && before.expected_nodes == after.expected_nodes
            && before.max_memory == after.max_memory;
        let (old, new) = (&before.store, &after.store);
        match (old.is_memory(), new.is_memory()) {
            // The terms of a remote store mean nothing to memory.
            (true, true) if before.max_memory == after.max_memory => Self::None,
            (true, true) => Self::NewStore,
            _ if !old.has_counts_of(new) => Self::NewStore,
            _ if same_terms && old == new => Self::None,
            _ => Self::SameRedis,
        }
    }

    pub(super) fn log(self) {
        match self {
            Self::None => {}
            Self::SameRedis => notice::log("the store is asked under other terms; its counts stay"),
            Self::NewStore => notice::log("the store is another; counts start anew"),
        }
    }
}
