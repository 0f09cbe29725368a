//! Framing that has only one interpretation: the decoder of chunked bodies, and the reasons to refuse a head.
//!
//! A server behind the gateway may interpret ambiguous bytes differently, and take the body of one request for another
//! request (request smuggling). So a message that is not in the strict form is refused, and its connection is closed.
//! Chunks are decoded strictly. Heads are refused by the parser of requests, which is stricter than httparse;
//! [`ambiguity`] names the reason, also of heads that are incomplete.

use http::HeaderName;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};

use crate::gateway::failure::Ambiguity;
use crate::gateway::head::headers::{self, MAX_HEADERS};

/// The maximum length of a chunk-size line. Chunk extensions are practically unused.
const MAX_CHUNK_LINE: usize = 256;
/// The maximum length of trailers.
const MAX_TRAILER_BYTES: usize = 16 << 10;
/// The maximum number of hexadecimal digits of a chunk size.
const MAX_CHUNK_DIGITS: u32 = 15;

/// The state of a chunked body, after the bytes that were decoded.
#[derive(Debug)]
pub(in crate::gateway) struct ChunkDecoder {
    at: At,
    /// Whether blanks after chunk sizes are allowed.
    allows_blanks: bool,
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
    pub(super) fn of_request() -> Self {
        Self { at: At::ChunkSize { size: 0, digits: 0, line: 0 }, allows_blanks: false }
    }

    /// Creates a decoder for the body of a response. Some servers write blanks after chunk sizes.
    pub(super) fn of_response() -> Self {
        Self { allows_blanks: true, ..Self::of_request() }
    }

    /// Decodes bytes and passes the content to `found`. Returns the number of bytes that belong to the body.
    ///
    /// # Errors
    ///
    /// Fails if the chunks are malformed.
    pub(super) fn decode(&mut self, bytes: &[u8], found: impl FnMut(&[u8])) -> Result<usize, Ambiguity> {
        self.decode_with_trailers(bytes, found, |_| {})
    }

    /// Decodes bytes as [`decode`](Self::decode) does, and passes the bytes of the trailers, with the final empty line,
    /// to `trailers`.
    ///
    /// # Errors
    ///
    /// Fails if the chunks are malformed.
    pub(super) fn decode_with_trailers(
        &mut self,
        bytes: &[u8],
        mut found: impl FnMut(&[u8]),
        mut trailers: impl FnMut(&[u8]),
    ) -> Result<usize, Ambiguity> {
        let mut rest = bytes;
        while !rest.is_empty() && !self.is_at_end() {
            let at = self.at;
            let taken = self.step(rest)?;
            match at {
                At::Chunk { .. } => found(&rest[..taken]),
                At::Trailer { .. } => trailers(&rest[..taken]),
                _ => {}
            }
            rest = &rest[taken..];
        }
        Ok(bytes.len() - rest.len())
    }

    /// Returns whether the body is complete.
    pub(super) fn is_at_end(&self) -> bool {
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

/// Returns the first part of a head that has more than one interpretation, if there is one. The head may be incomplete,
/// and other bytes may follow it.
pub(super) fn ambiguity(bytes: &[u8]) -> Option<Ambiguity> {
    let mut lengths = Lengths::default();
    let mut lines = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        // The rest of the last line has not arrived.
        let line = line.strip_suffix(b"\n")?;
        let Some(line) = line.strip_suffix(b"\r") else { return Some(Ambiguity::BareLf) };
        match lines {
            // Empty lines before a request are allowed.
            0 if line.is_empty() => continue,
            0 if memchr::memchr2(0, b'\r', line).is_some() => return Some(Ambiguity::Nul),
            0 => {}
            _ if line.is_empty() => return None,
            _ => {
                if let Err(ambiguity) = lengths.read(line) {
                    return Some(ambiguity);
                }
            }
        }
        lines += 1;
    }
    None
}

/// The lengths that the headers of a request announce.
#[derive(Default)]
struct Lengths {
    has_length: bool,
    is_chunked: bool,
}

impl Lengths {
    /// Reads a header line without its end.
    fn read(&mut self, line: &[u8]) -> Result<(), Ambiguity> {
        if matches!(line[0], b' ' | b'\t') {
            return Err(Ambiguity::FoldedLine);
        }
        // httparse refuses a line without a colon.
        let Some(colon) = memchr::memchr(b':', line) else { return Ok(()) };
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        if matches!(name.last(), Some(b' ' | b'\t')) {
            return Err(Ambiguity::SpaceBeforeColon);
        }
        if memchr::memchr2(0, b'\r', value).is_some() {
            return Err(Ambiguity::Nul);
        }
        let (value, is) =
            (value.trim_ascii(), |wanted: HeaderName| name.eq_ignore_ascii_case(wanted.as_str().as_bytes()));
        let before = (self.has_length, self.is_chunked);
        match before {
            _ if is(CONTENT_LENGTH) => self.has_length = true,
            _ if is(TRANSFER_ENCODING) => self.is_chunked = true,
            _ => return Ok(()),
        }
        match before {
            _ if self.has_length && self.is_chunked => Err(Ambiguity::BothLengths),
            (true, _) => Err(Ambiguity::SeveralLengths),
            (_, true) => Err(Ambiguity::BadTransferCoding),
            _ if self.has_length && headers::length(value).is_none() => Err(Ambiguity::BadLength),
            _ if self.is_chunked && !value.eq_ignore_ascii_case(b"chunked") => Err(Ambiguity::BadTransferCoding),
            _ => Ok(()),
        }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHUNKED: &str = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n";

    #[test]
    fn heads_with_one_reading_pass() {
        for text in [
            "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhel\n\0",
            "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding:  Chunked \r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 9223372036854775807\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h\r\nX : y",
        ] {
            assert_eq!(ambiguity(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn heads_with_two_readings_are_refused() {
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
            // Some servers cannot read these.
            ("POST / HTTP/1.1\r\nContent-Length: 9223372036854775808\r\n\r\n", Ambiguity::BadLength),
            ("POST / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n", Ambiguity::BadLength),
            ("POST / HTTP/1.1\r\nContent-Length: 18446744073709551616\r\n\r\n", Ambiguity::BadLength),
            ("POST / HTTP/1.1\r\nContent-Length: 5\r\ncontent-length: 5\r\n\r\n", Ambiguity::SeveralLengths),
            ("POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", Ambiguity::BothLengths),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", Ambiguity::BothLengths),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n", Ambiguity::BadTransferCoding),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", Ambiguity::BadTransferCoding),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n", Ambiguity::BadTransferCoding),
            (&format!("{CHUNKED}Transfer-Encoding: chunked\r\n\r\n"), Ambiguity::BadTransferCoding),
        ] {
            assert_eq!(ambiguity(text.as_bytes()), Some(wanted), "{text:?}");
        }
    }

    /// Decodes a body that arrives in pieces. Returns its content and trailers, the number of bytes that belong to it, and
    /// whether it is complete.
    fn decoded<'p>(
        mut decoder: ChunkDecoder,
        pieces: impl IntoIterator<Item = &'p [u8]>,
    ) -> Result<(Vec<u8>, Vec<u8>, usize, bool), Ambiguity> {
        let (mut content, mut trailers, mut taken) = (Vec::new(), Vec::new(), 0);
        for piece in pieces {
            let found = |piece: &[u8]| content.extend_from_slice(piece);
            taken += decoder.decode_with_trailers(piece, found, |lines| trailers.extend_from_slice(lines))?;
        }
        Ok((content, trailers, taken, decoder.is_at_end()))
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
            _ = ambiguity(&bytes);
            _ = ambiguity(&[b"GET / HTTP/1.1\r\n", &bytes[..]].concat());
            _ = decoded(ChunkDecoder::of_request(), [&bytes[..]]);
            _ = decoded(ChunkDecoder::of_response(), [&bytes[..]]);
        }
    }
}
