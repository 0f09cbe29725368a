//! The permissions that a limiter needs on Redis, as rules of `ACL SETUSER`.
//!
//! This is the only list of commands: the documentation repeats it, and tests run everything as a user with exactly
//! these permissions.

use super::ConnectError;
use super::settings::RedisSettings;
use super::target::Servers;

/// Commands of this program and its scripts, for decisions, rule sets, the number of nodes and their reports.
const COMMANDS: [&str; 22] = [
    "evalsha",
    "eval",
    "script|load",
    "time",
    "mget",
    "set",
    "del",
    "exists",
    "hget",
    "hmget",
    "hset",
    "hdel",
    "hexists",
    "pexpire",
    "zadd",
    "zcard",
    "zrange",
    "zremrangebyscore",
    "publish",
    "subscribe",
    "ping",
    "info",
];
/// Commands in the compact layout.
const COMPACT: [&str; 1] = ["hrandfield"];
/// Commands on a cluster.
const CLUSTER: [&str; 2] = ["cluster|slots", "asking"];

impl RedisSettings {
    /// Returns the rules of `ACL SETUSER` that the user of these settings needs, without its password: keys, channels
    /// and commands. The sentinels need `+sentinel|get-master-addr-by-name` instead.
    ///
    /// ```
    /// use tollgate::redis::RedisSettings;
    ///
    /// let rules = RedisSettings::new("redis://10.0.0.5").prefix("checkout").acl_rules()?;
    /// assert!(rules.contains(&"~checkout:rate_limit:*".to_owned()));
    /// assert!(rules.contains(&"+evalsha".to_owned()));
    /// # Ok::<(), tollgate::redis::ConnectError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a setting is invalid.
    pub fn acl_rules(&self) -> Result<Vec<String>, ConnectError> {
        let resolved = self.resolved()?;
        let ours = resolved.names.of("*");
        let mut rules = vec![format!("~{ours}"), format!("&{ours}")];
        let allow = |command: &&str| format!("+{command}");
        rules.extend(COMMANDS.iter().map(allow));
        if resolved.names.hashes().is_some() {
            rules.extend(COMPACT.iter().map(allow));
        }
        if matches!(resolved.servers, Servers::Cluster(_)) {
            rules.extend(CLUSTER.iter().map(allow));
        }
        if resolved.login.database() != 0 {
            rules.push("+select".to_owned());
        }
        Ok(rules)
    }
}
