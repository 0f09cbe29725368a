//! Redis time per decision of each algorithm: in batches of 64, and alone, as on a cluster, where a call stays in one
//! slot.
//!
//! Two figures: the processor time of the whole server (`INFO cpu`), which includes reading and writing the socket, and
//! the time of the script calls alone (`INFO commandstats`).

use std::sync::Arc;

use tollgate::{FixedWindow, HOUR, SlidingWindowCounter, SlidingWindowLog};

use super::contender::{Bucket, Contender, SCRIPT, compact_limiter, limiter};
use super::throughput::slice;
use super::{Bench, Coverage, MOST_TASKS};
use crate::race::{self, Times};
use crate::report::{Results, Table};
use crate::traffic::{Reach, Spread, Traffic};

const BUCKET: &str = "token bucket";
const FIXED: &str = "fixed window";
const COUNTER: &str = "sliding counter";
const COUNTER_60: &str = "sliding counter, 60 segments";
const COMPACT: &str = "token bucket, compact layout";
const COMPACT_COUNTER: &str = "sliding counter, compact layout";
const LOG: &str = "sliding log of about 100 entries";

/// No window ever runs out.
const QUOTA: u64 = 1_000_000_000;
/// The entries of a log when the first round starts. The rounds add some thirty.
const LOG_ENTRIES: usize = 85;
const LOG_QUOTA: u64 = 100_000;

struct Case {
    name: &'static str,
    contender: Contender,
    traffic: Arc<Traffic>,
}

pub(super) fn run(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    bench.block_on(bench.server.flush())?;
    let cases = bench.block_on(cases(bench))?;
    let (batched, alone) = (compare(bench, &cases, MOST_TASKS)?, compare(bench, &cases, 1)?);
    for (result, name) in [("fixed", FIXED), ("counter", COUNTER), ("log", LOG), ("compact", COMPACT)] {
        results.ratio(format!("redis_cpu_{result}_vs_script"), batched.cpu_ratio(name));
    }
    results.ratio("exact_counter_vs_script_c256", 1.0 / batched.time_ratio(COUNTER));
    results.ratio("counter_60_segments_vs_1", batched.cpu_ratio(COUNTER_60) / batched.cpu_ratio(COUNTER));
    for (result, name) in
        [("bucket", BUCKET), ("fixed", FIXED), ("counter", COUNTER), ("log", LOG), ("compact", COMPACT)]
    {
        results.ratio(format!("redis_cpu_{result}_alone_vs_script"), alone.cpu_ratio(name));
    }
    Ok(())
}

async fn cases(bench: &Bench) -> anyhow::Result<Vec<Case>> {
    let keys = bench.scale.keys;
    // Each key of a log is checked a hundred times before the rounds start.
    let log_keys = match bench.scale.coverage {
        Coverage::Full => 10_000,
        Coverage::Quick => 2_000,
    };
    let uniform = |keys| Arc::new(Traffic::new(keys, Spread::Uniform, Reach::Arriving, 4 * keys));
    let (many, few) = (uniform(keys), uniform(log_keys));
    let server = &bench.server;
    let counter = SlidingWindowCounter::new(QUOTA, HOUR);
    let cases = [
        (SCRIPT, Contender::script(server, Bucket::VAST).await?),
        (BUCKET, Contender::Tollgate(limiter(server, "bucket", Bucket::VAST.algorithm()).await?)),
        (FIXED, Contender::Tollgate(limiter(server, "fixed", FixedWindow::new(QUOTA, HOUR)).await?)),
        (COUNTER, Contender::Tollgate(limiter(server, "counter", counter).await?)),
        (COUNTER_60, Contender::Tollgate(limiter(server, "counter-60", counter.segments(60)).await?)),
        (COMPACT, Contender::Tollgate(compact_limiter(server, "compact", keys, Bucket::VAST.algorithm()).await?)),
        (COMPACT_COUNTER, Contender::Tollgate(compact_limiter(server, "compact-counter", keys, counter).await?)),
        (LOG, Contender::Tollgate(limiter(server, "log", SlidingWindowLog::new(LOG_QUOTA, HOUR)).await?)),
    ];
    let mut ready = Vec::new();
    for (name, contender) in cases {
        let traffic = if name == LOG { few.clone() } else { many.clone() };
        if name == LOG {
            contender.fill(log_keys, &[1; LOG_ENTRIES]).await?;
        } else {
            // An hour's worth, so that no bucket is at rest before the end.
            contender.fill(keys, &[3600]).await?;
        }
        ready.push(Case { name, contender, traffic });
    }
    Ok(ready)
}

/// The results of the cases at one concurrency, the two-key script first.
struct Compared {
    elapsed: Vec<Times>,
    cpu: Vec<Times>,
    script: Vec<Times>,
}

impl Compared {
    fn ratio(times: &[Times], name: &str) -> f64 {
        let case = times.iter().find(|times| times.name == name);
        case.zip(times.first()).map_or(f64::NAN, |(case, base)| case.ratio_to(base).median)
    }

    fn cpu_ratio(&self, name: &str) -> f64 {
        Self::ratio(&self.cpu, name)
    }

    fn time_ratio(&self, name: &str) -> f64 {
        Self::ratio(&self.elapsed, name)
    }
}

fn compare(bench: &Bench, cases: &[Case], concurrency: usize) -> anyhow::Result<Compared> {
    let named = || cases.iter().map(|case| Times::new(case.name)).collect::<Vec<_>>();
    let mut compared = Compared { elapsed: named(), cpu: named(), script: named() };
    let before: Vec<_> = cases.iter().map(|case| case.contender.batched()).collect();
    let rounds = bench.scale.rounds;
    race::take_turns(rounds.count, cases.len(), |round, turn| {
        let Case { contender, traffic, .. } = &cases[turn];
        let from = round * traffic.len() / rounds.count;
        let ask = |length| slice(bench, contender, traffic, from, concurrency, length);
        bench.block_on(ask(rounds.slice / 10))?;
        let slice = bench.block_on(ask(rounds.slice))?;
        compared.elapsed[turn].push(race::per_decision(slice.elapsed, slice.decisions));
        compared.cpu[turn].push(race::per_decision(slice.redis_cpu, slice.decisions));
        compared.script[turn].push(race::per_decision(slice.script_time, slice.decisions));
        anyhow::Ok(())
    })?;
    let title = format!("Redis time per decision by algorithm, concurrency {concurrency}");
    let header = [
        "",
        "decisions/s",
        "of the script's",
        "Redis CPU µs",
        "of the script's",
        "script µs",
        "of the script's",
        "decisions per call",
    ];
    let mut table = Table::new(title, header);
    for (index, case) in cases.iter().enumerate() {
        let Compared { elapsed, cpu, script } = &compared;
        let per_call = match (before[index], case.contender.batched()) {
            (Some((checks, calls)), Some((checks_now, calls_now))) => {
                (checks_now - checks) as f64 / (calls_now - calls).max(1) as f64
            }
            _ => 1.0,
        };
        table.row([
            case.name.to_string(),
            format!("{:.0}", 1e9 / elapsed[index].median()),
            elapsed[0].ratio_to(&elapsed[index]).to_string(),
            format!("{:.2}", cpu[index].median() / 1000.0),
            cpu[index].ratio_to(&cpu[0]).to_string(),
            format!("{:.2}", script[index].median() / 1000.0),
            script[index].ratio_to(&script[0]).to_string(),
            format!("{per_call:.1}"),
        ]);
    }
    table.print();
    Ok(compared)
}
