//! Sets of networks: trusted, exempt or blocked addresses.
//!
//! Networks are kept as sorted, disjoint ranges, so a lookup takes about as long for ten thousand networks as for ten.
//! An IPv4 address is the same whether it arrives as `192.0.2.1` or, on a dual-stack socket, as `::ffff:192.0.2.1`.
//! Host names are not supported: their addresses change, and resolving them takes time.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Cloud providers publish some thousand ranges each; all ranges of one provider fit.
const MAX_NETWORKS: usize = 16_384;

/// Length of an invalid text in an error.
const MAX_SHOWN_CHARS: usize = 60;

/// Bits of an IPv6 address before the mapped IPv4 address.
const MAPPED_PREFIX: u8 = 96;

/// A set of IPv4 and IPv6 networks.
///
/// ```
/// use tollgate_rules::Networks;
///
/// let office = Networks::parse(["192.0.2.0/24", "2001:db8::/32", "198.51.100.7"])?;
/// assert!(office.contains("192.0.2.200".parse()?));
/// assert!(!office.contains("198.51.100.8".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Networks {
    v4: Box<[(Ipv4Addr, Ipv4Addr)]>,
    v6: Box<[(Ipv6Addr, Ipv6Addr)]>,
}

impl Networks {
    /// Parses addresses, and CIDR blocks such as `10.0.0.0/8`.
    ///
    /// # Errors
    ///
    /// If a text is neither, if an address has bits beyond its prefix, or if there are too many networks.
    pub fn parse<Text: AsRef<str>>(texts: impl IntoIterator<Item = Text>) -> Result<Self, InvalidNetwork> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for text in texts {
            if v4.len() + v6.len() == MAX_NETWORKS {
                return Err(InvalidNetwork::too_many());
            }
            match network(text.as_ref())? {
                IpNet::V4(net) => v4.push(net),
                IpNet::V6(net) => v6.push(net),
            }
        }
        let v4 = Ipv4Net::aggregate(&v4).into_iter().map(|net| (net.network(), net.broadcast()));
        let v6 = Ipv6Net::aggregate(&v6).into_iter().map(|net| (net.network(), net.broadcast()));
        Ok(Self { v4: in_order(v4), v6: in_order(v6) })
    }

    /// Returns `true` if the address is in one of the networks.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match address.to_canonical() {
            IpAddr::V4(address) => within(&self.v4, address),
            IpAddr::V6(address) => within(&self.v6, address),
        }
    }

    /// Returns `true` if the set contains every address.
    pub(super) fn contains_all(&self) -> bool {
        let v4 = (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST);
        let v6 = (Ipv6Addr::UNSPECIFIED, Ipv6Addr::from_bits(u128::MAX));
        *self.v4 == [v4] && *self.v6 == [v6]
    }

    /// Returns `true` if the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }
}

fn in_order<T: Ord>(ranges: impl Iterator<Item = (T, T)>) -> Box<[(T, T)]> {
    let mut ranges: Box<[_]> = ranges.collect();
    ranges.sort_unstable();
    ranges
}

/// The ranges are disjoint, so only the last one that starts at or before the address can contain it.
fn within<T: Ord + Copy>(ranges: &[(T, T)], address: T) -> bool {
    let after = ranges.partition_point(|(first, _)| *first <= address);
    after.checked_sub(1).and_then(|at| ranges.get(at)).is_some_and(|(_, last)| address <= *last)
}

fn network(text: &str) -> Result<IpNet, InvalidNetwork> {
    let net = read(text).ok_or_else(|| InvalidNetwork::unreadable(text))?;
    if net.trunc() != net {
        return Err(InvalidNetwork::beyond_prefix(text, net));
    }
    Ok(match net {
        IpNet::V6(v6) => unmapped(v6).map_or(net, IpNet::V4),
        IpNet::V4(_) => net,
    })
}

/// Parses like the standard library, which rejects `010.0.0.0` because some read it as octal.
fn read(text: &str) -> Option<IpNet> {
    let Some((address, prefix)) = text.split_once('/') else {
        return text.parse().ok().map(|address: IpAddr| IpNet::from(address));
    };
    let digits = prefix.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| IpNet::new(address.parse().ok()?, prefix.parse().ok()?).ok()).flatten()
}

/// Returns the IPv4 network that an IPv6 network represents. Networks wider than all of IPv4 represent IPv6 only:
/// `::/0` does not include IPv4.
fn unmapped(net: Ipv6Net) -> Option<Ipv4Net> {
    let prefix = net.prefix_len().checked_sub(MAPPED_PREFIX)?;
    Ipv4Net::new(net.addr().to_ipv4_mapped()?, prefix).ok()
}

/// An invalid network: the text, the problem, and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidNetwork {
    problem: String,
    fix: String,
}

impl InvalidNetwork {
    fn unreadable(text: &str) -> Self {
        Self::new(format!("`{}` is not a network", cut(text)), "use an address or a CIDR, such as 10.0.0.0/8")
    }

    fn beyond_prefix(text: &str, net: IpNet) -> Self {
        let (whole, one) = (net.trunc(), net.addr());
        let problem = format!("`{}` has bits set beyond its prefix", cut(text));
        Self::new(problem, format!("use {whole}, or {one} for that one address"))
    }

    fn too_many() -> Self {
        Self::new(format!("there are more than {MAX_NETWORKS} networks"), "join neighbours into wider ones")
    }

    fn new(problem: String, fix: impl Into<String>) -> Self {
        Self { problem, fix: fix.into() }
    }

    /// Returns the problem.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// Returns the fix.
    #[must_use]
    pub fn fix(&self) -> &str {
        &self.fix
    }
}

impl fmt::Display for InvalidNetwork {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl std::error::Error for InvalidNetwork {}

fn cut(text: &str) -> String {
    text.chars().take(MAX_SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn problem(text: &str) -> String {
        Networks::parse([text]).unwrap_err().to_string()
    }

    #[test]
    fn a_network_holds_its_first_and_last_address_and_no_neighbour() {
        let networks = Networks::parse(["10.0.0.0/8", "192.0.2.7", "2001:db8::/32", "fe80::1/128"]).unwrap();
        for (address, inside) in [
            ("9.255.255.255", false),
            ("10.0.0.0", true),
            ("10.255.255.255", true),
            ("11.0.0.0", false),
            ("192.0.2.6", false),
            ("192.0.2.7", true),
            ("192.0.2.8", false),
            ("2001:db7:ffff:ffff:ffff:ffff:ffff:ffff", false),
            ("2001:db8::", true),
            ("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", true),
            ("2001:db9::", false),
            ("fe80::1", true),
            ("fe80::2", false),
            ("::ffff:10.1.2.3", true),
            ("::ffff:11.1.2.3", false),
        ] {
            assert_eq!(networks.contains(address.parse().unwrap()), inside, "{address}");
        }
    }

    #[test]
    fn a_mapped_network_is_its_ipv4_network() {
        let mapped = Networks::parse(["::ffff:10.0.0.0/104", "::ffff:192.0.2.7"]).unwrap();
        assert_eq!(mapped, Networks::parse(["10.0.0.0/8", "192.0.2.7"]).unwrap());
    }

    #[test]
    fn all_of_ipv6_is_nothing_of_ipv4() {
        let networks = Networks::parse(["::/0"]).unwrap();
        assert!(networks.contains("2001:db8::1".parse().unwrap()));
        assert!(!networks.contains("192.0.2.1".parse().unwrap()));
        assert!(!networks.contains("::ffff:192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn an_invalid_text_is_reported_with_the_fix() {
        assert_eq!(problem("10.0.0/8"), "`10.0.0/8` is not a network: use an address or a CIDR, such as 10.0.0.0/8");
        assert_eq!(
            problem("10.1.2.3/8"),
            "`10.1.2.3/8` has bits set beyond its prefix: use 10.0.0.0/8, or 10.1.2.3 for that one address"
        );
        for text in
            ["", " ", "10.0.0.0/33", "::/129", "localhost", "10.0.0.0/-1", "10.0.0.0/+8", "010.0.0.0/8", "1.2.3.4:80"]
        {
            assert!(problem(text).ends_with("such as 10.0.0.0/8"), "{text}");
        }
        assert!(problem(&"x".repeat(10_000)).len() < 200);
    }

    #[test]
    fn the_number_of_networks_is_bounded() {
        let texts = |count: usize| (0..count).map(|at| IpAddr::from(Ipv4Addr::from(at as u32 * 2)).to_string());
        assert!(Networks::parse(texts(MAX_NETWORKS)).is_ok());
        assert!(Networks::parse(texts(MAX_NETWORKS + 1)).is_err());
    }

    fn any_network() -> impl Strategy<Value = IpNet> {
        // Few distinct addresses, so that networks nest, touch and repeat.
        prop_oneof![
            (0_u32..64, 24_u8..=32).prop_map(|(bits, prefix)| Ipv4Net::new((bits << 2).into(), prefix).unwrap().into()),
            (0_u128..64, 120_u8..=128)
                .prop_map(|(bits, prefix)| Ipv6Net::new((bits << 2).into(), prefix).unwrap().into()),
        ]
    }

    proptest! {
        #[test]
        fn joined_ranges_hold_what_the_networks_one_by_one_hold(
            nets in prop::collection::vec(any_network(), 0..12),
            low in 0_u32..300,
        ) {
            let networks = Networks::parse(nets.iter().map(|net| net.trunc().to_string())).unwrap();
            for address in [IpAddr::from(Ipv4Addr::from(low)), IpAddr::from(Ipv6Addr::from(u128::from(low)))] {
                let expected = nets.iter().any(|net| net.contains(&address));
                prop_assert_eq!(networks.contains(address), expected, "{}", address);
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,60}") {
            _ = Networks::parse([text]);
        }
    }
}
