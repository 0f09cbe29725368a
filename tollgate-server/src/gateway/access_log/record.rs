//! The record of a request for the access log, and its line: in the combined format of Apache and nginx, or as JSON.

use std::io::Write as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HOST, REFERER, USER_AGENT};
use http::{HeaderValue, Method, StatusCode, Uri, Version};
use time::OffsetDateTime;
use tollgate::internal::is_control_or_format;
use tollgate::{Decision, Source};
use tollgate_config::internal::LoggedKey;
use tollgate_http::{Headers, Refusal, TokenError};
use tollgate_rules::Outcome;
use tollgate_rules::internal::limited::{KeyTexts, LimitedKey};
use tollgate_rules::{Facts, TrustedProxies};
use tollgate_telemetry::decisions::{DecisionLabel, source_name};
use tollgate_telemetry::limited::key_text;
use tollgate_telemetry::seconds::{rfc3339, since_epoch};
use tollgate_telemetry::traces::{TRACEPARENT, TraceParent};

use super::{AccessLog, MAX_HEADER_BYTES, MAX_TARGET_BYTES, cut};
use crate::gateway::client::Client;
use crate::gateway::failure::Fault;
use crate::gateway::upstream::Target;

/// The status of a request whose client left before the response, as in nginx.
const CLIENT_LEFT: u16 = 499;

/// The logged facts of a request.
pub(in crate::gateway) struct Record {
    log: Arc<AccessLog>,
    worker: usize,
    pub(super) client: IpAddr,
    /// The request line, if it could be parsed.
    pub(super) line: Option<LoggedLine>,
    host: Option<HeaderValue>,
    pub(super) user_agent: Option<HeaderValue>,
    pub(super) referer: Option<HeaderValue>,
    pub(super) limit: Option<Box<str>>,
    outcome: Option<DecisionLabel>,
    /// The key by which that limit counted the request, if keys are logged.
    pub(super) key: Option<Box<str>>,
    /// What decided: the store, or something in its place.
    source: Option<Source>,
    /// The reason why the gateway refused it as malformed or ambiguous.
    pub(super) reason: Option<&'static str>,
    /// The reason why its token was rejected, if a rule reads one.
    pub(super) token: Option<TokenError>,
    pub(super) delay: Duration,
    /// The trace that the request belongs to, from a valid `traceparent`.
    pub(super) trace_id: Option<Box<str>>,
    pub(super) upstream: Option<Arc<Target>>,
    /// The error of that upstream.
    pub(super) fault: Option<Box<str>>,
}

/// The request line.
pub(super) struct LoggedLine {
    pub(super) method: Method,
    uri: Uri,
    version: Version,
}

/// The end of a request.
#[derive(Clone, Copy, Default)]
pub(in crate::gateway) struct Completion<'a> {
    pub(in crate::gateway) status: Option<StatusCode>,
    pub(in crate::gateway) sent_bytes: u64,
    /// Whether the upstream or the gateway cut off the response.
    pub(in crate::gateway) is_broken: bool,
    /// Whether the response is the upstream's.
    pub(in crate::gateway) is_upstreams: bool,
    pub(in crate::gateway) nanos: u64,
    pub(in crate::gateway) route: Option<&'a str>,
    /// The request ID that the client got.
    pub(in crate::gateway) id: Option<&'a HeaderValue>,
}

impl Record {
    pub(in crate::gateway) fn new(
        (method, uri, version): (Method, Uri, Version),
        headers: Headers<'_>,
        client: &Client,
        proxies: &TrustedProxies,
        (log, worker): (&Arc<AccessLog>, usize),
    ) -> Self {
        let facts = client.peer().add_to(Facts::new(method.as_str(), "/").headers(headers));
        let value = |name| HeaderValue::from_bytes(headers.get_named(name)?).ok();
        let address = proxies.client(&facts).unwrap_or(client.nearest);
        let parent = headers.get_named(&TRACEPARENT).and_then(TraceParent::read);
        Self {
            trace_id: parent.map(|parent| parent.trace_id.into()),
            host: value(&HOST),
            user_agent: value(&USER_AGENT),
            referer: value(&REFERER),
            line: Some(LoggedLine { method, uri, version }),
            ..Self::unparsed(address, (log, worker))
        }
    }

    /// Returns the record of a request that could not be parsed.
    pub(in crate::gateway) fn unparsed(client: IpAddr, (log, worker): (&Arc<AccessLog>, usize)) -> Self {
        Self {
            log: Arc::clone(log),
            worker,
            client,
            line: None,
            host: None,
            user_agent: None,
            referer: None,
            limit: None,
            outcome: None,
            key: None,
            source: None,
            trace_id: None,
            reason: None,
            token: None,
            delay: Duration::ZERO,
            upstream: None,
            fault: None,
        }
    }

    /// Sets the trace that the gateway has started.
    pub(in crate::gateway) fn note_trace(&mut self, trace_id: String) {
        self.trace_id = Some(trace_id.into());
    }

    pub(in crate::gateway) fn note_reason(&mut self, reason: &'static str) {
        self.reason = Some(reason);
    }

    pub(in crate::gateway) fn note_outcome(&mut self, outcome: &Outcome) {
        match outcome.refusal() {
            Some(Refusal::Unreadable(request)) => self.reason = Some(request.reason),
            Some(Refusal::Pending) => self.reason = Some("pending"),
            _ => {}
        }
        self.token = outcome.token().error();
        if let Some(limit) = outcome.limit() {
            (self.limit, self.outcome) = (Some(limit.into()), Some(DecisionLabel::of(outcome)));
            self.delay = outcome.delay();
        }
        self.source = outcome.decision().map(Decision::source);
    }

    /// Adds the key of the request, if keys are logged.
    pub(in crate::gateway) fn note_key(&mut self, key: impl FnOnce(KeyTexts) -> Option<LimitedKey>) {
        let texts = match self.log.rule.key {
            None => return,
            Some(LoggedKey::Plain) => KeyTexts::Kept,
            Some(_) => KeyTexts::Hashed,
        };
        self.key = key(texts).map(|key| key_text(&key).into());
    }

    pub(in crate::gateway) fn note_upstream(&mut self, upstream: &Arc<Target>) {
        self.upstream = Some(Arc::clone(upstream));
    }

    pub(in crate::gateway) fn note_fault(&mut self, fault: &Fault) {
        self.fault = Some(fault.to_string().into());
    }

    /// Writes the line.
    pub(in crate::gateway) fn write(&self, completion: &Completion<'_>) {
        self.log.write(self.worker, self, completion);
    }

    pub(super) fn host(&self) -> Option<&[u8]> {
        let named = self.line.as_ref().and_then(|line| line.uri.authority());
        named.map(|authority| authority.as_str().as_bytes()).or_else(|| self.host.as_ref().map(HeaderValue::as_bytes))
    }

    /// Returns the name of the source, if a limit decided.
    pub(super) fn source(&self) -> Option<&'static str> {
        self.source.map(source_name)
    }

    /// Returns the decision; `none` if no limit applied to the request.
    pub(super) fn decision(&self) -> &'static str {
        self.outcome.map_or("none", DecisionLabel::as_str)
    }
}

impl LoggedLine {
    /// Returns the path and the query.
    pub(super) fn target(&self) -> &str {
        self.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str)
    }

    pub(super) fn protocol(&self) -> &'static str {
        match self.version {
            Version::HTTP_2 => "HTTP/2.0",
            Version::HTTP_10 => "HTTP/1.0",
            _ => "HTTP/1.1",
        }
    }
}

impl Completion<'_> {
    /// Returns who answered.
    pub(super) fn answered_by(&self) -> &'static str {
        if self.is_upstreams { "upstream" } else { "tollgate" }
    }

    pub(super) fn status(&self) -> u16 {
        self.status.map_or(CLIENT_LEFT, |status| status.as_u16())
    }
}

/// The last formatted second.
#[derive(Default)]
pub(super) struct Stamp {
    second: i64,
    text: String,
}

/// A time format.
pub(super) type TimeFormat = fn(&OffsetDateTime) -> String;

impl Stamp {
    /// Returns the current second in that format, and the milliseconds. A stamp must always be used with the same
    /// format.
    pub(super) fn now(&mut self, format_time: TimeFormat) -> (&str, u32) {
        self.at(since_epoch(), format_time)
    }

    fn at(&mut self, since: Duration, format_time: TimeFormat) -> (&str, u32) {
        let second = i64::try_from(since.as_secs()).unwrap_or_default();
        if second != self.second || self.text.is_empty() {
            let date = OffsetDateTime::from_unix_timestamp(second).unwrap_or(OffsetDateTime::UNIX_EPOCH);
            (self.second, self.text) = (second, format_time(&date));
        }
        (&self.text, since.subsec_millis())
    }
}

/// `15/Nov/2026:12:25:53 +0000`.
pub(super) fn common(date: &OffsetDateTime) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (hour, minute, second) = date.to_hms();
    let month = MONTHS[usize::from(u8::from(date.month())) - 1];
    format!("{:02}/{month}/{}:{hour:02}:{minute:02}:{second:02} +0000", date.day(), date.year())
}

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
    fn times_have_both_formats_and_change_with_the_second() {
        let leap_day = Duration::from_millis(1_709_210_096_789);
        assert_eq!(Stamp::default().at(leap_day, rfc3339), ("2024-02-29T12:34:56", 789));
        let mut stamp = Stamp::default();
        assert_eq!(stamp.at(leap_day, common), ("29/Feb/2024:12:34:56 +0000", 789));
        assert_eq!(stamp.at(leap_day + Duration::from_millis(300), common), ("29/Feb/2024:12:34:57 +0000", 89));
        assert_eq!(Stamp::default().at(Duration::ZERO, rfc3339), ("1970-01-01T00:00:00", 0));
    }

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
