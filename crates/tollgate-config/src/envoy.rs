//! Configuration of envoyproxy/ratelimit: reads its files, and makes a rule of each rate limit in them.
//!
//! Such a rule is checked by its name only, and its name is the one that envoyproxy/ratelimit uses in its statistics:
//! the domain and the entries, joined by dots. Everything else works as for limits of the rule file: memory bounds,
//! metrics, Redis, and reloads that keep counts.
//!
//! The same configuration arrives by xDS, so the checks work on [`DomainConfig`] and not on the text. The rules of
//! envoyproxy/ratelimit decide what is valid; its error for each problem is reported with a position and a fix.

mod checks;
mod reading;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ring::digest;
use serde_json::Value;
use tollgate::internal::is_control_or_format;
use tollgate::{
    Algorithm, FixedWindow, InvalidLimit, LeakyBucket, Limit, Rate, SlidingWindowCounter, SlidingWindowLog, TokenBucket,
};
use tollgate_rules::internal::config::{Child, Counting, DescriptorNode, joined};
use tollgate_rules::internal::envoy::{DescriptorLimit, Domains, Unit};
use tollgate_rules::{KeyPart, Listing, Mode, Rule};

use self::checks::Checks;
use super::problem::{Position, Problems};
use super::types::{AlgorithmName, EnvoyRule};

/// Longer names of limits are shortened.
const MAX_NAME: usize = 128;

/// The configuration of one domain, from a file or from an xDS server.
#[derive(Clone, Debug, Default)]
pub struct DomainConfig {
    /// The name of the file or resource.
    pub source: String,
    /// The text of the file, for messages. Empty for a resource.
    pub text: Arc<str>,
    /// The name of the domain.
    pub domain: String,
    /// The position of the name.
    pub at: Position,
    /// The descriptors of the first level.
    pub descriptors: Vec<DescriptorConfig>,
}

/// A descriptor entry of the configuration.
#[derive(Clone, Debug, Default)]
pub struct DescriptorConfig {
    /// The key.
    pub key: String,
    /// The value, or an empty text if every value matches.
    pub value: String,
    /// The limit of descriptors that end here.
    pub rate_limit: Option<RateLimitConfig>,
    /// The entries that may follow.
    pub descriptors: Vec<DescriptorConfig>,
    /// Whether the limit counts, but never denies.
    pub shadow_mode: bool,
    /// Whether a denial only counts if all other descriptors in quota mode are denied, too.
    pub quota_mode: bool,
    /// Whether all values that match a wildcard count together.
    pub share_threshold: bool,
    /// Metadata for the response.
    pub metadata: Option<Value>,
    /// The position of the entry.
    pub at: Position,
}

/// A rate limit of the configuration.
#[derive(Clone, Debug, Default)]
pub struct RateLimitConfig {
    /// The number of requests. 0 denies every request.
    pub requests_per_unit: u32,
    /// The name of the unit, or an empty text.
    pub unit: String,
    /// Whether the descriptor is allowed without counting.
    pub unlimited: bool,
    /// The name for `replaces`, or an empty text.
    pub name: String,
    /// The names of the limits that this one replaces.
    pub replaces: Vec<String>,
    /// The position of the limit.
    pub at: Position,
    /// The position of the unit.
    pub unit_at: Position,
}

/// The rules of all domains, and the trees that find them.
#[derive(Clone, Default)]
pub struct EnvoyRules {
    pub(super) rules: Vec<Rule>,
    pub(super) domains: Domains,
}

impl EnvoyRules {
    /// Makes the rules of these domains.
    ///
    /// # Errors
    ///
    /// Returns every problem of all domains.
    pub fn new<'c>(
        configs: impl IntoIterator<Item = &'c DomainConfig>,
        settings: &EnvoyRule,
    ) -> Result<Self, Problems> {
        let mut checks = Checks::default();
        let mut merged: Vec<(&str, Vec<&DomainConfig>)> = Vec::new();
        let mut index: HashMap<&str, usize> = HashMap::new();
        for config in configs {
            let known = index.get(&*config.domain).and_then(|index| merged.get_mut(*index));
            match known {
                None => {
                    checks.domain(config);
                    index.insert(&config.domain, merged.len());
                    merged.push((&config.domain, vec![config]));
                }
                Some((_, parts)) if settings.merge_domains => parts.push(config),
                Some((_, parts)) => checks.duplicate_domain(config, &parts[0].source),
            }
        }
        let mut names = Names::default();
        for (domain, parts) in &merged {
            parts.iter().for_each(|part| names.count(&part.descriptors, &mut EntryPath::of(domain)));
        }
        let mut build = Build { algorithm: settings.algorithm, names, rules: Vec::new(), checks };
        let mut domains = Vec::with_capacity(merged.len());
        for (domain, parts) in merged {
            let entries = parts.iter().flat_map(|part| part.descriptors.iter().map(|entry| (*part, entry)));
            let children = build.children(entries.collect(), &mut EntryPath::of(domain));
            domains.push((domain.into(), DescriptorNode::new(children, None)));
        }
        build.checks.finish()?;
        Ok(Self { rules: build.rules, domains: Domains::new(domains) })
    }

    /// Returns the number of limits.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Returns the name of each limit with a description that differs if its numbers or its mode do.
    pub fn limits(&self) -> impl Iterator<Item = (&str, String)> {
        self.rules.iter().map(|rule| (rule.name(), rule.description()))
    }

    /// Returns whether there is no limit.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

/// The domain and the entries that lead to a descriptor.
struct EntryPath<'c> {
    domain: &'c str,
    entries: Vec<(&'c str, &'c str)>,
    /// The keys of the entries that count each value by itself.
    counted: Vec<&'c str>,
}

impl<'c> EntryPath<'c> {
    fn of(domain: &'c str) -> Self {
        Self { domain, entries: Vec::new(), counted: Vec::new() }
    }
}

impl fmt::Display for EntryPath<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.domain)?;
        self.entries.iter().try_for_each(|(key, value)| write!(out, ".{}", joined(key, value)))
    }
}

/// The names of limits, and how many descriptors share each.
#[derive(Default)]
struct Names(HashMap<String, usize>);

impl Names {
    fn count<'c>(&mut self, entries: &'c [DescriptorConfig], path: &mut EntryPath<'c>) {
        for entry in entries {
            path.entries.push((&entry.key, &entry.value));
            if entry.rate_limit.as_ref().is_some_and(|limit| !limit.unlimited) {
                *self.0.entry(path.to_string()).or_default() += 1;
            }
            self.count(&entry.descriptors, path);
            path.entries.pop();
        }
    }

    /// Returns the name of a limit. It depends on the path only, so that counts survive other changes of the
    /// configuration, unless the dots in keys and values give two paths the same name.
    fn of(&self, path: &EntryPath<'_>) -> String {
        let name = path.to_string();
        let is_unique = self.0.get(&name).is_none_or(|count| *count <= 1);
        let is_valid = name.len() <= MAX_NAME && !name.chars().any(char::is_control);
        if is_unique && is_valid {
            return name;
        }
        let mut hash = digest::Context::new(&digest::SHA256);
        let entries = path.entries.iter().flat_map(|(key, value)| [*key, *value]);
        for text in std::iter::once(path.domain).chain(entries) {
            hash.update(&(text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
        let hash: String = hash.finish().as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let room = MAX_NAME - hash.len() - 1;
        let mut short: String =
            name.chars().map(|letter| if is_control_or_format(letter) { '?' } else { letter }).collect();
        let is_whole = |end: &usize| short.is_char_boundary(*end);
        short.truncate((0..=room.min(short.len())).rev().find(is_whole).unwrap_or_default());
        format!("{short}~{hash}")
    }
}

struct Build<'c> {
    algorithm: AlgorithmName,
    names: Names,
    rules: Vec<Rule>,
    checks: Checks<'c>,
}

impl<'c> Build<'c> {
    fn children(
        &mut self,
        entries: Vec<(&'c DomainConfig, &'c DescriptorConfig)>,
        path: &mut EntryPath<'c>,
    ) -> Vec<Child> {
        let mut first: HashMap<String, (&DomainConfig, Position)> = HashMap::new();
        let mut children = Vec::new();
        for (config, entry) in entries {
            let DescriptorConfig { key, value, .. } = entry;
            let name = joined(key, value);
            let is_shared = if name.contains('*') { entry.share_threshold } else { !value.is_empty() };
            let counting = if is_shared { Counting::Together } else { Counting::EachValue };
            path.entries.push((key, value));
            if counting == Counting::EachValue {
                path.counted.push(key);
            }
            self.checks.entry(config, entry, path);
            match first.get(&name) {
                Some((first, at)) => self.checks.duplicate_entry((config, entry), path, (&first.source, *at)),
                None => {
                    let limit = entry.rate_limit.as_ref().map(|limit| self.limit((config, entry), limit, path));
                    let inner = entry.descriptors.iter().map(|inner| (config, inner)).collect();
                    let node = DescriptorNode::new(self.children(inner, path), limit);
                    children.push(Child::new(key, value, counting, node));
                    first.insert(name, (config, entry.at));
                }
            }
            path.entries.pop();
            if counting == Counting::EachValue {
                path.counted.pop();
            }
        }
        children
    }

    /// Adds the rule of a limit. Its problems are reported by `checks`.
    fn limit(
        &mut self,
        (config, entry): (&'c DomainConfig, &'c DescriptorConfig),
        limit: &'c RateLimitConfig,
        path: &EntryPath<'c>,
    ) -> DescriptorLimit {
        let unit = Unit::named(&limit.unit).filter(|_| !limit.unlimited);
        let rule = unit.map(|unit| self.rule(entry, limit, unit, path));
        let rule = match rule.transpose() {
            Ok(rule) => rule,
            Err(error) => {
                self.checks.invalid_limit(config, limit, path, &error);
                None
            }
        };
        let name = rule.as_ref().map(|rule| rule.name().into());
        self.rules.extend(rule);
        DescriptorLimit {
            rule: name,
            name: (*limit.name).into(),
            requests_per_unit: limit.requests_per_unit,
            unit,
            quota_mode: entry.quota_mode,
            replaces: limit.replaces.iter().map(|name| (**name).into()).collect(),
            metadata: entry.metadata.clone(),
        }
    }

    fn rule(
        &self,
        entry: &DescriptorConfig,
        limit: &RateLimitConfig,
        unit: Unit,
        path: &EntryPath<'_>,
    ) -> Result<Rule, InvalidLimit> {
        let is_blocked = limit.requests_per_unit == 0;
        let numbers = algorithm(self.algorithm, u64::from(limit.requests_per_unit.max(1)), unit.duration());
        let mut rule = Rule::new(Limit::new(self.names.of(path), numbers)?).by_name_only();
        for key in &path.counted {
            rule = rule.key(KeyPart::descriptor(key));
        }
        if is_blocked {
            rule = rule.blocked(Listing::everything());
        }
        Ok(if entry.shadow_mode { rule.mode(Mode::Shadow) } else { rule })
    }
}

/// Returns an algorithm that admits `count` requests per window.
fn algorithm(name: AlgorithmName, count: u64, window: Duration) -> Algorithm {
    match name {
        AlgorithmName::TokenBucket => TokenBucket::new(count, Rate::new(count, window)).into(),
        AlgorithmName::LeakyBucket => LeakyBucket::new(count, Rate::new(count, window)).into(),
        AlgorithmName::FixedWindow => FixedWindow::new(count, window).into(),
        AlgorithmName::SlidingWindowLog => SlidingWindowLog::new(count, window).into(),
        AlgorithmName::SlidingWindowCounter => SlidingWindowCounter::new(count, window).into(),
    }
}
