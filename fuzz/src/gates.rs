//! Gates with the rules of a file, and their explanations of requests.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use tollgate::{Limiter, ManualClock, Timestamp};
use tollgate_config::RuleFile;
use tollgate_rules::{Explanation, Facts, Gate, RuleSet, RuleState};

/// A moment in November 2023. Any other would do.
const TODAY: Timestamp = Timestamp::from_secs(1_700_000_000);

/// Returns a gate whose clock stands still, so that an explanation and the next decision must agree.
pub(crate) fn gate(rules: RuleSet) -> Option<(Gate, ManualClock)> {
    let clock = ManualClock::at(TODAY);
    let gate = Gate::with_limiter(rules, Limiter::builder().clock(clock.clone())).ok()?;
    Some((gate, clock))
}

/// Returns the rules of a file that is known to be valid.
pub(crate) fn rules(text: &str) -> RuleSet {
    let file = RuleFile::parse("tollgate.yaml", text).unwrap_or_else(|problems| panic!("{problems}"));
    file.compile().unwrap_or_else(|problems| panic!("{problems}"))
}

/// Explains a request. A gate in memory never waits, so no runtime is needed.
pub(crate) fn explained(gate: &Gate, facts: &Facts<'_>) -> Explanation {
    let explaining = pin!(gate.explain(facts));
    match explaining.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(explanation) => explanation,
        Poll::Pending => panic!("a gate in memory waits"),
    }
}

/// Returns the parts of the key by which a rule counts a request, or `None` if it does not count it.
pub(crate) fn key(gate: &Gate, rule: usize, facts: &Facts<'_>) -> Option<Vec<String>> {
    match explained(gate, facts).rules.swap_remove(rule).state {
        RuleState::Counted { key, .. } => Some(key),
        _ => None,
    }
}
