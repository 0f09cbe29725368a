//! Counts distinct keys, and those of them that were denied.
//!
//! Keys are counted exactly while they fit. Then a uniform sample of them is kept: every key whose fingerprint ends in
//! enough zero bits, as in Wegman's adaptive sampling. Half of the keys leave the sample each time it is full, so it has at
//! least half as many keys as fit, and the shares that it shows are off by about one in the square root of that number.

/// The most slots of a table: 16 MiB, for 1 048 576 keys.
const MAX_SLOTS: usize = 1 << 21;
/// The fewest slots, for a rule file with thousands of limits: 32 KiB, for 2048 keys.
const MIN_SLOTS: usize = 1 << 12;
const FIRST_SLOTS: usize = 1 << 10;
/// The memory of all tables of a replay.
const MAX_BYTES: usize = 64 << 20;

/// The bits of a slot that are not part of the fingerprint.
const FLAGS: u64 = 0b11;
/// The first bit of the fingerprint, which is set in every slot that is used.
const USED: u64 = 0b100;

/// A set of keys.
#[derive(Clone, Debug)]
pub(crate) struct DistinctKeys {
    /// Fingerprints, with [`FLAGS`] in the lowest bits. 0 is a free slot. A key is at or after the slot that its highest
    /// bits name.
    slots: Vec<u64>,
    used: usize,
    max_slots: usize,
    /// Keys are kept if this many bits after [`USED`] are zero.
    sampled_bits: u32,
}

/// A flag of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Flag {
    /// The key was denied by the rules.
    Denied = 0b01,
    /// The key was denied by the rules that these are compared with.
    DeniedByOther = 0b10,
}

/// A number of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct KeyCount {
    /// The number of distinct keys.
    pub keys: u64,
    /// The number of keys that were denied at least once.
    pub denied: u64,
    /// The keys that only the other rules denied, and those that only these denied.
    #[serde(skip)]
    pub denied_by_other: u64,
    /// The number of keys that only the new rules denied.
    #[serde(skip)]
    pub newly_denied: u64,
    /// Whether the numbers are exact, not estimated from a sample.
    pub exact: bool,
}

impl DistinctKeys {
    /// Creates one of `sets` sets, which share the memory of a replay.
    pub(crate) fn one_of(sets: usize) -> Self {
        let slots = MAX_BYTES / size_of::<u64>() / sets.max(1);
        let max_slots = if slots < MIN_SLOTS { MIN_SLOTS } else { 1 << slots.ilog2() };
        Self::with_max_slots(max_slots.min(MAX_SLOTS))
    }

    fn with_max_slots(max_slots: usize) -> Self {
        Self { slots: vec![0; FIRST_SLOTS.min(max_slots)], used: 0, max_slots, sampled_bits: 0 }
    }

    /// Adds a key. Returns `false` if it does not have the flag [`Flag::Denied`]; that of a key outside the sample is
    /// unknown.
    #[inline]
    pub(crate) fn add(&mut self, fingerprint: u64) -> bool {
        self.slot(fingerprint).is_none_or(|slot| self.slots[slot] & Flag::Denied as u64 != 0)
    }

    /// Adds a key and sets a flag.
    pub(crate) fn flag(&mut self, fingerprint: u64, flag: Flag) {
        if let Some(slot) = self.slot(fingerprint) {
            self.slots[slot] |= flag as u64;
        }
    }

    pub(crate) fn count(&self) -> KeyCount {
        let with = |is_counted: fn(u64) -> bool| {
            let sampled = self.slots.iter().filter(|slot| **slot != 0 && is_counted(**slot & FLAGS)).count();
            (sampled as u64) << self.sampled_bits
        };
        KeyCount {
            keys: (self.used as u64) << self.sampled_bits,
            denied: with(|flags| flags & Flag::Denied as u64 != 0),
            denied_by_other: with(|flags| flags & Flag::DeniedByOther as u64 != 0),
            newly_denied: with(|flags| flags == Flag::Denied as u64),
            exact: self.sampled_bits == 0,
        }
    }

    /// Returns the slot of a key, adding it if needed, or `None` if the key is not in the sample.
    #[inline]
    fn slot(&mut self, fingerprint: u64) -> Option<usize> {
        let key = (fingerprint & !FLAGS) | USED;
        if !self.is_sampled(key) {
            return None;
        }
        let slot = self.find(key);
        if self.slots[slot] != 0 {
            return Some(slot);
        }
        self.insert(slot, key)
    }

    fn insert(&mut self, slot: usize, key: u64) -> Option<usize> {
        if 2 * (self.used + 1) <= self.slots.len() {
            self.slots[slot] = key;
            self.used += 1;
            return Some(slot);
        }
        let slots = (2 * self.slots.len()).min(self.max_slots);
        if slots == self.slots.len() {
            self.sampled_bits += 1;
        }
        self.rebuild(slots);
        self.slot(key)
    }

    /// Moves the keys of the sample to a table of this size.
    fn rebuild(&mut self, slots: usize) {
        let before = std::mem::replace(&mut self.slots, vec![0; slots]);
        self.used = 0;
        for key in before {
            if key != 0 && self.is_sampled(key) {
                let slot = self.find(key & !FLAGS);
                self.slots[slot] = key;
                self.used += 1;
            }
        }
    }

    #[inline]
    fn is_sampled(&self, key: u64) -> bool {
        (key >> 3) & ((1 << self.sampled_bits) - 1) == 0
    }

    /// Returns the slot that holds the key, or the free slot for it. At most half of the slots are used.
    #[inline]
    fn find(&self, key: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = (key >> (u64::BITS - self.slots.len().ilog2())) as usize;
        while self.slots[slot] != 0 && self.slots[slot] & !FLAGS != key {
            slot = (slot + 1) & mask;
        }
        slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a hash of a number.
    fn hash(number: u64) -> u64 {
        let mixed = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    #[test]
    fn keys_that_fit_are_counted_exactly() {
        let mut keys = DistinctKeys::with_max_slots(1 << 14);
        for round in 0..2 {
            for number in 1..=8000 {
                assert_eq!(keys.add(hash(number)), round == 1 && number % 10 == 0);
                if number % 10 == 0 {
                    keys.flag(hash(number), Flag::Denied);
                }
                if number % 20 == 0 {
                    keys.flag(hash(number), Flag::DeniedByOther);
                }
            }
        }
        let count = keys.count();
        assert_eq!((count.keys, count.denied, count.exact), (8000, 800, true));
        assert_eq!((count.denied_by_other, count.newly_denied), (400, 400));
    }

    #[test]
    fn more_keys_are_estimated_from_a_sample() {
        let mut keys = DistinctKeys::with_max_slots(1 << 14);
        for number in 1..=1_000_000 {
            keys.add(hash(number));
            if number % 10 == 0 {
                keys.flag(hash(number), Flag::Denied);
            }
        }
        let count = keys.count();
        assert!(!count.exact && keys.used >= 4096 && keys.slots.len() == 1 << 14);
        assert!(count.keys.abs_diff(1_000_000) < 50_000, "{count:?}");
        assert!(count.denied.abs_diff(100_000) < 15_000, "{count:?}");
    }

    #[test]
    fn sets_share_the_memory() {
        assert_eq!(DistinctKeys::one_of(1).max_slots, MAX_SLOTS);
        assert_eq!(DistinctKeys::one_of(4).max_slots, MAX_SLOTS);
        assert_eq!(DistinctKeys::one_of(5).max_slots, MAX_SLOTS / 2);
        assert_eq!(DistinctKeys::one_of(100_000).max_slots, MIN_SLOTS);
    }
}
