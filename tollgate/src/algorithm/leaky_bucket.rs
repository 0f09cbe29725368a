//! Leaky bucket: bursts in, a steady rate out.

use std::time::Duration;

#[cfg(feature = "redis")]
use super::share;
use super::{Algorithm, Compiled, checked, meter};
use crate::error::InvalidLimit;
use crate::rate::Rate;
use crate::units::{MAX_SPAN, whole_micros};

/// A bucket that fills with requests and leaks at a steady rate.
///
/// It leaks continuously. Requests that do not fit are denied. With [`queue`](Self::queue), allowed requests get a
/// delay, so that they proceed one by one. The default is 10 units that leak at one per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeakyBucket {
    pub(super) capacity: u64,
    leak: Rate,
    overflow: Overflow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overflow {
    Reject,
    Queue { max_wait: Duration },
}

impl Default for LeakyBucket {
    fn default() -> Self {
        Self::new(10, Rate::per_second(1))
    }
}

impl LeakyBucket {
    /// Returns the strictest of each number of both.
    pub(super) fn strictest(self, other: Self) -> Self {
        let (capacity, leak) = (self.capacity.min(other.capacity), self.leak.slower(other.leak));
        let overflow = match (self.overflow, other.overflow) {
            (Overflow::Queue { max_wait: one }, Overflow::Queue { max_wait: other }) => {
                Overflow::Queue { max_wait: one.min(other) }
            }
            _ => Overflow::Reject,
        };
        Self { capacity, leak, overflow }
    }

    /// Creates a bucket of `capacity` units that denies requests which would overflow it.
    #[must_use]
    pub const fn new(capacity: u64, leak: Rate) -> Self {
        Self { capacity, leak, overflow: Overflow::Reject }
    }

    /// Queues requests instead: an allowed request has a [`delay`](crate::Decision::delay) after which it may proceed,
    /// first in first out. A request that finds the queue full, or would wait longer than `max_wait`, is denied.
    #[must_use]
    pub const fn queue(self, max_wait: Duration) -> Self {
        Self { overflow: Overflow::Queue { max_wait }, ..self }
    }

    /// Returns the rate of the leak.
    #[doc(hidden)]
    pub const fn rate(&self) -> Rate {
        self.leak
    }

    /// Returns whether requests wait in a queue.
    #[doc(hidden)]
    pub fn queues(&self) -> bool {
        matches!(self.overflow, Overflow::Queue { .. })
    }

    /// Returns the share for one of `nodes` processes.
    #[cfg(feature = "redis")]
    pub(super) fn share(&self, nodes: u32) -> Self {
        let (capacity, leak) = (share::quota(self.capacity, nodes), share::rate(self.leak, nodes));
        Self { capacity, leak, ..*self }
    }

    /// Returns the time in which a full bucket drains.
    pub(super) fn window(&self) -> Duration {
        checked::full_refill_time(self.capacity, self.leak)
    }

    pub(super) fn refill(&self) -> super::refill::Refill {
        let micros = crate::units::whole_micros(self.leak.period());
        super::refill::Refill::Smooth { units: self.leak.count(), micros }
    }

    pub(super) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        let capacity = checked::quota("capacity", self.capacity)?;
        let (count, period) = checked::rate("leak", self.leak)?;
        checked::full_refill("leak", capacity, count, period)?;
        let max_wait = match self.overflow {
            Overflow::Reject => None,
            Overflow::Queue { max_wait } if max_wait > MAX_SPAN => {
                let days = max_wait.as_secs() / 86_400;
                return Err(InvalidLimit::new(
                    "max_wait",
                    format!("max_wait of {days} days is too long"),
                    "use 35 years or less",
                ));
            }
            Overflow::Queue { max_wait } => Some(whole_micros(max_wait)),
        };
        Ok(meter::compile(capacity, count, period, max_wait))
    }
}

impl From<LeakyBucket> for Algorithm {
    fn from(spec: LeakyBucket) -> Self {
        Self::LeakyBucket(spec)
    }
}
