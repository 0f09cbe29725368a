//! Rule sets that are published on the Redis that the nodes share.

use tokio::sync::watch;
use tollgate::redis::{RuleSet, RuleSets};
use tollgate::rules::file::StoreUrl;

use crate::notice;

/// Nothing is published to a store in memory.
pub(super) struct Published(Option<Ear>);

struct Ear {
    latest: watch::Receiver<Option<RuleSet>>,
    _rule_sets: RuleSets,
}

impl Published {
    pub(super) fn on(store: &StoreUrl) -> Self {
        let StoreUrl::Redis(url) = store else { return Self(None) };
        match RuleSets::connect(url) {
            Ok(rule_sets) => Self(Some(Ear { latest: rule_sets.latest(), _rule_sets: rule_sets })),
            // The store itself has been opened with this URL, so this is hardly ever said.
            Err(error) => {
                notice::warn(format_args!("published rules will not be heard of: {error}"));
                Self(None)
            }
        }
    }

    /// The next rule set that is published.
    pub(super) async fn next(&mut self) -> RuleSet {
        if let Some(Ear { latest, .. }) = &mut self.0 {
            while latest.changed().await.is_ok() {
                let newest = latest.borrow_and_update().clone();
                if let Some(rule_set) = newest {
                    return rule_set;
                }
            }
        }
        std::future::pending().await
    }
}
