//! The headers of a request, in a map or as parsed lines.
//!
//! Also the names of headers in which proxies describe the client and the original request. An upstream trusts these
//! headers because it trusts the proxy in front of it. The gateway drops them unless a trusted proxy sent them, because
//! a client can forge them.

use ::http::header::{GetAll, ValueIter};
use ::http::{HeaderMap, HeaderName, HeaderValue};

/// The headers of a request.
///
/// A reference to a [`HeaderMap`] converts to it, so pass `&map` where a function takes `impl Into<Headers>`.
///
/// ```
/// use http::{HeaderMap, HeaderValue};
/// use tollgate_http::Headers;
///
/// let mut map = HeaderMap::new();
/// map.insert("x-user-id", HeaderValue::from_static("user123"));
/// let headers = Headers::from(&map);
/// assert_eq!(headers.get("x-user-id"), Some(&b"user123"[..]));
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Headers<'a> {
    /// Headers in a map.
    Map(&'a HeaderMap),
    /// Header lines in the order in which they arrived. A name can occur several times. Building a map takes longer
    /// than deciding a request, so the gateway passes the parsed lines where it needs no map.
    #[doc(hidden)]
    Lines(&'a [HeaderLine<'a>]),
}

/// A header line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeaderLine<'a> {
    /// The name, in any case.
    pub name: &'a str,
    /// The value, without surrounding white space.
    pub value: &'a [u8],
}

impl<'a> From<&'a HeaderMap> for Headers<'a> {
    fn from(map: &'a HeaderMap) -> Self {
        Self::Map(map)
    }
}

impl<'a> From<&'a [HeaderLine<'a>]> for Headers<'a> {
    fn from(lines: &'a [HeaderLine<'a>]) -> Self {
        Self::Lines(lines)
    }
}

impl<'a> Headers<'a> {
    /// Returns the first value of a header. `name` must be in lower case.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        match self {
            Self::Map(map) => map.get(name).map(HeaderValue::as_bytes),
            Self::Lines(lines) => lines.iter().find(|line| line.is(name)).map(|line| line.value),
        }
    }

    /// Returns the first value of a header. In a map, it is found by the precomputed hash of the name.
    #[must_use]
    #[inline]
    pub fn get_named(&self, name: &HeaderName) -> Option<&'a [u8]> {
        match self {
            Self::Map(map) => map.get(name).map(HeaderValue::as_bytes),
            Self::Lines(_) => self.get(name.as_str()),
        }
    }

    /// Returns `true` if no name is known to have several values. Lines would have to be searched, so they return
    /// `false`.
    #[inline]
    #[doc(hidden)]
    pub fn has_no_repeats(&self) -> bool {
        match self {
            Self::Map(map) => map.len() == map.keys_len(),
            Self::Lines(_) => false,
        }
    }

    /// Returns all values of a header, in their order.
    pub fn get_all<'n>(&self, name: &'n HeaderName) -> HeaderValues<'a, 'n> {
        HeaderValues(match self {
            Self::Map(map) => ValuesIter::Map(GetAll::into_iter(map.get_all(name))),
            Self::Lines(lines) => ValuesIter::Lines(lines.iter(), name.as_str()),
        })
    }

    /// Returns all names, as written.
    pub fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let (map, lines) = match self {
            Self::Map(map) => (Some(map.keys()), None),
            Self::Lines(lines) => (None, Some(lines.iter())),
        };
        let of_map = map.into_iter().flatten().map(HeaderName::as_str);
        of_map.chain(lines.into_iter().flatten().map(|line| line.name))
    }
}

impl HeaderLine<'_> {
    /// Returns `true` if the line has this name. `name` must be in lower case.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        // Many clients send lower-case names, which are cheaper to compare.
        self.name.len() == name.len() && (self.name == name || self.name.eq_ignore_ascii_case(name))
    }
}

/// The values of a header.
#[derive(Debug)]
pub struct HeaderValues<'a, 'n>(ValuesIter<'a, 'n>);

#[derive(Debug)]
enum ValuesIter<'a, 'n> {
    Map(ValueIter<'a, HeaderValue>),
    Lines(std::slice::Iter<'a, HeaderLine<'a>>, &'n str),
}

impl<'a> Iterator for HeaderValues<'a, '_> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        match &mut self.0 {
            ValuesIter::Map(values) => values.next().map(HeaderValue::as_bytes),
            ValuesIter::Lines(lines, name) => lines.find(|line| line.is(name)).map(|line| line.value),
        }
    }
}

impl DoubleEndedIterator for HeaderValues<'_, '_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            ValuesIter::Map(values) => values.next_back().map(HeaderValue::as_bytes),
            ValuesIter::Lines(lines, name) => lines.rfind(|line| line.is(name)).map(|line| line.value),
        }
    }
}

/// Returns `true` for headers in which proxies describe the client or the original request, such as `X-Forwarded-For`,
/// `X-Real-IP`, `CF-Connecting-IP` or `X-Original-URL`. The name is case-insensitive.
///
/// Every character other than a letter or a digit is treated as a hyphen, because CGI, WSGI and PHP map `X-Real-IP` and
/// `X_Real_IP` to the same variable.
///
/// ```
/// use tollgate_http::internal::is_forwarding_header;
///
/// assert!(is_forwarding_header("X-Forwarded-Prefix"));
/// assert!(is_forwarding_header("x_real_ip"));
/// assert!(!is_forwarding_header("X-User-Id"));
/// ```
#[must_use]
pub fn is_forwarding_header(name: &str) -> bool {
    let is = |expected: &str| reads_as(name, expected);
    // By length, so that most names are compared with few others or none.
    match name.len() {
        // `Proxy` becomes `HTTP_PROXY` in CGI programs, and their own requests then go through it (httpoxy).
        5 => is("proxy"),
        6 => is("x-host"),
        8 => is("x-scheme"),
        9 => is("forwarded") || is("x-real-ip") || is("client-ip") || is("x-arr-ssl"),
        11 => is("x-client-ip") || is("x-forwarded") || is("x-remote-ip") || is("remote-addr"),
        12 => is("x-url-scheme") || is("x-azure-fdid"),
        13 => is("x-remote-addr") || is("x-rewrite-url") || is("x-original-ip") || is("x-client-cert"),
        14 => {
            is("true-client-ip") || is("x-original-url") || is("x-original-uri") || is("x-original-for") || begins(name)
        }
        15 => is("front-end-https") || is("x-original-host") || is("proxy-client-ip") || begins(name),
        16 => {
            is("cf-connecting-ip")
                || is("fastly-client-ip")
                || is("x-azure-clientip")
                || is("x-azure-socketip")
                || is("x-original-proto")
                || is("x-arr-clientcert")
                || begins(name)
        }
        17 => is("x-original-scheme") || is("x-original-prefix") || begins(name),
        18 => is("cf-connecting-ipv6") || is("wl-proxy-client-ip") || begins(name),
        19 => is("x-cluster-client-ip") || is("x-ssl-client-verify") || begins(name),
        24 => is("x-envoy-external-address") || is("x-original-forwarded-for") || begins(name),
        ..12 => false,
        _ => begins(name),
    }
}

/// Returns `true` for `X-Forwarded-*` and for the headers in which a TLS proxy passes on a client certificate.
fn begins(name: &str) -> bool {
    ["x-forwarded-", "x-ssl-client-", "x-original-forwarded-"]
        .iter()
        .any(|family| name.get(..family.len()).is_some_and(|beginning| reads_as(beginning, family)))
}

/// Returns whether a server may take a header name for another one with hyphens: whether it has a character other than
/// letters, digits and hyphens.
///
/// CGI makes the same variable of `X-User-Id` and `X_User_Id`, PHP of `X.User.Id` too, and lighttpd of a name with any
/// other character in their place.
///
/// ```
/// use tollgate_http::internal::is_folded_by_servers;
///
/// assert!(is_folded_by_servers("x_user_id") && is_folded_by_servers("X.User-Id") && is_folded_by_servers("x~user"));
/// assert!(!is_folded_by_servers("X-User-Id2"));
/// ```
#[must_use]
#[inline]
pub fn is_folded_by_servers(name: &str) -> bool {
    static IS_FOLDED: [bool; 256] = {
        let mut table = [true; 256];
        let mut byte = 0;
        while byte < 256 {
            table[byte] = !(byte as u8).is_ascii_alphanumeric() && byte as u8 != b'-';
            byte += 1;
        }
        table
    };
    // Without an early return: names are short.
    name.bytes().fold(false, |found, byte| found | IS_FOLDED[usize::from(byte)])
}

/// Returns whether a server may take two header names for one. It ignores case, and CGI, WSGI and PHP make the same
/// variable of every character other than a letter or a digit.
#[must_use]
pub fn reads_as(name: &str, other: &str) -> bool {
    let letter = |byte: u8| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { b'-' };
    name.len() == other.len() && name.bytes().zip(other.bytes()).all(|(one, other)| letter(one) == letter(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_and_lines_are_read_alike() {
        let lines = [("Accept", "a"), ("X-Id", "1"), ("accept", "b")]
            .map(|(name, value)| HeaderLine { name, value: value.as_bytes() });
        let mut map = HeaderMap::new();
        for line in lines {
            map.append(line.name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(line.value).unwrap());
        }
        let (accept, absent) = (HeaderName::from_static("accept"), HeaderName::from_static("absent"));
        for headers in [Headers::from(&map), Headers::from(&lines[..])] {
            assert_eq!((headers.get("x-id"), headers.get("absent")), (Some(&b"1"[..]), None));
            assert_eq!(headers.get_named(&accept), Some(&b"a"[..]));
            assert_eq!(headers.get_all(&accept).collect::<Vec<_>>(), [b"a", b"b"]);
            assert_eq!(headers.get_all(&accept).rev().collect::<Vec<_>>(), [b"b", b"a"]);
            assert_eq!(headers.get_all(&absent).next(), None);
            let mut names: Vec<String> = headers.names().map(str::to_ascii_lowercase).collect();
            names.sort();
            names.dedup();
            assert_eq!(names, ["accept", "x-id"]);
        }
    }

    #[test]
    fn forwarding_headers_are_recognised_in_any_spelling() {
        for name in [
            "X-Forwarded-For",
            "X-Forwarded-Prefix",
            "X-Forwarded-Port",
            "X-Forwarded-Ssl",
            "X-Forwarded-Server",
            "X-Forwarded-User",
            "X-Forwarded-Client-Cert",
            "X-Forwarded-Tls-Client-Cert-Info",
            "X-Forwarded-By",
            "X-Forwarded",
            "Forwarded",
            "X-Real-IP",
            "X-Client-IP",
            "X-Cluster-Client-IP",
            "True-Client-IP",
            "CF-Connecting-IP",
            "CF-Connecting-IPv6",
            "Fastly-Client-IP",
            "X-Azure-SocketIP",
            "X-Original-URL",
            "X-Rewrite-URL",
            "X-Original-Host",
            "X-Original-Forwarded-For",
            "X-Envoy-External-Address",
            "X-SSL-Client-Cert",
            "X-SSL-Client-Verify",
            "X-SSL-Client-S-DN",
            "Proxy",
        ] {
            assert!(is_forwarding_header(name), "{name}");
            assert!(is_forwarding_header(&name.replace('-', "_")), "{name} with underscores");
            assert!(is_forwarding_header(&name.to_ascii_uppercase().replacen('-', ".", 1)), "{name} with a dot");
        }
    }

    #[test]
    fn other_headers_are_not_forwarding_headers() {
        for name in [
            "",
            "x",
            "Host",
            "Cookie",
            "Authorization",
            "X-User-Id",
            "X-Forwarder",
            "X-Request-Id",
            "User-Agent",
            "Via",
        ] {
            assert!(!is_forwarding_header(name), "{name}");
        }
        assert!(!is_forwarding_header("x-forwarde\u{e9}-for"));
    }
}
