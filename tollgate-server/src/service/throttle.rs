//! Token buckets whose numbers are arguments of each command, as in `CL.THROTTLE`, or fields of a descriptor.
//!
//! All commands share one limit, and all descriptors another. Other numbers are a variant of it, so units that a key has
//! spent count for all numbers, as in redis-cell. The state is in the gate's store: in the same memory, or on the same
//! Redis.
//!
//! The number of variants is bounded. If there are too many, those that were not used lately are removed. The store
//! keeps what keys have spent under them, and converts it to the numbers of the next check. So removing a variant gives
//! no key its quota back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ahash::RandomState;
use arc_swap::ArcSwapOption;
use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tollgate::redis::RedisLimiter;
use tollgate::{Decision, Hit, InvalidLimit, Limit, LimitId, LimitSet, Limiter, Rate, TokenBucket};
use tollgate_rules::Gate;

/// The most different numbers at a time. Each takes a few kilobytes. Adding one copies the list, so filling it takes the work
/// of half a million copies of a limit.
const MAX_NUMBERS: usize = 1_000;

/// The part of the numbers that is removed together, so that those in use have time to be used again.
const REMOVED_PART: usize = 8;

/// The shortest time between two removals. Adding numbers to a full list takes milliseconds, so this bounds the work
/// for clients that send ever different numbers.
const REMOVE_EVERY: Duration = Duration::from_secs(10);

/// The source of the numbers. Keys of different sources are different, whatever clients send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// `CL.THROTTLE` and `THROTTLE`.
    Commands,
    /// The limit in a descriptor of Envoy's rate limit service.
    Descriptors,
}

impl Source {
    /// Returns the name of the limit. The names of its keys on Redis contain it.
    const fn limit_name(self) -> &'static str {
        match self {
            Self::Commands => "CL.THROTTLE",
            Self::Descriptors => "RateLimitDescriptor.limit",
        }
    }
}

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
    TooMany(Source),
}

impl std::fmt::Display for CannotThrottle {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let instead = match self {
            Self::Invalid(error) => return error.fmt(out),
            Self::TooMany(Source::Commands) => "check limits of the rule file with TOLLGATE.CHECK",
            Self::TooMany(Source::Descriptors) => "leave `limit` out, so that limits of the rule file apply",
        };
        write!(
            out,
            "more than {MAX_NUMBERS} different limits within a few seconds: use fewer different numbers, or {instead}"
        )
    }
}

/// The buckets of all sources.
pub(crate) struct Throttles {
    pub(crate) commands: Buckets,
    pub(crate) descriptors: Buckets,
}

impl Throttles {
    pub(crate) fn new(gate: &Gate) -> Self {
        let [commands, descriptors] = [Source::Commands, Source::Descriptors].map(|source| Buckets::new(gate, source));
        Self { commands, descriptors }
    }

    /// Switches to the gate's current store. If it is the same store, spent units stay spent.
    pub(crate) fn follow_store(&self) {
        self.commands.follow_store();
        self.descriptors.follow_store();
    }

    /// Frees the memory that a burst of keys has left empty, like [`Gate::compact`]. Returns `true` if a table was
    /// replaced.
    pub(crate) fn compact(&self) -> bool {
        [&self.commands, &self.descriptors].map(Buckets::compact).contains(&true)
    }
}

/// The buckets of one source.
pub(crate) struct Buckets {
    source: Source,
    max_numbers: usize,
    gate: Gate,
    /// `None` until the first check. A store that the buckets held from the start would keep the tables of the gate's
    /// limits, so that none of them could be freed after a burst.
    state: ArcSwapOption<State>,
    /// When numbers were last removed. Locked while the state is replaced.
    removed_at: Mutex<Option<Instant>>,
}

struct State {
    store: Store,
    /// The limits in the order of their ids: the base limit, then its variants. The oldest first.
    limits: Vec<(Numbers, Limit)>,
    known: HashMap<Numbers, Known, RandomState>,
}

/// The id of a limit, and whether it was used since numbers were last removed.
struct Known {
    id: LimitId,
    was_used: AtomicBool,
}

#[derive(Clone)]
enum Store {
    Memory(Limiter),
    Redis(RedisLimiter),
}

impl Store {
    fn of(gate: &Gate) -> Self {
        let store = gate.redis().map(Self::Redis).or_else(|| gate.memory().map(Self::Memory));
        store.expect("a gate has a store in memory or on Redis")
    }

    /// Returns the store with these limits, and their ids.
    fn with_limits(&self, name: &str, limits: LimitSet) -> Result<(Self, Vec<LimitId>), InvalidLimit> {
        fn ids(base: Option<LimitId>, variants: impl Iterator<Item = LimitId>) -> Vec<LimitId> {
            base.into_iter().chain(variants).collect()
        }
        Ok(match self {
            Self::Memory(limiter) => {
                let limiter = limiter.with_limits(limits)?;
                let ids = ids(limiter.id(name), limiter.variants());
                (Self::Memory(limiter), ids)
            }
            Self::Redis(limiter) => {
                // The gate's limiter stays in use.
                let limiter = limiter.with_limits_beside(limits)?;
                let ids = ids(limiter.id(name), limiter.variants());
                (Self::Redis(limiter), ids)
            }
        })
    }
}

impl Buckets {
    fn new(gate: &Gate, source: Source) -> Self {
        let (gate, state) = (gate.clone(), ArcSwapOption::empty());
        Self { source, max_numbers: MAX_NUMBERS, gate, state, removed_at: Mutex::new(None) }
    }

    fn follow_store(&self) {
        let _alone = self.removed_at.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.store(None);
    }

    fn compact(&self) -> bool {
        let _alone = self.removed_at.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state.load();
        let Some(State { store: Store::Memory(limiter), .. }) = state.as_deref() else { return false };
        let Some(smaller) = limiter.compacted() else { return false };
        let next = state.as_deref().map(|state| Arc::new(state.with_store(Store::Memory(smaller))));
        self.state.store(next);
        true
    }

    /// Takes `cost` units from the key's bucket with these numbers, or none.
    pub(crate) fn check(&self, numbers: Numbers, key: &[u8], cost: u64) -> Result<Throttled, CannotThrottle> {
        if let Some(state) = &*self.state.load()
            && let Some(id) = state.used(numbers)
        {
            return Ok(state.check(id, key, cost));
        }
        let state = self.add(numbers)?;
        let id = state.used(numbers).ok_or(CannotThrottle::TooMany(self.source))?;
        Ok(state.check(id, key, cost))
    }

    /// Adds numbers. Returns the state that has them.
    fn add(&self, numbers: Numbers) -> Result<Arc<State>, CannotThrottle> {
        let mut removed_at = self.removed_at.lock().unwrap_or_else(PoisonError::into_inner);
        let state = match self.state.load_full() {
            Some(state) if state.known.contains_key(&numbers) => return Ok(state),
            Some(state) => state,
            None => Arc::new(State::empty(&self.gate)),
        };
        let name = self.source.limit_name();
        let limit = numbers.limit(name).map_err(CannotThrottle::Invalid)?;
        let is_full = state.limits.len() >= self.max_numbers;
        let now = Instant::now();
        if is_full && removed_at.is_some_and(|removed_at| now < removed_at + REMOVE_EVERY) {
            return Err(CannotThrottle::TooMany(self.source));
        }
        let mut limits = if is_full { state.without_unused() } else { state.limits.clone() };
        limits.push((numbers, limit));
        let mut set = LimitSet::new();
        for (nth, (numbers, limit)) in limits.iter().enumerate() {
            set = if nth == 0 { set.limit(limit.clone()) } else { set.variant(numbers.to_string(), limit.clone()) };
        }
        let (store, ids) = state.store.with_limits(name, set).map_err(CannotThrottle::Invalid)?;
        let known = limits.iter().zip(ids).map(|((numbers, _), id)| {
            let was_used = !is_full && state.known.get(numbers).is_some_and(|known| known.was_used.load(Relaxed));
            (*numbers, Known { id, was_used: AtomicBool::new(was_used) })
        });
        let next = Arc::new(State { store, known: known.collect(), limits });
        self.state.store(Some(Arc::clone(&next)));
        if is_full {
            *removed_at = Some(now);
        }
        Ok(next)
    }
}

impl Numbers {
    fn limit(&self, name: &str) -> Result<Limit, InvalidLimit> {
        Limit::new(name, TokenBucket::new(self.capacity, Rate::new(self.count, self.period)))
    }
}

/// Writes the name of the variant with these numbers.
impl std::fmt::Display for Numbers {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}, {} per {:?}", self.capacity, self.count, self.period)
    }
}

impl State {
    fn empty(gate: &Gate) -> Self {
        Self { store: Store::of(gate), limits: Vec::new(), known: HashMap::default() }
    }

    /// Returns this state with a store that has the same limits.
    fn with_store(&self, store: Store) -> Self {
        let known = self.known.iter().map(|(numbers, known)| {
            let was_used = AtomicBool::new(known.was_used.load(Relaxed));
            (*numbers, Known { id: known.id, was_used })
        });
        Self { store, limits: self.limits.clone(), known: known.collect() }
    }

    /// Returns the id of the limit with these numbers, and marks it as used.
    fn used(&self, numbers: Numbers) -> Option<LimitId> {
        let known = self.known.get(&numbers)?;
        // Written once, so that threads do not contend for it.
        if !known.was_used.load(Relaxed) {
            known.was_used.store(true, Relaxed);
        }
        Some(known.id)
    }

    /// Returns the limits without the oldest ones that were not used since the last removal, or without the oldest if
    /// all were used.
    fn without_unused(&self) -> Vec<(Numbers, Limit)> {
        let was_used = |numbers: &Numbers| self.known.get(numbers).is_some_and(|known| known.was_used.load(Relaxed));
        let (used, mut unused): (Vec<_>, Vec<_>) =
            self.limits.iter().cloned().partition(|(numbers, _)| was_used(numbers));
        let most = self.limits.len().div_ceil(REMOVED_PART);
        let removed = most.min(unused.len());
        let mut kept = unused.split_off(removed);
        kept.extend(used.into_iter().skip(if removed == 0 { most } else { 0 }));
        kept
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
    use tollgate::{Limiter, ManualClock, SECOND, Timestamp};
    use tollgate_rules::{Check, Facts, KeyPart, Rule, RuleSet};

    use super::*;

    /// The table from redis-cell's own tests: a limit of 5, refilled at one per second.
    #[test]
    fn the_table_of_redis_cell_holds() {
        let clock = ManualClock::at(Timestamp::from_micros(1_700_000_000_000_000));
        let gate =
            Gate::with_limiter(RuleSet::builder().build().expect("built"), Limiter::builder().clock(clock.clone()))
                .expect("built");
        let throttles = Buckets::new(&gate, Source::Commands);
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
    fn memory_of_a_burst_is_returned() {
        const KEYS: u32 = 100_000;
        let clock = ManualClock::at(Timestamp::from_micros(1_700_000_000_000_000));
        let limit = Limit::new("one", TokenBucket::new(5, Rate::per_second(1))).expect("valid");
        let rules = RuleSet::builder().rule(Rule::new(limit).key(KeyPart::ip())).build().expect("built");
        let gate = Gate::with_limiter(rules, Limiter::builder().clock(clock.clone())).expect("built");
        let throttles = Throttles::new(&gate);
        let numbers = Numbers { capacity: 5, count: 1, period: SECOND };
        let used = || gate.memory().expect("in memory").memory_used();
        let compact = || while gate.compact() | throttles.compact() {};
        let burst = |check: &dyn Fn(u32)| {
            (0..KEYS).for_each(check);
            let at_most = used() / 10;
            clock.advance(Duration::from_secs(60));
            compact();
            assert!(used() < at_most, "{} bytes stay of {}", used(), 10 * at_most);
        };
        burst(&|key| {
            let facts = Facts::new("GET", "/").peer(key.to_be_bytes().into());
            assert!(matches!(gate.check(&facts), Check::Ready(outcome) if outcome.is_allowed()));
        });
        burst(&|key| {
            let throttled = throttles.commands.check(numbers, &key.to_be_bytes(), 1).expect("valid");
            assert!(matches!(throttled, Throttled::Ready(decision) if decision.is_allowed()));
        });
    }

    #[test]
    fn a_key_has_one_count_under_all_numbers() {
        let gate = Gate::in_memory(RuleSet::builder().build().expect("built")).expect("built");
        let throttles = Buckets::new(&gate, Source::Commands);
        let numbers = |capacity| Numbers { capacity, count: 1, period: Duration::from_secs(3600) };
        let remaining = |capacity, cost| match throttles.check(numbers(capacity), b"ann", cost).expect("valid") {
            Throttled::Ready(decision) => decision.remaining(),
            Throttled::Pending(_) => panic!("the store is in memory"),
        };
        assert_eq!(remaining(10, 6), 4);
        assert_eq!(remaining(100, 1), 93);
        assert_eq!(remaining(10, 0), 3);
        throttles.follow_store();
        assert_eq!(remaining(10, 0), 3, "a reload keeps what was spent");
    }

    fn state_of(throttles: &Buckets) -> Arc<State> {
        throttles.state.load_full().expect("a key was checked")
    }

    /// Fewer than [`MAX_NUMBERS`], because adding numbers takes long in a build for tests.
    const ROOM: usize = 32;

    fn buckets(source: Source) -> Buckets {
        let gate = Gate::in_memory(RuleSet::builder().build().expect("built")).expect("built");
        Buckets { max_numbers: ROOM, ..Buckets::new(&gate, source) }
    }

    fn decided(throttles: &Buckets, capacity: u64, key: &[u8], cost: u64) -> Result<Decision, CannotThrottle> {
        let numbers = Numbers { capacity, count: 1, period: Duration::from_secs(3600) };
        match throttles.check(numbers, key, cost)? {
            Throttled::Ready(decision) => Ok(decision),
            Throttled::Pending(_) => panic!("the store is in memory"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_that_were_not_used_lately_make_room_for_others() {
        let throttles = buckets(Source::Commands);
        let check = |capacity| decided(&throttles, capacity, b"ann", 1);
        for capacity in 1..=ROOM as u64 {
            check(capacity).expect("there is room");
        }
        for capacity in 1..=2 * ROOM as u64 {
            let next = ROOM as u64 + capacity;
            if let Err(error) = check(next) {
                assert!(matches!(error, CannotThrottle::TooMany(Source::Commands)), "{error}");
                tokio::time::advance(REMOVE_EVERY).await;
                check(next).expect("others were removed");
            }
            check(ROOM as u64).expect("numbers in use stay");
            assert!(state_of(&throttles).limits.len() <= ROOM);
        }
        let state = state_of(&throttles);
        let capacities = || state.limits.iter().map(|(numbers, _)| numbers.capacity);
        assert_eq!(capacities().filter(|capacity| *capacity <= ROOM as u64).collect::<Vec<_>>(), [ROOM as u64]);
        assert_eq!(capacities().max(), Some(3 * ROOM as u64));
    }

    /// A key that has spent its quota stays denied after its numbers, and all others of that time, were removed.
    #[tokio::test(start_paused = true)]
    async fn removed_numbers_give_no_key_its_quota_back() {
        let throttles = buckets(Source::Commands);
        let numbers = |count| Numbers { capacity: 10, count, period: Duration::from_secs(3600) };
        let check = |count, key: &[u8], cost| match throttles.check(numbers(count), key, cost) {
            Ok(Throttled::Ready(decision)) => Some(decision),
            Ok(Throttled::Pending(_)) => panic!("the store is in memory"),
            Err(_) => None,
        };
        assert!(check(1, b"ann", 10).expect("valid").is_allowed());
        for count in 2..=2 * ROOM as u64 {
            if check(count, b"bob", 1).is_none() {
                tokio::time::advance(REMOVE_EVERY).await;
                check(count, b"bob", 1).expect("others were removed");
            }
        }
        assert!(!state_of(&throttles).known.contains_key(&numbers(1)), "they were removed");
        tokio::time::advance(REMOVE_EVERY).await;
        for count in [1, 2 * ROOM as u64] {
            let decision = check(count, b"ann", 1).expect("valid");
            assert!(!decision.is_allowed() && decision.remaining() == 0, "{count} per hour: {decision:?}");
        }
        assert!(check(1, b"eve", 10).expect("valid").is_allowed());
    }

    #[test]
    fn numbers_that_are_all_in_use_make_room_too() {
        let throttles = buckets(Source::Descriptors);
        for capacity in 1..=ROOM as u64 + 1 {
            decided(&throttles, capacity, b"ann", 0).expect("there is room");
        }
        let state = state_of(&throttles);
        assert_eq!(state.limits.len(), ROOM - ROOM / REMOVED_PART + 1);
        drop(state);
        decided(&throttles, 1, b"ann", 0).expect("they are added again");
    }

    #[test]
    fn commands_and_descriptors_have_different_keys() {
        let gate = Gate::in_memory(RuleSet::builder().build().expect("built")).expect("built");
        let [commands, descriptors] = [Source::Commands, Source::Descriptors].map(|source| Buckets::new(&gate, source));
        assert!(decided(&commands, 1, b"ann", 1).expect("valid").is_allowed());
        assert!(decided(&descriptors, 1, b"ann", 1).expect("valid").is_allowed());
        assert!(!decided(&commands, 1, b"ann", 1).expect("valid").is_allowed());
    }
}
