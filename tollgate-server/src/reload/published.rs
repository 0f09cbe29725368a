//! Rule sets that are published on the Redis that the nodes share.

use tokio::sync::watch;
use tollgate::redis::{PublishedRules, Repairs, RuleSets};
use tollgate::rules::file::Parsed;

use crate::notice;

/// Nothing is published to a store in memory.
pub(super) struct RuleUpdates(Option<Subscription>);

struct Subscription {
    latest: watch::Receiver<Option<PublishedRules>>,
    repairs: watch::Receiver<Repairs>,
    /// The repairs that were reported so far.
    reported: Repairs,
    _rule_sets: RuleSets,
}

pub(super) enum PublishedEvent {
    Published(PublishedRules),
    /// Repairs since the last event, with the latest of them.
    Repaired(Repairs),
}

impl RuleUpdates {
    pub(super) fn subscribe(file: &Parsed) -> Self {
        let settings = match file.redis_settings() {
            Ok(Some(settings)) => settings,
            Ok(None) => return Self(None),
            // The store itself has been opened with these settings, so this is rare.
            Err(problems) => {
                notice::warn("published rules will not be heard of:");
                notice::log_problems(&problems);
                return Self(None);
            }
        };
        match RuleSets::connect(settings) {
            Ok(rule_sets) => Self(Some(Subscription {
                latest: rule_sets.latest(),
                repairs: rule_sets.repairs(),
                reported: Repairs::default(),
                _rule_sets: rule_sets,
            })),
            Err(error) => {
                notice::warn(format_args!("published rules will not be heard of: {error}"));
                Self(None)
            }
        }
    }

    /// The next rule set that is published, or the next repair of a published one.
    pub(super) async fn next(&mut self) -> PublishedEvent {
        if let Some(Subscription { latest, repairs, reported, .. }) = &mut self.0 {
            loop {
                tokio::select! {
                    // Why rules change is said before they do.
                    biased;
                    Ok(()) = repairs.changed() => {
                        let now = repairs.borrow_and_update().clone();
                        let mut event = now.clone();
                        event.restored -= reported.restored;
                        event.replaced -= reported.replaced;
                        *reported = now;
                        return PublishedEvent::Repaired(event);
                    }
                    Ok(()) = latest.changed() => {
                        let newest = latest.borrow_and_update().clone();
                        if let Some(rule_set) = newest {
                            return PublishedEvent::Published(rule_set);
                        }
                    }
                    else => break,
                }
            }
        }
        std::future::pending().await
    }
}
