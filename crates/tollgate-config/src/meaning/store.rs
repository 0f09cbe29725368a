//! Checks that the settings of a store fit its URL and each other, and that limits use stores that exist.

use crate::forms::{StoreUrl, nearest};
use crate::node::Node;
use crate::problem::{Findings, shown};
use crate::setting_error::NO_DEFAULT;
use crate::types::{LayoutName, LimitRule, RuleFile, StoreRule};

/// The name of the store at the top of the file.
const DEFAULT: &str = "default";
/// The store in this process, which has no name in `stores`.
const MEMORY: &str = "memory";

/// `node` is the store, a string or a map.
pub(super) fn check(store: &StoreRule, node: &Node, findings: &mut Findings) {
    if node.lost("url") {
        return;
    }
    let url = &store.url;
    let mut misplaced = |keys: &[&str], message: &str, fix: &str| {
        for key in keys.iter().filter(|key| node.mentions(key)) {
            findings.error(node.key_at(key), format!("{key} {message}"), fix);
        }
    };
    if *url == StoreUrl::Memory {
        let keys: Vec<&str> = node.keys().filter(|key| *key != "url").collect();
        misplaced(&keys, "has no effect with the store in memory", "set `url` to a Redis, or remove it");
        return;
    }
    if !url.is_tls() {
        let fix = "write rediss:// instead of redis:// in `url`, or remove it";
        misplaced(&["ca", "client_cert", "client_key"], "has no effect without TLS", fix);
    }
    if !url.has_sentinels() {
        let fix = "write redis+sentinel://h1:26379,h2:26379/mymaster in `url`, or remove it";
        misplaced(&["sentinel_username", "sentinel_password_file"], "has no effect without sentinels", fix);
    }
    if url.has_user() {
        misplaced(&["username"], "is set, but `url` has a user too", "remove one of them");
    }
    if url.has_password() {
        misplaced(&["password_file"], "is set, but `url` has a password too", "remove the login from `url`");
    }
    if store.layout == LayoutName::Plain && !node.lost("layout") {
        misplaced(
            &["expected_keys"],
            "has no effect without the compact layout",
            "add `layout: compact`, or remove it",
        );
    }
    let alone = [
        ("client_cert", "client_key", "`client_key: client-key.pem`"),
        ("client_key", "client_cert", "`client_cert: client.pem`"),
        ("sentinel_username", "sentinel_password_file", "`sentinel_password_file: FILE`"),
        ("username", "password_file", "`password_file: FILE`"),
    ];
    for (key, needed, addition) in alone {
        let is_in_url = key == "username" && url.has_password();
        if node.mentions(key) && !node.mentions(needed) && !is_in_url {
            findings.error(node.key_at(key), format!("{key} needs {needed}"), format!("add {addition}"));
        }
    }
}

/// Checks the stores that limits choose by name.
pub(super) fn check_named(file: &RuleFile, root: &Node, findings: &mut Findings) {
    let Some(stores) = root.get("stores") else { return };
    for (name, store) in &file.stores {
        let Some(node) = stores.get(name) else { continue };
        if [DEFAULT, MEMORY].contains(&name.as_str()) {
            let message = format!("the name `{name}` is reserved");
            findings.error(stores.key_at(name), message, "choose another name for this store");
        }
        if store.is_memory() && !node.lost("url") {
            let message = format!("store `{name}` is in memory");
            let fix = "write the URL of a Redis, such as redis://10.0.0.5:6379";
            findings.error(node.get("url").map_or(node.at, |url| url.at), message, fix);
        } else {
            check(store, node, findings);
        }
    }
    if root.get("store").is_some() && file.store.is_memory() {
        let (message, fix) = NO_DEFAULT;
        findings.error(root.key_at("stores"), message, fix);
    }
}

/// Checks that the store that a limit chooses exists.
pub(super) fn check_choice(rule: &LimitRule, file: &RuleFile, (node, root): (&Node, &Node), findings: &mut Findings) {
    let Some(name) = rule.store.as_ref().map(|name| name.as_str()) else { return };
    let is_refused = root.lost("stores") || root.get("stores").is_some_and(|stores| stores.lost(name));
    if name == DEFAULT || file.stores.contains_key(name) || is_refused {
        return;
    }
    if name == MEMORY {
        let fix = "remove the line, or write `store: memory` at the top of the file for all limits";
        findings.error(node.value_at("store"), "a limit cannot choose memory", fix);
        return;
    }
    let known = || file.stores.keys().map(String::as_str);
    let name = shown(name);
    let fix = match nearest(&name, known()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if file.stores.is_empty() => {
            format!(
                "add `stores: {{ {name}: redis://HOST:6379 }}` at the top of the file, or write `store: redis://HOST:6379` \
                 there for all limits"
            )
        }
        None => {
            let known: Vec<String> = known().map(|name| format!("`{name}`")).collect();
            format!("use one of {}, or add it to `stores`", known.join(", "))
        }
    };
    findings.error(node.value_at("store"), format!("there is no store `{name}` in `stores`"), fix);
}

/// Warns of stores that no limit chooses.
pub(super) fn check_use(file: &RuleFile, root: &Node, findings: &mut Findings) {
    // Limits that were refused may choose them.
    let Some(stores) = root.get("stores").filter(|_| !findings.refused()) else { return };
    for name in file.stores.keys() {
        let is_chosen = |limit: &LimitRule| limit.store.as_ref().is_some_and(|store| store.as_str() == name);
        if !file.limits.iter().any(is_chosen) {
            let message = format!("no limit is on store `{name}`");
            findings.warning(stores.key_at(name), message, format!("write `store: {name}` in a limit, or remove it"));
        }
    }
}
