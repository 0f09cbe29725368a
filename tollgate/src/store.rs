//! Stores of the state of keys. The Redis store is in `redis`.

pub(crate) mod memory;
