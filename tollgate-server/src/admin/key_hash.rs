//! Keys in the responses of the admin API and in the log: as they are, or hashed.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use sha2::{Digest, Sha256};

use crate::reload::versions::hex;

/// Whether keys are shown: `admin.show_keys`, which a reload can change.
#[derive(Debug, Default)]
pub(crate) struct KeyDisplay(AtomicBool);

impl KeyDisplay {
    pub(crate) fn set(&self, shows_keys: bool) {
        self.0.store(shows_keys, Relaxed);
    }

    pub(crate) fn shows_keys(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// Returns the hash that stands for a key: the first 16 hexadecimal digits of SHA-256 over the name of the limit and the
/// parts of the key, each after a NUL. It is the same on every node.
pub(crate) fn key_hash(limit: &str, key: &[impl AsRef<[u8]>]) -> String {
    let mut digest = Sha256::new_with_prefix(limit.as_bytes());
    for part in key {
        digest.update([0]);
        digest.update(part.as_ref());
    }
    hex(&digest.finalize()[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_that_of_the_name_and_the_parts_joined_by_nul() {
        let expected = hex(&Sha256::digest(b"per-page\0ann\0/a")[..8]);
        assert_eq!(key_hash("per-page", &["ann", "/a"]), expected);
        assert_ne!(key_hash("per-page", &["ann/a"]), expected);
        assert_eq!(expected.len(), 16);
    }
}
