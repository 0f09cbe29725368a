//! Plain requests: parsed from the client's bytes, and written for the upstream.

use std::mem::MaybeUninit;

use http::HeaderValue;
use http::header::HOST;
use http::uri::{PathAndQuery, Uri};
use smallvec::SmallVec;
use tollgate::internal::{CleanPath, HeaderLine, check_host, check_method};
use tollgate::rules::file::internal::{HostHeader, UpstreamHeader};

use super::super::client::Client;
use super::super::exchange::Worker;
use super::super::failure::Failure;
use super::super::framing::FramingGuard;
use super::super::header_names::{DroppedHeaders, Fate, HeaderFilter, HeaderKind, kind};
use super::super::headers::{self, ByteKind, letters_digits_and};
use super::super::reuse::reads_body;
use super::super::site::{Edits, Route, Site, WeightedUpstream};
use super::text::{self, MAX_HEADERS};

/// The result of parsing the bytes of a request.
pub(super) enum RequestParse<'a> {
    /// Exactly one request.
    Complete(PlainRequest<'a>),
    /// The start of a request.
    Partial,
    /// Anything else. hyper has to handle it.
    NotPlain,
}

/// The headers of a message and their kinds.
#[derive(Default)]
pub(super) struct HeaderBuffer<'a> {
    lines: SmallVec<[HeaderLine<'a>; 24]>,
    kinds: SmallVec<[HeaderKind; 24]>,
    dropped: DroppedHeaders,
}

impl<'a> HeaderBuffer<'a> {
    pub(super) fn push(&mut self, header: &httparse::Header<'a>, kind: HeaderKind) {
        self.lines.push(HeaderLine { name: header.name, value: header.value });
        self.kinds.push(kind);
    }

    pub(super) fn view(&self) -> HeadersView<'_> {
        HeadersView { lines: &self.lines, kinds: &self.kinds }
    }
}

/// A view of a [`HeaderBuffer`].
#[derive(Clone, Copy)]
pub(super) struct HeadersView<'a> {
    pub(super) lines: &'a [HeaderLine<'a>],
    kinds: &'a [HeaderKind],
}

impl<'a> HeadersView<'a> {
    pub(super) fn iter(self) -> impl Iterator<Item = (&'a HeaderLine<'a>, HeaderKind)> {
        self.lines.iter().zip(self.kinds.iter().copied())
    }

    pub(super) fn values(self, wanted: HeaderKind) -> impl Iterator<Item = &'a [u8]> {
        self.iter().filter(move |(_, kind)| *kind == wanted).map(|(line, _)| line.value)
    }
}

/// A request that is unambiguous and needs no special handling.
pub(super) struct PlainRequest<'a> {
    /// The bytes as received.
    pub(super) bytes: &'a [u8],
    pub(super) method: &'a str,
    /// The path and the query.
    pub(super) target: &'a str,
    pub(super) headers: HeadersView<'a>,
    /// Headers that neither limits nor upstreams get.
    pub(super) dropped: DroppedHeaders,
    host: &'a [u8],
    body: &'a [u8],
    /// Whether the client wants the connection closed after the response.
    pub(super) is_last: bool,
}

impl<'a> PlainRequest<'a> {
    pub(super) fn read<'b: 'a>(
        bytes: &'b [u8],
        lines: &'a mut HeaderBuffer<'b>,
        max_head: usize,
        filter: &HeaderFilter<'_>,
    ) -> RequestParse<'a> {
        let mut parsed = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut []);
        let head = match request.parse_with_uninit_headers(bytes, &mut parsed) {
            Ok(httparse::Status::Complete(head)) => head,
            Ok(httparse::Status::Partial) if bytes.len() < max_head => {
                // An ambiguous head need not be complete.
                return if FramingGuard::new().check(bytes, usize::MAX).is_ok() {
                    RequestParse::Partial
                } else {
                    RequestParse::NotPlain
                };
            }
            _ => return RequestParse::NotPlain,
        };
        let (Some(method), Some(target), Some(1)) = (request.method, request.path, request.version) else {
            return RequestParse::NotPlain;
        };
        let is_plain = head <= max_head
            && method != "CONNECT"
            && check_method(method, target).is_ok()
            && is_path(target)
            && ends_lines_in_crlf(&bytes[..head]);
        let framing_headers = is_plain.then(|| read_headers(request.headers, lines, filter)).flatten();
        let Some(FramingHeaders { host, length, is_last }) = framing_headers else { return RequestParse::NotPlain };
        let body = &bytes[head..];
        if body.len() as u64 != length {
            return RequestParse::NotPlain;
        }
        let dropped = lines.dropped;
        RequestParse::Complete(Self { bytes, method, target, headers: lines.view(), dropped, host, body, is_last })
    }

    pub(super) fn body_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    pub(super) fn is_head(&self) -> bool {
        self.method == "HEAD"
    }

    /// Returns whether it may be sent again if the response is lost.
    pub(super) fn may_repeat(&self) -> bool {
        self.body.is_empty() && matches!(self.method, "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "TRACE")
    }

    /// Returns whether it has a body that the upstream may take for the next request.
    pub(super) fn may_desync(&self) -> bool {
        !self.body.is_empty() && !reads_body(self.method)
    }

    pub(super) fn uri(&self) -> Option<Uri> {
        self.target.parse().ok()
    }

    /// Writes the request for the upstream. Returns the request ID, if upstreams get one: the given one, the client's,
    /// or a new one.
    pub(super) fn write(
        &self,
        out: &mut Vec<u8>,
        (site, route): (&Site, &Route),
        upstream: &WeightedUpstream,
        (client, worker): (&Client, &Worker),
        id: Option<HeaderValue>,
    ) -> Result<Option<HeaderValue>, Failure> {
        out.extend_from_slice(self.method.as_bytes());
        out.push(b' ');
        if route.changes_paths() {
            let uri = route.rewritten_uri(upstream, &self.uri().ok_or(Failure::BadTarget)?)?;
            out.extend_from_slice(uri.path_and_query().map_or("/", PathAndQuery::as_str).as_bytes());
        } else {
            out.extend_from_slice(self.target.as_bytes());
        }
        out.extend_from_slice(b" HTTP/1.1\r\n");
        let edits = &route.request_edits;
        let is_upstreams_host = route.host == HostHeader::Upstream || edits.removes_for_good(&HOST);
        if is_upstreams_host {
            text::put(out, HOST.as_str(), upstream.target.host.as_bytes());
        }
        let (adds_x_forwarded, adds_id) =
            (site.adds_header(UpstreamHeader::XForwarded), site.adds_header(UpstreamHeader::RequestId));
        for (line, kind) in self.headers.iter() {
            let passes = match kind {
                HeaderKind::Host => !is_upstreams_host,
                // HTTP/1 upstreams get no trailers, so none are announced.
                HeaderKind::Connection | HeaderKind::HyperOnly | HeaderKind::TransferEncoding | HeaderKind::Trailer => {
                    false
                }
                HeaderKind::XForwardedFor => !adds_x_forwarded,
                HeaderKind::XRequestId => !adds_id,
                _ => true,
            };
            if passes && !edits.removes(line.name) {
                text::put(out, line.name, line.value);
            }
        }
        if adds_x_forwarded {
            self.add_x_forwarded(out, client, edits);
        }
        if site.adds_header(UpstreamHeader::Forwarded) && !edits.removes("forwarded") {
            out.extend_from_slice(b"forwarded: ");
            headers::put_forwarded(out, client, Some(self.host));
            out.extend_from_slice(b"\r\n");
        }
        if site.adds_header(UpstreamHeader::Via) && !edits.removes("via") {
            text::put(out, "via", headers::OUR_VIA.as_bytes());
        }
        let id = adds_id.then(|| id.or_else(|| self.id()).unwrap_or_else(|| worker.ids.next()));
        if let Some(id) = id.as_ref().filter(|_| !edits.removes("x-request-id")) {
            text::put(out, "x-request-id", id.as_bytes());
        }
        edits.write_new(out, |name| is_upstreams_host && *name == HOST);
        if self.may_desync() {
            out.extend_from_slice(text::CLOSE);
        }
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(self.body);
        Ok(id)
    }

    /// Appends to the headers of a trusted proxy. Those of others were dropped.
    fn add_x_forwarded(&self, out: &mut Vec<u8>, client: &Client, edits: &Edits) {
        if !edits.removes("x-forwarded-for") {
            out.extend_from_slice(b"x-forwarded-for: ");
            for hop in self.headers.values(HeaderKind::XForwardedFor) {
                out.extend_from_slice(hop);
                out.extend_from_slice(b", ");
            }
            out.extend_from_slice(client.address_text.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        let is_present = |kind| self.headers.values(kind).next().is_some();
        if !is_present(HeaderKind::XForwardedProto) && !edits.removes("x-forwarded-proto") {
            text::put(out, "x-forwarded-proto", client.scheme.as_str().as_bytes());
        }
        if !is_present(HeaderKind::XForwardedHost) && !edits.removes("x-forwarded-host") {
            text::put(out, "x-forwarded-host", self.host);
        }
    }

    /// Returns the client's request ID, if there is exactly one and it is valid.
    fn id(&self) -> Option<HeaderValue> {
        let mut ids = self.headers.values(HeaderKind::XRequestId);
        let only = ids.next().filter(|_| ids.next().is_none())?;
        HeaderValue::from_bytes(only).ok().filter(headers::is_id)
    }
}

/// Returns whether a target is a normalized, unambiguous path with an optional query.
fn is_path(target: &str) -> bool {
    static IN_QUERIES: ByteKind = letters_digits_and(b"/-._~?=&+:@!$'()*,;%[]|");
    let end = target.bytes().position(|byte| byte == b'?').unwrap_or(target.len());
    let (path, query) = target.split_at(end);
    path.starts_with('/')
        && query.bytes().all(|byte| IN_QUERIES[usize::from(byte)])
        && CleanPath::new(path).is_ok_and(|path| path.is_unchanged())
}

/// Returns whether no line ends in a bare LF, which httparse accepts. httparse rejects everything else that is
/// ambiguous.
fn ends_lines_in_crlf(head: &[u8]) -> bool {
    // Without an early return, so that the compiler can vectorize it.
    let behind_first = head.get(1..).unwrap_or_default();
    let is_bare = |(before, byte): (&u8, &u8)| *byte == b'\n' && *before != b'\r';
    head.first() != Some(&b'\n') && !head.iter().zip(behind_first).fold(false, |bare, pair| bare | is_bare(pair))
}

fn is_grpc(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    content_type.get(..GRPC.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(GRPC))
}

/// The headers that determine the framing and the host.
struct FramingHeaders<'a> {
    host: &'a [u8],
    length: u64,
    is_last: bool,
}

/// Reads the headers of a request. Returns `None` if it is not plain.
fn read_headers<'a>(
    parsed: &[httparse::Header<'a>],
    lines: &mut HeaderBuffer<'a>,
    filter: &HeaderFilter<'_>,
) -> Option<FramingHeaders<'a>> {
    let (mut host, mut length, mut is_last) = (None, None, false);
    for header in parsed {
        let (kind, value) = (kind(header.name), header.value);
        match kind {
            HeaderKind::Host => {
                let is_one = host.replace(value).is_none() && check_host(value).is_ok();
                is_one.then_some(())?;
            }
            HeaderKind::ContentLength => length.replace(text::length(value)?).is_none().then_some(())?,
            HeaderKind::Connection if value.eq_ignore_ascii_case(b"close") => is_last = true,
            HeaderKind::Connection if value.eq_ignore_ascii_case(b"keep-alive") => {}
            HeaderKind::Connection | HeaderKind::HyperOnly | HeaderKind::TransferEncoding => return None,
            HeaderKind::ContentType if is_grpc(value) => return None,
            _ => {}
        }
        match filter.fate(header.name, kind) {
            Fate::Kept => lines.push(header, kind),
            Fate::Dropped(reason) => lines.dropped.add(reason, 1),
            // hyper's path refuses it.
            Fate::Refused => return None,
        }
    }
    Some(FramingHeaders { host: host?, length: length.unwrap_or(0), is_last })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate::rules::TrustedProxies;
    use tollgate::rules::file::internal::UnderscoreHeaders;

    use super::*;

    fn is_plain(text: &[u8]) -> bool {
        let (proxies, peer) = (TrustedProxies::default(), [192, 0, 2, 1].into());
        let filter = HeaderFilter::with(UnderscoreHeaders::Refuse, &proxies, peer);
        matches!(PlainRequest::read(text, &mut HeaderBuffer::default(), 64 << 10, &filter), RequestParse::Complete(_))
    }

    #[test]
    fn plain_requests_are_recognized() {
        for text in [
            "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "\r\nGET /a?b=c%20d HTTP/1.1\r\nhost: h:80\r\nConnection: Keep-Alive\r\nX: \t y \r\n\r\n",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
            "DELETE / HTTP/1.1\r\nContent-Length: 0\r\nHost: h\r\nConnection: close\r\n\r\n",
        ] {
            assert!(is_plain(text.as_bytes()), "{text:?}");
        }
        for text in [
            "GET / HTTP/1.0\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a@b\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET /a\"b HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET /a%2Fb HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET /a;b HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET /a//b HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET /a/../b HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET /%61 HTTP/1.1\r\nHost: h\r\n\r\n",
            "get / HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h:x\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nConnection: x-user-id\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nX_User_Id: 1\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\nhello",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +5\r\n\r\nhello",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
            "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
            "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Type: Application/gRPC+proto\r\n\r\n",
        ] {
            assert!(!is_plain(text.as_bytes()), "{text:?}");
        }
    }

    /// Parts of requests, valid and invalid.
    const PIECES: [&str; 26] = [
        "GET / HTTP/1.1\r\n",
        "POST /a HTTP/1.1\r\n",
        "Host: h\r\n",
        "Content-Length: 5\r\n",
        "Content-Length: 0\r\n",
        "Content-Length : 5\r\n",
        "content-length: 5, 5\r\n",
        "Transfer-Encoding: chunked\r\n",
        "transfer-encoding: x\r\n",
        "\r\n",
        "\n",
        "\r",
        "\0",
        "hello",
        "X: y\n",
        "X: y\r\n",
        " folded\r\n",
        "\tx\r\n",
        "X\r\n",
        ": \r\n",
        "X: a\rb\r\n",
        "5\r\nhello\r\n0\r\n\r\n",
        "Connection: close\r\n",
        "X: \u{e9}\r\n",
        "GET  / HTTP/1.1\r\n",
        "Host: h\n\n",
    ];

    proptest! {
        /// The framing checks accept every plain request as exactly one message.
        #[test]
        fn ambiguous_requests_are_not_plain(pieces in proptest::collection::vec(0..PIECES.len(), 0..9), good in any::<bool>()) {
            let mut text = if good { "POST / HTTP/1.1\r\nHost: h\r\n".to_owned() } else { String::new() };
            text.extend(pieces.into_iter().map(|piece| PIECES[piece]));
            if is_plain(text.as_bytes()) {
                let (mut guard, mut ends) = (FramingGuard::new(), 0);
                for byte in text.as_bytes() {
                    prop_assert!(guard.check(&[*byte], usize::MAX).is_ok(), "{text:?}");
                    ends += usize::from(guard.is_between());
                }
                prop_assert!(guard.is_between() && ends == 1, "{text:?}");
            }
        }

        #[test]
        fn nothing_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            is_plain(&bytes);
            is_plain(&[&b"GET / HTTP/1.1\r\n"[..], &bytes, b"\r\n\r\n"].concat());
        }
    }
}
