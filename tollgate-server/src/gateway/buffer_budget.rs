//! A budget for bytes of bodies that one side has sent and the other side has not read, for all connections together.
//!
//! Each body has its own bound, but a client decides how many bodies it starts. So all of them share one bound,
//! `max_buffered`. Up to half of it, everything is buffered. Beyond that, a connection is refused more than an equal
//! share of the other half: a connection that holds much cannot grow, and one that holds little is still served. The
//! total never exceeds the bound.
//!
//! Where a library does not report how much it buffers, its maximum is counted. A body is counted in steps of
//! [`STEP_BYTES`], so that short bodies, which are the most common, do not contend for a counter.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// The assumed memory where the system does not report it.
const UNKNOWN_MEMORY_BYTES: u64 = 2 << 30;

/// Bodies are counted in whole steps. A request itself takes more memory than this, so the remainder does not matter.
pub(super) const STEP_BYTES: usize = 4 << 10;

/// The buffered bytes of all workers.
#[derive(Debug)]
pub(super) struct BufferBudget {
    used: AtomicI64,
    /// Half of `max_buffered`.
    half: i64,
    /// Open client connections.
    connections: Arc<AtomicI64>,
    refused: AtomicU64,
}

/// The budget is used up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Overloaded;

impl BufferBudget {
    /// Creates the budget. The default is half of the memory available to the process.
    pub(super) fn new(max_buffered: Option<u64>, connections: &Arc<AtomicI64>) -> Self {
        let most = max_buffered.unwrap_or_else(|| memory_bytes().unwrap_or(UNKNOWN_MEMORY_BYTES) / 2);
        Self {
            used: AtomicI64::new(0),
            half: i64::try_from(most / 2).unwrap_or(i64::MAX / 2),
            connections: Arc::clone(connections),
            refused: AtomicU64::new(0),
        }
    }

    /// Returns the number of buffered bytes.
    pub(super) fn used(&self) -> i64 {
        self.used.load(Relaxed)
    }

    /// Returns how many bodies were refused or cut off because the budget was used up.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Adjusts the number of bytes that a connection holds.
    pub(super) fn adjust(&self, own: &AtomicI64, bytes: i64) -> Result<(), Overloaded> {
        if bytes > 0 {
            let share = self.half / self.connections.load(Relaxed).max(1);
            let is_small = own.load(Relaxed) + bytes <= share;
            let taken = self.used.fetch_update(Relaxed, Relaxed, |used| {
                let used = used + bytes;
                // Shares shrink as connections are opened, so shares alone do not keep the total within the bound.
                (used <= self.half || (is_small && used <= 2 * self.half)).then_some(used)
            });
            if taken.is_err() {
                self.refused.fetch_add(1, Relaxed);
                return Err(Overloaded);
            }
        } else {
            self.used.fetch_add(bytes, Relaxed);
        }
        own.fetch_add(bytes, Relaxed);
        Ok(())
    }
}

/// Returns the memory available to the process: the lowest limit of its control groups, or the machine's memory.
fn memory_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_group = group_limits(&groups).into_iter();
    let of_group = of_group.filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok()).min();
    let of_machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
    });
    of_group.into_iter().chain(of_machine).min()
}

/// Returns the files that may hold the memory limit of the control groups in a `/proc/PID/cgroup`, for both versions.
/// The root is always included: a container may find its own group there although its path is the one on the host.
fn group_limits(groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines().chain(["0::/", "0:memory:/"]) {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (mount, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|one| one == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let ancestors = Path::new(group.trim_start_matches('/')).ancestors();
        files.extend(ancestors.map(|group| Path::new(mount).join(group).join(file)));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_half_only_small_holders_grow_and_the_bound_holds() {
        const MOST: i64 = 1000;
        let budget = BufferBudget::new(Some(MOST as u64), &Arc::new(AtomicI64::new(10)));
        let own: Vec<AtomicI64> = (0..10).map(|_| AtomicI64::new(0)).collect();
        assert!(budget.adjust(&own[0], 500).is_ok(), "half is for everybody");
        assert!(budget.adjust(&own[0], 1).is_err(), "a connection that holds much does not grow");
        for other in &own[1..] {
            assert!(budget.adjust(other, 50).is_ok(), "one that holds little is served on");
            assert!(budget.adjust(other, 1).is_err());
        }
        assert!(budget.used() <= MOST);
        assert_eq!((budget.used(), budget.refused()), (950, 10));
        assert!(budget.adjust(&own[0], -500).is_ok());
        assert!(budget.adjust(&own[1], 40).is_ok(), "there is room again");
    }

    #[test]
    fn limits_of_the_group_and_of_those_above_it_count() {
        let files = |groups: &str| -> Vec<String> {
            group_limits(groups).iter().map(|path| path.display().to_string()).collect()
        };
        let version_2 = files("0::/system.slice/tollgate.service\n");
        assert_eq!(version_2[0], "/sys/fs/cgroup/system.slice/tollgate.service/memory.max");
        assert_eq!(version_2[1], "/sys/fs/cgroup/system.slice/memory.max");
        assert_eq!(version_2[2], "/sys/fs/cgroup/memory.max");
        let version_1 = files("5:cpu,cpuacct:/a\n4:memory:/a:b\n");
        assert_eq!(version_1[0], "/sys/fs/cgroup/memory/a:b/memory.limit_in_bytes");
        assert!(files("").contains(&"/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned()));
    }

    #[test]
    fn the_memory_of_this_machine_is_known() {
        assert!(memory_bytes().is_some_and(|bytes| bytes > 16 << 20));
    }
}
