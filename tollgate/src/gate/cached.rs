//! A gate with a cached pointer to its rules.

use std::ops::Deref;
use std::sync::Arc;

use arc_swap::{ArcSwap, Cache};

use super::{Check, Gate, Inner, State};
use crate::rules::Facts;

/// Checks requests from one thread, slightly faster than [`Gate`]: it caches a pointer to the current rules and only
/// looks at whether they were replaced.
///
/// It keeps the cached rules alive until the next check. Call [`renew`](Self::renew) to drop replaced rules earlier.
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

/// The gate whose state is cached.
struct GateRef(Arc<Inner>);

impl Deref for GateRef {
    type Target = ArcSwap<State>;

    fn deref(&self) -> &ArcSwap<State> {
        &self.0.state
    }
}

impl Gate {
    /// Returns a handle for one thread that checks many requests.
    #[must_use]
    #[doc(hidden)]
    pub fn cached(&self) -> CachedGate {
        CachedGate(Cache::new(GateRef(Arc::clone(&self.0))))
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
    use super::*;
    use crate::rules::{Rule, RuleSet};
    use crate::{FixedWindow, Limit, MINUTE};

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
