//! What the operating system knows of the process, under the names that every exporter uses.

use std::{fmt, fs};

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::Page;

pub(super) fn write(page: &mut Page<'_>) -> fmt::Result {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    #[expect(clippy::cast_precision_loss, reason = "a process does not run for so long")]
    let seconds = used.tv_sec as f64 + used.tv_nsec as f64 / 1e9;
    page.seconds_counter("process_cpu_seconds", "Processor time used", seconds)?;
    if let Some(bytes) = resident_bytes() {
        page.gauge("process_resident_memory_bytes", "Memory in use", bytes)?;
    }
    if let Some(files) = open_files() {
        page.gauge("process_open_fds", "Files and sockets that are open", files)?;
    }
    let most = getrlimit(Resource::Nofile).current.and_then(|most| i64::try_from(most).ok());
    page.gauge("process_max_fds", "Files and sockets that may be open", most.unwrap_or(i64::MAX))
}

/// Where there is no `/proc`, this is not told.
fn resident_bytes() -> Option<i64> {
    let pages: i64 = fs::read_to_string("/proc/self/statm").ok()?.split_ascii_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(i64::try_from(rustix::param::page_size()).ok()?)
}

fn open_files() -> Option<i64> {
    let folder = "/proc/self/fd";
    // Kernels from 6.2 on know the number; before, the names have to be counted.
    let known = fs::metadata(folder).ok()?.len();
    if known > 0 {
        return i64::try_from(known).ok();
    }
    i64::try_from(fs::read_dir(folder).ok()?.count()).ok()
}
