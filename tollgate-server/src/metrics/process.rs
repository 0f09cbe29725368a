//! Process metrics, under the usual names of Prometheus client libraries.

use std::{fmt, fs};

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use tollgate_telemetry::page::Page;

pub(super) fn write(page: &mut Page<'_>) -> fmt::Result {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    #[expect(clippy::cast_precision_loss, reason = "a process does not run that long")]
    let seconds = used.tv_sec as f64 + used.tv_nsec as f64 / 1e9;
    page.seconds_counter("process_cpu_seconds", "Total user and system CPU time, in seconds", seconds)?;
    if let Some(bytes) = resident_bytes() {
        page.gauge("process_resident_memory_bytes", "Resident memory, in bytes", bytes)?;
    }
    if let Some(files) = open_files() {
        page.gauge("process_open_fds", "Open file descriptors", files)?;
    }
    if let Some(seconds) = started_at() {
        page.gauge("process_start_time_seconds", "Unix time at which the process started, in seconds", seconds)?;
    }
    let most = getrlimit(Resource::Nofile).current.and_then(|most| i64::try_from(most).ok());
    page.gauge("process_max_fds", "Maximum number of open file descriptors", most.unwrap_or(i64::MAX))
}

/// Returns `None` without `/proc`.
fn started_at() -> Option<i64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program, in parentheses, may contain spaces. Its start is the 20th field after it.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let all = fs::read_to_string("/proc/stat").ok()?;
    let booted: i64 = all.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    let after = ticks.checked_div(rustix::param::clock_ticks_per_second())?;
    booted.checked_add(i64::try_from(after).ok()?)
}

/// Returns `None` without `/proc`.
fn resident_bytes() -> Option<i64> {
    let pages: i64 = fs::read_to_string("/proc/self/statm").ok()?.split_ascii_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(i64::try_from(rustix::param::page_size()).ok()?)
}

fn open_files() -> Option<i64> {
    let folder = "/proc/self/fd";
    // Kernels from 6.2 on report the number as the size; older ones need a count of the entries.
    let known = fs::metadata(folder).ok()?.len();
    if known > 0 {
        return i64::try_from(known).ok();
    }
    i64::try_from(fs::read_dir(folder).ok()?.count()).ok()
}
