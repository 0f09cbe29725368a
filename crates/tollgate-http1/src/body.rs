//! Bodies of messages: where they end, how the other side gets them, and their trailers.
//!
//! A server behind the gateway may interpret ambiguous chunks differently, and take a part of the body for another request
//! (request smuggling). So chunks are decoded strictly, and are written anew.

use std::io::Write as _;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::MAX_HEADERS;
use crate::ambiguity::Ambiguity;
use crate::length::Announced;
use crate::write::{lacks_body, put};

/// The maximum length of a chunk-size line. Chunk extensions are practically unused.
const MAX_CHUNK_LINE: usize = 256;
/// The maximum length of trailers.
const MAX_TRAILER_BYTES: usize = 16 << 10;
/// The maximum number of hexadecimal digits of a chunk size.
const MAX_CHUNK_DIGITS: u32 = 15;

/// Finds the end of a body, of a request or a response.
#[derive(Debug)]
pub enum BodyDecoder {
    /// The number of bytes left.
    Length(u64),
    /// In chunks.
    Chunked(ChunkDecoder),
    /// Ends when the connection is closed.
    UntilClose,
}

/// How the other side gets a body.
#[derive(Debug)]
pub enum Framing {
    /// The number of bytes left.
    Length(u64),
    /// In chunks, with the trailers that the head announces.
    Chunked(TrailerNames),
    /// Unchanged: the head announces the length, or the body ends with the connection.
    Raw,
}

/// A decoded part of a body. The other side gets the bytes that were added to the buffer, and then `bytes`.
pub struct Part<'b> {
    /// The number of bytes that belong to the body.
    pub taken: usize,
    /// The number of content bytes among them.
    pub content: usize,
    /// The content that is passed on without a copy.
    pub bytes: &'b [u8],
}

impl Part<'_> {
    /// Returns the bytes to send. `out` is the buffer, which was empty before.
    #[inline]
    pub fn to_send<'s>(&'s self, out: &'s [u8]) -> &'s [u8] {
        if self.bytes.is_empty() { out } else { self.bytes }
    }
}

impl BodyDecoder {
    /// Returns the decoder for the body of a request: of this length, or in chunks.
    #[inline]
    #[must_use]
    pub fn of_request(length: Option<u64>) -> Self {
        match length {
            Some(length) => Self::Length(length),
            None => Self::Chunked(ChunkDecoder::of_request()),
        }
    }

    /// Returns the decoder for the body of a response.
    pub(crate) fn of_response(announced: Announced, status: StatusCode, is_head: bool) -> Self {
        let has_none = is_head || status.is_informational() || lacks_body(status);
        match announced.length {
            _ if has_none => Self::Length(0),
            _ if announced.is_chunked => Self::Chunked(ChunkDecoder::of_response()),
            Some(length) => Self::Length(length),
            None => Self::UntilClose,
        }
    }

    /// Returns whether the body is complete.
    #[inline]
    #[must_use]
    pub fn is_over(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunks) => chunks.is_at_end(),
            Self::UntilClose => false,
        }
    }

    /// Returns the length of the rest if it is known and has at least `min` bytes.
    #[inline]
    #[must_use]
    pub fn long_rest(&self, min: u64) -> Option<u64> {
        match self {
            Self::Length(left) => Some(*left).filter(|left| *left >= min),
            _ => None,
        }
    }

    /// Counts bytes of a long rest that were moved.
    #[inline]
    pub fn count_moved(&mut self, bytes: usize) -> Part<'static> {
        if let Self::Length(left) = self {
            *left -= bytes as u64;
        }
        Part { taken: bytes, content: bytes, bytes: &[] }
    }

    /// Decodes bytes for the other side. A body of unknown length gets the framing `to`, and is added to `out` where that
    /// changes it. A body of known length is never copied.
    #[inline]
    pub fn pass<'b>(&mut self, bytes: &'b [u8], to: &Framing, out: &mut Vec<u8>) -> Result<Part<'b>, Ambiguity> {
        if self.is_over() {
            return Ok(Part { taken: 0, content: 0, bytes: &[] });
        }
        let (taken, content) = self.decode(bytes, |piece| to.put(out, piece))?;
        let mut bytes = &bytes[..taken];
        match (self, to) {
            (Self::Length(_), _) | (Self::UntilClose, Framing::Raw | Framing::Length(_)) => {}
            (Self::UntilClose, Framing::Chunked(_)) => {
                put_chunk(out, bytes);
                bytes = &[];
            }
            (Self::Chunked(chunks), to) => {
                bytes = &[];
                if chunks.is_at_end() {
                    chunks.put_end(to, out)?;
                }
            }
        }
        Ok(Part { taken, content, bytes })
    }

    /// Decodes bytes that the other side does not get. Returns the number of bytes that belong to the body, and the
    /// number of content bytes among them.
    #[inline]
    pub fn skip(&mut self, bytes: &[u8]) -> Result<(usize, usize), Ambiguity> {
        self.decode(bytes, |_| {})
    }

    /// Ends the body, because the connection is closed. Fails if the body is incomplete.
    pub fn end(&mut self, to: &Framing, out: &mut Vec<u8>) -> Result<Part<'static>, Ambiguity> {
        let Self::UntilClose = self else { return Err(Ambiguity::BadLength) };
        *self = Self::Length(0);
        to.end(out, [])?;
        Ok(Part { taken: 0, content: 0, bytes: &[] })
    }

    /// Keeps trailers from now on.
    #[inline]
    pub fn keep_trailers(&mut self) {
        if let Self::Chunked(chunks) = self {
            chunks.trailers = Some(Vec::new());
        }
    }

    /// Returns the lines of the trailers that were kept, with the final empty one.
    #[inline]
    pub fn trailers(&self) -> &[u8] {
        match self {
            Self::Chunked(chunks) => chunks.trailers.as_deref().unwrap_or_default(),
            _ => &[],
        }
    }

    /// Takes the trailers of a body that is over.
    pub fn take_trailers(&mut self) -> Result<HeaderMap, Ambiguity> {
        let mut map = HeaderMap::new();
        let Self::Chunked(ChunkDecoder { trailers, .. }) = self else { return Ok(map) };
        let Some(lines) = trailers.take() else { return Ok(map) };
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        for trailer in parse_trailers(&lines, &mut parsed)? {
            let name = HeaderName::from_bytes(trailer.name.as_bytes()).map_err(|_invalid| Ambiguity::BadChunk)?;
            map.append(name, HeaderValue::from_bytes(trailer.value).map_err(|_invalid| Ambiguity::BadChunk)?);
        }
        Ok(map)
    }

    /// Passes the content of chunks to `found`. Returns the number of bytes that belong to the body, and the number of content
    /// bytes among them.
    fn decode(&mut self, bytes: &[u8], mut found: impl FnMut(&[u8])) -> Result<(usize, usize), Ambiguity> {
        match self {
            Self::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= taken as u64;
                Ok((taken, taken))
            }
            Self::Chunked(chunks) => {
                let mut content = 0;
                let taken = chunks.decode(bytes, |piece| {
                    content += piece.len();
                    found(piece);
                })?;
                Ok((taken, content))
            }
            Self::UntilClose => Ok((bytes.len(), bytes.len())),
        }
    }
}

impl Framing {
    /// In chunks, without trailers.
    pub const CHUNKED: Self = Self::Chunked(TrailerNames(Vec::new()));

    /// Returns the bytes to send for some content: the content itself, or a chunk in `out`. Fails if the body is longer
    /// than announced.
    #[inline]
    pub fn frame<'b>(&mut self, content: &'b [u8], out: &'b mut Vec<u8>) -> Result<&'b [u8], Ambiguity> {
        match self {
            Self::Length(left) => {
                *left = left.checked_sub(content.len() as u64).ok_or(Ambiguity::BadLength)?;
                Ok(content)
            }
            Self::Chunked(_) => {
                put_chunk(out, content);
                Ok(out)
            }
            Self::Raw => Ok(content),
        }
    }

    /// Writes the end of a body. Fails if the body is shorter than announced.
    pub fn end<'t>(
        &self,
        out: &mut Vec<u8>,
        trailers: impl IntoIterator<Item = (&'t str, &'t [u8])>,
    ) -> Result<(), Ambiguity> {
        match self {
            Self::Length(1..) => return Err(Ambiguity::BadLength),
            Self::Length(0) | Self::Raw => {}
            Self::Chunked(names) => {
                out.extend_from_slice(b"0\r\n");
                for (name, value) in trailers.into_iter().filter(|(name, _)| names.pass(name)) {
                    put(out, name, value);
                }
                out.extend_from_slice(b"\r\n");
            }
        }
        Ok(())
    }

    fn put(&self, out: &mut Vec<u8>, content: &[u8]) {
        match self {
            Self::Chunked(_) => put_chunk(out, content),
            Self::Length(_) | Self::Raw => out.extend_from_slice(content),
        }
    }
}

/// Writes a chunk. An empty one is skipped, since it would be the last.
fn put_chunk(out: &mut Vec<u8>, content: &[u8]) {
    if !content.is_empty() {
        // Writing to a vector does not fail.
        _ = write!(out, "{:x}\r\n", content.len());
        out.extend_from_slice(content);
        out.extend_from_slice(b"\r\n");
    }
}

/// The state of a chunked body, after the bytes that were decoded.
#[derive(Debug)]
pub struct ChunkDecoder {
    at: At,
    /// Whether blanks after chunk sizes are allowed.
    allows_blanks: bool,
    /// The lines of the trailers with the final empty one, if they are kept.
    trailers: Option<Vec<u8>>,
}

/// The position of the next byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    ChunkSize {
        size: u64,
        digits: u32,
        line: usize,
    },
    /// In the blanks after a chunk size.
    ChunkBlanks {
        size: u64,
        line: usize,
    },
    ChunkExtension {
        size: u64,
        line: usize,
    },
    ChunkSizeLf {
        size: u64,
    },
    Chunk {
        left: u64,
    },
    ChunkCr,
    ChunkLf,
    /// In the trailers.
    Trailer {
        bytes: usize,
        lines: usize,
        part: TrailerPart,
    },
    /// Behind the body.
    End,
}

/// The part of a trailer line that the next byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrailerPart {
    /// The first byte of a line.
    Start,
    Name,
    Value,
    /// The LF of a line.
    Lf,
    /// The LF of the empty line that ends the body.
    LastLf,
}

impl ChunkDecoder {
    /// Creates a decoder for the body of a request.
    pub fn of_request() -> Self {
        Self { at: At::ChunkSize { size: 0, digits: 0, line: 0 }, allows_blanks: false, trailers: None }
    }

    /// Creates a decoder for the body of a response. Some servers write blanks after chunk sizes.
    pub fn of_response() -> Self {
        Self { allows_blanks: true, ..Self::of_request() }
    }

    /// Decodes bytes and passes the content to `found`. Returns the number of bytes that belong to the body.
    fn decode(&mut self, bytes: &[u8], mut found: impl FnMut(&[u8])) -> Result<usize, Ambiguity> {
        let mut rest = bytes;
        while !rest.is_empty() && !self.is_at_end() {
            let at = self.at;
            let taken = self.step(rest)?;
            match (at, &mut self.trailers) {
                (At::Chunk { .. }, _) => found(&rest[..taken]),
                (At::Trailer { .. }, Some(trailers)) => trailers.extend_from_slice(&rest[..taken]),
                _ => {}
            }
            rest = &rest[taken..];
        }
        Ok(bytes.len() - rest.len())
    }

    /// Writes the end of the body, with the trailers that were kept.
    fn put_end(&self, to: &Framing, out: &mut Vec<u8>) -> Result<(), Ambiguity> {
        let (Framing::Chunked(_), Some(lines)) = (to, &self.trailers) else { return to.end(out, []) };
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let trailers = parse_trailers(lines, &mut parsed)?;
        to.end(out, trailers.iter().map(|trailer| (trailer.name, trailer.value)))
    }

    /// Returns whether the body is complete.
    #[inline]
    fn is_at_end(&self) -> bool {
        self.at == At::End
    }

    /// Consumes at least one byte.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, Ambiguity> {
        let byte = bytes[0];
        self.at = match self.at {
            At::End => return Err(Ambiguity::BadChunk),
            At::Chunk { left } => {
                let taken = left.min(bytes.len() as u64);
                self.at = if taken == left { At::ChunkCr } else { At::Chunk { left: left - taken } };
                return Ok(taken as usize);
            }
            At::ChunkSize { size, digits, line }
                if self.allows_blanks && digits > 0 && matches!(byte, b' ' | b'\t') =>
            {
                At::ChunkBlanks { size, line }
            }
            At::ChunkSize { size, digits, line } => chunk_size(byte, size, digits, line)?,
            At::ChunkBlanks { size, line } => match byte {
                b' ' | b'\t' if line < MAX_CHUNK_LINE => At::ChunkBlanks { size, line: line + 1 },
                b';' => At::ChunkExtension { size, line },
                b'\r' => At::ChunkSizeLf { size },
                _ => return Err(Ambiguity::BadChunk),
            },
            At::ChunkExtension { size, line } => match byte {
                b'\r' => At::ChunkSizeLf { size },
                b'\n' | 0 => return Err(Ambiguity::BadChunk),
                _ if line >= MAX_CHUNK_LINE => return Err(Ambiguity::BadChunk),
                _ => At::ChunkExtension { size, line: line + 1 },
            },
            At::ChunkSizeLf { size } => match (byte, size) {
                (b'\n', 0) => At::Trailer { bytes: 0, lines: 0, part: TrailerPart::Start },
                (b'\n', left) => At::Chunk { left },
                _ => return Err(Ambiguity::BadChunk),
            },
            At::ChunkCr if byte == b'\r' => At::ChunkLf,
            At::ChunkLf if byte == b'\n' => At::ChunkSize { size: 0, digits: 0, line: 0 },
            At::ChunkCr | At::ChunkLf => return Err(Ambiguity::BadChunk),
            At::Trailer { bytes, lines, part } => trailer(byte, bytes, lines, part)?,
        };
        Ok(1)
    }
}

fn chunk_size(byte: u8, size: u64, digits: u32, line: usize) -> Result<At, Ambiguity> {
    match (byte as char).to_digit(16) {
        Some(_) if digits >= MAX_CHUNK_DIGITS => Err(Ambiguity::BadChunk),
        Some(digit) => Ok(At::ChunkSize { size: size << 4 | u64::from(digit), digits: digits + 1, line: line + 1 }),
        None if digits == 0 => Err(Ambiguity::BadChunk),
        None => match byte {
            b'\r' => Ok(At::ChunkSizeLf { size }),
            b';' => Ok(At::ChunkExtension { size, line }),
            _ => Err(Ambiguity::BadChunk),
        },
    }
}

fn trailer(byte: u8, bytes: usize, lines: usize, part: TrailerPart) -> Result<At, Ambiguity> {
    if bytes >= MAX_TRAILER_BYTES || lines > MAX_HEADERS {
        return Err(Ambiguity::HeadTooLong);
    }
    let lines = lines + usize::from(part == TrailerPart::Lf);
    let part = match (part, byte) {
        (TrailerPart::LastLf, b'\n') => return Ok(At::End),
        (TrailerPart::Lf, b'\n') => TrailerPart::Start,
        (_, b'\n') => return Err(Ambiguity::BareLf),
        (TrailerPart::Start, b'\r') => TrailerPart::LastLf,
        (TrailerPart::Start | TrailerPart::Name, byte) if is_token(byte) => TrailerPart::Name,
        (TrailerPart::Name, b':') => TrailerPart::Value,
        (TrailerPart::Value, b'\r') => TrailerPart::Lf,
        (TrailerPart::Value, byte) if byte == b'\t' || !byte.is_ascii_control() => TrailerPart::Value,
        _ => return Err(Ambiguity::BadChunk),
    };
    Ok(At::Trailer { bytes: bytes + 1, lines, part })
}

/// Returns whether names may have a byte (RFC 9110, section 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Parses the lines of trailers, with the final empty one.
fn parse_trailers<'p>(
    lines: &'p [u8],
    parsed: &'p mut [httparse::Header<'p>],
) -> Result<&'p [httparse::Header<'p>], Ambiguity> {
    match httparse::parse_headers(lines, parsed) {
        Ok(httparse::Status::Complete((_, trailers))) => Ok(trailers),
        _ => Err(Ambiguity::BadChunk),
    }
}

/// The names of the trailers that a head announces and the other side gets, separated by commas.
#[derive(Debug, Default)]
pub struct TrailerNames(Vec<u8>);

impl TrailerNames {
    /// Returns the names to pass on. The caller leaves out names that change how a message is read, such as
    /// `Content-Length` (RFC 9110, section 6.5.1).
    #[must_use]
    pub fn new<'v>(names: impl Iterator<Item = &'v [u8]>) -> Self {
        Self(names.collect::<Vec<_>>().join(&b","[..]))
    }

    /// Returns whether a trailer is passed on to a client of HTTP/1.
    fn pass(&self, name: &str) -> bool {
        let mut announced = self.0.split(|byte| *byte == b',');
        announced.any(|one| one.eq_ignore_ascii_case(name.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(announced: &str, received: &str) -> Option<String> {
        let mut body = BodyDecoder::Chunked(ChunkDecoder::of_response());
        body.keep_trailers();
        let framing = Framing::Chunked(TrailerNames::new(announced.split(", ").map(str::as_bytes)));
        let mut out = Vec::new();
        body.pass(format!("0\r\n{received}").as_bytes(), &framing, &mut out).ok()?;
        String::from_utf8(out).ok()
    }

    #[test]
    fn only_announced_trailers_pass() {
        let received = "X-Sum: 42\r\nX-Other: 1\r\nContent-Length: 5\r\n\r\n";
        assert_eq!(written("x-sum, x-absent", received).as_deref(), Some("0\r\nX-Sum: 42\r\n\r\n"));
        assert_eq!(written("", "\r\n").as_deref(), Some("0\r\n\r\n"));
        assert_eq!(written("x-sum", "X-Sum 42\r\n\r\n"), None);
    }

    /// Decodes a body that arrives in pieces. Returns its content and trailers, the number of bytes that belong to it, and
    /// whether it is complete.
    fn decoded<'p>(
        chunks: ChunkDecoder,
        pieces: impl IntoIterator<Item = &'p [u8]>,
    ) -> Result<(Vec<u8>, Vec<u8>, usize, bool), Ambiguity> {
        let mut body = BodyDecoder::Chunked(chunks);
        body.keep_trailers();
        let (mut content, mut taken) = (Vec::new(), 0);
        for piece in pieces {
            taken += body.pass(piece, &Framing::Raw, &mut content)?.taken;
        }
        Ok((content, body.trailers().to_vec(), taken, body.is_over()))
    }

    fn decoded_request(text: &str) -> Result<(Vec<u8>, Vec<u8>, usize, bool), Ambiguity> {
        decoded(ChunkDecoder::of_request(), [text.as_bytes()])
    }

    #[test]
    fn chunks_with_one_reading_are_decoded() {
        for (text, content, trailers) in [
            ("5\r\nhel\n\0\r\n0\r\n\r\n", "hel\n\0", "\r\n"),
            ("A;x=\"y\"\r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\n", "0123456789", "X-Sum: 1\r\n\r\n"),
        ] {
            for following in ["", "GET / HTTP/1.1\r\n"] {
                let wanted = (content.as_bytes().to_vec(), trailers.as_bytes().to_vec(), text.len(), true);
                assert_eq!(decoded_request(&format!("{text}{following}")), Ok(wanted), "{text:?}");
            }
        }
    }

    #[test]
    fn chunks_with_two_readings_are_refused() {
        for (text, wanted) in [
            ("5\nhello\r\n0\r\n\r\n", Ambiguity::BadChunk),
            ("5 \r\nhello\r\n0\r\n\r\n", Ambiguity::BadChunk),
            ("-1\r\n\r\n", Ambiguity::BadChunk),
            ("5\r\nhelloX\r\n0\r\n\r\n", Ambiguity::BadChunk),
            ("0\r\nA: b\n\r\n", Ambiguity::BareLf),
            ("fffffffffffffffff\r\n", Ambiguity::BadChunk),
            ("0\r\nA\r\n\r\n", Ambiguity::BadChunk),
            ("0\r\nA : b\r\n\r\n", Ambiguity::BadChunk),
            ("0\r\nA: b\r\n c\r\n\r\n", Ambiguity::BadChunk),
            ("0\r\n: b\r\n\r\n", Ambiguity::BadChunk),
            ("0\r\nA: \x01\r\n\r\n", Ambiguity::BadChunk),
            ("0\r\nA: b\rc\r\n\r\n", Ambiguity::BadChunk),
        ] {
            assert_eq!(decoded_request(text), Err(wanted), "{text:?}");
        }
    }

    #[test]
    fn only_responses_may_have_blanks_after_chunk_sizes() {
        for (text, is_valid) in [
            ("5 \t\r\nhello\r\n0 \r\n\r\n", true),
            ("5 ;a\r\nhello\r\n0\r\n\r\n", true),
            ("5 a\r\nhello\r\n0\r\n\r\n", false),
            ("5 6\r\nhello\r\n0\r\n\r\n", false),
            ("5 \n", false),
        ] {
            assert_eq!(decoded(ChunkDecoder::of_response(), [text.as_bytes()]).is_ok(), is_valid, "{text:?}");
            assert!(decoded_request(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn more_trailers_than_headers_are_refused() {
        let body = |count| format!("0\r\n{}\r\n", "a: b\r\n".repeat(count));
        let taken = |text: String| decoded_request(&text).map(|(_, _, taken, _)| taken);
        assert_eq!(taken(body(MAX_HEADERS)), Ok(body(MAX_HEADERS).len()));
        assert_eq!(taken(body(MAX_HEADERS + 1)), Err(Ambiguity::HeadTooLong));
    }

    #[test]
    fn bodies_get_the_framing_of_the_other_side() {
        let chunks = || BodyDecoder::Chunked(ChunkDecoder::of_response());
        for (mut body, received, framing, wanted, following) in [
            (BodyDecoder::Length(5), "hello!", Framing::CHUNKED, "hello", 1),
            (chunks(), "3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n!", Framing::Raw, "hello", 1),
            (chunks(), "5;x\r\nhello\r\n0\r\nA: b\r\n\r\n", Framing::CHUNKED, "5\r\nhello\r\n0\r\n\r\n", 0),
            (BodyDecoder::UntilClose, "hello", Framing::Raw, "hello", 0),
            (BodyDecoder::UntilClose, "hello", Framing::CHUNKED, "5\r\nhello\r\n0\r\n\r\n", 0),
        ] {
            let mut sent = Vec::new();
            let part = body.pass(received.as_bytes(), &framing, &mut sent).expect("the body is valid");
            assert_eq!((part.content, received.len() - part.taken), (5, following), "{received:?}");
            sent.extend_from_slice(part.bytes);
            if !body.is_over() {
                body.end(&framing, &mut sent).expect("it ends with the connection");
            }
            assert_eq!(sent, wanted.as_bytes(), "{received:?}");
            assert!(body.is_over() && body.end(&framing, &mut sent).is_err(), "{received:?}");
        }
    }

    #[test]
    fn bodies_of_another_length_than_announced_are_not_framed() {
        let (mut framing, mut out) = (Framing::Length(5), Vec::new());
        assert_eq!(framing.frame(b"hel", &mut out), Ok(&b"hel"[..]));
        assert_eq!(framing.end(&mut out, []), Err(Ambiguity::BadLength));
        assert_eq!(framing.frame(b"lo!", &mut out), Err(Ambiguity::BadLength));
        assert_eq!(framing.frame(b"lo", &mut out), Ok(&b"lo"[..]));
        assert_eq!(framing.end(&mut out, []), Ok(()));
        assert!(out.is_empty());
    }

    proptest! {
        /// The result does not depend on how the bytes are split.
        #[test]
        fn bytes_may_come_in_any_pieces(cuts in proptest::collection::vec(0usize..60, 0..8), kind in 0usize..3) {
            let text = [
                "5\r\nhello\r\n0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\n",
                "A;x=\"y\"\r\n0123456789\r\n1\r\nx\r\n",
                "5\r\nhello\r\n0\r\nA : b\r\n\r\n",
            ][kind];
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]);
            prop_assert_eq!(decoded(ChunkDecoder::of_request(), pieces), decoded_request(text));
        }

        #[test]
        fn nothing_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            _ = decoded(ChunkDecoder::of_request(), [&bytes[..]]);
            _ = decoded(ChunkDecoder::of_response(), [&bytes[..]]);
        }
    }
}
