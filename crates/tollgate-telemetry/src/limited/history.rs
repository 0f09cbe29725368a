//! The limited keys of the last minute and hour, in bounded memory.
//!
//! Time is divided into slots: ten seconds for the minute, five minutes for the hour. A slot of a limit has its most
//! frequent keys, and the most that any other key can have had, the floor. Slots are added up by the rule of mergeable
//! summaries (Agarwal and others, 2012): a key that a slot does not list counts with the floor, as count and as error.
//! So a count is never too low, and too high by at most its error.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tollgate::Timestamp;
use tollgate_rules::internal::limited::{LimitedKey, LimitedKind, TakenKeys};

/// The most keys of a slot.
const MAX_KEYS: usize = 128;
/// The most keys of all slots. With the longest texts, they take about 16 MiB.
const MAX_ENTRIES: usize = 1 << 16;

/// A span of time that keys are listed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// The last minute.
    Minute,
    /// The last hour.
    Hour,
}

impl Window {
    /// All windows, in declaration order.
    pub const ALL: [Self; 2] = [Self::Minute, Self::Hour];

    /// The length of a slot in seconds.
    const fn slot_seconds(self) -> u64 {
        match self {
            Self::Minute => 10,
            Self::Hour => 300,
        }
    }

    /// The number of whole slots. The current one comes on top, so that the window is never too short.
    const fn slots(self) -> u64 {
        match self {
            Self::Minute => 6,
            Self::Hour => 12,
        }
    }

    /// The number of the slot at a time since the start.
    const fn slot_at(self, elapsed: Duration) -> u64 {
        elapsed.as_secs() / self.slot_seconds()
    }

    /// Returns the time that the slots of a window reach back.
    fn covered(self, elapsed: Duration) -> Duration {
        let first = self.slot_at(elapsed).saturating_sub(self.slots()) * self.slot_seconds();
        elapsed.saturating_sub(Duration::from_secs(first))
    }
}

/// A question about limited keys.
#[derive(Clone, Debug)]
pub struct TopQuery {
    /// The time that keys are listed over.
    pub window: Window,
    /// Whether the keys were denied, or nearly.
    pub kind: LimitedKind,
    /// The limit whose keys are wanted; all limits if `None`.
    pub limit: Option<String>,
    /// The most keys to return.
    pub count: usize,
}

/// The most limited keys, in descending order.
#[derive(Clone, Debug, Default)]
pub struct TopList {
    /// The number of requests, of all keys.
    pub total: u64,
    /// The number of requests of each limit in the list.
    pub totals: HashMap<Arc<str>, u64>,
    /// The most that a key of these limits can have that is not in the list.
    pub floor: u64,
    /// Requests that were not counted, because too many limits were.
    pub uncounted: u64,
    /// The time that the list reaches back.
    pub covered: Duration,
    /// The keys, the most frequent first.
    pub keys: Vec<TopEntry>,
}

/// A limited key.
#[derive(Clone, Debug)]
pub struct TopEntry {
    /// The name of the limit.
    pub limit: Arc<str>,
    /// The key, with its text if that is kept.
    pub key: Arc<LimitedKey>,
    /// The number of requests, or up to `error` more.
    pub count: u64,
    /// The most by which `count` is too high.
    pub error: u64,
    /// The time of the last request.
    pub last_seen: Timestamp,
}

impl TopList {
    /// Sorts the keys and drops the last ones.
    pub(super) fn shorten(&mut self, count: usize) {
        self.keys.sort_by(|one, other| {
            let rank = |entry: &TopEntry| (Reverse(entry.count), entry.error);
            rank(one).cmp(&rank(other)).then_with(|| (&one.limit, one.key.hash).cmp(&(&other.limit, other.key.hash)))
        });
        if let Some(next) = self.keys.get(count) {
            self.floor = self.floor.max(next.count);
        }
        self.keys.truncate(count);
    }
}

/// The limited keys of all limits.
#[derive(Debug, Default)]
pub struct History {
    limits: HashMap<Arc<str>, LimitHistory>,
    entries: usize,
    /// Requests that were not counted, by slot of the hour.
    uncounted: VecDeque<(u64, u64)>,
}

#[derive(Debug, Default)]
struct LimitHistory {
    /// The time of the last change, since the start.
    changed: Duration,
    /// By [`Window`] and [`LimitedKind`].
    slots: [[VecDeque<Slot>; LimitedKind::ALL.len()]; Window::ALL.len()],
}

/// The keys of a limit in a slot.
#[derive(Clone, Debug, Default)]
struct Slot {
    number: u64,
    total: u64,
    floor: u64,
    keys: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    key: Arc<LimitedKey>,
    count: u64,
    error: u64,
    last_seen: Timestamp,
}

impl History {
    /// Adds counts to the current slots.
    pub fn add(&mut self, taken: TakenKeys, elapsed: Duration) {
        for limit in taken.limits {
            let history = self.limits.entry(limit.name).or_default();
            history.changed = elapsed;
            let mut added: [Slot; LimitedKind::ALL.len()] = Default::default();
            for (slot, total) in added.iter_mut().zip(limit.totals) {
                (slot.total, slot.floor) = (total, taken.floor.min(total));
            }
            for one in limit.keys {
                let (key, count, error, last_seen) = (Arc::new(one.key), one.count, one.error, one.last_seen);
                added[one.kind as usize].keys.push(Entry { key, count, error, last_seen });
            }
            for (window, slots) in Window::ALL.into_iter().zip(&mut history.slots) {
                for (slots, added) in slots.iter_mut().zip(&added).filter(|(_, added)| added.total > 0) {
                    let number = window.slot_at(elapsed);
                    if slots.back().is_none_or(|last| last.number != number) {
                        slots.push_back(Slot { number, ..Slot::default() });
                    }
                    if let Some(last) = slots.back_mut() {
                        last.merge(added);
                        last.shorten();
                    }
                }
            }
        }
        if taken.uncounted > 0 {
            self.uncounted.push_back((Window::Hour.slot_at(elapsed), taken.uncounted));
        }
        self.expire(elapsed);
    }

    /// Drops old slots, and whole limits if there are too many keys: those that changed least recently.
    fn expire(&mut self, elapsed: Duration) {
        let first = |window: Window| window.slot_at(elapsed).saturating_sub(window.slots());
        while self.uncounted.front().is_some_and(|(slot, _)| *slot < first(Window::Hour)) {
            self.uncounted.pop_front();
        }
        self.entries = 0;
        self.limits.retain(|_, limit| {
            for (window, slots) in Window::ALL.into_iter().zip(&mut limit.slots) {
                for slots in slots {
                    while slots.front().is_some_and(|slot| slot.number < first(window)) {
                        slots.pop_front();
                    }
                }
            }
            self.entries += limit.entries();
            limit.all_slots().next().is_some()
        });
        if self.entries > MAX_ENTRIES {
            let mut oldest: Vec<_> =
                self.limits.iter().map(|(name, limit)| (limit.changed, Arc::clone(name))).collect();
            oldest.sort();
            for (_, name) in oldest {
                if self.entries <= MAX_ENTRIES {
                    break;
                }
                self.entries -= self.limits.remove(&name).map_or(0, |limit| limit.entries());
            }
        }
    }

    /// Replaces the texts of keys with their hashes.
    pub fn forget_texts(&mut self) {
        for limit in self.limits.values_mut() {
            for entry in limit.slots.iter_mut().flatten().flatten().flat_map(|slot| &mut slot.keys) {
                entry.key = Arc::new(LimitedKey { hash: entry.key.hash, parts: None, is_truncated: false });
            }
        }
    }

    /// Returns the limit of the key with this hash.
    pub fn limit_of(&self, hash: u64) -> Option<Arc<str>> {
        let has_key =
            |limit: &LimitHistory| limit.all_slots().flat_map(|slot| &slot.keys).any(|entry| entry.key.hash == hash);
        self.limits.iter().find(|(_, limit)| has_key(limit)).map(|(name, _)| Arc::clone(name))
    }

    /// Returns the most limited keys.
    pub fn top(&self, query: &TopQuery, elapsed: Duration) -> TopList {
        let mut list = TopList {
            covered: query.window.covered(elapsed),
            uncounted: self.uncounted.iter().map(|(_, count)| count).sum(),
            ..TopList::default()
        };
        let first = query.window.slot_at(elapsed).saturating_sub(query.window.slots());
        let is_wanted = |name: &str| query.limit.as_deref().is_none_or(|wanted| wanted == name);
        for (name, limit) in self.limits.iter().filter(|(name, _)| is_wanted(name)) {
            let mut all = Slot::default();
            let slots = &limit.slots[query.window as usize][query.kind as usize];
            slots.iter().filter(|slot| slot.number >= first).for_each(|slot| all.merge(slot));
            if all.total == 0 {
                continue;
            }
            list.total += all.total;
            list.totals.insert(Arc::clone(name), all.total);
            list.floor = list.floor.max(all.floor.min(all.total));
            list.keys.extend(all.keys.into_iter().map(|entry| {
                // No key has more than its limit.
                let (least, count) = (entry.count - entry.error, entry.count.min(all.total));
                let Entry { key, last_seen, .. } = entry;
                TopEntry { limit: Arc::clone(name), key, count, error: count.saturating_sub(least), last_seen }
            }));
        }
        list.shorten(query.count);
        list
    }
}

impl LimitHistory {
    fn all_slots(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().flatten().flatten()
    }

    fn entries(&self) -> usize {
        self.all_slots().map(|slot| slot.keys.len()).sum()
    }
}

impl Slot {
    /// Adds the counts of another slot.
    fn merge(&mut self, other: &Self) {
        let mut positions: HashMap<u64, usize> =
            self.keys.iter().enumerate().map(|(position, entry)| (entry.key.hash, position)).collect();
        let (floor, own) = (self.floor, self.keys.len());
        let mut is_added = vec![false; own];
        for entry in &other.keys {
            match positions.get(&entry.key.hash) {
                Some(position) => {
                    let known = &mut self.keys[*position];
                    known.count += entry.count;
                    known.error += entry.error;
                    known.last_seen = known.last_seen.max(entry.last_seen);
                    if let Some(is_added) = is_added.get_mut(*position) {
                        *is_added = true;
                    }
                }
                None => {
                    positions.insert(entry.key.hash, self.keys.len());
                    let (count, error) = (entry.count + floor, entry.error + floor);
                    self.keys.push(Entry { count, error, ..entry.clone() });
                }
            }
        }
        for (entry, _) in self.keys.iter_mut().zip(is_added).filter(|(_, is_added)| !is_added) {
            entry.count += other.floor;
            entry.error += other.floor;
        }
        self.total += other.total;
        self.floor += other.floor;
    }

    /// Drops the least frequent keys if there are too many.
    fn shorten(&mut self) {
        if self.keys.len() > MAX_KEYS {
            self.keys.sort_by_key(|entry| (Reverse(entry.count), entry.error));
            self.floor = self.floor.max(self.keys[MAX_KEYS].count);
            self.keys.truncate(MAX_KEYS);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate_rules::internal::limited::{KeyTexts, TakenKey, TakenLimit};

    use super::*;

    /// Returns counts of keys that are numbers.
    fn taken(limit: &str, counts: &[(u64, u64)], floor: u64) -> TakenKeys {
        let keys = counts.iter().map(|(key, count)| TakenKey {
            kind: LimitedKind::Denied,
            key: LimitedKey::new(limit, &[key.to_string()], KeyTexts::Kept),
            count: count + floor,
            error: floor,
            last_seen: Timestamp::from_micros(*key),
        });
        let keys: Vec<_> = keys.collect();
        let totals = [counts.iter().map(|(_, count)| count).sum(), 0, 0];
        TakenKeys { limits: vec![TakenLimit { name: limit.into(), totals, keys }], floor, uncounted: 0 }
    }

    fn query(window: Window) -> TopQuery {
        TopQuery { window, kind: LimitedKind::Denied, limit: None, count: 1000 }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn counts(list: &TopList) -> Vec<(u64, u64)> {
        let number = |entry: &TopEntry| entry.key.parts.as_ref().unwrap()[0].parse().unwrap();
        list.keys.iter().map(|entry| (number(entry), entry.count)).collect()
    }

    #[test]
    fn a_window_is_never_too_short_and_keys_leave_it() {
        let mut history = History::default();
        history.add(taken("a", &[(1, 5)], 0), seconds(3));
        history.add(taken("a", &[(2, 7)], 0), seconds(25));
        assert_eq!(counts(&history.top(&query(Window::Minute), seconds(69))), [(2, 7), (1, 5)]);
        let later = history.top(&query(Window::Minute), seconds(70));
        assert_eq!((counts(&later), later.total, later.covered), (vec![(2, 7)], 7, seconds(60)));
        assert_eq!(counts(&history.top(&query(Window::Hour), seconds(3899))), [(2, 7), (1, 5)]);
        history.add(TakenKeys::default(), seconds(3900));
        assert!(history.limits.is_empty());
        assert_eq!(history.top(&query(Window::Hour), seconds(3900)).covered, seconds(3600));
    }

    #[test]
    fn the_limits_that_changed_least_recently_are_dropped() {
        let mut history = History::default();
        let keys: Vec<(u64, u64)> = (0..MAX_KEYS as u64).map(|key| (key, 1)).collect();
        for number in 0..1000 {
            history.add(taken(&format!("limit-{number}"), &keys, 0), seconds(number / 100));
        }
        assert!(history.entries <= MAX_ENTRIES && history.entries > MAX_ENTRIES / 2, "{}", history.entries);
        assert!(history.limits.contains_key("limit-999") && !history.limits.contains_key("limit-0"));
    }

    #[test]
    fn other_limits_and_kinds_are_left_out() {
        let mut history = History::default();
        history.add(taken("a", &[(1, 5)], 0), seconds(1));
        history.add(taken("b", &[(1, 9)], 0), seconds(1));
        let of_a = history.top(&TopQuery { limit: Some("a".into()), ..query(Window::Minute) }, seconds(2));
        assert_eq!((of_a.total, counts(&of_a)), (5, vec![(1, 5)]));
        let near = TopQuery { kind: LimitedKind::NearLimit, ..query(Window::Minute) };
        assert!(history.top(&near, seconds(2)).keys.is_empty());
        let all = history.top(&TopQuery { count: 1, ..query(Window::Minute) }, seconds(2));
        assert_eq!((all.total, &*all.keys[0].limit, all.floor), (14, "b", 5));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn counts_are_within_their_error(
            intervals in proptest::collection::vec(
                (proptest::collection::hash_map(0..400_u64, 1..50_u64, 0..200), 0..3_u64), 1..30),
        ) {
            let mut history = History::default();
            let mut exact: HashMap<u64, u64> = HashMap::new();
            for (number, (interval, floor)) in intervals.iter().enumerate() {
                let keys: Vec<(u64, u64)> = interval.iter().map(|(key, count)| (*key, *count)).collect();
                // Keys that the tables did not list have at most the floor.
                history.add(taken("a", &keys, *floor), seconds(number as u64 * 2));
                keys.iter().for_each(|(key, count)| *exact.entry(*key).or_default() += count);
            }
            for window in Window::ALL {
                let list = history.top(&query(window), seconds(60));
                let mut exact = exact.clone();
                prop_assert_eq!(list.total, exact.values().sum::<u64>());
                for entry in &list.keys {
                    let key: u64 = entry.key.parts.as_ref().unwrap()[0].parse().unwrap();
                    let count = exact.remove(&key).unwrap_or(0);
                    prop_assert!(entry.count >= count && entry.count - entry.error <= count, "{:?} {}", entry, count);
                }
                prop_assert!(exact.values().all(|count| *count <= list.floor));
            }
        }
    }
}
