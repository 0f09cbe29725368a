//! `tollgate replay`: shows what limits would have done to the requests of access logs.
//!
//! Exits with 1 if a threshold is crossed, and with 2 if it cannot be judged or no request could be read.

pub(super) mod suggest;

use std::io::{IsTerminal as _, stderr};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use tollgate_config::Parsed;
use tollgate_telemetry::notice;
use tollgate_telemetry::words::counted;
use tollgate_tools::access_log::{AccessLog, Format, HeaderField, Mappings};
use tollgate_tools::replay::{NamedFile, Replay, ReportOptions, Threshold, Verdict};

use super::{Completion, Error, load_once, print, whole_number};

/// Requests between two updates of the progress bar.
const UPDATE_EVERY: u64 = 1 << 14;

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate replay --config tollgate.yaml access.log
  tollgate replay --config tollgate.yaml /var/log/nginx/access.log*
  tollgate replay --config new.yaml --against tollgate.yaml --fail-if 'newly_denied>0.1%' access.log.gz
  tollgate replay --config tollgate.yaml --map header:x-user-id=user access.log
  tollgate replay --suggest --cover 99.9% access.log
  kubectl logs deploy/web | tollgate replay --config tollgate.yaml -

Logs are read as they are: Common and Combined Log Format, JSON lines of nginx, Envoy, Caddy, Traefik and Tollgate, and
access logs of AWS load balancers, plain or compressed with gzip or zstd.";

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Rule file
    #[arg(long, value_name = "FILE", required_unless_present = "suggest")]
    config: Option<PathBuf>,
    /// Log files; - is stdin
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// Rule file to compare with
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Exit with 1 if this is true, such as 'denied>1%', 'denied:per-ip>100', 'clients>0.1%' or 'newly_denied>0';
    /// repeatable
    #[arg(long, value_name = "THRESHOLD")]
    fail_if: Vec<Threshold>,
    /// Format of the logs, which is recognized otherwise
    #[arg(long)]
    format: Option<Format>,
    /// Field that holds a header, such as header:x-user-id=user; repeatable
    #[arg(long = "map", value_name = "header:NAME=FIELD")]
    maps: Vec<HeaderField>,
    /// Number of keys to list as the most limited
    #[arg(long, value_name = "NUMBER", default_value_t = 10, value_parser = whole_number(0..=1000_u16))]
    top: u16,
    #[command(flatten)]
    suggest: suggest::Options,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> Result<Completion, Error> {
    let mappings = Mappings::new(arguments.maps.clone());
    let Some(path) = &arguments.config else {
        let Arguments { suggest: options, logs, format, json, .. } = arguments;
        return suggest::run(options, logs, *format, mappings, *json);
    };
    let config = load_once(path)?;
    let against = arguments.against.as_deref().map(load_once).transpose()?;
    arguments.check(&config)?;
    let mut replay = Replay::new(&config, against.as_ref()).map_err(Error::Open)?;
    let log = AccessLog::open(&arguments.logs, arguments.format, mappings);
    let mut log = log.map_err(|error| Error::Usage(error.to_string()))?;
    let progress = progress(&log);
    while let Some(record) = log.next_record() {
        replay.add(record);
        if replay.requests() % UPDATE_EVERY == 0 {
            progress.set_position(log.read_bytes());
        }
    }
    progress.finish_and_clear();
    if replay.requests() == 0 {
        return Err(Error::Usage(nothing_read(&log)));
    }
    let options = ReportOptions {
        config: NamedFile { path, file: &config },
        against: arguments.against.as_deref().zip(against.as_ref()).map(|(path, file)| NamedFile { path, file }),
        thresholds: &arguments.fail_if,
        top: arguments.top.into(),
    };
    let report = replay.report(&log, &options);
    if arguments.json {
        report.warnings().iter().for_each(notice::warn);
        print(serde_json::to_string_pretty(&report).unwrap_or_default())?;
    } else {
        print(report.to_string().trim_end())?;
    }
    match report.verdict() {
        Verdict::Within => Ok(Completion::Positive),
        Verdict::Crossed => Ok(Completion::Negative),
        Verdict::Unknown(why) => Err(Error::Usage(format!("--fail-if cannot be judged: {why}"))),
    }
}

impl Arguments {
    fn check(&self, config: &Parsed) -> Result<(), Error> {
        if self.logs.iter().filter(|path| *path == Path::new("-")).count() > 1 {
            return Err(Error::Usage("stdin is named twice: write - once".to_owned()));
        }
        for threshold in &self.fail_if {
            if threshold.is_comparison() && self.against.is_none() {
                return Err(Error::Usage(format!(
                    "--fail-if '{threshold}' compares two rule files: name the other rules with --against FILE"
                )));
            }
            if let Some(limit) = threshold.limit()
                && !config.limits.iter().any(|one| one.name.as_str() == limit)
            {
                let names: Vec<&str> = config.limits.iter().map(|limit| limit.name.as_str()).collect();
                let names = notice::join_up_to(&names, 10);
                return Err(Error::Usage(format!(
                    "--fail-if '{threshold}' names no limit of the file: use one of {names}"
                )));
            }
        }
        Ok(())
    }
}

/// Shows the progress on a terminal.
fn progress(log: &AccessLog) -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template = match log.total_bytes() {
        Some(_) => "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        None => "{spinner} {bytes}, {bytes_per_sec}",
    };
    let bar = log.total_bytes().map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Describes logs without any request.
fn nothing_read(log: &AccessLog) -> String {
    let lines: u64 = log.files().map(|file| file.lines).sum();
    if let Some((path, problem)) = log.files().find_map(|file| Some((&file.path, file.problem.as_ref()?))) {
        return format!(
            "no request could be read from {} ({problem}): check that the file is complete",
            path.display()
        );
    }
    if lines == 0 {
        return "the log is empty: name a file that has requests".to_owned();
    }
    let shown = log.files().find_map(|file| {
        let line = file.bad_lines.first()?;
        Some(format!(" (line {} of {}: {})", line.number, file.path.display(), line.text))
    });
    let lines = counted(lines, "line", "lines");
    format!(
        "none of {lines} is a request in a known format{}: see `tollgate replay --help` for the formats, or convert \
         the log to JSON lines with time, client_ip, method, path and status",
        shown.unwrap_or_default()
    )
}
