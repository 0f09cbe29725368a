//! Units of time: whole microseconds.
//!
//! Microseconds since the Unix epoch stay below 2^53 until the year 2255, so the same numbers are exact in
//! Rust and in the doubles of a Lua script. Nothing here reads a clock; see [`crate::clock`].

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// One second.
pub const SECOND: Duration = Duration::from_secs(1);
/// One minute.
pub const MINUTE: Duration = Duration::from_secs(60);
/// One hour.
pub const HOUR: Duration = Duration::from_secs(60 * 60);
/// One day of 24 hours.
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest window, refill period or full refill: 2^50 µs, about 35 years. Together with [`Timestamp::MAX`] it keeps
/// every stored time below 2^53.
pub const MAX_SPAN: Duration = Duration::from_micros(1 << 50);
/// The shortest window, refill period or leak period: one millisecond.
pub const MIN_SPAN: Duration = Duration::from_millis(1);

/// A point in time: microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The latest timestamp: 2^52 µs, in the year 2112. Later times are clamped to it.
    pub const MAX: Self = Self(1 << 52);
    /// The Unix epoch.
    pub const EPOCH: Self = Self(0);

    /// Creates a timestamp from microseconds since the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Self(micros) }
    }

    /// Creates a timestamp from seconds since the Unix epoch.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_micros(secs.saturating_mul(1_000_000))
    }

    /// Returns the microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns this time plus `span`, at most [`Timestamp::MAX`]. Fractions of a microsecond are dropped.
    #[must_use]
    pub fn saturating_add(self, span: Duration) -> Self {
        Self::from_micros(self.0.saturating_add(whole_micros(span)))
    }

    /// Returns this time minus `span`, at least the epoch. Fractions of a microsecond are dropped.
    #[must_use]
    pub fn saturating_sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(whole_micros(span)))
    }
}

impl Timestamp {
    /// Returns this time plus `micros`, between the epoch and [`Timestamp::MAX`].
    #[doc(hidden)]
    #[inline]
    pub const fn offset_by(self, micros: i64) -> Self {
        Self::from_micros(self.0.saturating_add_signed(micros))
    }
}

/// Microseconds that the wall clock is ahead of a limiter's time.
///
/// The clock of a limiter sets it when the wall clock is stepped. Limits whose windows follow the wall clock read it:
/// fixed windows of the clock and buckets that refill at intervals. Without a clock it is 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct WallOffset(Option<Arc<AtomicI64>>);

impl WallOffset {
    /// Returns an offset of 0 that can be [set](Self::set). Clones share it.
    pub(crate) fn adjustable() -> Self {
        Self(Some(Arc::default()))
    }

    #[inline(always)]
    pub(crate) fn get(&self) -> i64 {
        self.0.as_ref().map_or(0, |micros| micros.load(Ordering::Relaxed))
    }

    pub(crate) fn set(&self, micros: i64) {
        if let Some(offset) = &self.0 {
            offset.store(micros, Ordering::Relaxed);
        }
    }
}

/// Returns the whole microseconds of a duration, saturating.
pub fn whole_micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
