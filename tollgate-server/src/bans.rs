//! Bans of keys that operators set through the admin API.
//!
//! In memory they end with the process, unless there is a state file: then a file beside it keeps them. On Redis they are
//! shared: a node writes them only if no other node has written in between, and all nodes look for changes every few
//! seconds. While Redis fails, nodes keep the bans that they know, and no ban can be set or lifted.

use std::fmt;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tollgate::Timestamp;
use tollgate::redis::{RedisLimiter, StoreError};
use tollgate_rules::internal::read_bounded;
use tollgate_rules::{Gate, KeyBan};
use tollgate_telemetry::notice;

use crate::atomic_file::{replace, with_suffix};

/// The largest file that is read: the most bans with the longest keys and names.
const MAX_FILE_BYTES: u64 = 32 << 20;

/// The most bans at a time. Each is in the memory of every node.
pub(crate) const MAX_BANS: usize = 10_000;

/// The most bytes of a banned key, all parts together.
pub(crate) const MAX_KEY_BYTES: usize = 1024;

/// The longest ban.
pub(crate) const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);

/// The time between two looks for the bans of other nodes, and for bans that have ended.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The most attempts to write while other nodes write too.
const MAX_ATTEMPTS: u32 = 5;

/// The state on Redis expires this long after the last ban has ended.
const KEEP_FOR: Duration = Duration::from_secs(24 * 3600);

/// The bans of a server.
pub(crate) struct Bans {
    gate: Gate,
    /// The version on Redis that this node has.
    version: AtomicU64,
    /// Held while bans change.
    changing: tokio::sync::Mutex<()>,
    /// The file that keeps the bans of a store in memory.
    path: Option<PathBuf>,
}

/// Why a ban was not set or lifted.
#[derive(Debug)]
pub(crate) enum BanError {
    TooMany,
    Store(StoreError),
    /// Other nodes changed bans at the same time.
    Busy,
}

impl fmt::Display for BanError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany => {
                write!(out, "{MAX_BANS} keys are banned already: lift other bans, or use `blocked` in the rules")
            }
            Self::Store(error) => write!(out, "the store is unavailable ({error}): try again later"),
            Self::Busy => out.write_str("other nodes change bans at the same time: try again"),
        }
    }
}

/// A ban on Redis.
#[derive(Serialize, Deserialize)]
struct StoredBan {
    limit: String,
    key: Vec<String>,
    /// Microseconds since the Unix epoch, by the clock of Redis.
    until: u64,
    /// As `until`.
    since: u64,
    by: String,
}

/// A change of one ban.
#[derive(Clone, Copy)]
enum Change<'c> {
    Set { lasts: Duration, by: &'c str },
    Lift,
}

impl Bans {
    /// Creates the bans of a server, with those in the file beside a state file.
    pub(crate) fn restored(gate: Gate, state: Option<&Path>) -> Self {
        let path = state.map(|state| with_suffix(state, ".bans"));
        if let Some(path) = &path {
            match read_bounded(path, MAX_FILE_BYTES) {
                Ok(bytes) => gate.set_key_bans(decode(&bytes, &path.display().to_string())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => notice::warn(format_args!(
                    "cannot read the bans in {}: {error}: none is in force, ban the keys again",
                    path.display()
                )),
            }
        }
        Self { gate, version: AtomicU64::new(0), changing: tokio::sync::Mutex::new(()), path }
    }

    /// Creates the bans of a server with [those of another process](Self::encoded), and keeps them in the file beside a
    /// state file.
    pub(crate) fn taken_over(gate: Gate, state: Option<&Path>, bans: &[u8]) -> Self {
        let path = state.map(|state| with_suffix(state, ".bans"));
        gate.set_key_bans(decode(bans, "the process before"));
        Self { gate, version: AtomicU64::new(0), changing: tokio::sync::Mutex::new(()), path }
    }

    /// Returns the bans, for another process.
    pub(crate) fn encoded(&self) -> Vec<u8> {
        encode(&self.gate.key_bans())
    }

    /// Bans a key of a limit in the name of an operator, or replaces its ban.
    pub(crate) async fn ban(
        &self,
        limit: &str,
        key: &[String],
        lasts: Duration,
        by: impl fmt::Display,
    ) -> Result<(), BanError> {
        self.change((limit, key), Change::Set { lasts, by: &by.to_string() }).await
    }

    /// Lifts the ban of a key, if there is one.
    pub(crate) async fn lift(&self, limit: &str, key: &[String]) -> Result<(), BanError> {
        self.change((limit, key), Change::Lift).await
    }

    /// Returns the bans that have not ended, the newest first.
    pub(crate) fn list(&self) -> Vec<KeyBan> {
        let now = self.gate.wall_time();
        let mut bans: Vec<KeyBan> = self.gate.key_bans().into_iter().filter(|ban| ban.until > now).collect();
        bans.sort_by_key(|ban| std::cmp::Reverse(ban.since));
        bans
    }

    /// Returns those of the limits in which a key is banned, in whatever spelling.
    pub(crate) fn limits_that_ban<'l>(&self, limits: &'l [String], key: &[String]) -> Vec<&'l String> {
        let bans = self.list();
        limits.iter().filter(|limit| bans.iter().any(self.same_key(limit, key))).collect()
    }

    /// Returns a test for bans of a key, which may have another spelling.
    fn same_key<'k>(&'k self, limit: &'k str, key: &[String]) -> impl Fn(&KeyBan) -> bool + use<'k> {
        let normal = self.normal_key(limit, key);
        move |ban| ban.limit == limit && self.normal_key(limit, &ban.key) == normal
    }

    /// Returns the key as its limit counts it, or as given if there is no such limit or it cannot have the key.
    pub(crate) fn normal_key(&self, limit: &str, key: &[String]) -> Vec<String> {
        self.gate.normal_key(limit, key).unwrap_or_else(|_| key.to_vec())
    }

    async fn change(&self, key: (&str, &[String]), change: Change<'_>) -> Result<(), BanError> {
        let _alone = self.changing.lock().await;
        let is_same = self.same_key(key.0, key.1);
        let Some(redis) = self.gate.redis() else {
            let now = self.gate.wall_time();
            let bans = changed(self.gate.key_bans(), now, key, (change, &is_same))?;
            let encoded = encode(&bans);
            self.gate.set_key_bans(bans);
            self.save(encoded).await;
            return Ok(());
        };
        for _ in 0..MAX_ATTEMPTS {
            let stored = redis.load_bans().await.map_err(BanError::Store)?;
            let bans = changed(decode(&stored.state, "Redis"), stored.now, key, (change, &is_same))?;
            if self.write(&redis, stored.version, bans, stored.now).await.map_err(BanError::Store)? {
                return Ok(());
            }
        }
        Err(BanError::Busy)
    }

    /// Writes bans to Redis if their version is the expected one, and applies them. Returns whether they were written.
    async fn write(
        &self,
        redis: &RedisLimiter,
        expected: u64,
        bans: Vec<KeyBan>,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let last = bans.iter().map(|ban| ban.until.as_micros()).max().unwrap_or(0);
        let keep_for = Duration::from_micros(last.saturating_sub(now.as_micros())) + KEEP_FOR;
        let is_written = redis.store_bans(expected, &encode(&bans), keep_for).await?;
        if is_written {
            self.version.store(expected + 1, Relaxed);
            self.gate.set_key_bans(bans);
        }
        Ok(is_written)
    }

    /// Follows the bans of other nodes, and forgets those that have ended. Never returns.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            if let Some(redis) = self.gate.redis() {
                // The store reports its own failures.
                _ = self.follow(&redis).await;
            }
            self.forget_ended().await;
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn follow(&self, redis: &RedisLimiter) -> Result<(), StoreError> {
        let (known, newest) = (self.version.load(Relaxed), redis.bans_version().await?);
        if newest == known {
            return Ok(());
        }
        let _alone = self.changing.lock().await;
        let stored = redis.load_bans().await?;
        let own = self.gate.key_bans();
        if stored.version < self.version.load(Relaxed) && !own.is_empty() {
            // Redis has lost them, as a failover can do.
            if self.write(redis, stored.version, own, stored.now).await? {
                notice::warn("Redis had lost the bans of operators, as a failover can: this node restored them");
            }
            return Ok(());
        }
        self.version.store(stored.version, Relaxed);
        self.gate.set_key_bans(decode(&stored.state, "Redis"));
        Ok(())
    }

    /// Writes the file, if there is one. The bans are in force in any case.
    async fn save(&self, encoded: Vec<u8>) {
        let Some(path) = self.path.clone() else { return };
        let shown = path.display().to_string();
        let write = move || replace(&path, |mut file| file.write_all(&encoded).map(|()| true));
        let error = match tokio::task::spawn_blocking(write).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        notice::warn(format_args!(
            "cannot write bans to {shown}, so they end with this process: {error}: make its folder writable for the user \
             of this process"
        ));
    }

    /// Forgets bans that have ended, so that requests need not look for any once the last has.
    async fn forget_ended(&self) {
        let _alone = self.changing.lock().await;
        let (all, now) = (self.gate.key_bans(), self.gate.wall_time());
        if all.iter().any(|ban| ban.until <= now) {
            self.gate.set_key_bans(all.into_iter().filter(|ban| ban.until > now).collect());
        }
    }
}

/// Returns the bans that last, with one of them changed.
fn changed(
    mut bans: Vec<KeyBan>,
    now: Timestamp,
    (limit, key): (&str, &[String]),
    (change, is_same): (Change<'_>, &dyn Fn(&KeyBan) -> bool),
) -> Result<Vec<KeyBan>, BanError> {
    bans.retain(|ban| ban.until > now && !is_same(ban));
    if let Change::Set { lasts, by } = change {
        if bans.len() >= MAX_BANS {
            return Err(BanError::TooMany);
        }
        let (limit, key, by) = (limit.to_owned(), key.to_vec(), by.to_owned());
        bans.push(KeyBan { limit, key, since: now, until: now.saturating_add(lasts), by });
    }
    Ok(bans)
}

fn encode(bans: &[KeyBan]) -> Vec<u8> {
    let stored = |ban: &KeyBan| StoredBan {
        limit: ban.limit.clone(),
        key: ban.key.clone(),
        until: ban.until.as_micros(),
        since: ban.since.as_micros(),
        by: ban.by.clone(),
    };
    serde_json::to_vec(&bans.iter().map(stored).collect::<Vec<_>>()).unwrap_or_default()
}

/// Returns the bans in a state. A state that cannot be read has none, and the next change replaces it.
fn decode(state: &[u8], place: &str) -> Vec<KeyBan> {
    if state.is_empty() {
        return Vec::new();
    }
    match serde_json::from_slice::<Vec<StoredBan>>(state) {
        Ok(stored) => stored
            .into_iter()
            .take(MAX_BANS)
            .map(|StoredBan { limit, key, until, since, by }| {
                let (since, until) = (Timestamp::from_micros(since), Timestamp::from_micros(until));
                KeyBan { limit, key, since, until, by }
            })
            .collect(),
        Err(_) => {
            notice::warn(format_args!("the bans in {place} are damaged, and none is in force: ban the keys again"));
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use testkit::redis::RedisServer;
    use tollgate::redis::RedisLimiter;
    use tollgate_rules::RuleSet;

    use super::*;

    #[test]
    fn number_of_bans_is_bounded() {
        let now = Timestamp::from_secs(1_000);
        let set = Change::Set { lasts: Duration::from_secs(1_000), by: "local" };
        let key = |number: usize| [number.to_string()];
        let mut bans = Vec::new();
        for number in 0..MAX_BANS {
            let (limit, by, until) = ("a".to_owned(), "local".to_owned(), Timestamp::from_secs(2_000));
            bans.push(KeyBan { limit, key: key(number).to_vec(), since: now, until, by });
        }
        let first = |ban: &KeyBan| ban.key == key(0);
        let none = |_: &KeyBan| false;
        assert!(matches!(changed(bans.clone(), now, ("a", &key(MAX_BANS)), (set, &none)), Err(BanError::TooMany)));
        assert_eq!(changed(bans.clone(), now, ("a", &key(0)), (set, &first)).unwrap().len(), MAX_BANS);
        assert_eq!(changed(bans.clone(), now, ("a", &key(0)), (Change::Lift, &first)).unwrap().len(), MAX_BANS - 1);
        assert_eq!(changed(bans, Timestamp::from_secs(2_000), ("a", &key(0)), (set, &first)).unwrap().len(), 1);
    }

    #[tokio::test]
    async fn file_keeps_bans_of_a_store_in_memory() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let state = folder.path().join("state");
        let start = || {
            let rules = RuleSet::builder().build().expect("no rules are valid");
            Bans::restored(Gate::in_memory(rules).expect("no limits fit"), Some(&state))
        };
        let key = ["ann".to_owned()];
        start().ban("a", &key, Duration::from_secs(60), "local").await.expect("it is set");
        let restarted = start();
        let bans = restarted.list();
        assert_eq!(
            (bans.len(), &*bans[0].by, bans[0].until),
            (1, "local", bans[0].since.saturating_add(Duration::from_secs(60)))
        );
        restarted.lift("a", &key).await.expect("it is lifted");
        assert!(start().gate.key_bans().is_empty());
        std::fs::write(folder.path().join("state.bans"), "damaged").expect("the folder is writable");
        assert!(start().gate.key_bans().is_empty());
    }

    #[tokio::test]
    async fn nodes_share_bans_and_restore_lost_ones() {
        let server = RedisServer::start();
        let node = || async {
            let rules = RuleSet::builder().build().expect("no rules are valid");
            let gate =
                Gate::on_redis(rules, RedisLimiter::builder(server.url())).await.expect("the settings are valid");
            Bans::restored(gate, None)
        };
        let (one, other) = (node().await, node().await);
        let (minute, key) = (Duration::from_secs(60), ["ann".to_owned()]);
        let (first, second) = tokio::join!(one.ban("a", &key, minute, "one"), other.ban("b", &key, minute, "other"));
        first.and(second).expect("both are set");
        let redis = one.gate.redis().expect("the store is Redis");
        for node in [&one, &other] {
            node.follow(&redis).await.expect("Redis answers");
            let mut limits: Vec<String> = node.gate.key_bans().into_iter().map(|ban| ban.limit).collect();
            limits.sort_unstable();
            assert_eq!(limits, ["a", "b"]);
        }
        assert!(redis.store_bans(2, b"damaged", minute).await.expect("Redis answers"));
        one.follow(&redis).await.expect("Redis answers");
        assert!(one.gate.key_bans().is_empty());
        one.ban("a", &key, minute, "one").await.expect("it replaces the damaged state");
        other.follow(&redis).await.expect("Redis answers");
        server.command(&["FLUSHALL"]);
        other.follow(&redis).await.expect("Redis answers");
        assert_eq!(redis.bans_version().await.expect("Redis answers"), 1, "the node has restored them");
        one.lift("a", &key).await.expect("Redis answers");
        other.follow(&redis).await.expect("Redis answers");
        assert!(one.gate.key_bans().is_empty() && other.gate.key_bans().is_empty());
    }
}
