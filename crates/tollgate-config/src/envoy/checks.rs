//! Checks configuration of envoyproxy/ratelimit by its own rules.

use tollgate::InvalidLimit;
use tollgate_rules::internal::config::{MAX_KEY_PARTS, joined};
use tollgate_rules::internal::envoy::Unit;

use super::{DescriptorConfig, DomainConfig, EntryPath, RateLimitConfig};
use crate::problem::{Findings, Position, Problems, shown};

const UNITS: &str = "use second, minute, hour, day, week, month or year";

/// The problems found so far, by the file that they are in.
#[derive(Default)]
pub(super) struct Checks<'c>(Vec<(&'c DomainConfig, Findings)>);

impl<'c> Checks<'c> {
    fn findings(&mut self, config: &'c DomainConfig) -> &mut Findings {
        let known = self.0.iter().position(|(known, _)| std::ptr::eq(*known, config));
        let index = known.unwrap_or(self.0.len());
        if known.is_none() {
            self.0.push((config, Findings::default()));
        }
        &mut self.0[index].1
    }

    /// Returns the problems, if there are any.
    pub(super) fn finish(self) -> Result<(), Problems> {
        let of_file =
            |(config, findings): (&DomainConfig, Findings)| findings.into_problems(&config.source, &config.text);
        self.0.into_iter().map(of_file).reduce(Problems::and).map_or(Ok(()), Err)
    }

    pub(super) fn domain(&mut self, config: &'c DomainConfig) {
        if config.domain.is_empty() {
            self.findings(config).error(
                config.at,
                "the domain is empty",
                "write `domain: NAME`, as in Envoy's settings",
            );
        }
    }

    pub(super) fn duplicate_domain(&mut self, config: &'c DomainConfig, first: &str) {
        let message = format!("domain `{}` is already configured in {first}", shown(&config.domain));
        let fix = "use another domain, or set `merge_domains: true` in `service.envoy`";
        self.findings(config).error(config.at, message, fix);
    }

    pub(super) fn duplicate_entry(
        &mut self,
        (config, entry): (&'c DomainConfig, &DescriptorConfig),
        path: &EntryPath<'_>,
        (source, at): (&str, Position),
    ) {
        let place = if config.text.is_empty() {
            String::new()
        } else {
            format!(", first at {source}:{}:{}", at.line, at.column)
        };
        let message = format!("descriptor `{}` is configured twice{place}", shown(&path.to_string()));
        self.findings(config).error(entry.at, message, "remove one of them");
    }

    /// Checks an entry without the entries below it.
    pub(super) fn entry(&mut self, config: &'c DomainConfig, entry: &'c DescriptorConfig, path: &EntryPath<'_>) {
        let name = || shown(&path.to_string());
        if entry.key.is_empty() {
            let message = format!("a descriptor of domain `{}` has no key", shown(path.domain));
            self.findings(config).error(entry.at, message, "write `key: NAME`");
        }
        if entry.share_threshold && !joined(&entry.key, &entry.value).contains('*') {
            let message = format!("share_threshold is set for descriptor `{}`, which has no wildcard", name());
            self.findings(config).error(entry.at, message, "use a value such as `files/*`, or remove share_threshold");
        }
        let Some(limit) = &entry.rate_limit else { return };
        if path.counted.len() > MAX_KEY_PARTS && !limit.unlimited {
            let message = format!("descriptor `{}` counts the values of {} entries", name(), path.counted.len());
            self.findings(config).error(limit.at, message, "use at most 8 entries without a value");
        }
        self.limit(config, limit, path);
    }

    fn limit(&mut self, config: &'c DomainConfig, limit: &RateLimitConfig, path: &EntryPath<'_>) {
        let name = || shown(&path.to_string());
        match (limit.unlimited, Unit::named(&limit.unit)) {
            (true, Some(_)) => {
                let message = format!("descriptor `{}` is unlimited and has a unit", name());
                self.findings(config).error(limit.unit_at, message, "remove the unit, or `unlimited`");
            }
            (false, None) if limit.unit.is_empty() => {
                let message = format!("the rate limit of descriptor `{}` has no unit", name());
                self.findings(config).error(limit.at, message, UNITS);
            }
            (false, None) => {
                let message = format!("invalid unit `{}` of descriptor `{}`", shown(&limit.unit), name());
                self.findings(config).error(limit.unit_at, message, UNITS);
            }
            (true, None) | (false, Some(_)) => {}
        }
        for replaced in &limit.replaces {
            if replaced.is_empty() {
                let message = format!("an entry of `replaces` of descriptor `{}` has no name", name());
                self.findings(config).error(limit.at, message, "write `- name: NAME`, with the name of another limit");
            } else if *replaced == limit.name {
                let message = format!("the rate limit of descriptor `{}` replaces itself", name());
                self.findings(config).error(limit.at, message, "use the name of another limit");
            }
        }
    }

    /// Reports numbers that the algorithm does not support.
    pub(super) fn invalid_limit(
        &mut self,
        config: &'c DomainConfig,
        limit: &RateLimitConfig,
        path: &EntryPath<'_>,
        error: &InvalidLimit,
    ) {
        let message = format!("the rate limit of descriptor `{}`: {}", shown(&path.to_string()), error.problem());
        self.findings(config).error(limit.at, message, error.fix());
    }
}
