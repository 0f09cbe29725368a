//! Counters of a limiter: calls, batches, bytes, leases and failures.
//!
//! Most are counted once per call to Redis rather than per decision. All are relaxed atomics.
//!
//! Also the memory of a server: its size, and whether the server evicts keys when it is full. It is read from `INFO`,
//! because managed servers do not allow `CONFIG`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Cmd, Value};

/// The counters of a limiter: see [`RedisLimiter::stats`](super::RedisLimiter::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Script calls sent to Redis.
    pub calls: u64,
    /// Requests sent in these calls.
    pub requests: u64,
    /// Requests in one call.
    pub batch_sizes: Histogram,
    /// Time from sending a call to its reply, or to its failure, in microseconds.
    pub call_micros: Histogram,
    /// Bytes sent to the servers on all connections, after TLS encryption.
    pub bytes_sent: u64,
    /// Bytes received from the servers.
    pub bytes_received: u64,
    /// Denials from the denial cache, without a call.
    pub cached_denials: u64,
    /// Hits of allowed requests that were taken from slices of this process.
    pub leased: u64,
    /// Slices of quota that were taken in advance.
    pub leases: u64,
    /// Slices that the store refused, because the key had no units left.
    pub leases_refused: u64,
    /// Slices that were requested without a reply from the store.
    pub leases_failed: u64,
    /// Slices whose unspent units were given back to the store.
    pub leases_returned: u64,
    /// Slices that this process holds now, with units left.
    pub leases_held: u64,
    /// Units left in these slices.
    pub leased_units: u64,
    /// Requests without a reply within `store_timeout`.
    pub timeouts: u64,
    /// Decisions for which the failure policy of a limit was used.
    pub by_policy: u64,
    /// Times that the breaker of a server opened, or that a server began to refuse requests.
    pub breaker_opened: u64,
    /// Times that a server became available again.
    pub breaker_closed: u64,
}

/// Maximum number of buckets of a histogram.
const BUCKETS: usize = 16;
/// Upper bounds of the buckets, inclusive. Larger values have a bucket of their own. A batch has at most 64 requests.
const BATCH_SIZES: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];
const CALL_MICROS: [u64; 13] = [50, 100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 204_800, 819_200];

/// A histogram of values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    bounds: &'static [u64],
    counts: [u64; BUCKETS],
    sum: u64,
}

impl Histogram {
    /// Returns the sum of all values.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the upper bound of each bucket, inclusive, with the number of its values. The last bucket has no bound.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = self.bounds.iter().map(|bound| Some(*bound)).chain([None]);
        bounds.zip(self.counts)
    }
}

/// Counts values into a histogram.
struct Recorder {
    bounds: &'static [u64],
    counts: [AtomicU64; BUCKETS],
    sum: AtomicU64,
}

impl Recorder {
    fn new(bounds: &'static [u64]) -> Self {
        Self { bounds, counts: Default::default(), sum: AtomicU64::new(0) }
    }

    fn record(&self, value: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    fn read(&self) -> Histogram {
        let counts = self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        Histogram { bounds: self.bounds, counts, sum: self.sum.load(Ordering::Relaxed) }
    }
}

/// Counts the calls of a limiter.
pub(super) struct Calls {
    batch_sizes: Recorder,
    micros: Recorder,
}

impl Default for Calls {
    fn default() -> Self {
        Self { batch_sizes: Recorder::new(&BATCH_SIZES), micros: Recorder::new(&CALL_MICROS) }
    }
}

impl Calls {
    pub(super) fn sent(&self, requests: usize) {
        self.batch_sizes.record(requests as u64);
    }

    pub(super) fn ended(&self, took: Duration) {
        self.micros.record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }
}

/// Counts the bytes of the connections of a limiter.
#[derive(Default)]
pub(super) struct Traffic {
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
}

/// Counts decisions made without a call, and requests without a reply in time.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) cached_denials: AtomicU64,
    pub(super) leased: AtomicU64,
    pub(super) leases: AtomicU64,
    pub(super) leases_refused: AtomicU64,
    pub(super) leases_failed: AtomicU64,
    pub(super) leases_returned: AtomicU64,
    pub(super) by_policy: AtomicU64,
    pub(super) timeouts: AtomicU64,
}

impl Stats {
    pub(super) fn read<'t>(
        counts: &Counts,
        calls: &Calls,
        stores: impl Iterator<Item = (&'t Traffic, (u64, u64))>,
    ) -> Self {
        let number = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let batch_sizes = calls.batch_sizes.read();
        let mut stats = Self {
            calls: batch_sizes.count(),
            requests: batch_sizes.sum(),
            batch_sizes,
            call_micros: calls.micros.read(),
            cached_denials: number(&counts.cached_denials),
            leased: number(&counts.leased),
            leases: number(&counts.leases),
            leases_refused: number(&counts.leases_refused),
            leases_failed: number(&counts.leases_failed),
            leases_returned: number(&counts.leases_returned),
            by_policy: number(&counts.by_policy),
            timeouts: number(&counts.timeouts),
            ..Self::default()
        };
        for (traffic, (opened, closed)) in stores {
            stats.bytes_sent += number(&traffic.sent);
            stats.bytes_received += number(&traffic.received);
            stats.breaker_opened += opened;
            stats.breaker_closed += closed;
        }
        stats
    }
}

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
pub(super) fn memory_command() -> Cmd {
    let mut command = redis::cmd("INFO");
    command.arg("memory").arg("stats");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_in_the_bucket_that_holds_them() {
        let recorder = Recorder::new(&BATCH_SIZES);
        for value in [1, 2, 3, 4, 64, 65] {
            recorder.record(value);
        }
        let histogram = recorder.read();
        assert_eq!((histogram.count(), histogram.sum()), (6, 139));
        let filled: Vec<_> = histogram.buckets().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(Some(1), 1), (Some(2), 1), (Some(4), 2), (Some(64), 1), (None, 1)]);
        assert_eq!(histogram.buckets().count(), BATCH_SIZES.len() + 1);
        assert!(CALL_MICROS.len() < BUCKETS && CALL_MICROS.is_sorted());
    }

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
