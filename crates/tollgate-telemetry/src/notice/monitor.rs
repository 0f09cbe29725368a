//! Watches the stores and the memory of keys, and logs when something changes.

use std::fmt::{self, Display};
use std::time::Duration;

use tollgate::OnStoreFailure;
use tollgate::redis::{StoreError, StoreStatus, StoreWarning};
use tollgate_rules::Gate;

use super::{Level, join_up_to, policy_name};

/// Warns about each store that does not answer, with the reason.
pub fn warn_if_store_unavailable(gate: &Gate) {
    stores(gate).into_iter().filter_map(StoreOutage::of).for_each(|outage| outage.log());
}

/// Logs when a store fails, when it recovers, which servers evict keys, and warnings of stores. Never returns.
pub async fn monitor_store(gate: Gate) {
    const CHECK_INTERVAL: Duration = Duration::from_secs(1);
    let name = |(store, _): &(StoreStatus, OnStoreFailure)| store.name.clone();
    let is_out = |(store, _): &(StoreStatus, OnStoreFailure)| store.why_unavailable.is_some();
    let mut out: Vec<String> = stores(&gate).iter().filter(|store| is_out(store)).map(name).collect();
    let (mut evicting, mut warned) = (Vec::new(), Vec::new());
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        warn_of_evictions(&gate, &mut evicting);
        let stores = stores(&gate);
        log_new_warnings(&stores, &mut warned);
        let now: Vec<String> = stores.iter().filter(|store| is_out(store)).map(name).collect();
        for store in stores {
            match (out.contains(&store.0.name), is_out(&store)) {
                (false, true) => StoreOutage::of(store).into_iter().for_each(|outage| outage.log()),
                (true, false) => {
                    let fields = [("store", store.0.name.as_str().into())];
                    Level::Info.log(format_args!("{} answers again", named(&store.0)), &fields);
                }
                _ => {}
            }
        }
        out = now;
    }
}

/// Returns the Redis stores, with the default policy of their limits.
fn stores(gate: &Gate) -> Vec<(StoreStatus, OnStoreFailure)> {
    let Some(limiter) = gate.redis() else { return Vec::new() };
    limiter.stores().into_iter().map(|store| (store, limiter.on_store_failure())).collect()
}

/// Returns the name of a store for a sentence.
fn named(store: &StoreStatus) -> String {
    if store.name == "default" { "the store".to_owned() } else { format!("store `{}`", store.name) }
}

/// Logs each problem with which a store still decides, when it begins. A problem that is the reason of an outage has a line
/// already. `known` has those that were logged.
fn log_new_warnings(stores: &[(StoreStatus, OnStoreFailure)], known: &mut Vec<(String, StoreWarning)>) {
    let of_store = |(store, _): &(StoreStatus, OnStoreFailure)| -> Vec<(String, StoreWarning)> {
        store.warnings.iter().map(|warning| (store.name.clone(), warning.clone())).collect()
    };
    for (store, _) in stores {
        for warning in store.warnings.iter().filter(|warning| !is_reason_of_outage(store, warning)) {
            if !known.iter().any(|(name, other)| *name == store.name && other == warning) {
                let fields = [("store", store.name.as_str().into()), ("problem", warning.kind().into())];
                Level::Warning.log(format_args!("{} at {}: {warning}", named(store), store.address), &fields);
            }
        }
    }
    *known = stores.iter().flat_map(of_store).collect();
}

fn is_reason_of_outage(store: &StoreStatus, warning: &StoreWarning) -> bool {
    match (&store.why_unavailable, warning) {
        (Some(why), StoreWarning::InvalidReply { problem, .. }) => why.detail().contains(problem),
        _ => false,
    }
}

/// Warns once about each server that evicts keys when its memory is full. `known` has their addresses.
fn warn_of_evictions(gate: &Gate, known: &mut Vec<String>) {
    let servers = gate.redis().map(|store| store.servers()).unwrap_or_default();
    let evicting = servers
        .into_iter()
        .filter_map(|server| Some((server.address, server.memory.filter(|memory| memory.evicts())?)));
    let evicting: Vec<_> = evicting.collect();
    for (address, memory) in evicting.iter().filter(|(address, _)| !known.contains(address)) {
        let message = format_args!(
            "the store at {address} evicts keys when its memory is full (maxmemory-policy {}, {} evicted so far), and an evicted key starts with its full quota: set maxmemory-policy noeviction, or use a separate Redis for limits",
            memory.eviction_policy, memory.evicted_keys
        );
        Level::Warning.log(message, &[("address", address.as_str().into())]);
    }
    *known = evicting.into_iter().map(|(address, _)| address).collect();
}

/// Warns when `max_memory` is too small for the keys. Never returns.
pub async fn monitor_memory(gate: Gate) {
    const CHECK_INTERVAL: Duration = Duration::from_secs(1);
    let mut monitor = MemoryMonitor { reported: MemoryShortage::of(&gate), pause: 0 };
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if let Some(shortage) = monitor.warning(MemoryShortage::of(&gate)) {
            Level::Warning.log(shortage, &[("limits", shortage.limits.iter().take(5).cloned().collect())]);
        }
    }
}

/// Decides when a shortage is worth a line: at most once in ten minutes, and when the first requests are denied.
struct MemoryMonitor {
    /// The counts of the last line.
    reported: MemoryShortage,
    /// Checks until the next line.
    pause: u32,
}

impl MemoryMonitor {
    /// Checks between two lines.
    const PAUSE: u32 = 600;

    /// Returns the shortage to warn of, if any. Called once a second.
    fn warning(&mut self, shortage: MemoryShortage) -> Option<&MemoryShortage> {
        self.pause = self.pause.saturating_sub(1);
        let has_grown = shortage.evicted > self.reported.evicted || shortage.denied > self.reported.denied;
        let first_denials = self.reported.denied == 0 && shortage.denied > 0;
        if has_grown && (self.pause == 0 || first_denials) {
            (self.reported, self.pause) = (shortage, Self::PAUSE);
            return Some(&self.reported);
        }
        // Counts start from zero after a reload that changes the store.
        if shortage.evicted < self.reported.evicted || shortage.denied < self.reported.denied {
            self.reported = shortage;
        }
        None
    }
}

/// Evictions and denials for lack of memory, summed over all limits.
#[derive(Default)]
struct MemoryShortage {
    limits: Vec<String>,
    evicted: u64,
    denied: u64,
}

impl MemoryShortage {
    fn of(gate: &Gate) -> Self {
        let mut shortage = Self::default();
        let Some(limiter) = gate.memory() else { return shortage };
        for (id, limit) in limiter.ids().zip(limiter.limits()) {
            let overflow = limiter.overflow(id);
            if overflow.evicted > 0 || overflow.denied > 0 {
                shortage.limits.push(limit.name().to_owned());
                shortage.evicted += overflow.evicted;
                shortage.denied += overflow.denied;
            }
        }
        shortage
    }
}

impl Display for MemoryShortage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limits, evicted, denied } = self;
        write!(
            out,
            "max_memory is used up by keys of {}: {evicted} keys were evicted and {denied} requests with new keys were denied so far: raise max_memory, or look for a client that invents keys",
            join_up_to(limits, 5)
        )
    }
}

/// A store that does not answer. Displays the reason, the policy in force and the fix.
struct StoreOutage {
    store: StoreStatus,
    why: StoreError,
    policy: OnStoreFailure,
}

impl StoreOutage {
    fn of((store, policy): (StoreStatus, OnStoreFailure)) -> Option<Self> {
        let why = store.why_unavailable.clone()?;
        Some(Self { store, why, policy })
    }

    fn log(&self) {
        let fields = [("store", self.store.name.as_str().into()), ("address", self.store.address.to_string().into())];
        Level::Warning.log(self, &fields);
    }
}

impl Display for StoreOutage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, why, policy } = self;
        let (address, policy) = (&store.address, policy_name(*policy));
        let (verb, until) =
            if why.is_refused() { ("refuses", "until it accepts them") } else { ("does not answer", "until it does") };
        write!(
            out,
            "{} at {address} {verb}: {}; {until}, limits follow on_store_failure ({policy} \
             unless a limit sets its own): {}",
            named(store),
            why.detail().trim_end_matches('.'),
            why.fix()
        )
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener};

    use tollgate::redis::RedisLimiter;
    use tollgate::{FixedWindow, Limit, SECOND};

    use super::*;
    use crate::notice::captured::lines_of;

    #[tokio::test]
    async fn a_warning_that_is_the_reason_of_an_outage_has_no_line_besides() {
        let web = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = web.local_addr().expect("it has an address");
        std::thread::spawn(move || {
            for stream in web.incoming().map_while(Result::ok) {
                std::thread::spawn(move || {
                    let mut stream = stream;
                    _ = write!(stream, "HTTP/1.1 400 Bad Request\r\n\r\n");
                    _ = stream.shutdown(Shutdown::Write);
                    // A socket that is closed before everything was read resets the connection.
                    _ = std::io::copy(&mut stream, &mut std::io::sink());
                });
            }
        });
        let limit = Limit::new("one", FixedWindow::new(10, SECOND)).expect("valid");
        let limiter = RedisLimiter::builder(format!("redis://{address}")).limit(limit).connect();
        let limiter = limiter.await.expect("the settings are valid");
        let status = loop {
            let status = limiter.stores().remove(0);
            if status.why_unavailable.is_some() && !status.warnings.is_empty() {
                break (status, OnStoreFailure::Local);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let mut known = Vec::new();
        assert_eq!(lines_of(|| log_new_warnings(std::slice::from_ref(&status), &mut known)), "", "{:?}", status.0);
        let mut recovered = status;
        recovered.0.why_unavailable = None;
        assert_eq!(lines_of(|| log_new_warnings(std::slice::from_ref(&recovered), &mut known)), "", "it was logged");
        let line = lines_of(|| log_new_warnings(&[recovered], &mut Vec::new()));
        assert!(line.contains("was closed because the server does not speak the protocol of Redis"), "{line}");
    }

    #[test]
    fn shortage_of_memory_is_described_with_the_fix() {
        let shortage = MemoryShortage { limits: vec!["per-user".into(), "per-ip".into()], evicted: 9, denied: 2 };
        insta::assert_snapshot!(shortage);
    }

    #[test]
    fn a_shortage_of_memory_has_a_line_in_ten_minutes_and_one_for_the_first_denials() {
        let shortage = |evicted, denied| MemoryShortage { limits: Vec::new(), evicted, denied };
        let mut monitor = MemoryMonitor { reported: shortage(0, 0), pause: 0 };
        let mut warned = |evicted, denied| monitor.warning(shortage(evicted, denied)).is_some();
        assert!(!warned(0, 0));
        assert!(warned(5, 0));
        assert!(!warned(9, 0), "within ten minutes");
        assert!(warned(9, 1), "the first denial");
        let mut seconds = 1;
        while !warned(9, 2) {
            seconds += 1;
        }
        assert_eq!(seconds, MemoryMonitor::PAUSE, "what happened during the pause is reported after it");
        assert!(!warned(0, 0), "the store has changed");
        assert!(warned(0, 1));
    }
}
