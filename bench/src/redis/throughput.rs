//! Decisions per second and Redis's processor time per decision, by number of concurrent tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;

use super::contender::{Contender, SCRIPT, TOLLGATE};
use super::{Bench, CONCURRENCY, MOST_TASKS};
use crate::clock;
use crate::race::{self, Times};
use crate::report::{Results, Table};
use crate::traffic::{Reach, Spread, Traffic};

/// Long enough to warm up.
const LEAD_IN: u32 = 10;

/// A workload, with its names in the table and in the result line.
struct Workload {
    title: String,
    result: &'static str,
    traffic: Arc<Traffic>,
}

/// The result of one slice.
pub(super) struct Slice {
    pub(super) decisions: usize,
    pub(super) elapsed: Duration,
    pub(super) redis_cpu: Duration,
    /// The part of it in scripts.
    pub(super) script_time: Duration,
}

pub(super) fn run(bench: &Bench, contenders: &[Contender], results: &mut Results) -> anyhow::Result<()> {
    let keys = bench.scale.keys;
    let uniform = Traffic::new(keys, Spread::Uniform, Reach::Arriving, 4 * keys);
    let workloads = [
        Workload { title: format!("{keys} keys, uniform"), result: "", traffic: Arc::new(uniform) },
        Workload { title: "One hot key".into(), result: "_hot", traffic: Arc::new(Traffic::hot_key()) },
    ];
    for workload in &workloads {
        for concurrency in CONCURRENCY {
            compare(bench, contenders, workload, concurrency, results)?;
        }
    }
    Ok(())
}

fn compare(
    bench: &Bench,
    contenders: &[Contender],
    workload: &Workload,
    concurrency: usize,
    results: &mut Results,
) -> anyhow::Result<()> {
    let named = || contenders.iter().map(|contender| Times::new(contender.name())).collect();
    let (mut times, mut cpu): (Vec<Times>, Vec<Times>) = (named(), named());
    let before: Vec<_> = contenders.iter().map(Contender::batched).collect();
    race::take_turns(bench.scale.rounds.count, contenders.len(), |round, turn| {
        // Each round uses other keys.
        let from = round * workload.traffic.len() / bench.scale.rounds.count;
        let ask = |length| slice(bench, &contenders[turn], &workload.traffic, from, concurrency, length);
        bench.block_on(ask(bench.scale.rounds.slice / LEAD_IN))?;
        let slice = bench.block_on(ask(bench.scale.rounds.slice))?;
        times[turn].push(race::per_decision(slice.elapsed, slice.decisions));
        cpu[turn].push(race::per_decision(slice.redis_cpu, slice.decisions));
        anyhow::Ok(())
    })?;

    let Some(script) = times.iter().position(|times| times.name == SCRIPT) else { return Ok(()) };
    let title = format!("{}, concurrency {concurrency}", workload.title);
    let header = ["", "decisions/s", "of the script's", "Redis CPU µs", "of the script's", "decisions per call"];
    let mut table = Table::new(title, header);
    for (index, contender) in contenders.iter().enumerate() {
        // Speed is the inverse of time, so that more is better.
        let speed = times[script].ratio_to(&times[index]);
        let cost = cpu[index].ratio_to(&cpu[script]);
        let per_call = match (before[index], contender.batched()) {
            (Some((checks, calls)), Some((checks_now, calls_now))) => {
                (checks_now - checks) as f64 / (calls_now - calls).max(1) as f64
            }
            _ => 1.0,
        };
        table.row([
            contender.name().to_string(),
            format!("{:.0}", 1e9 / times[index].median()),
            speed.to_string(),
            format!("{:.2}", cpu[index].median() / 1000.0),
            cost.to_string(),
            format!("{per_call:.1}"),
        ]);
        if contender.name() == TOLLGATE {
            let result = workload.result;
            results.ratio(format!("exact{result}_vs_script_c{concurrency}"), speed.median);
            if concurrency == MOST_TASKS {
                results.ratio(format!("redis_cpu{result}_vs_script"), cost.median);
            }
        }
    }
    table.print();
    Ok(())
}

/// Runs one contender: each task sends its next check as soon as the last is answered, until the time is up.
pub(super) async fn slice(
    bench: &Bench,
    contender: &Contender,
    traffic: &Arc<Traffic>,
    from: usize,
    concurrency: usize,
    length: Duration,
) -> anyhow::Result<Slice> {
    let stop = Arc::new(AtomicBool::new(false));
    let (cpu, script_time) = (bench.server.cpu().await?, bench.server.script_time().await?);
    let began = clock::now();
    let mut tasks = JoinSet::new();
    for task in 0..concurrency {
        let (mut contender, traffic, stop) = (contender.clone(), traffic.clone(), stop.clone());
        let start = from + task * traffic.len() / concurrency;
        tasks.spawn(async move {
            let mut decisions = 0;
            while !stop.load(Ordering::Relaxed) {
                contender.spend(task, traffic.key(start + decisions), 1).await?;
                decisions += 1;
            }
            anyhow::Ok(decisions)
        });
    }
    tokio::time::sleep(length).await;
    stop.store(true, Ordering::Relaxed);
    let decisions = tasks.join_all().await.into_iter().sum::<anyhow::Result<usize>>()?;
    let elapsed = clock::now() - began;
    let redis_cpu = bench.server.cpu().await?.saturating_sub(cpu);
    let script_time = bench.server.script_time().await?.saturating_sub(script_time);
    Ok(Slice { decisions, elapsed, redis_cpu, script_time })
}
