//! Metrics of the tables of keys in memory.

use std::fmt;

use tollgate::{Occupancy, Overflow};
use tollgate_rules::Gate;

use tollgate_telemetry::page::Page;

pub(super) fn write(gate: &Gate, page: &mut Page<'_>) -> fmt::Result {
    let Some(limiter) = gate.memory() else { return Ok(()) };
    let gauge = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let help = "Memory allocated for the keys of all limits, in bytes";
    page.gauge("tollgate_memory_used_bytes", help, gauge(limiter.memory_used()))?;
    let help = "The max_memory in force, in bytes";
    page.gauge("tollgate_memory_max_bytes", help, gauge(limiter.max_memory()))?;
    let limits: Vec<(&str, Occupancy, Overflow)> = limiter
        .ids()
        .zip(limiter.limits())
        .map(|(id, limit)| (limit.name(), limiter.occupancy(id), limiter.overflow(id)))
        .collect();
    for (name, help, number) in [
        (
            "tollgate_table_keys",
            "Keys that have a slot, idle ones included until their slot is needed, by limit",
            (|occupancy| occupancy.keys) as fn(&Occupancy) -> usize,
        ),
        ("tollgate_table_slots", "Slots for keys, by limit", |occupancy| occupancy.slots),
        ("tollgate_table_bytes", "Memory of the slots, in bytes, by limit", |occupancy| occupancy.bytes),
    ] {
        let rows = limits.iter().map(|(limit, occupancy, _)| ([("limit", *limit)], gauge(number(occupancy))));
        page.gauges(name, help, rows)?;
    }
    let rows = limits.iter().map(|(limit, _, overflow)| ([("limit", *limit)], overflow.evicted));
    let help = "Keys evicted because max_memory is used up, by limit";
    page.counters("tollgate_evicted_keys", help, rows)?;
    let rows = limits.iter().map(|(limit, _, overflow)| ([("limit", *limit)], overflow.denied));
    let help = "Requests denied because max_memory is used up and their key has no counter, by limit";
    page.counters("tollgate_overflow_denials", help, rows)?;
    let bans = limiter.limits().iter().filter_map(|limit| Some((limit.name(), limiter.ban(limit.name())?)));
    let rows = bans.map(|(limit, ban)| ([("limit", limit)], limiter.overflow(ban).lost_strikes));
    let help = "Denials that did not count towards the ban of their limit because max_memory is used up, by limit";
    page.counters("tollgate_lost_strikes", help, rows)
}
