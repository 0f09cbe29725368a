//! Counts the keys that limits deny or nearly deny: who is limited right now.
//!
//! Each thread has its own table of a fixed size, so threads do not contend, and no client makes a table grow. A table
//! has sets of eight places. A set is a small sketch of the Space-Saving algorithm (Metwally, Agrawal and El Abbadi,
//! 2005): a key that is not counted takes the place of the key with the lowest count and continues from that count,
//! which is the most that it can have had. So a count is never too low, and its error is known. The set of a key comes
//! from a hash with a secret, so clients cannot choose keys that displace others.
//!
//! Deliberately not here: time. [`LimitedKeys::take`] returns the counts since the last call, and its caller keeps the
//! history.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tollgate::Timestamp;

/// The most threads with their own table. Further threads share tables.
const SHARDS: usize = 64;
/// Places of a set. Their ids fill one cache line.
const WAYS: usize = 8;
/// Sets of a table: 2,048 places.
const SETS: usize = 256;
/// The most limits that a thread counts between two calls of [`LimitedKeys::take`].
const MAX_LIMITS: usize = 4096;
/// The longest text of a key. A longer one is truncated.
const MAX_TEXT_BYTES: usize = 128;

/// Why a key is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LimitedKind {
    /// A limit denied a request.
    Denied,
    /// A limit in shadow mode would have denied a request.
    ShadowDenied,
    /// A request was allowed, and less than a tenth of the quota is left.
    NearLimit,
}

impl LimitedKind {
    /// All kinds, in declaration order.
    pub const ALL: [Self; 3] = [Self::Denied, Self::ShadowDenied, Self::NearLimit];
}

/// Whether the text of keys is kept, or only a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyTexts {
    /// Keys are kept as text.
    Kept,
    /// Keys are kept as a hash.
    Hashed,
}

/// A key of a limit: its hash, and its text if that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitedKey {
    /// The first eight bytes of the SHA-256 of the limit's name and the parts of the key, separated by NUL. It is the
    /// same on every node.
    pub hash: u64,
    /// The parts of the key, if texts are kept.
    pub parts: Option<Box<[Box<str>]>>,
    /// Whether the parts are truncated.
    pub is_truncated: bool,
}

impl LimitedKey {
    /// Creates the key of a limit. A long one is truncated at a character.
    #[must_use]
    pub fn new<P: AsRef<str>>(limit: &str, parts: &[P], texts: KeyTexts) -> Self {
        let hash = key_hash(limit, parts);
        if texts == KeyTexts::Hashed {
            return Self { hash, parts: None, is_truncated: false };
        }
        let mut left = MAX_TEXT_BYTES;
        let mut is_truncated = false;
        let mut shorten = |part: &P| -> Box<str> {
            let part = part.as_ref();
            let mut end = part.len().min(left);
            while !part.is_char_boundary(end) {
                end -= 1;
            }
            is_truncated |= end < part.len();
            left -= end;
            part[..end].into()
        };
        let parts = parts.iter().map(&mut shorten).collect();
        Self { hash, parts: Some(parts), is_truncated }
    }
}

/// Returns the hash of a key: see [`LimitedKey::hash`].
#[must_use]
pub fn key_hash<P: AsRef<str>>(limit: &str, parts: &[P]) -> u64 {
    let mut digest = ring::digest::Context::new(&ring::digest::SHA256);
    digest.update(limit.as_bytes());
    for part in parts {
        digest.update(b"\0");
        digest.update(part.as_ref().as_bytes());
    }
    let digest = digest.finish();
    digest.as_ref().iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

/// Returns the hash by which a limit is found in tables.
pub(crate) fn limit_hash(name: &str) -> u64 {
    // Operators choose the names, so the hash needs no secret.
    ahash::RandomState::with_seeds(1, 2, 3, 4).hash_one(name)
}

/// Counts limited keys.
#[derive(Debug)]
pub struct LimitedKeys {
    secret: ahash::RandomState,
    texts: KeyTexts,
    shards: Box<[Shard]>,
    /// Empty tables, to replace those that are taken.
    spare: Mutex<Vec<Table>>,
}

/// The table of a thread, if it has counted anything. Only its thread and [`LimitedKeys::take`] lock it.
///
/// A gateway handles a request in some microseconds, after which little of this is in the cache. So what a request needs
/// of a table lies here, and from here one step leads to its set (`bench gateway --only watch`).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(Mutex<Option<Table>>);

/// A request that counts for a key.
pub(crate) struct LimitedRequest<'a> {
    pub(crate) kind: LimitedKind,
    pub(crate) limit: &'a str,
    /// The [`limit_hash`] of `limit`.
    pub(crate) limit_hash: u64,
    /// A hash of the key with a secret.
    pub(crate) fingerprint: u64,
    pub(crate) at: Timestamp,
}

/// The counts since the last call of [`LimitedKeys::take`].
#[derive(Debug, Default)]
pub struct TakenKeys {
    /// The limits that counted anything.
    pub limits: Vec<TakenLimit>,
    /// The most that a key can have that is not among the keys of its limit.
    pub floor: u64,
    /// Requests that were not counted, because too many limits were.
    pub uncounted: u64,
}

/// The counts of one limit.
#[derive(Debug)]
pub struct TakenLimit {
    /// The name of the limit.
    pub name: Arc<str>,
    /// The number of requests, by [`LimitedKind`].
    pub totals: [u64; LimitedKind::ALL.len()],
    /// The most frequent keys, in no order. A key that took the place of another is listed from its second request on.
    pub keys: Vec<TakenKey>,
}

/// The count of one key.
#[derive(Debug)]
pub struct TakenKey {
    /// Why it is counted.
    pub kind: LimitedKind,
    /// The key.
    pub key: LimitedKey,
    /// The number of requests, or up to `error` more.
    pub count: u64,
    /// The most by which `count` can be too high.
    pub error: u64,
    /// The time of the last request.
    pub last_seen: Timestamp,
}

impl LimitedKeys {
    /// Creates an empty tally.
    #[must_use]
    pub fn new(texts: KeyTexts) -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { secret: ahash::RandomState::new(), texts, shards, spare: Mutex::default() }
    }

    /// Returns whether texts of keys are kept.
    #[must_use]
    pub fn texts(&self) -> KeyTexts {
        self.texts
    }

    /// Hashes a key of which no fingerprint is known.
    pub(crate) fn fingerprint(&self, key: &[u8]) -> u64 {
        self.secret.hash_one(key)
    }

    /// Counts a request. `key` is called if the key is needed: when it takes an empty place, or with its second request
    /// if it took the place of another. So a flood of keys that are seen once does not build them.
    #[inline]
    pub(crate) fn add(&self, request: &LimitedRequest<'_>, key: impl FnOnce() -> LimitedKey) {
        let mut table = lock(&self.shards[thread_number() % SHARDS].0);
        let table = table.get_or_insert_with(|| lock(&self.spare).pop().unwrap_or_default());
        table.add(request, key);
    }

    /// Returns the counts since the last call. A thread that counts waits at most until its table is replaced.
    #[must_use]
    pub fn take(&self) -> TakenKeys {
        let mut tables = Vec::new();
        for shard in &self.shards {
            let state = lock(&shard.0).as_ref().map(|table| table.limits.is_empty());
            match state {
                None => {}
                // The thread counts nothing now.
                Some(true) => self.keep(lock(&shard.0).take_if(|table| table.limits.is_empty())),
                Some(false) => {
                    // Allocated outside the lock.
                    let next = lock(&self.spare).pop().unwrap_or_default();
                    let before = lock(&shard.0).replace(next);
                    tables.extend(before);
                }
            }
        }
        let taken = TakenKeys::of(&mut tables);
        for mut table in tables {
            table.clear();
            self.keep(Some(table));
        }
        taken
    }

    /// Keeps an empty table for later.
    fn keep(&self, table: Option<Table>) {
        let mut spare = lock(&self.spare);
        if spare.len() < SHARDS {
            spare.extend(table);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave a count half changed, so a poisoned lock is fine.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of this thread among those that have counted something.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    // While a thread ends, it has no number.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}

#[derive(Debug)]
struct Table {
    sets: Box<[Set]>,
    limits: Vec<LimitTotals>,
    /// Positions in `limits` by the hash of the name.
    positions: HashMap<u64, u32, ahash::RandomState>,
    /// The position of the limit that was counted last, which is likely to be the next one too.
    last: u32,
    uncounted: u64,
}

/// The ids fill one cache line, and processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Set {
    /// The ids of the keys. 0 is an empty place.
    ids: [u64; WAYS],
    places: [Place; WAYS],
}

#[derive(Debug, Default)]
struct Place {
    count: u32,
    error: u32,
    last_seen: Timestamp,
    limit: u32,
    kind: u8,
    /// `None` in an empty place, and until the second request of a key that took the place of another.
    key: Option<Box<LimitedKey>>,
}

#[derive(Debug)]
struct LimitTotals {
    name: Arc<str>,
    hash: u64,
    totals: [u64; LimitedKind::ALL.len()],
}

impl Default for Table {
    fn default() -> Self {
        Self {
            sets: (0..SETS).map(|_| Set::default()).collect(),
            limits: Vec::new(),
            positions: HashMap::default(),
            last: 0,
            uncounted: 0,
        }
    }
}

impl Table {
    fn clear(&mut self) {
        for set in &mut self.sets {
            if set.ids != [0; WAYS] {
                *set = Set::default();
            }
        }
        self.limits.clear();
        self.positions.clear();
        (self.last, self.uncounted) = (0, 0);
    }

    #[inline]
    fn add(&mut self, request: &LimitedRequest<'_>, key: impl FnOnce() -> LimitedKey) {
        let limit = match self.limits.get(self.last as usize) {
            Some(last) if last.hash == request.limit_hash => self.last,
            _ => match self.position(request) {
                Some(limit) => limit,
                None => return self.uncounted += 1,
            },
        };
        let kind = request.kind as u8;
        self.limits[limit as usize].totals[usize::from(kind)] += 1;
        // The fingerprint is a hash with a secret. 0 is an empty place.
        let id = (request.fingerprint ^ request.limit_hash.rotate_left(21 * u32::from(kind))).max(1);
        let Set { ids, places } = &mut self.sets[set_of(id)];
        if let Some(way) = ids.iter().position(|known| *known == id) {
            let place = &mut places[way];
            place.count = place.count.saturating_add(1);
            place.last_seen = place.last_seen.max(request.at);
            if place.key.is_none() {
                place.key = Some(Box::new(key()));
            }
            return;
        }
        // An empty place has count 0.
        let Some((way, lowest)) = places.iter_mut().enumerate().min_by_key(|(_, place)| place.count) else { return };
        let count = lowest.count;
        let key = (count == 0).then(|| Box::new(key()));
        *lowest = Place { count: count.saturating_add(1), error: count, last_seen: request.at, limit, kind, key };
        ids[way] = id;
    }

    /// Returns the position of a limit, or `None` if there are too many.
    #[inline(never)]
    fn position(&mut self, request: &LimitedRequest<'_>) -> Option<u32> {
        let (hash, next) = (request.limit_hash, self.limits.len());
        let position = match self.positions.get(&hash) {
            Some(position) => *position,
            None if next < MAX_LIMITS => {
                self.limits.push(LimitTotals { name: request.limit.into(), hash, totals: Default::default() });
                self.positions.insert(hash, next as u32);
                next as u32
            }
            None => return None,
        };
        self.last = position;
        Some(position)
    }

    /// Returns the count of an id and its error. A key that is not counted has at most the lowest count of its set.
    fn count(&self, id: u64) -> (u64, u64) {
        let set = set_of(id);
        let Set { ids, places } = &self.sets[set];
        match ids.iter().position(|known| *known == id) {
            Some(way) => (places[way].count.into(), places[way].error.into()),
            None => {
                let lowest = self.lowest(set);
                (lowest, lowest)
            }
        }
    }

    fn lowest(&self, set: usize) -> u64 {
        self.sets[set].places.iter().map(|place| place.count).min().unwrap_or(0).into()
    }

    /// Returns the most that a key can have that is not listed: it is not counted, or has been seen once.
    fn floor(&self) -> u64 {
        let places = self.sets.iter().flat_map(|set| &set.places);
        let unlisted = places.filter(|place| place.key.is_none()).map(|place| place.count);
        let lowest = (0..SETS).map(|set| self.lowest(set)).max().unwrap_or(0);
        lowest.max(unlisted.max().unwrap_or(0).into())
    }
}

fn set_of(id: u64) -> usize {
    (id >> 32) as usize % SETS
}

impl TakenKeys {
    /// Merges tables. Their keys are moved into the result.
    fn of(tables: &mut [Table]) -> Self {
        let mut taken = Self {
            limits: Vec::new(),
            floor: tables.iter().map(|table| table.floor()).sum(),
            uncounted: tables.iter().map(|table| table.uncounted).sum(),
        };
        let mut positions: HashMap<Arc<str>, usize> = HashMap::new();
        let mut seen: HashMap<u64, (usize, usize)> = HashMap::new();
        for number in 0..tables.len() {
            let mut own = Vec::new();
            for LimitTotals { name, totals, .. } in &tables[number].limits {
                let position = *positions.entry(Arc::clone(name)).or_insert_with(|| {
                    let (name, totals) = (Arc::clone(name), Default::default());
                    taken.limits.push(TakenLimit { name, totals, keys: Vec::new() });
                    taken.limits.len() - 1
                });
                taken.limits[position].totals.iter_mut().zip(totals).for_each(|(sum, one)| *sum += one);
                own.push(position);
            }
            for (set, way) in (0..SETS).flat_map(|set| (0..WAYS).map(move |way| (set, way))) {
                let Set { ids, places } = &mut tables[number].sets[set];
                let (id, place) = (ids[way], &mut places[way]);
                let (Some(kind), Some(key), last_seen) =
                    (LimitedKind::ALL.get(usize::from(place.kind)).copied(), place.key.take(), place.last_seen)
                else {
                    continue;
                };
                let Some(position) = own.get(place.limit as usize).copied() else { continue };
                let keys = &mut taken.limits[position].keys;
                if let Some((position, index)) = seen.get(&id) {
                    let known = &mut taken.limits[*position].keys[*index];
                    known.last_seen = known.last_seen.max(last_seen);
                    continue;
                }
                seen.insert(id, (position, keys.len()));
                let counts = tables.iter().map(|table| table.count(id));
                let (count, error) = counts.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
                taken.limits[position].keys.push(TakenKey { kind, key: *key, count, error, last_seen });
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn add(keys: &LimitedKeys, limit: &str, key: u64) {
        let request = LimitedRequest {
            kind: LimitedKind::Denied,
            limit,
            limit_hash: limit_hash(limit),
            fingerprint: keys.fingerprint(&key.to_le_bytes()),
            at: Timestamp::from_micros(key),
        };
        keys.add(&request, || LimitedKey::new(limit, &[key.to_string()], KeyTexts::Kept));
    }

    fn text(key: &LimitedKey) -> String {
        key.parts.as_ref().map(|parts| parts.join(",")).unwrap_or_default()
    }

    #[test]
    fn few_keys_are_counted_exactly_and_once() {
        let keys = LimitedKeys::new(KeyTexts::Kept);
        for (limit, key) in [("a", 1), ("a", 2), ("a", 2), ("b", 2)] {
            add(&keys, limit, key);
        }
        let taken = keys.take();
        let mut listed: Vec<_> = taken
            .limits
            .iter()
            .flat_map(|limit| limit.keys.iter().map(|key| (&*limit.name, text(&key.key), key.count, key.error)))
            .collect();
        listed.sort();
        assert_eq!(listed, [("a", "1".into(), 1, 0), ("a", "2".into(), 2, 0), ("b", "2".into(), 1, 0)]);
        let totals: Vec<_> = taken.limits.iter().map(|limit| (&*limit.name, limit.totals)).collect();
        assert_eq!(totals, [("a", [3, 0, 0]), ("b", [1, 0, 0])]);
        assert_eq!((taken.floor, taken.uncounted), (0, 0));
        assert!(keys.take().limits.is_empty());
        add(&keys, "a", 1);
        assert_eq!(keys.take().limits[0].totals, [1, 0, 0]);
    }

    #[test]
    fn counts_of_threads_are_added() {
        let keys = LimitedKeys::new(KeyTexts::Kept);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|number| add(&keys, "a", number % 3)));
            }
        });
        let taken = keys.take();
        let mut counts: Vec<_> =
            taken.limits[0].keys.iter().map(|key| (text(&key.key), key.count, key.error)).collect();
        counts.sort();
        assert_eq!(counts, [("0".into(), 1336, 0), ("1".into(), 1332, 0), ("2".into(), 1332, 0)]);
    }

    #[test]
    fn a_flood_of_keys_hides_no_frequent_key() {
        let keys = LimitedKeys::new(KeyTexts::Kept);
        for number in 0..200_000 {
            add(&keys, "a", if number % 100 == 0 { 7 } else { 1000 + number });
        }
        let taken = keys.take();
        assert!(taken.limits[0].keys.len() <= SETS * WAYS);
        assert!(taken.floor > 0);
        // A key that was seen once is listed only if its place was empty.
        assert!(taken.limits[0].keys.len() < SETS * WAYS / 4, "{}", taken.limits[0].keys.len());
        let frequent = taken.limits[0].keys.iter().max_by_key(|key| key.count).expect("keys are counted");
        assert_eq!(text(&frequent.key), "7");
        assert!(frequent.count >= 2000 && frequent.count - frequent.error <= 2000, "{frequent:?}");
    }

    #[test]
    fn limits_beyond_the_bound_are_reported() {
        let keys = LimitedKeys::new(KeyTexts::Hashed);
        for number in 0..MAX_LIMITS + 10 {
            add(&keys, &format!("limit-{number}"), 1);
        }
        let taken = keys.take();
        assert_eq!((taken.limits.len(), taken.uncounted), (MAX_LIMITS, 10));
    }

    #[test]
    fn long_keys_are_truncated_at_a_character() {
        let key = LimitedKey::new("l", &["x".repeat(MAX_TEXT_BYTES - 1), "é".into(), "z".into()], KeyTexts::Kept);
        assert!(key.is_truncated);
        let parts = key.parts.expect("texts are kept");
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [MAX_TEXT_BYTES - 1, 0, 1]);
        assert_eq!(LimitedKey::new("l", &["ann"], KeyTexts::Hashed).parts, None);
    }

    #[test]
    fn the_hash_is_that_of_sha256sum() {
        // printf 'per-user\0ann\0/search' | sha256sum
        assert_eq!(format!("{:016x}", key_hash("per-user", &["ann", "/search"])), "d73f481ffa0752d8");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn counts_are_within_their_error(stream in proptest::collection::vec((0..4000_u64, 1..5_usize), 1..4000)) {
            let keys = LimitedKeys::new(KeyTexts::Kept);
            let mut exact: HashMap<u64, u64> = HashMap::new();
            for (key, times) in &stream {
                (0..*times).for_each(|_| add(&keys, "a", *key));
                *exact.entry(*key).or_default() += *times as u64;
            }
            let taken = keys.take();
            prop_assert_eq!(taken.limits[0].totals[0], exact.values().sum::<u64>());
            for key in &taken.limits[0].keys {
                let count = exact.remove(&text(&key.key).parse().expect("a number")).unwrap_or(0);
                prop_assert!(key.count >= count && key.count - key.error <= count, "{:?} {}", key, count);
            }
            prop_assert!(exact.values().all(|count| *count <= taken.floor), "{:?} {}", exact, taken.floor);
        }
    }
}
