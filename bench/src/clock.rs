//! The only place of this crate that reads a clock.

use std::time::{Duration, Instant, SystemTime};

#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The wall clock, for peers that take the time as an argument.
#[expect(clippy::disallowed_methods, reason = "throttlecrab takes the time as an argument")]
pub(crate) fn wall() -> SystemTime {
    SystemTime::now()
}

/// The cheapest clock there is here: the processor's time stamp counter, scaled.
#[derive(Clone)]
pub(crate) struct Ticker(quanta::Clock);

impl Ticker {
    pub(crate) fn new() -> Self {
        Self(quanta::Clock::new())
    }

    #[inline]
    pub(crate) fn ticks(&self) -> u64 {
        self.0.raw()
    }

    #[inline]
    pub(crate) fn nanos(&self, from_ticks: u64, to_ticks: u64) -> u64 {
        self.0.delta_as_nanos(from_ticks, to_ticks)
    }
}

/// The start and end of a piece of work.
pub(crate) struct Lap {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

impl Lap {
    pub(crate) fn time(work: impl FnOnce()) -> Self {
        let began = now();
        work();
        Self { began, ended: now() }
    }

    /// From the first beginning to the last end.
    pub(crate) fn span(laps: &[Self]) -> Duration {
        let began = laps.iter().map(|lap| lap.began).min();
        let ended = laps.iter().map(|lap| lap.ended).max();
        match (began, ended) {
            (Some(began), Some(ended)) => ended - began,
            _ => Duration::ZERO,
        }
    }
}

/// The processor time of this thread. Other processes affect it only through the caches.
pub(crate) fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Waits for other processes, which do not signal when they are ready.
#[expect(clippy::disallowed_methods, reason = "a benchmark has nothing else to do while a process starts")]
pub(crate) fn pause(length: Duration) {
    std::thread::sleep(length);
}
