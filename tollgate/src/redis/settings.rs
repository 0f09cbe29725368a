//! Settings of a store on Redis: its URL, the login, TLS, and the prefix of its keys.
//!
//! Deliberately not here: limits, timeouts and failure policies, which belong to a limiter.
//!
//! Also the permissions that a limiter needs on Redis, as rules of `ACL SETUSER`. This is the only list of commands:
//! the documentation repeats it, and tests run everything as a user with exactly these permissions.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use redis::RedisConnectionInfo;

use super::ConnectError;
use super::credentials::{Certificates, Login, Pem, Secret, Tls};
use super::names::{EXPECTED_KEYS, Layout, MAX_EXPECTED_KEYS, Names};
use super::target::{Servers, Target};

/// The URL of a Redis, its credentials, and the prefix of all keys.
///
/// A URL is often enough: [`RedisLimiter::builder`](super::RedisLimiter::builder) and
/// [`RuleSets::connect`](super::RuleSets::connect) accept one instead of these settings.
///
/// ```
/// use tollgate::redis::RedisSettings;
///
/// let settings = RedisSettings::new("redis://10.0.0.5:6379")
///     .prefix("checkout")
///     .username("limiter")
///     .password_file("/run/secrets/redis");
/// ```
#[derive(Clone)]
#[must_use]
pub struct RedisSettings {
    url: String,
    prefix: Option<String>,
    certificates: Certificates,
    username: Option<String>,
    password: Option<Secret>,
    sentinel_username: Option<String>,
    sentinel_password: Option<Secret>,
    layout: Layout,
    expected_keys: Option<u64>,
}

impl RedisSettings {
    /// Creates settings for the Redis at that URL: `redis://[user:password@]host[:6379][/db]`, `rediss://…` for TLS,
    /// `redis+cluster://h1:7001,h2:7002`, `redis+sentinel://h1:26379,h2:26379/mymaster` or
    /// `unix:///path/to/socket[?db=n]`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: None,
            certificates: Certificates::default(),
            username: None,
            password: None,
            sentinel_username: None,
            sentinel_password: None,
            layout: Layout::Plain,
            expected_keys: None,
        }
    }

    /// Sets the prefix of all keys and channels: `prefix:rate_limit:…`. Limiters with different prefixes do not share
    /// counts or rule sets.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = Some(prefix.into());
        self
    }

    /// Sets how the states of keys are stored. All processes that share limits need the same layout.
    ///
    /// Counts start from zero when the layout changes.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the number of keys that a limit has at the same time, 1,000,000 by default. It determines the number of
    /// hashes in the [compact layout](Layout::Compact). With more than one and a half times as many keys, the layout
    /// saves less memory. All processes that share limits need the same number.
    ///
    /// Counts start from zero when the number changes.
    pub fn expected_keys(mut self, keys: u64) -> Self {
        self.expected_keys = Some(keys);
        self
    }

    /// Sets the certificate authorities of the servers, in PEM, instead of the public ones.
    pub fn tls_ca(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.ca = Some(Pem::Text(pem.into()));
        self
    }

    /// Reads the certificate authorities of the servers from a file in PEM: see [`tls_ca`](Self::tls_ca).
    ///
    /// This file, [`client_cert_file`](Self::client_cert_file) and [`client_key_file`](Self::client_key_file) are read for
    /// every new connection, so that they can be replaced while the program runs. If one cannot be used any more, the
    /// last certificates stay in use: see [`StoreStatus::warnings`](super::StoreStatus).
    pub fn tls_ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.certificates.ca = Some(Pem::File(path.into()));
        self
    }

    /// Sets the certificate that is sent to servers that require one, in PEM, followed by its intermediates. Needs
    /// [`client_key`](Self::client_key) too.
    pub fn client_cert(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.client_cert = Some(Pem::Text(pem.into()));
        self
    }

    /// Sets the private key of [`client_cert`](Self::client_cert), in PEM.
    pub fn client_key(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.client_key = Some(Pem::Text(pem.into()));
        self
    }

    /// Reads [`client_cert`](Self::client_cert) from a file for every new connection.
    pub fn client_cert_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.certificates.client_cert = Some(Pem::File(path.into()));
        self
    }

    /// Reads [`client_key`](Self::client_key) from a file for every new connection.
    pub fn client_key_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.certificates.client_key = Some(Pem::File(path.into()));
        self
    }

    /// Sets the ACL user to log in as, if it is not in the URL.
    pub fn username(mut self, name: impl Into<String>) -> Self {
        self.username = Some(name.into());
        self
    }

    /// Sets the password, if it is not in the URL.
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(Secret::Text(password.into()));
        self
    }

    /// Reads the password from a file for every new connection, so that it can be changed while the program runs.
    /// Trailing newlines are removed. If the file cannot be read any more, the last password stays in use.
    pub fn password_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.password = Some(Secret::File(path.into()));
        self
    }

    /// Sets the ACL user to log in as at the sentinels. Connections to sentinels log in only if they have a password.
    pub fn sentinel_username(mut self, name: impl Into<String>) -> Self {
        self.sentinel_username = Some(name.into());
        self
    }

    /// Sets the password of the sentinels.
    pub fn sentinel_password(mut self, password: impl Into<String>) -> Self {
        self.sentinel_password = Some(Secret::Text(password.into()));
        self
    }

    /// Reads the password of the sentinels from a file: see [`password_file`](Self::password_file).
    pub fn sentinel_password_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.sentinel_password = Some(Secret::File(path.into()));
        self
    }

    /// Checks the settings without connecting.
    ///
    /// # Errors
    ///
    /// If a setting is invalid, or contradicts another one.
    pub fn check(&self) -> Result<(), ConnectError> {
        self.resolved().map(drop)
    }

    pub(super) fn resolved(&self) -> Result<Resolved, ConnectError> {
        let target = Target::parse(&self.url)?;
        let names = self.names()?;
        let (tls, login) = (self.tls(target.tls)?, self.login(&target)?);
        let sentinel_login = self.sentinel_login(&target)?;
        Ok(Resolved { address: target.to_string(), servers: target.servers, tls, login, sentinel_login, names })
    }

    fn names(&self) -> Result<Names, ConnectError> {
        let names = Names::new(self.prefix.as_deref())?;
        let keys = self.expected_keys.unwrap_or(EXPECTED_KEYS);
        if !(1..=MAX_EXPECTED_KEYS).contains(&keys) {
            return Err(wrong(&format!("expected_keys is {keys}"), "use 1 to 1000000000"));
        }
        match self.layout {
            Layout::Compact => Ok(names.in_hashes(keys)),
            Layout::Plain if self.expected_keys.is_some() => {
                let fix = "use the compact layout, or remove expected_keys";
                Err(wrong("expected_keys is set, but the layout is plain", fix))
            }
            Layout::Plain => Ok(names),
        }
    }

    fn login(&self, target: &Target) -> Result<Login, ConnectError> {
        let mut info = target.login.clone();
        if let Some(name) = &self.username {
            if info.username().is_some() {
                return Err(wrong("the user is in the URL and in username", "remove one of them"));
            }
            info = info.set_username(name);
        }
        if self.password.is_some() && info.password().is_some() {
            return Err(wrong("the password is in the URL and in a setting", "remove one of them"));
        }
        if info.username().is_some() && info.password().is_none() && self.password.is_none() {
            return Err(wrong("there is a user without a password", "set password_file, or remove the user"));
        }
        Login::new(info, self.password.clone())
    }

    fn sentinel_login(&self, target: &Target) -> Result<Login, ConnectError> {
        let has_login = self.sentinel_username.is_some() || self.sentinel_password.is_some();
        if has_login && !matches!(target.servers, Servers::Sentinel { .. }) {
            let fix = "use a redis+sentinel:// URL, or remove the login";
            return Err(wrong("a login for sentinels is set, but the URL has no sentinels", fix));
        }
        let mut info = RedisConnectionInfo::default();
        if let Some(name) = &self.sentinel_username {
            if self.sentinel_password.is_none() {
                let fix = "set sentinel_password_file, or remove sentinel_username";
                return Err(wrong("sentinel_username has no password", fix));
            }
            info = info.set_username(name);
        }
        Login::new(info, self.sentinel_password.clone())
    }

    /// Returns the certificates for TLS, or `None` for a URL without TLS.
    fn tls(&self, is_tls: bool) -> Result<Option<Arc<Tls>>, ConnectError> {
        if is_tls {
            return Ok(Some(Arc::new(Tls::new(self.certificates.clone())?)));
        }
        match self.certificates.named().iter().find(|(_, pem)| pem.is_some()) {
            Some((name, _)) => {
                let fix = "use rediss:// instead of redis://, or remove it";
                Err(wrong(&format!("{name} is set, but the URL does not use TLS"), fix))
            }
            None => Ok(None),
        }
    }
}

impl From<String> for RedisSettings {
    fn from(url: String) -> Self {
        Self::new(url)
    }
}

impl From<&str> for RedisSettings {
    fn from(url: &str) -> Self {
        Self::new(url)
    }
}

impl From<&String> for RedisSettings {
    fn from(url: &String) -> Self {
        Self::new(url)
    }
}

/// Shows no user, password or key.
impl fmt::Debug for RedisSettings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = Target::parse(&self.url).map(|target| target.to_string());
        out.debug_struct("RedisSettings")
            .field("address", &address.as_deref().unwrap_or("invalid"))
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// Validated settings, ready to connect.
pub(super) struct Resolved {
    /// The servers, for display.
    pub(super) address: String,
    pub(super) servers: Servers,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) login: Login,
    pub(super) sentinel_login: Login,
    pub(super) names: Names,
}

fn wrong(problem: &str, fix: &str) -> ConnectError {
    ConnectError::new(problem, fix)
}

/// Commands of this program and its scripts, for decisions, rule sets, the number of nodes and their reports.
const COMMANDS: [&str; 24] = [
    "evalsha",
    "eval",
    "script|load",
    "time",
    "mget",
    "getrange",
    "set",
    "setrange",
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

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(settings: RedisSettings) -> String {
        settings.check().expect_err("a mistake").to_string()
    }

    #[test]
    fn contradictions_are_refused_with_the_fix() {
        let at = RedisSettings::new;
        let cases = [
            at("redis://ann:s3cret@h").username("bob"),
            at("redis://:s3cret@h").password("other"),
            at("redis://h").username("ann"),
            at("redis://h").tls_ca("x"),
            at("rediss://h").client_cert("x"),
            at("rediss://h").client_key("x"),
            at("rediss://h").tls_ca("x"),
            at("redis://h").sentinel_password("s3cret"),
            at("redis+sentinel://h/m").sentinel_username("ann"),
            at("redis://h").prefix("a{b}"),
            at("redis://h").expected_keys(1000),
            at("redis://h").layout(Layout::Compact).expected_keys(0),
        ];
        insta::assert_snapshot!(cases.map(problem).join("\n"));
        let missing = problem(at("redis://h").password_file("/nonexistent/s3cret-file"));
        assert!(missing.starts_with("the password file /nonexistent/s3cret-file cannot be read"), "{missing}");
    }

    #[test]
    fn nothing_secret_is_shown() {
        let settings = RedisSettings::new("redis+sentinel://ann:hunter2@a,b/m")
            .sentinel_username("bob")
            .sentinel_password("hunter3")
            .client_key("hunter4")
            .prefix("app");
        let shown = format!("{settings:?} {}", problem(settings.clone()));
        for secret in ["ann", "bob", "hunter"] {
            assert!(!shown.contains(secret), "{shown}");
        }
        assert!(shown.contains("app") && shown.contains("a:26379"), "{shown}");
    }
}
