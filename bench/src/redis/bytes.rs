//! The memory of a key on Redis: the growth of `used_memory` per new key. It includes names, values, and the share of
//! the tables of keys and expiries; for the two-key script, both of its keys.

use std::time::Duration;

use anyhow::ensure;
use tollgate::{
    Algorithm, DAY, FixedWindow, HOUR, LeakyBucket, Rate, SlidingWindowCounter, SlidingWindowLog, TokenBucket,
};

use super::contender::{Bucket, Contender, SCRIPT, compact_limiter, limiter};
use super::{Bench, Coverage};
use crate::report::{Results, Table};

const KEYS: usize = 100_000;

/// A realistic limit.
const REAL: Bucket = Bucket { capacity: 100, per_second: 10 };

/// Two requests per key, so that its value is typical and not a small number that Redis shares between keys. Their
/// units take nine seconds to refill, so that no key expires before it is measured.
const COSTS: &[u64] = &[50, 40];

/// Redis moves keys from a table to a larger one in its idle time.
const SETTLE_TRIES: usize = 50;
const SETTLE_EVERY: Duration = Duration::from_millis(100);

pub(super) fn run(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let title = format!("Redis bytes per user key, {KEYS} keys");
    let mut table = Table::new(title, ["", "bytes", "Redis keys each", "a name"]);
    let algorithms: [(&str, Algorithm); 6] = [
        ("tollgate, token bucket, 100 and 10/s", REAL.algorithm().into()),
        ("tollgate, sliding counter, 100 an hour", SlidingWindowCounter::new(100, HOUR).into()),
        // A seventh of a second is not a whole number of microseconds, so the remainder is stored too.
        ("tollgate, token bucket, 100 and 7/s", TokenBucket::new(100, Rate::per_second(7)).into()),
        ("tollgate, leaky bucket, 100 and 10/s", LeakyBucket::new(100, Rate::per_second(10)).into()),
        ("tollgate, fixed window, 100 an hour", FixedWindow::new(100, HOUR).into()),
        ("tollgate, sliding log, 2 requests of 100 an hour", SlidingWindowLog::new(100, HOUR).into()),
    ];
    bench.block_on(async {
        let script = Contender::script(&bench.server, REAL).await?;
        let script_bytes = measure(bench, SCRIPT, &script, &mut table).await?;
        let wanted = match bench.scale.coverage {
            Coverage::Full => algorithms.len(),
            Coverage::Quick => 2,
        };
        for (index, (name, algorithm)) in algorithms.into_iter().take(wanted).enumerate() {
            let contender = Contender::Tollgate(limiter(&bench.server, "u", algorithm).await?);
            let bytes = measure(bench, name, &contender, &mut table).await?;
            match index {
                0 => {
                    results.quantity("bytes_per_key", bytes);
                    results.ratio("bytes_vs_script", bytes / script_bytes);
                }
                1 => results.quantity("bytes_per_key_counter", bytes),
                _ => {}
            }
        }
        compact(bench, results, &mut table).await
    })?;
    table.print();
    Ok(())
}

/// The compact layout, with as many keys as expected. They last longer than it takes to write them.
async fn compact(bench: &Bench, results: &mut Results, table: &mut Table) -> anyhow::Result<()> {
    let keys = match bench.scale.coverage {
        Coverage::Full => 10 * KEYS,
        Coverage::Quick => KEYS,
    };
    let cases: [(&str, &str, Algorithm); 2] = [
        ("bytes_per_key_compact", "tollgate, compact, token bucket", TokenBucket::new(100, Rate::new(1, HOUR)).into()),
        (
            "bytes_per_key_compact_counter",
            "tollgate, compact, sliding counter",
            SlidingWindowCounter::new(100, DAY).into(),
        ),
    ];
    for (result, name, algorithm) in cases {
        let server = &bench.server;
        server.flush().await?;
        let contender = Contender::Tollgate(compact_limiter(server, "u", keys, algorithm).await?);
        contender.fill(KEYS / 100, &COSTS[..1]).await?;
        server.flush().await?;
        let before = settled(bench).await?;
        contender.fill(keys, COSTS).await?;
        let bytes = settled(bench).await?.saturating_sub(before) as f64 / keys as f64;
        let each = format!("{:.4}", server.key_count().await? as f64 / keys as f64);
        table.row([format!("{name}, {keys} keys"), format!("{bytes:.1}"), each, server.any_key().await?]);
        results.quantity(result, bytes);
    }
    Ok(())
}

async fn measure(bench: &Bench, name: &str, contender: &Contender, table: &mut Table) -> anyhow::Result<f64> {
    let server = &bench.server;
    server.flush().await?;
    // One check first, so that scripts and buffers exist already. Not with the second cost: it would be denied later,
    // and the limiter would cache that denial beyond the flush.
    contender.fill(KEYS / 100, &COSTS[..1]).await?;
    server.flush().await?;
    let before = settled(bench).await?;
    contender.fill(KEYS, COSTS).await?;
    let after = settled(bench).await?;
    let each = server.key_count().await? as f64 / KEYS as f64;
    ensure!(each.fract() == 0.0 && each > 0.0, "some of {name}'s keys were forgotten while they were counted");
    let bytes = after.saturating_sub(before) as f64 / KEYS as f64;
    table.row([name.to_string(), format!("{bytes:.1}"), format!("{each:.0}"), server.any_key().await?]);
    Ok(bytes)
}

async fn settled(bench: &Bench) -> anyhow::Result<u64> {
    let mut last = bench.server.used_memory_bytes().await?;
    for _ in 0..SETTLE_TRIES {
        tokio::time::sleep(SETTLE_EVERY).await;
        let now = bench.server.used_memory_bytes().await?;
        if now == last {
            break;
        }
        last = now;
    }
    Ok(last)
}
