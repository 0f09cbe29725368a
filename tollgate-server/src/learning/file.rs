//! The file beside the state file that keeps what limits have learned.
//!
//! It has a line with the format, and then for each limit its name and its state, each after its length. Damage loses
//! what was learned, and nothing else: a limit then starts with its smallest number.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tollgate_rules::internal::read_bounded;

use crate::atomic_file::{replace, with_suffix};

/// The first line.
const FORMAT: &[u8] = b"tollgate learned 1\n";

/// The largest file that is read: as many limits as may learn, with the largest state that each may have.
const MAX_BYTES: u64 = 32 << 20;

/// A file that was read.
pub(super) enum Stored {
    Missing,
    Damaged,
    /// The states by the names of their limits.
    States(BTreeMap<String, Vec<u8>>),
}

/// Returns the path of the file beside a state file.
pub(super) fn path_beside(state: &Path) -> PathBuf {
    with_suffix(state, ".learned")
}

pub(super) fn read(path: &Path) -> io::Result<Stored> {
    match read_bounded(path, MAX_BYTES) {
        Ok(bytes) => Ok(decode(&bytes).map_or(Stored::Damaged, Stored::States)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Stored::Missing),
        Err(error) => Err(error),
    }
}

pub(super) fn write(path: &Path, states: &BTreeMap<String, Vec<u8>>) -> io::Result<()> {
    replace(path, |mut file| file.write_all(&encode(states)).map(|()| true))
}

pub(super) fn encode(states: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let mut bytes = FORMAT.to_vec();
    for part in states.iter().flat_map(|(name, state)| [name.as_bytes(), state]) {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
    bytes
}

pub(super) fn decode(bytes: &[u8]) -> Option<BTreeMap<String, Vec<u8>>> {
    let mut rest = bytes.strip_prefix(FORMAT)?;
    let mut states = BTreeMap::new();
    while !rest.is_empty() {
        let name = String::from_utf8(part(&mut rest)?.to_vec()).ok()?;
        states.insert(name, part(&mut rest)?.to_vec());
    }
    Some(states)
}

fn part<'b>(rest: &mut &'b [u8]) -> Option<&'b [u8]> {
    let (length, after) = rest.split_first_chunk()?;
    let (part, after) = after.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    *rest = after;
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_survive_and_damage_is_noticed() {
        let states = BTreeMap::from([("one".to_owned(), vec![1, 2, 3]), ("two".to_owned(), Vec::new())]);
        let bytes = encode(&states);
        assert_eq!(decode(&bytes), Some(states));
        for end in FORMAT.len() + 1..bytes.len() {
            let cut = decode(&bytes[..end]);
            assert!(cut.is_none() || cut.is_some_and(|states| states.len() == 1), "{end}");
        }
        assert_eq!(decode(b"something else"), None);
        let endless = [FORMAT, &u64::MAX.to_le_bytes()].concat();
        assert_eq!(decode(&endless), None);
    }
}
