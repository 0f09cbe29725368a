//! What a file that was saved means for the store.

use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::StoreRule;

use crate::notice;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StoreChange {
    None,
    /// The same Redis under other terms; it has the counts.
    SameRedis,
    /// The counts of limits on these stores start anew.
    NamedAnew(Vec<String>),
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
        let is_elsewhere =
            |name: &str, new: &StoreRule| before.stores.get(name).is_some_and(|old| !old.has_counts_of(new));
        let elsewhere = || -> Vec<String> {
            let stores = after.stores.iter().filter(|(name, new)| is_elsewhere(name, new));
            stores.map(|(name, _)| name.clone()).collect()
        };
        match (old.is_memory(), new.is_memory()) {
            // The terms of a remote store mean nothing to memory.
            (true, true) if before.max_memory == after.max_memory => Self::None,
            (true, true) => Self::NewStore,
            _ if !old.has_counts_of(new) => Self::NewStore,
            _ if same_terms && old == new && before.stores == after.stores => Self::None,
            _ => match elsewhere() {
                stores if stores.is_empty() => Self::SameRedis,
                stores => Self::NamedAnew(stores),
            },
        }
    }

    pub(super) fn log(&self) {
        match self {
            Self::None => {}
            Self::SameRedis => notice::log("the store is asked under other terms; its counts stay"),
            Self::NamedAnew(names) => {
                for name in names {
                    notice::log(format_args!("store `{name}` is another Redis; the counts of its limits start anew"));
                }
            }
            Self::NewStore => notice::log("the store is another; counts start anew"),
        }
    }
}
