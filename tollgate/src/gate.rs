//! Rules and a store in one handle: the whole of a decision about a request.
//!
//! A surface makes [`Facts`] of a request and asks; the [`Outcome`] says what to answer. Rules can be replaced at
//! any moment: a request is decided wholly by the old ones or wholly by the new.

#[cfg(feature = "tower")]
mod admitted;
pub(crate) mod cached;
mod explain;
mod in_flight;
#[cfg(all(feature = "file", feature = "redis"))]
mod open;
#[cfg(all(feature = "file", not(feature = "redis")))]
#[path = "gate/open_in_memory.rs"]
mod open;
#[cfg(feature = "file")]
mod opening;
mod outcome;
mod pending;
mod phases;
mod settle;
mod snapshot;
#[cfg(feature = "redis")]
mod store;
#[cfg(not(feature = "redis"))]
#[path = "gate/store_in_memory.rs"]
mod store;

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

#[cfg(feature = "tower")]
pub(crate) use self::admitted::{Admitted, ByAddress};
pub use self::explain::{Explanation, RuleExplained, RuleState};
use self::in_flight::InFlight;
pub use self::in_flight::InFlightPermit;
#[cfg(feature = "file")]
pub use self::opening::OpenError;
pub use self::outcome::Outcome;
#[cfg(feature = "tower")]
pub(crate) use self::settle::ReportedCost;
use self::store::Store;
use crate::error::InvalidLimit;
use crate::limiter::{Limiter, LimiterBuilder};
use crate::rules::{Facts, RuleSet};

/// Decides requests by rules.
///
/// Cloning it is cheap, and clones share everything.
///
/// ```
/// use tollgate::rules::{Facts, KeyPart, Rule, RuleSet};
/// use tollgate::{FixedWindow, Gate, Limit, MINUTE};
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
    /// Two changes at once would each make tables of their own for what is new.
    changing: Mutex<()>,
}

/// Rules with the store that has their limits.
struct State {
    rules: RuleSet,
    store: Store,
    in_flight: InFlight,
}

impl State {
    /// Rules that take the permit of others. What is in flight stays so.
    fn after(before: &Self, rules: RuleSet, store: Store) -> Self {
        let in_flight = InFlight::after(&rules, Some((&before.rules, &before.in_flight)));
        rules.adopt_expression_errors(&before.rules);
        Self { rules, store, in_flight }
    }
}

/// An outcome, or the way to one.
#[must_use = "an outcome that nobody looks at limits nothing"]
pub enum Check {
    /// The store is this process's memory, and has answered; or no store had to be asked.
    Ready(Outcome),
    /// The store is somewhere else.
    Pending(Pin<Box<dyn Future<Output = Outcome> + Send>>),
}

impl Gate {
    /// A gate whose keys are in this process's memory, 512 MiB of it at most.
    ///
    /// # Errors
    ///
    /// When that is too little for so many limits.
    pub fn in_memory(rules: RuleSet) -> Result<Self, InvalidLimit> {
        Self::with_limiter(rules, Limiter::builder())
    }

    /// A gate on a limiter with settings of its own: how much memory it may take, or a clock.
    ///
    /// # Errors
    ///
    /// When the memory is too little for so many limits.
    pub fn with_limiter(rules: RuleSet, settings: LimiterBuilder) -> Result<Self, InvalidLimit> {
        let store = Store::memory(&rules, settings)?;
        Ok(Self::with_store(rules, store))
    }

    fn with_store(rules: RuleSet, store: Store) -> Self {
        let in_flight = InFlight::after(&rules, None);
        let state = ArcSwap::from_pointee(State { rules, store, in_flight });
        Self(Arc::new(Inner { state, changing: Mutex::new(()) }))
    }

    /// The rules in force.
    #[must_use]
    pub fn rules(&self) -> RuleSet {
        self.0.state.load().rules.clone()
    }

    /// Puts other rules in force, at once and whole. Limits whose name, algorithm and window stay the same keep
    /// their counts, and other numbers apply to them from the next request on; where keys have no room for the new
    /// numbers, as when a log in memory is raised, they start anew (see
    /// [`Limiter::with_limits`](crate::Limiter::with_limits)).
    ///
    /// # Errors
    ///
    /// When the memory is too little for so many limits. The old rules stay in force then.
    pub fn replace(&self, rules: RuleSet) -> Result<(), InvalidLimit> {
        let _alone = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.0.state.load();
        let store = before.store.with_rules(&rules)?;
        self.0.state.store(Arc::new(State::after(&before, rules, store)));
        Ok(())
    }

    /// Replaces tables in memory that are mostly empty by smaller ones, and frees those that were replaced before: see
    /// [`Limiter::compacted`](crate::Limiter::compacted). Returns whether a table was replaced; its memory is freed by a
    /// later call, once the requests that began before have ended. On Redis there is nothing to do.
    ///
    /// The library starts no thread, so call it now and then, every minute for example.
    pub fn compact(&self) -> bool {
        let _alone = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.0.state.load();
        let Some(limiter) = before.store.in_memory().and_then(Limiter::compacted) else { return false };
        self.0.state.store(Arc::new(State::after(&before, before.rules.clone(), Store::of(limiter))));
        true
    }

    /// This gate as it is now: it shares the counts, but keeps to these rules when others are put in force. So
    /// several questions can be decided by the same rules.
    #[must_use]
    pub fn pinned(&self) -> Self {
        let state = ArcSwap::new(self.0.state.load_full());
        Self(Arc::new(Inner { state, changing: Mutex::new(()) }))
    }

    /// Goes over to the rules and the store of another gate.
    pub fn adopt(&self, other: &Self) {
        let _alone = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let other = other.0.state.load();
        let state = State::after(&self.0.state.load(), other.rules.clone(), other.store.clone());
        self.0.state.store(Arc::new(state));
    }

    /// Decides a request, at once if the store is this process's memory. The facts are not needed for longer than
    /// the call.
    pub fn check(&self, facts: &Facts<'_>) -> Check {
        Check::of(self.0.state.load_full(), facts)
    }

    /// Decides a request.
    pub fn decide(&self, facts: &Facts<'_>) -> impl Future<Output = Outcome> + Send + use<> {
        self.check(facts).outcome()
    }

    /// Decides a request, if the store is this process's memory.
    #[must_use]
    pub fn decide_now(&self, facts: &Facts<'_>) -> Option<Outcome> {
        match self.check(facts) {
            Check::Ready(outcome) => Some(outcome),
            Check::Pending(_) => None,
        }
    }

    /// Counts a request that was refused before any limit could look at it, such as a malformed one: a strike towards
    /// the [bans](crate::rules::Rule::ban) of limits that match every request and count by what its connection shows
    /// (address, certificate). So a flood of such requests is banned like one of denied requests.
    pub fn strike(&self, facts: &Facts<'_>) -> Check {
        let mut outcome = Outcome::unchecked(self);
        match outcome.strike(facts) {
            None => Check::Ready(outcome),
            Some(remote) => Check::Pending(outcome.complete(remote)),
        }
    }

    /// Decides on a key of the rule of that name, whatever the rule matches: its overrides, exemptions, blocks and
    /// bans by key apply. Limits of what is in flight do not: nobody would tell when it ends. `None` if there is no such
    /// rule.
    #[must_use]
    pub fn check_by_name(&self, rule: &str, key: &[&[u8]], cost: u64) -> Option<Check> {
        let mut outcome = Outcome::unchecked(self);
        Some(match outcome.check_by_name(rule, key, cost)? {
            None => Check::Ready(outcome),
            Some(remote) => Check::Pending(outcome.complete(remote)),
        })
    }
}

impl Check {
    /// Asks by these rules. The outcome is made where it stays, for it is large.
    #[inline(always)]
    fn of(state: Arc<State>, facts: &Facts<'_>) -> Self {
        let mut check = Self::Ready(Outcome::unlimited(state));
        let remote = match &mut check {
            Self::Ready(outcome) => outcome.check(facts),
            Self::Pending(_) => None,
        };
        let Some(remote) = remote else { return check };
        match check {
            Self::Ready(outcome) => Self::Pending(outcome.complete(remote)),
            pending @ Self::Pending(_) => pending,
        }
    }

    /// The outcome, once it is there.
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
