//! Describes the difference between two rule files: old and new values, in a list of bounded size.
//!
//! Files are compared as they are written, so that a value reads as in the file. Deliberately not shown: values that
//! may be secrets or keys of users, such as header values, URLs with a login, and the keys of overrides.
//!
//! Also the settings that only take effect at start, which are the layout of the gateway, and the effect of a reload on
//! the store.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::{Map, Value};
use tollgate_config::internal::{Address, EnvoyRules, GatewayRule, LimitRule, StoreRule};
use tollgate_config::{Parsed, RuleFile};
use tollgate_telemetry::notice::{self, join_up_to};

/// The most names in an entry.
const MAX_NAMES: usize = 10;

/// The most limits, routes or settings whose values are shown.
const MAX_SHOWN: usize = 20;

/// The most characters of a value, and of an entry.
const MAX_VALUE_CHARS: usize = 60;
const MAX_ENTRY_CHARS: usize = 300;

/// The most characters of all changes in a log line.
const MAX_LINE_CHARS: usize = 1000;

/// The keys that nodes take from published rules.
const PUBLISHED_KEYS: [&str; 4] = ["limits", "headers", "body", "jwt"];
const PUBLISHED_GATEWAY_KEYS: [&str; 2] = ["trusted_proxies", "forwarding_header"];

/// The keys of listeners.
const LISTENERS: [&str; 2] = ["service", "admin"];

/// Keys whose values are not shown: they contain keys of users, headers or logins.
const HIDDEN: [&str; 7] = ["overrides", "ips", "keys", "headers", "set", "add", "url"];

/// A rule file, for comparisons.
#[derive(Clone)]
pub(crate) struct WrittenRules {
    limits: Vec<LimitRule>,
    /// The default store, and all others by name.
    stores: Vec<(String, StoreRule)>,
    /// All values as they are written.
    values: Map<String, Value>,
}

impl WrittenRules {
    pub(crate) fn of(file: &Parsed) -> Self {
        let others = file.stores.iter().map(|(name, store)| (name.clone(), store.clone()));
        let stores = std::iter::once((String::new(), file.store.clone())).chain(others).collect();
        let values = match file.to_json() {
            Value::Object(values) => values,
            _ => Map::new(),
        };
        Self { limits: file.limits.clone(), stores, values }
    }

    /// Returns published rules with the settings that a node keeps from its own file.
    pub(super) fn published(published: &Parsed, own: &Parsed) -> Self {
        let (mut rules, published) = (Self::of(own), Self::of(published));
        for key in PUBLISHED_KEYS {
            take_over(&mut rules.values, &published.values, key);
        }
        if let Some(Value::Object(theirs)) = published.values.get("gateway") {
            let own = rules.values.entry("gateway").or_insert_with(|| Map::new().into());
            if let Value::Object(own) = own {
                PUBLISHED_GATEWAY_KEYS.iter().for_each(|key| take_over(own, theirs, key));
            }
        }
        Self { limits: published.limits, ..rules }
    }

    /// Returns the limits with their values, by name.
    fn limits(&self) -> impl Iterator<Item = (&LimitRule, Option<&Value>)> {
        let values = self.values.get("limits").and_then(Value::as_array);
        self.limits.iter().enumerate().map(move |(index, rule)| (rule, values.and_then(|values| values.get(index))))
    }

    /// Returns the routes by name, or by what they match.
    fn routes(&self) -> Vec<(String, &Value)> {
        let routes = self.values.get("gateway").and_then(|gateway| gateway.get("routes")).and_then(Value::as_array);
        let mut found: Vec<(String, &Value)> = Vec::new();
        for route in routes.into_iter().flatten() {
            let parts = match route.get("name") {
                Some(name) => vec![shown(name)],
                None => ["methods", "hosts", "path"].into_iter().filter_map(|key| route.get(key)).map(shown).collect(),
            };
            let name: Vec<String> = parts.into_iter().flatten().collect();
            let name = name.join(" ");
            // Of several routes with one name, the n-th is compared with the n-th.
            let same = found.iter().filter(|(other, _)| other.split(" (").next() == Some(&*name)).count();
            found.push((if same == 0 { name } else { format!("{name} ({})", same + 1) }, route));
        }
        found
    }
}

fn take_over(into: &mut Map<String, Value>, from: &Map<String, Value>, key: &str) {
    match from.get(key) {
        Some(value) => _ = into.insert(key.to_owned(), value.clone()),
        None => _ = into.remove(key),
    }
}

/// Returns the changes from one file to another, such as `per-user: limit 50 → 60`. The list is empty if there are
/// none.
#[cfg(test)]
fn between_files(before: &Parsed, after: &Parsed) -> Vec<String> {
    let (old, new) = (WrittenRules::of(before), WrittenRules::of(after));
    let mut changes = between(&old, &new);
    changes.extend(of_settings(&old, &new, |key| LISTENERS.contains(&key)));
    changes.extend(of_domains(before.envoy_rules(), after.envoy_rules()));
    changes
}

/// Returns the changes, without those of domains and listeners, which are reported when they are applied.
pub(super) fn between(before: &WrittenRules, after: &WrittenRules) -> Vec<String> {
    let mut changes = of_limits(before, after);
    if before.stores != after.stores {
        changes.push("store changed".to_owned());
    }
    changes.extend(of_routes(before, after));
    changes.extend(of_settings(before, after, |key| {
        !matches!(key, "limits" | "store" | "stores") && !key.starts_with("x-") && !LISTENERS.contains(&key)
    }));
    changes
}

fn of_settings(before: &WrittenRules, after: &WrittenRules, is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut changes = Vec::new();
    for key in keys(Some(&before.values), Some(&after.values)).into_iter().filter(|key| is_wanted(key)) {
        difference(key, before.values.get(key), after.values.get(key), &mut changes);
    }
    let more = changes.len().saturating_sub(MAX_SHOWN);
    let shown = changes.iter().take(MAX_SHOWN).map(|change| cut(change, MAX_ENTRY_CHARS));
    let more = (more > 0).then(|| format!("{more} more settings changed"));
    shown.chain(more).collect()
}

fn of_limits(before: &WrittenRules, after: &WrittenRules) -> Vec<String> {
    let old: HashMap<&str, _> = before.limits().map(|(rule, values)| (rule.name.as_str(), (rule, values))).collect();
    let new: HashMap<&str, _> = after.limits().map(|(rule, values)| (rule.name.as_str(), (rule, values))).collect();
    let added = after.limits.iter().map(|rule| rule.name.as_str()).filter(|name| !old.contains_key(name));
    let removed = before.limits.iter().map(|rule| rule.name.as_str()).filter(|name| !new.contains_key(name));
    let changed = after.limits().filter_map(|(rule, values)| {
        let (rule_before, values_before) = old.get(rule.name.as_str())?;
        (*rule_before != rule).then(|| (rule.name.as_str(), *values_before, values))
    });
    listed("", added.collect(), changed.collect(), removed.collect())
}

fn of_routes(before: &WrittenRules, after: &WrittenRules) -> Vec<String> {
    let (old, new) = (before.routes(), after.routes());
    let value = |routes: &[(String, &'_ Value)], name: &str| -> Option<Value> {
        routes.iter().find(|(other, _)| other == name).map(|(_, value)| (*value).clone())
    };
    let added = new.iter().map(|(name, _)| name.as_str()).filter(|name| value(&old, name).is_none());
    let removed = old.iter().map(|(name, _)| name.as_str()).filter(|name| value(&new, name).is_none());
    let changed = new.iter().filter_map(|(name, after)| {
        let (_, before) = old.iter().find(|(other, before)| other == name && before != after)?;
        Some((name.as_str(), Some(*before), Some(*after)))
    });
    listed("route ", added.collect(), changed.collect(), removed.collect())
}

/// Returns the changes of limits that come from envoyproxy/ratelimit's configuration.
pub(super) fn of_domains(before: &EnvoyRules, after: &EnvoyRules) -> Vec<String> {
    let (old, new): (HashMap<_, _>, HashMap<_, _>) = (before.limits().collect(), after.limits().collect());
    let added = after.limits().map(|(name, _)| name).filter(|name| !old.contains_key(name));
    let removed = before.limits().map(|(name, _)| name).filter(|name| !new.contains_key(name));
    let changed: Vec<(&str, Value, Value)> = after
        .limits()
        .filter_map(|(name, numbers)| Some((name, old.get(name)?.clone(), numbers)))
        .filter(|(_, before, after)| before != after)
        .map(|(name, before, after)| (name, before.into(), after.into()))
        .collect();
    let changed = changed.iter().map(|(name, before, after)| (*name, Some(before), Some(after)));
    listed("", added.collect(), changed.collect(), removed.collect())
}

/// Something with a name that has changed, with its values before and after.
type Changed<'a> = (&'a str, Option<&'a Value>, Option<&'a Value>);

/// Returns an entry for each thing that has changed, and one each for those that were added or removed.
fn listed(noun: &str, added: Vec<&str>, changed: Vec<Changed<'_>>, removed: Vec<&str>) -> Vec<String> {
    let plural = |names: &[&str]| if names.len() == 1 { noun.to_owned() } else { noun.replace(' ', "s ") };
    let group = |verb: &str, names: &[&str]| {
        (!names.is_empty()).then(|| format!("{verb} {}{}", plural(names), join_up_to(names, MAX_NAMES)))
    };
    let mut changes: Vec<String> = group("added", &added).into_iter().collect();
    for (name, before, after) in changed.iter().take(MAX_SHOWN) {
        let mut differences = Vec::new();
        difference("", *before, *after, &mut differences);
        let differences = if differences.is_empty() { "changed".to_owned() } else { differences.join(", ") };
        changes.push(cut(&format!("{noun}{name}: {differences}"), MAX_ENTRY_CHARS));
    }
    let others: Vec<&str> = changed.iter().skip(MAX_SHOWN).map(|(name, ..)| *name).collect();
    changes.extend(group("changed", &others));
    changes.extend(group("removed", &removed));
    changes
}

/// Adds the differences between two values at a path, such as `ban.after 5 → 6`.
fn difference(path: &str, before: Option<&Value>, after: Option<&Value>, differences: &mut Vec<String>) {
    let (before, after) = (before.filter(|value| !value.is_null()), after.filter(|value| !value.is_null()));
    // Routes are compared by name.
    if before == after || path == "gateway.routes" {
        return;
    }
    let is_map = |value: Option<&Value>| value.is_some_and(Value::is_object);
    let is_hidden = is_hidden(path);
    if !is_hidden && (is_map(before) && is_map(after) || path == "gateway") {
        let (before, after) = (before.and_then(Value::as_object), after.and_then(Value::as_object));
        for key in keys(before, after) {
            let path = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
            difference(
                &path,
                before.and_then(|values| values.get(key)),
                after.and_then(|values| values.get(key)),
                differences,
            );
        }
        return;
    }
    let text = |value: Option<&Value>| match value {
        None => Some("unset".to_owned()),
        Some(_) if is_hidden => None,
        Some(value) => shown(value),
    };
    let space = if path.is_empty() { "" } else { " " };
    let difference = match (text(before), text(after)) {
        (Some(before), Some(after)) => format!("{path}{space}{before} → {after}"),
        _ => match (before.map(len), after.map(len)) {
            (before, after) if before.unwrap_or(0) != after.unwrap_or(0) => {
                format!("{path} {} → {} entries", before.unwrap_or(0), after.unwrap_or(0))
            }
            _ => format!("{path} changed"),
        },
    };
    differences.push(difference);
}

/// Returns the keys of two maps, each once.
fn keys<'a>(before: Option<&'a Map<String, Value>>, after: Option<&'a Map<String, Value>>) -> Vec<&'a str> {
    let removed = before.into_iter().flat_map(Map::keys);
    let removed = removed.filter(|key| !after.is_some_and(|after| after.contains_key(*key)));
    after.into_iter().flat_map(Map::keys).chain(removed).map(String::as_str).collect()
}

/// Returns whether the value at a path may be secret. `headers` of the whole file are names of header families.
fn is_hidden(path: &str) -> bool {
    path != "headers" && HIDDEN.contains(&path.rsplit('.').next().unwrap_or(path))
}

fn len(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.len(),
        Value::Object(entries) => entries.len(),
        _ => 1,
    }
}

/// Returns a value as in a file, shortened. Returns `None` if a part of it may be secret.
fn shown(value: &Value) -> Option<String> {
    let text = match value {
        Value::String(text) if text.contains("://") && text.contains('@') => return None,
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let items: Option<Vec<String>> = items.iter().map(shown).collect();
            format!("[{}]", items?.join(", "))
        }
        Value::Object(entries) => {
            let entry = |(key, value): (&String, &Value)| {
                if is_hidden(key) { None } else { Some(format!("{key}: {}", shown(value)?)) }
            };
            let entries: Option<Vec<String>> = entries.iter().map(entry).collect();
            format!("{{{}}}", entries?.join(", "))
        }
        other => other.to_string(),
    };
    Some(cut(&text, MAX_VALUE_CHARS))
}

/// Returns the text, or its beginning and `…`.
fn cut(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some(_) => text.chars().take(max - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

/// Joins changes for a log line.
pub(super) fn in_one_line(changes: &[String]) -> String {
    let mut line = String::new();
    for (index, change) in changes.iter().enumerate() {
        if line.len() + change.len() > MAX_LINE_CHARS && index > 0 {
            return format!("{line}; and {} more changes", changes.len() - index);
        }
        line.push_str(if index == 0 { "" } else { "; " });
        line.push_str(change);
    }
    if line.is_empty() { "no changes".to_owned() } else { line }
}

/// Settings from the command line, which override the rule file.
#[derive(Clone, Debug, Default)]
pub(crate) struct CliOverrides {
    pub(crate) http: Option<Address>,
    pub(crate) admin: Option<Address>,
    pub(crate) store: Option<String>,
}

/// The settings of a rule file that need a restart.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartupOnly {
    gateway: Option<Layout>,
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    workers: Option<u16>,
    max_connections: Option<u32>,
    max_buffered: Option<u64>,
    drain: Duration,
}

impl StartupOnly {
    pub(super) fn of(file: &RuleFile) -> Self {
        Self { gateway: file.gateway.as_ref().map(Layout::of) }
    }

    /// Warns about changes from `before` to `after` that need a restart. A change back to the settings in force
    /// (`self`) needs none.
    pub(super) fn warn_of_changes(&self, before: &Self, after: &Self) {
        for (name, differs) in FIELDS {
            if differs(before, after) && differs(self, after) {
                notice::warn(format_args!("{name} has changed: restart the server to apply it"));
            }
        }
    }
}

impl Layout {
    fn of(gateway: &GatewayRule) -> Self {
        let GatewayRule { workers, max_connections, max_buffered, timeouts, .. } = gateway;
        Self {
            workers: *workers,
            max_connections: *max_connections,
            max_buffered: max_buffered.map(|size| size.bytes()),
            drain: timeouts.drain.duration(),
        }
    }
}

/// Returns whether two differ in one setting.
type Differs = fn(&StartupOnly, &StartupOnly) -> bool;

const FIELDS: [(&str, Differs); 5] = [
    ("gateway", |one, other| one.gateway.is_some() != other.gateway.is_some()),
    ("gateway.workers", |one, other| differ(one, other, |layout| layout.workers)),
    ("gateway.max_connections", |one, other| differ(one, other, |layout| layout.max_connections)),
    ("gateway.max_buffered", |one, other| differ(one, other, |layout| layout.max_buffered)),
    ("gateway.timeouts.drain", |one, other| differ(one, other, |layout| layout.drain)),
];

/// Returns `false` if one of them has no gateway: that is reported by its own entry.
fn differ<T: PartialEq>(one: &StartupOnly, other: &StartupOnly, part: impl Fn(Layout) -> T) -> bool {
    one.gateway.zip(other.gateway).is_some_and(|(one, other)| part(one) != part(other))
}

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

#[cfg(test)]
mod tests {
    use tollgate_config::RuleFile;

    use super::*;

    fn parsed(text: &str) -> Parsed {
        RuleFile::parse("tollgate.yaml", text).expect("the rules are valid")
    }

    fn described(before: &str, after: &str) -> String {
        in_one_line(&between_files(&parsed(before), &parsed(after)))
    }

    #[test]
    fn numbers_of_a_limit_are_shown_old_and_new() {
        let limit = |settings: &str| format!("limits: [{{ name: per-user, key: ip, {settings} }}]\n");
        let before = limit("limit: 50, window: 60s");
        for (after, expected) in [
            (limit("limit: 50, window: 1m"), "no changes"),
            (limit("limit: 60, window: 30s"), "per-user: limit 50 → 60, window 60s → 30s"),
            (limit("limit: 50, window: 60s, shadow: true"), "per-user: shadow unset → true"),
            (limit("limit: 50, window: 60s, match: { path: [/a, /b] }"), "per-user: match unset → {path: [/a, /b]}"),
            (
                limit("limit: 50, window: 60s, ban: { after: 5, within: 1m, for: 10m }"),
                "per-user: ban unset → {after: 5, for: 10m, within: 1m}",
            ),
            (
                limit("capacity: 5, refill: 1/s, algorithm: token_bucket"),
                "per-user: algorithm unset → token_bucket, \
              capacity unset → 5, refill unset → 1/s, limit 50 → unset, window 60s → unset",
            ),
        ] {
            assert_eq!(described(&before, &after), expected);
        }
    }

    #[test]
    fn keys_of_users_header_values_and_logins_are_not_shown() {
        let file = |overrides: &str, header: &str, store: &str| {
            format!(
                "store: {store}\ngateway: {{ routes: [{{ path: /, upstream: echo, request_headers: {{ set: {{ x-key: \
                 {header} }} }} }}] }}\nlimits: [{{ name: a, key: header:x, limit: 1, window: 1s, overrides: {overrides} }}]\n"
            )
        };
        let before = file("[{ key: ann, limit: 2 }]", "hunter1", "redis://:pw1@h:1");
        let after = file("[{ key: bob, limit: 2 }, { key: cat, limit: 2 }]", "hunter2", "redis://:pw2@h:1");
        let expected = "a: overrides 1 → 2 entries; store changed; route /: request_headers.set changed";
        assert_eq!(described(&before, &after), expected);
    }

    #[test]
    fn routes_listeners_and_settings_are_shown() {
        let gateway = |listen: &str, timeout: &str, settings: &str| {
            format!(
                "gateway: {{ listen: '{listen}', routes: [{{ path: /, upstream: echo, timeout: {timeout} }}]{settings} }}\n"
            )
        };
        let before = gateway("127.0.0.1:8080", "30s", "");
        for (after, expected) in [
            (gateway("127.0.0.1:8080", "30s", ""), "no changes"),
            (gateway("127.0.0.1:8081", "30s", ""), "gateway.listen 127.0.0.1:8080 → 127.0.0.1:8081"),
            (gateway("127.0.0.1:8080", "10s", ""), "route /: timeout 30s → 10s"),
            (gateway("127.0.0.1:8080", "30s", ", max_head: 8KiB"), "gateway.max_head unset → 8KiB"),
            (
                "limits: [{ name: a, limit: 1, window: 1s }]\n".to_owned(),
                "added a; removed route /; gateway.listen 127.0.0.1:8080 → unset",
            ),
        ] {
            assert_eq!(described(&before, &after), expected);
        }
    }

    #[test]
    fn a_change_of_everything_is_bounded() {
        let many = |from: usize, limit: u32| {
            let limits = (from..from + 1000).map(|number| {
                format!(
                    "  - {{ name: limit-{number:04}, description: '{}', limit: {limit}, window: 1s }}\n",
                    "x".repeat(500)
                )
            });
            format!("limits:\n{}", limits.collect::<String>())
        };
        let changes = between_files(&parsed(&many(0, 1)), &parsed(&many(500, 2)));
        assert_eq!(changes.len(), 23);
        assert_eq!(changes[0].split(", ").count(), 10, "{}", changes[0]);
        assert_eq!(changes[1], "limit-0500: limit 1 → 2");
        assert!(changes[21].ends_with(" and 470 more") && changes[22].ends_with(" and 490 more"), "{changes:?}");
        let line = in_one_line(&changes);
        assert!(line.chars().count() < 2 * MAX_LINE_CHARS, "{}", line.len());
    }
}
