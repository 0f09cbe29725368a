//! The only place where a clock is read.
//!
//! A decision on a key that is in the cache takes some tens of nanoseconds, and reading the operating system's
//! clock takes as long again. So the time stamp counter of the processor is read instead, and compared with the
//! operating system's clock every now and then; on a processor without a steady counter the latter is read every
//! time. Windows are aligned to the wall clock, so the two are brought together once, at the start: from there
//! time only goes forward, whatever happens to the wall clock.

#[cfg(feature = "file")]
pub(crate) mod wall;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::units::Timestamp;

/// What time it is for a limiter.
#[derive(Clone)]
pub(crate) enum Clock {
    System(SystemClock),
    Manual(ManualClock),
}

impl Clock {
    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::System(clock) => clock.now(),
            Self::Manual(clock) => clock.now(),
        }
    }
}

/// A clock that stands still until it is told otherwise, for tests and simulations.
///
/// ```
/// use tollgate::{FixedWindow, Limit, Limiter, ManualClock, Timestamp, MINUTE};
///
/// let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
/// let limit = Limit::new("login", FixedWindow::new(1, MINUTE))?;
/// let limiter = Limiter::builder().limit(limit).clock(clock.clone()).build()?;
/// assert!(limiter.check("ann").is_allowed());
/// assert!(!limiter.check("ann").is_allowed());
/// clock.advance(MINUTE);
/// assert!(limiter.check("ann").is_allowed());
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that stands at that moment. Clones share it.
    #[must_use]
    pub fn at(now: Timestamp) -> Self {
        Self(Arc::new(now.as_micros().into()))
    }

    /// Moves to that moment, forward or back.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }

    /// Moves forward.
    pub fn advance(&self, span: Duration) {
        self.set(self.now().saturating_add(span));
    }

    /// The moment it stands at.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// The time of the operating system, read from the processor.
#[derive(Clone)]
pub(crate) struct SystemClock {
    ticks: quanta::Clock,
    shared: Arc<Shared>,
}

struct Shared {
    /// When this clock was made, by the counter and by the operating system.
    start: Instant,
    start_ticks: u64,
    start_nanos: u64,
    line: Line,
}

/// The line along which ticks are turned into microseconds for the next while, in one cache line.
#[repr(align(64))]
struct Line {
    /// Odd while the others are written.
    version: AtomicU64,
    /// Where it begins.
    ticks: AtomicU64,
    /// The time there: whole microseconds since the Unix epoch, and 2^-40ths of one.
    micros: AtomicU64,
    parts: AtomicU64,
    /// 2^-40ths of a microsecond per tick.
    slope: AtomicU64,
    /// Ticks after which it ends.
    until: AtomicU64,
}

/// The bits of a microsecond's fraction. A line ends after half a second, so a span along it fits 64 bits.
const PART_BITS: u32 = 40;

/// How often the counter is compared with the operating system's clock.
const COMPARE_AFTER: Duration = Duration::from_millis(500);

impl SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the module that may read clocks")]
    pub(crate) fn new() -> Self {
        let ticks = quanta::Clock::new();
        let start = Instant::now();
        let start_ticks = ticks.raw();
        let start_nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, whole_nanos);
        // What the counter's library has measured is good enough for the first line.
        let trial: u64 = 1 << 32;
        let measured = u128::from(ticks.delta_as_nanos(0, trial).max(1));
        let (micros, parts) = split(start_nanos);
        let slope = slope_of(measured, trial.into());
        let line = Line {
            version: AtomicU64::new(0),
            ticks: AtomicU64::new(start_ticks),
            micros: AtomicU64::new(micros),
            parts: AtomicU64::new(parts),
            slope: AtomicU64::new(slope),
            until: AtomicU64::new(ticks_in(COMPARE_AFTER, slope)),
        };
        Self { ticks, shared: Arc::new(Shared { start, start_ticks, start_nanos, line }) }
    }

    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        let line = &self.shared.line;
        let mut spins = 0;
        loop {
            let version = line.version.load(Ordering::Acquire);
            let from = line.ticks.load(Ordering::Relaxed);
            let micros = line.micros.load(Ordering::Relaxed);
            let parts = line.parts.load(Ordering::Relaxed);
            let slope = line.slope.load(Ordering::Relaxed);
            let until = line.until.load(Ordering::Relaxed);
            let ticks = self.ticks.raw();
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && line.version.load(Ordering::Relaxed) == version {
                let passed = ticks.saturating_sub(from);
                let now = micros + (passed.min(until).wrapping_mul(slope).wrapping_add(parts) >> PART_BITS);
                if passed > until {
                    return self.draw_anew(version, ticks, now);
                }
                return Timestamp::from_micros(now);
            }
            spins += 1;
            if spins % 64 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// At the end of a line, draws the next: from here and now to where the operating system's clock will be in
    /// a while, so that time neither jumps back nor turns back. Who comes late jumps ahead to the operating
    /// system's time.
    #[cold]
    #[inline(never)]
    fn draw_anew(&self, version: u64, ticks: u64, end_of_line: u64) -> Timestamp {
        let Shared { start, start_ticks, start_nanos, line } = &*self.shared;
        let elapsed = whole_nanos(start.elapsed());
        let system = start_nanos.saturating_add(elapsed);
        // What the line ended with was rounded down, so the next may begin where that microsecond does.
        let from = system.max(end_of_line.saturating_mul(1000));
        let (micros, parts) = split(from);
        let odd = version.wrapping_add(1);
        if line.version.compare_exchange(version, odd, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            fence(Ordering::Release);
            let measured = slope_of(elapsed.into(), ticks.saturating_sub(*start_ticks).into());
            let while_nanos = whole_nanos(COMPARE_AFTER);
            let wanted = system.saturating_add(while_nanos).saturating_sub(from).max(while_nanos / 2);
            let slope = (u128::from(measured) * u128::from(wanted) / u128::from(while_nanos)) as u64;
            line.ticks.store(ticks, Ordering::Relaxed);
            line.micros.store(micros, Ordering::Relaxed);
            line.parts.store(parts, Ordering::Relaxed);
            line.slope.store(slope, Ordering::Relaxed);
            line.until.store(ticks_in(COMPARE_AFTER, measured), Ordering::Relaxed);
            line.version.store(version.wrapping_add(2), Ordering::Release);
        }
        Timestamp::from_micros(micros)
    }
}

/// Nanoseconds as whole microseconds and 2^-40ths of one.
fn split(nanos: u64) -> (u64, u64) {
    (nanos / 1000, ((nanos % 1000) << PART_BITS) / 1000)
}

/// A slope between one microsecond a tick, and a thousandth of a nanosecond.
fn slope_of(nanos: u128, ticks: u128) -> u64 {
    let slope = (nanos << PART_BITS).checked_div(ticks.saturating_mul(1000)).unwrap_or(0);
    u64::try_from(slope).unwrap_or(u64::MAX).clamp(1 << (PART_BITS - 20), 1 << PART_BITS)
}

fn ticks_in(span: Duration, slope: u64) -> u64 {
    let ticks = (span.as_micros() << PART_BITS) / u128::from(slope.max(1));
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

fn whole_nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "compares this clock with the one it stands for")]
    fn follows_the_operating_system_and_never_turns_back() {
        let clock = SystemClock::new();
        // The thread may be held up between two readings, so each of ours is between two of the system's.
        let (earliest, first, started) = (Instant::now(), clock.now(), Instant::now());
        let mut last = first;
        while started.elapsed() < Duration::from_millis(1200) {
            let now = clock.now();
            assert!(now >= last, "{last:?} then {now:?}");
            last = now;
        }
        let (at_least, last, at_most) = (started.elapsed(), clock.now(), earliest.elapsed());
        let passed = Duration::from_micros(last.as_micros() - first.as_micros());
        assert!(passed >= at_least * 99 / 100 && passed <= at_most * 101 / 100, "{at_least:?} {passed:?} {at_most:?}");
    }

    #[test]
    fn a_slope_is_exact_to_a_nanosecond_in_a_line() {
        let (ticks, nanos) = (2_099_997_123_u64, 1_000_000_000_u64);
        let slope = slope_of(nanos.into(), ticks.into());
        let half = ticks_in(COMPARE_AFTER, slope);
        assert!(half.abs_diff(ticks / 2) <= 4, "{half}");
        assert_eq!((half * slope) >> PART_BITS, 499_999);
        assert_eq!(split(1_234_567), (1234, (567 << PART_BITS) / 1000));
    }

    #[test]
    fn a_counter_that_stands_still_or_races_makes_no_absurd_line() {
        assert_eq!(slope_of(1_000_000, 0), 1 << (PART_BITS - 20));
        assert_eq!(slope_of(u128::from(u64::MAX), 1), 1 << PART_BITS);
    }
}
