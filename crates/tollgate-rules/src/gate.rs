//! The gate: rules and a store in one handle, which decides requests.
//!
//! A server describes a request as [`Facts`] and checks it; the [`Outcome`] holds the decision and the response to
//! send. Rules can be replaced at any time. Each request is decided entirely by the old rules or entirely by the new
//! ones.
//!
//! Not here: matching and keys, which are in [`rules`](crate), and counting, which is the limiter's job.

pub(crate) mod check;
mod deferred;
mod explain;
mod in_flight;
mod joint_check;
mod key_bans;
mod outcome;
#[cfg(feature = "file")]
pub(crate) mod report;
#[cfg(feature = "file")]
mod reservation;
pub(crate) mod settle;
mod store;

use std::io::{self, Read, Write};
use std::ops::Deref;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, Cache};

pub use self::explain::{Explanation, RuleExplained, RuleState};
use self::in_flight::InFlight;
pub use self::in_flight::InFlightPermit;
pub use self::joint_check::{Checks, JointCheck};
pub use self::key_bans::KeyBan;
use self::key_bans::KeyBans;
pub use self::outcome::Outcome;
#[cfg(feature = "file")]
use self::report::KeySource;
#[cfg(feature = "file")]
use self::reservation::Reservations;
#[cfg(feature = "file")]
pub use self::reservation::{MAX_RESERVATION, ReservationError, Reserved};
use self::store::Store;
pub use self::store::StoreUnavailable;
use tollgate::{InvalidLimit, Limiter, LimiterBuilder, RestoreError, Restored};

#[cfg(feature = "file")]
use crate::limited_keys::LimitedKeys;
use crate::{Facts, KeyError, NamedRule, RuleSet};

/// Decides requests by rules, with counts in memory or on Redis.
///
/// Clones are cheap and share everything.
///
/// ```
/// use tollgate_rules::{Facts, KeyPart, Rule, RuleSet};
/// use tollgate::{FixedWindow, Limit, MINUTE};
/// use tollgate_rules::Gate;
///
/// let per_ip = Rule::new(Limit::new("per-ip", FixedWindow::new(2, MINUTE))?).key(KeyPart::ip());
/// let gate = Gate::in_memory(RuleSet::builder().rule(per_ip).build()?)?;
/// let facts = Facts::new("GET", "/").peer([192, 0, 2, 7].into());
/// assert!(gate.decide_now(&facts).is_some_and(|outcome| outcome.is_allowed()));
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone)]
pub struct Gate(Arc<Inner>);

struct Inner {
    state: ArcSwap<State>,
    /// Serializes changes: two at the same time would each create tables for the new limits.
    changing: Mutex<()>,
}

/// Rules, and the store that holds the counts of their limits.
struct State {
    rules: RuleSet,
    store: Store,
    in_flight: InFlight,
    /// The bans that operators have set. `None` without any.
    bans: Option<Box<KeyBans>>,
    #[cfg(feature = "file")]
    reservations: Arc<Reservations>,
    /// Counts limited keys, if somebody can ask for them.
    #[cfg(feature = "file")]
    limited: Option<Arc<LimitedKeys>>,
}

impl State {
    fn first(rules: RuleSet, store: Store) -> Self {
        let in_flight = InFlight::after(&rules, None);
        Self {
            rules,
            store,
            in_flight,
            bans: None,
            #[cfg(feature = "file")]
            reservations: Arc::default(),
            #[cfg(feature = "file")]
            limited: None,
        }
    }

    /// Returns the state that replaces `before`. Requests in flight stay counted.
    fn after(before: &Self, rules: RuleSet, store: Store) -> Self {
        let in_flight = InFlight::after(&rules, Some((&before.rules, &before.in_flight)));
        rules.adopt_expression_errors(&before.rules);
        rules.adopt_last_plans(&before.rules);
        let bans = before.bans.as_ref().and_then(|bans| KeyBans::new(bans.all().to_vec(), &rules, &in_flight));
        Self {
            rules,
            store,
            in_flight,
            bans,
            #[cfg(feature = "file")]
            reservations: before.reservations.clone(),
            #[cfg(feature = "file")]
            limited: before.limited.clone(),
        }
    }
}

/// The result of [`Gate::check`]: an outcome, or a future of one.
#[must_use = "the request is limited only if its outcome is used"]
#[expect(clippy::large_enum_variant, reason = "in memory every check is ready, and a box would be an allocation")]
pub enum Check {
    /// The outcome. The store is in this process's memory, or no store was needed.
    Ready(Outcome),
    /// A future of the outcome. The store is on Redis.
    Pending(Pin<Box<dyn Future<Output = Outcome> + Send>>),
}

impl Gate {
    /// Creates a gate that keeps its counts in this process's memory, in at most 512 MiB.
    ///
    /// # Errors
    ///
    /// If 512 MiB is too little for the number of limits.
    pub fn in_memory(rules: RuleSet) -> Result<Self, InvalidLimit> {
        Self::with_limiter(rules, Limiter::builder())
    }

    /// Creates a gate on an in-memory limiter with the given settings, such as its memory bound or its clock.
    ///
    /// # Errors
    ///
    /// If the memory bound is too small for the number of limits.
    pub fn with_limiter(rules: RuleSet, settings: LimiterBuilder) -> Result<Self, InvalidLimit> {
        let store = Store::memory(&rules, settings)?;
        Ok(Self::with_store(rules, store))
    }

    fn with_store(rules: RuleSet, store: Store) -> Self {
        Self::of(State::first(rules, store))
    }

    fn of(state: State) -> Self {
        Self(Arc::new(Inner { state: ArcSwap::from_pointee(state), changing: Mutex::new(()) }))
    }

    /// Replaces the state by one that is made of it, while no other change is made.
    fn change(&self, next: impl FnOnce(&State) -> State) {
        let _alone = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let state = next(&self.0.state.load());
        self.0.state.store(Arc::new(state));
    }

    /// Returns the current rules.
    #[must_use]
    pub fn rules(&self) -> RuleSet {
        self.0.state.load().rules.clone()
    }

    /// Replaces the rules atomically. A limit that keeps its name, algorithm and window keeps its counts, and its new
    /// numbers apply from the next request on. Keys start with full quota where their stored state has no room for the
    /// new numbers, for example when the capacity of a sliding window log in memory is raised (see
    /// [`Limiter::with_limits`](tollgate::Limiter::with_limits)).
    ///
    /// # Errors
    ///
    /// If the memory bound is too small for the number of limits. The current rules then stay in force.
    pub fn replace(&self, rules: RuleSet) -> Result<(), InvalidLimit> {
        let _alone = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.0.state.load();
        let store = before.store.with_rules(&rules)?;
        self.0.state.store(Arc::new(State::after(&before, rules, store)));
        Ok(())
    }

    /// Replaces in-memory tables that are mostly empty with smaller ones, and frees the tables replaced by earlier
    /// calls; see [`Limiter::compacted`](tollgate::Limiter::compacted). Returns `true` if a table was replaced. Its memory
    /// is freed by a later call, once the requests that still use it have ended. Does nothing on Redis.
    ///
    /// The library starts no threads, so call this periodically, for example once a minute.
    pub fn compact(&self) -> bool {
        let _alone = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.0.state.load();
        let Some(limiter) = before.store.in_memory().and_then(Limiter::compacted) else { return false };
        self.0.state.store(Arc::new(State::after(&before, before.rules.clone(), Store::of(limiter))));
        true
    }

    /// Returns a gate that shares the counts of this one but keeps the current rules when they are replaced. Use it to
    /// decide several requests by the same rules.
    #[must_use]
    pub fn pinned(&self) -> Self {
        let state = ArcSwap::new(self.0.state.load_full());
        Self(Arc::new(Inner { state, changing: Mutex::new(()) }))
    }

    /// Switches to the rules and the store of another gate.
    pub fn adopt(&self, other: &Self) {
        let _alone = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let other = other.0.state.load();
        let state = State::after(&self.0.state.load(), other.rules.clone(), other.store.clone());
        // A reservation belongs to the store that took its units.
        #[cfg(feature = "file")]
        let state = State { reservations: other.reservations.clone(), ..state };
        self.0.state.store(Arc::new(state));
    }

    /// Builds a gate from a [snapshot](Self::snapshot) of another one; see [`LimiterBuilder::restore`]. The limits of
    /// `rules` replace those of `settings`.
    ///
    /// # Errors
    ///
    /// If the memory bound is too small for the limits, or the snapshot cannot be read or used.
    pub fn restore(
        rules: RuleSet,
        settings: LimiterBuilder,
        snapshot: impl Read,
    ) -> Result<(Self, Restored), RestoreError> {
        let (limiter, restored, attachment) = settings.limits(rules.limit_set()).restore_attached(snapshot)?;
        #[cfg(feature = "file")]
        let reservations = Reservations::taken_over(&attachment.bytes, attachment.from_wall, &limiter)
            .map_err(|_| RestoreError::corrupt())?;
        #[cfg(not(feature = "file"))]
        drop(attachment);
        let state = State {
            #[cfg(feature = "file")]
            reservations: Arc::new(reservations),
            ..State::first(rules, Store::of(limiter))
        };
        Ok((Self::of(state), restored))
    }

    /// Writes the state of all keys and returns their number; see [`Limiter::snapshot`](tollgate::Limiter::snapshot).
    /// Returns `None` and writes nothing if the keys are on Redis, which persists them itself.
    ///
    /// Open [reservations](Self::reserve_by_name) are not included: they could be settled after this call. Their units stay
    /// taken. See [`last_snapshot`](Self::last_snapshot) and [`offer_snapshot`](Self::offer_snapshot).
    ///
    /// # Errors
    ///
    /// If writing to `out` fails.
    pub fn snapshot(&self, out: impl Write) -> io::Result<Option<u64>> {
        let state = self.0.state.load_full();
        state.store.in_memory().map(|limiter| limiter.snapshot(out)).transpose()
    }

    /// Checks a request. The result is ready at once if the store is in this process's memory. `facts` is only used
    /// during the call.
    pub fn check(&self, facts: &Facts<'_>) -> Check {
        Check::of(self.0.state.load_full(), facts)
    }

    /// Checks a request and waits for the outcome.
    pub fn decide(&self, facts: &Facts<'_>) -> impl Future<Output = Outcome> + Send + use<> {
        self.check(facts).outcome()
    }

    /// Checks a request without waiting. Returns `None` if the store is on Redis.
    #[must_use]
    pub fn decide_now(&self, facts: &Facts<'_>) -> Option<Outcome> {
        match self.check(facts) {
            Check::Ready(outcome) => Some(outcome),
            Check::Pending(_) => None,
        }
    }

    /// Counts a request that was refused before any rule was checked, such as a malformed one. It is a strike towards
    /// the [bans](crate::Rule::ban) of limits that match every request and whose key comes from the connection
    /// (address or client certificate), so a flood of malformed requests leads to a ban like a flood of denied ones.
    pub fn strike(&self, facts: &Facts<'_>) -> Check {
        let mut outcome = Outcome::unchecked(self);
        match outcome.strike(facts) {
            None => Check::Ready(outcome),
            Some(remote) => Check::Pending(outcome.complete(remote)),
        }
    }

    /// Checks a key of the rule named `rule`, without matching a request. Overrides, exemptions, blocks and bans for
    /// the key apply, and the numbers of the plan that a [`NamedRule`] names, or else of the key's last request. Limits
    /// on requests in flight do not, because the end of the request is unknown.
    ///
    /// The key has one value for each part of the rule's key, in any spelling that a request could send: `2001:db8::7`
    /// for an address counts as its network.
    ///
    /// # Errors
    ///
    /// If there is no such rule or plan, the key has another number of parts, or no request can have one of the values,
    /// such as `not-an-ip` for an address. Nothing is taken then.
    pub fn check_by_name<'a>(
        &self,
        rule: impl Into<NamedRule<'a>>,
        key: &[&[u8]],
        cost: u64,
    ) -> Result<Check, KeyError> {
        Check::by_name(self.0.state.load_full(), rule.into(), key, cost)
    }

    /// Returns a handle for one thread that checks many requests.
    #[must_use]
    #[doc(hidden)]
    pub fn cached(&self) -> CachedGate {
        CachedGate(Cache::new(GateRef(Arc::clone(&self.0))))
    }
}

impl Check {
    /// Checks a request by the rules of `state`. The outcome is built in place because it is large.
    #[inline(always)]
    fn of(state: Arc<State>, facts: &Facts<'_>) -> Self {
        let mut check = Self::Ready(Outcome::unlimited(state));
        let remote = match &mut check {
            Self::Ready(outcome) => outcome.check(facts),
            Self::Pending(_) => None,
        };
        let Some(remote) = remote else {
            #[cfg(feature = "file")]
            if let Self::Ready(outcome) = &check {
                outcome.count_limited(|| KeySource::Check(JointCheck::Request(facts)));
            }
            return check;
        };
        match check {
            Self::Ready(outcome) => Self::Pending(outcome.complete(remote)),
            pending @ Self::Pending(_) => pending,
        }
    }

    /// Checks a key of the rule named `rule`.
    fn by_name(state: Arc<State>, rule: NamedRule<'_>, key: &[&[u8]], cost: u64) -> Result<Self, KeyError> {
        let key = state.rules.named_key(rule, key)?;
        let mut outcome = Outcome::unlimited(state);
        Ok(match outcome.check_named(&key, cost) {
            None => {
                #[cfg(feature = "file")]
                outcome.count_limited(|| KeySource::Named(&key));
                Self::Ready(outcome)
            }
            Some(remote) => Self::Pending(outcome.complete(remote)),
        })
    }

    /// Waits for the outcome.
    pub async fn outcome(self) -> Outcome {
        match self {
            Self::Ready(outcome) => outcome,
            Self::Pending(outcome) => outcome.await,
        }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Gate").field("rules", &self.0.state.load().rules).finish_non_exhaustive()
    }
}

/// Checks requests from one thread, slightly faster than [`Gate`]: it caches a pointer to the current rules and only
/// looks at whether they were replaced.
///
/// It keeps the cached rules alive until the next check. Call [`renew`](Self::renew) to drop replaced rules earlier.
///
/// ```
/// use tollgate_rules::{Facts, KeyPart, Rule, RuleSet};
/// use tollgate::{FixedWindow, Limit, MINUTE};
/// use tollgate_rules::{Check, Gate};
///
/// let per_ip = Rule::new(Limit::new("per-ip", FixedWindow::new(2, MINUTE))?).key(KeyPart::ip());
/// let gate = Gate::in_memory(RuleSet::builder().rule(per_ip).build()?)?;
/// let mut cached = gate.cached();
/// let facts = Facts::new("GET", "/").peer([192, 0, 2, 7].into());
/// assert!(matches!(cached.check(&facts), Check::Ready(outcome) if outcome.is_allowed()));
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
pub struct CachedGate(Cache<GateRef, Arc<State>>);

/// The gate whose state is cached.
struct GateRef(Arc<Inner>);

impl Deref for GateRef {
    type Target = ArcSwap<State>;

    fn deref(&self) -> &ArcSwap<State> {
        &self.0.state
    }
}

impl CachedGate {
    /// Checks a request like [`Gate::check`].
    pub fn check(&mut self, facts: &Facts<'_>) -> Check {
        Check::of(Arc::clone(self.0.load()), facts)
    }

    /// Drops the cached rules if they were replaced.
    pub fn renew(&mut self) {
        self.0.load();
    }
}

impl std::fmt::Debug for CachedGate {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("CachedGate").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tollgate::{FixedWindow, Limit, MINUTE};

    use super::*;
    use crate::{Rule, RuleSet};

    fn rules(name: &str) -> RuleSet {
        let rule = Rule::new(Limit::new(name, FixedWindow::new(5, MINUTE)).unwrap());
        RuleSet::builder().rule(rule).build().unwrap()
    }

    #[test]
    fn replaced_rules_apply_from_the_next_check() {
        let gate = Gate::in_memory(rules("before")).unwrap();
        let mut cached = gate.cached();
        let mut limit = || match cached.check(&Facts::new("GET", "/")) {
            Check::Ready(outcome) => outcome.limit().map(str::to_owned),
            Check::Pending(_) => None,
        };
        assert_eq!(limit().as_deref(), Some("before"));
        gate.replace(rules("after")).unwrap();
        assert_eq!(limit().as_deref(), Some("after"));
    }

    #[test]
    fn renew_drops_replaced_rules() {
        let gate = Gate::in_memory(rules("before")).unwrap();
        let mut cached = gate.cached();
        let before = Arc::downgrade(&gate.0.state.load());
        gate.replace(rules("after")).unwrap();
        assert!(before.upgrade().is_some(), "the cache still holds the old rules");
        cached.renew();
        assert!(before.upgrade().is_none());
    }
}
