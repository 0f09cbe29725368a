//! The layer around real services, over real sockets, with ordinary clients.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod answers;
mod bodies;
mod changes;
#[cfg(feature = "axum")]
mod connect_info;
#[cfg(feature = "axum")]
mod decisions;
#[cfg(feature = "axum")]
mod for_axum;
mod grpc;
mod hosts;
mod identity;
mod in_flight;
#[cfg(feature = "axum")]
mod nested;
mod per_address;
mod queue;
mod readiness;
mod responses;
mod scenarios;
mod server;
mod settling;
#[cfg(feature = "axum")]
mod websockets;

use tollgate::{FixedWindow, Limit, Limiter, MINUTE, ManualClock, Timestamp};
use tollgate_rules::{Gate, KeyPart, Rule, RuleSet, RuleSetBuilder};

/// Twenty seconds before a full minute, so that fixed windows end soon.
const NOW: Timestamp = Timestamp::from_secs(1_700_000_020);

/// Creates a gate with these rules and a manual clock.
fn gate(rules: impl IntoIterator<Item = Rule>) -> (Gate, ManualClock) {
    gate_of(rules.into_iter().fold(RuleSet::builder(), RuleSetBuilder::rule))
}

fn gate_of(rules: RuleSetBuilder) -> (Gate, ManualClock) {
    let clock = ManualClock::at(NOW);
    let gate = Gate::with_limiter(rules.build().unwrap(), Limiter::builder().clock(clock.clone())).unwrap();
    (gate, clock)
}

fn per_minute(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, FixedWindow::new(limit, MINUTE)).unwrap())
}

fn user() -> KeyPart {
    KeyPart::header("x-user-id")
}
