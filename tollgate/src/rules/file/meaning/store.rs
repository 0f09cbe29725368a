//! Whether the settings of a store fit its URL and each other.

use crate::rules::file::forms::StoreUrl;
use crate::rules::file::node::Node;
use crate::rules::file::problem::Findings;
use crate::rules::file::types::StoreRule;

/// `node` is the store, which is a text or a map.
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
        let keys = [
            "prefix",
            "ca",
            "client_cert",
            "client_key",
            "username",
            "password_file",
            "sentinel_username",
            "sentinel_password_file",
        ];
        misplaced(&keys, "means nothing to the store in memory", "name a Redis in `url`, or remove it");
        return;
    }
    if !url.is_tls() {
        let fix = "write rediss:// instead of redis:// in `url`, or remove it";
        misplaced(&["ca", "client_cert", "client_key"], "means nothing without TLS", fix);
    }
    if !url.has_sentinels() {
        let fix = "write redis+sentinel://h1:26379,h2:26379/mymaster in `url`, or remove it";
        misplaced(&["sentinel_username", "sentinel_password_file"], "means nothing without sentinels", fix);
    }
    if url.has_user() {
        misplaced(&["username"], "names a user, and so does `url`", "remove one of them");
    }
    if url.has_password() {
        misplaced(&["password_file"], "gives a password, and so does `url`", "remove the login from `url`");
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
