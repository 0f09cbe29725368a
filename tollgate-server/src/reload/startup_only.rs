//! Settings that only take effect at start: the layout of the gateway.

use std::time::Duration;

use tollgate::rules::file::RuleFile;
use tollgate::rules::file::internal::{Address, GatewayRule};

use crate::notice;

/// Settings from the command line, which override the rule file.
#[derive(Clone, Debug, Default)]
pub(crate) struct CliOverrides {
    pub(crate) http: Option<Address>,
    pub(crate) admin: Option<Address>,
    pub(crate) store: Option<String>,
}

/// The settings of a rule file that need a restart.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartupOnly {
    gateway: Option<Layout>,
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    workers: Option<u16>,
    max_connections: Option<u32>,
    max_buffered: Option<u64>,
    drain: Duration,
}

impl StartupOnly {
    pub(super) fn of(file: &RuleFile) -> Self {
        Self { gateway: file.gateway.as_ref().map(Layout::of) }
    }

    /// Warns about changes from `before` to `after` that need a restart. A change back to the settings in force
    /// (`self`) needs none.
    pub(super) fn warn_of_changes(&self, before: &Self, after: &Self) {
        for (name, differs) in FIELDS {
            if differs(before, after) && differs(self, after) {
                notice::warn(format_args!("{name} has changed: restart the server to apply it"));
            }
        }
    }
}

impl Layout {
    fn of(gateway: &GatewayRule) -> Self {
        let GatewayRule { workers, max_connections, max_buffered, timeouts, .. } = gateway;
        Self {
            workers: *workers,
            max_connections: *max_connections,
            max_buffered: max_buffered.map(|size| size.bytes()),
            drain: timeouts.drain.duration(),
        }
    }
}

/// Returns whether two differ in one setting.
type Differs = fn(&StartupOnly, &StartupOnly) -> bool;

const FIELDS: [(&str, Differs); 5] = [
    ("gateway", |one, other| one.gateway.is_some() != other.gateway.is_some()),
    ("gateway.workers", |one, other| differ(one, other, |layout| layout.workers)),
    ("gateway.max_connections", |one, other| differ(one, other, |layout| layout.max_connections)),
    ("gateway.max_buffered", |one, other| differ(one, other, |layout| layout.max_buffered)),
    ("gateway.timeouts.drain", |one, other| differ(one, other, |layout| layout.drain)),
];

/// Returns `false` if one of them has no gateway: that is reported by its own entry.
fn differ<T: PartialEq>(one: &StartupOnly, other: &StartupOnly, part: impl Fn(Layout) -> T) -> bool {
    one.gateway.zip(other.gateway).is_some_and(|(one, other)| part(one) != part(other))
}
