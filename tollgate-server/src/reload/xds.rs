//! Applies configuration from the xDS server, in addition to the rules of the file or the published ones.

use tollgate::rules::file::internal::{DomainConfig, XdsRule};
use tollgate::rules::file::{Parsed, Problems};

use super::{Reload, changes};
use crate::service::xds::{XdsClient, XdsSettings, XdsUpdate};

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
