//! The names of keys on Redis: `[<prefix>:]rate_limit:{<limit name>|<key>}`, or `…rate_limit:ban:{…}` for a ban. The
//! name does not contain the algorithm, so that counts are kept when it changes.
//!
//! The braces are the hash tag, which puts everything that belongs to one key of a limit into one slot of a cluster.
//! Untrusted keys can neither end the tag nor collide with a key of another limit: braces, bars and percent signs are
//! escaped as in a URL. A long key is replaced by its SHA-256.
//!
//! In the compact layout, many keys of a limit share a hash on Redis, which Redis stores as a listpack. A key is a
//! field, named by 80 bits of the SHA-256 of its name. Other bits choose the hash, so two keys share a field only if 80
//! bits and the hash agree. Nobody can find such keys, with or without a secret: see ADR 29.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use super::ConnectError;
use crate::algorithm::Algorithm;
use crate::key::Key;
use crate::limit::Limit;

/// Maximum length of a key that is not hashed. Redis keeps names in memory, and a longer key is usually an attack or a
/// mistake.
const LONGEST: usize = 128;

/// The prefix of a hashed key. No escape sequence begins like this.
const HASHED: &str = "%#";
/// The name of a key without parts. No escape sequence is like this.
const NO_PARTS: &str = "%";

/// Returns the name of a limit's key on Redis.
pub(super) fn name(prefix: &str, key: Key<'_>) -> Arc<[u8]> {
    let mut name: SmallVec<[u8; 256]> = SmallVec::new();
    name.extend_from_slice(prefix.as_bytes());
    let begin = name.len();
    match key.whole() {
        Some(bytes) => escape(bytes, &mut name),
        None if key.several().next().is_none() => name.extend_from_slice(NO_PARTS.as_bytes()),
        None => {
            for (index, part) in key.several().enumerate() {
                if index > 0 {
                    name.push(b'|');
                }
                escape(part, &mut name);
            }
        }
    }
    if name.len() - begin > LONGEST {
        let digest = Sha256::digest(&name[begin..]);
        name.truncate(begin);
        name.extend_from_slice(HASHED.as_bytes());
        name.extend(digest.iter().flat_map(|byte| hex(*byte)));
    }
    name.push(b'}');
    Arc::from(&*name)
}

/// Returns the key in a name that has this prefix, as the name contains it.
pub(super) fn key_in<'n>(prefix: &str, name: &'n [u8]) -> &'n [u8] {
    name.get(prefix.len()..name.len().saturating_sub(1)).unwrap_or_default()
}

/// Returns the limit in the name of a key.
pub(super) fn limit_in(name: &[u8]) -> Option<String> {
    let tag = &name[name.iter().position(|byte| *byte == b'{')? + 1..];
    let limit = &tag[..tag.iter().position(|byte| *byte == b'|')?];
    Some(String::from_utf8_lossy(&unescape(limit)).into_owned())
}

/// Returns the parts of the key in a name. A key that is too long for a name is its SHA-256.
pub(super) fn parts_in(name: &[u8]) -> Vec<String> {
    let inside = |name: &[u8]| -> Option<Vec<u8>> {
        let tag = &name[name.iter().position(|byte| *byte == b'{')? + 1..];
        let key = &tag[tag.iter().position(|byte| *byte == b'|')? + 1..];
        Some(key.strip_suffix(b"}").unwrap_or(key).to_vec())
    };
    let key = inside(name).unwrap_or_default();
    if key == NO_PARTS.as_bytes() {
        return Vec::new();
    }
    if key.starts_with(HASHED.as_bytes()) {
        return vec![String::from_utf8_lossy(&key).into_owned()];
    }
    key.split(|byte| *byte == b'|').map(|part| String::from_utf8_lossy(&unescape(part)).into_owned()).collect()
}

/// Returns the name of a limit's key from the key as another name contains it.
pub(super) fn name_of_key_in(prefix: &str, key: &[u8]) -> Arc<[u8]> {
    [prefix.as_bytes(), key, b"}"].concat().into()
}

/// Returns the name of the key that marks a reservation on the key `name` as settled. It is in the same slot.
pub(super) fn settled(begin: &str, name: &[u8], id: &[u8]) -> Arc<[u8]> {
    let id = id.iter().flat_map(|byte| hex(*byte));
    [begin.as_bytes(), tag_of(name), b":"].concat().into_iter().chain(id).collect()
}

/// Returns the name of the key with the time of the last reset of the key `name`. It is in the same slot.
pub(super) fn reset(begin: &str, name: &[u8]) -> Arc<[u8]> {
    [begin.as_bytes(), tag_of(name)].concat().into()
}

/// Returns the name from its hash tag on.
fn tag_of(name: &[u8]) -> &[u8] {
    name.iter().position(|byte| *byte == b'{').map_or(name, |open| &name[open..])
}

/// The names of all keys and channels of a store.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// `rate_limit:`, after the prefix of the store if it has one.
    begin: Arc<str>,
    /// The hashes that have the keys of each limit, in the compact layout.
    hashes: Option<Hashes>,
}

/// Maximum length of a prefix: longer than the name of any service.
const MAX_PREFIX: usize = 64;

impl Names {
    pub(super) fn new(prefix: Option<&str>) -> Result<Self, ConnectError> {
        let Some(prefix) = prefix else { return Ok(Self { begin: "rate_limit:".into(), hashes: None }) };
        // Braces would be the hash tag, and `*`, `?` and brackets are patterns in ACL rules.
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/');
        let fix = "use letters, digits and _ - . : /, 64 at most";
        if prefix.is_empty() {
            return Err(ConnectError::new("the prefix is empty", format!("{fix}, or leave it out")));
        }
        if prefix.len() > MAX_PREFIX {
            return Err(ConnectError::new(format!("the prefix has {} bytes", prefix.len()), fix));
        }
        if !prefix.bytes().all(is_good) {
            return Err(ConnectError::new(format!("the prefix `{prefix}` has invalid characters"), fix));
        }
        Ok(Self { begin: format!("{prefix}:rate_limit:").into(), hashes: None })
    }

    /// Keeps the keys of each limit in hashes.
    pub(super) fn in_hashes(mut self, expected_keys: u64) -> Self {
        self.hashes = Some(Hashes::new(&self.begin, expected_keys));
        self
    }

    /// Returns the hashes that have the keys of each limit, in the compact layout.
    pub(super) fn hashes(&self) -> Option<&Hashes> {
        self.hashes.as_ref()
    }

    /// Returns the layout for display. Stores with the same names and the same text share their counts.
    pub(super) fn layout(&self) -> String {
        match &self.hashes {
            None => "plain".to_owned(),
            Some(Hashes { count: 1, .. }) => "compact (1 hash)".to_owned(),
            Some(Hashes { count, .. }) => format!("compact ({count} hashes)"),
        }
    }

    /// Returns the name of a channel, or of a key that does not belong to a limit.
    pub(super) fn of(&self, what: &str) -> String {
        format!("{}{what}", self.begin)
    }

    /// Returns the name of the key with the state of a limit that learns.
    pub(super) fn learned(&self, limit: &str) -> String {
        let mut name = SmallVec::new();
        escape(limit.as_bytes(), &mut name);
        format!("{}learned:{{{}}}", self.begin, String::from_utf8_lossy(&name))
    }

    /// Returns the part of a limit's key names before the key.
    pub(super) fn before_key(&self, limit: &Limit) -> String {
        let mut name = SmallVec::new();
        escape(limit.name().as_bytes(), &mut name);
        let kind = if matches!(limit.algorithm(), Algorithm::Ban(_)) { "ban:" } else { "" };
        format!("{}{kind}{{{}|", self.begin, String::from_utf8_lossy(&name))
    }
}

/// Returns the cluster slot of a name.
pub(super) fn slot(name: &[u8]) -> u16 {
    let tag = name.iter().position(|byte| *byte == b'{').and_then(|open| {
        let inside = &name[open + 1..];
        let length = inside.iter().position(|byte| *byte == b'}')?;
        (length > 0).then(|| &inside[..length])
    });
    crc16::State::<crc16::XMODEM>::calculate(tag.unwrap_or(name)) % 16384
}

fn escape(bytes: &[u8], into: &mut SmallVec<[u8; 256]>) {
    for byte in bytes {
        match byte {
            b'%' | b'{' | b'}' | b'|' => {
                into.push(b'%');
                into.extend(hex(*byte));
            }
            _ => into.push(*byte),
        }
    }
}

/// Reverses [`escape`].
fn unescape(text: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some((first, behind)) = rest.split_first() {
        let escaped = behind.split_at_checked(2).filter(|_| *first == b'%');
        let escaped = escaped.and_then(|(digits, behind)| {
            Some((u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?, behind))
        });
        let (byte, behind) = escaped.unwrap_or((*first, behind));
        bytes.push(byte);
        rest = behind;
    }
    bytes
}

fn hex(byte: u8) -> [u8; 2] {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]
}

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

/// Keys in a hash if there are as many as expected. Redis stores a hash of up to 128 fields as a listpack, so half as
/// many more than expected still fit.
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
pub(super) fn is_of_hash(key: &[u8]) -> bool {
    key.starts_with(MARK) && split(key).0.last() == Some(&b'}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{FixedWindow, MINUTE};

    fn named(limit: &str, key: Key<'_>) -> Vec<u8> {
        named_with(None, limit, key)
    }

    fn named_with(prefix: Option<&str>, limit: &str, key: Key<'_>) -> Vec<u8> {
        let limit = Limit::new(limit, FixedWindow::new(1, MINUTE)).unwrap();
        name(&Names::new(prefix).unwrap().before_key(&limit), key).to_vec()
    }

    #[test]
    fn a_prefix_comes_first_and_leaves_the_slot_alone() {
        let name = named_with(Some("shop:eu"), "l", "ann".into());
        assert_eq!(name, b"shop:eu:rate_limit:{l|ann}");
        assert_eq!(slot(&name), slot(&named("l", "ann".into())));
        assert_eq!(Names::new(Some("shop")).unwrap().of("changed"), "shop:rate_limit:changed");
        for prefix in ["", "a b", "a{b}", "a*", "a\n", "é", &"x".repeat(65)] {
            let error = Names::new(Some(prefix)).unwrap_err().to_string();
            assert!(error.contains(": use letters"), "{error}");
        }
    }

    #[test]
    fn a_plain_key_reads_as_it_is_written() {
        assert_eq!(named("per-user", "ann".into()), b"rate_limit:{per-user|ann}");
        assert_eq!(named("l", Key::parts(&["ann", "/search"])), b"rate_limit:{l|ann|/search}");
    }

    #[test]
    fn nothing_breaks_out_of_the_tag() {
        assert_eq!(named("l", "a}b{c|d%".into()), b"rate_limit:{l|a%7Db%7Bc%7Cd%25}");
        assert_eq!(named("l", b"\0\n \xff".into()), b"rate_limit:{l|\0\n \xff}");
    }

    #[test]
    fn a_long_key_is_hashed() {
        let (one, other) = ("x".repeat(64 << 10), "x".repeat((64 << 10) + 1));
        let name = named("l", (&one).into());
        assert_eq!(name.len(), "rate_limit:{l|%#}".len() + 64);
        assert_ne!(name, named("l", (&other).into()));
    }

    #[test]
    fn keys_of_no_part_one_part_and_two_differ() {
        let names = [Key::parts(&[]), "".into(), Key::parts(&["", ""]), "|".into(), "%".into()];
        let names: std::collections::HashSet<_> = names.map(|key| named("l", key)).into();
        assert_eq!(names.len(), 5);
    }

    #[test]
    fn a_name_contains_the_parts_of_its_key() {
        let parts = |key: Key<'_>| parts_in(&named("a|b", key));
        assert_eq!(parts(Key::parts(&["ann", "/a{b}|c%", ""])), ["ann", "/a{b}|c%", ""]);
        assert_eq!(parts("ann".into()), ["ann"]);
        assert!(parts(Key::parts(&[])).is_empty());
        assert!(parts((&"x".repeat(200)).into())[0].starts_with("%#"));
    }

    #[test]
    fn the_slot_is_that_of_the_tag() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"rate_limit:x:{123456789}"), 0x31c3);
        assert_eq!(slot(b"{}123456789"), crc16::State::<crc16::XMODEM>::calculate(b"{}123456789") % 16384);
    }

    proptest! {
        #[test]
        fn different_keys_have_different_names(
            one in proptest::collection::vec("[a{}|%]{0,3}", 1..3), other in proptest::collection::vec("[a{}|%]{0,3}", 1..3),
            limits in ("[a|{}%]{1,3}", "[a|{}%]{1,3}"),
        ) {
            let parts = |texts: &[String]| texts.iter().map(String::as_str).collect::<Vec<_>>().join("\0");
            let (first, second): (Vec<&str>, Vec<&str>) =
                (one.iter().map(String::as_str).collect(), other.iter().map(String::as_str).collect());
            let same = limits.0 == limits.1 && parts(&one) == parts(&other);
            let names = (named(&limits.0, Key::parts(&first)), named(&limits.1, Key::parts(&second)));
            prop_assert_eq!(names.0 == names.1, same);
        }
    }

    const PREFIX: &str = "rate_limit:{l|";

    fn hashes(expected: u64) -> Hashes {
        Hashes::new(&"rate_limit:".into(), expected)
    }

    fn field_name(hashes: &Hashes, key: usize) -> Arc<[u8]> {
        hashes.name(PREFIX, format!("{PREFIX}{key}}}").as_bytes())
    }

    #[test]
    fn a_name_is_that_of_a_hash_and_a_field() {
        let name = field_name(&hashes(1), 7);
        assert!(name.starts_with(b"rate_limit:{l|%~0}"));
        let (hash, field) = split(&name);
        assert_eq!((hash, field.len()), (&b"rate_limit:{l|%~0}"[..], 10));
        assert_eq!(super::slot(&name), super::slot(hash));
    }

    #[test]
    fn a_ban_is_in_the_slot_of_its_limit() {
        let hashes = hashes(1_000_000);
        for key in 0..50 {
            let limit = field_name(&hashes, key);
            let prefix = "rate_limit:ban:{l|";
            let ban = hashes.name(prefix, format!("{prefix}{key}}}").as_bytes());
            assert_ne!(limit, ban);
            assert_eq!(super::slot(&limit), super::slot(&ban));
        }
    }

    #[test]
    fn a_hash_with_as_many_keys_as_expected_stays_a_listpack() {
        let hashes = hashes(100_000);
        let mut sizes = std::collections::HashMap::new();
        let mut fields = std::collections::HashSet::new();
        for key in 0..100_000 {
            let name = field_name(&hashes, key);
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
