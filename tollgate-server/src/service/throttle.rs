//! Token buckets whose numbers are arguments of each command, as in `CL.THROTTLE`.
//!
//! All commands share one limit. Other numbers are a variant of it, so units that a key has spent count for all
//! numbers, as in redis-cell. The state is in the gate's store: in the same memory, or on the same Redis.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ahash::RandomState;
use arc_swap::ArcSwap;
use futures_util::future::BoxFuture;
use tollgate::redis::RedisLimiter;
use tollgate::{Decision, Gate, Hit, InvalidLimit, Limit, LimitId, LimitSet, Limiter, Rate, TokenBucket};

/// The name of the limit. The names of its keys on Redis contain it.
pub(crate) const NAME: &str = "CL.THROTTLE";

/// The most different numbers at a time. Each takes a few kilobytes, and adding one copies the list.
const MAX_NUMBERS: usize = 1_000;

/// The numbers of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Numbers {
    pub(crate) capacity: u64,
    pub(crate) count: u64,
    pub(crate) period: Duration,
}

/// A decision, or a future of one.
pub(crate) enum Throttled {
    Ready(Decision),
    Pending(BoxFuture<'static, Decision>),
}

/// The reason why there is no bucket with these numbers.
#[derive(Debug)]
pub(crate) enum CannotThrottle {
    Invalid(InvalidLimit),
    TooMany,
}

impl std::fmt::Display for CannotThrottle {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Invalid(error) => error.fmt(out),
            Self::TooMany => write!(
                out,
                "more than {MAX_NUMBERS} different limits: use limits of the rule file with TOLLGATE.CHECK, or fewer \
                 different numbers"
            ),
        }
    }
}

/// The buckets of all commands.
pub(crate) struct Throttles {
    state: ArcSwap<State>,
    changing: Mutex<()>,
}

struct State {
    store: Store,
    /// The limits in the order of their ids: the base limit, then its variants.
    limits: Vec<(Numbers, Limit)>,
    ids: HashMap<Numbers, LimitId, RandomState>,
}

#[derive(Clone)]
enum Store {
    Memory(Limiter),
    Redis(RedisLimiter),
}

impl Store {
    fn of(gate: &Gate) -> Option<Self> {
        gate.redis().map(Self::Redis).or_else(|| gate.memory().map(Self::Memory))
    }

    fn with_limits(&self, limits: LimitSet) -> Result<(Self, Vec<LimitId>), InvalidLimit> {
        fn ids(base: Option<LimitId>, variants: impl Iterator<Item = LimitId>) -> Vec<LimitId> {
            base.into_iter().chain(variants).collect()
        }
        Ok(match self {
            Self::Memory(limiter) => {
                let limiter = limiter.with_limits(limits)?;
                let ids = ids(limiter.id(NAME), limiter.variants());
                (Self::Memory(limiter), ids)
            }
            Self::Redis(limiter) => {
                let limiter = limiter.with_limits(limits)?;
                let ids = ids(limiter.id(NAME), limiter.variants());
                (Self::Redis(limiter), ids)
            }
        })
    }
}

impl Throttles {
    pub(crate) fn new(gate: &Gate) -> Self {
        Self { state: ArcSwap::from_pointee(State::empty(gate)), changing: Mutex::new(()) }
    }

    /// Switches to the gate's current store. If it is the same store, spent units stay spent.
    pub(crate) fn follow(&self, gate: &Gate) {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.store(Arc::new(State::empty(gate)));
    }

    /// Takes `cost` units from the key's bucket with these numbers, or none.
    pub(crate) fn check(&self, numbers: Numbers, key: &[u8], cost: u64) -> Result<Throttled, CannotThrottle> {
        let state = self.state.load();
        match state.ids.get(&numbers) {
            Some(id) => Ok(state.check(*id, key, cost)),
            None => {
                drop(state);
                self.add(numbers)?;
                let state = self.state.load();
                // A concurrent reload may have cleared the list.
                match state.ids.get(&numbers) {
                    Some(id) => Ok(state.check(*id, key, cost)),
                    None => Err(CannotThrottle::TooMany),
                }
            }
        }
    }

    fn add(&self, numbers: Numbers) -> Result<(), CannotThrottle> {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state.load();
        if state.ids.contains_key(&numbers) {
            return Ok(());
        }
        if state.limits.len() >= MAX_NUMBERS {
            return Err(CannotThrottle::TooMany);
        }
        let limit = numbers.limit().map_err(CannotThrottle::Invalid)?;
        let limits: Vec<(Numbers, Limit)> = state.limits.iter().cloned().chain([(numbers, limit)]).collect();
        let mut set = LimitSet::new();
        for (nth, (_, limit)) in limits.iter().enumerate() {
            set = if nth == 0 { set.limit(limit.clone()) } else { set.variant(nth.to_string(), limit.clone()) };
        }
        let (store, ids) = state.store.with_limits(set).map_err(CannotThrottle::Invalid)?;
        let ids = limits.iter().map(|(numbers, _)| *numbers).zip(ids).collect();
        self.state.store(Arc::new(State { store, limits, ids }));
        Ok(())
    }
}

impl Numbers {
    fn limit(&self) -> Result<Limit, InvalidLimit> {
        Limit::new(NAME, TokenBucket::new(self.capacity, Rate::new(self.count, self.period)))
    }
}

impl State {
    fn empty(gate: &Gate) -> Self {
        let store = Store::of(gate).expect("a gate has a store in memory or on Redis");
        Self { store, limits: Vec::new(), ids: HashMap::default() }
    }

    fn check(&self, id: LimitId, key: &[u8], cost: u64) -> Throttled {
        match &self.store {
            Store::Memory(limiter) => Throttled::Ready(limiter.decide_now(&[Hit::new(id, key).cost(cost)])),
            Store::Redis(limiter) => {
                let (limiter, key) = (limiter.clone(), key.to_vec());
                Throttled::Pending(Box::pin(async move { limiter.decide(&[Hit::new(id, &key[..]).cost(cost)]).await }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate::rules::RuleSet;
    use tollgate::{Limiter, ManualClock, SECOND, Timestamp};

    use super::*;

    /// The table from redis-cell's own tests: a limit of 5, refilled at one per second.
    #[test]
    fn the_table_of_redis_cell_holds() {
        let clock = ManualClock::at(Timestamp::from_micros(1_700_000_000_000_000));
        let gate =
            Gate::with_limiter(RuleSet::builder().build().expect("built"), Limiter::builder().clock(clock.clone()))
                .expect("built");
        let throttles = Throttles::new(&gate);
        let numbers = Numbers { capacity: 5, count: 1, period: SECOND };
        // Milliseconds since the start, and the quantity; then whether it is limited, what remains, and the
        // milliseconds to the reset and to the retry.
        let rows: [(u64, u64, bool, u64, u64, Option<u64>); 15] = [
            (0, 6, true, 5, 0, None),
            (0, 1, false, 4, 1_000, None),
            (0, 1, false, 3, 2_000, None),
            (0, 1, false, 2, 3_000, None),
            (0, 1, false, 1, 4_000, None),
            (0, 1, false, 0, 5_000, None),
            (0, 1, true, 0, 5_000, Some(1_000)),
            (3_000, 1, false, 2, 3_000, None),
            (3_100, 1, false, 1, 3_900, None),
            (4_000, 1, false, 1, 4_000, None),
            (8_000, 1, false, 4, 1_000, None),
            (9_500, 1, false, 4, 1_000, None),
            (9_500, 0, false, 4, 1_000, None),
            (9_500, 2, false, 2, 3_000, None),
            (9_500, 5, true, 2, 3_000, Some(3_000)),
        ];
        let mut now = 0;
        for (row, (at, quantity, limited, remaining, reset, retry)) in rows.into_iter().enumerate() {
            clock.advance(Duration::from_millis(at - now));
            now = at;
            let decision = match throttles.check(numbers, b"foo", quantity).expect("valid") {
                Throttled::Ready(decision) => decision,
                Throttled::Pending(_) => panic!("the store is in memory"),
            };
            let retry_after = decision.retry_after().filter(|_| !decision.is_allowed());
            assert_eq!(decision.is_allowed(), !limited, "row {row}");
            assert_eq!(decision.remaining(), remaining, "row {row}");
            assert_eq!(decision.reset_after(), Duration::from_millis(reset), "row {row}");
            assert_eq!(retry_after, retry.map(Duration::from_millis), "row {row}");
        }
    }

    #[test]
    fn a_key_has_one_count_under_all_numbers() {
        let gate = Gate::in_memory(RuleSet::builder().build().expect("built")).expect("built");
        let throttles = Throttles::new(&gate);
        let numbers = |capacity| Numbers { capacity, count: 1, period: Duration::from_secs(3600) };
        let remaining = |capacity, cost| match throttles.check(numbers(capacity), b"ann", cost).expect("valid") {
            Throttled::Ready(decision) => decision.remaining(),
            Throttled::Pending(_) => panic!("the store is in memory"),
        };
        assert_eq!(remaining(10, 6), 4);
        assert_eq!(remaining(100, 1), 93);
        assert_eq!(remaining(10, 0), 3);
        throttles.follow(&gate);
        assert_eq!(remaining(10, 0), 3, "a reload keeps what was spent");
    }

    #[test]
    fn the_number_of_different_limits_is_bounded() {
        let gate = Gate::in_memory(RuleSet::builder().build().expect("built")).expect("built");
        let throttles = Throttles::new(&gate);
        let check = |capacity| throttles.check(Numbers { capacity, count: 1, period: SECOND }, b"ann", 1);
        for capacity in 1..=MAX_NUMBERS as u64 {
            assert!(check(capacity).is_ok(), "{capacity}");
        }
        assert!(matches!(check(MAX_NUMBERS as u64 + 1), Err(CannotThrottle::TooMany)));
        assert!(check(1).is_ok(), "the others still work");
    }
}
