//! Measurements that need a separate process, so that memory and allocator pauses of other contenders do not distort
//! them. The parent starts this same program, which prints its figures.
//!
//! Memory is the resident memory of the process. There is no counting allocator: in the tables of decisions it would
//! slow down the peers that allocate on every request.

use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use clap::Subcommand;
use hdrhistogram::Histogram;

use crate::clock::Ticker;
use crate::contender::{self, Entrant, Path, Setup};
use crate::report;
use crate::traffic;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Fill with keys and print the memory used
    Footprint {
        name: String,
        keys: usize,
        /// Requests per key; more than one to fill logs
        requests: usize,
    },
    /// Fill with keys one by one and print the times of the decisions
    Growth { name: String, from: usize, to: usize },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.task {
        Task::Footprint { name, keys, requests } => footprint(entrant(name)?, *keys, *requests),
        Task::Growth { name, from, to } => growth(entrant(name)?, *from, *to),
    }
}

/// Runs a task in a new process and returns its output.
pub(super) fn start<A: ToString>(task: &str, name: &str, numbers: &[A]) -> anyhow::Result<String> {
    let program = std::env::current_exe().context("this program cannot find itself to start a child")?;
    let mut command = Command::new(program);
    command.args(["memory-child", task, name]).args(numbers.iter().map(ToString::to_string));
    let output = command.output().with_context(|| format!("{task} of {name} could not be started"))?;
    if !output.status.success() {
        bail!("{task} of {name} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn entrant(name: &str) -> anyhow::Result<Entrant> {
    contender::by_name(name).with_context(|| format!("there is no contender `{name}`"))
}

fn footprint(entrant: Entrant, keys: usize, requests: usize) -> anyhow::Result<()> {
    let mut key = traffic::name(keys);
    let before = Memory::read()?;
    let contender = (entrant.build)(Setup { path: Path::Allow, keys });
    // Round by round over all keys, so that the entries of a log have different times.
    for request in 0..requests {
        for id in 0..keys {
            traffic::write_name(&mut key, id);
            if request == 0 {
                entrant.prime(contender.as_ref(), Path::Allow, &key);
            } else {
                ensure!(contender.decide(&key), "{} denied {key} before its limit", entrant.name);
            }
        }
    }
    let after = Memory::read()?;
    report::print_figure("resident", after.resident_bytes.saturating_sub(before.resident_bytes));
    report::print_figure("peak", after.peak_bytes.saturating_sub(before.resident_bytes));
    if let Some(bytes) = contender.claimed_bytes() {
        report::print_figure("claimed", bytes as u64);
    }
    Ok(())
}

fn growth(entrant: Entrant, from: usize, to: usize) -> anyhow::Result<()> {
    let contender = (entrant.build)(Setup { path: Path::Allow, keys: from });
    let clock = Ticker::new();
    let mut nanos: Histogram<u64> = Histogram::new(3)?;
    let mut longest_at = from;
    let mut key = traffic::name(to);
    for id in 0..from {
        traffic::write_name(&mut key, id);
        entrant.prime(contender.as_ref(), Path::Allow, &key);
    }
    for id in from..to {
        traffic::write_name(&mut key, id);
        let began = clock.ticks();
        entrant.prime(contender.as_ref(), Path::Allow, &key);
        let took = clock.nanos(began, clock.ticks());
        if took > nanos.max() {
            longest_at = id;
        }
        nanos.record(took)?;
    }
    for (name, share) in [("p50", 0.5), ("p99", 0.99), ("p9999", 0.9999)] {
        report::print_figure(name, nanos.value_at_quantile(share));
    }
    report::print_figure("longest", nanos.max());
    report::print_figure("longest_at", longest_at as u64);
    Ok(())
}

/// The resident memory of this process.
struct Memory {
    resident_bytes: u64,
    /// The most that was ever resident.
    peak_bytes: u64,
}

impl Memory {
    fn read() -> anyhow::Result<Self> {
        const PATH: &str = "/proc/self/status";
        let status = std::fs::read_to_string(PATH).with_context(|| format!("{PATH} is needed: run on Linux"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|rest| rest.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok());
            kib.map(|kib| kib * 1024).with_context(|| format!("{PATH} has no {name}"))
        };
        Ok(Self { resident_bytes: field("VmRSS")?, peak_bytes: field("VmHWM")? })
    }
}
