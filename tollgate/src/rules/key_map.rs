//! A map with keys of several parts, which are looked up without building a key.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};

/// Values by key.
#[derive(Debug)]
pub(super) struct KeyMap<T> {
    entries: HashMap<u64, Vec<(Parts, T)>, ahash::RandomState>,
}

type Parts = Box<[Box<[u8]>]>;

impl<T> Default for KeyMap<T> {
    fn default() -> Self {
        Self { entries: HashMap::default() }
    }
}

impl<T> KeyMap<T> {
    pub(super) fn insert(&mut self, parts: Parts, value: T) {
        let hash = self.hash(parts.iter().map(|part| &**part));
        self.entries.entry(hash).or_default().push((parts, value));
    }

    pub(super) fn get<'p>(&self, parts: impl Iterator<Item = &'p [u8]> + Clone) -> Option<&T> {
        if self.entries.is_empty() {
            return None;
        }
        let alike = self.entries.get(&self.hash(parts.clone()))?;
        let same = alike.iter().find(|(known, _)| known.iter().map(|part| &**part).eq(parts.clone()));
        same.map(|(_, value)| value)
    }

    fn hash<'p>(&self, parts: impl Iterator<Item = &'p [u8]>) -> u64 {
        let mut hasher = self.entries.hasher().build_hasher();
        parts.for_each(|part| part.hash(&mut hasher));
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_run_into_each_other() {
        let mut map = KeyMap::default();
        map.insert([b"ab".as_slice().into(), b"c".as_slice().into()].into(), 1);
        assert_eq!(map.get([b"ab".as_slice(), b"c"].into_iter()), Some(&1));
        assert_eq!(map.get([b"a".as_slice(), b"bc"].into_iter()), None);
        assert_eq!(map.get([b"abc".as_slice()].into_iter()), None);
    }
}
