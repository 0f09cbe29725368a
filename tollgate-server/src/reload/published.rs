//! Subscription to the rules that are published on the shared Redis.

use tokio::sync::watch;
use tollgate::redis::{PublishedRules, Repairs, RuleSets};
use tollgate::rules::file::Parsed;

use crate::notice;

/// Updates of published rules. An in-memory store has none.
pub(super) struct RuleUpdates(Option<Subscription>);

struct Subscription {
    latest: watch::Receiver<Option<PublishedRules>>,
    repairs: watch::Receiver<Repairs>,
    /// Repairs that were already reported.
    reported: Repairs,
    rule_sets: RuleSets,
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
            // Rare: the store itself was opened with these settings.
            Err(problems) => {
                notice::warn("published rules will not be received:");
                notice::log_problems(&problems);
                return Self(None);
            }
        };
        match RuleSets::connect(settings) {
            Ok(rule_sets) => Self(Some(Subscription {
                latest: rule_sets.latest(),
                repairs: rule_sets.repairs(),
                reported: Repairs::default(),
                rule_sets,
            })),
            Err(error) => {
                notice::warn(format_args!("published rules will not be received: {error}"));
                Self(None)
            }
        }
    }

    /// Returns the rule sets on Redis.
    pub(super) fn rule_sets(&self) -> Option<&RuleSets> {
        self.0.as_ref().map(|subscription| &subscription.rule_sets)
    }

    /// Returns the next published rules, or the next repair of published rules.
    pub(super) async fn next(&mut self) -> PublishedEvent {
        if let Some(Subscription { latest, repairs, reported, .. }) = &mut self.0 {
            loop {
                tokio::select! {
                    // The reason for a change is logged before the change.
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
