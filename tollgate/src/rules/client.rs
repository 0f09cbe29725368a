//! Who a request comes from, when it came through proxies.
//!
//! Every proxy appends the address that it was called from, so a chain of addresses grows to the right, and anything
//! to the left of what a trusted proxy wrote may be a client's invention. So the chain is read from the right: from
//! the connection's own peer, one hop to the left for as long as the hop is a trusted proxy. The first that is not
//! is the client. Where a hop cannot be read, the walk ends at the proxy that reported it, and nothing to the left
//! is ever looked at.
//!
//! No names are looked up, nothing is allocated, and without trusted proxies no header is read at all.

mod address;
mod forwarded;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use http::header::{FORWARDED, HeaderName};

use super::facts::Facts;
use super::networks::{InvalidNetwork, Networks};
use crate::http::Headers;

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Real chains have a handful of hops. A longer one is a mistake, such as a loop of proxies, or an attack.
const MAX_HOPS: usize = 32;

/// The proxies whose word about their clients is believed; nobody's by default.
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
/// // From anybody else no header is believed.
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
/// A proxy maintains the one that it knows and passes the other on as the client sent it, so only the operator can
/// say for sure which of the two is to be believed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardingHeader {
    /// `X-Forwarded-For` if it is there, or else `Forwarded`.
    ///
    /// Nearly all proxies write `X-Forwarded-For`, whatever else they write, and then a forged `Forwarded` is never
    /// read. Behind proxies that write `Forwarded` alone and let a client's `X-Forwarded-For` through, choose
    /// [`Forwarded`](Self::Forwarded).
    #[default]
    Either,
    /// `X-Forwarded-For` alone.
    XForwardedFor,
    /// `Forwarded` alone (RFC 7239).
    Forwarded,
}

impl TrustedProxies {
    /// The proxies at these addresses and in these networks, such as `10.0.0.0/8`.
    ///
    /// # Errors
    ///
    /// The first text that is no network; see [`Networks::parse`].
    pub fn parse<Text: AsRef<str>>(texts: impl IntoIterator<Item = Text>) -> Result<Self, InvalidNetwork> {
        Networks::parse(texts).map(Self::from)
    }

    /// Believes them in that header.
    #[must_use]
    pub fn believing(mut self, header: ForwardingHeader) -> Self {
        self.header = header;
        self
    }

    /// Whether this is one of them.
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.networks.contain(address)
    }

    /// Whether there are none, so that the peer is the client.
    pub(super) fn is_nobody(&self) -> bool {
        self.networks.is_empty()
    }

    /// The right-most address that is not a trusted proxy's; the left-most of all if every one is.
    ///
    /// `None` if it is not known where the request came from.
    #[must_use]
    pub fn client(&self, facts: &Facts<'_>) -> Option<IpAddr> {
        let peer = facts.peer_address()?.to_canonical();
        match facts.all_headers() {
            Some(headers) if self.networks.contain(peer) => Some(self.behind(peer, headers)),
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
        self.walk(proxy, hops(headers, &X_FORWARDED_FOR).map(address::parse))
    }

    fn by_forwarded(&self, proxy: IpAddr, headers: Headers<'_>) -> IpAddr {
        self.walk(proxy, hops(headers, &FORWARDED).map(forwarded::address))
    }

    /// From a trusted proxy to the left, until a hop is not trusted or cannot be read.
    fn walk(&self, proxy: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>) -> IpAddr {
        let mut reached = proxy;
        for hop in hops.take(MAX_HOPS) {
            let Some(hop) = hop else { break };
            reached = hop;
            if !self.networks.contain(hop) {
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

/// The elements of all lines of a header, from the right. Several lines are one list (RFC 9110, section 5.3), and
/// empty elements are none (section 5.6.1).
///
/// Commas inside quotes divide as well. Were quotes minded, a client could open one that swallows what the proxies
/// write after it. So a quoted comma, which no address needs, makes pieces that cannot be read, and the walk ends.
fn hops<'a>(headers: Headers<'a>, name: &'static HeaderName) -> impl Iterator<Item = &'a [u8]> {
    let elements = headers.get_all(name).rev().flat_map(|line| line.rsplit(|byte| *byte == b','));
    elements.map(<[u8]>::trim_ascii).filter(|element| !element.is_empty())
}
