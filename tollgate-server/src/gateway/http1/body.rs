//! Bodies of messages: finding their end, the part of one that has not arrived yet, and trailers.

use std::io::Write as _;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use smallvec::SmallVec;

use super::framing::ChunkDecoder;
use crate::gateway::failure::{Ambiguity, Failure};
use crate::gateway::head::BodyLength;
use crate::gateway::head::headers::{self, Edits, HeaderKind, HeadersView, MAX_HEADERS, kind};
use crate::gateway::splice;

/// The part of the body of a request that has not arrived.
#[derive(Debug)]
pub(in crate::gateway) enum RequestBody {
    /// Nothing: there is no body, or all of it has arrived.
    Complete,
    /// The number of bytes left.
    Length(u64),
    /// Chunks. Boxed, because most requests have none.
    Chunked(Box<ChunkDecoder>),
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
                let (mut decoder, mut content) = (Box::new(ChunkDecoder::of_request()), 0);
                match decoder.decode(bytes, |piece| content += piece.len() as u64) {
                    Ok(bytes) if decoder.is_at_end() => BodyStart { bytes, content, rest: RequestBody::Complete },
                    Ok(bytes) => BodyStart { bytes, content, rest: RequestBody::Chunked(decoder) },
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
            Self::Chunked(decoder) => {
                let mut content = 0;
                let taken = decoder.decode(bytes, |piece| {
                    content += piece.len();
                    put_chunk(out, piece);
                })?;
                if decoder.is_at_end() {
                    out.extend_from_slice(LAST_CHUNK);
                    *self = Self::Complete;
                }
                Ok((taken, content))
            }
        }
    }

    /// Consumes bytes of the body, and appends its content and trailers to `received`. Returns the number of bytes
    /// consumed.
    pub(super) fn take_content(&mut self, bytes: &[u8], received: &mut ReceivedBody) -> Result<usize, Ambiguity> {
        let Self::Chunked(decoder) = self else {
            let (taken, _) = self.take(bytes, &mut Vec::new())?;
            received.content.extend_from_slice(&bytes[..taken]);
            return Ok(taken);
        };
        let taken = received.decode(decoder, bytes)?;
        if decoder.is_at_end() {
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
    pub(super) fn decode(&mut self, decoder: &mut ChunkDecoder, bytes: &[u8]) -> Result<usize, Ambiguity> {
        let Self { content, trailers } = self;
        let found = |piece: &[u8]| content.extend_from_slice(piece);
        decoder.decode_with_trailers(bytes, found, |lines| trailers.extend_from_slice(lines))
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

/// The rest of the body of a response.
pub(in crate::gateway) enum ResponseBody {
    Length(u64),
    /// Chunked. The client gets other chunks: without extensions, and with trailers only if it accepts them.
    Chunks {
        decoder: ChunkDecoder,
        framing: ClientFraming,
        trailers: Option<Box<Trailers>>,
    },
    /// Ends when the connection is closed.
    UntilClose {
        is_over: bool,
        framing: ClientFraming,
    },
}

/// How the client gets a body of unknown length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum ClientFraming {
    Chunked,
    /// Until the connection is closed, for clients of HTTP/1.0.
    Raw,
}

impl ResponseBody {
    /// Determines the length of a body from the head. Returns `None` if the headers are ambiguous: the client might
    /// interpret them differently.
    pub(super) fn of(lines: HeadersView<'_>, status: StatusCode, is_head: bool, is_http10: bool) -> Option<Self> {
        let (mut length, mut is_chunked) = (None, false);
        for (line, kind) in lines.iter() {
            let is_first = match kind {
                HeaderKind::ContentLength => length.replace(headers::length(line.value)?).is_none(),
                HeaderKind::TransferEncoding if line.value.eq_ignore_ascii_case(b"chunked") => {
                    !std::mem::replace(&mut is_chunked, true)
                }
                HeaderKind::TransferEncoding => false,
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
            (_, true) if is_http10 => None,
            _ if has_none => Some(Self::Length(0)),
            (_, true) => Some(Self::Chunks {
                decoder: ChunkDecoder::of_response(),
                framing: ClientFraming::Chunked,
                trailers: None,
            }),
            (Some(length), _) => Some(Self::Length(length)),
            (None, false) => Some(Self::UntilClose { is_over: false, framing: ClientFraming::Chunked }),
        }
    }

    pub(in crate::gateway) fn is_over(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunks { decoder, .. } => decoder.is_at_end(),
            Self::UntilClose { is_over, .. } => *is_over,
        }
    }

    /// Returns the length of the rest if it is known, and so long that it is cheaper to move than to copy.
    pub(super) fn long_rest(&self) -> Option<u64> {
        match self {
            Self::Length(left) => Some(*left).filter(|left| *left >= splice::MIN_BYTES),
            _ => None,
        }
    }

    /// Consumes bytes of a long rest that were moved. Returns the numbers as [`take`](Self::take).
    pub(super) fn skip(&mut self, bytes: usize) -> (usize, usize) {
        if let Self::Length(left) = self {
            *left -= bytes as u64;
        }
        (bytes, bytes)
    }

    /// Returns how the client gets the body, if its length is unknown.
    pub(super) fn framing(&self) -> Option<ClientFraming> {
        match self {
            Self::Length(_) => None,
            Self::Chunks { framing, .. } | Self::UntilClose { framing, .. } => Some(*framing),
        }
    }

    /// Adapts the body to a client of HTTP/1.0, which knows no chunks. Returns whether only the end of the connection
    /// can end it.
    pub(super) fn send_raw(&mut self) -> bool {
        match self {
            Self::Length(_) => false,
            Self::Chunks { framing, .. } | Self::UntilClose { framing, .. } => {
                *framing = ClientFraming::Raw;
                true
            }
        }
    }

    /// Passes the trailers on that the head announces, except for those that the route removes.
    pub(super) fn pass_trailers(&mut self, lines: HeadersView<'_>, edits: &Edits) {
        if let Self::Chunks { trailers, .. } = self {
            let announced = lines.values(HeaderKind::Trailer).flat_map(|value| value.split(|byte| *byte == b','));
            let announced = announced.map(<[u8]>::trim_ascii);
            let is_hop_by_hop = |name: &[u8]| connection_options(lines).any(|option| option.eq_ignore_ascii_case(name));
            let is_removed = |name: &[u8]| str::from_utf8(name).is_ok_and(|name| edits.removes(name));
            let passing = announced.filter(|name| !is_hop_by_hop(name) && !is_removed(name));
            *trailers = Some(Box::new(Trailers::new(passing)));
        }
    }

    /// Keeps all trailers, for a client that gets them in a map.
    pub(super) fn keep_trailers(&mut self) {
        if let Self::Chunks { trailers, .. } = self {
            *trailers = Some(Box::default());
        }
    }

    /// Returns whether a body that is over has trailers.
    pub(super) fn has_trailers(&self) -> bool {
        matches!(self, Self::Chunks { trailers: Some(trailers), .. } if trailers.is_any())
    }

    /// Takes the trailers that were kept, if there are any.
    pub(super) fn take_trailers(&mut self) -> Result<Option<HeaderMap>, Failure> {
        let Self::Chunks { trailers, .. } = self else { return Ok(None) };
        trailers.take().filter(|trailers| trailers.is_any()).map(|trailers| trailers.to_map()).transpose()
    }

    /// Consumes bytes of the body. A body of unknown length is written to `out` as the client gets it. Returns the number of bytes
    /// consumed, and the number of content bytes.
    pub(in crate::gateway) fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, usize), Failure> {
        match self {
            Self::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= taken as u64;
                Ok((taken, taken))
            }
            Self::Chunks { decoder, framing, trailers } => {
                let mut content = 0;
                let found = |piece: &[u8]| {
                    content += piece.len();
                    framing.put(out, piece);
                };
                let received = |bytes: &[u8]| trailers.iter_mut().for_each(|trailers| trailers.receive(bytes));
                let taken = decoder.decode_with_trailers(bytes, found, received);
                let taken = taken.map_err(|_ambiguity| Failure::InvalidResponse)?;
                if decoder.is_at_end() && *framing == ClientFraming::Chunked {
                    match trailers {
                        Some(trailers) => trailers.write(out)?,
                        None => out.extend_from_slice(LAST_CHUNK),
                    }
                }
                Ok((taken, content))
            }
            Self::UntilClose { framing, .. } => {
                framing.put(out, bytes);
                Ok((bytes.len(), bytes.len()))
            }
        }
    }

    /// Ends the body, because the upstream has closed the connection.
    pub(in crate::gateway) fn end(&mut self, out: &mut Vec<u8>) -> Result<(), Failure> {
        match self {
            Self::UntilClose { is_over, framing } => {
                *is_over = true;
                if *framing == ClientFraming::Chunked {
                    out.extend_from_slice(LAST_CHUNK);
                }
                Ok(())
            }
            _ => Err(Failure::InvalidResponse),
        }
    }
}

impl ClientFraming {
    fn put(self, out: &mut Vec<u8>, bytes: &[u8]) {
        match self {
            Self::Chunked => put_chunk(out, bytes),
            Self::Raw => out.extend_from_slice(bytes),
        }
    }
}

pub(super) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Writes a chunk. An empty one is skipped, since it would be the last.
pub(super) fn put_chunk(out: &mut Vec<u8>, bytes: &[u8]) {
    if !bytes.is_empty() {
        // Writing to a vector does not fail.
        _ = write!(out, "{:x}\r\n", bytes.len());
        out.extend_from_slice(bytes);
        out.extend_from_slice(b"\r\n");
    }
}

/// Returns the options in `Connection`.
pub(super) fn connection_options(lines: HeadersView<'_>) -> impl Iterator<Item = &[u8]> {
    let values = lines.values(HeaderKind::Connection);
    values.flat_map(|value| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}

/// Headers without a meaning to a proxy that change how a message is read (RFC 9110, section 6.5.1).
const FORBIDDEN: [&str; 6] =
    ["authorization", "cache-control", "content-encoding", "content-range", "max-forwards", "set-cookie"];

/// The trailers of a response.
#[derive(Debug, Default)]
pub(in crate::gateway) struct Trailers {
    /// The names that the head announces, separated by commas.
    announced: Vec<u8>,
    /// The bytes that were received, bounded by the framing checks.
    received: Vec<u8>,
}

impl Trailers {
    pub(in crate::gateway) fn new<'v>(announced: impl Iterator<Item = &'v [u8]>) -> Self {
        Self { announced: announced.collect::<Vec<_>>().join(&b","[..]), received: Vec::new() }
    }

    pub(in crate::gateway) fn receive(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// Returns whether more than the final empty line was received.
    pub(super) fn is_any(&self) -> bool {
        self.received.len() > b"\r\n".len()
    }

    /// Writes the last chunk with the trailers that were announced.
    pub(in crate::gateway) fn write(&self, out: &mut Vec<u8>) -> Result<(), Failure> {
        out.extend_from_slice(b"0\r\n");
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        for trailer in self.parse(&mut parsed)?.iter().filter(|trailer| self.passes(trailer.name)) {
            headers::put(out, trailer.name, trailer.value);
        }
        out.extend_from_slice(b"\r\n");
        Ok(())
    }

    /// Returns all trailers. A client of HTTP/2 gets them without an announcement.
    pub(super) fn to_map(&self) -> Result<HeaderMap, Failure> {
        let mut map = HeaderMap::new();
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        for trailer in self.parse(&mut parsed)? {
            let name = HeaderName::from_bytes(trailer.name.as_bytes()).map_err(|_invalid| Failure::InvalidResponse)?;
            map.append(name, HeaderValue::from_bytes(trailer.value).map_err(|_invalid| Failure::InvalidResponse)?);
        }
        Ok(map)
    }

    fn parse<'p>(&'p self, parsed: &'p mut [httparse::Header<'p>]) -> Result<&'p [httparse::Header<'p>], Failure> {
        match httparse::parse_headers(&self.received, parsed) {
            Ok(httparse::Status::Complete((_, trailers))) => Ok(trailers),
            _ => Err(Failure::InvalidResponse),
        }
    }

    /// Writes the last chunk with those of these trailers that were announced.
    pub(super) fn write_map(&self, out: &mut Vec<u8>, trailers: &HeaderMap) {
        out.extend_from_slice(b"0\r\n");
        for (name, value) in trailers.iter().filter(|(name, _)| self.passes(name.as_str())) {
            headers::put(out, name.as_str(), value.as_bytes());
        }
        out.extend_from_slice(b"\r\n");
    }

    /// Returns whether a trailer is passed on to a client of HTTP/1.
    fn passes(&self, name: &str) -> bool {
        let mut announced = self.announced.split(|byte| *byte == b',');
        announced.any(|one| one.eq_ignore_ascii_case(name.as_bytes())) && is_harmless(name)
    }
}

/// Returns whether a trailer may be passed on. The gateway itself sends those with a meaning to a proxy, such as
/// `Connection`, `RateLimit` and `X-Request-Id`, or nobody may.
fn is_harmless(name: &str) -> bool {
    kind(name) == HeaderKind::Other && !FORBIDDEN.iter().any(|forbidden| name.eq_ignore_ascii_case(forbidden))
}

/// Removes the trailers of a response that may not be passed on.
pub(in crate::gateway) fn screen_response_trailers(trailers: &mut HeaderMap) {
    let removed = trailers.keys().filter(|name| !is_harmless(name.as_str()));
    for name in removed.cloned().collect::<SmallVec<[HeaderName; 4]>>() {
        trailers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(announced: &str, received: &str) -> Option<String> {
        let mut trailers = Trailers::new(announced.split(", ").map(str::as_bytes));
        trailers.receive(received.as_bytes());
        let mut out = Vec::new();
        trailers.write(&mut out).ok()?;
        String::from_utf8(out).ok()
    }

    #[test]
    fn only_announced_trailers_pass() {
        let received = "X-Sum: 42\r\nX-Other: 1\r\nContent-Length: 5\r\n\r\n";
        assert_eq!(written("x-sum, content-length", received).as_deref(), Some("0\r\nX-Sum: 42\r\n\r\n"));
        assert_eq!(written("", "\r\n").as_deref(), Some("0\r\n\r\n"));
        assert_eq!(written("x-sum", "X-Sum 42\r\n\r\n"), None);
    }

    #[test]
    fn trailers_with_a_meaning_to_a_proxy_do_not_pass() {
        for name in [
            "Connection",
            "keep-alive",
            "Transfer-Encoding",
            "content-length",
            "Content-Type",
            "trailer",
            "Upgrade",
            "RateLimit",
            "ratelimit-policy",
            "X-RateLimit-Remaining",
            "X-Request-Id",
            "Set-Cookie",
            "X-Forwarded-For",
        ] {
            let received = format!("{name}: 1\r\nX-Sum: 42\r\n\r\n");
            let expected = "0\r\nX-Sum: 42\r\n\r\n";
            assert_eq!(written(&format!("{name}, x-sum"), &received).as_deref(), Some(expected), "{name}");
        }
    }
}
