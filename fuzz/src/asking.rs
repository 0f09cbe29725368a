//! Gates made of rule files, and what they say of a request.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use tollgate::rules::file::RuleFile;
use tollgate::rules::{Facts, RuleSet};
use tollgate::{Explanation, Gate, Limiter, ManualClock, RuleState, Timestamp};

/// Any day will do: the second of November 2023.
const TODAY: Timestamp = Timestamp::from_secs(1_700_000_000);

/// A gate whose time stands still, so that what is explained and what is decided next must agree.
pub(crate) fn gate(rules: RuleSet) -> Option<(Gate, ManualClock)> {
    let clock = ManualClock::at(TODAY);
    let gate = Gate::with_limiter(rules, Limiter::builder().clock(clock.clone())).ok()?;
    Some((gate, clock))
}

/// The rules of a file that is known to be good.
pub(crate) fn rules(text: &str) -> RuleSet {
    let file = RuleFile::parse("tollgate.yaml", text).unwrap_or_else(|problems| panic!("{problems}"));
    file.compile().unwrap_or_else(|problems| panic!("{problems}"))
}

/// What the rules would make of a request. In memory that needs no runtime: it never waits.
pub(crate) fn explained(gate: &Gate, facts: &Facts<'_>) -> Explanation {
    let explaining = pin!(gate.explain(facts));
    match explaining.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(explanation) => explanation,
        Poll::Pending => panic!("a gate in memory waits"),
    }
}

/// The parts of the key that a rule counts a request by; `None` if it does not count it.
pub(crate) fn key(gate: &Gate, rule: usize, facts: &Facts<'_>) -> Option<Vec<String>> {
    match explained(gate, facts).rules.swap_remove(rule).state {
        RuleState::Counted { key, .. } => Some(key),
        _ => None,
    }
}
