//! The memory of a server: its size, and whether the server evicts keys when it is full.
//!
//! Read from `INFO`, because managed servers do not allow `CONFIG`.

use redis::{Cmd, Value};

/// The warning about eviction. All our keys expire, so the `volatile-` policies evict them too.
pub(super) const EVICTS: &str = "the store evicts keys when its memory is full, and an evicted key gets its full quota again: \
                                 set maxmemory-policy noeviction, or keep limits on a Redis of their own";

/// The memory of a server of the store: see [`ServerStatus`](super::ServerStatus).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerMemory {
    /// Bytes in use.
    pub used: u64,
    /// The most bytes that it may use, `maxmemory`. 0 means no bound.
    pub maximum: u64,
    /// The policy at the bound, `maxmemory-policy`.
    pub eviction_policy: String,
    /// Keys evicted since the server started.
    pub evicted_keys: u64,
}

impl ServerMemory {
    /// Returns whether keys of limits may be evicted. An evicted key gets its full quota again.
    #[must_use]
    pub fn evicts(&self) -> bool {
        self.maximum > 0 && self.eviction_policy != "noeviction"
    }

    /// Reads the reply to [`command`].
    pub(super) fn read(reply: &Value) -> Option<Self> {
        let text = match reply {
            Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
            Value::SimpleString(text) => text,
            Value::VerbatimString { text, .. } => text,
            _ => return None,
        };
        let field = |name: &str| {
            let mut fields = text.lines().filter_map(|line| line.split_once(':'));
            fields.find_map(|(key, value)| (key == name).then(|| value.trim()))
        };
        let number = |name: &str| field(name)?.parse::<u64>().ok();
        // Bounded, because it is written to logs and metrics.
        let is_word = |word: &&str| word.len() <= 32 && word.bytes().all(|byte| byte.is_ascii_graphic());
        Some(Self {
            used: number("used_memory")?,
            maximum: number("maxmemory")?,
            eviction_policy: field("maxmemory_policy").filter(is_word)?.to_owned(),
            evicted_keys: number("evicted_keys")?,
        })
    }
}

/// The command whose reply [`ServerMemory::read`] reads.
pub(super) fn command() -> Cmd {
    let mut command = redis::cmd("INFO");
    command.arg("memory").arg("stats");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_info_are_found_and_anything_else_is_not_taken_for_them() {
        let text = "# Memory\r\nused_memory:1153448\r\nused_memory_human:1.10M\r\nmaxmemory:2000000\r\n\
                    maxmemory_policy:volatile-lru\r\n\r\n# Stats\r\nevicted_keys:7\r\n";
        let memory = ServerMemory::read(&Value::BulkString(text.into())).expect("it is all there");
        assert_eq!((memory.used, memory.maximum, memory.evicted_keys), (1_153_448, 2_000_000, 7));
        assert!(memory.evicts());
        for other in [
            text.replace("maxmemory:2000000", "maxmemory:many"),
            text.replace("volatile-lru", &"x".repeat(40)),
            text.replace("evicted_keys", "evicted"),
            String::new(),
        ] {
            assert_eq!(ServerMemory::read(&Value::BulkString(other.into())), None);
        }
        assert_eq!(ServerMemory::read(&Value::Okay), None);
        let unbounded = text.replace("maxmemory:2000000", "maxmemory:0");
        assert!(!ServerMemory::read(&Value::SimpleString(unbounded)).expect("it is all there").evicts());
    }
}
