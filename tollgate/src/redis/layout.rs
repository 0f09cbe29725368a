//! The compact layout: many keys of a limit in one hash, which Redis stores as a listpack.
//!
//! A key of a limit is a field, named by 80 bits of the SHA-256 of its name. Other bits choose the hash, so two keys
//! share a field only if 80 bits and the hash agree. Nobody can find such keys, with or without a secret: see ADR 29.

use std::sync::Arc;

use sha2::{Digest, Sha256};

/// How the states of keys are stored on Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Each key of a limit is a key on Redis.
    #[default]
    Plain,
    /// Many keys of a limit share a hash on Redis. It takes about a quarter of the memory, and more of
    /// Redis's time.
    ///
    /// Sliding window logs and counters with more than six segments keep the plain layout.
    Compact,
}

/// Number of keys for each limit, unless the settings have another.
pub(super) const EXPECTED_KEYS: u64 = 1_000_000;
pub(super) const MAX_EXPECTED_KEYS: u64 = 1_000_000_000;

/// Keys in a hash if there are as many as expected. Redis stores a hash of up to 128 fields as a listpack, so half as many
/// more than expected still fit.
const KEYS_PER_HASH: u64 = 64;

/// Bytes of a field's name.
const FIELD: usize = 10;

/// Marks the name of a hash. No escape sequence is like this.
const MARK: &[u8] = b"%~";

/// The hashes that have the keys of each limit.
#[derive(Clone, Debug)]
pub(super) struct Hashes {
    /// The beginning of all names of the store. It is part of the digest, so that who does not know the prefix of the
    /// store cannot choose keys that share a hash.
    begin: Arc<str>,
    count: u64,
}

impl Hashes {
    pub(super) fn new(begin: &Arc<str>, expected_keys: u64) -> Self {
        Self { begin: begin.clone(), count: expected_keys.div_ceil(KEYS_PER_HASH).max(1) }
    }

    /// Returns the name of a key in this layout: the name of its hash, followed by that of its field. `plain` is its
    /// name in the plain layout, which begins with `prefix`.
    pub(super) fn name(&self, prefix: &str, plain: &[u8]) -> Arc<[u8]> {
        // A limit and its ban have the same tag, and so the same slot of a cluster.
        let tag = &plain[prefix.find('{').unwrap_or(0)..];
        let digest = Sha256::new().chain_update(self.begin.as_bytes()).chain_update(tag).finalize();
        let (chooses_hash, field) = (&digest[..8], &digest[8..8 + FIELD]);
        let fraction = chooses_hash.iter().fold(0, |number: u128, byte| number << 8 | u128::from(*byte));
        let hash = (fraction * u128::from(self.count)) >> 64;
        [prefix.as_bytes(), MARK, hash.to_string().as_bytes(), b"}", field].concat().into()
    }
}

/// Splits a name in this layout into the names of the hash and the field.
pub(super) fn split(name: &[u8]) -> (&[u8], &[u8]) {
    name.split_at(name.len().saturating_sub(FIELD))
}

/// Returns whether this is the part of a name after the prefix in this layout.
#[cfg(feature = "file")]
pub(super) fn is_of_hash(key: &[u8]) -> bool {
    key.starts_with(MARK) && split(key).0.last() == Some(&b'}')
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "rate_limit:{l|";

    fn hashes(expected: u64) -> Hashes {
        Hashes::new(&"rate_limit:".into(), expected)
    }

    fn named(hashes: &Hashes, key: usize) -> Arc<[u8]> {
        hashes.name(PREFIX, format!("{PREFIX}{key}}}").as_bytes())
    }

    #[test]
    fn a_name_is_that_of_a_hash_and_a_field() {
        let name = named(&hashes(1), 7);
        assert!(name.starts_with(b"rate_limit:{l|%~0}"));
        let (hash, field) = split(&name);
        assert_eq!((hash, field.len()), (&b"rate_limit:{l|%~0}"[..], 10));
        assert_eq!(super::super::names::slot(&name), super::super::names::slot(hash));
    }

    #[test]
    fn a_ban_is_in_the_slot_of_its_limit() {
        let hashes = hashes(1_000_000);
        for key in 0..50 {
            let limit = named(&hashes, key);
            let prefix = "rate_limit:ban:{l|";
            let ban = hashes.name(prefix, format!("{prefix}{key}}}").as_bytes());
            assert_ne!(limit, ban);
            assert_eq!(super::super::names::slot(&limit), super::super::names::slot(&ban));
        }
    }

    #[test]
    fn a_hash_with_as_many_keys_as_expected_stays_a_listpack() {
        let hashes = hashes(100_000);
        let mut sizes = std::collections::HashMap::new();
        let mut fields = std::collections::HashSet::new();
        for key in 0..100_000 {
            let name = named(&hashes, key);
            let (hash, field) = split(&name);
            *sizes.entry(hash.to_vec()).or_insert(0) += 1;
            assert!(fields.insert(field.to_vec()));
        }
        assert!(sizes.len() > 1500 && sizes.len() <= 1563, "{}", sizes.len());
        assert!(sizes.values().all(|size| *size < 120), "{:?}", sizes.values().max());
    }

    #[test]
    fn the_prefix_of_the_store_changes_which_keys_share_a_hash() {
        let of = |begin: &str, key: usize| {
            let prefix = format!("{begin}{{l|");
            let name = Hashes::new(&begin.into(), 100_000).name(&prefix, format!("{prefix}{key}}}").as_bytes());
            split(&name).0[prefix.len()..].to_vec()
        };
        let same = (0..1000).filter(|key| of("rate_limit:", *key) == of("shop:rate_limit:", *key)).count();
        assert!(same < 20, "{same}");
    }
}
