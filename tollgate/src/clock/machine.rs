//! The clocks of the machine: the processor's counter, the monotonic clock and the wall clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The clocks that [`SystemClock`](super::system::SystemClock) reads. Tests have their own implementation.
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
#[derive(Clone)]
pub(crate) struct Machine {
    counter: quanta::Clock,
    /// Start of the process, for operating systems without a clock that counts the time asleep.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    start: std::time::Instant,
}

impl Machine {
    #[cfg_attr(
        not(any(target_os = "linux", target_os = "android")),
        expect(clippy::disallowed_methods, reason = "this is the module that may read clocks")
    )]
    pub(super) fn new() -> Self {
        Self {
            counter: quanta::Clock::new(),
            #[cfg(not(any(target_os = "linux", target_os = "android")))]
            start: std::time::Instant::now(),
        }
    }
}

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
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, whole_nanos)
    }
}

pub(super) fn whole_nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
