//! Compares Tollgate, its peers and the floors.

use std::num::NonZeroUsize;

use super::{Coverage, KEYS, Scale};
use crate::contender::{
    Contender, Entrant, FIELD, GCRA, GOVERNOR, HASH_ONLY, LIMITADOR, Path, Setup, THROTTLECRAB, TOLLGATE, mixed,
};
use crate::race::{self, Course, Ratio, Runner, Times};
use crate::report::{self, Results, Table};
use crate::traffic::{self, Reach, Spread, Traffic};

/// Below this share of the processors they need, threads did not run in parallel.
const LEAST_SHARE: f64 = 0.75;

/// The maximum number of threads for the measurement of contention.
const MOST_THREADS: usize = 16;

/// Which of the tables about many keys to make; they share the filled stores.
pub(super) struct Wanted {
    pub(super) uniform: bool,
    pub(super) zipf: bool,
}

/// A workload, with its names in the table and in the result line.
struct Workload<'a> {
    title: &'a str,
    result: &'a str,
    path: Path,
    traffic: &'a Traffic,
}

/// Contenders with all keys, ready to decide.
pub(super) struct Filled(Vec<(&'static str, Box<dyn Contender>)>);

impl Filled {
    pub(super) fn new(entrants: &[Entrant], setup: Setup) -> Self {
        let fill = |entrant: &Entrant| {
            let contender = (entrant.build)(setup);
            let mut key = String::new();
            for id in 0..setup.keys {
                traffic::write_name(&mut key, id);
                entrant.prime(contender.as_ref(), setup.path, &key);
            }
            (entrant.name, contender)
        };
        Self(entrants.iter().map(fill).collect())
    }

    pub(super) fn runners(&self) -> Vec<Runner<'_>> {
        let pairs = self.0.iter();
        pairs.map(|(name, contender)| Runner { name, contender: contender.as_ref() }).collect()
    }
}

pub(super) fn hot(scale: &Scale, threads: &[usize], results: &mut Results) {
    let traffic = Traffic::hot_key();
    for (path, title, result) in [
        (Path::Allow, "One hot key, allowed (arriving)", "hot_allow"),
        (Path::Deny, "One hot key, denied (arriving)", "hot_deny"),
    ] {
        let filled = Filled::new(&FIELD, Setup { path, keys: 1 });
        let threads = with_all_processors(threads);
        compare(&filled, &Workload { title, result, path, traffic: &traffic }, scale, &threads, results);
    }
}

pub(super) fn many_keys(scale: &Scale, wanted: Wanted, threads: &[usize], results: &mut Results) {
    let entrants: Vec<Entrant> =
        FIELD.into_iter().filter(|entrant| scale.coverage == Coverage::Full || entrant.name != LIMITADOR).collect();
    let make = |spread, reach| Traffic::new(KEYS, spread, reach, scale.requests);
    let filled = Filled::new(&entrants, Setup { path: Path::Allow, keys: KEYS });
    let mut allow = |title, result, traffic: Traffic| {
        let workload = Workload { title, result, path: Path::Allow, traffic: &traffic };
        compare(&filled, &workload, scale, threads, results);
    };
    if wanted.uniform {
        allow("1 million keys, uniform, allowed, arriving", "uniform", make(Spread::Uniform, Reach::Arriving));
        allow(
            "1 million keys, uniform, allowed, scattered",
            "uniform_scattered",
            make(Spread::Uniform, Reach::Scattered),
        );
    }
    if wanted.zipf {
        allow("1 million keys, zipf (s = 1), allowed, arriving", "zipf", make(Spread::Zipf, Reach::Arriving));
    }
    drop(filled);
    if wanted.uniform && scale.coverage == Coverage::Full {
        let filled = Filled::new(&entrants, Setup { path: Path::Deny, keys: KEYS });
        let traffic = make(Spread::Uniform, Reach::Arriving);
        let title = "1 million keys, uniform, denied, arriving";
        let workload = Workload { title, result: "uniform_deny", path: Path::Deny, traffic: &traffic };
        compare(&filled, &workload, scale, threads, results);
    }
}

/// A global limit and one per user on every request, by as many threads as there are processors.
pub(super) fn mixed(scale: &Scale, threads: &[usize], results: &mut Results) {
    let filled = Filled::new(&mixed::ENTRANTS, Setup { path: Path::Allow, keys: KEYS });
    let traffic = Traffic::new(KEYS, Spread::Uniform, Reach::Arriving, scale.requests);
    let title = "A global limit and one per user, 1 million users, uniform, allowed, arriving";
    let workload = Workload { title, result: "mixed", path: Path::Allow, traffic: &traffic };
    compare(&filled, &workload, scale, &with_all_processors(threads), results);
}

/// The requested thread counts, and all processors up to 16, where contention is highest.
fn with_all_processors(threads: &[usize]) -> Vec<usize> {
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MOST_THREADS);
    let more = Some(processors).filter(|processors| !threads.contains(processors));
    threads.iter().copied().chain(more).collect()
}

/// Races the contenders with each number of threads, prints the table and notes tollgate's results.
fn compare(filled: &Filled, workload: &Workload<'_>, scale: &Scale, threads: &[usize], results: &mut Results) {
    let runners = filled.runners();
    let mut header = vec![String::new()];
    let mut rows: Vec<Vec<String>> = runners.iter().map(|runner| vec![runner.name.to_string()]).collect();
    let course = |threads| Course { traffic: workload.traffic, path: workload.path, threads };
    let mut hash_only_ns = Vec::new();
    if !threads.contains(&1) {
        let alone: Vec<Runner<'_>> = filled.runners().into_iter().filter(|runner| runner.name == HASH_ONLY).collect();
        let times = race::run(&alone, &course(1), scale.rounds);
        hash_only_ns.extend(times.iter().map(|times| (1, times.median())));
    }
    for &threads in threads {
        header.extend([format!("ns, {}", plural(threads)), "ratio".to_string()]);
        let times = race::run(&runners, &course(threads), scale.rounds);
        let by_name = |name| times.iter().find(|times| times.name == name);
        let (Some(governor), Some(hash_only)) = (by_name(GOVERNOR), by_name(HASH_ONLY)) else {
            continue;
        };
        hash_only_ns.push((threads, hash_only.median()));
        for (row, times) in rows.iter_mut().zip(&times) {
            let ratio = times.ratio_to(governor);
            row.extend([format!("{:.1}", times.median()), ratio.to_string()]);
            match times.name {
                TOLLGATE => note(workload.result, threads, times, &ratio, results),
                peer @ (GOVERNOR | GCRA | THROTTLECRAB | LIMITADOR) => {
                    results.quantity(format!("{}{}_{peer}_ns", workload.result, suffix(threads)), times.median());
                }
                _ => {}
            }
        }
    }
    let mut table = Table::new(workload.title, header);
    rows.into_iter().for_each(|row| table.row(row));
    table.print();
    note_processors(workload, &hash_only_ns, results);
}

/// The hash-only floor shares nothing, so with n processors it is n times as fast as with one. If it is slower, the
/// threads shared fewer processors, and contention was not measured.
fn note_processors(workload: &Workload<'_>, hash_only_ns: &[(usize, f64)], results: &mut Results) {
    let Some((_, alone)) = hash_only_ns.iter().find(|(threads, _)| *threads == 1) else {
        return;
    };
    for &(threads, together) in hash_only_ns.iter().filter(|(threads, _)| *threads > 1) {
        let processors = alone / together;
        results.quantity(format!("{}{}_processors", workload.result, suffix(threads)), processors);
        if processors < LEAST_SHARE * threads as f64 {
            report::note(format_args!(
                "  WARNING: {threads} threads had {processors:.1} processors; that column compares nothing"
            ));
        }
    }
}

/// `uniform_vs_governor` on one thread, `uniform2t_vs_governor` on two.
fn note(workload: &str, threads: usize, times: &Times, ratio: &Ratio, results: &mut Results) {
    let suffix = suffix(threads);
    results.ratio(format!("{workload}{suffix}_vs_governor"), ratio.median);
    results.quantity(format!("{workload}{suffix}_ns"), times.median());
}

fn suffix(threads: usize) -> String {
    match threads {
        1 => String::new(),
        _ => format!("{threads}t"),
    }
}

fn plural(threads: usize) -> String {
    match threads {
        1 => "1 thread".to_string(),
        _ => format!("{threads} threads"),
    }
}
