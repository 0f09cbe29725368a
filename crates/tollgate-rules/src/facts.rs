//! The facts about a request that rules read.

use std::net::IpAddr;

use http::{Extensions, HeaderMap};
use tollgate_http::Headers;

use super::{Certificate, PathReading};

/// The facts about a request that rules read: method, path, host, headers and client.
///
/// Every server builds the same facts from its own kind of request, so a rule means the same everywhere. All values are
/// borrowed.
///
/// ```
/// use tollgate_rules::Facts;
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
    /// The port of a host without one, if the scheme is known.
    default_port: Option<u16>,
    peer: Option<IpAddr>,
    headers: Option<Headers<'a>>,
    route: Option<&'a str>,
    domain: Option<&'a str>,
    /// Whether these are the facts of a descriptor alone, which has no address and no headers.
    is_descriptor: bool,
    descriptors: &'a [(&'a str, &'a str)],
    extensions: Option<&'a Extensions>,
    finders: Option<Finders<'a>>,
    cost: Option<u64>,
    certificate: Option<&'a Certificate>,
    served_elsewhere: bool,
    path_reading: Option<PathReading>,
    /// `true` to refuse the request if a rule needs the client's address and it is unknown.
    requires_address: bool,
}

/// Functions that find facts in a request's extensions. They are called only if a rule needs them.
#[derive(Clone, Copy)]
pub struct Finders<'a> {
    /// Finds the peer address.
    pub peer: &'a (dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync),
    /// Finds the route.
    pub route: fn(&Extensions) -> Option<&str>,
}

impl std::fmt::Debug for Finders<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Finders").finish_non_exhaustive()
    }
}

impl<'a> Facts<'a> {
    /// Creates the facts of a request with a method and a path, which may include a query.
    pub fn new(method: &'a str, target: &'a str) -> Self {
        // Targets are short: a byte loop is faster than setting up a search.
        let (path, query) = match target.bytes().position(|byte| byte == b'?') {
            Some(end) => (&target[..end], Some(&target[end + 1..])),
            None => (target, None),
        };
        Self::of_parts(method, path, query)
    }

    /// Creates the facts of a descriptor of Envoy's rate limit service, which describes no request: rules whose key
    /// needs an address, a header or another entry do not apply to it.
    pub fn of_descriptor(domain: &'a str, entries: &'a [(&'a str, &'a str)]) -> Self {
        Self { is_descriptor: true, ..Self::of_parts("", "/", None).domain(domain).descriptors(entries) }
    }

    /// Creates the facts of a request whose path and query are already split.
    #[doc(hidden)]
    #[inline]
    pub fn of_parts(method: &'a str, path: &'a str, query: Option<&'a str>) -> Self {
        Self {
            method,
            path,
            query,
            host: None,
            default_port: None,
            peer: None,
            headers: None,
            route: None,
            domain: None,
            is_descriptor: false,
            descriptors: &[],
            extensions: None,
            finders: None,
            cost: None,
            certificate: None,
            served_elsewhere: false,
            path_reading: None,
            requires_address: false,
        }
    }

    /// Sets the host, with or without a port. Rules that read the host refuse the request if a `Host` header differs.
    pub fn host(mut self, host: &'a str) -> Self {
        self.host = Some(host);
        self
    }

    /// Sets the host by the authority of the request's target, and the scheme that defines its default port.
    #[doc(hidden)]
    #[inline]
    pub fn authority(mut self, authority: &'a str, scheme: Option<&str>) -> Self {
        self.default_port = match scheme {
            Some("http") => Some(80),
            Some("https") => Some(443),
            _ => None,
        };
        self.host(authority)
    }

    /// Refuses the request if a rule needs the client's address and it is unknown.
    #[doc(hidden)]
    #[inline]
    pub fn requiring_address(mut self) -> Self {
        self.requires_address = true;
        self
    }

    /// Sets the peer address of the connection, which may be a proxy's.
    pub fn peer(mut self, address: IpAddr) -> Self {
        self.peer = Some(address);
        self
    }

    /// Sets the headers. The host is read from them, unless [`host`](Self::host) sets it.
    pub fn headers(mut self, headers: impl Into<Headers<'a>>) -> Self {
        self.headers = Some(headers.into());
        self
    }

    /// Sets the name of the route that serves the request.
    pub fn route(mut self, route: &'a str) -> Self {
        self.route = Some(route);
        self
    }

    /// Sets the domain that a client of the decision service sent.
    pub fn domain(mut self, domain: &'a str) -> Self {
        self.domain = Some(domain);
        self
    }

    /// Sets the descriptors that a client of the decision service sent, as names and values.
    pub fn descriptors(mut self, descriptors: &'a [(&'a str, &'a str)]) -> Self {
        self.descriptors = descriptors;
        self
    }

    /// Sets the cost of the request, for rules whose cost is the default of one unit. Other costs of a rule take
    /// precedence, except that 0 takes nothing from any limit.
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = Some(units);
        self
    }

    /// Sets the verified client certificate of the TLS connection.
    pub fn certificate(mut self, certificate: &'a Certificate) -> Self {
        self.certificate = Some(certificate);
        self
    }

    /// Marks a request that another server serves. Limits on requests in flight do not apply to it, because its end is
    /// unknown.
    pub fn served_elsewhere(mut self) -> Self {
        self.served_elsewhere = true;
        self
    }

    /// Sets how the service reads this request's path, if that differs from the rule set's setting.
    pub fn path_reading(mut self, reading: PathReading) -> Self {
        self.path_reading = Some(reading);
        self
    }

    /// Sets the extensions of the request, for keys that a closure derives.
    pub fn extensions(mut self, extensions: &'a Extensions) -> Self {
        self.extensions = Some(extensions);
        self
    }

    /// Sets the functions that find the peer and the route in the extensions.
    #[doc(hidden)]
    #[inline]
    pub fn finders(mut self, finders: Finders<'a>) -> Self {
        self.finders = Some(finders);
        self
    }
}

/// Accessors.
impl<'a> Facts<'a> {
    /// Returns the method.
    #[must_use]
    pub fn method(&self) -> &'a str {
        self.method
    }

    /// Returns the path as sent, without the query.
    #[must_use]
    pub fn path(&self) -> &'a str {
        self.path
    }

    /// Returns the path reading set by [`path_reading`](Self::path_reading).
    #[must_use]
    pub fn given_path_reading(&self) -> Option<PathReading> {
        self.path_reading
    }

    /// Returns the query, without the question mark.
    #[must_use]
    pub fn query(&self) -> Option<&'a str> {
        self.query
    }

    /// Returns the peer address of the connection.
    #[must_use]
    pub fn peer_address(&self) -> Option<IpAddr> {
        self.peer.or_else(|| (self.finders?.peer)(self.extensions?))
    }

    /// Returns all headers.
    #[must_use]
    pub fn all_headers(&self) -> Option<Headers<'a>> {
        self.headers
    }

    /// Returns all headers, if they are in a map.
    #[must_use]
    pub fn header_map(&self) -> Option<&'a HeaderMap> {
        match self.headers? {
            Headers::Map(map) => Some(map),
            _ => None,
        }
    }

    /// Returns the first value of a header. `name` must be in lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&'a [u8]> {
        self.headers?.get(name)
    }

    /// Returns the host without its port and trailing dot, in the case in which it was sent. Hosts are
    /// case-insensitive.
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

    /// Returns the host that was set besides the headers.
    pub(super) fn own_host(&self) -> Option<&'a str> {
        self.host
    }

    /// Returns the port that a host without one has, if the scheme is known.
    pub(super) fn default_port(&self) -> Option<u16> {
        self.default_port
    }

    /// Returns `true` if a rule that needs the client's address refuses the request if it is unknown.
    pub(super) fn requires_address(&self) -> bool {
        self.requires_address
    }

    /// Returns the name of the route.
    #[must_use]
    pub fn route_name(&self) -> Option<&'a str> {
        self.route.or_else(|| (self.finders?.route)(self.extensions?))
    }

    /// Returns whether these are the facts of a descriptor, not of a request.
    pub(crate) fn is_descriptor(&self) -> bool {
        self.is_descriptor
    }

    /// Returns the domain.
    #[must_use]
    pub fn domain_name(&self) -> Option<&'a str> {
        self.domain
    }

    /// Returns the value of a descriptor.
    #[must_use]
    pub fn descriptor(&self, name: &str) -> Option<&'a str> {
        self.descriptors.iter().find(|(given, _)| *given == name).map(|(_, value)| *value)
    }

    /// Returns all descriptors.
    #[must_use]
    pub fn all_descriptors(&self) -> &'a [(&'a str, &'a str)] {
        self.descriptors
    }

    /// Returns the cost set by [`cost`](Self::cost).
    #[must_use]
    pub fn given_cost(&self) -> Option<u64> {
        self.cost
    }

    /// Returns the client certificate: the one that was set, or otherwise the one in the extensions.
    #[must_use]
    pub fn client_certificate(&self) -> Option<&'a Certificate> {
        self.certificate.or_else(|| self.extension())
    }

    /// Returns `true` if another server serves the request.
    #[must_use]
    pub fn is_served_elsewhere(&self) -> bool {
        self.served_elsewhere
    }

    /// Returns a value from the request's extensions.
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
