//! The store of the counts.

use schemars::JsonSchema;
use serde::Deserialize;

use super::notation::{or_value, or_value_of};
use crate::forms::{KeyPrefix, StoreUrl};

/// The store of the counts: a URL, with or without settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = or_value_of("url"))]
pub struct StoreRule {
    /// `memory`, or a URL: `redis://h:6379`, `rediss://h:6379`, `redis+cluster://h1:7001,h2:7002`,
    /// `redis+sentinel://h1:26379,h2:26379/mymaster` or `unix:///path/to/socket`.
    pub url: StoreUrl,
    /// The prefix of all keys and channels: `prefix:rate_limit:…`. Fleets with different prefixes can share one Redis
    /// without sharing counts.
    pub prefix: Option<KeyPrefix>,
    /// A PEM file with the trusted authorities, instead of the public ones, relative to the rule file.
    pub ca: Option<String>,
    /// A PEM file with the client certificate, relative to the rule file. Needs `client_key`.
    pub client_cert: Option<String>,
    /// A PEM file with the private key of `client_cert`, relative to the rule file.
    pub client_key: Option<String>,
    /// The ACL user to log in as. Needs `password_file`.
    pub username: Option<String>,
    /// A file with the password, relative to the rule file. It is read for every new connection.
    pub password_file: Option<String>,
    /// The ACL user to log in as at the sentinels. Needs `sentinel_password_file`.
    pub sentinel_username: Option<String>,
    /// A file with the password of the sentinels, relative to the rule file.
    pub sentinel_password_file: Option<String>,
    /// How the states of keys are stored: `compact` takes less of Redis's memory, and more of its time. Counts start
    /// from zero when it changes.
    #[serde(default)]
    pub layout: LayoutName,
    /// The number of keys that a limit has at the same time, 1000000 if left out. Needs `layout: compact`. Counts start
    /// from zero when it changes.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub expected_keys: Option<u32>,
}

or_value!(StoreRule, "url");

/// How the states of keys are stored on Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayoutName {
    /// Each key of a limit is a key on Redis.
    #[default]
    Plain,
    /// Many keys of a limit share a hash on Redis, which takes less memory.
    Compact,
}

impl StoreRule {
    /// Returns whether counts are kept in this process.
    pub fn is_memory(&self) -> bool {
        self.url == StoreUrl::Memory
    }

    /// Returns whether both use the same counts.
    pub fn has_counts_of(&self, other: &Self) -> bool {
        let is_same_server = self.url.without_login() == other.url.without_login() && self.prefix == other.prefix;
        is_same_server && self.layout == other.layout && self.expected_keys == other.expected_keys
    }

    /// Returns the settings that apply to another URL. A login in the URL replaces `username` and `password_file`.
    pub(crate) fn at(&self, url: StoreUrl) -> Self {
        let (tls, sentinel, apart) = (url.is_tls(), url.has_sentinels(), !url.has_login());
        let kept = |value: &Option<String>, is_kept: bool| value.clone().filter(|_| is_kept);
        let is_redis = url != StoreUrl::Memory;
        Self {
            prefix: self.prefix.clone().filter(|_| is_redis),
            ca: kept(&self.ca, tls),
            client_cert: kept(&self.client_cert, tls),
            client_key: kept(&self.client_key, tls),
            username: kept(&self.username, is_redis && apart),
            password_file: kept(&self.password_file, is_redis && apart),
            sentinel_username: kept(&self.sentinel_username, sentinel),
            sentinel_password_file: kept(&self.sentinel_password_file, sentinel),
            layout: if is_redis { self.layout } else { LayoutName::Plain },
            expected_keys: self.expected_keys.filter(|_| is_redis),
            url,
        }
    }
}
