//! Refuses requests whose framing has more than one interpretation (request smuggling).
//!
//! httparse is as lenient as RFC 9112 permits: it accepts lines that end in a bare LF, and knows nothing of lengths. A
//! server behind the gateway may interpret the same bytes differently, and take the body of one request for another
//! request. So a message that is not in the strict form is refused, and its connection is closed. The same checks
//! decode chunked bodies, of requests and of responses.
//!
//! Deliberately not here: everything that has only one interpretation. httparse validates names and values.

use crate::gateway::failure::Ambiguity;
use crate::gateway::head::headers::{self, MAX_HEADERS};

/// The maximum length of a chunk-size line. Chunk extensions are practically unused.
const MAX_CHUNK_LINE: usize = 256;
/// The maximum length of trailers.
const MAX_TRAILER_BYTES: usize = 16 << 10;
/// The maximum number of hexadecimal digits of a chunk size.
const MAX_CHUNK_DIGITS: u32 = 15;

/// The framing state of one connection.
#[derive(Debug)]
pub(in crate::gateway) struct FramingGuard {
    at: At,
    head: Head,
    /// Whether blanks after chunk sizes are allowed.
    allows_blanks: bool,
}

/// The position of the next byte in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// In the head.
    Head,
    /// In a body of known length.
    Body {
        left: u64,
    },
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
    Refused,
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

/// The parts of a head that determine the framing.
#[derive(Debug, Default)]
struct Head {
    /// The current line, as far as earlier reads contained it.
    line: Vec<u8>,
    lines: usize,
    length: Option<u64>,
    chunked: bool,
    bytes: usize,
}

impl FramingGuard {
    pub(in crate::gateway) fn new() -> Self {
        Self { at: At::Head, head: Head::default(), allows_blanks: false }
    }

    /// Creates a state for the chunked body of a request.
    pub(super) fn for_request_chunks() -> Self {
        Self { at: At::ChunkSize { size: 0, digits: 0, line: 0 }, ..Self::new() }
    }

    /// Creates a state for the chunked body of a response. Some servers write blanks after chunk sizes.
    pub(super) fn for_response_chunks() -> Self {
        Self { allows_blanks: true, ..Self::for_request_chunks() }
    }

    /// Decodes a chunked body and passes its content to `found`. Returns the number of bytes that belong to the body.
    ///
    /// # Errors
    ///
    /// Fails if the chunks are malformed.
    pub(super) fn unchunk(&mut self, bytes: &[u8], found: impl FnMut(&[u8])) -> Result<usize, Ambiguity> {
        self.unchunk_with_trailers(bytes, found, |_| {})
    }

    /// Decodes a chunked body as [`unchunk`](Self::unchunk) does, and passes the bytes of its trailers, with the final
    /// empty line, to `trailers`.
    ///
    /// # Errors
    ///
    /// Fails if the chunks are malformed.
    pub(super) fn unchunk_with_trailers(
        &mut self,
        bytes: &[u8],
        mut found: impl FnMut(&[u8]),
        mut trailers: impl FnMut(&[u8]),
    ) -> Result<usize, Ambiguity> {
        let mut rest = bytes;
        while !rest.is_empty() && !self.is_between() {
            let at = self.at;
            let taken = self.step(rest, usize::MAX)?;
            match at {
                At::Chunk { .. } => found(&rest[..taken]),
                At::Trailer { .. } => trailers(&rest[..taken]),
                _ => {}
            }
            rest = &rest[taken..];
        }
        Ok(bytes.len() - rest.len())
    }

    /// Returns whether the next byte is the first of a message.
    pub(super) fn is_between(&self) -> bool {
        self.at == At::Head && self.head.bytes == 0
    }

    /// Checks the next bytes of the connection.
    ///
    /// # Errors
    ///
    /// Returns the first ambiguity and the number of valid bytes before it. Everything after it is refused.
    pub(in crate::gateway) fn check(&mut self, bytes: &[u8], max_head: usize) -> Result<(), (Ambiguity, usize)> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.step(rest, max_head) {
                Ok(taken) => rest = &rest[taken..],
                Err(ambiguity) => {
                    self.at = At::Refused;
                    return Err((ambiguity, bytes.len() - rest.len()));
                }
            }
        }
        Ok(())
    }

    /// Consumes at least one byte.
    fn step(&mut self, bytes: &[u8], max_head: usize) -> Result<usize, Ambiguity> {
        let byte = bytes[0];
        self.at = match self.at {
            At::Refused => return Err(Ambiguity::BadChunk),
            At::Head => return self.line_of_head(bytes, max_head),
            At::Body { left } => {
                let taken = left.min(bytes.len() as u64);
                self.at = if taken == left { At::Head } else { At::Body { left: left - taken } };
                return Ok(taken as usize);
            }
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

    /// Checks one line of the head, or the part of it that was received.
    fn line_of_head(&mut self, bytes: &[u8], max_head: usize) -> Result<usize, Ambiguity> {
        let end = memchr::memchr(b'\n', bytes);
        let taken = end.map_or(bytes.len(), |end| end + 1);
        self.head.bytes += taken;
        if self.head.bytes > max_head {
            return Err(Ambiguity::HeadTooLong);
        }
        let Some(end) = end else {
            self.head.line.extend_from_slice(bytes);
            return Ok(taken);
        };
        if self.head.line.is_empty() {
            self.whole_line(&bytes[..end])?;
        } else {
            let mut line = std::mem::take(&mut self.head.line);
            line.extend_from_slice(&bytes[..end]);
            self.whole_line(&line)?;
            line.clear();
            self.head.line = line;
        }
        Ok(taken)
    }

    /// Checks a line without its LF.
    fn whole_line(&mut self, line: &[u8]) -> Result<(), Ambiguity> {
        let Some((b'\r', line)) = line.split_last() else {
            return Err(Ambiguity::BareLf);
        };
        if line.is_empty() {
            // Empty lines before a request are allowed.
            if self.head.lines > 0 {
                self.at = self.head.end();
            }
            return Ok(());
        }
        self.head.lines += 1;
        if self.head.lines > 1 {
            self.head.header(line)?;
        } else if memchr::memchr2(0, b'\r', line).is_some() {
            return Err(Ambiguity::Nul);
        }
        Ok(())
    }
}

impl Head {
    fn header(&mut self, line: &[u8]) -> Result<(), Ambiguity> {
        if matches!(line[0], b' ' | b'\t') {
            return Err(Ambiguity::FoldedLine);
        }
        let Some(colon) = memchr::memchr(b':', line) else {
            // httparse refuses it.
            return Ok(());
        };
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        if matches!(name.last(), Some(b' ' | b'\t')) {
            return Err(Ambiguity::SpaceBeforeColon);
        }
        if memchr::memchr2(0, b'\r', value).is_some() {
            return Err(Ambiguity::Nul);
        }
        if name.len() == CONTENT_LENGTH.len() && name.eq_ignore_ascii_case(CONTENT_LENGTH) {
            self.content_length(value.trim_ascii())
        } else if name.len() == TRANSFER_ENCODING.len() && name.eq_ignore_ascii_case(TRANSFER_ENCODING) {
            self.transfer_coding(value.trim_ascii())
        } else {
            Ok(())
        }
    }

    fn content_length(&mut self, value: &[u8]) -> Result<(), Ambiguity> {
        if self.chunked {
            return Err(Ambiguity::BothLengths);
        }
        if self.length.is_some() {
            return Err(Ambiguity::SeveralLengths);
        }
        self.length = Some(headers::length(value).ok_or(Ambiguity::BadLength)?);
        Ok(())
    }

    fn transfer_coding(&mut self, value: &[u8]) -> Result<(), Ambiguity> {
        if self.length.is_some() {
            return Err(Ambiguity::BothLengths);
        }
        if self.chunked || !value.eq_ignore_ascii_case(b"chunked") {
            return Err(Ambiguity::BadTransferCoding);
        }
        self.chunked = true;
        Ok(())
    }

    /// Returns the position after the head.
    fn end(&mut self) -> At {
        let (length, chunked) = (self.length.take(), std::mem::take(&mut self.chunked));
        (self.lines, self.bytes) = (0, 0);
        match length {
            _ if chunked => At::ChunkSize { size: 0, digits: 0, line: 0 },
            None | Some(0) => At::Head,
            Some(left) => At::Body { left },
        }
    }
}

const CONTENT_LENGTH: &[u8] = b"content-length";
const TRANSFER_ENCODING: &[u8] = b"transfer-encoding";

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
        (TrailerPart::LastLf, b'\n') => return Ok(At::Head),
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOM: usize = 64 << 10;

    fn checked(text: &str) -> Result<At, Ambiguity> {
        let mut guard = FramingGuard::new();
        guard.check(text.as_bytes(), ROOM).map_err(|(ambiguity, _)| ambiguity)?;
        Ok(guard.at)
    }

    #[test]
    fn requests_with_one_reading_pass_and_the_next_is_found() {
        for text in [
            "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
            "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding:  Chunked \r\n\r\n5\r\nhel\n\0\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nA;x=\"y\"\r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nHost: h\r\n\r\n",
        ] {
            assert_eq!(checked(text), Ok(At::Head), "{text:?}");
        }
    }

    #[test]
    fn requests_with_two_readings_are_refused() {
        for (text, wanted) in [
            ("GET / HTTP/1.1\nHost: h\r\n\r\n", Ambiguity::BareLf),
            ("GET / HTTP/1.1\r\nHost: h\n\r\n", Ambiguity::BareLf),
            ("GET / HTTP/1.1\r\nHost: h\r\n\n", Ambiguity::BareLf),
            ("GET / HTTP/1.1\r\nHost : h\r\n\r\n", Ambiguity::SpaceBeforeColon),
            ("GET / HTTP/1.1\r\nContent-Length\t: 5\r\n\r\n", Ambiguity::SpaceBeforeColon),
            ("GET / HTTP/1.1\r\nHost: h\r\n x: y\r\n\r\n", Ambiguity::FoldedLine),
            ("GET / HTTP/1.1\r\nHost: h\0\r\n\r\n", Ambiguity::Nul),
            ("GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n", Ambiguity::Nul),
            ("GET / HTTP/1.1\r\nA: b\rContent-Length: 3\r\n\r\n", Ambiguity::Nul),
            ("POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\n", Ambiguity::BadLength),
            ("POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n", Ambiguity::BadLength),
            ("POST / HTTP/1.1\r\nContent-Length: 0x5\r\n\r\n", Ambiguity::BadLength),
            ("POST / HTTP/1.1\r\nContent-Length:\r\n\r\n", Ambiguity::BadLength),
            ("POST / HTTP/1.1\r\nContent-Length: 5\r\ncontent-length: 5\r\n\r\n", Ambiguity::SeveralLengths),
            ("POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", Ambiguity::BothLengths),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", Ambiguity::BothLengths),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n", Ambiguity::BadTransferCoding),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", Ambiguity::BadTransferCoding),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n", Ambiguity::BadTransferCoding),
            (
                "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
                Ambiguity::BadTransferCoding,
            ),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\n\r\n", Ambiguity::BareLf),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA : b\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n c\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n: b\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: \x01\r\n\r\n", Ambiguity::BadChunk),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\rc\r\n\r\n", Ambiguity::BadChunk),
        ] {
            assert_eq!(checked(text), Err(wanted), "{text:?}");
        }
    }

    #[test]
    fn only_responses_may_have_blanks_after_chunk_sizes() {
        let unchunk = |mut guard: FramingGuard, text: &str| guard.unchunk(text.as_bytes(), |_| {}).is_ok();
        for (text, is_valid) in [
            ("5 \t\r\nhello\r\n0 \r\n\r\n", true),
            ("5 ;a\r\nhello\r\n0\r\n\r\n", true),
            ("5 a\r\nhello\r\n0\r\n\r\n", false),
            ("5 6\r\nhello\r\n0\r\n\r\n", false),
            ("5 \n", false),
        ] {
            assert_eq!(unchunk(FramingGuard::for_response_chunks(), text), is_valid, "{text:?}");
            assert!(!unchunk(FramingGuard::for_request_chunks(), text), "{text:?}");
        }
    }

    #[test]
    fn a_length_that_some_servers_cannot_read_is_refused() {
        let head = |length: &str| checked(&format!("POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"));
        assert_eq!(head("9223372036854775807"), Ok(At::Body { left: i64::MAX as u64 }));
        for length in ["9223372036854775808", "18446744073709551615", "18446744073709551616"] {
            assert_eq!(head(length), Err(Ambiguity::BadLength), "{length}");
        }
    }

    #[test]
    fn more_trailers_than_headers_are_refused() {
        let body = |count| format!("0\r\n{}\r\n", "a: b\r\n".repeat(count));
        let unchunk = |text: String| FramingGuard::for_request_chunks().unchunk(text.as_bytes(), |_| {});
        assert_eq!(unchunk(body(MAX_HEADERS)), Ok(body(MAX_HEADERS).len()));
        assert_eq!(unchunk(body(MAX_HEADERS + 1)), Err(Ambiguity::HeadTooLong));
    }

    #[test]
    fn a_head_without_end_is_refused() {
        let mut guard = FramingGuard::new();
        let line = format!("X: {}\r\n", "x".repeat(1000));
        let refused = (0..100).map(|_| guard.check(line.as_bytes(), ROOM)).find(Result::is_err);
        assert!(matches!(refused, Some(Err((Ambiguity::HeadTooLong, _)))));
        let mut guard = FramingGuard::new();
        let refused = (0..100).map(|_| guard.check(&[b'x'; 1000], ROOM)).find(Result::is_err);
        assert!(matches!(refused, Some(Err((Ambiguity::HeadTooLong, _)))));
    }

    proptest! {
        /// The result does not depend on how the bytes are split.
        #[test]
        fn bytes_may_come_in_any_pieces(cuts in proptest::collection::vec(0usize..200, 0..8), kind in 0usize..3) {
            let text = [
                "POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\n",
                "POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\n\r\nhello worldsGET / HTTP/1.1\r\nHost: h",
                "POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\nContent-Length: 12\r\n\r\nhello worlds",
            ][kind];
            let mut guard = FramingGuard::new();
            let whole = (guard.check(text.as_bytes(), ROOM).is_ok(), guard.at);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut guard = FramingGuard::new();
            let found = cuts.windows(2).map(|cut| guard.check(&text.as_bytes()[cut[0]..cut[1]], ROOM)).find(Result::is_err);
            prop_assert_eq!((found.is_none(), guard.at), whole);
        }

        #[test]
        fn nothing_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            _ = FramingGuard::new().check(&bytes, ROOM);
            let mut guard = FramingGuard::new();
            _ = guard.check(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", ROOM);
            _ = guard.check(&bytes, ROOM);
        }
    }
}
