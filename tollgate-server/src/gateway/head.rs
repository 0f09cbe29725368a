//! The head of a request: its lines with their meaning to a proxy. Requests of HTTP/1 and HTTP/2 become the same
//! [`RequestHead`], which routes, limits, logs and upstreams see.
//!
//! A head borrows its text: from the bytes of an HTTP/1 connection, or from a request of HTTP/2.

pub(super) mod headers;
pub(super) mod upstream_head;

use std::ops::Deref;

use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderName, HeaderValue, Uri, Version, header};
use hyper::body::Body;
use smallvec::SmallVec;
use tollgate_http::internal::HeaderLine;
use tollgate_rules::Facts;
use tollgate_rules::internal::{CleanPath, Unreadable, check_host, check_method, is_padded, is_same_host};

use self::headers::{DroppedHeaders, Fate, HeaderBuffer, HeaderFilter, HeaderKind, HeadersView, kind};
use super::client::Peer;
use super::failure::Failure;
use super::site::Site;

/// The length of a body as its head announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyLength {
    Known(u64),
    /// The end of the body shows it. HTTP/1 sends it in chunks.
    Unknown,
}

impl BodyLength {
    /// Returns the length, if the head announces it.
    pub(super) fn announced(self) -> Option<u64> {
        match self {
            Self::Known(length) => Some(length),
            Self::Unknown => None,
        }
    }

    /// Returns the length of a body that no header announces.
    pub(super) fn of(body: &impl Body) -> Self {
        if body.is_end_stream() { Self::Known(0) } else { Self::Unknown }
    }
}

/// The head of a request.
pub(super) struct RequestHead<'a> {
    pub(super) method: &'a str,
    pub(super) target: RequestTarget<'a>,
    /// HTTP/1.0, HTTP/1.1 or HTTP/2.
    pub(super) version: Version,
    pub(super) headers: HeadersView<'a>,
    /// Headers that neither limits nor upstreams get.
    pub(super) dropped: DroppedHeaders,
    /// The value of the `Host` header. Requests of HTTP/1.0 and HTTP/2 may have none.
    host: Option<&'a [u8]>,
    /// Whether there are several `Host` headers, or one that differs from the host of the target.
    names_several_hosts: bool,
    /// The reason why it is refused before limits are checked.
    failure: Option<Failure>,
    /// Whether the headers do not determine the length of the body.
    pub(super) has_bad_length: bool,
    pub(super) length: BodyLength,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub(super) expects_continue: bool,
    /// Whether the client accepts trailers.
    pub(super) wants_trailers: bool,
    /// Whether it is a gRPC call, whose refusals have another form.
    pub(super) is_grpc: bool,
    /// Whether the client wants the connection closed after the response.
    pub(super) is_last: bool,
    /// The protocols that the client wants to switch to.
    pub(super) upgrade: Option<&'a [u8]>,
}

/// The options in `Connection`.
#[derive(Default)]
struct ConnectionOptions<'a> {
    has_close: bool,
    has_keep_alive: bool,
    has_upgrade: bool,
    /// The others, which are names of headers.
    names: SmallVec<[&'a [u8]; 2]>,
}

impl<'a> RequestHead<'a> {
    /// Reads the request line and the headers of a request. Its body has the length `by_default` if no header announces another.
    pub(super) fn read<'b: 'a>(
        (method, target, version): (&'a str, RequestTarget<'a>, Version),
        headers: impl Iterator<Item = HeaderLine<'b>>,
        by_default: BodyLength,
        lines: &'a mut HeaderBuffer<'b>,
        filter: &HeaderFilter<'_>,
    ) -> Self {
        let (mut hosts, mut host, mut length) = (0_u32, None, None);
        let (mut options, mut upgrade) = (ConnectionOptions::default(), UpgradeHeader::Absent);
        let (mut expects_continue, mut wants_trailers, mut is_grpc, mut is_refused) = (false, false, false, false);
        let (is_http10, is_http2) = (version == Version::HTTP_10, version == Version::HTTP_2);
        let (mut has_bad_length, mut has_looped) = (false, false);
        for header in headers {
            let (kind, value) = (kind(header.name), header.value);
            match kind {
                HeaderKind::Host => {
                    hosts += 1;
                    host.get_or_insert(value);
                }
                HeaderKind::ContentLength => match headers::length(value) {
                    Some(bytes) => has_bad_length |= length.replace(BodyLength::Known(bytes)).is_some(),
                    None => has_bad_length = true,
                },
                HeaderKind::TransferEncoding => {
                    let is_chunked = value.eq_ignore_ascii_case(b"chunked") && version == Version::HTTP_11;
                    has_bad_length |= !is_chunked || length.replace(BodyLength::Unknown).is_some();
                }
                // Other expectations are ignored (RFC 9110, section 10.1.1).
                HeaderKind::Expect => expects_continue |= lists(value, b"100-continue") && !is_http10,
                HeaderKind::Connection => options.add(value),
                HeaderKind::Te => wants_trailers |= lists(value, b"trailers"),
                HeaderKind::Upgrade => upgrade.add(value),
                HeaderKind::ContentType => is_grpc |= is_grpc_type(value),
                HeaderKind::Via => has_looped |= upstream_head::has_own_entry(value),
                _ => {}
            }
            match filter.fate(header.name, kind) {
                Fate::Kept => lines.push(header, kind),
                Fate::Dropped(reason) => lines.dropped.add(reason, 1),
                Fate::Refused => is_refused = true,
            }
        }
        if !options.names.is_empty() {
            lines.remove_named(&options.names);
        }
        // RFC 9113, section 8.3.1: a `Host` that differs from `:authority` makes a request malformed. In HTTP/1, servers in
        // front of the gateway may read either of the two.
        let differs = |authority: &Authority| {
            host.is_some_and(|host| !is_same_host(host, authority.as_str().as_bytes(), target.default_port()))
        };
        let names_several_hosts = hosts > 1 || target.authority().is_some_and(differs);
        let may_lack_host = is_http10 || is_http2 && target.authority().is_some();
        let length = length.unwrap_or(by_default);
        // A stream that has ended has no body.
        has_bad_length |= is_http2 && by_default == BodyLength::Known(0) && length != by_default;
        let failure = match hosts {
            _ if is_refused => Some(Failure::UnderscoreHeader),
            0 if !may_lack_host => Some(Failure::NoHost),
            _ if has_bad_length => Some(Failure::BadLength),
            _ if has_looped => Some(Failure::Loop),
            _ => None,
        };
        Self {
            method,
            target,
            version,
            dropped: lines.dropped,
            headers: lines.view(),
            host,
            names_several_hosts,
            failure,
            has_bad_length,
            length,
            expects_continue,
            wants_trailers,
            is_grpc,
            is_last: options.has_close || is_http10 && !options.has_keep_alive,
            upgrade: upgrade.protocol().filter(|_| options.has_upgrade && version == Version::HTTP_11),
        }
    }

    /// Returns the head of a request of HTTP/2, or of one that was converted for an upstream with HTTP/2.
    pub(super) fn of_parts<'b: 'a>(
        parts: &'b Parts,
        by_default: BodyLength,
        lines: &'a mut HeaderBuffer<'b>,
        filter: &HeaderFilter<'_>,
    ) -> Self {
        let target = RequestTarget::Uri(ReceivedUri::Borrowed(&parts.uri), None);
        let line = (parts.method.as_str(), target, parts.version);
        Self::read(line, lines_of(&parts.headers), by_default, lines, filter)
    }

    /// Returns the reason why it is refused before limits are checked, if there is one.
    pub(super) fn failure(&self, max_body: u64) -> Option<Failure> {
        match self.failure {
            Some(Failure::UnderscoreHeader) => self.failure,
            _ if self.method == "CONNECT" => Some(Failure::Connect),
            None if self.announces_more_than(max_body) => Some(Failure::BodyTooLong),
            failure => failure,
        }
    }

    /// Checks that everything except the path has only one interpretation.
    pub(super) fn check_readable(&self) -> Result<(), Unreadable> {
        check_method(self.method, self.target.received_str())?;
        self.host.map_or(Ok(()), check_host)?;
        self.target.authority().map_or(Ok(()), |authority| check_host(authority.as_str().as_bytes()))?;
        if self.names_several_hosts {
            return Err(Unreadable::SeveralHosts);
        }
        // The parser of HTTP/1 has trimmed them.
        let is_http2 = self.version == Version::HTTP_2;
        match self.headers.lines.iter().find(|line| is_http2 && is_padded(line.value)) {
            Some(line) => Err(Unreadable::PaddedHeader(line.name.into())),
            None => Ok(()),
        }
    }

    /// Brings the target into normal form, and finds the route.
    pub(super) fn find_route(&mut self, site: &Site, peer: Peer<'_>) -> Result<Option<usize>, Unreadable> {
        self.check_readable()?;
        let (method, lines) = (self.method, self.headers.lines);
        let find =
            |authority: Option<&Authority>, target: &str| site.find(&facts((method, lines), authority, target, peer));
        self.target.normalize(site, find)
    }

    /// Returns the facts for limits and routes.
    #[inline(always)]
    pub(super) fn facts<'f>(&'f self, peer: Peer<'f>) -> Facts<'f> {
        facts((self.method, self.headers.lines), self.target.authority(), self.target.as_str(), peer)
    }

    /// Returns the host: that of the target, or of the `Host` header.
    pub(in crate::gateway) fn host(&self) -> Option<&[u8]> {
        self.target.authority().map(|authority| authority.as_str().as_bytes()).or(self.host)
    }

    /// Returns whether the head announces a longer body than this.
    fn announces_more_than(&self, bytes: u64) -> bool {
        matches!(self.length, BodyLength::Known(length) if length > bytes)
    }

    pub(super) fn is_http10(&self) -> bool {
        self.version == Version::HTTP_10
    }

    pub(super) fn is_head(&self) -> bool {
        self.method == "HEAD"
    }

    pub(super) fn has_body(&self) -> bool {
        self.length != BodyLength::Known(0)
    }

    /// Returns the path, and the query if there is one.
    pub(super) fn path_and_query(&self) -> (&str, Option<&str>) {
        let target = self.target.as_str();
        target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)))
    }

    /// Returns how often a request with TRACE or OPTIONS may still be forwarded, if it says so (RFC 9110, section 7.6.2).
    /// Other methods have no such bound.
    pub(super) fn forwards_left(&self) -> Option<u64> {
        if !matches!(self.method, "TRACE" | "OPTIONS") {
            return None;
        }
        let numbers = self.headers.values(HeaderKind::MaxForwards).map(|value| {
            let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
            // A number that is too large is no bound in practice.
            is_number.then(|| str::from_utf8(value).ok()?.parse().ok()).map(|number| number.unwrap_or(u64::MAX))
        });
        // An invalid value is forwarded unchanged.
        numbers.collect::<Option<SmallVec<[u64; 1]>>>()?.into_iter().min()
    }

    /// Returns whether it may be sent again if the response is lost.
    pub(super) fn may_repeat(&self) -> bool {
        !self.has_body() && is_idempotent(self.method)
    }

    /// Returns whether it has a body that the upstream may take for the next request.
    pub(super) fn may_desync(&self) -> bool {
        self.has_body() && !reads_body(self.method)
    }
}

/// The target of a request: nearly always a path in normal form, sometimes another spelling, a whole URL, or `*`.
pub(super) enum RequestTarget<'a> {
    /// A path in normal form, with an optional query. Limits and upstreams get it as received.
    Path(&'a str),
    /// Any other target, or one of HTTP/2, and its form for limits and upstreams, where that differs.
    Uri(ReceivedUri<'a>, Option<Box<Uri>>),
}

/// A target as received.
pub(super) enum ReceivedUri<'a> {
    /// Boxed, because few requests have one.
    Own(Box<Uri>),
    Borrowed(&'a Uri),
}

impl Deref for ReceivedUri<'_> {
    type Target = Uri;

    fn deref(&self) -> &Uri {
        match self {
            Self::Own(uri) => uri,
            Self::Borrowed(uri) => uri,
        }
    }
}

impl<'a> RequestTarget<'a> {
    /// Parses a target. Returns `None` if it is invalid.
    pub(super) fn read(target: &'a str) -> Option<Self> {
        if is_normal(target) {
            return Some(Self::Path(target));
        }
        Some(Self::Uri(ReceivedUri::Own(Box::new(target.parse().ok()?)), None))
    }

    /// Brings the target into normal form. Returns the route that `find` returns for its host, if it has one, and its
    /// path and query.
    fn normalize(
        &mut self,
        site: &Site,
        find: impl Fn(Option<&Authority>, &str) -> Option<usize>,
    ) -> Result<Option<usize>, Unreadable> {
        match self {
            Self::Path(path) => Ok(find(None, path)),
            Self::Uri(received, normalized) => {
                let (route, uri) = site.normalize(received, |target: &str| find(received.authority(), target))?;
                *normalized = uri.map(Box::new);
                Ok(route)
            }
        }
    }

    /// Brings the target into the form that it has for a route.
    pub(super) fn normalize_for(&mut self, site: &Site, route: Option<usize>) {
        if let Self::Uri(received, normalized) = self {
            *normalized = site.normalized_for(received, route).map(Box::new);
        }
    }

    /// Returns the normal form of the target, where it differs.
    pub(super) fn into_normalized(self) -> Option<Uri> {
        match self {
            Self::Path(_) => None,
            Self::Uri(_, normalized) => normalized.map(|uri| *uri),
        }
    }

    /// Returns the path and the query for limits and upstreams.
    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Path(path) => path,
            Self::Uri(received, normalized) => path_and_query(normalized.as_deref().unwrap_or(received)),
        }
    }

    /// Returns the path and the query as received.
    pub(super) fn received_str(&self) -> &str {
        match self {
            Self::Path(path) => path,
            Self::Uri(received, _) => path_and_query(received),
        }
    }

    /// Returns whether the target is only a host, with an optional port. Only CONNECT has such a target (RFC 9112, section
    /// 3.2.3).
    pub(super) fn is_authority_only(&self) -> bool {
        matches!(self, Self::Uri(received, _) if received.scheme().is_none() && received.authority().is_some())
    }

    /// Returns the port that a host without one has, by the scheme of the target.
    fn default_port(&self) -> Option<u16> {
        match self {
            Self::Uri(received, _) if received.scheme_str() == Some("https") => Some(443),
            _ => Some(80),
        }
    }

    /// Returns the host of a target that is a whole URL. The `Host` header names the same one.
    pub(super) fn authority(&self) -> Option<&Authority> {
        match self {
            Self::Path(_) => None,
            Self::Uri(received, _) => received.authority(),
        }
    }

    /// Returns the target for limits and upstreams.
    pub(super) fn uri(&self) -> Option<Uri> {
        match self {
            Self::Uri(_, Some(normalized)) => Some(Uri::clone(normalized)),
            _ => self.received(),
        }
    }

    /// Returns the target as received.
    pub(super) fn received(&self) -> Option<Uri> {
        match self {
            Self::Path(path) => path.parse().ok(),
            Self::Uri(received, _) => Some(Uri::clone(received)),
        }
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

/// Returns whether a request with this method has the same effect if it is sent twice (RFC 9110, section 9.2.2).
pub(super) fn is_idempotent(method: &str) -> bool {
    matches!(method, "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "TRACE")
}

/// Returns whether upstreams read the bodies of requests with this method. For other methods a body has no defined
/// meaning: some upstreams ignore it, and take its bytes for the next request on the connection.
pub(super) fn reads_body(method: &str) -> bool {
    matches!(method, "POST" | "PUT" | "PATCH")
}

/// Returns the headers that are not dropped, or `None` if the request is refused because of one.
pub(super) fn kept_headers(headers: &HeaderMap, filter: &HeaderFilter<'_>) -> Option<HeaderMap> {
    let mut lines = HeaderBuffer::default();
    let line = ("GET", RequestTarget::Path("/"), Version::HTTP_11);
    let head = RequestHead::read(line, lines_of(headers), BodyLength::Known(0), &mut lines, filter);
    if head.failure == Some(Failure::UnderscoreHeader) {
        return None;
    }
    let pair = |line: &HeaderLine<'_>| {
        Some((HeaderName::from_bytes(line.name.as_bytes()).ok()?, HeaderValue::from_bytes(line.value).ok()?))
    };
    Some(head.headers.lines.iter().filter_map(pair).collect())
}

fn lines_of(headers: &HeaderMap) -> impl Iterator<Item = HeaderLine<'_>> {
    headers.iter().map(|(name, value)| HeaderLine { name: name.as_str(), value: value.as_bytes() })
}

#[inline(always)]
fn facts<'f>(
    (method, lines): (&'f str, &'f [HeaderLine<'f>]),
    authority: Option<&'f Authority>,
    target: &'f str,
    peer: Peer<'f>,
) -> Facts<'f> {
    let facts = peer.add_to(Facts::new(method, target).headers(lines));
    authority.map_or(facts, |authority| facts.host(authority.as_str()))
}

/// Joins the pieces of a cookie, which HTTP/2 may split (RFC 9113, section 8.2.3). A padded piece stays visible, because
/// it is refused.
pub(super) fn join_cookies(headers: &mut HeaderMap) {
    let pieces = headers.get_all(header::COOKIE);
    if pieces.iter().nth(1).is_none() || pieces.iter().any(|piece| is_padded(piece.as_bytes())) {
        return;
    }
    let pieces: Vec<&[u8]> = pieces.iter().map(HeaderValue::as_bytes).collect();
    if let Ok(whole) = HeaderValue::from_bytes(&pieces.join(&b"; "[..])) {
        headers.insert(header::COOKIE, whole);
    }
}

/// The `Upgrade` headers of a request.
enum UpgradeHeader<'a> {
    Absent,
    /// The value of the first one.
    Other(&'a [u8]),
    /// They name another version of HTTP. Limits would not apply to its requests.
    Http,
}

impl<'a> UpgradeHeader<'a> {
    fn add(&mut self, value: &'a [u8]) {
        const HTTP: [&[u8]; 4] = [b"h2c", b"h2", b"http", b"tls"];
        let names = value.split(|byte| *byte == b',').filter_map(|name| name.split(|byte| *byte == b'/').next());
        let names = names.map(<[u8]>::trim_ascii);
        let is_http = |name: &[u8]| HTTP.iter().any(|http| http.eq_ignore_ascii_case(name));
        *self = match self {
            _ if !is_text(value) || names.into_iter().any(is_http) => Self::Http,
            Self::Absent => Self::Other(value),
            Self::Other(first) => Self::Other(first),
            Self::Http => Self::Http,
        };
    }

    /// Returns the protocols that the client accepts, if it may switch to them.
    fn protocol(self) -> Option<&'a [u8]> {
        match self {
            Self::Other(protocol) => Some(protocol),
            Self::Absent | Self::Http => None,
        }
    }
}

impl<'a> ConnectionOptions<'a> {
    /// Adds the options in a value. One that is not text names no header.
    fn add(&mut self, value: &'a [u8]) {
        // Nearly all clients send this, or nothing.
        if value.eq_ignore_ascii_case(b"keep-alive") {
            self.has_keep_alive = true;
            return;
        }
        if !is_text(value) {
            return;
        }
        for option in value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
            match option {
                b"" => {}
                option if option.eq_ignore_ascii_case(b"keep-alive") => self.has_keep_alive = true,
                option if option.eq_ignore_ascii_case(b"close") => self.has_close = true,
                option if option.eq_ignore_ascii_case(b"upgrade") => self.has_upgrade = true,
                name => self.names.push(name),
            }
        }
    }
}

fn is_text(value: &[u8]) -> bool {
    value.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\t'))
}

/// Returns whether a list contains a word, with or without parameters.
fn lists(value: &[u8], word: &[u8]) -> bool {
    let words = value.split(|byte| *byte == b',').filter_map(|one| one.split(|byte| *byte == b';').next());
    words.map(<[u8]>::trim_ascii).any(|one| one.eq_ignore_ascii_case(word))
}

fn is_grpc_type(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let parts = content_type.split_at_checked(GRPC.len());
    parts.is_some_and(|(media_type, rest)| {
        media_type.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
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
            assert!(matches!(read, RequestTarget::Uri(..)), "{target}");
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
