//! Trailers of responses, for clients that accept them.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::framing::MAX_HEADERS;
use crate::gateway::head::headers::{HeaderKind, kind};
use crate::gateway::head::text;

/// A malformed or truncated body.
pub(in crate::gateway) struct InvalidBody;

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
    pub(in crate::gateway) fn is_any(&self) -> bool {
        self.received.len() > b"\r\n".len()
    }

    /// Writes the last chunk with the trailers that were announced.
    pub(in crate::gateway) fn write(&self, out: &mut Vec<u8>) -> Result<(), InvalidBody> {
        out.extend_from_slice(b"0\r\n");
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        for trailer in self.parse(&mut parsed)?.iter().filter(|trailer| self.passes(trailer.name)) {
            text::put(out, trailer.name, trailer.value);
        }
        out.extend_from_slice(b"\r\n");
        Ok(())
    }

    /// Returns the trailers for a client of HTTP/2, which gets them without an announcement.
    pub(in crate::gateway) fn to_map(&self) -> Result<HeaderMap, InvalidBody> {
        let mut map = HeaderMap::new();
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        for trailer in self.parse(&mut parsed)?.iter().filter(|trailer| is_harmless(trailer.name)) {
            let name = HeaderName::from_bytes(trailer.name.as_bytes()).map_err(|_invalid| InvalidBody)?;
            map.append(name, HeaderValue::from_bytes(trailer.value).map_err(|_invalid| InvalidBody)?);
        }
        Ok(map)
    }

    fn parse<'p>(&'p self, parsed: &'p mut [httparse::Header<'p>]) -> Result<&'p [httparse::Header<'p>], InvalidBody> {
        match httparse::parse_headers(&self.received, parsed) {
            Ok(httparse::Status::Complete((_, trailers))) => Ok(trailers),
            _ => Err(InvalidBody),
        }
    }

    /// Writes the last chunk with those of these trailers that were announced.
    pub(in crate::gateway) fn write_map(&self, out: &mut Vec<u8>, trailers: &HeaderMap) {
        out.extend_from_slice(b"0\r\n");
        for (name, value) in trailers.iter().filter(|(name, _)| self.passes(name.as_str())) {
            text::put(out, name.as_str(), value.as_bytes());
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
