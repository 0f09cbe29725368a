//! A sample of clients, chosen by their hashes.
//!
//! At level n, a client is in the sample if the top n bits of its hash are 0, so one of 2^n clients is. The level rises
//! when the sample is full. A client that is in the sample at the end was in it at every lower level, so the sample has
//! seen all of its requests.

use std::collections::HashMap;

/// At most `max` clients, each with a value.
#[derive(Clone, Debug)]
pub(super) struct Sample<T> {
    clients: HashMap<u64, T, ahash::RandomState>,
    level: u32,
    max: usize,
}

/// Returns whether a client is in a sample of this level.
pub(super) fn contains(level: u32, client: u64) -> bool {
    client.leading_zeros() >= level
}

impl<T> Sample<T> {
    pub(super) fn new(max: usize) -> Self {
        // The hashes are uniform already, so the seeds of the map need not be secret.
        let clients = HashMap::with_hasher(ahash::RandomState::with_seeds(1, 2, 3, 4));
        Self { clients, level: 0, max: max.max(1) }
    }

    pub(super) fn level(&self) -> u32 {
        self.level
    }

    pub(super) fn len(&self) -> usize {
        self.clients.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&u64, &T)> {
        self.clients.iter()
    }

    /// Returns the value of a client, which is `new` if the client is not in the sample yet. Returns `None` if the client
    /// does not belong to the sample.
    pub(super) fn get_or_insert_with(&mut self, client: u64, new: impl FnOnce() -> T) -> Option<&mut T> {
        if !contains(self.level, client) {
            return None;
        }
        while self.clients.len() >= self.max && !self.clients.contains_key(&client) {
            self.raise_level(self.level + 1);
            if !contains(self.level, client) {
                return None;
            }
        }
        Some(self.clients.entry(client).or_insert_with(new))
    }

    /// Keeps the clients of a higher level only.
    pub(super) fn raise_level(&mut self, level: u32) {
        if level > self.level {
            self.level = level.min(u64::BITS);
            self.clients.retain(|client, _| contains(level, *client));
        }
    }
}
