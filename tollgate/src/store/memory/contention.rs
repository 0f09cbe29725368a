//! Back-off after a thread loses the race for a word.
//!
//! A thread that has just replaced a word has its cache line, and the next replacement costs it a fraction of what it
//! costs any other. So a thread that loses a race stays away for a while, and the winner gets through several decisions
//! before the line is taken from it. The right time depends on how many threads there are. Each thread adapts it:
//! longer after every wait that did not help, slightly shorter after every successful decision.

#[cfg(not(loom))]
use std::cell::Cell;

#[cfg(not(loom))]
use crate::sync::spin_loop;
use crate::sync::yield_now;

/// The shortest wait is two to this power spins: some hundred nanoseconds, in which another thread gets through a few
/// decisions.
#[cfg(not(loom))]
const SHORTEST: u32 = 3;
/// The longest: some ten microseconds.
#[cfg(not(loom))]
const LONGEST: u32 = 8;
/// A wait that did not help doubles the next one; this number of successful decisions halves it.
#[cfg(not(loom))]
const PATIENCE: u32 = 4;
/// Number of unsuccessful waits before the thread yields: the thread it waits for may be preempted.
#[cfg(not(loom))]
const SPINS: u32 = 16;

#[cfg(not(loom))]
thread_local! {
    /// How long this thread waits, beyond the shortest wait, in steps of which [`PATIENCE`] double it. 0: it has not
    /// lost for a while.
    static STEPS: Cell<u32> = const { Cell::new(0) };
}

/// The waits of one decision.
pub(super) struct Contention {
    #[cfg(not(loom))]
    steps: u32,
    #[cfg(not(loom))]
    waits: u32,
}

#[cfg(not(loom))]
impl Contention {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { steps: STEPS.get(), waits: 0 }
    }

    /// Returns whether this thread has lost a race recently.
    #[inline(always)]
    pub(super) fn is_likely(&self) -> bool {
        self.steps > 0
    }

    /// Waits after a lost race.
    #[cold]
    #[inline(never)]
    pub(super) fn wait(&mut self) {
        if self.waits > 0 || self.steps == 0 {
            self.steps = (self.steps + PATIENCE).min((LONGEST - SHORTEST) * PATIENCE);
        }
        self.waits += 1;
        if self.waits > SPINS {
            yield_now();
        } else {
            (0..1_u32 << (SHORTEST + self.steps / PATIENCE)).for_each(|_| spin_loop());
        }
    }

    /// Records a successful decision.
    #[inline(always)]
    pub(super) fn end(self) {
        if self.steps > 0 {
            STEPS.set(self.steps - 1);
        }
    }
}

/// Models have no time, and no memory from one run to the next.
#[cfg(loom)]
impl Contention {
    pub(super) fn new() -> Self {
        Self {}
    }

    pub(super) fn is_likely(&self) -> bool {
        false
    }

    pub(super) fn wait(&mut self) {
        yield_now();
    }

    pub(super) fn end(self) {}
}
