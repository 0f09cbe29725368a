//! Closed-loop load, as fast as responses arrive: wrk over HTTP/1.1, h2load over HTTP/2. Both keep 64 requests in
//! flight.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use super::peers::Programs;
use crate::cores::{Cores, pinned};
use crate::race;

/// Users that send requests in turn over HTTP/1.1. h2load has one set of headers, so over HTTP/2 there is one user.
pub(super) const USERS: usize = 8;
/// Requests under way at a time.
pub(super) const CONNECTIONS: usize = 64;
const HTTP2_CONNECTIONS: usize = 8;
/// The time a load may take beyond its length before it is killed.
const GRACE: Duration = Duration::from_secs(15);
/// Requests of each user that an exhausted limit may allow: one unit is refilled per minute.
const STRAY_ANSWERS: u64 = 2 * USERS as u64;

/// The result of a load.
pub(super) struct Load {
    pub(super) requests: u64,
    pub(super) elapsed: Duration,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Responses with a status of 400 or above.
    pub(super) refused: u64,
    /// Requests without a response.
    pub(super) failed: u64,
}

impl Load {
    /// Fails if responses were wrong.
    pub(super) fn check(&self, status: u16) -> anyhow::Result<()> {
        let Self { requests, refused, failed, .. } = self;
        ensure!(*failed == 0, "{failed} of {requests} requests had no answer");
        ensure!(*requests > 0, "no request was answered");
        let wrong = if status < 400 { *refused } else { (requests - refused).saturating_sub(STRAY_ANSWERS) };
        ensure!(wrong == 0, "{wrong} of {requests} answers had another status than {status}");
        Ok(())
    }
}

/// The load generators.
pub(super) struct Generators {
    wrk: PathBuf,
    h2load: PathBuf,
    cores: Cores,
    folder: TempDir,
}

impl Generators {
    pub(super) fn new(programs: &Programs, cores: Cores) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("users.lua"), include_str!("users.lua"))?;
        Ok(Self { wrk: programs.wrk.clone(), h2load: programs.h2load.clone(), cores, folder })
    }

    fn bounded(&self, program: &Path, seconds: u64) -> Command {
        let mut command = pinned(self.cores.load(), Path::new("timeout"));
        command.arg((seconds + GRACE.as_secs()).to_string()).arg(program);
        command
    }

    /// One for each core.
    fn threads(&self) -> String {
        format!("-t{}", self.cores.load().len())
    }

    /// wrk accepts only whole seconds.
    pub(super) fn wrk(&self, address: SocketAddr, path: &str, seconds: u64) -> anyhow::Result<Load> {
        let mut command = self.bounded(&self.wrk, seconds);
        command.args([&self.threads(), &format!("-c{CONNECTIONS}"), &format!("-d{seconds}"), "-s"]);
        command.arg(self.folder.path().join("users.lua")).arg(format!("http://{address}{path}"));
        command.args(["--", &USERS.to_string()]);
        let printed = run(command, "wrk")?;
        let line = printed.lines().find_map(|line| line.strip_prefix("LOAD ")).context("wrk printed no figures")?;
        let figures: Option<Vec<f64>> = line.split_whitespace().map(|figure| figure.parse().ok()).collect();
        match figures.as_deref() {
            Some(&[requests, elapsed_us, p50_us, p99_us, refused, failed]) => Ok(Load {
                requests: requests as u64,
                elapsed: Duration::from_secs_f64(elapsed_us / 1e6),
                p50_us,
                p99_us,
                refused: refused as u64,
                failed: failed as u64,
            }),
            _ => anyhow::bail!("wrk printed its figures in another form: {line}"),
        }
    }

    /// h2load prints no percentiles; its log has every request.
    pub(super) fn h2load(&self, address: SocketAddr, path: &str, seconds: u64) -> anyhow::Result<Load> {
        let log = self.folder.path().join("h2load.tsv");
        // h2load appends to its log.
        let _ = fs::remove_file(&log);
        let streams = CONNECTIONS / HTTP2_CONNECTIONS;
        let mut command = self.bounded(&self.h2load, seconds);
        command.args([
            &self.threads(),
            &format!("-c{HTTP2_CONNECTIONS}"),
            &format!("-m{streams}"),
            &format!("-D{seconds}"),
        ]);
        command.arg(format!("--log-file={}", log.display())).args(["-H", "x-user-id: user-1"]);
        command.arg(format!("http://{address}{path}"));
        let printed = run(command, "h2load")?;
        let (statuses, micros) = read_log(&log)?;
        let failed =
            figure_before(&printed, "requests: ", " failed")? + figure_before(&printed, "requests: ", " errored")?;
        Ok(Load {
            requests: statuses.len() as u64,
            elapsed: Duration::from_secs(seconds),
            p50_us: race::quantile(micros.clone(), 0.5),
            p99_us: race::quantile(micros, 0.99),
            refused: statuses.iter().filter(|status| **status >= 400).count() as u64,
            failed,
        })
    }

    /// Sends one request over HTTP/2 and returns the length of the body, which must have status 200.
    pub(super) fn probe_http2(&self, address: SocketAddr, path: &str) -> anyhow::Result<usize> {
        let mut command = self.bounded(&self.h2load, 1);
        command.args(["-t1", "-c1", "-n1", "-H", "x-user-id: user-1"]).arg(format!("http://{address}{path}"));
        let printed = run(command, "h2load")?;
        ensure!(
            figure_before(&printed, "status codes: ", " 2xx")? == 1,
            "one request over HTTP/2 was not answered with 200"
        );
        Ok(figure_before(&printed, "traffic: ", ") data")? as usize)
    }
}

pub(crate) fn run(mut command: Command, name: &str) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("{name} could not be started"))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{name} failed: {printed}{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(printed)
}

/// Returns the number right before `unit` in the line of h2load's output that starts with `line`.
pub(crate) fn figure_before(printed: &str, line: &str, unit: &str) -> anyhow::Result<u64> {
    let found =
        printed.lines().find_map(|printed| printed.strip_prefix(line)).and_then(|printed| printed.split_once(unit));
    let digits = found.map(|(before, _)| before.rsplit(|char: char| !char.is_ascii_digit()).next().unwrap_or(""));
    digits.and_then(|digits| digits.parse().ok()).with_context(|| format!("h2load did not print `{line}…{unit}`"))
}

/// Parses a line of h2load's log: start, status and microseconds, separated by tabs.
pub(crate) fn read_log(log: &Path) -> anyhow::Result<(Vec<u16>, Vec<f64>)> {
    let log = fs::read_to_string(log).context("h2load wrote no log")?;
    let fields = |line: &str| {
        let mut fields = line.split('\t').skip(1);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    let requests: Option<Vec<(u16, f64)>> = log.lines().map(fields).collect();
    Ok(requests.context("h2load's log has another form here")?.into_iter().unzip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_h2load_stand_before_their_units() {
        let printed = "requests: 10 total, 10 started, 10 done, 9 succeeded, 1 failed, 0 errored, 0 timeout\n\
                    traffic: 1.05KB (1077) total, 22B (22) headers (space savings 90.00%), 1.00KB (1024) data\n";
        assert_eq!(figure_before(printed, "requests: ", " failed").unwrap(), 1);
        assert_eq!(figure_before(printed, "traffic: ", ") data").unwrap(), 1024);
        assert!(figure_before(printed, "status codes: ", " 2xx").is_err());
    }

    fn load(requests: u64, refused: u64) -> Load {
        let elapsed = Duration::from_secs(1);
        Load { requests, elapsed, p50_us: 1.0, p99_us: 1.0, refused, failed: 0 }
    }

    #[test]
    fn a_load_with_answers_of_another_status_is_refused() {
        assert!(load(1000, 0).check(200).is_ok());
        assert!(load(1000, 1).check(200).is_err());
        assert!(load(1000, 1000 - STRAY_ANSWERS).check(429).is_ok());
        assert!(load(1000, 999 - STRAY_ANSWERS).check(429).is_err());
    }
}
