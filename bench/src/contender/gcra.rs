//! gcra, its `RateLimiter` (DashMap, FxHash, `Instant`), sized for the keys to come as its example does. Its
//! `check` takes the key by value and for `'static`, so an owned string is made for each request; it is `async`
//! and never waits, so it is polled once.

use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use gcra::{RateLimit, RateLimiter};

use super::{Contender, Setup};

pub(super) struct Gcra {
    limiter: RateLimiter<String>,
    limit: RateLimit,
}

impl Gcra {
    pub(super) fn new(setup: Setup) -> Self {
        let burst = setup.path.burst();
        Self { limiter: RateLimiter::new(setup.keys), limit: RateLimit::new(burst, setup.path.period() * burst) }
    }
}

impl Contender for Gcra {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        self.spend(key, 1)
    }

    #[inline]
    fn spend(&self, key: &String, cost: u32) -> bool {
        let check = pin!(self.limiter.check(key.clone(), &self.limit, cost));
        match check.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => black_box(answer).is_ok(),
            Poll::Pending => unreachable!("gcra's check awaits nothing"),
        }
    }
}
