//! The client address of a request that came through proxies.
//!
//! Every proxy appends the address of its peer, so the chain of addresses grows to the right, and everything to the
//! left of a trusted proxy's entry may be forged. The chain is therefore read from the right: from the connection's
//! peer, one hop to the left as long as the hop is a trusted proxy. The first address that is not trusted is the
//! client. If a hop cannot be parsed, the walk ends at the proxy that reported it, and nothing to the left is read.
//!
//! No names are resolved, nothing is allocated, and without trusted proxies no header is read.
//!
//! A hop is an address, optionally in brackets or with a port. In `Forwarded` (RFC 7239), the `for` parameter of an
//! element names it. Parsing is strict, because an invalid element ends the walk and no client is mistaken for another.
//! It is lenient in two things that proxies do and that cannot mislead: blanks around semicolons, and unquoted
//! addresses.

#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::header::{FORWARDED, HeaderName};
use tollgate_http::Headers;

use super::facts::Facts;
use super::networks::{InvalidNetwork, Networks};

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Real chains have a handful of hops. A longer one is a mistake, such as a loop of proxies, or an attack.
const MAX_HOPS: usize = 32;

/// Proxies that are trusted to name their clients. The default trusts none.
///
/// ```
/// use tollgate_rules::{Facts, TrustedProxies};
///
/// let proxies = TrustedProxies::parse(["10.0.0.0/8"])?;
/// let mut headers = http::HeaderMap::new();
/// headers.insert("x-forwarded-for", "6.6.6.6, 203.0.113.9, 10.0.0.2".parse()?);
///
/// // The client itself wrote 6.6.6.6.
/// let facts = Facts::new("GET", "/").peer("10.0.0.1".parse()?).headers(&headers);
/// assert_eq!(proxies.client(&facts), Some("203.0.113.9".parse()?));
///
/// // Headers from any other peer are ignored.
/// let facts = facts.peer("198.51.100.7".parse()?);
/// assert_eq!(proxies.client(&facts), Some("198.51.100.7".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies {
    networks: Networks,
    header: ForwardingHeader,
}

/// The header in which trusted proxies name their clients.
///
/// A proxy maintains the header that it knows and forwards the other as the client sent it, so only the operator knows
/// which of the two to trust.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "file", derive(serde::Deserialize, schemars::JsonSchema), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum ForwardingHeader {
    /// `X-Forwarded-For`, or `Forwarded` if there is none.
    ///
    /// Nearly all proxies write `X-Forwarded-For`, so a forged `Forwarded` is never read. Behind proxies that write
    /// only `Forwarded` and forward a client's `X-Forwarded-For`, use [`Forwarded`](Self::Forwarded).
    #[default]
    Either,
    /// `X-Forwarded-For` only.
    XForwardedFor,
    /// `Forwarded` only (RFC 7239).
    Forwarded,
}

impl TrustedProxies {
    /// Parses addresses and networks of trusted proxies, such as `10.0.0.0/8`.
    ///
    /// # Errors
    ///
    /// If a text is not a network; see [`Networks::parse`].
    pub fn parse<Text: AsRef<str>>(texts: impl IntoIterator<Item = Text>) -> Result<Self, InvalidNetwork> {
        Networks::parse(texts).map(Self::from)
    }

    /// Sets the header in which the proxies are trusted.
    #[must_use]
    pub fn with_header(mut self, header: ForwardingHeader) -> Self {
        self.header = header;
        self
    }

    /// Returns `true` if `address` is a trusted proxy.
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.networks.contains(address)
    }

    /// Returns `true` if there are no trusted proxies, so the peer is the client.
    pub(super) fn is_empty(&self) -> bool {
        self.networks.is_empty()
    }

    /// Returns the client address: the rightmost address that is not a trusted proxy, or the leftmost one if all are.
    ///
    /// Returns `None` if the address of the peer is unknown.
    #[must_use]
    pub fn client(&self, facts: &Facts<'_>) -> Option<IpAddr> {
        let peer = facts.peer_address()?.to_canonical();
        match facts.all_headers() {
            Some(headers) if self.networks.contains(peer) => Some(self.behind(peer, headers)),
            _ => Some(peer),
        }
    }

    fn behind(&self, proxy: IpAddr, headers: Headers<'_>) -> IpAddr {
        match self.header {
            ForwardingHeader::Either if headers.get_named(&X_FORWARDED_FOR).is_some() => {
                self.by_x_forwarded_for(proxy, headers)
            }
            ForwardingHeader::XForwardedFor => self.by_x_forwarded_for(proxy, headers),
            ForwardingHeader::Either | ForwardingHeader::Forwarded => self.by_forwarded(proxy, headers),
        }
    }

    fn by_x_forwarded_for(&self, proxy: IpAddr, headers: Headers<'_>) -> IpAddr {
        self.walk(proxy, hops(headers, &X_FORWARDED_FOR).map(hop_address))
    }

    fn by_forwarded(&self, proxy: IpAddr, headers: Headers<'_>) -> IpAddr {
        self.walk(proxy, hops(headers, &FORWARDED).map(forwarded_address))
    }

    /// Walks from a trusted proxy to the left, until a hop is not trusted or cannot be parsed.
    fn walk(&self, proxy: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>) -> IpAddr {
        let mut reached = proxy;
        for hop in hops.take(MAX_HOPS) {
            let Some(hop) = hop else { break };
            reached = hop;
            if !self.networks.contains(hop) {
                break;
            }
        }
        reached
    }
}

impl From<Networks> for TrustedProxies {
    fn from(networks: Networks) -> Self {
        Self { networks, header: ForwardingHeader::default() }
    }
}

/// Returns the elements of all lines of a header, from the right. Several lines are one list (RFC 9110, section 5.3),
/// and empty elements are skipped (section 5.6.1).
///
/// Commas inside quotes separate elements too. Otherwise a client could open a quote that swallows the entries that
/// proxies append. A quoted comma, which no address needs, produces elements that cannot be parsed, and the walk ends.
fn hops<'a>(headers: Headers<'a>, name: &'static HeaderName) -> impl Iterator<Item = &'a [u8]> {
    let elements = headers.get_all(name).rev().flat_map(|line| line.rsplit(|byte| *byte == b','));
    elements.map(<[u8]>::trim_ascii).filter(|element| !element.is_empty())
}

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

/// Returns the address in `for`, or `None` if it is missing, obfuscated or repeated, or if the element is invalid.
fn forwarded_address(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    let mut rest = element;
    loop {
        let pair = Pair::read(rest.trim_ascii_start())?;
        if pair.name.eq_ignore_ascii_case(b"for") && found.replace(pair.value).is_some() {
            return None;
        }
        match pair.behind.trim_ascii_start() {
            [] => break,
            [b';', behind @ ..] => rest = behind,
            _ => return None,
        }
        // A semicolon may end the element.
        if rest.trim_ascii_start().is_empty() {
            break;
        }
    }
    hop_address(found?)
}

struct Pair<'a> {
    name: &'a [u8],
    /// The value without its quotes. Escapes are kept: no address has any, so such a value does not parse.
    value: &'a [u8],
    behind: &'a [u8],
}

impl<'a> Pair<'a> {
    fn read(text: &'a [u8]) -> Option<Self> {
        let (name, rest) = text.split_at(text.iter().position(|byte| *byte == b'=')?);
        let rest = rest.get(1..)?;
        if name.is_empty() || !name.iter().copied().all(is_token) {
            return None;
        }
        let (value, behind) = match rest {
            [b'"', quoted @ ..] => until_quote(quoted)?,
            bare => {
                let end = bare.iter().position(|byte| !is_bare(*byte)).unwrap_or(bare.len());
                bare.split_at(end)
            }
        };
        Some(Self { name, value, behind })
    }
}

/// Splits a text at its closing quote.
fn until_quote(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut at = 0;
    loop {
        match text.get(at)? {
            b'"' => return Some((text.get(..at)?, text.get(at + 1..)?)),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Excludes quotes and backslashes, which appear in a quoted text that was split at a comma.
fn is_bare(byte: u8) -> bool {
    is_token(byte) || matches!(byte, b'[' | b']' | b':')
}
