//! What is known of a request, borrowed from wherever it came in.

use std::net::IpAddr;

use http::{Extensions, HeaderMap};

use super::{Certificate, PathReading};
use crate::http::Headers;

/// What rules may look at: a request's method, path, host, headers, and who sent it.
///
/// Every surface makes the same facts of its own kind of request, so that a rule means the same everywhere. All
/// is borrowed; nothing is copied to ask.
///
/// ```
/// use tollgate::rules::Facts;
///
/// let facts = Facts::new("GET", "/api/search?q=rust").host("api.example.com");
/// assert_eq!((facts.path(), facts.query()), ("/api/search", Some("q=rust")));
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Facts<'a> {
    method: &'a str,
    path: &'a str,
    query: Option<&'a str>,
    host: Option<&'a str>,
    peer: Option<IpAddr>,
    headers: Option<Headers<'a>>,
    route: Option<&'a str>,
    domain: Option<&'a str>,
    descriptors: &'a [(&'a str, &'a str)],
    extensions: Option<&'a Extensions>,
    finders: Option<Finders<'a>>,
    cost: Option<u64>,
    certificate: Option<&'a Certificate>,
    served_elsewhere: bool,
    path_reading: Option<PathReading>,
}

/// How to find among a request's extensions what was not given: only some rules ask for it.
#[derive(Clone, Copy)]
pub(crate) struct Finders<'a> {
    pub(crate) peer: &'a (dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync),
    pub(crate) route: fn(&Extensions) -> Option<&str>,
}

impl std::fmt::Debug for Finders<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Finders").finish_non_exhaustive()
    }
}

impl<'a> Facts<'a> {
    /// A request of that method for that path, which may have a query behind it.
    pub fn new(method: &'a str, target: &'a str) -> Self {
        // Targets are short: looking at each byte is faster than setting up a search.
        let (path, query) = match target.bytes().position(|byte| byte == b'?') {
            Some(end) => (&target[..end], Some(&target[end + 1..])),
            None => (target, None),
        };
        Self::of_parts(method, path, query)
    }

    /// The same where path and query are apart already.
    pub(crate) fn of_parts(method: &'a str, path: &'a str, query: Option<&'a str>) -> Self {
        Self {
            method,
            path,
            query,
            host: None,
            peer: None,
            headers: None,
            route: None,
            domain: None,
            descriptors: &[],
            extensions: None,
            finders: None,
            cost: None,
            certificate: None,
            served_elsewhere: false,
            path_reading: None,
        }
    }

    /// The host that was asked, with or without a port.
    pub fn host(mut self, host: &'a str) -> Self {
        self.host = Some(host);
        self
    }

    /// The address at the other end of the connection, which may be a proxy's.
    pub fn peer(mut self, address: IpAddr) -> Self {
        self.peer = Some(address);
        self
    }

    /// The headers. A host that was not given by [`host`](Self::host) is taken from them.
    pub fn headers(mut self, headers: impl Into<Headers<'a>>) -> Self {
        self.headers = Some(headers.into());
        self
    }

    /// The name of the route that serves the request.
    pub fn route(mut self, route: &'a str) -> Self {
        self.route = Some(route);
        self
    }

    /// The domain of a decision service's client.
    pub fn domain(mut self, domain: &'a str) -> Self {
        self.domain = Some(domain);
        self
    }

    /// Names and values that a client of a decision service gave.
    pub fn descriptors(mut self, descriptors: &'a [(&'a str, &'a str)]) -> Self {
        self.descriptors = descriptors;
        self
    }

    /// What whoever asks says the request takes, for rules that leave it at one unit. What a rule says itself goes
    /// before it, but for 0: that takes nothing anywhere.
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = Some(units);
        self
    }

    /// The certificate that the client of a TLS connection has shown, and that was verified.
    pub fn certificate(mut self, certificate: &'a Certificate) -> Self {
        self.certificate = Some(certificate);
        self
    }

    /// Somebody else serves the request, so that nobody tells when it ends: limits of what is in flight are not for it.
    pub fn served_elsewhere(mut self) -> Self {
        self.served_elsewhere = true;
        self
    }

    /// How the service behind reads this request's path, where that differs from what the rules say.
    pub fn path_reading(mut self, reading: PathReading) -> Self {
        self.path_reading = Some(reading);
        self
    }

    /// What other middleware left with the request, for keys that are made by a closure.
    pub fn extensions(mut self, extensions: &'a Extensions) -> Self {
        self.extensions = Some(extensions);
        self
    }

    /// Where the extensions have the peer and the route.
    #[cfg_attr(not(feature = "tower"), expect(dead_code, reason = "only requests of servers have extensions"))]
    pub(crate) fn finders(mut self, finders: Finders<'a>) -> Self {
        self.finders = Some(finders);
        self
    }
}

/// What was given.
impl<'a> Facts<'a> {
    /// The method.
    #[must_use]
    pub fn method(&self) -> &'a str {
        self.method
    }

    /// The path as it was sent, without the query.
    #[must_use]
    pub fn path(&self) -> &'a str {
        self.path
    }

    /// How the service reads the path, if that was given.
    #[must_use]
    pub fn given_path_reading(&self) -> Option<PathReading> {
        self.path_reading
    }

    /// What followed the question mark.
    #[must_use]
    pub fn query(&self) -> Option<&'a str> {
        self.query
    }

    /// The address at the other end of the connection.
    #[must_use]
    pub fn peer_address(&self) -> Option<IpAddr> {
        self.peer.or_else(|| (self.finders?.peer)(self.extensions?))
    }

    /// All headers.
    #[must_use]
    pub fn all_headers(&self) -> Option<Headers<'a>> {
        self.headers
    }

    /// All headers, if they are in a map.
    #[must_use]
    pub fn header_map(&self) -> Option<&'a HeaderMap> {
        match self.headers? {
            Headers::Map(map) => Some(map),
            Headers::Lines(_) => None,
        }
    }

    /// The first header of that name, which is in lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&'a [u8]> {
        self.headers?.get(name)
    }

    /// The host without its port and without the dot that may end it, as it was sent: its case means nothing.
    #[must_use]
    pub fn host_name(&self) -> Option<&'a str> {
        let host = match self.host {
            Some(host) => host,
            None => std::str::from_utf8(self.headers?.get_named(&http::header::HOST)?)
                .ok()
                .filter(|host| host.is_ascii())?,
        };
        let host = without_port(host);
        Some(host.strip_suffix('.').unwrap_or(host))
    }

    /// The host that was given beside the headers.
    pub(super) fn own_host(&self) -> Option<&'a str> {
        self.host
    }

    /// The name of the route.
    #[must_use]
    pub fn route_name(&self) -> Option<&'a str> {
        self.route.or_else(|| (self.finders?.route)(self.extensions?))
    }

    /// The domain.
    #[must_use]
    pub fn domain_name(&self) -> Option<&'a str> {
        self.domain
    }

    /// The value of a descriptor.
    #[must_use]
    pub fn descriptor(&self, name: &str) -> Option<&'a str> {
        self.descriptors.iter().find(|(given, _)| *given == name).map(|(_, value)| *value)
    }

    /// All descriptors.
    #[must_use]
    pub fn all_descriptors(&self) -> &'a [(&'a str, &'a str)] {
        self.descriptors
    }

    /// What whoever asks says the request takes.
    #[must_use]
    pub fn given_cost(&self) -> Option<u64> {
        self.cost
    }

    /// The client's certificate: the one that was given, or else one among the extensions.
    #[must_use]
    pub fn client_certificate(&self) -> Option<&'a Certificate> {
        self.certificate.or_else(|| self.extension())
    }

    /// Whether somebody else serves the request.
    #[must_use]
    pub fn is_served_elsewhere(&self) -> bool {
        self.served_elsewhere
    }

    /// What other middleware left with the request.
    #[must_use]
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.extensions?.get()
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !is_bare_v6(host) => name,
        _ => host,
    }
}

/// An IPv6 address without brackets has no port, whatever its last group looks like.
fn is_bare_v6(host: &str) -> bool {
    !host.starts_with('[') && host.bytes().filter(|byte| *byte == b':').count() > 1
}
