//! Lines for whoever runs the server, on stderr. What a command answers goes to stdout instead.

use std::fmt::Display;
use std::io::{Write, stderr};
use std::time::Duration;

use tollgate::Gate;
use tollgate::redis::RuleSets;
use tollgate::rules::file::{FailurePolicy, Problems, RuleFile, StoreUrl};

/// Says something worth to know. Nobody is left to tell when even stderr is closed.
pub(crate) fn tell(line: impl Display) {
    _ = writeln!(stderr(), "tollgate: {line}");
}

/// Says something that may not be meant so.
pub(crate) fn warn(line: impl Display) {
    tell(format_args!("warning: {line}"));
}

/// Says what is wrong with a rule file, one problem to a line: `file:line:column` first, where editors look for it.
pub(crate) fn tell_problems(problems: &Problems) {
    if problems.iter().next().is_some() {
        _ = writeln!(stderr(), "{problems}");
    }
}

/// Says that the store does not answer, if it does not, and why. Nobody waits for that: a host that does not exist takes
/// its time.
pub(crate) fn warn_of_an_absent_store(gate: &Gate, file: &RuleFile) {
    if gate.redis().is_some_and(|store| !store.is_store_available()) {
        let (policy, store) = (policy_name(file.on_store_failure), file.store.clone());
        tokio::spawn(async move {
            let why = why_absent(&store).await.map(|why| format!(": {why}")).unwrap_or_default();
            warn(format_args!(
                "the store does not answer; until it does, limits answer by their on_store_failure ({policy} unless they \
                 choose for themselves){why}"
            ));
        });
    }
}

/// What stands between us and the store, if that still is so.
async fn why_absent(store: &StoreUrl) -> Option<String> {
    let StoreUrl::Redis(url) = store else { return None };
    match RuleSets::connect(url) {
        Ok(rule_sets) => rule_sets.newest().await.err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    }
}

/// Tells when the store is given up and when it is back, for ever.
pub(crate) async fn follow_store(gate: Gate) {
    const LOOK_EVERY: Duration = Duration::from_secs(1);
    let answers = || gate.redis().is_none_or(|store| store.is_store_available());
    let mut before = answers();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = answers();
        match (std::mem::replace(&mut before, now), now) {
            (true, false) => {
                let why = gate.redis().and_then(|store| store.why_unavailable());
                let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                warn(format_args!(
                    "the store does not answer; until it does, limits answer by their on_store_failure{why}"
                ));
            }
            (false, true) => tell("the store answers again"),
            _ => {}
        }
    }
}

/// Names in a line: so many of them, and how many more there are.
pub(crate) fn some_of(names: &[impl AsRef<str>], most: usize) -> String {
    let told: Vec<&str> = names.iter().take(most).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(most) {
        0 => told.join(", "),
        more => format!("{} and {more} more", told.join(", ")),
    }
}

/// The policy as a file writes it.
pub(crate) fn policy_name(policy: FailurePolicy) -> &'static str {
    match policy {
        FailurePolicy::Allow => "allow",
        FailurePolicy::Deny => "deny",
        _ => "local",
    }
}
