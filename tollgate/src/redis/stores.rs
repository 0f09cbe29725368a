//! The stores of a limiter: the default one, and those that limits choose by name.
//!
//! Each store has its own servers with their breakers, its own subscription to resets and its own count of nodes. A
//! store that fails therefore affects only its own limits.
//!
//! Keys that are on one store, and on a cluster in one slot, are decided by one script call. `requests.rs` decides
//! requests whose keys need several.
//!
//! While a store fails, each node takes its share of a limit, so it needs the number of nodes that share the store.
//! Every node registers in a sorted set, with Redis's time as score, and reads the number of recent registrations, in
//! one small call about every two seconds, and as soon as Redis is back after a failure: its data may be lost, and a Redis
//! that fails again and again may be back for less than two seconds. A node without a limit with [`OnStoreFailure::Local`](crate::OnStoreFailure)
//! needs no share: it makes the call for the layouts, and does not register.
//!
//! Too small a number admits too much during an outage, and too large a number too little. The largest number of the
//! last minutes is used, and these minutes do not pass while Redis is unreachable.
//!
//! The same call registers the layout of the node's keys, and reads those of others: nodes with different layouts count
//! apart. Nodes without a local share register a compact layout too, so that of two different nodes one at least warns.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::Value;
use smallvec::SmallVec;
use tokio::time::{Instant, sleep};

use super::node::jittered;
use super::script::{ScriptHit, StoreIndex};
use super::topology::Topology;
use super::warnings::{StoreWarning, SubscriptionProblem};
use super::{ConnectError, ServerStatus, StoreError, StoreStatus, names};
use crate::error::InvalidLimit;
use crate::invisible::is_control_or_format;
use crate::limit::{Limit, OnStoreFailure};

/// The name of the store for limits that choose none.
pub(super) const DEFAULT: &str = "default";
/// Names with another meaning.
const RESERVED: [&str; 2] = [DEFAULT, "memory"];
/// Maximum number of stores of one limiter. Each has connections and background tasks.
const MAX_STORES: usize = 16;
/// Maximum length of a store's name, which is used in logs and metrics.
const MAX_NAME: usize = 64;

pub(super) struct Store {
    pub(super) name: Arc<str>,
    pub(super) topology: Arc<Topology>,
    /// Whether the subscription to resets is up. Without it, no denial is cached.
    pub(super) is_subscribed: Arc<AtomicBool>,
    pub(super) subscription_problem: Arc<SubscriptionProblem>,
    pub(super) fleet: Arc<Fleet>,
}

/// All stores of a limiter.
pub(super) struct Stores(Box<[Store]>);

/// Positions of the hits of a request that one script call decides.
pub(super) type Call = SmallVec<[usize; 4]>;

impl Stores {
    pub(super) fn new(stores: Vec<Store>) -> Self {
        Self(stores.into())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Store> {
        self.0.iter()
    }

    pub(super) fn indexed(&self) -> impl Iterator<Item = (StoreIndex, &Store)> {
        (0..).map(StoreIndex).zip(self.iter())
    }

    pub(super) fn at(&self, index: StoreIndex) -> &Store {
        &self.0[index.position()]
    }

    /// Returns the store that has a key.
    pub(super) fn of(&self, hit: &ScriptHit) -> &Store {
        self.at(hit.terms.store)
    }

    /// Returns the store for limits that choose none.
    pub(super) fn default_store(&self) -> &Store {
        self.at(StoreIndex::default())
    }

    /// Returns the store that a limit chooses.
    pub(super) fn chosen_by(&self, limit: &Limit) -> Result<StoreIndex, InvalidLimit> {
        let Some(name) = limit.store() else { return Ok(StoreIndex::default()) };
        let found = self.indexed().find(|(_, store)| *store.name == *name);
        found.map(|(index, _)| index).ok_or_else(|| {
            let known: Vec<String> = self.iter().map(|store| format!("`{}`", store.name)).collect();
            let fix = format!("use one of {}, or add a store of that name", known.join(", "));
            InvalidLimit::new("store", format!("there is no store `{name}`"), fix).of_limit(limit.name())
        })
    }

    /// Checks that every limit chooses a store that exists, and that variants of a limit choose the same: they share
    /// its keys.
    pub(super) fn check(&self, limits: &[Limit], base_count: usize) -> Result<(), InvalidLimit> {
        let (base, beside) = limits.split_at(base_count);
        let mut chosen = HashMap::new();
        for limit in base {
            chosen.insert(limit.name(), (limit, self.chosen_by(limit)?));
        }
        for variant in beside {
            let store = self.chosen_by(variant)?;
            let of = chosen.get(variant.name()).filter(|(limit, _)| limit.is_variant_of(variant));
            if of.is_some_and(|(_, other)| *other != store) {
                let problem = "a variant is on another store than its limit".to_owned();
                let fix = "give both the same store: a variant counts the keys of its limit";
                return Err(InvalidLimit::new("store", problem, fix).of_limit(variant.name()));
            }
        }
        Ok(())
    }

    /// Returns whether one script call can decide all hits.
    pub(super) fn is_one_call(&self, hits: &[ScriptHit]) -> bool {
        let Some((first, others @ [_, ..])) = hits.split_first() else { return true };
        if others.iter().any(|hit| hit.terms.store != first.terms.store) {
            return false;
        }
        if !self.of(first).topology.is_cluster() {
            return true;
        }
        let slot = names::slot(&first.name);
        others.iter().all(|hit| names::slot(&hit.name) == slot)
    }

    /// Groups hits into as many script calls as their keys need.
    pub(super) fn calls<'a>(&self, hits: impl IntoIterator<Item = &'a ScriptHit>) -> SmallVec<[Call; 2]> {
        let mut destinations: SmallVec<[(StoreIndex, u16); 4]> = SmallVec::new();
        let mut calls: SmallVec<[Call; 2]> = SmallVec::new();
        for (position, hit) in hits.into_iter().enumerate() {
            let slot = if self.of(hit).topology.is_cluster() { names::slot(&hit.name) } else { 0 };
            let destination = (hit.terms.store, slot);
            match destinations.iter().position(|other| *other == destination) {
                Some(call) => calls[call].push(position),
                None => {
                    destinations.push(destination);
                    calls.push(SmallVec::from_iter([position]));
                }
            }
        }
        calls
    }

    /// Returns whether the subscription to resets of a key is up.
    pub(super) fn is_subscribed_for(&self, hit: &ScriptHit) -> bool {
        self.of(hit).is_subscribed.load(Ordering::Relaxed)
    }

    /// Registers this node in the fleet of every store that has a limit with a local share.
    pub(super) fn join_fleets(&self, limits: &[Limit], default: OnStoreFailure) {
        for limit in limits {
            if limit.on_store_failure().unwrap_or(default) == OnStoreFailure::Local
                && let Ok(index) = self.chosen_by(limit)
            {
                self.at(index).fleet.join();
            }
        }
    }

    /// Returns why some or all keys cannot be decided. `None` if all stores are available.
    pub(super) fn why_unavailable(&self) -> Option<StoreError> {
        self.indexed().find_map(|(index, store)| {
            let why = store.topology.why_unavailable()?;
            let is_default = index == StoreIndex::default();
            Some(if is_default { why } else { why.at(&format_args!("store {}", store.name)) })
        })
    }

    pub(super) fn status(&self) -> Vec<StoreStatus> {
        let status = |store: &Store| StoreStatus {
            name: store.name.to_string(),
            address: store.topology.address().to_owned(),
            why_unavailable: store.topology.why_unavailable(),
            warnings: {
                let of_processes = store.fleet.warnings().into_iter().chain(store.subscription_problem.warning());
                store.topology.warnings().into_iter().chain(of_processes).collect()
            },
        };
        self.iter().map(status).collect()
    }

    pub(super) fn servers(&self) -> Vec<ServerStatus> {
        let of_store = |store: &Store| {
            let name = store.name.to_string();
            let nodes = store.topology.nodes().into_iter();
            nodes.map(move |node| ServerStatus {
                store: name.clone(),
                address: node.to_string(),
                available: node.breaker.why().is_none(),
                breaker: node.breaker.state(),
                memory: node.memory(),
            })
        };
        self.iter().flat_map(of_store).collect()
    }
}

/// Checks the name of a store that limits choose.
pub(super) fn check_name<'a>(
    name: &str,
    mut others: impl ExactSizeIterator<Item = &'a str>,
) -> Result<(), ConnectError> {
    let problem = |problem: String, fix: &str| Err(ConnectError::new(problem, fix));
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_good) {
        let shown: String = name.chars().take(MAX_NAME).collect();
        return problem(format!("`{shown}` is not a name of a store"), "use letters, digits and _ - ., 64 at most");
    }
    if RESERVED.contains(&name) {
        return problem(format!("the name `{name}` of a store is reserved"), "choose another name");
    }
    if others.len() >= MAX_STORES - 1 {
        return problem("there are more than 16 stores".into(), "use fewer");
    }
    if others.any(|other| other == name) {
        return problem(format!("two stores are named `{name}`"), "give each store its own name");
    }
    Ok(())
}

/// The keys of the nodes and of their layouts, after `rate_limit:`.
const KEY: &str = "{nodes}";
const LAYOUTS_KEY: &str = "{nodes}:layouts";
/// Maximum number of layouts that are read, and of characters of each that are shown.
const MAX_LAYOUTS: usize = 16;
const MAX_LAYOUT: usize = 64;
/// Time between two registrations of a node.
const BEAT_EVERY: Duration = Duration::from_secs(2);
/// Delay before a new node registers. A command that only reads the store has ended by then.
const JOIN_AFTER: Duration = Duration::from_secs(1);
/// A node that has not registered for this long is gone: three to ten beats.
const ALIVE_FOR: Duration = Duration::from_secs(10);
/// Minimum timeout of a registration. No request waits for it.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of registered nodes: more than share one Redis.
const MAX_NODES: u32 = 10_000;

/// Beats in one of the periods whose maxima are kept: a minute.
const PERIOD_BEATS: u32 = 30;
/// Periods that are kept: five minutes.
const PERIODS: usize = 5;

/// Registers a node and its layout, unless they are empty. Returns the number of nodes, and the newest layouts with the
/// times of their last registrations. Scores that a failover to a server with a slower clock left in the future are removed
/// too. The layouts are only for a warning: foreign data under their key affects neither the number nor that data.
const BEAT: &str = r"
local now = redis.call('TIME')
local millis, alive = now[1] * 1000 + math.floor(now[2] / 1000), tonumber(ARGV[2])
local oldest, newest = string.format('(%d', millis - alive), string.format('(%d', millis + alive)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', oldest)
redis.call('ZREMRANGEBYSCORE', KEYS[1], newest, '+inf')
local count = redis.call('ZCARD', KEYS[1])
if ARGV[1] ~= '' and count < tonumber(ARGV[3]) then
  count = count + redis.call('ZADD', KEYS[1], millis, ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], alive)
redis.pcall('ZREMRANGEBYSCORE', KEYS[2], '-inf', oldest)
redis.pcall('ZREMRANGEBYSCORE', KEYS[2], newest, '+inf')
local registered = redis.pcall('ZCARD', KEYS[2])
if ARGV[4] ~= '' and type(registered) == 'number' and registered < tonumber(ARGV[3]) then
  if type(redis.pcall('ZADD', KEYS[2], millis, ARGV[4])) == 'number' then redis.pcall('PEXPIRE', KEYS[2], alive) end
end
local layouts = redis.pcall('ZRANGE', KEYS[2], '0', ARGV[5], 'REV', 'WITHSCORES')
if layouts.err then layouts = {} end
for i = 1, #layouts do layouts[i] = string.sub(layouts[i], 1, 256) end
return { count, layouts }
";

pub(super) struct Fleet {
    /// The name under which this node registers.
    id: String,
    expected: u32,
    nodes: AtomicU32,
    /// Whether this node has a limit that fails over to memory.
    joins: AtomicBool,
    /// Whether this node has left, and does not register any more.
    has_left: AtomicBool,
    /// Layouts of other nodes that count apart.
    other_layouts: Mutex<Vec<String>>,
    /// The layout of this node.
    layout: String,
}

impl Fleet {
    pub(super) fn new(expected: u32, layout: String) -> Self {
        let expected = expected.clamp(1, MAX_NODES);
        Self {
            id: format!("{:016x}", std::hash::RandomState::new().hash_one(std::process::id())),
            expected,
            nodes: AtomicU32::new(expected),
            joins: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
            other_layouts: Mutex::new(Vec::new()),
            layout,
        }
    }

    /// Returns the layouts of other nodes, with which this node does not count together.
    pub(super) fn warnings(&self) -> Vec<StoreWarning> {
        let others = self.other_layouts.lock().unwrap_or_else(PoisonError::into_inner);
        others.iter().map(|other| self.warning(other)).collect()
    }

    fn warning(&self, other: &str) -> StoreWarning {
        StoreWarning::OtherLayout { own: self.layout.clone(), other: other.to_owned() }
    }

    fn set_other_layouts(&self, layouts: Vec<String>, store: &str) {
        let mut known = self.other_layouts.lock().unwrap_or_else(PoisonError::into_inner);
        for new in layouts.iter().filter(|layout| !known.contains(layout)) {
            tracing::warn!(store, "{}", self.warning(new));
        }
        *known = layouts;
    }

    /// Returns the number of nodes that local limits are divided by.
    pub(super) fn nodes(&self) -> u32 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// Registers this node from now on: it has a limit with a local share.
    pub(super) fn join(&self) {
        self.joins.store(true, Ordering::Relaxed);
    }

    /// Ends the registration of this node, so that a node that takes its place does not count in addition.
    pub(super) async fn leave(&self, topology: &Topology, store_timeout: Duration) {
        self.has_left.store(true, Ordering::Relaxed);
        // Without a registration there is nothing to end. The next call of any node removes what is this old, which needs
        // no further permission.
        let (key, mut command) = (topology.names().of(KEY), redis::cmd("ZADD"));
        command.arg(&key).arg("XX").arg(0).arg(&self.id);
        let _ = topology.run_in_background(key.as_bytes(), &command, store_timeout.max(REPLY_TIMEOUT)).await;
    }

    /// Registers periodically. Never returns.
    pub(super) async fn beat(self: Arc<Self>, store: Arc<str>, topology: Arc<Topology>, store_timeout: Duration) {
        let is_compact = topology.names().hashes().is_some();
        let (mut recent, mut layouts, mut is_new) = (Recent::default(), RecentLayouts::default(), true);
        let key = topology.names().of(KEY);
        loop {
            let joins = self.joins.load(Ordering::Relaxed);
            let registers = !is_new && !self.has_left.load(Ordering::Relaxed);
            let member = if joins && registers { &*self.id } else { "" };
            let layout = if (joins || is_compact) && registers { &*self.layout } else { "" };
            let reply = beat(&topology, member, layout, store_timeout.max(REPLY_TIMEOUT)).await;
            if let Some((others, of_others)) = reply {
                if joins {
                    let nodes = others + u32::from(member.is_empty());
                    let largest = recent.largest_with(nodes, Instant::now());
                    self.nodes.store(largest.clamp(self.expected, MAX_NODES), Ordering::Relaxed);
                }
                self.set_other_layouts(layouts.others_than(&self.layout, of_others), &store);
            }
            if is_new {
                sleep(jittered(JOIN_AFTER)).await;
                is_new = false;
                continue;
            }
            tokio::select! {
                () = sleep(jittered(BEAT_EVERY)) => {}
                () = topology.recovered(key.as_bytes()) => {}
            }
        }
    }
}

/// Layouts, with the times of their last registrations.
pub(super) type Registrations = Vec<(String, u64)>;

/// Registers `member` and `layout`. Returns the number of registered nodes, and all layouts. `None` if Redis does not
/// reply.
async fn beat(topology: &Topology, member: &str, layout: &str, limit: Duration) -> Option<(u32, Registrations)> {
    let [key, layouts] = [KEY, LAYOUTS_KEY].map(|key| topology.names().of(key));
    let mut command = redis::cmd("EVAL");
    command.arg(BEAT).arg(2).arg(&key).arg(&layouts);
    command.arg(member).arg(ALIVE_FOR.as_millis() as u64).arg(MAX_NODES).arg(layout).arg(MAX_LAYOUTS - 1);
    let reply = topology.run_in_background(key.as_bytes(), &command, limit).await?;
    read_beat(reply)
}

/// Reads the reply of [`BEAT`]. Layouts that no node has registered are left out.
pub(super) fn read_beat(reply: Value) -> Option<(u32, Registrations)> {
    let (count, layouts): (u32, Vec<Value>) = redis::from_redis_value(reply).ok()?;
    let layouts = layouts.chunks_exact(2).filter_map(|pair| {
        let [layout, at] = pair else { return None };
        let (Value::BulkString(layout), Value::BulkString(at)) = (layout, at) else { return None };
        Some((std::str::from_utf8(layout).ok()?.to_owned(), std::str::from_utf8(at).ok()?.parse().ok()?))
    });
    Some((count, layouts.collect()))
}

/// Finds the layouts that other nodes use now. A registration from before the first call may be that of a node that has
/// changed its layout since, perhaps of this one.
#[derive(Default)]
struct RecentLayouts {
    /// The registrations at the last call. `None` before the first.
    last: Option<Registrations>,
    /// Other layouts that were registered since the first call.
    others: Vec<String>,
}

impl RecentLayouts {
    fn others_than(&mut self, own: &str, now: Registrations) -> Vec<String> {
        let is_new = |layout: &str, at: u64| {
            let last = self.last.as_ref();
            last.is_some_and(|last| !last.iter().any(|(other, before)| other == layout && *before >= at))
        };
        let others =
            now.iter().filter(|(layout, at)| layout != own && (self.others.contains(layout) || is_new(layout, *at)));
        self.others = others.map(|(layout, _)| layout.clone()).collect();
        self.last = Some(now);
        let shown = |layout: &String| -> String {
            layout.chars().filter(|letter| !is_control_or_format(*letter)).take(MAX_LAYOUT).collect()
        };
        self.others.iter().map(shown).collect()
    }
}

/// The largest numbers of the last periods, whose length is counted in registrations that Redis confirmed. Those that follow
/// each other faster than beats do not count.
#[derive(Default)]
struct Recent {
    maxima: [u32; PERIODS],
    beats: u32,
    /// The time of the last registration that counted.
    last: Option<Instant>,
}

impl Recent {
    fn largest_with(&mut self, nodes: u32, now: Instant) -> u32 {
        if self.beats == PERIOD_BEATS {
            self.maxima.rotate_right(1);
            (self.maxima[0], self.beats) = (0, 0);
        }
        if self.last.is_none_or(|last| now.duration_since(last) >= BEAT_EVERY / 2) {
            (self.beats, self.last) = (self.beats + 1, Some(now));
        }
        self.maxima[0] = self.maxima[0].max(nodes);
        self.maxima.iter().copied().max().unwrap_or(nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(name: &str, others: &[&str]) -> String {
        check_name(name, others.iter().copied()).expect_err("a mistake").to_string()
    }

    #[test]
    fn names_of_stores_are_checked() {
        assert_eq!(check_name("sessions.eu-1_a", ["audit"].into_iter()), Ok(()));
        let fix = "use letters, digits and _ - ., 64 at most";
        for name in ["", "a b", "é", "redis://h"] {
            assert_eq!(problem(name, &[]), format!("`{name}` is not a name of a store: {fix}"));
        }
        assert!(problem(&"x".repeat(65), &[]).ends_with(fix));
        assert_eq!(problem("memory", &[]), "the name `memory` of a store is reserved: choose another name");
        assert_eq!(problem("audit", &["audit"]), "two stores are named `audit`: give each store its own name");
        assert_eq!(problem("audit", &["other"; 15]), "there are more than 16 stores: use fewer");
    }

    #[test]
    fn a_node_that_is_gone_counts_for_some_minutes_more() {
        let (mut recent, mut now) = (Recent::default(), Instant::now());
        let mut after = |pause, nodes| {
            now += pause;
            recent.largest_with(nodes, now)
        };
        assert_eq!(after(BEAT_EVERY, 2), 2);
        assert_eq!(after(BEAT_EVERY, 5), 5);
        let is_five = |_: &u32| after(BEAT_EVERY / 20, 3) == 5;
        assert_eq!((0..300).take_while(is_five).count(), 300, "half a minute, however many registrations");
        // The rest of its period and four more.
        let counted_as_five = (0..1000).take_while(|_| after(BEAT_EVERY, 3) == 5).count();
        assert_eq!(counted_as_five, 5 * 30 - 2 - 30);
        assert_eq!(after(BEAT_EVERY, 4), 4, "a node that joins counts at once");
    }

    #[test]
    fn foreign_members_among_the_layouts_do_not_hide_the_number_of_nodes() {
        let text = |text: &[u8]| Value::BulkString(text.to_vec());
        let read = |layouts| read_beat(Value::Array(vec![Value::Int(3), Value::Array(layouts)]));
        let plain = ("plain".to_owned(), 1_763_417_325_123);
        let members = [&b"\xff"[..], b"1763417325124", b"half", b"1763417325123.5", b"plain", b"1763417325123"];
        assert_eq!(read(members.map(text).to_vec()), Some((3, vec![plain])));
        assert_eq!(read(vec![Value::Nil, Value::Int(1), text(b"odd")]), Some((3, Vec::new())));
        assert_eq!(read_beat(Value::Nil), None);
    }

    #[test]
    fn the_expected_number_is_the_least() {
        let nodes = |expected| Fleet::new(expected, "plain".to_owned()).nodes();
        assert_eq!([0, 3, u32::MAX].map(nodes), [1, 3, MAX_NODES]);
    }

    #[test]
    fn a_layout_is_another_only_if_a_node_has_registered_it_since_the_first_call() {
        let mut layouts = RecentLayouts::default();
        let mut others = |now: &[(&str, u64)]| {
            layouts.others_than("plain", now.iter().map(|(layout, at)| ((*layout).to_owned(), *at)).collect())
        };
        let none: [&str; 0] = [];
        assert_eq!(others(&[("plain", 1), ("compact", 2)]), none, "perhaps of a node that is gone");
        assert_eq!(others(&[("plain", 3), ("compact", 2)]), none);
        assert_eq!(others(&[("plain", 5), ("compact", 4)]), ["compact"]);
        assert_eq!(others(&[("plain", 6), ("compact", 4), ("other\u{202e}", 6)]), ["compact", "other"]);
        assert_eq!(others(&[("plain", 7)]), none);
    }
}
