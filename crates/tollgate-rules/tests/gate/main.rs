//! Rules on the memory store: which limits apply to a request, with which keys, and at what cost.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod answers;
mod bans;
mod by_name;
mod changes;
mod checks;
mod counting_after;
mod each_limit;
#[cfg(feature = "file")]
mod handed_over;
mod hosts;
mod in_flight;
mod joint_checks;
mod keys;
mod lists;
mod methods;
#[cfg(feature = "file")]
mod named_keys;
mod path_readings;
mod plans;
mod policies;
mod scenarios;
mod settling;
mod spellings;

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate::{Limiter, ManualClock};
use tollgate_rules::{Facts, Gate, Outcome, Rule, RuleSet};

/// Creates a gate with these rules and a manual clock.
fn gate(rules: impl IntoIterator<Item = Rule>) -> (Gate, ManualClock) {
    gate_of(rule_set(rules))
}

fn gate_of(rules: RuleSet) -> (Gate, ManualClock) {
    let clock = ManualClock::at(tollgate::Timestamp::from_secs(1_700_000_000));
    let gate = Gate::with_limiter(rules, Limiter::builder().clock(clock.clone())).unwrap();
    (gate, clock)
}

fn rule_set(rules: impl IntoIterator<Item = Rule>) -> RuleSet {
    rules.into_iter().fold(RuleSet::builder(), |builder, rule| builder.rule(rule)).build().unwrap()
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let header =
        |(name, value): &(&'static str, &str)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
    pairs.iter().map(header).collect()
}

/// Returns the outcome of a request with these headers.
fn check(gate: &Gate, method: &str, path: &str, pairs: &[(&'static str, &str)]) -> Outcome {
    gate.decide_now(&Facts::new(method, path).headers(&headers(pairs))).expect("the store is in memory")
}

fn remaining(outcome: &Outcome) -> u64 {
    outcome.decision().expect("a limit applies").remaining()
}
