//! `bench redis`: decisions on a local Redis.
//!
//! Deliberately not here: a network, a cluster, and other limiters.

mod algorithms;
mod bytes;
mod contender;
mod latency;
mod long_log;
mod server;
mod throughput;
mod trips;

use std::time::Duration;

use clap::ValueEnum;
use tokio::runtime::Runtime;

use self::contender::Contender;
pub(crate) use self::server::NoServer;
use self::server::Server;
use crate::race::Rounds;
use crate::report::{self, Results};

const CONCURRENCY: [usize; 3] = [1, 64, MOST_TASKS];
const MOST_TASKS: usize = 256;

/// Decisions on Redis: speed, Redis's own time, bytes per key, and round trips.
///
/// It starts and stops its own redis-server (from the PATH, or $REDIS_SERVER), on a free port. All contenders run in
/// turn in one process on one thread, on the same keys (`user:000123`), all of which are on Redis before the
/// measurement starts.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// End in under a minute: fewer and shorter rounds on 10 000 keys, bytes of the two commonest algorithms only
    #[arg(long)]
    quick: bool,

    /// Measure only these
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Decisions per second and Redis's processor time
    Throughput,
    /// One decision at a time
    Latency,
    /// Redis time per decision of each algorithm, batched and alone
    Algorithms,
    /// The longest call on a log of 100 000 entries
    LongLog,
    /// Redis bytes per key
    Bytes,
    /// Floods, leases and several limits: how often Redis is called
    Trips,
}

/// The extent of the measurements.
struct Scale {
    rounds: Rounds,
    keys: usize,
    leased_for: Duration,
    coverage: Coverage,
}

#[derive(Clone, Copy)]
enum Coverage {
    Full,
    Quick,
}

impl Scale {
    const FULL: Self = Self {
        rounds: Rounds { count: 11, slice: Duration::from_millis(300) },
        keys: 100_000,
        leased_for: Duration::from_secs(5),
        coverage: Coverage::Full,
    };
    const QUICK: Self = Self {
        rounds: Rounds { count: 5, slice: Duration::from_millis(100) },
        keys: 10_000,
        leased_for: Duration::from_secs(2),
        coverage: Coverage::Quick,
    };
}

/// The environment of every measurement.
struct Bench {
    scale: Scale,
    server: Server,
    runtime: Runtime,
}

impl Bench {
    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let scale = if args.quick { Scale::QUICK } else { Scale::FULL };
    let wants = |part: Part| args.only.is_empty() || args.only.contains(&part);
    // One thread leaves Redis the other of two cores. In a short trial, two threads were sometimes better for the
    // contenders without batching, and worse for INCR and Tollgate's hot key.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let server = runtime.block_on(Server::start())?;
    let bench = Bench { scale, server, runtime };
    introduce(&bench)?;
    let mut results = Results::default();
    if wants(Part::Throughput) || wants(Part::Latency) {
        let contenders = bench.block_on(Contender::field(&bench.server, bench.scale.keys))?;
        if wants(Part::Throughput) {
            throughput::run(&bench, &contenders, &mut results)?;
        }
        if wants(Part::Latency) {
            latency::run(&bench, &contenders, &mut results)?;
        }
    }
    if wants(Part::Algorithms) {
        algorithms::run(&bench, &mut results)?;
    }
    if wants(Part::LongLog) {
        long_log::run(&bench, &mut results)?;
    }
    if wants(Part::Bytes) {
        bytes::run(&bench, &mut results)?;
    }
    if wants(Part::Trips) {
        trips::run(&bench, &mut results)?;
    }
    report::note("");
    results.print();
    Ok(())
}

fn introduce(bench: &Bench) -> anyhow::Result<()> {
    let version = bench.block_on(bench.server.version())?;
    let Rounds { count, slice } = bench.scale.rounds;
    report::note(format_args!(
        "redis-server {version}. Contenders run in turn: {count} rounds of {slice:?} each; figures are medians of the \
         rounds.\nof the script's = over the two-key script in the same round, median of the rounds (quartiles)."
    ));
    Ok(())
}
