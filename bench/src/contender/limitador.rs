//! limitador in memory, as its documentation shows: one limit on the variable `user_id`, the values of a request
//! in a map, and `check_rate_limited_and_update` in one call. It counts in fixed windows, here of an hour.

use std::collections::HashMap;
use std::hint::black_box;

use limitador::RateLimiter;
use limitador::limit::{Context, Limit, Namespace};

use super::{Contender, Setup};

const VARIABLE: &str = "user_id";
const WINDOW_S: u64 = 3600;

pub(super) struct Limitador {
    limiter: RateLimiter,
    namespace: Namespace,
}

impl Limitador {
    pub(super) fn new(setup: Setup) -> Self {
        // Twice the keys: at its size its cache begins to turn keys away.
        let limiter = RateLimiter::new(2 * setup.keys as u64);
        let variable = VARIABLE.try_into().unwrap_or_else(|_| unreachable!("a name is an expression"));
        limiter.add_limit(Limit::new("bench", u64::from(setup.path.burst()), WINDOW_S, [], [variable]));
        Self { limiter, namespace: "bench".into() }
    }
}

impl Contender for Limitador {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        self.spend(key, 1)
    }

    fn spend(&self, key: &String, cost: u32) -> bool {
        let values = HashMap::from([(VARIABLE.to_string(), key.clone())]);
        let context = Context::from(values);
        let answer = self.limiter.check_rate_limited_and_update(&self.namespace, &context, u64::from(cost));
        matches!(black_box(answer), Ok(result) if !result.limited)
    }
}
