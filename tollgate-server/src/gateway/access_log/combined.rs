//! Lines in the combined format of Apache and nginx. At the end are the limit, its decision, the duration, the source of
//! the decision and of the response, and the request ID.

use std::io::Write as _;

use http::HeaderValue;

use super::record::{Completion, Record, Stamp, common};
use super::{MAX_HEADER_BYTES, MAX_TARGET_BYTES, cut};

pub(super) fn write(line: &mut Vec<u8>, stamp: &mut Stamp, record: &Record, completion: &Completion<'_>) {
    let (time, _) = stamp.now(common);
    // Writing to memory does not fail.
    _ = write!(line, "{} - - [{time}] \"", record.client);
    match &record.line {
        Some(request) => {
            escape(line, request.method.as_str().as_bytes());
            line.push(b' ');
            escape(line, cut(request.target().as_bytes(), MAX_TARGET_BYTES));
            _ = write!(line, " {}", request.protocol());
        }
        None => line.push(b'-'),
    }
    _ = write!(line, "\" {} {} \"", completion.status(), completion.sent_bytes);
    escape(line, header_or_dash(record.referer.as_ref()));
    line.extend_from_slice(b"\" \"");
    escape(line, header_or_dash(record.user_agent.as_ref()));
    line.extend_from_slice(b"\" ");
    word(line, record.limit.as_deref().unwrap_or("-"));
    let (seconds, micros) = (completion.nanos / 1_000_000_000, completion.nanos / 1_000 % 1_000_000);
    let source = record.source().unwrap_or("-");
    let answered_by = if completion.status.is_some() { completion.answered_by() } else { "-" };
    _ = write!(line, " {} {seconds}.{micros:06} {source} {answered_by} ", record.decision());
    escape(line, completion.id.map_or(b"-", HeaderValue::as_bytes));
    line.push(b'\n');
}

fn header_or_dash(header: Option<&HeaderValue>) -> &[u8] {
    header.map_or(b"-", |header| cut(header.as_bytes(), MAX_HEADER_BYTES))
}

/// Escapes as nginx does: quotes, backslashes, control characters and everything outside ASCII as `\x` and two digits.
fn escape(line: &mut Vec<u8>, value: &[u8]) {
    for byte in value {
        match byte {
            b'"' | b'\\' | ..b' ' | 0x7f.. => _ = write!(line, "\\x{byte:02X}"),
            _ => line.push(*byte),
        }
    }
}

/// Escapes a value that is not quoted.
fn word(line: &mut Vec<u8>, value: &str) {
    for part in value.as_bytes().split_inclusive(|byte| *byte == b' ') {
        match part.strip_suffix(b" ") {
            Some(part) => {
                escape(line, part);
                line.extend_from_slice(b"\\x20");
            }
            None => escape(line, part),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_its_quotes_or_its_line() {
        let mut line = Vec::new();
        escape(&mut line, b"a\"b\\c\nd\x7f\xc3\xa9");
        assert_eq!(line, br"a\x22b\x5Cc\x0Ad\x7F\xC3\xA9");
        line.clear();
        word(&mut line, "per user \"x\"");
        assert_eq!(line, br"per\x20user\x20\x22x\x22");
    }
}
