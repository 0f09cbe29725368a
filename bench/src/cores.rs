//! The assignment of processors to the contender, the upstream and the load.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Enough to keep the fastest contender busy.
const MOST_FOR_LOAD: usize = 4;

/// The processors of this machine. The first is for the contender alone. With two, the load and the upstream share the
/// second.
#[derive(Clone, Copy)]
pub(crate) struct Cores {
    all: usize,
}

impl Cores {
    pub(crate) fn of_this_machine() -> anyhow::Result<Self> {
        let all = std::thread::available_parallelism()?.get();
        ensure!(all >= 2, "one core is not enough; the contender needs its own");
        Ok(Self { all })
    }

    pub(crate) fn contender(self) -> Range<usize> {
        0..1
    }

    pub(crate) fn upstream(self) -> Range<usize> {
        1..2
    }

    /// The processors of the load: several where possible, in a number that divides the connections evenly. A load that
    /// is slower than the contender lets it sleep between requests, and waking up costs the contender processor time.
    pub(crate) fn load(self) -> Range<usize> {
        match self.all - 2 {
            0 => 1..2,
            left => 2..2 + (1 << left.min(MOST_FOR_LOAD).ilog2()),
        }
    }
}

/// Returns a command that runs only on these processors.
pub(crate) fn pinned(cores: Range<usize>, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &format!("{}-{}", cores.start, cores.end - 1)]).arg(program).stdin(Stdio::null());
    command
}

/// Pins this thread to these processors.
pub(crate) fn stay_on(cores: Range<usize>) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    cores.for_each(|core| set.set(core));
    sched_setaffinity(None, &set).context("this program cannot be pinned to the cores of the load")
}

/// Returns the busy time of a core so far, for all processes.
pub(crate) fn worked(core: usize) -> anyhow::Result<Duration> {
    let stat = fs::read_to_string("/proc/stat")?;
    let name = format!("cpu{core}");
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    let (_, fields) = lines.find(|(core, _)| *core == name).context("/proc/stat has no line for this core")?;
    let ticks: Option<Vec<u64>> = fields.split(' ').take(8).map(|field| field.parse().ok()).collect();
    match ticks.as_deref() {
        Some(&[user, nice, system, _idle, _io_wait, hard, soft, stolen]) => {
            Ok(time_of(user + nice + system + hard + soft + stolen))
        }
        _ => bail!("/proc/stat has another form here"),
    }
}

/// Converts kernel ticks to a duration.
pub(crate) fn time_of(ticks: u64) -> Duration {
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_takes_what_the_others_leave() {
        let loads = [2, 3, 4, 5, 6, 16].map(|all| Cores { all }.load());
        assert_eq!(loads, [1..2, 2..3, 2..4, 2..4, 2..6, 2..6]);
    }
}
