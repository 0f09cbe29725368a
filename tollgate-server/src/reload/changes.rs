//! Describes the difference between two rule files in a log line.

use std::collections::HashMap;

use tollgate::rules::file::RuleFile;
use tollgate::rules::file::internal::{Address, EnvoyRules, ForwardingName, GatewayRule, LimitRule, RouteRule};

use crate::notice::join_up_to;

/// The most names in a line.
const MAX_NAMES: usize = 10;

const NO_CHANGES: &str = "no changes";

pub(super) fn describe(before: &RuleFile, after: &RuleFile) -> String {
    let (old, new) = (by_name(before), by_name(after));
    let names = |limits: &[LimitRule], keep: &dyn Fn(&LimitRule) -> bool| {
        limits.iter().filter(|limit| keep(limit)).map(|limit| limit.name.as_str().to_owned()).collect::<Vec<_>>()
    };
    let added = names(&after.limits, &|limit| !old.contains_key(limit.name.as_str()));
    let changed = names(&after.limits, &|limit| old.get(limit.name.as_str()).is_some_and(|before| **before != *limit));
    let removed = names(&before.limits, &|limit| !new.contains_key(limit.name.as_str()));
    let mut parts: Vec<String> =
        [("added", added), ("changed", changed), ("removed", removed)].into_iter().filter_map(listed).collect();
    parts.extend(other_changes(before, after).map(|what| format!("changed {what}")));
    if parts.is_empty() { NO_CHANGES.to_owned() } else { parts.join("; ") }
}

/// Describes the changes of limits that come from envoyproxy/ratelimit's configuration, if there are any.
pub(super) fn of_domains(before: &EnvoyRules, after: &EnvoyRules) -> Option<String> {
    let (old, new): (HashMap<_, _>, HashMap<_, _>) = (before.limits().collect(), after.limits().collect());
    let names = |rules: &EnvoyRules, keep: &dyn Fn(&str, &str) -> bool| {
        let kept = rules.limits().filter(|(name, numbers)| keep(name, numbers));
        kept.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    };
    let added = names(after, &|name, _| !old.contains_key(name));
    let changed = names(after, &|name, numbers| old.get(name).is_some_and(|before| *before != *numbers));
    let removed = names(before, &|name, _| !new.contains_key(name));
    let parts: Vec<String> =
        [("added", added), ("changed", changed), ("removed", removed)].into_iter().filter_map(listed).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Joins the changes of the file and of the domains.
pub(super) fn joined(of_file: String, of_domains: Option<String>) -> String {
    match of_domains {
        Some(changes) if of_file == NO_CHANGES => changes,
        Some(changes) => format!("{of_file}; {changes}"),
        None => of_file,
    }
}

fn by_name(file: &RuleFile) -> HashMap<&str, &LimitRule> {
    file.limits.iter().map(|limit| (limit.name.as_str(), limit)).collect()
}

fn listed((verb, names): (&str, Vec<String>)) -> Option<String> {
    (!names.is_empty()).then(|| format!("{verb} {}", join_up_to(&names, MAX_NAMES)))
}

fn routes(file: &RuleFile) -> &[RouteRule] {
    file.gateway.as_ref().map_or(&[], |gateway| &gateway.routes)
}

/// Returns the addresses of the gateway, for plain HTTP and for TLS.
fn listeners(file: &RuleFile) -> (Option<&Address>, Option<&Address>) {
    let Some(gateway) = &file.gateway else { return (None, None) };
    (Some(&gateway.listen), gateway.tls.as_ref().and_then(|tls| tls.listen.as_ref()))
}

/// Returns the gateway without the settings that have their own entry: routes, listeners, and trusted proxies. A
/// gateway that is new or removed is reported elsewhere.
fn of_gateway(file: &RuleFile) -> GatewayRule {
    let mut gateway = file.gateway.clone().unwrap_or_default();
    (gateway.routes, gateway.trusted_proxies) = (Vec::new(), Vec::new());
    gateway.forwarding_header = ForwardingName::default();
    gateway.listen = GatewayRule::default().listen;
    if let Some(tls) = &mut gateway.tls {
        tls.listen = None;
    }
    gateway
}

/// Lists the settings other than limits that differ.
fn other_changes(before: &RuleFile, after: &RuleFile) -> impl Iterator<Item = &'static str> {
    let proxies = |file: &RuleFile| file.gateway.clone().unwrap_or_default().trusted_proxies;
    let believed = |file: &RuleFile| file.gateway.as_ref().map(|gateway| gateway.forwarding_header).unwrap_or_default();
    [
        ("headers", before.headers != after.headers),
        ("body", before.body != after.body),
        ("jwt", before.jwt != after.jwt),
        ("trusted_proxies", proxies(before) != proxies(after)),
        ("forwarding_header", believed(before) != believed(after)),
        ("routes", routes(before) != routes(after)),
        ("listeners", listeners(before) != listeners(after)),
        ("settings of the gateway", of_gateway(before) != of_gateway(after)),
    ]
    .into_iter()
    .filter_map(|(what, differs)| differs.then_some(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_described_by_name() {
        let parsed = |text: &str| RuleFile::parse("tollgate.yaml", text).unwrap();
        let gateway = |listen: &str, settings: &str| {
            parsed(&format!("gateway: {{ listen: '{listen}', routes: [{{ path: /, upstream: echo }}]{settings} }}\n"))
        };
        let before = gateway("127.0.0.1:8080", "");
        for (after, expected) in [
            (gateway("127.0.0.1:8080", ""), "no changes"),
            (gateway("127.0.0.1:8081", ""), "changed listeners"),
            (gateway("127.0.0.1:8080", ", max_head: 8KiB"), "changed settings of the gateway"),
            (parsed("limits: [{ name: a, limit: 1, window: 1s }]\n"), "added a; changed routes; changed listeners"),
        ] {
            assert_eq!(describe(&before, &after), expected);
        }
    }
}
