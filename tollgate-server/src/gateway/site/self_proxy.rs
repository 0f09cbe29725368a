//! Detects upstreams that are the gateway itself: a request would be forwarded in a loop until its head is too long.
//!
//! Only literal addresses and `localhost` are compared. Other names are not resolved: that takes time, and the result
//! can change.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tollgate::rules::file::internal::SettingError;

use super::super::target::Target;
use super::Route;

/// Returns an error for each upstream of a route that is one of the gateway's listen addresses.
pub(super) fn errors(route: &Route, listens: &[String]) -> Vec<SettingError> {
    let upstreams = route.targets().enumerate();
    let itself = upstreams.filter_map(|(index, target)| {
        let listen = listens.iter().find(|listen| is_itself(target, listen))?;
        let address = &target.address;
        let message = format!(
            "the upstream {}:{} is the gateway itself, which listens on {listen}: requests would be forwarded in a loop",
            address.host, address.port
        );
        let error =
            SettingError::new(message, "name the service behind the gateway, or change gateway.listen");
        Some(error.of("url").of(index).of("upstream"))
    });
    itself.collect()
}

fn is_itself(target: &Target, listen: &str) -> bool {
    let Some((host, port)) = listen.rsplit_once(':') else { return false };
    port.parse() == Ok(target.address.port) && is_reached(host, &target.address.host)
}

/// Returns whether a connection to `target` reaches a listener on `listening`.
fn is_reached(listening: &str, target: &str) -> bool {
    if listening.eq_ignore_ascii_case(target) {
        return true;
    }
    let (listening, target) = (addresses(listening), addresses(target));
    target.iter().any(|target| {
        // A connection to the unspecified address goes to the loopback address.
        let target = if target.is_unspecified() { loopback(target) } else { *target };
        listening.iter().any(|listening| match listening {
            IpAddr::V4(all) if all.is_unspecified() => target.is_ipv4() && target.is_loopback(),
            // On Linux, it accepts IPv4, too.
            IpAddr::V6(all) if all.is_unspecified() => target.is_loopback(),
            one => *one == target,
        })
    })
}

fn addresses(host: &str) -> Vec<IpAddr> {
    if host.eq_ignore_ascii_case("localhost") {
        return vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    }
    host.trim_matches(['[', ']']).parse().into_iter().collect()
}

fn loopback(like: &IpAddr) -> IpAddr {
    if like.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_listener_is_reached_by_every_local_address() {
        for (listening, target) in [
            ("127.0.0.1", "127.0.0.1"),
            ("127.0.0.1", "localhost"),
            ("127.0.0.1", "0.0.0.0"),
            ("localhost", "127.0.0.1"),
            ("localhost", "LOCALHOST"),
            ("[::1]", "[::1]"),
            ("[::1]", "[0:0::1]"),
            ("0.0.0.0", "127.0.0.1"),
            ("0.0.0.0", "127.0.0.2"),
            ("0.0.0.0", "0.0.0.0"),
            ("0.0.0.0", "localhost"),
            ("[::]", "[::1]"),
            ("[::]", "127.0.0.1"),
            ("[::]", "localhost"),
            ("gateway.internal", "gateway.internal"),
            ("192.0.2.1", "192.0.2.1"),
        ] {
            assert!(is_reached(listening, target), "{listening} {target}");
        }
        for (listening, target) in [
            ("127.0.0.1", "127.0.0.2"),
            ("127.0.0.1", "[::1]"),
            ("0.0.0.0", "[::1]"),
            ("0.0.0.0", "192.0.2.1"),
            ("192.0.2.1", "127.0.0.1"),
            ("gateway.internal", "api.internal"),
        ] {
            assert!(!is_reached(listening, target), "{listening} {target}");
        }
    }
}
