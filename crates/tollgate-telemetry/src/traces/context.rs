//! W3C Trace Context: the trace that a request belongs to (<https://www.w3.org/TR/trace-context/>).

use http::HeaderName;

/// The header that names the trace and the parent span.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The header with data of tracing systems about the trace.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The length of `00-` + trace ID + `-` + span ID + `-` + flags.
const LENGTH: usize = 55;

/// A valid `traceparent` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent<'a> {
    /// 32 hexadecimal digits, not all zero.
    pub trace_id: &'a str,
    /// 16 hexadecimal digits, not all zero.
    pub span_id: &'a str,
    /// The lowest bit says that the client records the trace.
    pub flags: u8,
}

impl<'a> TraceParent<'a> {
    /// Reads a header. Returns `None` if it is invalid. Of versions from the future, only the known part is read.
    pub fn read(value: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?;
        let (known, rest) = text.split_at_checked(LENGTH)?;
        let mut parts = known.split('-');
        let [version, trace_id, span_id, flags] = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
        let is_hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let is_id = |text: &str, length| text.len() == length && is_hex(text) && text.bytes().any(|byte| byte != b'0');
        let is_version = version.len() == 2 && is_hex(version) && version != "ff";
        let is_end = if version == "00" { rest.is_empty() } else { rest.is_empty() || rest.starts_with('-') };
        let is_valid = is_version && is_end && is_id(trace_id, 32) && is_id(span_id, 16) && is_hex(flags);
        let flags = u8::from_str_radix(flags, 16).ok().filter(|_| flags.len() == 2)?;
        is_valid.then_some(Self { trace_id, span_id, flags })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_headers_are_read_and_others_are_not() {
        let (trace, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        let read =
            |text: &str| TraceParent::read(text.as_bytes()).map(|parent| (parent.trace_id.to_owned(), parent.flags));
        assert_eq!(read(&format!("00-{trace}-{span}-01")), Some((trace.to_owned(), 1)));
        assert_eq!(read(&format!("cc-{trace}-{span}-00-what-comes-later")), Some((trace.to_owned(), 0)));
        for bad in [
            String::new(),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-01-more"),
            format!("cc-{trace}-{span}-01more"),
            format!("ff-{trace}-{span}-01"),
            format!("0-{trace}0-{span}-01"),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{trace}-{span}-0x"),
            format!("00-{trace}-{span}-+1"),
            format!("00 {trace} {span} 01"),
            format!("00-{trace}-{span}é01"),
        ] {
            assert_eq!(read(&bad), None, "{bad}");
        }
    }
}
