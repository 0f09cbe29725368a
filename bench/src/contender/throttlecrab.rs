//! throttlecrab's library with its adaptive store, sized for the keys to come: unsized, it scans all keys on
//! every request while the map is over three quarters full. It wants `&mut self`, so threads share it through
//! a mutex; and the wall clock is the caller's to read.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

use throttlecrab::{AdaptiveStore, RateLimiter};

use super::{Contender, Setup};
use crate::clock;

/// With a burst of 1 it never denies.
const LEAST_BURST: u32 = 2;

pub(super) struct Throttlecrab {
    limiter: Mutex<RateLimiter<AdaptiveStore>>,
    burst: i64,
    period_s: i64,
}

impl Throttlecrab {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            limiter: Mutex::new(RateLimiter::new(AdaptiveStore::builder().capacity(setup.keys).build())),
            burst: i64::from(setup.path.burst().max(LEAST_BURST)),
            period_s: i64::try_from(setup.path.period().as_secs()).unwrap_or(i64::MAX),
        }
    }
}

impl Contender for Throttlecrab {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        self.spend(key, 1)
    }

    #[inline]
    fn spend(&self, key: &String, cost: u32) -> bool {
        let now = clock::wall();
        let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = limiter.rate_limit(key, self.burst, 1, self.period_s, i64::from(cost), now);
        matches!(black_box(answer), Ok((true, _)))
    }
}
