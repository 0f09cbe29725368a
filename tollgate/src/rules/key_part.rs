//! The parts of a key.
//!
//! In a part by address, a group of addresses counts as one client. An IPv4 address is a client. A single IPv6 customer
//! holds at least 2^64 addresses, so a limit per address would be ineffective; its network counts instead. The result
//! is text, as shown in keys and explanations, in a buffer on the stack.

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use http::HeaderName;

use super::certificate::CertificateField;
use super::normal::{CleanPath, cookies, header};
use super::{PathReading, Request};
use crate::error::InvalidLimit;

/// One part of the key of a rule.
#[derive(Clone)]
pub struct KeyPart(pub(super) Source);

/// Parses the header name in a field of a rule.
pub(super) fn header_name(field: &'static str, name: &str) -> Result<HeaderName, InvalidLimit> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| {
        let shown: String = name.chars().take(80).collect();
        let problem = format!("`{}` is not the name of a header", shown.escape_debug());
        InvalidLimit::new(field, problem, "use letters, digits and hyphens, as in x-api-key")
    })
}

/// Derives a key part from a request.
type Custom = Arc<dyn Fn(&Request<'_>) -> Option<String> + Send + Sync>;

#[derive(Clone)]
pub(super) enum Source {
    Ip(IpGroup),
    Header(HeaderName),
    /// An invalid header name. Building the rule set reports it.
    Invalid(InvalidLimit),
    Cookie(Box<str>),
    Query(Box<str>),
    Path,
    Method,
    Host,
    Route,
    Jwt(Box<str>),
    Certificate(CertificateField),
    Descriptor(Box<str>),
    Constant(Box<str>),
    Custom(Custom),
}

impl KeyPart {
    /// Uses the client's address. IPv6 addresses are grouped by /64, which is what one customer gets.
    #[must_use]
    pub fn ip() -> Self {
        Self(Source::Ip(IpGroup::DEFAULT))
    }

    /// Uses the client's address, with IPv6 addresses grouped by their first `bits`. Returns `None` if `bits` is not
    /// between 1 and 128.
    #[must_use]
    pub fn ip_network(bits: u8) -> Option<Self> {
        IpGroup::of_prefix(bits).map(|group| Self(Source::Ip(group)))
    }

    /// Uses the value of a header. An empty value counts as missing.
    /// [`RuleSetBuilder::build`](super::RuleSetBuilder::build) reports an invalid name.
    ///
    /// ```
    /// use tollgate::rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// let limit = || Limit::new("per-key", FixedWindow::new(10, MINUTE));
    /// assert!(RuleSet::builder().rule(Rule::new(limit()?).key(KeyPart::header("x-api-key"))).build().is_ok());
    /// let error = RuleSet::builder().rule(Rule::new(limit()?).key(KeyPart::header("x api key"))).build().unwrap_err();
    /// assert_eq!(error.problem(), "`x api key` is not the name of a header");
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use]
    pub fn header(name: impl AsRef<str>) -> Self {
        Self(header_name("key", name.as_ref()).map_or_else(Source::Invalid, Source::Header))
    }

    /// Returns the error of an invalid part.
    pub(super) fn problem(&self) -> Option<&InvalidLimit> {
        match &self.0 {
            Source::Invalid(problem) => Some(problem),
            _ => None,
        }
    }

    /// Uses the value of a cookie.
    #[must_use]
    pub fn cookie(name: &str) -> Self {
        Self(Source::Cookie(name.into()))
    }

    /// Uses the value of a query parameter.
    #[must_use]
    pub fn query(name: &str) -> Self {
        Self(Source::Query(name.into()))
    }

    /// Uses the path, in the form in which it is matched.
    #[must_use]
    pub fn path() -> Self {
        Self(Source::Path)
    }

    /// Uses the method.
    #[must_use]
    pub fn method() -> Self {
        Self(Source::Method)
    }

    /// Uses the host, in lower case and without its port.
    #[must_use]
    pub fn host() -> Self {
        Self(Source::Host)
    }

    /// Uses the name of the route that serves the request.
    #[must_use]
    pub fn route() -> Self {
        Self(Source::Route)
    }

    /// Uses a claim of a verified token.
    #[must_use]
    pub fn jwt(claim: &str) -> Self {
        Self(Source::Jwt(claim.into()))
    }

    /// Uses a field of the client certificate.
    #[must_use]
    pub fn certificate(field: CertificateField) -> Self {
        Self(Source::Certificate(field))
    }

    /// Uses a descriptor that a client of the decision service sent.
    #[must_use]
    pub fn descriptor(name: &str) -> Self {
        Self(Source::Descriptor(name.into()))
    }

    /// Uses a constant text.
    #[must_use]
    pub fn constant(text: &str) -> Self {
        Self(Source::Constant(text.into()))
    }

    /// Uses the result of a closure. `None` counts as missing.
    pub fn custom(make: impl Fn(&Request<'_>) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Source::Custom(Arc::new(make)))
    }

    /// Returns `true` if this is known to be the same part as `other`. Closures are never known to be the same.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Source::Ip(one), Source::Ip(other)) => one == other,
            (Source::Header(one), Source::Header(other)) => one == other,
            (Source::Cookie(one), Source::Cookie(other))
            | (Source::Query(one), Source::Query(other))
            | (Source::Jwt(one), Source::Jwt(other))
            | (Source::Descriptor(one), Source::Descriptor(other))
            | (Source::Constant(one), Source::Constant(other)) => one == other,
            (Source::Certificate(one), Source::Certificate(other)) => one == other,
            (Source::Path, Source::Path)
            | (Source::Method, Source::Method)
            | (Source::Host, Source::Host)
            | (Source::Route, Source::Route) => true,
            _ => false,
        }
    }

    /// Returns `true` for a claim of a token.
    pub(super) fn reads_token(&self) -> bool {
        matches!(self.0, Source::Jwt(_))
    }

    /// Returns `true` for a descriptor entry that was not sent, and for any other part that is missing because the
    /// facts are those of a descriptor. The rule then does not apply.
    pub(super) fn is_absent_descriptor(&self, request: &Request<'_>) -> bool {
        let facts = request.facts();
        match &self.0 {
            Source::Descriptor(name) => facts.descriptor(name).is_none(),
            _ => facts.is_descriptor(),
        }
    }

    /// Returns `true` if the part depends on the connection only, and not on the request.
    pub(super) fn is_of_connection(&self) -> bool {
        matches!(self.0, Source::Ip(_) | Source::Certificate(_))
    }

    /// Returns `true` for the path.
    pub(super) fn is_path(&self) -> bool {
        matches!(self.0, Source::Path)
    }

    /// Normalizes a configured value of this part, so that it can equal those of requests.
    pub(super) fn normal<'v>(&self, value: &'v [u8], path_reading: PathReading) -> Cow<'v, [u8]> {
        let text = std::str::from_utf8(value).ok();
        match (&self.0, text) {
            (Source::Header(_), _) => Cow::Borrowed(header::trimmed(value)),
            (Source::Cookie(_), _) => cookies::plain(value),
            (Source::Method, Some(text)) => Piece::upper(text).into_cow(),
            (Source::Host, Some(text)) => Piece::lower(text.strip_suffix('.').unwrap_or(text)).into_cow(),
            (Source::Path, Some(text)) => {
                let reading = CleanPath::new(text).ok().and_then(|path| path.readings(path_reading).into_iter().next());
                reading.map_or(Cow::Borrowed(value), |path| match path {
                    Cow::Borrowed(path) => Cow::Borrowed(path.as_bytes()),
                    Cow::Owned(path) => Cow::Owned(path.into_bytes()),
                })
            }
            _ => Cow::Borrowed(value),
        }
    }

    /// Returns the part of a request's key, or `None` if it is missing or empty.
    pub(super) fn of<'r>(&'r self, request: &'r Request<'_>) -> Option<Piece<'r>> {
        let facts = request.facts();
        let bytes = match &self.0 {
            // An address is never empty, and its text is long enough to be built in place.
            Source::Ip(group) => return request.client().map(|client| Piece::Short(group.text(client))),
            Source::Header(name) => request.header(name)?,
            Source::Invalid(_) => return None,
            Source::Cookie(name) => return Piece::of_bytes(request.cookie(name)?).unless_empty(),
            Source::Query(name) => return Piece::of(request.query(name)?).unless_empty(),
            Source::Path => request.path().as_bytes(),
            // Some frameworks ignore the case of methods.
            Source::Method => return Piece::upper(facts.method()).unless_empty(),
            Source::Host => return Piece::lower(request.host()?).unless_empty(),
            Source::Route => facts.route_name()?.as_bytes(),
            Source::Jwt(claim) => return Piece::of(request.claim(claim)?).unless_empty(),
            Source::Certificate(field) => field.of(facts.client_certificate()?)?.as_bytes(),
            Source::Descriptor(name) => facts.descriptor(name)?.as_bytes(),
            Source::Constant(text) => text.as_bytes(),
            Source::Custom(make) => return Piece::Owned(make(request)?.into_bytes()).unless_empty(),
        };
        (!bytes.is_empty()).then_some(Piece::Borrowed(bytes))
    }
}

/// Formats the part as in the rule file.
impl fmt::Display for KeyPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Ip(group) if *group == IpGroup::DEFAULT => out.write_str("ip"),
            Source::Ip(group) => write!(out, "ip/{}", group.bits()),
            Source::Header(name) => write!(out, "header:{name}"),
            Source::Invalid(problem) => write!(out, "{problem}"),
            Source::Cookie(name) => write!(out, "cookie:{name}"),
            Source::Query(name) => write!(out, "query:{name}"),
            Source::Path => out.write_str("path"),
            Source::Method => out.write_str("method"),
            Source::Host => out.write_str("host"),
            Source::Route => out.write_str("route"),
            Source::Jwt(claim) => write!(out, "jwt:{claim}"),
            Source::Certificate(field) => write!(out, "cert:{}", field.as_str()),
            Source::Descriptor(name) => write!(out, "descriptor:{name}"),
            Source::Constant(text) => write!(out, "const:{text}"),
            Source::Custom(_) => out.write_str("custom"),
        }
    }
}

impl fmt::Debug for KeyPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "KeyPart({self})")
    }
}

/// The value of a key part, borrowed from the request if possible.
#[derive(Clone, Debug)]
pub(crate) enum Piece<'r> {
    Borrowed(&'r [u8]),
    Short(GroupText),
    Owned(Vec<u8>),
}

impl<'r> Piece<'r> {
    fn of(text: Cow<'r, str>) -> Self {
        match text {
            Cow::Borrowed(text) => Self::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Self::Owned(text.into_bytes()),
        }
    }

    fn of_bytes(bytes: Cow<'r, [u8]>) -> Self {
        match bytes {
            Cow::Borrowed(bytes) => Self::Borrowed(bytes),
            Cow::Owned(bytes) => Self::Owned(bytes),
        }
    }

    fn upper(text: &'r str) -> Self {
        if text.bytes().any(|byte| byte.is_ascii_lowercase()) {
            Self::Owned(text.to_ascii_uppercase().into_bytes())
        } else {
            Self::Borrowed(text.as_bytes())
        }
    }

    fn lower(text: &'r str) -> Self {
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            Self::Owned(text.to_ascii_lowercase().into_bytes())
        } else {
            Self::Borrowed(text.as_bytes())
        }
    }

    fn into_cow(self) -> Cow<'r, [u8]> {
        match self {
            Self::Borrowed(bytes) => Cow::Borrowed(bytes),
            other => Cow::Owned(other.as_bytes().to_vec()),
        }
    }

    fn unless_empty(self) -> Option<Self> {
        (!self.as_bytes().is_empty()).then_some(self)
    }

    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Short(text) => text.as_bytes(),
            Self::Owned(bytes) => bytes,
        }
    }
}

/// The group of addresses that counts as one client: an IPv4 address, or an IPv6 network with this prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IpGroup {
    v6_prefix: u8,
}

impl IpGroup {
    /// A /64 is the smallest network that providers assign: one home, one phone, one server.
    pub(crate) const DEFAULT: Self = Self { v6_prefix: 64 };

    /// Returns the group for IPv6 networks of 1 to 128 bits, or `None` for other lengths.
    fn of_prefix(bits: u8) -> Option<Self> {
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

    proptest! {
        #[test]
        fn a_group_is_the_network_that_the_address_is_in(bits: u128, prefix in 1_u8..128) {
            let address = IpAddr::from(Ipv6Addr::from(bits));
            prop_assume!(address.to_canonical().is_ipv6());
            let network: ipnet::Ipv6Net = grouped(prefix, address).parse().unwrap();
            prop_assert_eq!(network, ipnet::Ipv6Net::new(bits.into(), prefix).unwrap().trunc());
        }

        #[test]
        fn two_ipv4_addresses_never_share_a_group(one: u32, other: u32) {
            let text = |bits: u32| grouped(64, IpAddr::V4(bits.into()));
            prop_assert_eq!(text(one) == text(other), one == other);
            prop_assert_eq!(text(one), Ipv4Addr::from_bits(one).to_string());
        }
    }
}
