//! Metrics of a Redis store.

use std::fmt;

use tollgate::redis::{BreakerState, ServerMemory, ServerStatus, Stats, StoreStatus, StoreWarning};
use tollgate_rules::Gate;

use tollgate_telemetry::page::Page;

pub(super) fn write(gate: &Gate, page: &mut Page<'_>) -> fmt::Result {
    let Some(store) = gate.redis() else { return Ok(()) };
    page.gauge(
        "tollgate_store_available",
        "1 if every server of all stores is available, 0 while one fails or refuses commands",
        i64::from(store.is_store_available()),
    )?;
    write_warnings(&store.stores(), page)?;
    write_servers(&store.servers(), page)?;
    let help = "Nodes that share the store; local limits are divided by it while the store fails";
    page.gauge("tollgate_fleet_nodes", help, i64::from(store.fleet_nodes()))?;
    write_stats(&store.stats(), page)
}

fn write_warnings(stores: &[StoreStatus], page: &mut Page<'_>) -> fmt::Result {
    let rows = stores.iter().flat_map(|store| {
        StoreWarning::KINDS.into_iter().map(move |kind| {
            let is_warned = store.warnings.iter().any(|warning| warning.kind() == kind);
            ([("store", store.name.clone()), ("problem", kind.to_owned())], i64::from(is_warned))
        })
    });
    page.gauges(
        "tollgate_store_warning",
        "1 while the store has this problem, with which it still decides for all or most keys",
        rows,
    )
}

fn write_servers(servers: &[ServerStatus], page: &mut Page<'_>) -> fmt::Result {
    let labels = |server: &ServerStatus| [("store", server.store.clone()), ("server", server.address.clone())];
    let rows = servers.iter().map(|server| (labels(server), i64::from(server.available)));
    page.gauges(
        "tollgate_store_server_available",
        "1 if this server of the store is available, 0 while it fails or refuses commands",
        rows,
    )?;
    let rows = servers.iter().flat_map(|server| {
        BreakerState::ALL.into_iter().map(move |state| {
            let [store, address] = labels(server);
            ([store, address, ("state", state.as_str().to_owned())], i64::from(server.breaker == state))
        })
    });
    page.gauges(
        "tollgate_store_server_breaker_state",
        "1 for the state of the circuit breaker of this server of the store, 0 for the other states",
        rows,
    )?;
    let known = || servers.iter().filter_map(|server| Some((labels(server), server.memory.as_ref()?)));
    let gauge = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let rows = known().map(|(labels, memory)| (labels, gauge(memory.used)));
    page.gauges("tollgate_store_server_memory_bytes", "Memory used by this server of the store, in bytes", rows)?;
    let rows = known().map(|(labels, memory)| (labels, gauge(memory.maximum)));
    page.gauges(
        "tollgate_store_server_max_memory_bytes",
        "The maxmemory of this server of the store, in bytes; 0 for no limit",
        rows,
    )?;
    let policy = |memory: &ServerMemory| memory.eviction_policy.clone();
    let rows = known()
        .map(|([store, server], memory)| ([store, server, ("policy", policy(memory))], i64::from(memory.evicts())));
    page.gauges(
        "tollgate_store_server_evicts",
        "1 if this server of the store evicts keys when its memory is full, by maxmemory-policy",
        rows,
    )?;
    let rows = known().map(|(labels, memory)| (labels, memory.evicted_keys));
    page.counters(
        "tollgate_store_server_evicted_keys",
        "Keys evicted by this server of the store since it started",
        rows,
    )
}

fn write_stats(stats: &Stats, page: &mut Page<'_>) -> fmt::Result {
    for (name, help, count) in [
        ("tollgate_store_calls", "Script calls sent to the store", stats.calls),
        ("tollgate_store_requests", "Checks sent to the store in these calls", stats.requests),
        (
            "tollgate_store_cached_denials",
            "Denials answered from the denial cache, without a call",
            stats.cached_denials,
        ),
        ("tollgate_store_leased", "Hits taken from a lease, without a call", stats.leased),
        ("tollgate_store_leases", "Leases taken from the store", stats.leases),
        (
            "tollgate_store_leases_returned",
            "Leases whose unspent units were given back to the store",
            stats.leases_returned,
        ),
        ("tollgate_store_sent_bytes", "Bytes sent to the servers of the store", stats.bytes_sent),
        ("tollgate_store_received_bytes", "Bytes received from the servers of the store", stats.bytes_received),
        ("tollgate_store_timeouts", "Requests to the store without a reply within store_timeout", stats.timeouts),
        (
            "tollgate_store_failure_decisions",
            "Decisions made by on_store_failure because the store failed",
            stats.by_policy,
        ),
        (
            "tollgate_store_failures",
            "Times the circuit breaker of a server opened because it failed or refused commands",
            stats.breaker_opened,
        ),
    ] {
        page.counter(name, help, count)?;
    }
    let renewals = [("granted", stats.leases), ("refused", stats.leases_refused), ("failed", stats.leases_failed)];
    page.counters(
        "tollgate_store_lease_renewals",
        "Requests for a lease: granted, refused because no units are left, or failed without a reply",
        renewals.into_iter().map(|(result, count)| ([("result", result)], count)),
    )?;
    let gauge = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    page.gauge("tollgate_store_leases_held", "Leases of this node with units left", gauge(stats.leases_held))?;
    page.gauge("tollgate_store_leased_units", "Units left in the leases of this node", gauge(stats.leased_units))?;
    const SECONDS: f64 = 1e6;
    for (name, help, histogram, unit) in [
        ("tollgate_store_batch_size", "Checks in one call to the store", stats.batch_sizes, 1.0),
        (
            "tollgate_store_call_duration_seconds",
            "Duration of calls to the store, until the reply or the failure",
            stats.call_micros,
            SECONDS,
        ),
    ] {
        let bound = |bound: Option<u64>| bound.map_or(f64::INFINITY, |bound| bound as f64 / unit);
        let buckets: Vec<_> = histogram.buckets().map(|(upper, count)| (bound(upper), count)).collect();
        page.histogram(name, help, histogram.sum() as f64 / unit, &buckets)?;
    }
    Ok(())
}
