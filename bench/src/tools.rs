//! `bench tools`: the tools that need no server, run as their users run them.
//!
//! Deliberately not here: peers. None replays a log through limits.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, Zipf};

use crate::clock;
use crate::cores::pinned;
use crate::programs::build_tollgate;
use crate::report::{self, Results, Table};

/// Three limits, of which two count by client.
const RULES: &str = "\
limits:
  - { name: global, limit: 100000, window: 1m }
  - { name: per-client, key: ip, algorithm: token_bucket, capacity: 100, refill: 5/s }
  - { name: api, match: { path: /api/** }, key: [ip, path], algorithm: fixed_window, limit: 60, window: 1m }
";
/// 2024-03-12.
const START_SECONDS: u64 = 1_710_201_600;
const LINES_PER_SECOND: u64 = 2_000;
const AGENTS: [&str; 3] = [
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/122.0.0.0 Safari/537.36",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 17_3 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/17.3",
    "curl/8.5.0",
];
const PATHS: [&str; 5] = [
    "/",
    "/api/v1/items?page=2",
    "/api/v1/items/4711",
    "/static/app.3f2a1b.js",
    "/api/v1/search?q=red+shoes&sort=price",
];
/// The traffic of the simulation: a million requests.
const SIMULATED: [&str; 7] = ["simulate", "--traffic", "steady", "--rate", "10000/s", "--for", "100s"];
const POLL_EVERY: Duration = Duration::from_millis(5);

/// Tools: lines per second of `tollgate replay`, and the time of a million requests in `tollgate simulate`.
///
/// The log is in the Combined Log Format, with clients in a Zipf distribution, and is written before the measurement. Three
/// limits apply. Each program runs on one processor; the best of the rounds counts, because other processes can only make
/// it slower.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// Lines of the log
    #[arg(long, default_value_t = 2_000_000)]
    lines: u64,
    /// Clients of the log
    #[arg(long, default_value_t = 100_000)]
    clients: u32,
    /// Rounds
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// A built tollgate, instead of the one of this workspace
    #[arg(long, value_name = "PATH")]
    tollgate: Option<PathBuf>,
}

/// One run of a program.
struct Run {
    seconds: f64,
    peak_kb: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let tollgate = args.tollgate.clone().map_or_else(build_tollgate, Ok)?;
    let folder = tempfile::tempdir().context("no folder for the log")?;
    fs::write(folder.path().join("tollgate.yaml"), RULES)?;
    let bytes = write_log(&folder.path().join("access.log"), args)?;
    let replay = best(args.rounds, || {
        measure(&tollgate, folder.path(), &["replay", "--config", "tollgate.yaml", "access.log"])
    })?;
    let simulate = best(args.rounds, || measure(&tollgate, folder.path(), &SIMULATED))?;
    let per_second = args.lines as f64 / replay.seconds;
    let mut table = Table::new("Tools, on one processor", ["", "seconds", "lines/s", "MB/s", "peak MB"]);
    table.row([
        format!("replay, {} lines of {} clients, three limits", args.lines, args.clients),
        format!("{:.2}", replay.seconds),
        format!("{per_second:.0}"),
        format!("{:.0}", bytes as f64 / replay.seconds / 1e6),
        format!("{:.0}", replay.peak_kb as f64 * 1.024 / 1e3),
    ]);
    table.row([
        "simulate, a million requests, five algorithms".to_owned(),
        format!("{:.2}", simulate.seconds),
        "-".to_owned(),
        "-".to_owned(),
        format!("{:.0}", simulate.peak_kb as f64 * 1.024 / 1e3),
    ]);
    table.print();
    report::note("");
    let mut results = Results::default();
    results.quantity("replay_lines_per_s", per_second);
    results.quantity("replay_peak_mb", replay.peak_kb as f64 * 1.024 / 1e3);
    results.ratio("simulate_million_s", simulate.seconds);
    results.print();
    Ok(())
}

fn best(rounds: usize, measure: impl Fn() -> anyhow::Result<Run>) -> anyhow::Result<Run> {
    let mut best = measure()?;
    for _ in 1..rounds {
        let run = measure()?;
        let peak_kb = best.peak_kb.max(run.peak_kb);
        best = Run { seconds: best.seconds.min(run.seconds), peak_kb };
    }
    Ok(best)
}

/// Runs a command of tollgate on one processor.
fn measure(tollgate: &Path, folder: &Path, arguments: &[&str]) -> anyhow::Result<Run> {
    let mut command = pinned(0..1, tollgate);
    command.args(arguments).current_dir(folder).stdout(Stdio::null()).stderr(Stdio::piped());
    let began = clock::now();
    let mut process = command.spawn().context("taskset could not be started")?;
    let mut peak_kb = 0;
    let status = loop {
        let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap_or_default();
        let peak =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        peak_kb = peak_kb.max(peak.unwrap_or(0));
        match process.try_wait()? {
            Some(status) => break status,
            None => clock::pause(POLL_EVERY),
        }
    };
    let seconds = (clock::now() - began).as_secs_f64();
    let output = process.wait_with_output()?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(status.success(), "tollgate {} failed: {}", arguments.join(" "), problem.trim());
    Ok(Run { seconds, peak_kb })
}

/// Writes the log. Returns its size.
fn write_log(path: &Path, args: &Args) -> anyhow::Result<u64> {
    let mut random = SmallRng::seed_from_u64(1);
    let zipf = Zipf::new(f64::from(args.clients), 1.0).context("there is no client")?;
    let mut log = BufWriter::new(File::create(path)?);
    for line in 0..args.lines {
        let seconds = START_SECONDS % 86_400 + line / LINES_PER_SECOND;
        let (day, of_day) = (12 + seconds / 86_400, seconds % 86_400);
        let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
        // Client numbers are spread over the addresses of 10.0.0.0/8 and others.
        let client = (zipf.sample(&mut random) as u32).wrapping_mul(2_654_435_761).to_be_bytes();
        let [a, b, c, d] = client;
        let path = PATHS[random.random_range(0..PATHS.len())];
        let agent = AGENTS[random.random_range(0..AGENTS.len())];
        let bytes: u32 = random.random_range(200..20_000);
        writeln!(
            log,
            "{a}.{b}.{c}.{d} - - [{day:02}/Mar/2024:{hour:02}:{minute:02}:{second:02} +0000] \"GET {path} HTTP/1.1\" \
             200 {bytes} \"https://www.example.com/\" \"{agent}\""
        )?;
    }
    log.flush()?;
    Ok(fs::metadata(path)?.len())
}
