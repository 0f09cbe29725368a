//! The record of a request for the access log, and the time of its line.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HOST, REFERER, USER_AGENT};
use http::{HeaderValue, Method, StatusCode, Uri, Version};
use time::OffsetDateTime;
use tollgate::http::{Headers, Refusal, TokenError};
use tollgate::internal::limited::{KeyTexts, LimitedKey};
use tollgate::rules::file::internal::LoggedKey;
use tollgate::rules::{Facts, TrustedProxies};
use tollgate::{Decision, Outcome, Source};

use super::AccessLog;
use crate::decisions::{DecisionLabel, source_name};
use crate::gateway::client::Client;
use crate::gateway::failure::Fault;
use crate::gateway::upstream::Target;
use crate::limited::key_text;
use crate::seconds::since_epoch;
use crate::traces::{TRACEPARENT, TraceParent};

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
        let peer = client.address.ip();
        let facts = Facts::new(method.as_str(), "/").headers(headers).peer(peer);
        let value = |name| HeaderValue::from_bytes(headers.get_named(name)?).ok();
        let address = proxies.client(&facts).unwrap_or(peer);
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
        if let Some(Refusal::Unreadable(request)) = outcome.refusal() {
            self.reason = Some(request.reason);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seconds::rfc3339;

    #[test]
    fn times_have_both_formats_and_change_with_the_second() {
        let leap_day = Duration::from_millis(1_709_210_096_789);
        assert_eq!(Stamp::default().at(leap_day, rfc3339), ("2024-02-29T12:34:56", 789));
        let mut stamp = Stamp::default();
        assert_eq!(stamp.at(leap_day, common), ("29/Feb/2024:12:34:56 +0000", 789));
        assert_eq!(stamp.at(leap_day + Duration::from_millis(300), common), ("29/Feb/2024:12:34:57 +0000", 89));
        assert_eq!(Stamp::default().at(Duration::ZERO, rfc3339), ("1970-01-01T00:00:00", 0));
    }
}
