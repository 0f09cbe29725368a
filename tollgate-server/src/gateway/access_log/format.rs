//! The formats of lines: the combined format of Apache and nginx, and JSON objects.

use std::io::Write as _;

use http::HeaderValue;
use tollgate::internal::is_control_or_format;

use super::record::{Completion, Record, Stamp, common};
use super::{MAX_HEADER_BYTES, MAX_TARGET_BYTES, cut};
use crate::seconds::rfc3339;

/// Writes a line in the combined format. At its end are the limit, its decision, the duration, the source of the decision
/// and of the response, and the request ID.
pub(super) fn write_combined(line: &mut Vec<u8>, stamp: &mut Stamp, record: &Record, completion: &Completion<'_>) {
    let (time, _) = stamp.now(common);
    // Writing to memory does not fail.
    _ = write!(line, "{} - - [{time}] \"", record.client);
    match &record.line {
        Some(request) => {
            escape_combined(line, request.method.as_str().as_bytes());
            line.push(b' ');
            escape_combined(line, cut(request.target().as_bytes(), MAX_TARGET_BYTES));
            _ = write!(line, " {}", request.protocol());
        }
        None => line.push(b'-'),
    }
    _ = write!(line, "\" {} {} \"", completion.status(), completion.sent_bytes);
    escape_combined(line, header_or_dash(record.referer.as_ref()));
    line.extend_from_slice(b"\" \"");
    escape_combined(line, header_or_dash(record.user_agent.as_ref()));
    line.extend_from_slice(b"\" ");
    word(line, record.limit.as_deref().unwrap_or("-"));
    let (seconds, micros) = (completion.nanos / 1_000_000_000, completion.nanos / 1_000 % 1_000_000);
    let source = record.source().unwrap_or("-");
    let answered_by = if completion.status.is_some() { completion.answered_by() } else { "-" };
    _ = write!(line, " {} {seconds}.{micros:06} {source} {answered_by} ", record.decision());
    escape_combined(line, completion.id.map_or(b"-", HeaderValue::as_bytes));
    line.push(b'\n');
}

fn header_or_dash(header: Option<&HeaderValue>) -> &[u8] {
    header.map_or(b"-", |header| cut(header.as_bytes(), MAX_HEADER_BYTES))
}

/// Escapes as nginx does: quotes, backslashes, control characters and everything outside ASCII as `\x` and two digits.
fn escape_combined(line: &mut Vec<u8>, value: &[u8]) {
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
                escape_combined(line, part);
                line.extend_from_slice(b"\\x20");
            }
            None => escape_combined(line, part),
        }
    }
}

/// Writes a line as a JSON object.
pub(super) fn write_json(line: &mut Vec<u8>, stamp: &mut Stamp, record: &Record, completion: &Completion<'_>) {
    let (time, millis) = stamp.now(rfc3339);
    // Writing to memory does not fail.
    _ = write!(line, r#"{{"time":"{time}.{millis:03}Z","client":"{}""#, record.client);
    if let Some(request) = &record.line {
        text(line, "method", request.method.as_str().as_bytes());
        text(line, "target", cut(request.target().as_bytes(), MAX_TARGET_BYTES));
        text(line, "protocol", request.protocol().as_bytes());
    }
    header(line, "host", record.host());
    let (millis, micros) = (completion.nanos / 1_000_000, completion.nanos / 1_000 % 1_000);
    let (status, sent) = (completion.status(), completion.sent_bytes);
    _ = write!(line, r#","status":{status},"sent_bytes":{sent},"duration_ms":{millis}.{micros:03}"#);
    header(line, "route", completion.route.map(str::as_bytes));
    if let Some(upstream) = &record.upstream {
        text(line, "upstream", format!("{}:{}", upstream.address.host, upstream.address.port).as_bytes());
    }
    header(line, "upstream_error", record.fault.as_deref().map(str::as_bytes));
    if completion.is_broken {
        line.extend_from_slice(br#","broken":true"#);
    }
    header(line, "limit", record.limit.as_deref().map(str::as_bytes));
    text(line, "decision", record.decision().as_bytes());
    header(line, "key", record.key.as_deref().map(str::as_bytes));
    header(line, "source", record.source().map(str::as_bytes));
    if completion.status.is_some() {
        text(line, "answered_by", completion.answered_by().as_bytes());
    }
    header(line, "reason", record.reason.map(str::as_bytes));
    header(line, "token", record.token.map(|error| error.code().as_bytes()));
    if !record.delay.is_zero() {
        let micros = record.delay.as_micros();
        _ = write!(line, r#","delay_ms":{}.{:03}"#, micros / 1_000, micros % 1_000);
    }
    header(line, "request_id", completion.id.map(http::HeaderValue::as_bytes));
    header(line, "trace_id", record.trace_id.as_deref().map(str::as_bytes));
    header(line, "user_agent", record.user_agent.as_ref().map(http::HeaderValue::as_bytes));
    header(line, "referer", record.referer.as_ref().map(http::HeaderValue::as_bytes));
    line.extend_from_slice(b"}\n");
}

/// Writes a field, unless there is no value.
fn header(line: &mut Vec<u8>, name: &str, value: Option<&[u8]>) {
    if let Some(value) = value {
        text(line, name, cut(value, MAX_HEADER_BYTES));
    }
}

fn text(line: &mut Vec<u8>, name: &str, value: &[u8]) {
    line.extend_from_slice(b",\"");
    line.extend_from_slice(name.as_bytes());
    line.extend_from_slice(b"\":\"");
    escape_json(line, value);
    line.push(b'"');
}

/// Escapes a value, so that a client can neither leave the quotes or the line nor control a terminal.
fn escape_json(line: &mut Vec<u8>, value: &[u8]) {
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
    if value.iter().all(is_plain) {
        return line.extend_from_slice(value);
    }
    for char in String::from_utf8_lossy(value).chars() {
        match char {
            '"' | '\\' => line.extend_from_slice(&[b'\\', char as u8]),
            _ if is_control_or_format(char) => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    _ = write!(line, "\\u{unit:04x}");
                }
            }
            _ => line.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_leaves_its_quotes_or_its_line() {
        let mut line = Vec::new();
        escape_combined(&mut line, b"a\"b\\c\nd\x7f\xc3\xa9");
        assert_eq!(line, br"a\x22b\x5Cc\x0Ad\x7F\xC3\xA9");
        line.clear();
        word(&mut line, "per user \"x\"");
        assert_eq!(line, br"per\x20user\x20\x22x\x22");
    }

    proptest! {
        #[test]
        fn every_value_is_json_on_one_line(value in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut line = b"{\"a\":1".to_vec();
            text(&mut line, "value", &value);
            line.push(b'}');
            let object: serde_json::Value = serde_json::from_slice(&line).expect("valid JSON");
            prop_assert_eq!(object["value"].as_str().expect("a text"), String::from_utf8_lossy(&value));
            prop_assert_eq!(String::from_utf8(line).expect("UTF-8").chars().filter(|char| is_control_or_format(*char)).count(), 0);
        }
    }
}
