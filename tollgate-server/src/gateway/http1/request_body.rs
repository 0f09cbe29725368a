//! Bodies of requests: finding their end, and the part of one that has not arrived yet.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::framing::{Ambiguity, FramingGuard, MAX_HEADERS};
use super::response::{LAST_CHUNK, put_chunk};
use crate::gateway::head::BodyLength;

/// The part of a body that has not arrived.
#[derive(Debug)]
pub(in crate::gateway) enum RequestBody {
    /// Nothing: there is no body, or all of it has arrived.
    Complete,
    /// The number of bytes left.
    Length(u64),
    /// Chunks. Boxed, because most requests have none.
    Chunked(Box<FramingGuard>),
    /// Malformed chunks.
    Invalid(Ambiguity),
}

/// The part of a body that arrived with the head.
pub(in crate::gateway) struct BodyStart {
    /// The number of bytes that belong to the body.
    pub(in crate::gateway) bytes: usize,
    /// The number of content bytes among them.
    pub(in crate::gateway) content: u64,
    pub(in crate::gateway) rest: RequestBody,
}

impl BodyLength {
    /// Splits the bytes that follow a head.
    pub(in crate::gateway) fn split(self, bytes: &[u8]) -> BodyStart {
        match self {
            Self::Known(length) if length <= bytes.len() as u64 => {
                BodyStart { bytes: length as usize, content: length, rest: RequestBody::Complete }
            }
            Self::Known(length) => {
                let content = bytes.len() as u64;
                BodyStart { bytes: bytes.len(), content, rest: RequestBody::Length(length - content) }
            }
            Self::Unknown => {
                let (mut framing_guard, mut content) = (Box::new(FramingGuard::for_request_chunks()), 0);
                match framing_guard.unchunk(bytes, |piece| content += piece.len() as u64) {
                    Ok(bytes) if framing_guard.is_between() => {
                        BodyStart { bytes, content, rest: RequestBody::Complete }
                    }
                    Ok(bytes) => BodyStart { bytes, content, rest: RequestBody::Chunked(framing_guard) },
                    Err(ambiguity) => BodyStart { bytes: bytes.len(), content, rest: RequestBody::Invalid(ambiguity) },
                }
            }
        }
    }
}

impl RequestBody {
    /// Consumes bytes of the body. Chunks are written to `out` without extensions and trailers, which upstreams do not
    /// get. Returns the number of bytes consumed, and the number of content bytes.
    pub(in crate::gateway) fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, usize), Ambiguity> {
        match self {
            Self::Complete => Ok((0, 0)),
            Self::Invalid(ambiguity) => Err(*ambiguity),
            Self::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= taken as u64;
                if *left == 0 {
                    *self = Self::Complete;
                }
                Ok((taken, taken))
            }
            Self::Chunked(framing_guard) => {
                let mut content = 0;
                let taken = framing_guard.unchunk(bytes, |piece| {
                    content += piece.len();
                    put_chunk(out, piece);
                })?;
                if framing_guard.is_between() {
                    out.extend_from_slice(LAST_CHUNK);
                    *self = Self::Complete;
                }
                Ok((taken, content))
            }
        }
    }

    /// Consumes bytes of the body, and appends its content and trailers to `received`. Returns the number of bytes
    /// consumed.
    pub(in crate::gateway) fn take_content(
        &mut self,
        bytes: &[u8],
        received: &mut ReceivedBody,
    ) -> Result<usize, Ambiguity> {
        let Self::Chunked(framing_guard) = self else {
            let (taken, _) = self.take(bytes, &mut Vec::new())?;
            received.content.extend_from_slice(&bytes[..taken]);
            return Ok(taken);
        };
        let taken = received.unchunk(framing_guard, bytes)?;
        if framing_guard.is_between() {
            *self = Self::Complete;
        }
        Ok(taken)
    }

    pub(in crate::gateway) fn is_chunked(&self) -> bool {
        matches!(self, Self::Chunked(_))
    }

    pub(in crate::gateway) fn is_complete(&self) -> bool {
        matches!(self, Self::Complete)
    }
}

/// A part of a body without its framing.
#[derive(Debug, Default)]
pub(in crate::gateway) struct ReceivedBody {
    pub(in crate::gateway) content: Vec<u8>,
    /// The lines of the trailers, with the final empty one.
    pub(in crate::gateway) trailers: Vec<u8>,
}

impl ReceivedBody {
    /// Decodes chunks. Returns the number of bytes that belong to the body.
    pub(in crate::gateway) fn unchunk(
        &mut self,
        framing_guard: &mut FramingGuard,
        bytes: &[u8],
    ) -> Result<usize, Ambiguity> {
        let Self { content, trailers } = self;
        let found = |piece: &[u8]| content.extend_from_slice(piece);
        framing_guard.unchunk_with_trailers(bytes, found, |lines| trailers.extend_from_slice(lines))
    }

    /// Returns the trailers, or `None` if they are malformed.
    pub(in crate::gateway) fn trailers(&self) -> Option<HeaderMap> {
        let mut map = HeaderMap::new();
        if self.trailers.is_empty() {
            return Some(map);
        }
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let Ok(httparse::Status::Complete((_, trailers))) = httparse::parse_headers(&self.trailers, &mut parsed) else {
            return None;
        };
        for trailer in trailers {
            let name = HeaderName::from_bytes(trailer.name.as_bytes()).ok()?;
            map.append(name, HeaderValue::from_bytes(trailer.value).ok()?);
        }
        Some(map)
    }
}
