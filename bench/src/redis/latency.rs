//! How long one decision takes without other load. Contenders alternate in blocks of calls; a block's figure
//! is the median of its calls.

use super::Bench;
use super::contender::{Contender, SCRIPT, TOLLGATE};
use crate::clock::Ticker;
use crate::race::{self, Times, quantile};
use crate::report::{Results, Table};
use crate::traffic;

/// Calls in a block: some 50 ms.
const CALLS: usize = 1000;
/// More and shorter rounds than for throughput, because noise lasts longer than a block.
const ROUNDS_PER_ROUND: usize = 2;

pub(super) fn run(bench: &Bench, contenders: &[Contender], results: &mut Results) -> anyhow::Result<()> {
    let mut times: Vec<Times> = contenders.iter().map(|contender| Times::new(contender.name())).collect();
    race::take_turns(bench.scale.rounds.count * ROUNDS_PER_ROUND, contenders.len(), |round, turn| {
        let block = block(contenders[turn].clone(), bench.scale.keys, round * CALLS);
        times[turn].push(bench.block_on(async { tokio::spawn(block).await? })?);
        anyhow::Ok(())
    })?;
    let Some(script) = times.iter().find(|times| times.name == SCRIPT) else { return Ok(()) };
    let mut table = Table::new("Latency, concurrency 1", ["", "µs", "of the script's"]);
    for times in &times {
        let ratio = times.ratio_to(script);
        table.row([times.name.to_string(), format!("{:.1}", times.median() / 1000.0), ratio.to_string()]);
        if times.name == TOLLGATE {
            results.ratio("latency_c1_vs_script", ratio.median);
            results.quantity("latency_c1_us", times.median() / 1000.0);
        }
    }
    table.print();
    Ok(())
}

/// The median of the calls, in nanoseconds. Every call brings another key.
async fn block(mut contender: Contender, keys: usize, from: usize) -> anyhow::Result<f64> {
    let clock = Ticker::new();
    let mut nanos = Vec::with_capacity(CALLS);
    let mut key = String::new();
    for id in from..from + CALLS {
        traffic::write_name(&mut key, id % keys);
        let began = clock.ticks();
        contender.spend(0, &key, 1).await?;
        nanos.push(clock.nanos(began, clock.ticks()) as f64);
    }
    Ok(quantile(nanos, 0.5))
}
