//! Two limits on one request: a global one and one per user.
//!
//! Tollgate takes from both or from none. Two governors are checked in turn, and units of the first stay spent if the
//! second denies. In one contender both are keyed; in the other the global one is `RateLimiter::direct`, which needs no
//! map and is what governor's documentation recommends.

use std::hint::black_box;
use std::num::NonZeroU32;

use governor::clock::DefaultClock;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use tollgate::{Hit, Limit, LimitId, Limiter, Rate, TokenBucket};

use super::governor::Governor;
use super::tollgate::MAX_MEMORY_BYTES;
use super::{Contender, Entrant, GOVERNOR, HASH_ONLY, Setup, TOLLGATE, floors};

pub(crate) const TWO_KEYED: &str = "two keyed governors";

/// Beside `governor`, which is a direct one and a keyed one.
pub(crate) const ENTRANTS: [Entrant; 4] = [
    Entrant::new(HASH_ONLY, |setup| Box::new(floors::HashOnly::new(setup))),
    Entrant::new(TOLLGATE, tollgate),
    Entrant::new(GOVERNOR, |setup| Box::new(DirectAndKeyed::new(setup))),
    Entrant::new(TWO_KEYED, |setup| Box::new(TwoKeyed::new(setup))),
];

const GLOBAL_KEY: &str = "all";

struct Tollgate {
    limiter: Limiter,
    global: LimitId,
    per_user: LimitId,
}

fn tollgate(setup: Setup) -> Box<dyn Contender> {
    let bucket = TokenBucket::new(u64::from(setup.path.burst()), Rate::new(1, setup.path.period()));
    let limiter = Limit::new("global", bucket).and_then(|global| {
        let builder = Limiter::builder().limit(global).limit(Limit::new("per-user", bucket)?);
        builder.max_memory(MAX_MEMORY_BYTES).build()
    });
    match limiter.map(|limiter| (limiter.id("global"), limiter.id("per-user"), limiter)) {
        Ok((Some(global), Some(per_user), limiter)) => Box::new(Tollgate { limiter, global, per_user }),
        Ok(_) => unreachable!("both limits have just been named"),
        Err(problem) => unreachable!("the limits above are valid: {problem}"),
    }
}

impl Contender for Tollgate {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        let hits = [Hit::new(self.global, GLOBAL_KEY), Hit::new(self.per_user, key.as_str())];
        black_box(self.limiter.decide_now(&hits)).is_allowed()
    }

    /// Only of the user: a million users would use the global limit up.
    fn spend(&self, key: &String, cost: u32) -> bool {
        let hit = Hit::new(self.per_user, key.as_str()).cost(u64::from(cost));
        self.limiter.decide_now(&[hit]).is_allowed()
    }
}

struct DirectAndKeyed {
    global: RateLimiter<NotKeyed, InMemoryState, DefaultClock>,
    per_user: Governor,
}

impl DirectAndKeyed {
    fn new(setup: Setup) -> Self {
        let burst = NonZeroU32::new(setup.path.burst()).unwrap_or(NonZeroU32::MIN);
        match Quota::with_period(setup.path.period()) {
            Some(quota) => {
                Self { global: RateLimiter::direct(quota.allow_burst(burst)), per_user: Governor::new(setup) }
            }
            None => unreachable!("no path has a period of zero"),
        }
    }
}

impl Contender for DirectAndKeyed {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        black_box(self.global.check()).is_ok() && self.per_user.decide(key)
    }

    fn spend(&self, key: &String, cost: u32) -> bool {
        self.per_user.spend(key, cost)
    }
}

struct TwoKeyed {
    global: Governor,
    global_key: String,
    per_user: Governor,
}

impl TwoKeyed {
    fn new(setup: Setup) -> Self {
        Self { global: Governor::new(setup), global_key: GLOBAL_KEY.to_string(), per_user: Governor::new(setup) }
    }
}

impl Contender for TwoKeyed {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        self.global.decide(black_box(&self.global_key)) && self.per_user.decide(key)
    }

    fn spend(&self, key: &String, cost: u32) -> bool {
        self.per_user.spend(key, cost)
    }
}
