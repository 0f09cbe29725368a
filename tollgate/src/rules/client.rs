//! The client address of a request that came through proxies.
//!
//! Every proxy appends the address of its peer, so the chain of addresses grows to the right, and everything to the
//! left of a trusted proxy's entry may be forged. The chain is therefore read from the right: from the connection's
//! peer, one hop to the left as long as the hop is a trusted proxy. The first address that is not trusted is the
//! client. If a hop cannot be parsed, the walk ends at the proxy that reported it, and nothing to the left is read.
//!
//! No names are resolved, nothing is allocated, and without trusted proxies no header is read.

mod address;
mod forwarded;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use http::header::{FORWARDED, HeaderName};

pub use self::address::hop_address;
use super::facts::Facts;
use super::networks::{InvalidNetwork, Networks};
use crate::http::Headers;

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Real chains have a handful of hops. A longer one is a mistake, such as a loop of proxies, or an attack.
const MAX_HOPS: usize = 32;

/// Proxies that are trusted to name their clients. The default trusts none.
///
/// ```
/// use tollgate::rules::{Facts, TrustedProxies};
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
        self.walk(proxy, hops(headers, &FORWARDED).map(forwarded::address))
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
