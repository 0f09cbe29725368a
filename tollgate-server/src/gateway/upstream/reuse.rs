//! How long a connection to an upstream is reused.
//!
//! An upstream may close an idle connection at any time. A request that is sent at the same moment is lost, and one
//! that must not be repeated fails with 502. So an idle connection is given up before the upstream is expected to close
//! it.
//!
//! Deliberately not here: noticing that a connection was closed. Each type of connection does that itself.

use std::net::IpAddr;
use std::time::Duration;

use tollgate::rules::file::internal::UpstreamConnectionsRule;

use super::addresses::HostAddresses;
use crate::gateway::deadline::{Tick, Wait};

/// How much earlier than announced in `Keep-Alive: timeout=` a connection is given up, since requests and closes take
/// time to arrive. Half of the announced time if that is less.
const MARGIN: Duration = Duration::from_secs(1);

/// The bounds of a route on the reuse of connections.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct ReusePolicy {
    idle: Wait,
    max_age: Wait,
    max_requests: u32,
}

impl ReusePolicy {
    pub(in crate::gateway) fn new(rule: &UpstreamConnectionsRule) -> Self {
        Self {
            idle: Wait::at_most(rule.idle.duration()),
            max_age: Wait::at_most(rule.max_age.duration()),
            max_requests: rule.max_requests,
        }
    }
}

/// Returns whether upstreams read the bodies of requests with this method. For other methods a body has no defined
/// meaning: some upstreams ignore it, and take its bytes for the next request on the connection.
pub(in crate::gateway) fn reads_body(method: &str) -> bool {
    matches!(method, "POST" | "PUT" | "PATCH")
}

/// Whether a request that is lost with its connection can be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Repeatable {
    Yes,
    No,
}

/// The age and use of one connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct Usage {
    opened_at: Tick,
    requests: u32,
    /// The end of the last request.
    idle_since: Tick,
    /// When it is given up if no request follows.
    stale_at: Tick,
    /// The announced keep-alive time, less the margin.
    announced: Option<Wait>,
    origin: Origin,
}

/// The address of a connection, and the generation of the host's addresses when it was last checked.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct Origin {
    pub(in crate::gateway) ip: IpAddr,
    pub(in crate::gateway) generation: u64,
}

impl Usage {
    pub(in crate::gateway) fn new(now: Tick, origin: Origin) -> Self {
        Self { opened_at: now, requests: 0, idle_since: now, stale_at: Tick::MAX, announced: None, origin }
    }

    /// Returns whether its address still belongs to the host.
    pub(in crate::gateway) fn is_current(&mut self, addresses: &HostAddresses) -> bool {
        addresses.has(self.origin.ip, &mut self.origin.generation)
    }

    /// Records the values of `Keep-Alive` in a response.
    pub(in crate::gateway) fn note_keep_alive<'v>(&mut self, values: impl IntoIterator<Item = &'v [u8]>) {
        let announced = values.into_iter().filter_map(announced_timeout).min();
        self.announced = announced.or(self.announced);
    }

    /// Records the end of a response. Returns how long the connection may wait for the next request.
    pub(in crate::gateway) fn note_idle(&mut self, now: Tick, policy: &ReusePolicy) -> Wait {
        let idle = self.announced.map_or(policy.idle, |announced| announced.min(policy.idle));
        self.note_request();
        self.idle_since = now;
        self.stale_at = idle.from(now);
        idle
    }

    /// Counts a request.
    pub(in crate::gateway) fn note_request(&mut self) {
        self.requests = self.requests.saturating_add(1);
    }

    /// Prevents further requests on the connection.
    pub(in crate::gateway) fn end(&mut self) {
        self.requests = u32::MAX;
    }

    /// Returns whether it is too old to be reused, by the bounds of the last route that used it.
    pub(in crate::gateway) fn is_stale(&self, now: Tick) -> bool {
        self.stale_at <= now
    }

    /// Returns whether another request may use it.
    pub(in crate::gateway) fn allows_another(&self, now: Tick, policy: &ReusePolicy) -> bool {
        !self.is_stale(now) && policy.idle.from(self.idle_since) > now && self.is_young(now, policy)
    }

    /// Returns whether its age and number of requests allow another one.
    pub(in crate::gateway) fn is_young(&self, now: Tick, policy: &ReusePolicy) -> bool {
        policy.max_age.from(self.opened_at) > now && self.requests < policy.max_requests
    }

    /// Returns whether a request was answered on it. The upstream may be closing it just now.
    pub(in crate::gateway) fn is_used(&self) -> bool {
        self.requests > 0
    }

    /// Returns whether it has been idle for at least a tick.
    pub(in crate::gateway) fn has_been_idle(&self, now: Tick) -> bool {
        self.idle_since < now
    }
}

/// Parses the timeout of a value such as `timeout=5, max=100`, less the margin.
fn announced_timeout(value: &[u8]) -> Option<Wait> {
    let parameters = std::str::from_utf8(value).ok()?.split(',').map(str::trim);
    let seconds = parameters.filter_map(|parameter| {
        let (name, seconds) = parameter.split_once('=')?;
        let is_timeout = name.trim_end().eq_ignore_ascii_case("timeout");
        seconds.trim_start().parse::<u32>().ok().filter(|_| is_timeout)
    });
    let announced = Duration::from_secs(seconds.min()?.into());
    Some(Wait::at_most(announced - MARGIN.min(announced / 2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Tick = 10;

    fn policy() -> ReusePolicy {
        ReusePolicy::new(&UpstreamConnectionsRule::default())
    }

    fn new_usage() -> Usage {
        Usage::new(0, Origin { ip: std::net::Ipv4Addr::LOCALHOST.into(), generation: 0 })
    }

    fn used(keep_alive: &str) -> Usage {
        let mut usage = new_usage();
        usage.note_keep_alive([keep_alive.as_bytes()]);
        usage.note_idle(0, &policy());
        usage
    }

    #[test]
    fn idle_connection_is_given_up_before_the_upstream_closes_it() {
        for (keep_alive, last_use) in [
            ("", 4 * SECOND),
            ("timeout=5", 4 * SECOND),
            ("timeout=60, max=100", 4 * SECOND),
            ("max=100, Timeout = 3", 2 * SECOND),
            ("timeout=1", SECOND / 2),
            ("timeout=5, timeout=2", SECOND),
            ("timeout=soon", 4 * SECOND),
            ("xtimeout=1", 4 * SECOND),
        ] {
            let usage = used(keep_alive);
            assert!(usage.allows_another(last_use - 1, &policy()), "{keep_alive}");
            assert!(!usage.allows_another(last_use, &policy()), "{keep_alive}");
        }
        assert!(!used("timeout=0").allows_another(0, &policy()));
    }

    #[test]
    fn route_with_a_shorter_idle_time_does_not_use_what_another_route_kept() {
        let short = ReusePolicy { idle: Wait::at_most(Duration::from_secs(1)), ..policy() };
        let usage = used("");
        assert!(usage.allows_another(2 * SECOND, &policy()));
        assert!(!usage.allows_another(2 * SECOND, &short));
    }

    #[test]
    fn connection_ends_by_age_and_by_requests() {
        let age = 300 * SECOND;
        let mut usage = new_usage();
        usage.note_idle(age - 1, &policy());
        assert!(usage.allows_another(age - 1, &policy()));
        usage.note_idle(age, &policy());
        assert!(!usage.allows_another(age, &policy()));

        let mut usage = new_usage();
        (0..9_999).for_each(|_| _ = usage.note_idle(0, &policy()));
        assert!(usage.allows_another(0, &policy()));
        usage.note_idle(0, &policy());
        assert!(!usage.allows_another(0, &policy()));
    }
}
