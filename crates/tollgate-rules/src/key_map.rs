//! A map of keys in normal form, which are looked up without building a key.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};

use super::key_part::Piece;

/// Values by key.
#[derive(Debug)]
pub(super) struct KeyMap<T> {
    entries: HashMap<u64, Vec<(Parts, T)>, ahash::RandomState>,
}

type Parts = Box<[Piece<'static>]>;

impl<T> Default for KeyMap<T> {
    fn default() -> Self {
        Self { entries: HashMap::default() }
    }
}

impl<T> KeyMap<T> {
    /// Adds a value for a key. Returns `false` and changes nothing if the key has one.
    #[must_use]
    pub(super) fn insert(&mut self, key: &[Piece<'_>], value: T) -> bool {
        if self.get(key).is_some() {
            return false;
        }
        let hash = self.hash(key);
        let parts = key.iter().cloned().map(Piece::into_owned).collect();
        self.entries.entry(hash).or_default().push((parts, value));
        true
    }

    pub(super) fn get(&self, key: &[Piece<'_>]) -> Option<&T> {
        if self.entries.is_empty() {
            return None;
        }
        let alike = self.entries.get(&self.hash(key))?;
        alike.iter().find(|(known, _)| **known == *key).map(|(_, value)| value)
    }

    fn hash(&self, key: &[Piece<'_>]) -> u64 {
        let mut hasher = self.entries.hasher().build_hasher();
        key.iter().for_each(|piece| piece.as_bytes().hash(&mut hasher));
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KeyPart, Missing, PathReading};

    fn key(parts: &[&'static str]) -> Vec<Piece<'static>> {
        let part = KeyPart::header("x-user");
        let piece = |text: &&'static str| part.named(text.as_bytes(), Missing::Skip, PathReading::default());
        parts.iter().flat_map(|text| piece(text).unwrap()).collect()
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let mut map = KeyMap::default();
        assert!(map.insert(&key(&["ab", "c"]), 1) && !map.insert(&key(&["ab", "c"]), 2));
        assert_eq!(map.get(&key(&["ab", "c"])), Some(&1));
        assert_eq!(map.get(&key(&["a", "bc"])), None);
        assert_eq!(map.get(&key(&["abc"])), None);
    }
}
