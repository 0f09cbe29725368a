//! Heads of responses.

use http::{StatusCode, Version};
use httparse::Header;

use crate::HeaderSlots;
use crate::body::BodyDecoder;
use crate::length::Announced;

/// The head of a response.
#[derive(Debug)]
pub struct ParsedResponse<'s, 'b> {
    /// The status.
    pub status: StatusCode,
    /// The reason phrase.
    pub reason: &'b [u8],
    /// HTTP/1.0 or HTTP/1.1.
    pub version: Version,
    /// The headers in their order.
    pub headers: &'s [Header<'b>],
    /// The length of the head.
    pub bytes: usize,
    /// The decoder of the body, which follows the head.
    pub body: BodyDecoder,
    /// Whether the server accepts another request on the connection.
    pub stays_open: bool,
}

/// The reason why the head of a response could not be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidResponse {
    /// It has more than [`MAX_HEADERS`](crate::MAX_HEADERS) headers.
    TooManyHeaders,
    /// It is malformed, or the length of its body is ambiguous.
    Malformed,
}

impl<'s, 'b> ParsedResponse<'s, 'b> {
    /// Parses a head, of a response to HEAD if `is_head`. Returns `None` if it is incomplete.
    #[inline]
    pub fn read(
        bytes: &'b [u8],
        slots: &'s mut HeaderSlots<'b>,
        is_head: bool,
    ) -> Result<Option<Self>, InvalidResponse> {
        let mut response = httparse::Response::new(&mut []);
        let parser = httparse::ParserConfig::default();
        let bytes_of_head = match parser.parse_response_with_uninit_headers(&mut response, bytes, slots) {
            Ok(httparse::Status::Complete(bytes)) => bytes,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err(InvalidResponse::TooManyHeaders),
            Err(_) => return Err(InvalidResponse::Malformed),
        };
        let (Some(version), Some(code)) = (response.version, response.code) else {
            return Err(InvalidResponse::Malformed);
        };
        let status = StatusCode::from_u16(code).map_err(|_invalid| InvalidResponse::Malformed)?;
        let (headers, is_http10): (&'s [Header<'b>], _) = (response.headers, version == 0);
        let announced = Announced::read(headers, is_http10).ok_or(InvalidResponse::Malformed)?;
        let body = BodyDecoder::of_response(announced, status, is_head);
        // Unexpected bytes may follow.
        let may_have_stray_body = status == StatusCode::NO_CONTENT && announced.has_body();
        let is_until_close = matches!(body, BodyDecoder::UntilClose);
        let stays_open = !is_http10 && !is_until_close && !announced.has_close && !may_have_stray_body;
        let reason = response.reason.unwrap_or_default().as_bytes();
        let version = if is_http10 { Version::HTTP_10 } else { Version::HTTP_11 };
        Ok(Some(Self { status, reason, version, headers, bytes: bytes_of_head, body, stays_open }))
    }
}
