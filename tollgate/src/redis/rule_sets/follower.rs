//! Follows the rule set on Redis, and repairs it when Redis has lost a publication that this node holds.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::stored::{self, CHANNEL, REPLY_TIMEOUT};
use super::{PublishedRules, Repair, Repairs};
use crate::redis::StoreError;
use crate::redis::node::jittered;
use crate::redis::topology::Topology;

/// Time between two polls of version and id. Bounds how late a node gets a set whose announcement is lost.
const POLL_EVERY: Duration = Duration::from_secs(3);
/// Pause before the next attempt to subscribe.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Delay before a lost set is written back, with jitter, so that one of many nodes does it.
const RESTORE_AFTER: Duration = Duration::from_millis(250);

pub(super) struct Follower {
    topology: Arc<Topology>,
    held: watch::Sender<Option<PublishedRules>>,
    repairs: watch::Sender<Repairs>,
}

impl Follower {
    pub(super) fn new(
        topology: Arc<Topology>,
        held: watch::Sender<Option<PublishedRules>>,
        repairs: watch::Sender<Repairs>,
    ) -> Self {
        Self { topology, held, repairs }
    }

    /// Follows the rule set. Never returns.
    pub(super) async fn follow(self) {
        loop {
            let subscriber = timeout(REPLY_TIMEOUT, async {
                let mut subscriber = self.topology.subscriber().await.ok()?;
                subscriber.subscribe(self.topology.names().of(CHANNEL)).await.ok()?;
                Some(subscriber)
            });
            match subscriber.await {
                Ok(Some(mut subscriber)) => {
                    let mut announced = subscriber.on_message();
                    loop {
                        self.poll().await;
                        // After an announcement or a timeout, poll again. At the end of the stream, subscribe again.
                        if let Ok(None) = timeout(jittered(POLL_EVERY), announced.next()).await {
                            break;
                        }
                    }
                }
                // A Redis that refuses the subscription may still allow reads.
                Ok(None) | Err(_) => self.poll().await,
            }
            sleep(jittered(RETRY_AFTER)).await;
        }
    }

    async fn poll(&self) {
        if let Err(why) = self.compare().await {
            tracing::debug!(%why, "cannot read the published rule set");
        }
    }

    /// Compares the stored set with the one that this node holds, and takes it or restores its own.
    async fn compare(&self) -> Result<(), StoreError> {
        let held = self.held.borrow().clone();
        let stored = stored::current_id(&self.topology).await?;
        if stored.as_deref() == held.as_ref().map(|held| &*held.id) {
            return Ok(());
        }
        let found = stored::read(&self.topology).await?;
        match (held, found) {
            (None, None) => {}
            (None, Some(found)) => self.take(found),
            (Some(held), None) => self.restore(held, "").await,
            (Some(held), Some(found)) if held.id == found.id => {}
            (Some(held), Some(found)) if held.precedes(&found) => self.take(found),
            (Some(held), Some(found)) if found.precedes(&held) => self.restore(held, &found.id).await,
            (Some(held), Some(found)) => {
                self.take(found.clone());
                self.report(Repair::Replaced { lost: held, by: found });
            }
        }
        Ok(())
    }

    fn take(&self, found: PublishedRules) {
        let verb = if found.rules.is_some() { "published" } else { "withdrawn" };
        tracing::info!(version = found.version, id = %found.id, "a rule set was {verb}");
        self.held.send_replace(Some(found));
    }

    async fn restore(&self, lost: PublishedRules, found: &str) {
        sleep(jittered(RESTORE_AFTER)).await;
        // A set may be large: do not send it if another node was faster.
        let current = stored::current_id(&self.topology).await;
        if !current.is_ok_and(|id| id.unwrap_or_default() == found) {
            return;
        }
        match stored::restore(&self.topology, &lost, found).await {
            Ok(true) => self.report(Repair::Restored { lost }),
            // Another node was faster, or another set was published. Either is announced.
            Ok(false) => {}
            Err(why) => {
                let failed = Repair::NotRestored { lost, why };
                // Every poll tries again: report it once.
                if self.repairs.borrow().latest.as_ref() != Some(&failed) {
                    self.report(failed);
                }
            }
        }
    }

    fn report(&self, repair: Repair) {
        tracing::warn!("{repair}");
        self.repairs.send_modify(|repairs| {
            repairs.restored += u64::from(matches!(repair, Repair::Restored { .. }));
            repairs.replaced += u64::from(matches!(repair, Repair::Replaced { .. }));
            repairs.latest = Some(repair);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule_set(id: &str, epoch: u64, predecessors: &str) -> PublishedRules {
        let version = stored::version_of(id).unwrap();
        PublishedRules { version, id: id.into(), rules: None, epoch, predecessors: predecessors.into() }
    }

    #[test]
    fn a_set_precedes_those_that_name_it() {
        let (first, second, third) = (rule_set("1-a", 9, ""), rule_set("2-b", 9, "1-a"), rule_set("3-c", 9, "2-b 1-a"));
        assert!(first.precedes(&second) && first.precedes(&third) && second.precedes(&third));
        assert!(!third.precedes(&first) && !second.precedes(&second));
    }

    #[test]
    fn sets_published_on_both_sides_of_a_failover_precede_neither() {
        let (lost, other, later) =
            (rule_set("2-b", 9, "1-a"), rule_set("2-x", 9, "1-a"), rule_set("4-z", 9, "3-y 2-x 1-a"));
        for set in [other, later] {
            assert!(!lost.precedes(&set) && !set.precedes(&lost));
        }
    }

    #[test]
    fn a_set_older_than_all_recorded_predecessors_precedes_only_in_its_own_epoch() {
        let latest = rule_set("200-c", 9, "199-b 198-a");
        assert!(rule_set("7-q", 9, "6-p").precedes(&latest));
        assert!(!rule_set("7-q", 8, "6-p").precedes(&latest), "a Redis that lost its data began another epoch");
    }

    #[test]
    fn sets_of_releases_without_ids_are_in_order() {
        let (fifth, sixth) = (rule_set("5@9", 9, ""), rule_set("6@9", 9, ""));
        assert!(fifth.precedes(&sixth) && !sixth.precedes(&fifth));
        assert!(fifth.precedes(&rule_set("7-a", 9, "6@9")) && sixth.precedes(&rule_set("7-a", 9, "6@9")));
        // An old release published over a set with an id.
        assert!(rule_set("7-a", 9, "6@9").precedes(&rule_set("8@9", 9, "7-a 6@9")));
    }
}
