//! Configuration from elsewhere: rules that are published on the shared Redis, and limits of an xDS server, which apply
//! in addition to the rules of the file or the published ones.

use tokio::sync::watch;
use tollgate::redis::{PublishedRules, Repairs, RuleSets, StoreError};
use tollgate_config::internal::{DomainConfig, XdsRule};
use tollgate_config::{Parsed, Problems};
use tollgate_telemetry::notice;

use super::{Reload, changes};
use crate::service::xds::{XdsClient, XdsSettings, XdsUpdate};

/// Updates of published rules. An in-memory store has none.
pub(super) struct RuleUpdates(Option<Subscription>);

struct Subscription {
    latest: watch::Receiver<Option<PublishedRules>>,
    repairs: watch::Receiver<Repairs>,
    /// Repairs that were already reported.
    reported: Repairs,
    problem: watch::Receiver<Option<StoreError>>,
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
                notice::warn("published rules will not be received: correct these settings of the store:");
                notice::log_problems(&problems);
                return Self(None);
            }
        };
        match RuleSets::connect(settings) {
            Ok(rule_sets) => Self(Some(Subscription {
                latest: rule_sets.latest(),
                repairs: rule_sets.repairs(),
                reported: Repairs::default(),
                problem: rule_sets.problem(),
                rule_sets,
            })),
            Err(error) => {
                notice::warn(format_args!(
                    "published rules will not be received: {error}: correct `store` and restart the server"
                ));
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
        if let Some(Subscription { latest, repairs, reported, problem, .. }) = &mut self.0 {
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
                    Ok(()) = problem.changed() => {
                        if let Some(why) = &*problem.borrow_and_update() {
                            notice::warn(format_args!("the published rules cannot be read: {why}"));
                        }
                    }
                    else => break,
                }
            }
        }
        std::future::pending().await
    }
}

/// The client, if the file names a server, and the last configuration that was accepted.
#[derive(Default)]
pub(super) struct Xds {
    client: Option<XdsClient>,
    domains: Vec<DomainConfig>,
}

impl Xds {
    /// Waits for the next configuration.
    pub(super) async fn next(&mut self) -> XdsUpdate {
        match &mut self.client {
            Some(client) => client.next().await,
            None => std::future::pending().await,
        }
    }
}

impl Reload {
    /// Returns the file with the configuration of the xDS server, unless it no longer names one.
    pub(super) fn with_xds(&self, file: Parsed) -> Result<Parsed, Problems> {
        match file.service.xds {
            Some(_) => file.with_more_domains(&self.xds.domains),
            None => Ok(file),
        }
    }

    /// Starts, replaces or ends the client if the file names another server than before. The configuration of a
    /// replaced server stays in force until the next one sends its own.
    pub(super) fn follow_xds(&mut self, before: Option<&XdsRule>) {
        if self.file.service.xds.as_ref() == before {
            return;
        }
        // The settings were valid when the file was read.
        match XdsSettings::of(&self.file).ok().flatten() {
            Some(settings) => self.xds.client = Some(XdsClient::start(settings, self.reloads.xds.clone())),
            None => self.xds = Xds::default(),
        }
    }

    pub(super) fn apply_xds(&mut self, XdsUpdate { domains, version, result }: XdsUpdate) {
        let url = self.xds.client.as_ref().map(XdsClient::url).unwrap_or_default();
        let origin = self.origin(format!("version {version} of the xDS server {url}"));
        let applied = self.replace_domains(domains);
        match &applied {
            Ok(changes) => _ = origin.applied(changes),
            Err(problem) => _ = origin.rejected_because(problem),
        }
        // The client may have ended in the meantime.
        _ = result.send(applied.map(drop));
    }

    /// Replaces the configuration of the xDS server, and returns the changes.
    fn replace_domains(&mut self, domains: Vec<DomainConfig>) -> Result<Vec<String>, String> {
        let file = self.file.clone().with_more_domains(&domains).map_err(|problems| in_one_line(&problems))?;
        let in_force = match &self.published_rules {
            Some(published) => published.clone().with_domains_of(&file),
            None => file.clone(),
        };
        let (in_force, learned) = self.learners.attach(in_force);
        let rules = in_force.compile().map_err(|problems| in_one_line(&problems))?;
        self.gate.replace(rules).map_err(|error| error.to_string())?;
        self.learners.commit(learned);
        self.compiled = match &self.published_rules {
            // If a named file is missing, the rules from before are still valid.
            Some(_) => file.compile().unwrap_or_else(|_| self.compiled.clone()),
            None => self.gate.rules(),
        };
        let changes = changes::of_domains(self.file.envoy_rules(), file.envoy_rules());
        (self.file, self.xds.domains) = (file, domains);
        Ok(changes)
    }
}

/// Resources have no lines, so that each problem is reported with the name of its resource.
fn in_one_line(problems: &Problems) -> String {
    let all: Vec<String> =
        problems.iter().map(|one| format!("{}: {}: {}", one.file(), one.message(), one.fix())).collect();
    all.join("; ")
}
