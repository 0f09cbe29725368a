//! Open connections by client address, so that one client cannot use up `max_connections`.
//!
//! IPv6 addresses are counted by their /64, as keys are: a subscriber gets a whole /64. Trusted proxies are not
//! counted, since they serve many clients.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

use tollgate_net::deadline::Tick;
use tollgate_telemetry::notice;

use super::tally::LogThrottle;

/// The number of shards, so that workers rarely contend for a lock.
const SHARDS: usize = 16;

/// The default is a quarter of all connections: no client can block the others, and an office or a mobile carrier
/// behind one address has room.
const SHARE: u32 = 4;

/// The minimum of the default, for load balancers that are not configured as trusted proxies. One address never gets
/// more than half of all connections.
const LEAST: u32 = 64;

/// The open connections of all workers, by address.
#[derive(Debug)]
pub(super) struct PerAddress {
    shards: [Mutex<HashMap<IpAddr, u32>>; SHARDS],
    /// The default maximum per address.
    default: u32,
    refusals: LogThrottle,
}

impl PerAddress {
    /// Creates the counters for a gateway with this many connections in all.
    pub(super) fn new(max_connections: i64) -> Self {
        let connections = u32::try_from(max_connections).unwrap_or(u32::MAX);
        let most = (connections / 2).max(1);
        Self {
            shards: Default::default(),
            default: (connections / SHARE).max(LEAST).min(most),
            refusals: LogThrottle::default(),
        }
    }

    /// Counts a connection until the guard is dropped. Returns `None` if the address already has `most`, or the
    /// default.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, most: Option<u32>) -> Option<Counted> {
        let group = group(address);
        let mut shard = self.shard(group).lock().unwrap_or_else(PoisonError::into_inner);
        let open = shard.entry(group).or_default();
        if *open >= most.unwrap_or(self.default) {
            if *open == 0 {
                shard.remove(&group);
            }
            return None;
        }
        *open += 1;
        Some(Counted { all: Arc::clone(self), group })
    }

    /// Logs a refusal, at most one line in ten seconds.
    pub(super) fn warn(&self, address: IpAddr, most: Option<u32>, now: Tick) {
        let Some(refused) = self.refusals.note(now) else { return };
        let (group, most) = (Group(group(address)), most.unwrap_or(self.default));
        let connections = if refused == 1 { "connection" } else { "connections" };
        notice::warn(format_args!(
            "{refused} {connections} closed: {group} has {most} open, the maximum per address: name it in \
             gateway.trusted_proxies if it is your load balancer, or raise gateway.max_connections_per_address"
        ));
    }

    fn shard(&self, group: IpAddr) -> &Mutex<HashMap<IpAddr, u32>> {
        let last = match group {
            IpAddr::V4(address) => address.octets()[3],
            IpAddr::V6(address) => address.octets()[7],
        };
        &self.shards[usize::from(last) % SHARDS]
    }
}

/// A counted connection.
#[derive(Debug)]
pub(super) struct Counted {
    all: Arc<PerAddress>,
    group: IpAddr,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut shard = self.all.shard(self.group).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = shard.get_mut(&self.group) {
            *open -= 1;
            if *open == 0 {
                shard.remove(&self.group);
            }
        }
    }
}

/// Returns the address that connections are counted by.
fn group(address: IpAddr) -> IpAddr {
    const SUBSCRIBER: u128 = !0 << 64;
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & SUBSCRIBER).into(),
        v4 => v4,
    }
}

/// The notation of a group.
struct Group(IpAddr);

impl std::fmt::Display for Group {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(address) => address.fmt(out),
            IpAddr::V6(address) => write!(out, "{address}/64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::tally::LOG_EVERY_TICKS;
    use tollgate_telemetry::notice::captured::lines_of;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn refused_connections_are_logged_with_the_fix() {
        let all = PerAddress::new(1000);
        let lines = lines_of(|| {
            all.warn(address("192.0.2.1"), None, 1);
            all.warn(address("192.0.2.1"), None, 2);
            all.warn(address("2001:db8::1"), Some(64), 1 + LOG_EVERY_TICKS);
        });
        insta::assert_snapshot!(lines);
    }

    #[test]
    fn address_has_a_maximum_of_connections_and_gets_them_back() {
        let all = Arc::new(PerAddress::new(1000));
        let enter = |text| all.enter(address(text), Some(2));
        let (one, two) = (enter("192.0.2.1"), enter("::ffff:192.0.2.1"));
        assert!(one.is_some() && two.is_some() && enter("192.0.2.1").is_none());
        assert!(enter("192.0.2.2").is_some(), "another address");
        drop(one);
        assert!(enter("192.0.2.1").is_some());
        drop(two);
        assert!(all.shards.iter().all(|shard| shard.lock().unwrap().is_empty()), "nothing is kept of who has gone");
    }

    #[test]
    fn ipv6_addresses_count_by_their_prefix() {
        let all = Arc::new(PerAddress::new(1000));
        let enter = |text| all.enter(address(text), Some(1));
        let _one = enter("2001:db8:0:1::1").unwrap();
        assert!(enter("2001:db8:0:1:ffff::2").is_none());
        assert!(enter("2001:db8:0:2::1").is_some());
    }

    #[test]
    fn a_quarter_is_the_default_but_64_where_few_are_allowed_and_never_more_than_half() {
        let defaults = [1, 100, 200, 1000, 500_000].map(|most| PerAddress::new(most).default);
        assert_eq!(defaults, [1, 50, 64, 250, 125_000]);
    }
}
