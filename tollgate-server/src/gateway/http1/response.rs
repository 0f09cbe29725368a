//! Responses of upstreams: parsing the head, and finding the end of the body.

use std::io;
use std::mem::MaybeUninit;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::DATE;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version};
use tollgate::Outcome;
use tollgate::internal::HeaderLine;

use super::body::{BodyDecoder, Framing, connection_options};
use crate::gateway::failure::{ConnectError, Failure, Fault};
use crate::gateway::head::headers::{self, Edits, HeaderBuffer, HeaderKind, HeadersView, MAX_HEADERS, X_REQUEST_ID};
use crate::gateway::head::upstream_head::via;
use crate::gateway::upstream::conn::Http1Conn;
use crate::gateway::upstream::tls::TlsFault;

/// The capacity of a map for headers that the gateway adds.
const ADDED: usize = 8;

/// The head of a response. Its headers are in a [`HeaderBuffer`].
pub(in crate::gateway) struct ResponseHead<'a> {
    pub(in crate::gateway) status: StatusCode,
    reason: &'a [u8],
    /// The length of the head.
    pub(in crate::gateway) bytes: usize,
    pub(in crate::gateway) body: BodyDecoder,
    /// Whether the upstream accepts another request on the connection.
    pub(super) stays_open: bool,
    /// Whether the version is HTTP/1.0.
    is_http10: bool,
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

/// What becomes of a head that was read.
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
                    conn.has_long_bodies &= head.body.long_rest().is_some();
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
        let mut parsed = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut answer = httparse::Response::new(&mut []);
        let parser = httparse::ParserConfig::default();
        let bytes_of_head = match parser.parse_response_with_uninit_headers(&mut answer, bytes, &mut parsed) {
            Ok(httparse::Status::Complete(bytes)) => bytes,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err(Failure::ResponseHeadTooLong),
            Err(_) => return Err(Failure::InvalidResponse),
        };
        let (Some(version), Some(code)) = (answer.version, answer.code) else { return Err(Failure::InvalidResponse) };
        let status = StatusCode::from_u16(code).map_err(|_invalid| Failure::InvalidResponse)?;
        for header in &*answer.headers {
            lines.push(HeaderLine { name: header.name, value: header.value }, headers::kind(header.name));
        }
        let body = BodyDecoder::of_response(lines.view(), status, is_head, version == 0);
        let body = body.ok_or(Failure::InvalidResponse)?;
        let has_close = connection_options(lines.view()).any(|word| word.eq_ignore_ascii_case(b"close"));
        let is_http10 = version == 0;
        // Unexpected bytes may follow.
        let may_have_stray_body = status == StatusCode::NO_CONTENT && has_body_headers(lines.view());
        let stays_open = !is_http10 && !matches!(body, BodyDecoder::UntilClose) && !has_close && !may_have_stray_body;
        let reason = answer.reason.unwrap_or_default().as_bytes();
        Ok(Some(Self { status, reason, bytes: bytes_of_head, body, stays_open, is_http10 }))
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
        if self.is_http10 { Version::HTTP_10 } else { Version::HTTP_11 }
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
        let mut map = HeaderMap::with_capacity(lines.lines.len() + ADDED);
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
            let version = if self.is_http10 { Version::HTTP_10 } else { Version::HTTP_11 };
            headers::put(out, "via", via(version).as_bytes());
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

/// Returns whether a response has headers that announce a body.
fn has_body_headers(lines: HeadersView<'_>) -> bool {
    let has_length = lines.values(HeaderKind::ContentLength).any(|value| headers::length(value) != Some(0));
    has_length || lines.values(HeaderKind::TransferEncoding).next().is_some()
}

/// Returns whether `Connection` names a header.
fn is_connection_option(lines: HeadersView<'_>, name: &str) -> bool {
    connection_options(lines).any(|word| word.eq_ignore_ascii_case(name.as_bytes()))
}
