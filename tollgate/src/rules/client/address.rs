//! Parses one hop of a proxy chain: an address, optionally in brackets or with a port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The longest valid hop: an address of 39 bytes, brackets, a zone and a port.
const MAX_HOP_BYTES: usize = 96;

/// The longest valid port. It can be an obfuscated name.
const MAX_PORT_BYTES: usize = 32;

/// Parses `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`. A zone, as in
/// `fe80::1%eth0`, is meaningful only on the proxy and is dropped. Anything else, including `unknown`, returns `None`.
#[must_use]
pub fn hop_address(hop: &[u8]) -> Option<IpAddr> {
    if hop.len() > MAX_HOP_BYTES {
        return None;
    }
    let hop = std::str::from_utf8(hop).ok()?;
    let address = match hop.strip_prefix('[') {
        Some(rest) => {
            let (address, behind) = rest.split_once(']')?;
            if !behind.is_empty() && !is_port(behind.strip_prefix(':')?) {
                return None;
            }
            IpAddr::V6(v6(address)?)
        }
        None => match hop.split_once(':') {
            None => IpAddr::V4(hop.parse().ok()?),
            Some((address, port)) if is_port(port) && address.contains('.') => {
                IpAddr::V4(address.parse::<Ipv4Addr>().ok()?)
            }
            Some(_) => IpAddr::V6(v6(hop)?),
        },
    };
    Some(address.to_canonical())
}

fn v6(text: &str) -> Option<Ipv6Addr> {
    match text.split_once('%') {
        None => text.parse().ok(),
        Some((address, zone)) if !zone.is_empty() && zone.bytes().all(is_plain) => address.parse().ok(),
        Some(_) => None,
    }
}

/// Accepts a number, or an obfuscated port (RFC 7239, section 6).
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => !name.is_empty() && name.len() <= MAX_PORT_BYTES && name.bytes().all(is_plain),
        None => text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok(),
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}
