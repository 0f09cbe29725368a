//! `bench memory`: decisions in process.
//!
//! Deliberately not here: a store on another machine, HTTP, rules.

mod algorithms;
pub(crate) mod child;
mod churn;
mod decisions;
mod footprint;
mod growth;

use std::time::Duration;

use clap::ValueEnum;

use crate::race::Rounds;
use crate::report::{self, Results};

/// The number of keys in most tables.
const KEYS: usize = 1_000_000;

/// Decisions in process: speed, bytes per key, pauses while the store grows, and the state of the store after churn.
///
/// All contenders run in turn in one process, on the same keys (`user:000123`). Each has the same limit, and all keys
/// are live before the measurement starts.
///
/// `arriving`: the keys of a run are in memory in the order of the checks, like those of freshly parsed requests, so
/// the processor prefetches them. This is the default.
///
/// `scattered`: the keys are picked at random from a list of a million strings, which adds two cache misses per
/// decision to every contender. The uniform table has both.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// End in under a minute: fewer and shorter rounds, growth to 1 million keys, and some peers left out
    #[arg(long)]
    quick: bool,

    /// Thread counts to run the decisions with. `hot` and `mixed` also run with as many threads as there are
    /// processors, 16 at most
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = parse_threads)]
    threads: Vec<usize>,

    /// Measure only these
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// One hot key, allowed and denied
    Hot,
    /// A global limit and one per user on every request
    Mixed,
    /// 1 million keys, all alike: allowed (arriving and scattered) and denied
    Uniform,
    /// 1 million keys; the k-th is used 1/k as often as the first
    Zipf,
    /// Tollgate's five algorithms, compared with its token bucket
    Algorithms,
    /// Bytes per key and per log entry
    Footprint,
    /// The longest decision while the store grows
    Growth,
    /// Bytes per live key and time of a decision after 100 windows of new keys
    Churn,
}

/// The extent of the measurements.
struct Scale {
    rounds: Rounds,
    /// Requests laid out per traffic; a thread starts over after the last one.
    requests: usize,
    coverage: Coverage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Coverage {
    Full,
    Quick,
}

impl Scale {
    const FULL: Self = Self {
        rounds: Rounds { count: 11, slice: Duration::from_millis(100) },
        requests: 4 * KEYS,
        coverage: Coverage::Full,
    };
    const QUICK: Self = Self {
        rounds: Rounds { count: 5, slice: Duration::from_millis(25) },
        requests: 2 * KEYS,
        coverage: Coverage::Quick,
    };
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let scale = if args.quick { Scale::QUICK } else { Scale::FULL };
    let wants = |part: Part| args.only.is_empty() || args.only.contains(&part);
    let mut results = Results::default();
    introduce(&scale);
    if wants(Part::Hot) {
        decisions::hot(&scale, &args.threads, &mut results);
    }
    if wants(Part::Mixed) {
        decisions::mixed(&scale, &args.threads, &mut results);
    }
    if wants(Part::Uniform) || wants(Part::Zipf) {
        let spreads = decisions::Wanted { uniform: wants(Part::Uniform), zipf: wants(Part::Zipf) };
        decisions::many_keys(&scale, spreads, &args.threads, &mut results);
    }
    if wants(Part::Algorithms) {
        algorithms::run(&scale, &mut results);
    }
    if wants(Part::Footprint) {
        footprint::run(&scale, &mut results)?;
    }
    if wants(Part::Growth) {
        growth::run(&scale, &mut results)?;
    }
    if wants(Part::Churn) {
        churn::run(&mut results)?;
    }
    report::note("");
    results.print();
    Ok(())
}

fn introduce(scale: &Scale) {
    let Rounds { count, slice } = scale.rounds;
    report::note(format_args!(
        "Contenders take turns: {count} rounds of {slice:?} each. ns = elapsed time over the decisions of all \
         threads, median of the rounds.\nratio = to governor in the same round, median of the rounds (the half of \
         the rounds nearest to it)."
    ));
    if scale.coverage == Coverage::Quick {
        report::note(
            "QUICK: short rounds, so single figures are rough. Left out: limitador at 1 million keys, denial at \
             1 million keys, peers other than governor in the footprint, and growth beyond 1 million keys.",
        );
    }
}

fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=256) => Ok(threads),
        _ => Err("use a number from 1 to 256".into()),
    }
}
