//! The targets of requests: nearly always a path in normal form, sometimes another spelling, a whole URL, or `*`.

use http::Uri;
use http::uri::{Authority, PathAndQuery};
use tollgate::internal::{CleanPath, Unreadable};

use crate::gateway::site::Site;

/// The target of a request.
pub(in crate::gateway) enum RequestTarget<'a> {
    /// A path in normal form, with an optional query. Limits and upstreams get it as received.
    Path(&'a str),
    /// Any other target. Boxed, because few requests have one.
    Other(Box<OtherTarget>),
    /// A target that hyper has parsed, and its normal form where it differs.
    Parsed(&'a Uri, Option<Box<Uri>>),
}

/// A target that is not a path in normal form.
pub(in crate::gateway) struct OtherTarget {
    received: Uri,
    /// The target for limits and upstreams, where it differs.
    normalized: Option<Uri>,
}

impl<'a> RequestTarget<'a> {
    /// Parses a target. Returns `None` if it is invalid.
    pub(in crate::gateway) fn read(target: &'a str) -> Option<Self> {
        if is_normal(target) {
            return Some(Self::Path(target));
        }
        let received = target.parse().ok()?;
        Some(Self::Other(Box::new(OtherTarget { received, normalized: None })))
    }

    pub(super) fn of_uri(uri: &'a Uri) -> Self {
        Self::Parsed(uri, None)
    }

    /// Brings the target into normal form. Returns the route that `find` returns for its host, if it has one, and its
    /// path and query.
    pub(in crate::gateway) fn normalize(
        &mut self,
        site: &Site,
        find: impl Fn(Option<&Authority>, &str) -> Option<usize>,
    ) -> Result<Option<usize>, Unreadable> {
        match self {
            Self::Path(path) => Ok(find(None, path)),
            Self::Other(other) => {
                let find = |target: &str| find(other.received.authority(), target);
                let (route, normalized) = site.normalize(&other.received, find)?;
                other.normalized = normalized;
                Ok(route)
            }
            Self::Parsed(received, normalized) => {
                let (route, uri) = site.normalize(received, |target: &str| find(received.authority(), target))?;
                *normalized = uri.map(Box::new);
                Ok(route)
            }
        }
    }

    /// Returns the normal form of a target that hyper has parsed, where it differs.
    pub(in crate::gateway) fn into_normalized(self) -> Option<Uri> {
        match self {
            Self::Parsed(_, normalized) => normalized.map(|uri| *uri),
            Self::Path(_) | Self::Other(_) => None,
        }
    }

    /// Brings the target into the form that it has for a route.
    pub(in crate::gateway) fn normalize_for(&mut self, site: &Site, route: Option<usize>) {
        if let Self::Other(other) = self {
            other.normalized = site.normalized_for(&other.received, route);
        }
    }

    /// Returns the path and the query for limits and upstreams.
    pub(in crate::gateway) fn as_str(&self) -> &str {
        match self {
            Self::Path(path) => path,
            Self::Other(other) => path_and_query(other.uri()),
            Self::Parsed(received, normalized) => path_and_query(normalized.as_deref().unwrap_or(received)),
        }
    }

    /// Returns the path and the query as received.
    pub(in crate::gateway) fn received_str(&self) -> &str {
        match self {
            Self::Path(path) => path,
            Self::Other(other) => path_and_query(&other.received),
            Self::Parsed(received, _) => path_and_query(received),
        }
    }

    /// Returns whether the target is only a host, with an optional port. Only CONNECT has such a target (RFC 9112, section
    /// 3.2.3).
    pub(in crate::gateway) fn is_authority_only(&self) -> bool {
        match self {
            Self::Path(_) | Self::Parsed(..) => false,
            Self::Other(other) => other.received.scheme().is_none() && other.received.authority().is_some(),
        }
    }

    /// Returns the port that a host without one has, by the scheme of an HTTP/2 request.
    pub(super) fn default_port(&self) -> &'static [u8] {
        match self {
            Self::Parsed(received, _) if received.scheme_str() == Some("https") => b":443",
            _ => b":80",
        }
    }

    /// Returns the host of a target that is a whole URL. It replaces the one in the `Host` header.
    pub(in crate::gateway) fn authority(&self) -> Option<&Authority> {
        match self {
            Self::Path(_) => None,
            Self::Other(other) => other.received.authority(),
            Self::Parsed(received, _) => received.authority(),
        }
    }

    /// Returns the target for limits and upstreams.
    pub(in crate::gateway) fn uri(&self) -> Option<Uri> {
        match self {
            Self::Path(path) => path.parse().ok(),
            Self::Other(other) => Some(other.uri().clone()),
            Self::Parsed(received, normalized) => Some(normalized.as_deref().unwrap_or(received).clone()),
        }
    }

    /// Returns the target as received.
    pub(in crate::gateway) fn received(&self) -> Option<Uri> {
        match self {
            Self::Path(path) => path.parse().ok(),
            Self::Other(other) => Some(other.received.clone()),
            Self::Parsed(received, _) => Some((*received).clone()),
        }
    }
}

impl OtherTarget {
    fn uri(&self) -> &Uri {
        self.normalized.as_ref().unwrap_or(&self.received)
    }
}

fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", PathAndQuery::as_str)
}

/// A set of bytes.
type ByteKind = [bool; 256];

/// Returns the set of letters, digits and `others`.
const fn letters_digits_and(others: &[u8]) -> ByteKind {
    let mut kind = [false; 256];
    let mut at = 0;
    while at < others.len() {
        kind[others[at] as usize] = true;
        at += 1;
    }
    let mut byte = 0;
    while byte < kind.len() {
        kind[byte] |= (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    kind
}

/// Returns whether a target is a normalized, unambiguous path with an optional query.
fn is_normal(target: &str) -> bool {
    static IN_QUERIES: ByteKind = letters_digits_and(b"/-._~?=&+:@!$'()*,;%[]|");
    let end = target.bytes().position(|byte| byte == b'?').unwrap_or(target.len());
    let (path, query) = target.split_at(end);
    path.starts_with('/')
        && query.bytes().all(|byte| IN_QUERIES[usize::from(byte)])
        && CleanPath::new(path).is_ok_and(|path| path.is_unchanged())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_in_normal_form_are_taken_as_received() {
        for target in ["/", "/a/b-c?d=%2F//e", "/a?"] {
            assert!(matches!(RequestTarget::read(target), Some(RequestTarget::Path(_))), "{target}");
        }
        for (target, expected) in [
            ("/a;b", "/a;b"),
            ("/a%2Fb?c", "/a%2Fb?c"),
            ("/a\"b", "/a\"b"),
            ("/a?b=\u{e9}", "/a?b=\u{e9}"),
            ("http://h/a?b#c", "/a?b"),
            ("http://h", "/"),
            ("h:80", "/"),
            ("*", "*"),
        ] {
            let read = RequestTarget::read(target).expect("a URI");
            assert!(matches!(read, RequestTarget::Other(_)), "{target}");
            assert_eq!(read.as_str(), expected, "{target}");
        }
        for target in ["", "a b", "http://", "/\u{7f}", "a/b"] {
            assert!(RequestTarget::read(target).is_none(), "{target}");
        }
    }

    #[test]
    fn authority_of_a_whole_url_is_its_host() {
        let target = RequestTarget::read("http://shop.example:81/a").expect("a URI");
        assert_eq!(target.authority().map(Authority::as_str), Some("shop.example:81"));
        assert!(RequestTarget::read("/a").expect("a path").authority().is_none());
    }
}
