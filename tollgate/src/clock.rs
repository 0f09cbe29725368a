//! Clocks. This is the only module that reads them.
//!
//! A limiter has one time, by which buckets refill and logs expire. It follows the machine's monotonic clock, so a
//! stepped wall clock refills nothing. A separate offset ([`WallOffset`]) follows the wall clock, for windows that are
//! aligned to it and for times that clients read.
//!
//! # The system's clock
//!
//! A decision on a key in the cache takes some tens of nanoseconds, and reading the operating system's clock takes as
//! long again. So time is extrapolated from the processor's counter, along a line that lasts half a second. At its end
//! the counter is compared with the operating system's monotonic clock, and the next line begins where that clock is.
//!
//! The counter is trusted only while it is steady. A line is drawn when the counter's frequency since the last
//! comparison is within 1 % of what it was before. Otherwise (the machine was suspended, paused, restored or migrated,
//! or the counter is broken) the operating system's clock is read every time, until the counter is steady again. So:
//!
//! - Time is at most half a second ahead of the monotonic clock, when the counter has jumped or has become faster. It
//!   then stands still until the monotonic clock has caught up.
//! - It goes back by at most half a second, when such a counter restarts before the end of the line.
//! - A counter that has become slower is noticed when it has counted half a second: one of half the speed after a
//!   second, when time is half a second late.
//!
//! The wall clock is read at each comparison. [`WallOffset`] follows it when the two are more than a second apart.

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::units::{Timestamp, WallOffset};

/// A clock for limiters, instead of the system's clock: see [`LimiterBuilder::clock`](crate::LimiterBuilder::clock).
///
/// Use it on platforms without a system clock, such as `wasm32-unknown-unknown`, or in simulations. Closures that
/// return a [`Timestamp`] are clocks. For tests, use [`ManualClock`].
///
/// ```
/// use std::time::Duration;
/// use tollgate::{FixedWindow, Limit, Limiter, Timestamp, MINUTE};
///
/// let clock = || Timestamp::EPOCH.saturating_add(Duration::from_secs(1_700_000_000));
/// let limit = Limit::new("login", FixedWindow::new(1, MINUTE))?;
/// let limiter = Limiter::builder().limit(limit).clock(clock).build()?;
/// assert_eq!(limiter.check("ann").at(), Timestamp::from_secs(1_700_000_000));
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
pub trait Clock: Send + Sync {
    /// Returns the current time.
    ///
    /// It is called for every decision. A step forward counts as passed time, so it refills buckets. A step back
    /// neither adds quota nor locks keys out.
    fn now(&self) -> Timestamp;
}

impl<F: Fn() -> Timestamp + Send + Sync> Clock for F {
    fn now(&self) -> Timestamp {
        self()
    }
}

/// The clock of a limiter.
#[derive(Clone)]
pub(crate) enum TimeSource {
    System(SystemClock),
    #[cfg(test)]
    Faked(SystemClock<fake::FakeMachine>),
    Custom(Arc<dyn Clock>),
}

impl TimeSource {
    /// Returns the system's clock, or `None` on a platform that has none.
    pub(crate) fn system() -> Option<Self> {
        Machine::new().map(SystemClock::new).map(Self::System)
    }

    /// Returns the limiter's time.
    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::System(clock) => clock.now(),
            #[cfg(test)]
            Self::Faked(clock) => clock.now(),
            Self::Custom(clock) => clock.now(),
        }
    }

    /// Returns how far the wall clock is ahead of [`now`](Self::now). A custom clock serves as both.
    pub(crate) fn wall_offset(&self) -> WallOffset {
        match self {
            Self::System(clock) => clock.wall_offset().clone(),
            #[cfg(test)]
            Self::Faked(clock) => clock.wall_offset().clone(),
            Self::Custom(_) => WallOffset::default(),
        }
    }

    /// Returns the offset of the wall clock in microseconds.
    #[inline(always)]
    pub(crate) fn wall_offset_micros(&self) -> i64 {
        match self {
            Self::System(clock) => clock.wall_offset().get(),
            #[cfg(test)]
            Self::Faked(clock) => clock.wall_offset().get(),
            Self::Custom(_) => 0,
        }
    }

    /// Returns the wall clock's time.
    #[cfg(feature = "redis")]
    pub(crate) fn wall(&self) -> Timestamp {
        self.now().offset_by(self.wall_offset_micros())
    }

    /// Returns the limiter's time plus every forward step of the wall clock.
    ///
    /// Leases and cached denials expire by another machine's clock. This machine may have been paused in the meantime,
    /// and then its wall clock steps forward when it is corrected.
    #[cfg(feature = "redis")]
    pub(crate) fn now_with_gaps(&self) -> Timestamp {
        match self {
            Self::System(clock) => clock.now_with_gaps(),
            #[cfg(test)]
            Self::Faked(clock) => clock.now_with_gaps(),
            Self::Custom(clock) => clock.now(),
        }
    }
}

impl std::fmt::Debug for TimeSource {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::System(_) => "System",
            #[cfg(test)]
            Self::Faked(_) => "Faked",
            Self::Custom(_) => "Custom",
        })
    }
}

/// A clock that moves only when you move it, for tests and simulations.
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
    /// Creates a clock that shows `now`. Clones share the time.
    #[must_use]
    pub fn at(now: Timestamp) -> Self {
        Self(Arc::new(now.as_micros().into()))
    }

    /// Sets the time, forward or back.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }

    /// Moves the time forward by `span`.
    pub fn advance(&self, span: Duration) {
        self.set(self.now().saturating_add(span));
    }

    /// Returns the current time of this clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Self::now(self)
    }
}

/// Time that goes forward with the operating system's monotonic clock. It begins at the time of the wall clock.
#[derive(Clone)]
pub(crate) struct SystemClock<C = Machine> {
    clocks: C,
    shared: Arc<Shared>,
    wall_offset: WallOffset,
}

struct Shared {
    line: Line,
    /// This clock's time, in nanoseconds since the Unix epoch, when the monotonic clock was at 0. It may be negative,
    /// so it is added wrapping.
    base_nanos: u64,
    /// When to compare next, by the monotonic clock, while the counter is not trusted.
    compare_at_nanos: AtomicU64,
    /// All forward steps of the wall clock together, in microseconds.
    gaps_micros: AtomicU64,
    last: Mutex<Comparison>,
}

/// The line along which ticks become microseconds, in one cache line.
#[repr(align(64))]
struct Line {
    /// Odd while the others are written.
    version: AtomicU64,
    /// The counter where the line begins.
    ticks: AtomicU64,
    /// The time there: whole microseconds since the Unix epoch, and 2^-40ths of one.
    micros: AtomicU64,
    parts: AtomicU64,
    /// 2^-40ths of a microsecond per tick.
    slope: AtomicU64,
    /// Ticks after which the line ends; 0 while the counter is not trusted.
    until: AtomicU64,
}

/// A consistent copy of a line.
#[derive(Clone, Copy)]
struct LineReading {
    version: u64,
    ticks: u64,
    micros: u64,
    parts: u64,
    slope: u64,
    until: u64,
}

/// The result of the last comparison.
struct Comparison {
    ticks: u64,
    monotonic_nanos: u64,
    /// The counter's slope before it; `None` if that was not measured.
    slope: Option<u64>,
    /// Slope of the last trusted line.
    trusted: u64,
}

/// Clocks read at the same time, but for `spread_nanos`.
struct Sample {
    ticks: u64,
    monotonic_nanos: u64,
    wall_nanos: u64,
    spread_nanos: u64,
}

/// The bits of a microsecond's fraction. A line ends after half a second, so a span along it fits 64 bits.
const PART_BITS: u32 = 40;
/// How long a line lasts.
const COMPARE_AFTER: Duration = Duration::from_millis(500);
/// The wall clock is followed when it has moved further than this against the monotonic clock.
const WALL_STEP_MICROS: u64 = 1_000_000;
/// A thread can be preempted while it reads several clocks. It then reads them again, a few times.
const GOOD_SPREAD_NANOS: u64 = 10_000;
const SAMPLES: usize = 4;
/// A sample that took longer is not used for frequencies or offsets.
const MAX_SPREAD_NANOS: u64 = 1_000_000;

impl<C: MachineClocks> SystemClock<C> {
    pub(crate) fn new(clocks: C) -> Self {
        let start = Sample::of(&clocks);
        // Good enough for the first line, which is checked at its end.
        let slope = slope_of(clocks.nanos_in_2_pow_32_ticks().into(), 1 << 32).unwrap_or(MAX_SLOPE);
        let (micros, parts) = split(start.wall_nanos);
        let line = Line {
            version: AtomicU64::new(0),
            ticks: AtomicU64::new(start.ticks),
            micros: AtomicU64::new(micros),
            parts: AtomicU64::new(parts),
            slope: AtomicU64::new(slope),
            until: AtomicU64::new(ticks_in(COMPARE_AFTER, slope)),
        };
        let last =
            Comparison { ticks: start.ticks, monotonic_nanos: start.monotonic_nanos, slope: None, trusted: slope };
        let shared = Shared {
            line,
            base_nanos: start.wall_nanos.wrapping_sub(start.monotonic_nanos),
            compare_at_nanos: AtomicU64::new(0),
            gaps_micros: AtomicU64::new(0),
            last: Mutex::new(last),
        };
        Self { clocks, shared: Arc::new(shared), wall_offset: WallOffset::adjustable() }
    }

    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        let line = &self.shared.line;
        let mut spins = 0;
        loop {
            let reading = LineReading {
                version: line.version.load(Ordering::Acquire),
                ticks: line.ticks.load(Ordering::Relaxed),
                micros: line.micros.load(Ordering::Relaxed),
                parts: line.parts.load(Ordering::Relaxed),
                slope: line.slope.load(Ordering::Relaxed),
                until: line.until.load(Ordering::Relaxed),
            };
            let ticks = self.clocks.ticks();
            fence(Ordering::Acquire);
            if reading.version.is_multiple_of(2) && line.version.load(Ordering::Relaxed) == reading.version {
                // A counter that has gone back is far past the end.
                let passed = ticks.wrapping_sub(reading.ticks);
                if passed < reading.until {
                    return Timestamp::from_micros(reading.micros_after(passed));
                }
                return self.now_past_line(reading, passed);
            }
            spins += 1;
            if spins % 64 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// Returns how far the wall clock is ahead of this clock.
    #[inline(always)]
    pub(crate) fn wall_offset(&self) -> &WallOffset {
        &self.wall_offset
    }

    /// Returns this clock's time with all forward steps of the wall clock added.
    #[cfg(any(feature = "redis", test))]
    pub(crate) fn now_with_gaps(&self) -> Timestamp {
        let now = self.now();
        now.saturating_add(Duration::from_micros(self.shared.gaps_micros.load(Ordering::Relaxed)))
    }

    /// Reads the operating system's clock, and compares the counter with it where that is due.
    #[cold]
    #[inline(never)]
    fn now_past_line(&self, reading: LineReading, passed: u64) -> Timestamp {
        let behind = passed.wrapping_neg();
        if reading.until > 0 && behind <= reading.until / 1000 {
            // Another core has begun the line, and its counter is a little ahead of this one's.
            return Timestamp::from_micros(reading.micros);
        }
        let went_back = behind < passed;
        let floor_micros = if went_back { reading.micros } else { reading.micros_after(reading.until) };
        let monotonic_nanos = self.clocks.monotonic_nanos();
        let is_due = reading.until > 0 || monotonic_nanos >= self.shared.compare_at_nanos.load(Ordering::Relaxed);
        if is_due
            && let Ok(mut last) = self.shared.last.try_lock()
            && self.shared.line.version.load(Ordering::Relaxed) == reading.version
        {
            return self.compare(&mut last, reading.version, floor_micros);
        }
        Timestamp::from_micros((self.time_at(monotonic_nanos) / 1000).max(floor_micros))
    }

    /// Compares the clocks, and draws the next line if the counter is steady.
    fn compare(&self, last: &mut Comparison, version: u64, floor_micros: u64) -> Timestamp {
        let sample = Sample::of(&self.clocks);
        let is_good = sample.spread_nanos <= MAX_SPREAD_NANOS;
        let slope = if is_good { last.slope_until(&sample) } else { None };
        let is_steady =
            |slope: &u64| is_near(*slope, last.trusted) || last.slope.is_some_and(|last| is_near(*slope, last));
        let trusted = slope.filter(is_steady);
        let system = self.time_at(sample.monotonic_nanos);
        // The last microsecond was rounded down, so the next line may begin where that microsecond does.
        let from = system.max(floor_micros.saturating_mul(1000));
        let line_nanos = whole_nanos(COMPARE_AFTER);
        let next = match trusted {
            // Bent, so that it ends where the monotonic clock will be.
            Some(slope) => {
                let wanted = system.saturating_add(line_nanos).saturating_sub(from).max(line_nanos / 2);
                let bent = (u128::from(slope) * u128::from(wanted) / u128::from(line_nanos)) as u64;
                (bent, ticks_in(COMPARE_AFTER, slope))
            }
            None => (0, 0),
        };
        self.shared.compare_at_nanos.store(sample.monotonic_nanos.saturating_add(line_nanos), Ordering::Relaxed);
        self.draw(version, sample.ticks, from, next);
        if is_good {
            *last = Comparison {
                ticks: sample.ticks,
                monotonic_nanos: sample.monotonic_nanos,
                slope,
                trusted: trusted.unwrap_or(last.trusted),
            };
            self.follow_wall_clock(sample.wall_nanos, system);
        }
        Timestamp::from_micros(from / 1000)
    }

    /// Returns this clock's time, in nanoseconds, at a time of the monotonic clock.
    fn time_at(&self, monotonic_nanos: u64) -> u64 {
        self.shared.base_nanos.wrapping_add(monotonic_nanos)
    }

    /// Writes a line. The caller holds the lock of the last comparison, so there is one writer.
    fn draw(&self, version: u64, ticks: u64, from_nanos: u64, (slope, until): (u64, u64)) {
        let line = &self.shared.line;
        let (micros, parts) = split(from_nanos);
        line.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        line.ticks.store(ticks, Ordering::Relaxed);
        line.micros.store(micros, Ordering::Relaxed);
        line.parts.store(parts, Ordering::Relaxed);
        line.slope.store(slope, Ordering::Relaxed);
        line.until.store(until, Ordering::Relaxed);
        line.version.store(version.wrapping_add(2), Ordering::Release);
    }

    fn follow_wall_clock(&self, wall_nanos: u64, system_nanos: u64) {
        let ahead = (i128::from(wall_nanos) - i128::from(system_nanos)) / 1000;
        let ahead = i64::try_from(ahead).unwrap_or(if ahead < 0 { i64::MIN } else { i64::MAX });
        let before = self.wall_offset.get();
        let step = ahead.abs_diff(before);
        if step > WALL_STEP_MICROS {
            if ahead > before {
                self.shared.gaps_micros.fetch_add(step, Ordering::Relaxed);
            }
            self.wall_offset.set(ahead);
        }
    }
}

impl LineReading {
    #[inline(always)]
    fn micros_after(&self, ticks: u64) -> u64 {
        self.micros + (ticks.wrapping_mul(self.slope).wrapping_add(self.parts) >> PART_BITS)
    }
}

impl Comparison {
    /// Measures the counter's slope since this comparison.
    fn slope_until(&self, sample: &Sample) -> Option<u64> {
        let ticks = sample.ticks.checked_sub(self.ticks)?;
        let nanos = sample.monotonic_nanos.checked_sub(self.monotonic_nanos)?;
        slope_of(nanos.into(), ticks.into())
    }
}

impl Sample {
    /// Reads all clocks, with nothing in between if possible.
    fn of(clocks: &impl MachineClocks) -> Self {
        let mut best = Self::once(clocks);
        for _ in 1..SAMPLES {
            if best.spread_nanos <= GOOD_SPREAD_NANOS {
                break;
            }
            let again = Self::once(clocks);
            best = if again.spread_nanos < best.spread_nanos { again } else { best };
        }
        best
    }

    fn once(clocks: &impl MachineClocks) -> Self {
        let monotonic_nanos = clocks.monotonic_nanos();
        let (ticks, wall_nanos) = (clocks.ticks(), clocks.wall_nanos());
        let spread_nanos = clocks.monotonic_nanos().saturating_sub(monotonic_nanos);
        Self { ticks, monotonic_nanos, wall_nanos, spread_nanos }
    }
}

/// Returns whether two slopes differ by at most 1 %.
fn is_near(slope: u64, other: u64) -> bool {
    slope.abs_diff(other) <= other / 100
}

/// Splits nanoseconds into whole microseconds and 2^-40ths of one.
fn split(nanos: u64) -> (u64, u64) {
    (nanos / 1000, ((nanos % 1000) << PART_BITS) / 1000)
}

/// Counters count at least once a microsecond, and at most a million times.
const MAX_SLOPE: u64 = 1 << PART_BITS;
const MIN_SLOPE: u64 = 1 << (PART_BITS - 20);

/// Returns the slope of a counter, or `None` if no real counter has this frequency.
fn slope_of(nanos: u128, ticks: u128) -> Option<u64> {
    let slope = (nanos << PART_BITS).checked_div(ticks.saturating_mul(1000))?;
    u64::try_from(slope).ok().filter(|slope| (MIN_SLOPE..=MAX_SLOPE).contains(slope))
}

fn ticks_in(span: Duration, slope: u64) -> u64 {
    let ticks = (span.as_micros() << PART_BITS) / u128::from(slope.max(1));
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

/// The clocks that [`SystemClock`] reads. Tests have their own implementation.
pub(crate) trait MachineClocks {
    /// Reads the processor's counter. It is cheap, and it may stop, jump or restart when a machine is suspended,
    /// paused, restored or migrated.
    fn ticks(&self) -> u64;

    /// Estimates how many nanoseconds 2^32 ticks take.
    fn nanos_in_2_pow_32_ticks(&self) -> u64;

    /// Reads the monotonic clock, in nanoseconds. It never goes back and cannot be set.
    fn monotonic_nanos(&self) -> u64;

    /// Reads the wall clock, in nanoseconds since the Unix epoch. It can be set, forward and back.
    fn wall_nanos(&self) -> u64;
}

/// The clocks of this machine.
#[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
#[derive(Clone)]
pub(crate) struct Machine {
    counter: quanta::Clock,
    /// Start of the process, for operating systems without a clock that counts the time asleep.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    start: std::time::Instant,
}

/// `wasm32-unknown-unknown` has no clocks.
#[cfg(all(target_family = "wasm", target_os = "unknown"))]
#[derive(Clone)]
pub(crate) enum Machine {}

impl Machine {
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    fn new() -> Option<Self> {
        None
    }

    #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
    #[cfg_attr(
        not(any(target_os = "linux", target_os = "android")),
        expect(clippy::disallowed_methods, reason = "this is the module that may read clocks")
    )]
    fn new() -> Option<Self> {
        Some(Self {
            counter: quanta::Clock::new(),
            #[cfg(not(any(target_os = "linux", target_os = "android")))]
            start: std::time::Instant::now(),
        })
    }
}

#[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
impl MachineClocks for Machine {
    #[inline(always)]
    fn ticks(&self) -> u64 {
        self.counter.raw()
    }

    fn nanos_in_2_pow_32_ticks(&self) -> u64 {
        self.counter.delta_as_nanos(0, 1 << 32)
    }

    /// `Instant` stands still while the machine sleeps; `CLOCK_BOOTTIME` does not.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn monotonic_nanos(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Duration::try_from(now).map_or(0, whole_nanos)
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn monotonic_nanos(&self) -> u64 {
        whole_nanos(self.start.elapsed())
    }

    #[expect(clippy::disallowed_methods, reason = "this is the module that may read clocks")]
    fn wall_nanos(&self) -> u64 {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, whole_nanos)
    }
}

#[cfg(all(target_family = "wasm", target_os = "unknown"))]
impl MachineClocks for Machine {
    fn ticks(&self) -> u64 {
        match *self {}
    }

    fn nanos_in_2_pow_32_ticks(&self) -> u64 {
        match *self {}
    }

    fn monotonic_nanos(&self) -> u64 {
        match *self {}
    }

    fn wall_nanos(&self) -> u64 {
        match *self {}
    }
}

fn whole_nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the time of the operating system's wall clock, for times from other machines, such as the expiry of a token.
///
/// The limiter's time does not fit: it follows the monotonic clock, so after a sleep or a correction of the wall clock
/// it would accept expired tokens.
#[expect(clippy::disallowed_methods, reason = "this is part of the module that may read clocks")]
pub fn wall_now() -> Timestamp {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(Timestamp::EPOCH, |since| Timestamp::EPOCH.saturating_add(since))
}
