//! Counters of a limiter: calls, batches, bytes, leases and failures.
//!
//! Most are counted once per call to Redis rather than per decision. All are relaxed atomics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::topology::Topology;

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

/// Counts decisions made without a call.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) cached_denials: AtomicU64,
    pub(super) leased: AtomicU64,
    pub(super) leases: AtomicU64,
    pub(super) leases_refused: AtomicU64,
    pub(super) leases_failed: AtomicU64,
    pub(super) leases_returned: AtomicU64,
    pub(super) by_policy: AtomicU64,
}

impl Stats {
    pub(super) fn read<'t>(counts: &Counts, calls: &Calls, stores: impl Iterator<Item = &'t Topology>) -> Self {
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
            ..Self::default()
        };
        for topology in stores {
            let (traffic, (opened, closed)) = (topology.traffic(), topology.breaker_counts());
            stats.bytes_sent += number(&traffic.sent);
            stats.bytes_received += number(&traffic.received);
            stats.breaker_opened += opened;
            stats.breaker_closed += closed;
        }
        stats
    }
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
}
