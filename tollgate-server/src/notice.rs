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

/// Tells when the store is given up and when it is back, and which of its servers evict keys, for ever.
pub(crate) async fn follow_store(gate: Gate) {
    const LOOK_EVERY: Duration = Duration::from_secs(1);
    let mut was_absent = gate.redis().and_then(Absent::of).is_some();
    let mut evicting = Vec::new();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        warn_of_evictions(&gate, &mut evicting);
        let absent = gate.redis().and_then(Absent::of);
        match (std::mem::replace(&mut was_absent, absent.is_some()), absent) {
            (false, Some(absent)) => warn(absent),
            (true, None) => tell("the store answers again"),
            _ => {}
        }
    }
}

/// Warns of servers that evict keys when their memory is full, once for each. `known` has those that do, by address.
fn warn_of_evictions(gate: &Gate, known: &mut Vec<String>) {
    let servers = gate.redis().map(|store| store.servers()).unwrap_or_default();
    let evicting = servers
        .into_iter()
        .filter_map(|server| Some((server.address, server.memory.filter(|memory| memory.evicts())?)));
    let evicting: Vec<_> = evicting.collect();
    for (address, memory) in evicting.iter().filter(|(address, _)| !known.contains(address)) {
        warn(format_args!(
            "the store at {address} evicts keys when its memory is full (maxmemory-policy {}, {} evicted so far), and an evicted \
             key gets its full quota again; set maxmemory-policy noeviction, or keep limits on a Redis of their own",
            memory.eviction_policy, memory.evicted_keys
        ));
    }
    *known = evicting.into_iter().map(|(address, _)| address).collect();
}

/// Warns when `max_memory` is too small for the keys of the limits, at most once in ten minutes, for ever.
pub(crate) async fn watch_memory(gate: Gate) {
    const LOOK_EVERY: Duration = Duration::from_secs(1);
    const WARN_EVERY: Duration = Duration::from_secs(600);
    let mut before = Lacking::of(&gate);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let lacking = Lacking::of(&gate);
        if lacking.evicted > before.evicted || lacking.denied > before.denied {
            warn(&lacking);
            tokio::time::sleep(WARN_EVERY).await;
        }
        // Counts begin anew after a reload that changes the store.
        before = Lacking::of(&gate);
    }
}

/// How often limits have lacked memory for their keys, all together.
#[derive(Default)]
struct Lacking {
    limits: Vec<String>,
    evicted: u64,
    denied: u64,
}

impl Lacking {
    fn of(gate: &Gate) -> Self {
        let mut lacking = Self::default();
        let Some(limiter) = gate.memory() else { return lacking };
        for limit in limiter.limits() {
            let Some(overflow) = limiter.id(limit.name()).map(|id| limiter.overflow(id)) else { continue };
            if overflow.evicted > 0 || overflow.denied > 0 {
                lacking.limits.push(limit.name().to_owned());
                lacking.evicted += overflow.evicted;
                lacking.denied += overflow.denied;
            }
        }
        lacking
    }
}

impl Display for Lacking {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limits, evicted, denied } = self;
        write!(
            out,
            "max_memory is used up by keys of {}: {evicted} keys lost their count to new ones and {denied} requests of new \
             keys were denied so far; raise max_memory, or look for a client that invents keys",
            some_of(limits, 5)
        )
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
        let (verb, until) =
            if why.is_refused() { ("refuses", "until it decides") } else { ("does not answer", "until it does") };
        write!(
            out,
            "the store at {address} {verb}: {}; {until}, limits answer by their on_store_failure ({policy} \
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
