//! A machine whose clocks tests move.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{MachineClocks, SystemClock, TimeSource, whole_nanos};

/// Ticks per microsecond, until a test changes it.
pub(crate) const FREQUENCY: u64 = 2_100;

#[derive(Clone)]
pub(crate) struct FakeMachine(Arc<Clocks>);

struct Clocks {
    ticks: AtomicU64,
    monotonic_nanos: AtomicU64,
    wall_nanos: AtomicU64,
}

impl FakeMachine {
    /// Returns a machine that has been up for an hour.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Clocks {
            ticks: AtomicU64::new(3_600_000_000 * FREQUENCY),
            monotonic_nanos: AtomicU64::new(3_600_000_000_000),
            wall_nanos: AtomicU64::new(1_700_000_000_000_000_000),
        }))
    }

    pub(crate) fn clock(&self) -> SystemClock<Self> {
        SystemClock::new(self.clone())
    }

    pub(crate) fn time_source(&self) -> TimeSource {
        TimeSource::Faked(self.clock())
    }

    /// Lets time pass.
    pub(crate) fn run(&self, span: Duration) {
        self.run_counting(span, FREQUENCY);
    }

    /// Lets time pass, with another frequency of the counter.
    pub(crate) fn run_counting(&self, span: Duration, ticks_per_micro: u64) {
        self.add_ticks(span.as_micros() as u64 * ticks_per_micro);
        self.skip_monotonic(span);
        self.0.wall_nanos.fetch_add(whole_nanos(span), Ordering::SeqCst);
    }

    pub(crate) fn skip_monotonic(&self, span: Duration) {
        self.0.monotonic_nanos.fetch_add(whole_nanos(span), Ordering::SeqCst);
    }

    pub(crate) fn add_ticks(&self, ticks: u64) {
        self.0.ticks.fetch_add(ticks, Ordering::SeqCst);
    }

    pub(crate) fn set_ticks(&self, ticks: u64) {
        self.0.ticks.store(ticks, Ordering::SeqCst);
    }

    /// Steps the wall clock, forward or back.
    pub(crate) fn step_wall(&self, seconds: f64) {
        let nanos = (seconds * 1e9) as i64;
        let stepped = self.wall_nanos().saturating_add_signed(nanos);
        self.0.wall_nanos.store(stepped, Ordering::SeqCst);
    }
}

impl MachineClocks for FakeMachine {
    fn ticks(&self) -> u64 {
        self.0.ticks.load(Ordering::SeqCst)
    }

    fn nanos_in_2_pow_32_ticks(&self) -> u64 {
        (1_u64 << 32) * 1000 / FREQUENCY
    }

    fn monotonic_nanos(&self) -> u64 {
        self.0.monotonic_nanos.load(Ordering::SeqCst)
    }

    fn wall_nanos(&self) -> u64 {
        self.0.wall_nanos.load(Ordering::SeqCst)
    }
}
