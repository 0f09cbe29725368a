//! Heads of requests.
//!
//! The parser is stricter than httparse; [`ambiguity`] names the reason, also of heads that are incomplete.

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderName, StatusCode, Version};
use httparse::Header;

use crate::HeaderSlots;
use crate::ambiguity::Ambiguity;
use crate::body::BodyDecoder;
use crate::length::{Announced, content_length};

/// The maximum length of a target, as in `http::Uri`.
const MAX_TARGET_BYTES: usize = (u16::MAX - 1) as usize;

/// The reason why a head could not be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidHead {
    /// It exceeds the maximum length or number of headers.
    TooLong,
    /// Its target is too long.
    TargetTooLong,
    /// It is not HTTP.
    Malformed,
    /// It has more than one interpretation.
    Ambiguous(Ambiguity),
}

impl InvalidHead {
    /// Returns the reason for a head that is malformed or ambiguous.
    #[cold]
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        ambiguity(bytes).map_or(Self::Malformed, Self::Ambiguous)
    }

    /// Returns whether it is a strike against the client: no limit counts the request.
    pub const fn is_strike(self) -> bool {
        match self {
            Self::TooLong | Self::TargetTooLong | Self::Malformed | Self::Ambiguous(_) => true,
        }
    }

    /// Returns the status of the response to it.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Self::TooLong => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TargetTooLong => StatusCode::URI_TOO_LONG,
            Self::Malformed | Self::Ambiguous(_) => StatusCode::BAD_REQUEST,
        }
    }
}

/// The head of a request whose length is unambiguous.
#[derive(Debug)]
pub struct ParsedRequest<'s, 'b> {
    /// The method, in the case of the client.
    pub method: &'b str,
    /// The target. It may be invalid as a URI.
    pub target: &'b str,
    /// HTTP/1.0 or HTTP/1.1.
    pub version: Version,
    /// The headers in their order.
    pub headers: &'s [Header<'b>],
    /// The length of the head.
    pub bytes: usize,
    /// The decoder of the body, which follows the head.
    pub body: BodyDecoder,
}

impl<'s, 'b> ParsedRequest<'s, 'b> {
    /// Parses a head. Returns `None` if it is incomplete.
    #[inline]
    pub fn read(bytes: &'b [u8], slots: &'s mut HeaderSlots<'b>, max_head: usize) -> Result<Option<Self>, InvalidHead> {
        let invalid = || Err(InvalidHead::of(bytes));
        let mut request = httparse::Request::new(&mut []);
        let head_bytes = match request.parse_with_uninit_headers(bytes, slots) {
            Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
            // An ambiguous head need not be complete.
            Ok(httparse::Status::Partial) => {
                return match InvalidHead::of(bytes) {
                    InvalidHead::Malformed if bytes.len() < max_head => Ok(None),
                    InvalidHead::Malformed => Err(InvalidHead::TooLong),
                    ambiguous => Err(ambiguous),
                };
            }
            Err(httparse::Error::TooManyHeaders) => return Err(InvalidHead::TooLong),
            Err(_) => return invalid(),
        };
        let (Some(method), Some(target), Some(version)) = (request.method, request.path, request.version) else {
            return invalid();
        };
        if !ends_lines_in_crlf(&bytes[..head_bytes]) {
            return invalid();
        }
        if head_bytes > max_head {
            return Err(InvalidHead::TooLong);
        }
        if target.len() > MAX_TARGET_BYTES {
            return Err(InvalidHead::TargetTooLong);
        }
        let headers: &'s [Header<'b>] = request.headers;
        let Some(announced) = Announced::read(headers, version == 0) else { return invalid() };
        let body = BodyDecoder::of_request((!announced.is_chunked).then(|| announced.length.unwrap_or(0)));
        let version = if version == 0 { Version::HTTP_10 } else { Version::HTTP_11 };
        Ok(Some(Self { method, target, version, headers, bytes: head_bytes, body }))
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

/// Returns the first part of a head that has more than one interpretation, if there is one. The head may be incomplete,
/// and other bytes may follow it.
#[must_use]
pub fn ambiguity(bytes: &[u8]) -> Option<Ambiguity> {
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
            _ if self.has_length && content_length(value).is_none() => Err(Ambiguity::BadLength),
            _ if self.is_chunked && !value.eq_ignore_ascii_case(b"chunked") => Err(Ambiguity::BadTransferCoding),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::header_slots;

    const MAX_HEAD: usize = 64 << 10;

    /// Returns the length of a request, as far as it has arrived, and the rest of its body.
    fn parsed(text: &[u8]) -> Option<(usize, Result<BodyDecoder, Ambiguity>)> {
        let mut slots = header_slots();
        let mut request = ParsedRequest::read(text, &mut slots, MAX_HEAD).ok().flatten()?;
        Some(match request.body.skip(&text[request.bytes..]) {
            Ok((taken, _)) => (request.bytes + taken, Ok(request.body)),
            Err(ambiguity) => (text.len(), Err(ambiguity)),
        })
    }

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

    /// Finds the end of an accepted request without the code under test. Returns `None` if it is incomplete.
    fn simple_end(text: &str) -> Option<usize> {
        let start = text.len() - text.trim_start_matches("\r\n").len();
        let body = start + text[start..].find("\r\n\r\n")? + 4;
        let head = text[start..body].to_ascii_lowercase();
        let value = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        if value("transfer-encoding").is_none() {
            let length: usize = value("content-length").map_or(Ok(0), |value| value.trim().parse()).ok()?;
            return Some(body + length).filter(|end| *end <= text.len());
        }
        let mut at = body;
        loop {
            let line = &text[at..at + text.get(at..)?.find("\r\n")?];
            at += line.len() + 2;
            match usize::from_str_radix(line.split(';').next()?, 16).ok()? {
                // Trailers end with an empty line.
                0 if text.get(at..)?.starts_with("\r\n") => return Some(at + 2),
                0 => return Some(at + text[at..].find("\r\n\r\n")? + 4),
                size => at += size + 2,
            }
        }
    }

    proptest! {
        /// A request is accepted only if nothing in it is ambiguous, whatever httparse accepts.
        #[test]
        fn accepted_requests_are_unambiguous(pieces in proptest::collection::vec(0..PIECES.len(), 0..9), good in any::<bool>()) {
            let mut text = if good { "POST / HTTP/1.1\r\nHost: h\r\n".to_owned() } else { String::new() };
            text.extend(pieces.into_iter().map(|piece| PIECES[piece]));
            if parsed(text.as_bytes()).is_some() {
                prop_assert_eq!(ambiguity(text.as_bytes()), None, "{:?}", text);
            }
        }

        #[test]
        fn requests_end_where_a_simple_reader_ends_them(pieces in proptest::collection::vec(0..PIECES.len(), 0..9), good in any::<bool>()) {
            let mut text = if good { "POST / HTTP/1.1\r\nHost: h\r\n".to_owned() } else { String::new() };
            text.extend(pieces.into_iter().map(|piece| PIECES[piece]));
            if let Some((bytes, rest)) = parsed(text.as_bytes()) {
                match rest {
                    Ok(rest) if rest.is_over() => prop_assert_eq!(simple_end(&text), Some(bytes), "{:?}", text),
                    Err(_) => {}
                    Ok(_) => prop_assert!(simple_end(&text).is_none() && bytes == text.len(), "{text:?}"),
                }
            }
        }

        #[test]
        fn nothing_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            _ = ambiguity(&bytes);
            _ = ambiguity(&[b"GET / HTTP/1.1\r\n", &bytes[..]].concat());
            parsed(&bytes);
            parsed(&[&b"GET / HTTP/1.1\r\n"[..], &bytes, b"\r\n\r\n"].concat());
        }
    }
}
