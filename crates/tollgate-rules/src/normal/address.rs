//! Addresses: the group of addresses that counts as one client.
//!
//! An IPv4 address is a client. A single IPv6 customer holds at least 2^64 addresses, so a limit per address would be
//! ineffective; its network counts instead. The result is text, as shown in keys and explanations, in a buffer on the
//! stack.

use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::named_key::{InvalidPart, shown};

/// The group of addresses that counts as one client: an IPv4 address, or an IPv6 network with this prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IpGroup {
    v6_prefix: u8,
}

impl IpGroup {
    /// A /64 is the smallest network that providers assign: one home, one phone, one server.
    pub(crate) const DEFAULT: Self = Self { v6_prefix: 64 };

    /// Returns the group for IPv6 networks of 1 to 128 bits, or `None` for other lengths.
    pub(crate) fn of_prefix(bits: u8) -> Option<Self> {
        (1..=128).contains(&bits).then_some(Self { v6_prefix: bits })
    }

    pub(crate) fn bits(self) -> u8 {
        self.v6_prefix
    }

    /// Returns the text of a group: `192.0.2.1`, `2001:db8:1:2::/64`, or with all 128 bits `2001:db8:1:2::3`.
    pub(crate) fn text(self, address: IpAddr) -> GroupText {
        let mut text = GroupText { bytes: [0; MAX_TEXT_BYTES], length: 0 };
        let written = match address.to_canonical() {
            IpAddr::V4(whole) => text.write_v4(whole),
            IpAddr::V6(whole) if self.v6_prefix == 128 => write!(text, "{whole}"),
            IpAddr::V6(whole) => write!(text, "{}/{}", self.network(whole), self.v6_prefix),
        };
        written.expect("an address with its prefix fits");
        text
    }

    /// Returns the text of the group that a caller names: by any of its addresses, or as `2001:db8::/64`.
    ///
    /// # Errors
    ///
    /// If the value is not an address, or a network of another size than the group.
    pub(crate) fn named(self, value: &[u8]) -> Result<GroupText, InvalidPart> {
        // Bytes that are not text are not an address either.
        let text = std::str::from_utf8(value).unwrap_or_default();
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let Ok(address) = address.parse::<IpAddr>() else {
            let problem = format!("`{}` is not an IP address", shown(value));
            return Err(InvalidPart::new(problem, "write one such as 192.0.2.7 or 2001:db8::7"));
        };
        let group = self.text(address);
        let Some(prefix) = prefix else { return Ok(group) };
        let group_bits = match (address, address.to_canonical()) {
            (IpAddr::V4(_), _) => 32,
            (IpAddr::V6(_), IpAddr::V4(_)) => 128,
            _ => self.v6_prefix,
        };
        if prefix.parse() != Ok(group_bits) || !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            let counted = match address.to_canonical() {
                IpAddr::V4(_) => "every IPv4 address by itself".to_owned(),
                IpAddr::V6(_) => format!("IPv6 addresses by /{}", self.v6_prefix),
            };
            let problem = format!("`{}` is a network, and the limit counts {counted}", shown(value));
            return Err(InvalidPart::new(
                problem,
                format!("write {group}; `exempt` and `blocked` take networks in `ips`"),
            ));
        }
        if self.v6_prefix < 128
            && let IpAddr::V6(whole) = address
            && address.to_canonical().is_ipv6()
            && self.network(whole) != whole
        {
            let problem = format!("`{}` has bits set beyond its prefix", shown(value));
            return Err(InvalidPart::new(problem, format!("write {group}")));
        }
        Ok(group)
    }

    /// Returns `true` if a text names one address of a larger group.
    pub(crate) fn is_wider_than(self, text: &str) -> bool {
        text.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_ipv6()) && self.v6_prefix < 128
    }

    fn network(self, address: Ipv6Addr) -> Ipv6Addr {
        let beyond = u128::MAX.checked_shr(self.v6_prefix.into()).unwrap_or(0);
        Ipv6Addr::from_bits(address.to_bits() & !beyond)
    }
}

/// Eight groups of four digits, seven colons, and a slash with three digits are 43 bytes.
const MAX_TEXT_BYTES: usize = 48;

/// The text of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupText {
    bytes: [u8; MAX_TEXT_BYTES],
    length: usize,
}

impl GroupText {
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl fmt::Display for GroupText {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(std::str::from_utf8(self.as_bytes()).unwrap_or_default())
    }
}

impl GroupText {
    /// Writes the same text as `Display`, in a fraction of the time, because nearly every request needs it. It has no
    /// branch on the number of digits of an octet, which a processor could not predict.
    fn write_v4(&mut self, address: Ipv4Addr) -> fmt::Result {
        // Assembled in a register and stored at once, because the bytes are read again immediately in other sizes.
        let (mut text, mut end) = (0, 0);
        for octet in address.octets() {
            let (digits, length) = OCTETS[usize::from(octet)];
            text |= u128::from(u32::from_le_bytes(digits)) << (8 * end);
            end += usize::from(length) + 1;
        }
        self.bytes[..16].copy_from_slice(&u128::to_le_bytes(text));
        // Remove the last dot.
        self.length = end - 1;
        Ok(())
    }
}

/// Each octet in decimal, followed by a dot and zeros, with its number of digits.
static OCTETS: [([u8; 4], u8); 256] = {
    let mut octets = [([0; 4], 0); 256];
    let mut octet = 0;
    while octet < octets.len() {
        let digits = [b'0' + (octet / 100) as u8, b'0' + (octet / 10 % 10) as u8, b'0' + (octet % 10) as u8];
        let length = 1 + (octet >= 10) as usize + (octet >= 100) as usize;
        let mut place = 0;
        while place < length {
            octets[octet].0[place] = digits[3 - length + place];
            place += 1;
        }
        octets[octet].0[length] = b'.';
        octets[octet].1 = length as u8;
        octet += 1;
    }
    octets
};

impl Write for GroupText {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let end = self.length + part.len();
        self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?.copy_from_slice(part.as_bytes());
        self.length = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(prefix: u8, address: &str) -> String {
        grouped(prefix, address.parse().unwrap())
    }

    fn grouped(prefix: u8, address: IpAddr) -> String {
        let text = IpGroup::of_prefix(prefix).unwrap().text(address);
        String::from_utf8(text.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn ipv4_is_whole_and_ipv6_is_its_network() {
        for (prefix, address, expected) in [
            (64, "192.0.2.1", "192.0.2.1"),
            (1, "255.255.255.255", "255.255.255.255"),
            (64, "::ffff:192.0.2.1", "192.0.2.1"),
            (64, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            (64, "2001:db8::", "2001:db8::/64"),
            (56, "2001:db8:1:2fff::1", "2001:db8:1:2f00::/56"),
            (48, "2001:db8:1:2::1", "2001:db8:1::/48"),
            (1, "ffff::1", "8000::/1"),
            (1, "7fff::1", "::/1"),
            (127, "2001:db8::3", "2001:db8::2/127"),
            (128, "2001:db8::3", "2001:db8::3"),
            (128, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            (127, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127"),
        ] {
            assert_eq!(text(prefix, address), expected, "{address}/{prefix}");
        }
    }

    #[test]
    fn prefixes_of_0_and_above_128_bits_are_rejected() {
        assert_eq!(IpGroup::of_prefix(0), None);
        assert_eq!(IpGroup::of_prefix(129), None);
        assert_eq!(IpGroup::of_prefix(64), Some(IpGroup::DEFAULT));
    }

    #[test]
    fn a_group_is_named_by_its_addresses_and_by_itself() {
        let named = |prefix, text: &str| IpGroup::of_prefix(prefix).unwrap().named(text.as_bytes());
        for (prefix, text, expected) in [
            (64, "192.0.2.1", "192.0.2.1"),
            (64, "192.0.2.1/32", "192.0.2.1"),
            (64, "::ffff:192.0.2.1", "192.0.2.1"),
            (64, "::FFFF:c000:201/128", "192.0.2.1"),
            (64, "2001:db8::7", "2001:db8::/64"),
            (64, "2001:0DB8::/64", "2001:db8::/64"),
            (56, "2001:db8:1:2ff::", "2001:db8:1:200::/56"),
            (128, "2001:db8::7", "2001:db8::7"),
            (128, "2001:db8::7/128", "2001:db8::7"),
        ] {
            assert_eq!(named(prefix, text).unwrap().to_string(), expected, "{text}");
        }
        for (prefix, text, fix) in [
            (64, "not-an-ip", "write one such as"),
            (64, "", "write one such as"),
            (64, "192.0.2.01", "write one such as"),
            (64, "192.0.2.1:80", "write one such as"),
            (64, "[::1]", "write one such as"),
            (64, "fe80::1%eth0", "write one such as"),
            (64, "192.0.2.0/24", "write 192.0.2.0;"),
            (64, "2001:db8::/32", "write 2001:db8::/64;"),
            (64, "2001:db8::7/128", "write 2001:db8::/64;"),
            (64, "2001:db8::7/64", "write 2001:db8::/64"),
            (64, "2001:db8::/+64", "write 2001:db8::/64;"),
            (64, "2001:db8::/", "write 2001:db8::/64;"),
            (128, "2001:db8::/64", "write 2001:db8::;"),
        ] {
            assert!(named(prefix, text).unwrap_err().fix.starts_with(fix), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_group_is_the_network_that_the_address_is_in(bits: u128, prefix in 1_u8..128) {
            let address = IpAddr::from(Ipv6Addr::from(bits));
            prop_assume!(address.to_canonical().is_ipv6());
            let network: ipnet::Ipv6Net = grouped(prefix, address).parse().unwrap();
            prop_assert_eq!(network, ipnet::Ipv6Net::new(bits.into(), prefix).unwrap().trunc());
        }

        #[test]
        fn the_text_of_a_group_names_it(bits: u128, prefix in 1_u8..=128) {
            let group = IpGroup::of_prefix(prefix).unwrap();
            for address in [IpAddr::from(Ipv6Addr::from(bits)), IpAddr::from(Ipv4Addr::from(bits as u32))] {
                let text = group.text(address);
                prop_assert_eq!(group.named(text.as_bytes()).unwrap().to_string(), text.to_string());
                prop_assert_eq!(group.named(address.to_string().as_bytes()).unwrap().to_string(), text.to_string());
            }
        }

        #[test]
        fn two_ipv4_addresses_never_share_a_group(one: u32, other: u32) {
            let text = |bits: u32| grouped(64, IpAddr::V4(bits.into()));
            prop_assert_eq!(text(one) == text(other), one == other);
            prop_assert_eq!(text(one), Ipv4Addr::from_bits(one).to_string());
        }
    }
}
