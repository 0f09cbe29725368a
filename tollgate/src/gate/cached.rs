//! One who asks a gate over and over.

use std::ops::Deref;
use std::sync::Arc;

use arc_swap::{ArcSwap, Cache};

use super::{Check, Gate, Inner, State};
use crate::rules::Facts;

/// Asks a gate over and over, from one thread, for a little less than the gate itself takes: it keeps the rules at hand
/// and looks only whether others are in force.
///
/// As long as nobody asks, it keeps the rules that were in force when somebody did. [`renew`](Self::renew) lets go of
/// them.
///
/// ```
/// use tollgate::rules::{Facts, KeyPart, Rule, RuleSet};
/// use tollgate::{Check, FixedWindow, Gate, Limit, MINUTE};
///
/// let per_ip = Rule::new(Limit::new("per-ip", FixedWindow::new(2, MINUTE))?).key(KeyPart::ip());
/// let gate = Gate::in_memory(RuleSet::builder().rule(per_ip).build()?)?;
/// let mut cached = gate.cached();
/// let facts = Facts::new("GET", "/").peer([192, 0, 2, 7].into());
/// assert!(matches!(cached.check(&facts), Check::Ready(outcome) if outcome.is_allowed()));
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
pub struct CachedGate(Cache<GateRef, Arc<State>>);

/// What a gate decides by, wherever it is.
struct GateRef(Arc<Inner>);

impl Deref for GateRef {
    type Target = ArcSwap<State>;

    fn deref(&self) -> &ArcSwap<State> {
        &self.0.state
    }
}

impl Gate {
    /// One who asks it over and over.
    #[must_use]
    #[doc(hidden)]
    pub fn cached(&self) -> CachedGate {
        CachedGate(Cache::new(GateRef(Arc::clone(&self.0))))
    }
}

impl CachedGate {
    /// As [`Gate::ask`].
    pub fn check(&mut self, facts: &Facts<'_>) -> Check {
        Check::of(Arc::clone(self.0.load()), facts)
    }

    /// Lets go of rules that are not in force any more.
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
    use super::*;
    use crate::rules::{Rule, RuleSet};
    use crate::{FixedWindow, Limit, MINUTE};

    fn rules(name: &str) -> RuleSet {
        let rule = Rule::new(Limit::new(name, FixedWindow::new(5, MINUTE)).unwrap());
        RuleSet::builder().rule(rule).build().unwrap()
    }

    #[test]
    fn other_rules_are_asked_from_the_moment_they_are_in_force() {
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
    fn rules_that_are_not_in_force_are_let_go() {
        let gate = Gate::in_memory(rules("before")).unwrap();
        let mut cached = gate.cached();
        let before = Arc::downgrade(&gate.0.state.load());
        gate.replace(rules("after")).unwrap();
        assert!(before.upgrade().is_some(), "the cached does not know yet");
        cached.renew();
        assert!(before.upgrade().is_none());
    }
}
