//! The names of keys on Redis: `[<prefix>:]rate_limit:{<limit name>|<key>}`, or `…rate_limit:ban:{…}` for a ban. The
//! name does not contain the algorithm, so that counts are kept when it changes.
//!
//! The braces are the hash tag, which puts everything that belongs to one key of a limit into one slot of a cluster.
//! Untrusted keys can neither end the tag nor collide with a key of another limit: braces, bars and percent signs are
//! escaped as in a URL. A long key is replaced by its SHA-256.
//!
//! In the compact layout, many keys of a limit share a hash on Redis: see `layout.rs`.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use super::ConnectError;
use super::layout::Hashes;
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
#[cfg(feature = "file")]
pub(super) fn key_in<'n>(prefix: &str, name: &'n [u8]) -> &'n [u8] {
    name.get(prefix.len()..name.len().saturating_sub(1)).unwrap_or_default()
}

/// Returns the parts of the key in a name. A key that is too long for a name is its SHA-256.
#[cfg(feature = "file")]
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
#[cfg(feature = "file")]
pub(super) fn name_of_key_in(prefix: &str, key: &[u8]) -> Arc<[u8]> {
    [prefix.as_bytes(), key, b"}"].concat().into()
}

/// Returns the name of the key that marks a reservation on the key `name` as settled. It is in the same slot.
#[cfg(feature = "file")]
pub(super) fn settled(begin: &str, name: &[u8], id: &[u8]) -> Arc<[u8]> {
    let tag = name.iter().position(|byte| *byte == b'{').map_or(name, |open| &name[open..]);
    let mut settled = [begin.as_bytes(), tag, b":"].concat();
    settled.extend(id.iter().flat_map(|byte| hex(*byte)));
    settled.into()
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

    /// Returns the name of a channel, or of a key that does not belong to a limit.
    pub(super) fn of(&self, what: &str) -> String {
        format!("{}{what}", self.begin)
    }

    /// Returns the name of the key with the state of a limit that learns.
    #[cfg(feature = "file")]
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
#[cfg(feature = "file")]
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
    #[cfg(feature = "file")]
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
}
