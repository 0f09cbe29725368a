//! Requests: parsed from the client's bytes, and written for the upstream.

use std::mem::MaybeUninit;

use http::header::HOST;
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, Request, StatusCode, Version};
use tollgate::internal::{Unreadable, check_host, check_method};
use tollgate::rules::file::internal::{HostHeader, UpstreamHeader};

use super::super::client::Client;
use super::super::exchange::RequestGuard;
use super::super::failure::Failure;
use super::super::framing::{Ambiguity, FramingGuard};
use super::super::header_names::{DroppedHeaders, HeaderFilter, HeaderKind};
use super::super::headers;
use super::super::reuse::reads_body;
use super::super::site::{Edits, Route, Site, WeightedUpstream};
use super::request_body::{BodyLength, BodyStart, ReceivedBody, RequestBody};
use super::request_headers::{HeaderBuffer, HeadersView, RequestHeaders, RequestVersion};
use super::target::RequestTarget;
use super::text::{self, MAX_HEADERS};
use crate::traces::{TRACEPARENT, TRACESTATE};

/// The maximum length of a target, as in hyper.
const MAX_TARGET_BYTES: usize = (u16::MAX - 1) as usize;

/// The result of parsing the bytes of a request.
pub(super) enum RequestParse<'a> {
    /// A request whose head is complete.
    Complete(PlainRequest<'a>),
    /// The start of a request.
    Partial,
    /// A head that is too long, malformed or ambiguous.
    Invalid(InvalidHead),
}

/// The reason why a head could not be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InvalidHead {
    TooLong,
    TargetTooLong,
    Malformed,
    Ambiguous(Ambiguity),
}

impl InvalidHead {
    /// Returns the reason for a head that is malformed, or ambiguous: the framing checks distinguish these.
    fn of(bytes: &[u8]) -> Self {
        match FramingGuard::new().check(bytes, usize::MAX) {
            Ok(()) => Self::Malformed,
            Err((ambiguity, _)) => Self::Ambiguous(ambiguity),
        }
    }

    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::TooLong => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TargetTooLong => StatusCode::URI_TOO_LONG,
            Self::Malformed | Self::Ambiguous(_) => StatusCode::BAD_REQUEST,
        }
    }
}

/// A request whose length is unambiguous.
pub(super) struct PlainRequest<'a> {
    /// The bytes as received: the head, and the part of the body that has arrived.
    pub(super) bytes: &'a [u8],
    pub(super) method: &'a str,
    pub(super) target: RequestTarget<'a>,
    pub(super) headers: HeadersView<'a>,
    /// Headers that neither limits nor upstreams get.
    pub(super) dropped: DroppedHeaders,
    version: RequestVersion,
    /// The value of the `Host` header.
    host: Option<&'a [u8]>,
    /// The reason why it is refused before limits are checked.
    failure: Option<Failure>,
    length: BodyLength,
    /// The part of the body that has arrived.
    body: &'a [u8],
    /// The number of its content bytes.
    pub(super) content_bytes: u64,
    /// The part of the body that has not arrived.
    pub(super) rest: RequestBody,
    /// The bytes behind the request.
    pub(super) following: &'a [u8],
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

impl<'a> PlainRequest<'a> {
    pub(super) fn read<'b: 'a>(
        bytes: &'b [u8],
        lines: &'a mut HeaderBuffer<'b>,
        max_head: usize,
        filter: &HeaderFilter<'_>,
    ) -> RequestParse<'a> {
        let invalid = || RequestParse::Invalid(InvalidHead::of(bytes));
        let mut parsed = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut []);
        let head = match request.parse_with_uninit_headers(bytes, &mut parsed) {
            Ok(httparse::Status::Complete(head)) => head,
            // An ambiguous head need not be complete.
            Ok(httparse::Status::Partial) => {
                return match InvalidHead::of(bytes) {
                    InvalidHead::Malformed if bytes.len() < max_head => RequestParse::Partial,
                    InvalidHead::Malformed => RequestParse::Invalid(InvalidHead::TooLong),
                    ambiguous => RequestParse::Invalid(ambiguous),
                };
            }
            Err(httparse::Error::TooManyHeaders) => return RequestParse::Invalid(InvalidHead::TooLong),
            Err(_) => return invalid(),
        };
        let (Some(method), Some(target), Some(version)) = (request.method, request.path, request.version) else {
            return invalid();
        };
        if !ends_lines_in_crlf(&bytes[..head]) {
            return invalid();
        }
        if head > max_head {
            return RequestParse::Invalid(InvalidHead::TooLong);
        }
        if target.len() > MAX_TARGET_BYTES {
            return RequestParse::Invalid(InvalidHead::TargetTooLong);
        }
        let version = if version == 0 { RequestVersion::Http10 } else { RequestVersion::Http11 };
        let Some(target) = RequestTarget::read(target) else { return invalid() };
        let Some(headers) = RequestHeaders::read(request.headers, version, lines, filter) else { return invalid() };
        let RequestHeaders { host, failure, length, expects_continue, wants_trailers, is_grpc, is_last, upgrade } =
            headers;
        let BodyStart { bytes: body_bytes, content: content_bytes, rest } = length.split(&bytes[head..]);
        let (bytes, following) = bytes.split_at(head + body_bytes);
        RequestParse::Complete(Self {
            bytes,
            method,
            target,
            dropped: lines.dropped,
            headers: lines.view(),
            version,
            host,
            failure,
            length,
            body: &bytes[head..],
            content_bytes,
            rest,
            following,
            expects_continue,
            wants_trailers,
            is_grpc,
            is_last,
            upgrade,
        })
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

    /// Checks that the method and the host have only one interpretation.
    pub(super) fn check_readable(&self) -> Result<(), Unreadable> {
        check_method(self.method, self.target.received_str())?;
        self.host.map_or(Ok(()), check_host)?;
        self.target.authority().map_or(Ok(()), |authority| check_host(authority.as_str().as_bytes()))
    }

    /// Returns the host: that of the target, or of the `Host` header.
    fn host(&self) -> Option<&[u8]> {
        self.target.authority().map(|authority| authority.as_str().as_bytes()).or(self.host)
    }

    /// Returns whether the head announces a longer body than this.
    fn announces_more_than(&self, bytes: u64) -> bool {
        matches!(self.length, BodyLength::Known(length) if length > bytes)
    }

    pub(super) fn is_http10(&self) -> bool {
        self.version == RequestVersion::Http10
    }

    pub(super) fn is_head(&self) -> bool {
        self.method == "HEAD"
    }

    /// Returns the path, and the query if there is one.
    pub(super) fn path_and_query(&self) -> (&str, Option<&str>) {
        let target = self.target.as_str();
        target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)))
    }

    /// Returns the part of the body that has arrived.
    pub(super) fn received_body(&self) -> ReceivedBody {
        let mut received = ReceivedBody::default();
        match self.length {
            BodyLength::Known(_) => received.content.extend_from_slice(self.body),
            // Malformed chunks were found before.
            BodyLength::Chunked => _ = received.unchunk(&mut FramingGuard::for_request_chunks(), self.body),
        }
        received
    }

    /// Returns the length of the body, if the client announces it.
    pub(super) fn body_length(&self) -> Option<u64> {
        match self.length {
            BodyLength::Known(length) => Some(length),
            BodyLength::Chunked => None,
        }
    }

    /// Converts the head for hyper's client.
    pub(super) fn to_http<B>(&self, body: B) -> Option<Request<B>> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.parse().ok()?;
        *request.uri_mut() = self.target.uri()?;
        *request.version_mut() = if self.is_http10() { Version::HTTP_10 } else { Version::HTTP_11 };
        let map = request.headers_mut();
        for line in self.headers.lines {
            map.append(HeaderName::from_bytes(line.name.as_bytes()).ok()?, HeaderValue::from_bytes(line.value).ok()?);
        }
        headers::join_cookies(map);
        Some(request)
    }

    /// Returns whether it may be sent again if the response is lost.
    pub(super) fn may_repeat(&self) -> bool {
        self.length.is_empty() && matches!(self.method, "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "TRACE")
    }

    /// Returns whether it has a body that the upstream may take for the next request.
    pub(super) fn may_desync(&self) -> bool {
        !self.length.is_empty() && !reads_body(self.method)
    }

    /// Writes the request for the upstream, with the request ID if upstreams get one.
    pub(super) fn write(
        &self,
        out: &mut Vec<u8>,
        (site, route): (&Site, &Route),
        upstream: &WeightedUpstream,
        client: &Client,
        guard: &RequestGuard,
    ) -> Result<(), Failure> {
        let (id, traceparent) = (guard.id(), guard.span().traceparent());
        out.extend_from_slice(self.method.as_bytes());
        out.push(b' ');
        if route.changes_paths() {
            let uri = route.rewritten_uri(upstream, &self.target.uri().ok_or(Failure::BadTarget)?)?;
            out.extend_from_slice(uri.path_and_query().map_or("/", PathAndQuery::as_str).as_bytes());
        } else {
            out.extend_from_slice(self.target.as_str().as_bytes());
        }
        out.extend_from_slice(b" HTTP/1.1\r\n");
        let edits = &route.request_edits;
        let host = self.host();
        let lacks_host = host.is_none() && !edits.sets(&HOST);
        let is_upstreams_host = lacks_host || route.host == HostHeader::Upstream || edits.removes_for_good(&HOST);
        if is_upstreams_host {
            text::put(out, HOST.as_str(), upstream.target.host.as_bytes());
        } else if let Some(authority) = self.target.authority().filter(|_| !edits.removes(HOST.as_str())) {
            text::put(out, HOST.as_str(), authority.as_str().as_bytes());
        }
        let adds_x_forwarded = site.adds_header(UpstreamHeader::XForwarded);
        for (line, kind) in self.headers.iter() {
            let passes = match kind {
                HeaderKind::Host => !is_upstreams_host && self.target.authority().is_none(),
                // HTTP/1 upstreams get no trailers, so none are announced.
                HeaderKind::Connection
                | HeaderKind::Te
                | HeaderKind::Upgrade
                | HeaderKind::Expect
                | HeaderKind::TransferEncoding
                | HeaderKind::Trailer => false,
                HeaderKind::XForwardedFor => !adds_x_forwarded,
                HeaderKind::XRequestId => id.is_none(),
                _ => true,
            };
            let is_replaced = traceparent.is_some()
                && (line.name.eq_ignore_ascii_case(TRACEPARENT.as_str())
                    || line.name.eq_ignore_ascii_case(TRACESTATE.as_str()) && !guard.span().continues_trace());
            if passes && !is_replaced && !edits.removes(line.name) {
                text::put(out, line.name, line.value);
            }
        }
        if adds_x_forwarded {
            self.add_x_forwarded(out, client, edits);
        }
        if site.adds_header(UpstreamHeader::Forwarded) && !edits.removes("forwarded") {
            out.extend_from_slice(b"forwarded: ");
            headers::put_forwarded(out, client, host);
            out.extend_from_slice(b"\r\n");
        }
        if site.adds_header(UpstreamHeader::Via) && !edits.removes("via") {
            text::put(out, "via", if self.is_http10() { b"1.0 tollgate" } else { headers::OUR_VIA.as_bytes() });
        }
        if let Some(id) = id.filter(|_| !edits.removes("x-request-id")) {
            text::put(out, "x-request-id", id.as_bytes());
        }
        if let Some(traceparent) = traceparent.filter(|_| !edits.removes(TRACEPARENT.as_str())) {
            text::put(out, TRACEPARENT.as_str(), traceparent.as_bytes());
        }
        edits.write_new(out, |name| is_upstreams_host && *name == HOST);
        let wants_trailers = self.wants_trailers && !edits.removes("te");
        let upgrade = self.upgrade.filter(|_| !edits.removes("upgrade"));
        if wants_trailers {
            out.extend_from_slice(b"te: trailers\r\n");
        }
        if let Some(protocol) = upgrade {
            text::put(out, "upgrade", protocol);
        }
        match (upgrade, wants_trailers) {
            (Some(_), true) => out.extend_from_slice(b"connection: upgrade, te\r\n"),
            (Some(_), false) => out.extend_from_slice(text::UPGRADE),
            (None, true) => out.extend_from_slice(b"connection: te\r\n"),
            (None, false) => {}
        }
        if self.may_desync() && upgrade.is_none() {
            out.extend_from_slice(text::CLOSE);
        }
        match self.length {
            BodyLength::Known(_) => {
                out.extend_from_slice(b"\r\n");
                out.extend_from_slice(self.body);
            }
            BodyLength::Chunked => {
                out.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
                let mut chunks = RequestBody::Chunked(Box::new(FramingGuard::for_request_chunks()));
                chunks.take(self.body, out).map_err(|_ambiguity| Failure::BodyBroken)?;
            }
        }
        Ok(())
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
        if let Some(host) = self.host()
            && !is_present(HeaderKind::XForwardedHost)
            && !edits.removes("x-forwarded-host")
        {
            text::put(out, "x-forwarded-host", host);
        }
    }

    /// Returns the client's request ID, if there is exactly one and it is valid.
    pub(super) fn id(&self) -> Option<&'a [u8]> {
        let mut ids = self.headers.values(HeaderKind::XRequestId);
        let only = ids.next().filter(|_| ids.next().is_none())?;
        Some(only).filter(|id| headers::is_id(id))
    }
}

/// Returns whether no line ends in a bare LF, which httparse accepts. httparse rejects everything else that is
/// ambiguous.
fn ends_lines_in_crlf(head: &[u8]) -> bool {
    // Without an early return, so that the compiler can vectorize it.
    let behind_first = head.get(1..).unwrap_or_default();
    let is_bare = |(before, byte): (&u8, &u8)| *byte == b'\n' && *before != b'\r';
    head.first() != Some(&b'\n') && !head.iter().zip(behind_first).fold(false, |bare, pair| bare | is_bare(pair))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate::rules::TrustedProxies;
    use tollgate::rules::file::internal::UnderscoreHeaders;

    use super::*;

    /// Parses a request, and calls `check` with the result.
    fn read<T>(text: &[u8], check: impl FnOnce(RequestParse<'_>) -> T) -> T {
        let (proxies, peer) = (TrustedProxies::default(), [192, 0, 2, 1].into());
        let filter = HeaderFilter::with(UnderscoreHeaders::Refuse, &proxies, peer);
        check(PlainRequest::read(text, &mut HeaderBuffer::default(), MAX_HEAD, &filter))
    }

    const MAX_HEAD: usize = 64 << 10;

    /// Returns the length of a request, as far as it has arrived, and the rest of its body.
    fn parsed(text: &[u8]) -> Option<(usize, RequestBody)> {
        read(text, |parse| match parse {
            RequestParse::Complete(plain) => Some((plain.bytes.len(), plain.rest)),
            RequestParse::Partial | RequestParse::Invalid(_) => None,
        })
    }

    /// Returns the reason for which a request is refused before limits are checked, or `ok`.
    fn refusal(text: &str) -> String {
        read(text.as_bytes(), |parse| match parse {
            RequestParse::Complete(plain) => match (plain.failure(9), plain.check_readable()) {
                (Some(failure), _) => format!("{failure:?}"),
                (None, Err(problem)) => problem.reason().to_owned(),
                (None, Ok(())) => "ok".to_owned(),
            },
            RequestParse::Partial => "partial".to_owned(),
            RequestParse::Invalid(invalid) => format!("{invalid:?}"),
        })
    }

    #[test]
    fn requests_with_one_reading_pass() {
        for text in [
            "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "\r\nGET /a?b=c%20d HTTP/1.1\r\nhost: h:80\r\nConnection: Keep-Alive\r\nX: \t y \r\n\r\n",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
            "DELETE / HTTP/1.1\r\nContent-Length: 0\r\nHost: h\r\nConnection: close\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.0\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nConnection: x-user-id, close\r\nTE: trailers\r\nUpgrade: h2c\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nConnection: \u{e9}\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: other\r\n\r\n",
            "GET /a\"b HTTP/1.1\r\nHost: h\r\n\r\n",
            "OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\nhello",
            "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: h\r\nExpect: 200-ok\r\nContent-Length: 5\r\n\r\nhello",
            "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        ] {
            assert_eq!(refusal(text), "ok", "{text:?}");
        }
    }

    #[test]
    fn all_other_requests_are_refused_with_their_reason() {
        for (text, reason) in [
            ("GET / HTTP/1.1\r\n\r\n", "NoHost"),
            ("GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", "SeveralHosts"),
            ("GET / HTTP/1.1\r\nHost: a@b\r\n\r\n", "invalid_host"),
            ("GET / HTTP/1.1\r\nHost: h:x\r\n\r\n", "invalid_host"),
            ("GET http://a@h/ HTTP/1.1\r\nHost: h\r\n\r\n", "invalid_host"),
            ("get / HTTP/1.1\r\nHost: h\r\n\r\n", "method_case"),
            ("GET * HTTP/1.1\r\nHost: h\r\n\r\n", "asterisk_target"),
            ("CONNECT h:80 HTTP/1.1\r\n\r\n", "Connect"),
            ("CONNECT h:80 HTTP/1.1\r\nX_User_Id: 1\r\n\r\n", "UnderscoreHeader"),
            ("GET / HTTP/1.1\r\nHost: h\r\nX_User_Id: 1\r\n\r\n", "UnderscoreHeader"),
            ("post / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n", "BodyTooLong"),
            ("POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n", "NoHost"),
            ("GET /\u{7f} HTTP/1.1\r\nHost: h\r\n\r\n", "Malformed"),
            ("GET a/b HTTP/1.1\r\nHost: h\r\n\r\n", "Malformed"),
            ("GET / HTTP/3.0\r\nHost: h\r\n\r\n", "Malformed"),
            ("POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "Malformed"),
            ("GET / HTTP/1.1\r\nHost: h\n\r\n", "Ambiguous(BareLf)"),
            ("GET / HTTP/1.1\r\nHost: h\nX", "Ambiguous(BareLf)"),
            ("GET / HTTP/1.1\r\nHost: h", "partial"),
            ("GET / HTTP/1.1\r\nHost : h", "Malformed"),
            ("GET / HTTP/1.1\r\nHost : h\r\n", "Ambiguous(SpaceBeforeColon)"),
            ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +5\r\n\r\nhello", "Ambiguous(BadLength)"),
            (
                "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
                "Ambiguous(SeveralLengths)",
            ),
            (
                "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
                "Ambiguous(BadTransferCoding)",
            ),
            (
                "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
                "Ambiguous(BothLengths)",
            ),
        ] {
            assert_eq!(refusal(text), reason, "{text:?}");
        }
    }

    #[test]
    fn heads_that_are_too_long_are_refused() {
        let head = |target: usize, header: usize| {
            format!("GET /{} HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n", "a".repeat(target), "x".repeat(header))
        };
        assert_eq!(refusal(&head(9, MAX_HEAD - 100)), "ok");
        assert_eq!(refusal(&head(9, MAX_HEAD)), "TooLong");
        assert_eq!(refusal(&head(9, MAX_HEAD)[..MAX_HEAD]), "TooLong");
        assert_eq!(refusal(&head(9, MAX_HEAD)[..MAX_HEAD - 1]), "partial");
        let many = format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "X: y\r\n".repeat(MAX_HEADERS));
        assert_eq!(refusal(&many), "TooLong");
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
        /// The framing checks find the same end of every request.
        #[test]
        fn requests_end_where_the_framing_checks_say(pieces in proptest::collection::vec(0..PIECES.len(), 0..9), good in any::<bool>()) {
            let mut text = if good { "POST / HTTP/1.1\r\nHost: h\r\n".to_owned() } else { String::new() };
            text.extend(pieces.into_iter().map(|piece| PIECES[piece]));
            if let Some((bytes, rest)) = parsed(text.as_bytes()) {
                let (mut guard, mut ends, mut is_valid) = (FramingGuard::new(), 0, true);
                for byte in &text.as_bytes()[..bytes] {
                    is_valid &= guard.check(&[*byte], usize::MAX).is_ok();
                    ends += usize::from(is_valid && guard.is_between());
                }
                match rest {
                    RequestBody::Complete => prop_assert!(is_valid && guard.is_between() && ends == 1, "{text:?}"),
                    RequestBody::Invalid(_) => prop_assert!(!is_valid && ends == 0, "{text:?}"),
                    _ => prop_assert!(is_valid && ends == 0 && bytes == text.len(), "{text:?}"),
                }
            }
        }

        #[test]
        fn nothing_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            parsed(&bytes);
            parsed(&[&b"GET / HTTP/1.1\r\n"[..], &bytes, b"\r\n\r\n"].concat());
        }
    }
}
