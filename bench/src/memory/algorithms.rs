//! Tollgate's five algorithms and their variants, compared with its token bucket.

use super::decisions::Filled;
use super::{KEYS, Scale};
use crate::contender::tollgate::ALGORITHMS;
use crate::contender::{Path, Setup};
use crate::race::{self, Course};
use crate::report::{Results, Table};
use crate::traffic::{Reach, Spread, Traffic};

pub(super) fn run(scale: &Scale, results: &mut Results) {
    let filled = Filled::new(&ALGORITHMS, Setup { path: Path::Allow, keys: KEYS });
    let traffic = Traffic::new(KEYS, Spread::Uniform, Reach::Arriving, scale.requests);
    let course = Course { traffic: &traffic, path: Path::Allow, threads: 1 };
    let times = race::run(&filled.runners(), &course, scale.rounds);
    let title = "All algorithms of tollgate: 1 million keys, uniform, allowed, arriving, 1 thread";
    let mut table = Table::new(title, ["", "ns", "ratio to token bucket"]);
    let Some((token_bucket, others)) = times.split_first() else {
        return;
    };
    table.row([token_bucket.name.to_string(), format!("{:.1}", token_bucket.median()), "1.00".to_string()]);
    let (mut worst, mut worst_log, mut worst_counter) = (0.0_f64, 0.0_f64, 0.0_f64);
    for times in others {
        let ratio = times.ratio_to(token_bucket);
        worst = worst.max(ratio.median);
        for (kind, worst) in [("sliding log", &mut worst_log), ("sliding counter", &mut worst_counter)] {
            if times.name.starts_with(kind) {
                *worst = worst.max(ratio.median);
            }
        }
        table.row([times.name.to_string(), format!("{:.1}", times.median()), ratio.to_string()]);
    }
    table.print();
    results.ratio("other_algorithms_worst_vs_token", worst);
    results.ratio("sliding_log_vs_token", worst_log);
    results.ratio("sliding_counter_vs_token", worst_counter);
}
