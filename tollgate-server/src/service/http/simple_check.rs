//! Simple checks over HTTP/1.1, answered without hyper and axum.
//!
//! Most requests to a decision service are checks of one key. An axum router alone takes several times as long for one
//! as the decision (`bench tower`), and hyper comes on top. A request is simple if it is complete, checks one limit with
//! one key, and has no header that changes its meaning. Everything else is left to the router, including every request
//! with an error, so errors are worded in one place.

use std::mem::MaybeUninit;

use serde::Deserialize;
use tollgate_http::Refusal;
use tollgate_rules::Check;

use super::ServiceState;
use super::check_response::CheckResponse;
use crate::service::cross_site::Hosts;

/// A request with more headers is left to the router.
const MAX_HEADERS: usize = 32;
/// The longest body of a simple check.
const MAX_BODY_BYTES: usize = 4096;

/// Answers the simple checks of one connection.
pub(super) struct SimpleChecks {
    state: ServiceState,
    hosts: Hosts,
    /// The last host that was found to be served.
    host: Option<Vec<u8>>,
    date: Date,
    body: Vec<u8>,
}

/// The connection after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    KeepAlive,
    /// The response announces that the connection is closed.
    Close,
}

/// The `Date` header of the current second.
#[derive(Default)]
struct Date {
    second: i64,
    line: String,
}

/// The body of a simple check. The strings have no escapes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body<'b> {
    #[serde(borrow)]
    limit: &'b str,
    #[serde(borrow)]
    key: &'b str,
    #[serde(default = "one")]
    cost: u64,
}

const fn one() -> u64 {
    1
}

impl SimpleChecks {
    pub(super) fn new(state: ServiceState, hosts: Hosts) -> Self {
        Self { state, hosts, host: None, date: Date::default(), body: Vec::new() }
    }

    /// Answers the request at the start of `input` if it is a simple check: appends the response to `output` and returns
    /// the length of the request.
    pub(super) async fn answer(&mut self, input: &[u8], output: &mut Vec<u8>, after: After) -> Option<usize> {
        let (head_bytes, body_bytes) = self.read_head(input)?;
        let whole = head_bytes + body_bytes;
        let body = input.get(head_bytes..whole)?;
        // serde would accept an array as well.
        if body.trim_ascii_start().first() != Some(&b'{') {
            return None;
        }
        let Body { limit, key, cost } = serde_json::from_slice(body).ok()?;
        let outcome = match self.state.gate.check_by_name(limit, &[key.as_bytes()], cost).ok()? {
            Check::Ready(outcome) => outcome,
            pending @ Check::Pending(_) => pending.outcome().await,
        };
        // Nothing was taken.
        if let Some(Refusal::Unreadable(_)) = outcome.refusal() {
            return None;
        }
        // A check with cost 0 takes nothing and is not counted as a decision.
        if cost != 0 {
            self.state.decisions.record([&outcome]);
        }
        self.body.clear();
        CheckResponse::new(&outcome).write(&mut self.body);
        output.extend_from_slice(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ");
        output.extend_from_slice(itoa::Buffer::new().format(self.body.len()).as_bytes());
        output.extend_from_slice(match after {
            After::KeepAlive => &b"\r\n"[..],
            After::Close => b"\r\nconnection: close\r\n",
        });
        output.extend_from_slice(self.date.line());
        output.extend_from_slice(&self.body);
        Some(whole)
    }

    /// Returns the lengths of head and body of the request at the start of `input`, unless its head is incomplete or
    /// unusual.
    fn read_head(&mut self, input: &[u8]) -> Option<(usize, usize)> {
        if !input.starts_with(b"POST /v1/check HTTP/1.1\r\n") {
            return None;
        }
        let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut []);
        let parsed = request.parse_with_uninit_headers(input, &mut headers);
        let httparse::Status::Complete(head_bytes) = parsed.ok()? else { return None };
        let (mut host, mut content_type, mut length, mut authorization) = (None, None, None, None);
        for httparse::Header { name, value } in &*request.headers {
            let is = |known: &str| name.eq_ignore_ascii_case(known);
            let once = |field: &mut Option<_>| field.replace(*value).is_none().then_some(());
            match name.len() {
                4 if is("host") => once(&mut host)?,
                6 if is("origin") || is("expect") => return None,
                7 if is("upgrade") => return None,
                10 if is("connection") && !value.eq_ignore_ascii_case(b"keep-alive") => return None,
                12 if is("content-type") => once(&mut content_type)?,
                13 if is("authorization") => once(&mut authorization)?,
                14 if is("content-length") => once(&mut length)?,
                14 if is("sec-fetch-site") => return None,
                17 if is("transfer-encoding") => return None,
                _ => {}
            }
        }
        let is_json = content_type?.eq_ignore_ascii_case(b"application/json");
        (is_json && self.serves(host?) && self.admits(authorization)).then_some(())?;
        let length =
            length.filter(|digits| (1..=4).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit))?;
        let length = length.iter().fold(0, |length, digit| 10 * length + usize::from(digit - b'0'));
        (length <= MAX_BODY_BYTES).then_some((head_bytes, length))
    }

    fn serves(&mut self, host: &[u8]) -> bool {
        if self.host.as_deref() == Some(host) {
            return true;
        }
        let serves = std::str::from_utf8(host).is_ok_and(|host| self.hosts.serve(host));
        if serves {
            self.host = Some(host.to_vec());
        }
        serves
    }

    /// Returns whether the token is valid, or none is needed.
    fn admits(&self, authorization: Option<&[u8]>) -> bool {
        let Some(tokens) = &self.state.tokens else { return true };
        let Some((scheme, token)) = authorization.and_then(|value| value.split_at_checked("Bearer ".len())) else {
            return false;
        };
        scheme.eq_ignore_ascii_case(b"Bearer ") && tokens.contains(token.trim_ascii())
    }
}

impl Date {
    /// Returns the header and the end of the head.
    fn line(&mut self) -> &[u8] {
        // The coarse clock takes a fifth of the time, and is exact enough for seconds.
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        if self.second != now.tv_sec || self.line.is_empty() {
            self.second = now.tv_sec;
            let since_epoch = std::time::Duration::from_secs(now.tv_sec.try_into().unwrap_or(0));
            let date = httpdate::fmt_http_date(std::time::SystemTime::UNIX_EPOCH + since_epoch);
            self.line = format!("date: {date}\r\n\r\n");
        }
        self.line.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use hyper::service::Service as _;
    use hyper_util::service::TowerToHyperService;
    use tollgate_config::RuleFile;

    use super::super::router;
    use super::*;
    use crate::service::cross_site::guard;
    use tollgate_telemetry::decisions::Decisions;

    const RULES: &str = "
limits:
  - { name: per-user, key: header:x-user-id, algorithm: token_bucket, capacity: 3, refill: 1/h }
  - { name: per-path, key: [header:x-user-id, path], algorithm: token_bucket, capacity: 3, refill: 1/h }
  - { name: global, algorithm: token_bucket, capacity: 3, refill: 1/h }
";

    async fn state() -> ServiceState {
        let gate = tollgate_config::open_gate(&RuleFile::parse("rules.yaml", RULES).unwrap()).await.unwrap();
        ServiceState { gate, decisions: Arc::new(Decisions::default()), tokens: None }
    }

    fn hosts() -> Hosts {
        Hosts::new("service.http.hosts", [], None)
    }

    fn request(headers: &str, body: &str) -> Vec<u8> {
        let length = body.len();
        format!("POST /v1/check HTTP/1.1\r\nhost: localhost:8090\r\ncontent-length: {length}\r\n{headers}\r\n{body}")
            .into_bytes()
    }

    const JSON: &str = "content-type: application/json\r\n";

    /// The same bodies to both, in the same order, each with a state of its own.
    #[tokio::test]
    async fn a_simple_check_gets_the_answer_of_the_router() {
        let mut simple = SimpleChecks::new(state().await, hosts());
        let router = TowerToHyperService::new(guard(router(state().await), hosts()));
        for body in [
            r#"{"limit":"per-user","key":"ann"}"#,
            r#" { "key" : "ann", "limit" : "per-user", "cost" : 2 } "#,
            r#"{"limit":"per-user","key":"ann"}"#,
            r#"{"limit":"per-user","key":"ann","cost":0}"#,
            r#"{"limit":"per-user","key":"ann","cost":4}"#,
            r#"{"limit":"per-user","key":""}"#,
            r#"{"limit":"per-user","key":"żółw"}"#,
        ] {
            let mut output = Vec::new();
            let bytes = request(JSON, body);
            assert_eq!(simple.answer(&bytes, &mut output, After::KeepAlive).await, Some(bytes.len()), "{body}");
            let output = String::from_utf8(output).unwrap();
            let (head, answer) = output.split_once("\r\n\r\n").unwrap();
            let request = Request::post("/v1/check").header("content-type", "application/json");
            let response = router.call(request.body(Body::from(body)).unwrap()).await.unwrap();
            assert_eq!(response.status(), 200);
            let expected = to_bytes(response.into_body(), 4096).await.unwrap();
            let expected = String::from_utf8(expected.to_vec()).unwrap();
            // Time has passed between the two.
            let without_times = |text: &str| {
                let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
                for time in ["reset_after", "retry_after"] {
                    if json[time].is_number() {
                        json[time] = "a time".into();
                    }
                }
                json.to_string()
            };
            assert_eq!(without_times(answer), without_times(&expected), "{body}");
            assert!(head.contains(&format!("content-length: {}\r\n", answer.len())), "{head}");
        }
    }

    #[tokio::test]
    async fn everything_else_is_left_to_the_router() {
        let mut simple = SimpleChecks::new(state().await, hosts());
        let body = r#"{"limit":"per-user","key":"ann"}"#;
        let whole = request(JSON, body);
        let mut requests: Vec<Vec<u8>> = (0..whole.len()).map(|end| whole[..end].to_vec()).collect();
        for header in [
            "connection: close",
            "connection: upgrade",
            "expect: 100-continue",
            "origin: http://localhost:8090",
            "sec-fetch-site: same-origin",
            "transfer-encoding: chunked",
            "upgrade: h2c",
            "host: localhost",
            "Content-Length: 32",
            "content-type: text/plain",
        ] {
            requests.push(request(&format!("{JSON}{header}\r\n"), body));
        }
        requests.push(request("", body));
        requests.push(request("content-type: text/plain\r\n", body));
        for body in [
            "",
            "[]",
            r#"[{"limit":"per-user","key":"ann"}]"#,
            r#"["per-user","ann",1]"#,
            r#"{"limit":"per-user"}"#,
            r#"{"limit":"per-user","key":null}"#,
            r#"{"limit":"per-user","key":["ann"]}"#,
            r#"{"limit":"per-user","key":"\u0061nn"}"#,
            r#"{"limit":"per-user","key":"ann","cost":-1}"#,
            r#"{"limit":"per-user","key":"ann","cost":1.5}"#,
            r#"{"limit":"per-user","key":"ann","key":"bob"}"#,
            r#"{"limit":"per-user","key":"ann","other":1}"#,
            r#"{"limit":"per-user","key":"ann"}}"#,
            r#"{"limit":"per-path","key":"ann"}"#,
            r#"{"limit":"global","key":"ann"}"#,
            r#"{"limit":"unknown","key":"ann"}"#,
            r#"{"request":{"path":"/"}}"#,
        ] {
            requests.push(request(JSON, body));
        }
        let text = String::from_utf8(whole.clone()).unwrap();
        for (from, to) in [
            ("POST", "PUT"),
            ("localhost:8090", ""),
            ("/v1/check", "/v1/peek"),
            ("/v1/check", "/v1/check?a"),
            ("HTTP/1.1", "HTTP/1.0"),
            ("localhost:8090", "evil.example"),
            ("host: localhost:8090\r\n", ""),
            ("content-length: 32", "content-length: +32"),
            ("content-length: 32", "content-length: 99999"),
        ] {
            requests.push(text.replace(from, to).into_bytes());
        }
        for request in requests {
            let mut output = Vec::new();
            let used = simple.answer(&request, &mut output, After::KeepAlive).await;
            assert_eq!((used, output.len()), (None, 0), "{}", request.escape_ascii());
        }
        // None of them took anything.
        let mut output = Vec::new();
        assert_eq!(simple.answer(&whole, &mut output, After::KeepAlive).await, Some(whole.len()));
        assert!(String::from_utf8(output).unwrap().contains(r#""remaining":2"#));
    }
}
