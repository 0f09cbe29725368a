//! The effect of a reload on the store.

use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::StoreRule;

use crate::notice;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StoreChange {
    None,
    /// The same Redis with other settings; counts are kept.
    SameRedis,
    /// Other named stores; counts of their limits start from zero.
    NewNamedStores(Vec<String>),
    /// Another store; counts start from zero.
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
            // The settings of a remote store do not apply to memory.
            (true, true) if before.max_memory == after.max_memory => Self::None,
            (true, true) => Self::NewStore,
            _ if !old.has_counts_of(new) => Self::NewStore,
            _ if same_terms && old == new && before.stores == after.stores => Self::None,
            _ => match elsewhere() {
                stores if stores.is_empty() => Self::SameRedis,
                stores => Self::NewNamedStores(stores),
            },
        }
    }

    pub(super) fn log(&self) {
        match self {
            Self::None => {}
            Self::SameRedis => notice::log("the settings of the store have changed; counts are kept"),
            Self::NewNamedStores(names) => {
                for name in names {
                    notice::log(format_args!("store `{name}` is another Redis; counts of its limits start from zero"));
                }
            }
            Self::NewStore => notice::log("the store has changed; counts start from zero"),
        }
    }
}
