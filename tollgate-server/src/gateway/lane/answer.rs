//! What an upstream answers: its head, and where its body ends.

use std::mem::MaybeUninit;

use http::header::DATE;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tollgate::Outcome;

use super::super::guard::Guard;
use super::super::headers::{self, X_REQUEST_ID};
use super::super::names::{self, Kind};
use super::super::site::Edits;
use super::request::{Lines, Seen};
use super::text;

/// As many as hyper takes. More are no answer.
const MAX_HEADERS: usize = 100;

/// What bytes are.
pub(super) enum Read<'a> {
    Whole(Head<'a>),
    Part,
    /// It has more headers than are taken.
    TooMany,
    /// No answer that could be passed on.
    Bad,
}

/// The head of an answer. Its headers are beside it.
pub(super) struct Head<'a> {
    pub(super) status: StatusCode,
    reason: &'a [u8],
    /// How long it is.
    pub(super) bytes: usize,
    pub(super) body: Body,
    /// Whether the upstream takes another request on its connection.
    pub(super) stays_open: bool,
    /// HTTP/1.0.
    is_old: bool,
}

/// What is left of a body.
pub(super) enum Body {
    Length(u64),
    /// It comes in chunks, and the client gets it in others: without extensions, and without trailers, which a plain
    /// request did not ask for.
    Chunks(Guard),
    /// It ends with the connection. The client gets it in chunks.
    ToTheEnd {
        is_over: bool,
    },
}

/// A body that is not what it should be.
pub(super) struct BadBody;

impl<'a> Head<'a> {
    /// Reads a head, of an answer to HEAD if `is_head`. Interim answers before it are left out.
    pub(super) fn read(bytes: &'a [u8], lines: &mut Lines<'a>, is_head: bool) -> Read<'a> {
        let mut start = 0;
        loop {
            match Self::read_one(&bytes[start..], lines, is_head) {
                Read::Whole(interim) if interim.status.is_informational() => {
                    if interim.status == StatusCode::SWITCHING_PROTOCOLS {
                        return Read::Bad;
                    }
                    start += interim.bytes;
                    *lines = Lines::default();
                }
                Read::Whole(head) => return Read::Whole(Self { bytes: start + head.bytes, ..head }),
                other => return other,
            }
        }
    }

    fn read_one(bytes: &'a [u8], lines: &mut Lines<'a>, is_head: bool) -> Read<'a> {
        let mut parsed = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut answer = httparse::Response::new(&mut []);
        let parser = httparse::ParserConfig::default();
        let bytes_of_head = match parser.parse_response_with_uninit_headers(&mut answer, bytes, &mut parsed) {
            Ok(httparse::Status::Complete(bytes)) => bytes,
            Ok(httparse::Status::Partial) => return Read::Part,
            Err(httparse::Error::TooManyHeaders) => return Read::TooMany,
            Err(_) => return Read::Bad,
        };
        let (Some(version), Some(code)) = (answer.version, answer.code) else { return Read::Bad };
        let Ok(status) = StatusCode::from_u16(code) else { return Read::Bad };
        for header in &*answer.headers {
            lines.push(header, names::kind(header.name));
        }
        let Some(body) = Body::of(lines.seen(), status, is_head, version == 0) else { return Read::Bad };
        let says_close = words(lines.seen()).any(|word| word.eq_ignore_ascii_case(b"close"));
        let is_old = version == 0;
        // Bytes that nobody expects may follow.
        let is_odd = status == StatusCode::NO_CONTENT && announces_body(lines.seen());
        let stays_open = !is_old && !matches!(body, Body::ToTheEnd { .. }) && !says_close && !is_odd;
        let reason = answer.reason.unwrap_or_default().as_bytes();
        Read::Whole(Self { status, reason, bytes: bytes_of_head, body, stays_open, is_old })
    }

    /// The values of `Keep-Alive`.
    pub(super) fn keep_alive<'l>(&self, lines: Seen<'l>) -> impl Iterator<Item = &'l [u8]> {
        let hop_by_hop = lines.iter().filter(|(_, kind)| *kind == Kind::HopByHop).map(|(line, _)| line);
        hop_by_hop.filter(|line| line.name.eq_ignore_ascii_case("keep-alive")).map(|line| line.value)
    }

    /// Writes the head as the client gets it, but for its end.
    pub(super) fn write(
        &self,
        out: &mut Vec<u8>,
        lines: Seen<'_>,
        edits: &Edits,
        (outcome, id, tells_via): (&Outcome, Option<&HeaderValue>, bool),
        date: &[u8],
    ) {
        text::put_status(out, self.status, self.reason);
        let (mut has_date, mut of_limits) = (edits.puts(&DATE), None);
        for (line, kind) in lines.iter() {
            let passes = match kind {
                kind if kind.is_hop_by_hop() => false,
                Kind::XRequestId => id.is_none(),
                Kind::ContentLength => self.status != StatusCode::NO_CONTENT,
                _ => true,
            };
            if !passes || edits.take(line.name) || is_between_neighbours(lines, line.name) {
                continue;
            }
            match kind {
                Kind::RateLimit => add(of_limits.get_or_insert_default(), line.name, line.value),
                _ => text::put(out, line.name, line.value),
            }
            has_date |= kind == Kind::Date;
        }
        if tells_via && !edits.take("via") {
            text::put(out, "via", if self.is_old { b"1.0 tollgate" } else { headers::OUR_VIA.as_bytes() });
        }
        edits.put(out, |name| is_of_limits(name) || id.is_some() && *name == X_REQUEST_ID);
        for (name, value) in edits.put_headers().filter(|(name, _)| is_of_limits(name)) {
            of_limits.get_or_insert_default().append(name, value.clone());
        }
        if let Some(id) = id {
            text::put(out, X_REQUEST_ID.as_str(), id.as_bytes());
        }
        match of_limits {
            None => outcome.write_header_lines(out),
            // The upstream limits requests too, and the stricter of the two is told.
            Some(mut theirs) => {
                outcome.write_headers(&mut theirs);
                text::put_headers(out, &theirs);
            }
        }
        if self.body.is_chunked() {
            out.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        if !has_date {
            out.extend_from_slice(date);
        }
    }
}

fn is_of_limits(name: &HeaderName) -> bool {
    names::kind(name.as_str()) == Kind::RateLimit
}

fn add(map: &mut HeaderMap, name: &str, value: &[u8]) {
    if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value)) {
        map.append(name, value);
    }
}

/// Whether an answer says that it has a body.
fn announces_body(lines: Seen<'_>) -> bool {
    let has_length = lines.values(Kind::ContentLength).any(|value| text::length(value) != Some(0));
    has_length || lines.values(Kind::TransferEncoding).next().is_some()
}

/// What `Connection` says.
fn words(lines: Seen<'_>) -> impl Iterator<Item = &[u8]> {
    let values = lines.values(Kind::Connection);
    values.flat_map(|value| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}

/// Whether `Connection` names a header. Those that say what the message is stay in any case.
fn is_between_neighbours(lines: Seen<'_>, name: &str) -> bool {
    words(lines).any(|word| word.eq_ignore_ascii_case(name.as_bytes())) && !name.eq_ignore_ascii_case("content-length")
}

impl Body {
    /// What a head says of it; `None` if that is not said in one way. A client may take the other.
    fn of(lines: Seen<'_>, status: StatusCode, is_head: bool, is_old: bool) -> Option<Self> {
        let (mut length, mut is_chunked) = (None, false);
        for (line, kind) in lines.iter() {
            let is_first = match kind {
                Kind::ContentLength => length.replace(text::length(line.value)?).is_none(),
                Kind::TransferEncoding if line.value.eq_ignore_ascii_case(b"chunked") => {
                    !std::mem::replace(&mut is_chunked, true)
                }
                Kind::TransferEncoding => false,
                _ => true,
            };
            is_first.then_some(())?;
        }
        let has_none = is_head
            || status.is_informational()
            || status == StatusCode::NO_CONTENT
            || status == StatusCode::NOT_MODIFIED;
        match (length, is_chunked) {
            (Some(_), true) => None,
            (_, true) if is_old => None,
            _ if has_none => Some(Self::Length(0)),
            (_, true) => Some(Self::Chunks(Guard::of_chunks())),
            (Some(length), _) => Some(Self::Length(length)),
            (None, false) => Some(Self::ToTheEnd { is_over: false }),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunks(guard) => guard.is_between(),
            Self::ToTheEnd { is_over } => *is_over,
        }
    }

    /// Whether the client is told that it comes in chunks.
    pub(super) fn is_chunked(&self) -> bool {
        !matches!(self, Self::Length(_))
    }

    /// How many of these bytes are the body's. What a client gets in chunks is written to `out`; how much of it there was
    /// comes second.
    pub(super) fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, usize), BadBody> {
        match self {
            Self::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= taken as u64;
                Ok((taken, taken))
            }
            Self::Chunks(guard) => {
                let mut content = 0;
                let taken = guard.unchunk(bytes, |piece| {
                    content += piece.len();
                    put_chunk(out, piece);
                });
                let taken = taken.map_err(|_ambiguity| BadBody)?;
                if self.is_over() {
                    out.extend_from_slice(LAST_CHUNK);
                }
                Ok((taken, content))
            }
            Self::ToTheEnd { .. } => {
                put_chunk(out, bytes);
                Ok((bytes.len(), bytes.len()))
            }
        }
    }

    /// The upstream has closed its connection.
    pub(super) fn end(&mut self, out: &mut Vec<u8>) -> Result<(), BadBody> {
        match self {
            Self::ToTheEnd { is_over } => {
                *is_over = true;
                out.extend_from_slice(LAST_CHUNK);
                Ok(())
            }
            _ => Err(BadBody),
        }
    }
}

const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Nothing is no chunk: that would be the last.
fn put_chunk(out: &mut Vec<u8>, bytes: &[u8]) {
    if !bytes.is_empty() {
        out.extend_from_slice(format!("{:x}\r\n", bytes.len()).as_bytes());
        out.extend_from_slice(bytes);
        out.extend_from_slice(b"\r\n");
    }
}
