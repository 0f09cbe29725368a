//! Heads of messages: requests are parsed from the client's bytes and written for the upstream, responses the other way.
//!
//! A server behind the gateway may interpret an ambiguous head differently, and take the body of one request for another
//! request (request smuggling). So a request that is not in the strict form is refused, and its connection is closed. The
//! parsers are in `tollgate_http1`; here, heads get their meaning to a proxy.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::DATE;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Version};
use tollgate_http::internal::HeaderLine;
use tollgate_http1::{
    Ambiguity, BodyDecoder, Framing, InvalidHead, InvalidResponse, ParsedRequest, ParsedResponse, TrailerNames,
    header_slots,
};
use tollgate_rules::Outcome;

use crate::gateway::failure::{ConnectError, Failure, Fault};
use crate::gateway::head::headers::{self, Edits, HeaderBuffer, HeaderFilter, HeaderKind, HeadersView, X_REQUEST_ID};
use crate::gateway::head::upstream_head::{RequestContext, UpstreamHead, via};
use crate::gateway::head::{BodyLength, RequestHead, RequestTarget, join_cookies};
use crate::gateway::site::Route;
use crate::gateway::splice;
use crate::gateway::upstream::RouteUpstream;
use crate::gateway::upstream::conn::Http1Conn;
use crate::gateway::upstream::tls::TlsFault;

/// The capacity of a map for headers that the gateway adds.
const ADDED_HEADERS: usize = 8;

/// A request whose length is unambiguous.
pub(in crate::gateway) struct PlainRequest<'a> {
    pub(in crate::gateway) head: RequestHead<'a>,
    /// The bytes as received: the head, and the part of the body that has arrived.
    pub(in crate::gateway) bytes: &'a [u8],
    /// The part of the body that has arrived.
    body: &'a [u8],
    /// The number of its content bytes.
    pub(super) content_bytes: u64,
    /// The decoder of the part that has not arrived, unless the body is malformed.
    pub(in crate::gateway) rest: Result<BodyDecoder, Ambiguity>,
}

impl<'a> PlainRequest<'a> {
    /// Parses a request. Returns `None` if its head is incomplete.
    pub(in crate::gateway) fn read<'b: 'a>(
        bytes: &'b [u8],
        lines: &'a mut HeaderBuffer<'b>,
        max_head: usize,
        filter: &HeaderFilter<'_>,
    ) -> Result<Option<Self>, InvalidHead> {
        let invalid = || Err(InvalidHead::of(bytes));
        let mut slots = header_slots();
        let Some(parsed) = ParsedRequest::read(bytes, &mut slots, max_head)? else { return Ok(None) };
        let ParsedRequest { method, target, version, headers, bytes: head_bytes, .. } = parsed;
        let Some(target) = RequestTarget::read(target) else { return invalid() };
        if target.is_authority_only() && method != "CONNECT" {
            return invalid();
        }
        let headers = headers.iter().map(|header| HeaderLine { name: header.name, value: header.value });
        let head = RequestHead::read((method, target, version), headers, BodyLength::Known(0), lines, filter);
        if head.has_bad_length {
            return invalid();
        }
        let mut rest = parsed.body;
        let (body_bytes, content_bytes, rest) = match rest.skip(&bytes[head_bytes..]) {
            Ok((taken, content)) => (taken, content as u64, Ok(rest)),
            Err(ambiguity) => (bytes.len() - head_bytes, 0, Err(ambiguity)),
        };
        let bytes = &bytes[..head_bytes + body_bytes];
        Ok(Some(Self { head, bytes, body: &bytes[head_bytes..], content_bytes, rest }))
    }

    /// Returns the content of the part of the body that has arrived, and the decoder of the rest, which keeps trailers.
    pub(super) fn received_body(&self) -> (Vec<u8>, BodyDecoder) {
        let (mut rest, mut content) = (BodyDecoder::of_request(self.head.length.announced()), Vec::new());
        rest.keep_trailers();
        // Malformed chunks were found before.
        if let Ok(part) = rest.pass(self.body, &Framing::Raw, &mut content) {
            content.extend_from_slice(part.bytes);
        }
        (content, rest)
    }

    /// Returns the length of the body, if the client announces it.
    pub(super) fn body_length(&self) -> Option<u64> {
        self.head.length.announced()
    }

    /// Converts the head for another client than the server's. That client frames the body, which may have been received
    /// in the meantime.
    pub(super) fn to_parts(&self) -> Option<Parts> {
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = self.head.method.parse().ok()?;
        parts.uri = self.head.target.uri()?;
        parts.version = self.head.version;
        let is_framing = |line: &&HeaderLine<'_>| headers::kind(line.name) == HeaderKind::TransferEncoding;
        for line in self.head.headers.lines.iter().filter(|line| !is_framing(line)) {
            let (name, value) = (HeaderName::from_bytes(line.name.as_bytes()), HeaderValue::from_bytes(line.value));
            parts.headers.append(name.ok()?, value.ok()?);
        }
        join_cookies(&mut parts.headers);
        Some(parts)
    }

    /// Writes the request for the upstream, and the part of the body that has arrived.
    pub(in crate::gateway) fn write(
        &self,
        out: &mut Vec<u8>,
        to: (&Route, &RouteUpstream),
        request: RequestContext<'_>,
    ) -> Result<(), Failure> {
        UpstreamHead::new(&self.head, to, request).write(out)?;
        let part = BodyDecoder::of_request(self.head.length.announced()).pass(self.body, &Framing::CHUNKED, out);
        out.extend_from_slice(part.map_err(|_ambiguity| Failure::BodyBroken)?.bytes);
        Ok(())
    }
}

/// The head of a response. Its headers are in a [`HeaderBuffer`].
pub(in crate::gateway) struct ResponseHead<'a> {
    pub(in crate::gateway) status: StatusCode,
    reason: &'a [u8],
    /// The length of the head.
    pub(in crate::gateway) bytes: usize,
    pub(in crate::gateway) body: BodyDecoder,
    /// Whether the upstream accepts another request on the connection.
    pub(super) stays_open: bool,
    /// HTTP/1.0 or HTTP/1.1.
    version: Version,
}

/// The reason why there is no response head.
pub(in crate::gateway) struct HeadError {
    pub(in crate::gateway) fault: Fault,
    /// Whether nothing of a response has arrived.
    pub(super) is_silent: bool,
}

impl HeadError {
    pub(in crate::gateway) fn failed(failure: Failure) -> Self {
        Self { fault: failure.into(), is_silent: false }
    }
}

/// The most bytes that are read at once if a long body is expected behind the head: those of the body that arrive with
/// the head are copied, and the others are not.
const SHORT_READ: usize = 4096;

/// The use of a response head.
pub(in crate::gateway) enum HeadUse<T> {
    /// The next one is wanted.
    Skipped,
    /// It is wanted again by the next call.
    Kept(T),
    Taken(T),
}

/// Reads the heads of responses, to HEAD if `is_head`, until `take` wants no other. It gets each with all bytes from its start
/// on. `input` is a buffer.
pub(super) fn poll_head<T>(
    conn: &mut Http1Conn,
    (input, is_head): (&mut [u8], bool),
    context: &mut Context<'_>,
    mut take: impl FnMut(ResponseHead<'_>, HeadersView<'_>, &[u8], &mut Context<'_>) -> HeadUse<T>,
) -> Poll<Result<T, HeadError>> {
    let mut has_unparsed = std::mem::take(&mut conn.has_kept_head);
    // An upstream may respond before it has read the whole request.
    let sent = conn.poll_send(context);
    // The bytes that are not parsed yet.
    let (mut begin, mut end) = (0, conn.head_bytes.len());
    input[..end].copy_from_slice(&conn.head_bytes);
    loop {
        if !std::mem::take(&mut has_unparsed) {
            let is_silent = begin == end;
            let broken = |error: Option<&io::Error>| HeadError { fault: broken(error), is_silent };
            if end == input.len() {
                input.copy_within(begin.., 0);
                (begin, end) = (0, end - begin);
            }
            let most = if conn.has_long_bodies { input.len().min(end + SHORT_READ) } else { input.len() };
            match conn.poll_read(&mut input[end..most], context) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(broken(None))),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(broken(Some(&error)))),
                Poll::Ready(Ok(read)) => end += read,
                Poll::Pending => {
                    conn.head_bytes.clear();
                    conn.head_bytes.extend_from_slice(&input[begin..end]);
                    return match sent {
                        Poll::Ready(Err(error)) => Poll::Ready(Err(broken(Some(&error)))),
                        _ => Poll::Pending,
                    };
                }
            }
        }
        let bytes = &input[begin..end];
        let mut lines = HeaderBuffer::default();
        let failure = match ResponseHead::read(bytes, &mut lines, is_head) {
            Ok(Some(head)) if head.is_interim() && !conn.note_interim() => Failure::InvalidResponse,
            Ok(Some(head)) => {
                let head_bytes = head.bytes;
                if !head.is_interim() {
                    conn.has_long_bodies &= head.body.long_rest(splice::MIN_BYTES).is_some();
                    conn.usage.note_keep_alive(head.keep_alive(lines.view()));
                }
                match take(head, lines.view(), bytes, context) {
                    HeadUse::Skipped => {
                        begin += head_bytes;
                        has_unparsed = begin < end;
                        continue;
                    }
                    HeadUse::Kept(value) => {
                        (conn.head_bytes, conn.has_kept_head) = (bytes.to_vec(), true);
                        return Poll::Ready(Ok(value));
                    }
                    HeadUse::Taken(value) => {
                        conn.head_bytes = Vec::new();
                        return Poll::Ready(Ok(value));
                    }
                }
            }
            Ok(None) if bytes.len() < input.len() => continue,
            Ok(None) => Failure::ResponseHeadTooLong,
            Err(failure) => failure,
        };
        return Poll::Ready(Err(HeadError::failed(failure)));
    }
}

/// Returns the fault of a broken connection.
pub(super) fn broken(error: Option<&io::Error>) -> Fault {
    match error.and_then(TlsFault::of_alert) {
        Some(fault) => ConnectError::Tls(fault).into(),
        None => Failure::Disconnected.into(),
    }
}

impl<'a> ResponseHead<'a> {
    /// Parses a head, of a response to HEAD if `is_head`. Returns `None` if it is incomplete.
    pub(super) fn read(bytes: &'a [u8], lines: &mut HeaderBuffer<'a>, is_head: bool) -> Result<Option<Self>, Failure> {
        let mut slots = header_slots();
        let parsed = match ParsedResponse::read(bytes, &mut slots, is_head) {
            Ok(Some(parsed)) => parsed,
            Ok(None) => return Ok(None),
            Err(InvalidResponse::TooManyHeaders) => return Err(Failure::ResponseHeadTooLong),
            Err(InvalidResponse::Malformed) => return Err(Failure::InvalidResponse),
        };
        for header in parsed.headers {
            lines.push(HeaderLine { name: header.name, value: header.value }, headers::kind(header.name));
        }
        let ParsedResponse { status, reason, version, bytes, body, stays_open, .. } = parsed;
        Ok(Some(Self { status, reason, bytes, body, stays_open, version }))
    }

    /// Returns whether another response follows.
    pub(super) fn is_interim(&self) -> bool {
        self.status.is_informational() && !self.switches()
    }

    /// Returns whether another protocol follows.
    pub(super) fn switches(&self) -> bool {
        self.status == StatusCode::SWITCHING_PROTOCOLS
    }

    pub(in crate::gateway) fn version(&self) -> Version {
        self.version
    }

    /// Returns the values of `Keep-Alive`.
    pub(in crate::gateway) fn keep_alive<'l>(&self, lines: HeadersView<'l>) -> impl Iterator<Item = &'l [u8]> {
        let hop_by_hop = lines.iter().filter(|(_, kind)| *kind == HeaderKind::HopByHop).map(|(line, _)| line);
        hop_by_hop.filter(|line| line.name.eq_ignore_ascii_case("keep-alive")).map(|line| line.value)
    }

    /// Returns the headers that the client gets, unless the gateway sends others.
    fn passing<'l>(&self, lines: HeadersView<'l>) -> impl Iterator<Item = (&'l HeaderLine<'l>, HeaderKind)> {
        let has_length = !self.status.is_informational() && self.status != StatusCode::NO_CONTENT;
        lines.iter().filter(move |(line, kind)| match kind {
            HeaderKind::ContentLength => has_length,
            kind => !kind.is_hop_by_hop() && !is_connection_option(lines, line.name),
        })
    }

    /// Returns the headers as a map. Its values share one copy of the head, which begins at `bytes`.
    pub(super) fn header_map(&self, bytes: &[u8], lines: HeadersView<'_>) -> HeaderMap {
        let text = Bytes::copy_from_slice(&bytes[..self.bytes]);
        let shared = |value: &[u8]| {
            let begin = value.as_ptr().addr().wrapping_sub(bytes.as_ptr().addr());
            match begin.checked_add(value.len()).filter(|end| *end <= text.len()) {
                Some(end) => HeaderValue::from_maybe_shared(text.slice(begin..end)),
                // The parser may return an empty value from elsewhere.
                None => HeaderValue::from_bytes(value),
            }
        };
        let mut map = HeaderMap::with_capacity(lines.lines.len() + ADDED_HEADERS);
        for (line, _) in self.passing(lines) {
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(line.name.as_bytes()), shared(line.value)) {
                map.append(name, value);
            }
        }
        map
    }

    /// Writes an interim response for the client.
    pub(super) fn write_interim(&self, out: &mut Vec<u8>, lines: HeadersView<'_>, edits: &Edits) {
        headers::put_status(out, self.status, self.reason);
        for (line, _) in self.passing(lines).filter(|(line, _)| !edits.removes(line.name)) {
            headers::put(out, line.name, line.value);
        }
        out.extend_from_slice(b"\r\n");
    }

    /// Writes the head for the client, without the final empty line. `location` returns the `Location` that leads the
    /// client to the same place as the upstream's, unless that does.
    pub(in crate::gateway) fn write(
        &self,
        out: &mut Vec<u8>,
        lines: HeadersView<'_>,
        edits: &Edits,
        (outcome, id, adds_via): (&Outcome, Option<&HeaderValue>, bool),
        (framing, date): (&Framing, &[u8]),
        location: impl Fn(&[u8]) -> Option<String>,
    ) {
        headers::put_status(out, self.status, self.reason);
        let (mut has_date, mut of_limits) = (edits.sets(&DATE), None);
        for (line, kind) in self.passing(lines) {
            if kind == HeaderKind::XRequestId && id.is_some() || edits.removes(line.name) {
                continue;
            }
            match kind {
                HeaderKind::RateLimit => add(of_limits.get_or_insert_default(), line.name, line.value),
                HeaderKind::Location => {
                    let changed = location(line.value);
                    headers::put(out, line.name, changed.as_ref().map_or(line.value, String::as_bytes));
                }
                _ => headers::put(out, line.name, line.value),
            }
            has_date |= kind == HeaderKind::Date;
        }
        if adds_via && !edits.removes("via") {
            headers::put(out, "via", via(self.version()).as_bytes());
        }
        edits.write_new(out, |name| is_of_limits(name) || id.is_some() && *name == X_REQUEST_ID);
        for (name, value) in edits.new_headers().filter(|(name, _)| is_of_limits(name)) {
            of_limits.get_or_insert_default().append(name, value.clone());
        }
        if let Some(id) = id {
            headers::put(out, X_REQUEST_ID.as_str(), id.as_bytes());
        }
        match of_limits {
            None => outcome.write_header_lines(out),
            // The upstream sends rate limit headers, too. The client gets the stricter ones.
            Some(mut theirs) => {
                outcome.write_headers(&mut theirs);
                headers::put_headers(out, &theirs);
            }
        }
        if let Framing::Chunked(_) = framing {
            out.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        if !has_date {
            out.extend_from_slice(date);
        }
    }
}

fn is_of_limits(name: &HeaderName) -> bool {
    headers::kind(name.as_str()) == HeaderKind::RateLimit
}

fn add(map: &mut HeaderMap, name: &str, value: &[u8]) {
    if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value)) {
        map.append(name, value);
    }
}

/// Returns whether `Connection` names a header.
fn is_connection_option(lines: HeadersView<'_>, name: &str) -> bool {
    connection_options(lines).any(|word| word.eq_ignore_ascii_case(name.as_bytes()))
}

/// Returns the options in `Connection`.
fn connection_options(lines: HeadersView<'_>) -> impl Iterator<Item = &[u8]> {
    let values = lines.values(HeaderKind::Connection);
    values.flat_map(|value| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}

/// Returns the trailers that a response announces and the client gets, without those that the route removes.
pub(super) fn trailers_of_response(lines: HeadersView<'_>, edits: &Edits) -> TrailerNames {
    let announced = lines.values(HeaderKind::Trailer).flat_map(|value| value.split(|byte| *byte == b','));
    let is_hop_by_hop = |name: &[u8]| connection_options(lines).any(|option| option.eq_ignore_ascii_case(name));
    let is_removed = |name: &[u8]| str::from_utf8(name).is_ok_and(|name| edits.removes(name));
    let announced = announced.map(<[u8]>::trim_ascii);
    headers::trailer_names(announced.filter(|name| !is_hop_by_hop(name) && !is_removed(name)))
}

#[cfg(test)]
mod tests {
    use tollgate_config::internal::UnderscoreHeaders;
    use tollgate_rules::TrustedProxies;

    use super::*;

    /// Parses a request, and calls `check` with the result.
    fn read<T>(text: &[u8], check: impl FnOnce(Result<Option<PlainRequest<'_>>, InvalidHead>) -> T) -> T {
        let (proxies, peer) = (TrustedProxies::default(), std::net::IpAddr::from([192, 0, 2, 1]));
        let filter = HeaderFilter::new(UnderscoreHeaders::Refuse, &proxies, peer);
        check(PlainRequest::read(text, &mut HeaderBuffer::default(), MAX_HEAD, &filter))
    }

    const MAX_HEAD: usize = 64 << 10;

    /// Returns the reason for which a request is refused before limits are checked, or `ok`.
    fn refusal(text: &str) -> String {
        read(text.as_bytes(), |parsed| match parsed {
            Ok(Some(plain)) => match (plain.head.failure(9), plain.head.check_readable()) {
                (Some(failure), _) => format!("{failure:?}"),
                (None, Err(problem)) => problem.reason().to_owned(),
                (None, Ok(())) => "ok".to_owned(),
            },
            Ok(None) => "partial".to_owned(),
            Err(invalid) => format!("{invalid:?}"),
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
            "GET http://h/ HTTP/1.1\r\nHost: H.:80\r\n\r\n",
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
            ("GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", "several_hosts"),
            ("GET http://h/ HTTP/1.1\r\nHost: other\r\n\r\n", "several_hosts"),
            ("GET http://h/ HTTP/1.1\r\nHost: h:81\r\n\r\n", "several_hosts"),
            ("GET https://h/ HTTP/1.1\r\nHost: h:80\r\n\r\n", "several_hosts"),
            ("GET http://h/ HTTP/1.0\r\nHost: other\r\n\r\n", "several_hosts"),
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
            ("GET x HTTP/1.1\r\nHost: h\r\n\r\n", "Malformed"),
            ("GET h:80 HTTP/1.1\r\nHost: h\r\n\r\n", "Malformed"),
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
        let many = format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "X: y\r\n".repeat(tollgate_http1::MAX_HEADERS));
        assert_eq!(refusal(&many), "TooLong");
    }
}
