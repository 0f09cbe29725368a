//! The longest decision while the store grows. Every decision has a new key and is timed alone, which includes the
//! clock. A pause caused by the store occurs in every run; a pause of the machine does not. The hash-only floor does
//! not grow, and shows the pauses of the machine.

use anyhow::Context as _;

use super::{Coverage, Scale, child};
use crate::contender::{GOVERNOR, HASH_ONLY, TOLLGATE};
use crate::race::quantile;
use crate::report::{Results, Table, parse_figure};

const FROM_KEYS: usize = 1000;
const CONTENDERS: [&str; 3] = [HASH_ONLY, TOLLGATE, GOVERNOR];

/// How long the decisions of one run took, in microseconds.
struct Run {
    p50: f64,
    p99: f64,
    p9999: f64,
    longest: f64,
    /// The number of keys at the longest decision.
    longest_at: u64,
}

pub(super) fn run(scale: &Scale, results: &mut Results) -> anyhow::Result<()> {
    let (to_keys, runs) = match scale.coverage {
        Coverage::Full => (10_000_000, 3),
        Coverage::Quick => (1_000_000, 1),
    };
    let mut contenders = CONTENDERS.map(|name| (name, Vec::new()));
    for _ in 0..runs {
        for (name, runs) in &mut contenders {
            runs.push(Run::read(&child::start("growth", name, &[FROM_KEYS, to_keys])?)?);
        }
    }
    let title = format!(
        "One decision while growing from {FROM_KEYS} to {to_keys} keys, in µs, each timed by itself (runs: {runs})"
    );
    let mut table = Table::new(title, ["", "p50", "p99", "p99.99", "longest", "in the best run", "at keys"]);
    for (name, runs) in contenders {
        let median = |of: fn(&Run) -> f64| quantile(runs.iter().map(of).collect(), 0.5);
        let by_longest = |a: &&Run, b: &&Run| a.longest.total_cmp(&b.longest);
        let (Some(best), Some(worst)) = (runs.iter().min_by(by_longest), runs.iter().max_by(by_longest)) else {
            continue;
        };
        let times =
            [median(|run| run.p50), median(|run| run.p99), median(|run| run.p9999), worst.longest, best.longest];
        let times = times.map(|us| format!("{us:.2}"));
        table.row([name.to_string()].into_iter().chain(times).chain([best.longest_at.to_string()]));
        let prefix = match name {
            TOLLGATE => "grow",
            GOVERNOR => "governor_grow",
            _ => continue,
        };
        results.quantity(format!("{prefix}_p9999_us"), median(|run| run.p9999));
        results.quantity(format!("{prefix}_max_us"), worst.longest);
        results.quantity(format!("{prefix}_max_best_run_us"), best.longest);
    }
    table.print();
    Ok(())
}

impl Run {
    fn read(output: &str) -> anyhow::Result<Self> {
        let figure = |name: &str| parse_figure(output, name).with_context(|| format!("the child printed no {name}"));
        let micros = |name: &str| anyhow::Ok(figure(name)? as f64 / 1000.0);
        Ok(Self {
            p50: micros("p50")?,
            p99: micros("p99")?,
            p9999: micros("p9999")?,
            longest: micros("longest")?,
            longest_at: figure("longest_at")?,
        })
    }
}
