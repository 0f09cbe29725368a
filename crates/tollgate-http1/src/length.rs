//! The length of a body, as the headers of a message announce it.

use httparse::Header;

/// The longest body. Many servers read a length as a signed number of 64 bits.
const MAX_LENGTH: u64 = i64::MAX as u64;

/// Parses a length, which consists only of digits.
#[inline]
#[must_use]
pub fn content_length(value: &[u8]) -> Option<u64> {
    // `parse` would accept a sign.
    let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let length = std::str::from_utf8(value).ok().filter(|_| is_number)?.parse().ok();
    length.filter(|length| *length <= MAX_LENGTH)
}

/// The framing headers of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Announced {
    /// The value of `Content-Length`.
    pub(crate) length: Option<u64>,
    /// Whether there is `Transfer-Encoding: chunked`.
    pub(crate) is_chunked: bool,
    /// Whether `Connection` has the option `close`.
    pub(crate) has_close: bool,
}

impl Announced {
    /// Reads the headers of a message. Returns `None` if they are ambiguous: the other side might interpret them
    /// differently.
    pub(crate) fn read(headers: &[Header<'_>], is_http10: bool) -> Option<Self> {
        let mut announced = Self::default();
        for Header { name, value } in headers {
            // The length of a name leaves one candidate or none.
            match name.len() {
                10 if name.eq_ignore_ascii_case("connection") => announced.has_close |= has_close(value),
                14 if name.eq_ignore_ascii_case("content-length") => {
                    announced.length.replace(content_length(value)?).is_none().then_some(())?;
                }
                17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                    let is_first = !std::mem::replace(&mut announced.is_chunked, true);
                    (is_first && value.eq_ignore_ascii_case(b"chunked")).then_some(())?;
                }
                _ => {}
            }
        }
        let is_ambiguous = announced.is_chunked && (announced.length.is_some() || is_http10);
        (!is_ambiguous).then_some(announced)
    }

    /// Returns whether a body with content follows, where there may be one.
    pub(crate) fn has_body(self) -> bool {
        self.is_chunked || self.length.is_some_and(|length| length != 0)
    }
}

fn has_close(value: &[u8]) -> bool {
    value.split(|byte| *byte == b',').any(|option| option.trim_ascii().eq_ignore_ascii_case(b"close"))
}
