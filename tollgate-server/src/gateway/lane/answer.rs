//! What an upstream answers: its head, and where its body ends.

use std::mem::MaybeUninit;

use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::super::guard::Guard;
use super::super::headers;
use super::text::MAX_HEADERS;

/// What bytes are.
pub(super) enum Read<'a> {
    Whole(Head<'a>),
    Part,
    /// No answer that could be passed on.
    Bad,
}

/// The head of an answer. Its headers are beside it.
pub(super) struct Head<'a> {
    pub(super) status: StatusCode,
    pub(super) reason: &'a [u8],
    /// How long it is.
    pub(super) bytes: usize,
    pub(super) body: Body,
    /// Whether the upstream takes another request on its connection.
    pub(super) stays_open: bool,
}

/// What is left of a body.
pub(super) enum Body {
    Length(u64),
    /// As it comes: the chunks of the upstream are the client's.
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
    pub(super) fn read(bytes: &'a [u8], map: &mut HeaderMap, is_head: bool) -> Read<'a> {
        let mut start = 0;
        loop {
            match Self::read_one(&bytes[start..], map, is_head) {
                Read::Whole(interim) if interim.status.is_informational() => {
                    if interim.status == StatusCode::SWITCHING_PROTOCOLS {
                        return Read::Bad;
                    }
                    start += interim.bytes;
                }
                Read::Whole(head) => return Read::Whole(Self { bytes: start + head.bytes, ..head }),
                other => return other,
            }
        }
    }

    fn read_one(bytes: &'a [u8], map: &mut HeaderMap, is_head: bool) -> Read<'a> {
        let mut parsed = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut answer = httparse::Response::new(&mut []);
        let parser = httparse::ParserConfig::default();
        let bytes_of_head = match parser.parse_response_with_uninit_headers(&mut answer, bytes, &mut parsed) {
            Ok(httparse::Status::Complete(bytes)) => bytes,
            Ok(httparse::Status::Partial) => return Read::Part,
            Err(_) => return Read::Bad,
        };
        let (Some(version), Some(code)) = (answer.version, answer.code) else { return Read::Bad };
        let Ok(status) = StatusCode::from_u16(code) else { return Read::Bad };
        map.clear();
        for header in &*answer.headers {
            let name = HeaderName::from_bytes(header.name.as_bytes());
            let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(header.value)) else { return Read::Bad };
            map.append(name, value);
        }
        if headers::has_unclear_length(map) || version == 0 && map.contains_key(TRANSFER_ENCODING) {
            return Read::Bad;
        }
        let Some(body) = Body::of(map, status, is_head) else { return Read::Bad };
        let stays_open = version == 1 && !matches!(body, Body::ToTheEnd { .. }) && !says_close(map);
        let reason = answer.reason.unwrap_or_default().as_bytes();
        Read::Whole(Self { status, reason, bytes: bytes_of_head, body, stays_open })
    }
}

fn says_close(headers: &HeaderMap) -> bool {
    let mut words = headers.get_all(CONNECTION).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    words.any(|word| word.trim_ascii().eq_ignore_ascii_case(b"close"))
}

impl Body {
    /// What a head says of it; `None` if that is no length.
    fn of(headers: &HeaderMap, status: StatusCode, is_head: bool) -> Option<Self> {
        let has_none = is_head
            || status.is_informational()
            || status == StatusCode::NO_CONTENT
            || status == StatusCode::NOT_MODIFIED;
        if has_none {
            return Some(Self::Length(0));
        }
        if headers.contains_key(TRANSFER_ENCODING) {
            return Some(Self::Chunks(Guard::of_chunks()));
        }
        match headers.get(CONTENT_LENGTH) {
            Some(length) => Some(Self::Length(length.to_str().ok()?.parse().ok()?)),
            None => Some(Self::ToTheEnd { is_over: false }),
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

    /// How many of these bytes are the body's.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<usize, BadBody> {
        match self {
            Self::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= taken as u64;
                Ok(taken)
            }
            Self::Chunks(guard) => guard.chunks(bytes).map_err(|_ambiguity| BadBody),
            Self::ToTheEnd { .. } => Ok(bytes.len()),
        }
    }

    /// The upstream has closed its connection.
    pub(super) fn end(&mut self) -> Result<(), BadBody> {
        match self {
            Self::ToTheEnd { is_over } => {
                *is_over = true;
                Ok(())
            }
            _ => Err(BadBody),
        }
    }
}
