//! The reports of nodes about their limited keys, which are kept on Redis.
//!
//! A report lists the most limited keys of its node for each window and kind, and the most that any other key can have.
//! A node that is asked for the fleet adds the reports of the others to its own list. Errors add up too.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tollgate::Timestamp;
use tollgate_rules::internal::limited::{LimitedKey, LimitedKind};

use super::Top;
use super::history::{History, TopEntry, TopList, TopQuery, Window};

/// A report expires if its node has not replaced it for this long: three intervals.
pub(super) const KEEP_REPORT: Duration = Duration::from_secs(30);
/// The most keys of a list in a report. With the longest texts, a report has about 150 KiB, and usually a few.
const MAX_KEYS: usize = 100;

/// The format of the reports. Reports of other formats are skipped.
const VERSION: u32 = 1;

#[derive(Deserialize, Serialize)]
struct Report {
    version: u32,
    /// By [`Window`] and [`LimitedKind`].
    lists: Vec<List>,
}

#[derive(Deserialize, Serialize)]
struct List {
    total: u64,
    floor: u64,
    uncounted: u64,
    /// The number of requests of each limit.
    totals: HashMap<String, u64>,
    keys: Vec<Key>,
}

#[derive(Deserialize, Serialize)]
struct Key {
    limit: String,
    hash: u64,
    parts: Option<Box<[Box<str>]>>,
    is_truncated: bool,
    count: u64,
    error: u64,
    last_seen: u64,
}

/// Returns the position of a list in a report.
const fn position(window: Window, kind: LimitedKind) -> usize {
    window as usize * LimitedKind::ALL.len() + kind as usize
}

/// Returns the report of a node.
pub(super) fn report(history: &History, elapsed: Duration) -> Vec<u8> {
    let queries = Window::ALL.into_iter().flat_map(|window| LimitedKind::ALL.map(|kind| (window, kind)));
    let list = |(window, kind)| {
        let list = history.top(&TopQuery { window, kind, limit: None, count: MAX_KEYS }, elapsed);
        let TopList { total, mut totals, floor, uncounted, keys, .. } = list;
        totals.retain(|limit, _| keys.iter().any(|entry| entry.limit == *limit));
        let totals = totals.into_iter().map(|(limit, total)| (limit.to_string(), total)).collect();
        List { total, floor, uncounted, totals, keys: keys.into_iter().map(Key::from).collect() }
    };
    serde_json::to_vec(&Report { version: VERSION, lists: queries.map(list).collect() }).unwrap_or_default()
}

/// Adds the reports of other nodes to the list of this one. `own` has all keys.
pub(super) fn merge<'r>(own: TopList, reports: impl Iterator<Item = &'r [u8]>, query: &TopQuery) -> Top {
    let others = reports.filter_map(|report| {
        let Report { lists, .. } =
            serde_json::from_slice::<Report>(report).ok().filter(|report| report.version == VERSION)?;
        lists.into_iter().nth(position(query.window, query.kind))
    });
    let covered = own.covered;
    let mut lists = vec![own];
    lists.extend(others.map(|list| TopList::of(list, query.limit.as_deref())));
    let nodes = lists.len();
    let floors: u64 = lists.iter().map(|list| list.floor).fold(0, u64::saturating_add);
    let mut merged = TopList { covered, floor: floors, ..TopList::default() };
    let mut positions: HashMap<(Arc<str>, u64), usize> = HashMap::new();
    for list in lists {
        merged.total = merged.total.saturating_add(list.total);
        merged.uncounted = merged.uncounted.saturating_add(list.uncounted);
        for (limit, total) in list.totals {
            let sum = merged.totals.entry(limit).or_default();
            *sum = sum.saturating_add(total);
        }
        for entry in list.keys {
            // Another node may have counted the key up to its floor.
            let own_floor = list.floor;
            let position = *positions.entry((Arc::clone(&entry.limit), entry.key.hash)).or_insert_with(|| {
                merged.keys.push(TopEntry { count: floors, error: floors, ..entry.clone() });
                merged.keys.len() - 1
            });
            let known = &mut merged.keys[position];
            known.count = (known.count - own_floor.min(known.count)).saturating_add(entry.count);
            known.error = (known.error - own_floor.min(known.error)).saturating_add(entry.error);
            known.last_seen = known.last_seen.max(entry.last_seen);
            if known.key.parts.is_none() {
                known.key = entry.key;
            }
        }
    }
    merged.shorten(query.count);
    Top { list: merged, nodes, problem: None }
}

impl TopList {
    /// Returns the list of a report, for one limit or all.
    fn of(list: List, limit: Option<&str>) -> Self {
        let List { mut total, floor, uncounted, mut totals, mut keys } = list;
        if let Some(limit) = limit {
            keys.retain(|key| *key.limit == *limit);
            totals.retain(|name, _| name == limit);
            total = totals.values().sum();
        }
        let totals = totals.into_iter().map(|(limit, total)| (limit.into(), total)).collect();
        let keys = keys.into_iter().take(MAX_KEYS).map(TopEntry::from).collect();
        Self { total, totals, floor, uncounted, covered: Duration::ZERO, keys }
    }
}

impl From<TopEntry> for Key {
    fn from(entry: TopEntry) -> Self {
        let TopEntry { limit, key, count, error, last_seen } = entry;
        let LimitedKey { hash, parts, is_truncated } = (*key).clone();
        let (limit, last_seen) = (limit.to_string(), last_seen.as_micros());
        Self { limit, hash, parts, is_truncated, count, error, last_seen }
    }
}

impl From<Key> for TopEntry {
    fn from(key: Key) -> Self {
        let Key { limit, hash, parts, is_truncated, count, error, last_seen } = key;
        let key = Arc::new(LimitedKey { hash, parts, is_truncated });
        let (limit, last_seen) = (limit.into(), Timestamp::from_micros(last_seen));
        Self { limit, key, count, error: error.min(count), last_seen }
    }
}
