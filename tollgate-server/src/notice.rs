//! Lines for whoever runs the server, on stderr. What a command answers goes to stdout instead.

use std::fmt::{self, Display};
use std::io::{Write, stderr};
use std::time::Duration;

use tollgate::redis::{RedisLimiter, StoreError};
use tollgate::rules::file::Problems;
use tollgate::{Gate, OnStoreFailure};

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

/// Says that the store does not answer, if it does not, and why.
pub(crate) fn warn_of_an_absent_store(gate: &Gate) {
    if let Some(absent) = gate.redis().and_then(Absent::of) {
        warn(absent);
    }
}

/// Tells when the store is given up and when it is back, for ever.
pub(crate) async fn follow_store(gate: Gate) {
    const LOOK_EVERY: Duration = Duration::from_secs(1);
    let mut was_absent = gate.redis().and_then(Absent::of).is_some();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let absent = gate.redis().and_then(Absent::of);
        match (std::mem::replace(&mut was_absent, absent.is_some()), absent) {
            (false, Some(absent)) => warn(absent),
            (true, None) => tell("the store answers again"),
            _ => {}
        }
    }
}

/// A store that does not answer, why that is, what happens meanwhile, and what to do.
struct Absent {
    store: RedisLimiter,
    why: StoreError,
}

impl Absent {
    fn of(store: RedisLimiter) -> Option<Self> {
        let why = store.why_unavailable()?;
        Some(Self { store, why })
    }
}

impl Display for Absent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, why } = self;
        let (address, policy) = (store.address(), policy_name(store.on_store_failure()));
        write!(
            out,
            "the store at {address} does not answer: {}; until it does, limits answer by their on_store_failure ({policy} \
             unless they choose for themselves); {}",
            why.detail(),
            why.fix()
        )
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
pub(crate) fn policy_name(policy: OnStoreFailure) -> &'static str {
    match policy {
        OnStoreFailure::Allow => "allow",
        OnStoreFailure::Deny => "deny",
        _ => "local",
    }
}
