//! Clocks. This is the only module that reads them.
//!
//! A limiter has one time, by which buckets refill and logs expire. It follows the machine's monotonic clock, so a
//! stepped wall clock refills nothing. A separate offset ([`WallOffset`]) follows the wall clock, for windows that are
//! aligned to it and for times that clients read.

#[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
mod machine;
#[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
mod system;
#[cfg(feature = "file")]
pub(crate) mod wall;

#[cfg(test)]
pub(crate) mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
use self::system::SystemClock;
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
    #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
    System(SystemClock),
    #[cfg(test)]
    Faked(SystemClock<fake::FakeMachine>),
    Custom(Arc<dyn Clock>),
}

impl TimeSource {
    /// Returns the system's clock, or `None` on a platform that has none.
    pub(crate) fn system() -> Option<Self> {
        #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
        return Some(Self::System(SystemClock::new(machine::Machine::new())));
        #[cfg(all(target_family = "wasm", target_os = "unknown"))]
        None
    }

    /// Returns the limiter's time.
    #[inline(always)]
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
            Self::System(clock) => clock.now(),
            #[cfg(test)]
            Self::Faked(clock) => clock.now(),
            Self::Custom(clock) => clock.now(),
        }
    }

    /// Returns how far the wall clock is ahead of [`now`](Self::now). A custom clock serves as both.
    pub(crate) fn wall_offset(&self) -> WallOffset {
        match self {
            #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
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
            #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
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
            #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
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
