//! The most frequent keys of a stream, in constant memory.
//!
//! The Space-Saving algorithm (Metwally, Agrawal and El Abbadi, 2005): a fixed number of keys is counted. A new key takes
//! the place of the one with the lowest count and continues from that count, which is the most that it can have had. So a
//! count is never too low, and too high by at most [`TopKey::error`], which is at most the number of all additions
//! divided by the number of places. Every key above that share of the stream is in the list.

use std::collections::HashMap;

/// Counts the most frequent keys. A key is a 64-bit fingerprint. While it is counted, it has a value of type `T`.
#[derive(Clone, Debug)]
pub struct TopKeys<T> {
    /// A heap: an entry's count is at most those of its children, the entries at `2n + 1` and `2n + 2`.
    entries: Vec<Entry<T>>,
    places: HashMap<u64, usize, ahash::RandomState>,
    capacity: usize,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    fingerprint: u64,
    count: u64,
    error: u64,
    value: T,
}

/// One of the most frequent keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKey<'t, T> {
    /// How often the key was added, or up to `error` more.
    pub count: u64,
    /// The most by which `count` is too high.
    pub error: u64,
    /// The value of the key.
    pub value: &'t T,
}

impl<T> TopKeys<T> {
    /// Creates a list with this many places, at least one.
    pub fn new(capacity: usize) -> Self {
        Self { entries: Vec::new(), places: HashMap::default(), capacity: capacity.max(1) }
    }

    /// Adds one to a key. `value` is called if the key was not counted. Returns the value of the key.
    pub fn add(&mut self, fingerprint: u64, value: impl FnOnce() -> T) -> &mut T {
        let place = match self.places.get(&fingerprint) {
            Some(&place) => {
                self.entries[place].count += 1;
                self.sink(place)
            }
            None if self.entries.len() < self.capacity => {
                self.entries.push(Entry { fingerprint, count: 1, error: 0, value: value() });
                self.places.insert(fingerprint, self.entries.len() - 1);
                self.rise(self.entries.len() - 1)
            }
            None => {
                let lowest = &mut self.entries[0];
                self.places.remove(&lowest.fingerprint);
                *lowest = Entry { fingerprint, count: lowest.count + 1, error: lowest.count, value: value() };
                self.places.insert(fingerprint, 0);
                self.sink(0)
            }
        };
        &mut self.entries[place].value
    }

    /// Returns the value of a key, if it is counted.
    pub fn get_mut(&mut self, fingerprint: u64) -> Option<&mut T> {
        let place = *self.places.get(&fingerprint)?;
        Some(&mut self.entries[place].value)
    }

    /// Returns up to `count` keys, the most frequent first.
    pub fn top(&self, count: usize) -> Vec<TopKey<'_, T>> {
        let mut all: Vec<&Entry<T>> = self.entries.iter().collect();
        all.sort_by_key(|entry| (std::cmp::Reverse(entry.count), entry.error, entry.fingerprint));
        let shown = all.into_iter().take(count);
        shown.map(|Entry { count, error, value, .. }| TopKey { count: *count, error: *error, value }).collect()
    }

    /// Moves an entry towards the leaves until its children count at least as much. Returns its place.
    fn sink(&mut self, mut place: usize) -> usize {
        loop {
            let children = [2 * place + 1, 2 * place + 2].into_iter().filter(|child| *child < self.entries.len());
            match children.min_by_key(|child| self.entries[*child].count) {
                Some(child) if self.entries[child].count < self.entries[place].count => {
                    self.swap(place, child);
                    place = child;
                }
                _ => return place,
            }
        }
    }

    /// Moves an entry towards the root until its parent counts at most as much. Returns its place.
    fn rise(&mut self, mut place: usize) -> usize {
        while place > 0 && self.entries[(place - 1) / 2].count > self.entries[place].count {
            self.swap(place, (place - 1) / 2);
            place = (place - 1) / 2;
        }
        place
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.entries.swap(one, other);
        self.places.insert(self.entries[one].fingerprint, one);
        self.places.insert(self.entries[other].fingerprint, other);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn few_keys_are_counted_exactly() {
        let mut keys = TopKeys::new(3);
        for key in [1, 2, 2, 3, 3, 3] {
            *keys.add(key, || 0_u64) += key;
        }
        let counts: Vec<_> = keys.top(2).iter().map(|key| (key.count, key.error, *key.value)).collect();
        assert_eq!(counts, [(3, 0, 9), (2, 0, 4)]);
        assert_eq!(keys.get_mut(1), Some(&mut 1));
        assert_eq!(keys.get_mut(4), None);
    }

    proptest! {
        #[test]
        fn counts_are_within_their_error(stream in proptest::collection::vec(0..40_u64, 1..600), capacity in 1..20_usize) {
            let mut keys = TopKeys::new(capacity);
            let mut exact: HashMap<u64, u64> = HashMap::new();
            for key in &stream {
                keys.add(*key, || *key);
                *exact.entry(*key).or_default() += 1;
            }
            let top = keys.top(capacity);
            prop_assert!(top.is_sorted_by(|one, other| one.count >= other.count));
            for key in &top {
                let count = exact[key.value];
                prop_assert!(key.count >= count && key.count - key.error <= count, "{:?} {}", key, count);
                prop_assert!(key.error as usize <= stream.len() / capacity);
            }
            // Every key above the bound of the error is listed.
            for (key, count) in exact.iter().filter(|(_, count)| **count as usize > stream.len() / capacity) {
                prop_assert!(top.iter().any(|top| top.value == key), "{} {}", key, count);
            }
        }
    }
}
