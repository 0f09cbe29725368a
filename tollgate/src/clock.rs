//! The only place where a clock is read.
//!
//! A decision on a key that is in the cache takes some tens of nanoseconds, and reading the operating system's
//! clock takes as long again. So the time stamp counter of the processor is read instead, and compared with the
//! operating system's clock every now and then; on a processor without a steady counter the latter is read every
//! time. Windows are aligned to the wall clock, so the two are brought together once, at the start: from there
//! time only goes forward, whatever happens to the wall clock.

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
    /// Odd while the anchor is written.
    version: AtomicU64,
    anchor: Anchor,
}

/// The line along which ticks are turned into nanoseconds for the next while.
struct Anchor {
    ticks: AtomicU64,
    /// Since the Unix epoch.
    nanos: AtomicU64,
    /// Nanoseconds per tick, times 2^32.
    slope: AtomicU64,
    /// Ticks after which the line is drawn anew.
    until: AtomicU64,
}

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
        let slope = ticks.delta_as_nanos(0, trial).max(1);
        let shared = Shared {
            start,
            start_ticks,
            start_nanos,
            version: AtomicU64::new(0),
            anchor: Anchor {
                ticks: AtomicU64::new(start_ticks),
                nanos: AtomicU64::new(start_nanos),
                slope: AtomicU64::new(slope),
                until: AtomicU64::new(ticks_in(COMPARE_AFTER, slope)),
            },
        };
        Self { ticks, shared: Arc::new(shared) }
    }

    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        let Shared { version, anchor, .. } = &*self.shared;
        let mut spins = 0;
        loop {
            let before = version.load(Ordering::Acquire);
            let from = anchor.ticks.load(Ordering::Relaxed);
            let nanos = anchor.nanos.load(Ordering::Relaxed);
            let slope = anchor.slope.load(Ordering::Relaxed);
            let until = anchor.until.load(Ordering::Relaxed);
            let ticks = self.ticks.raw();
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && version.load(Ordering::Relaxed) == before {
                let passed = ticks.saturating_sub(from);
                if passed > until {
                    return self.draw_anew(before, ticks, along(nanos, slope, until), slope);
                }
                return Timestamp::from_micros(along(nanos, slope, passed) / 1000);
            }
            spins += 1;
            if spins % 64 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// At the end of a line, draws the next: from here and now to where the operating system's clock will be in
    /// a while, so that time neither jumps back nor turns back. Who comes late jumps ahead to the operating
    /// system's time.
    #[cold]
    fn draw_anew(&self, version: u64, ticks: u64, end_of_line: u64, slope: u64) -> Timestamp {
        let shared = &*self.shared;
        let elapsed = whole_nanos(shared.start.elapsed());
        let system = shared.start_nanos.saturating_add(elapsed);
        let from = system.max(end_of_line);
        let odd = version.wrapping_add(1);
        if shared.version.compare_exchange(version, odd, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            fence(Ordering::Release);
            let measured = slope_of(elapsed, ticks.saturating_sub(shared.start_ticks)).unwrap_or(slope);
            let while_nanos = whole_nanos(COMPARE_AFTER);
            let wanted = system.saturating_add(while_nanos).saturating_sub(from).max(while_nanos / 2);
            let slope = (u128::from(measured) * u128::from(wanted) / u128::from(while_nanos)) as u64;
            shared.anchor.ticks.store(ticks, Ordering::Relaxed);
            shared.anchor.nanos.store(from, Ordering::Relaxed);
            shared.anchor.slope.store(slope.max(1), Ordering::Relaxed);
            shared.anchor.until.store(ticks_in(COMPARE_AFTER, measured), Ordering::Relaxed);
            shared.version.store(version.wrapping_add(2), Ordering::Release);
        }
        Timestamp::from_micros(from / 1000)
    }
}

fn along(nanos: u64, slope: u64, ticks: u64) -> u64 {
    let passed = (u128::from(ticks) * u128::from(slope)) >> 32;
    nanos.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
}

fn slope_of(nanos: u64, ticks: u64) -> Option<u64> {
    let slope = (u128::from(nanos) << 32).checked_div(u128::from(ticks))?;
    u64::try_from(slope).ok().filter(|slope| *slope > 0)
}

fn ticks_in(span: Duration, slope: u64) -> u64 {
    let ticks = (u128::from(whole_nanos(span)) << 32) / u128::from(slope.max(1));
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
        let (started, first) = (Instant::now(), clock.now());
        let mut last = first;
        while started.elapsed() < Duration::from_millis(1200) {
            let now = clock.now();
            assert!(now >= last, "{last:?} then {now:?}");
            last = now;
        }
        let passed = last.as_micros() - first.as_micros();
        let truly = started.elapsed().as_micros() as u64;
        assert!(passed.abs_diff(truly) < truly / 100, "{passed} µs for {truly} µs");
    }

    #[test]
    fn a_line_is_straight_over_years() {
        let slope = slope_of(1_000_000_000, 2_000_000_000).unwrap();
        assert_eq!(along(5, slope, 2_000_000_000 * 86_400 * 365), 5 + 1_000_000_000 * 86_400 * 365);
    }
}
