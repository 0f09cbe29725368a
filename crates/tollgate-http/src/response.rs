//! The response to a refused request, as a value or as bytes of HTTP/1.1.
//!
//! A thread can reuse its last response: the next one usually differs in a few digits, or not at all. In a flood, a
//! denied client gets the same response again and again, except for the seconds that pass. The response depends on a
//! few numbers, and overwriting those costs far less than formatting it again: `denied` of the benchmark `gateway`.

use ::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use ::http::{HeaderMap, HeaderValue, Response, StatusCode};
use bytes::Bytes;
use smallvec::SmallVec;

use super::body::Body;
use super::headers::Headers;
use super::policy::{MAX_INTEGER, Number, Policy, reset_at_seconds, set_number};
use super::refusal::{Refusal, RefusalBuilder, challenge};

/// The start of the head of nearly every refusal.
const LIMITED: &str = "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncache-control: no-store\r\n";

/// Headers of a response other than those of its limit, including the server's.
const OTHER_HEADERS: usize = 5;

/// A response that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrittenResponse {
    /// The status of the response.
    pub status: StatusCode,
    /// Length of the body, at the end of the response. Cut it off in a response to HEAD.
    pub body_bytes: usize,
}

impl RefusalBuilder<'_> {
    /// Returns the HTTP response. Its body is `body`, or the format that the request's `Accept` header prefers.
    /// `request` holds the headers of the request.
    #[must_use]
    pub fn response<'h>(&self, body: &Body, request: impl Into<Headers<'h>>) -> Response<Bytes> {
        let (content_type, content) = body.render(self, request.into());
        let mut response = Response::new(content);
        *response.status_mut() = self.refusal.status();
        let headers = response.headers_mut();
        // Reserves room for all headers and those that a server adds. If that fails, headers are dropped one by one.
        let _ = headers.try_reserve(self.policy.map_or(0, Policy::fields) + OTHER_HEADERS);
        self.write_headers(headers);
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// Appends the response to `out` in HTTP/1.1 format. `more` is inserted into the head: header lines that end in
    /// CRLF, such as `date`.
    #[doc(hidden)]
    pub fn write_http1<'h>(
        &self,
        body: &Body,
        request: impl Into<Headers<'h>>,
        more: &[u8],
        out: &mut Vec<u8>,
    ) -> WrittenResponse {
        let request = request.into();
        if let Some(message) = self.write_limited(body, request, more, out, |_, _| {}) {
            return message;
        }
        let response = self.response(body, request);
        let status = response.status();
        let reason = status.canonical_reason().unwrap_or_default();
        put(out, &["HTTP/1.1 ", status.as_str(), " ", reason, "\r\n"]);
        for (name, value) in response.headers() {
            put(out, &[name.as_str(), ": "]);
            out.extend_from_slice(value.as_bytes());
            put(out, &["\r\n"]);
        }
        let content = response.body();
        put(out, &["content-length: ", itoa::Buffer::new().format(content.len()), "\r\n"]);
        out.extend_from_slice(more);
        put(out, &["\r\n"]);
        out.extend_from_slice(content);
        WrittenResponse { status, body_bytes: content.len() }
    }

    /// Fast path for a denial with a JSON body, which nearly every refusal is: `denied` of the benchmark `gateway`.
    /// Calls `on_number` with the position of each number in `out`.
    #[inline]
    fn write_limited(
        &self,
        body: &Body,
        request: Headers<'_>,
        more: &[u8],
        out: &mut Vec<u8>,
        mut on_number: impl FnMut(usize, Number),
    ) -> Option<WrittenResponse> {
        let (Refusal::Limited, Some(_), Some(decision)) = (self.refusal, self.policy, self.decision) else {
            return None;
        };
        let mut digits = itoa::Buffer::new();
        let seconds = digits.format(self.wait_secs()?);
        let parts = body.limited(seconds, request)?;
        let body_bytes = parts.iter().map(|part| part.len()).sum();
        put(out, &[LIMITED]);
        self.with_policies(|policy, matched| policy.write_remaining_lines(decision, matched, out, &mut on_number));
        put(out, &["retry-after: "]);
        on_number(out.len(), Number::ResetIn);
        put(out, &[seconds, "\r\ncontent-length: ", itoa::Buffer::new().format(body_bytes), "\r\n"]);
        out.extend_from_slice(more);
        put(out, &["\r\n"]);
        for (number, part) in parts.into_iter().enumerate() {
            // Every second part is the wait.
            if number % 2 == 1 {
                on_number(out.len(), Number::ResetIn);
            }
            out.extend_from_slice(part.as_bytes());
        }
        Some(WrittenResponse { status: StatusCode::TOO_MANY_REQUESTS, body_bytes })
    }

    /// Writes the rate limit headers, `Retry-After` and `WWW-Authenticate`.
    pub(super) fn write_headers(&self, headers: &mut HeaderMap) {
        let by_limit = matches!(self.refusal, Refusal::Limited | Refusal::Pending | Refusal::Banned { .. });
        if let (Some(decision), true) = (self.decision, by_limit) {
            self.with_policies(|policy, matched| policy.write_remaining(decision, matched, headers));
        }
        if let Some(seconds) = self.wait_secs() {
            set_number(headers, &RETRY_AFTER, seconds);
        }
        if let Refusal::TokenInvalid { error, challenge: true } = self.refusal {
            let prepared = self.challenge.map(|challenge| challenge.value(*error));
            let value = prepared.or_else(|| HeaderValue::try_from(challenge(None, *error)).ok());
            headers.extend(value.map(|value| (WWW_AUTHENTICATE, value)));
        }
    }
}

fn put(out: &mut Vec<u8>, parts: &[&str]) {
    out.reserve(parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| out.extend_from_slice(part.as_bytes()));
}

/// The capacity to which the buffer is shrunk after a larger response.
const KEPT_BYTES: usize = 16 << 10;

/// The last HTTP/1.1 response to a refused request; see [`RefusalBuilder::write_http1_reusing`].
///
/// Use one per thread or per connection.
#[derive(Debug, Default)]
pub struct ReusedResponse {
    bytes: Vec<u8>,
    /// The additional header lines of the response.
    more: Vec<u8>,
    /// The positions of numbers in the response, and their meanings.
    positions: Vec<(usize, Figure)>,
    /// The policies that the response lists, by serial number.
    policies: SmallVec<[u64; 8]>,
    /// The inputs of the response. `None` if they are more than a few numbers, so the response cannot be reused.
    written: Option<(Inputs, WrittenResponse)>,
}

/// The inputs of a denial with the JSON body, besides its policies and additional header lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inputs {
    policy: u64,
    /// Indexed by [`Figure`].
    figures: [u64; 3],
}

/// The meaning of a number in a response.
#[derive(Clone, Copy, Debug)]
enum Figure {
    Remaining,
    ResetAtSecs,
    WaitSecs,
}

impl From<Number> for Figure {
    /// Numbers of structured fields equal those of other headers, up to a bound. For a denial, the reset is the end of
    /// the wait.
    fn from(number: Number) -> Self {
        match number {
            Number::Remaining | Number::SmallRemaining => Self::Remaining,
            Number::ResetAt => Self::ResetAtSecs,
            Number::ResetIn | Number::SmallResetIn | Number::SmallMoreIn => Self::WaitSecs,
        }
    }
}

impl RefusalBuilder<'_> {
    /// Writes the same response as [`write_http1`](Self::write_http1), but overwrites only the digits that differ from
    /// the last one.
    #[doc(hidden)]
    pub fn write_http1_reusing<'l, 'h>(
        &self,
        reused: &'l mut ReusedResponse,
        body: &Body,
        request: impl Into<Headers<'h>>,
        more: &[u8],
    ) -> (WrittenResponse, &'l [u8]) {
        let request = request.into();
        let inputs = self.inputs(body, request);
        let updated = inputs
            .filter(|_| *more == *reused.more && self.lists(&reused.policies))
            .and_then(|inputs| reused.update(inputs));
        let message = updated.unwrap_or_else(|| reused.write(self, inputs, body, request, more));
        (message, &reused.bytes)
    }

    /// Returns `true` if the response lists the policies with these serial numbers.
    fn lists(&self, policies: &[u64]) -> bool {
        self.with_policies(|_, matched| matched.iter().map(|policy| policy.serial()).eq(policies.iter().copied()))
            .unwrap_or(policies.is_empty())
    }

    /// Returns the inputs of the response, or `None` if they are more than a few numbers.
    fn inputs(&self, body: &Body, request: Headers<'_>) -> Option<Inputs> {
        let (Refusal::Limited, Some(policy), Some(decision)) = (self.refusal, self.policy, self.decision) else {
            return None;
        };
        let figures = [decision.remaining(), reset_at_seconds(decision), self.wait_secs()?];
        let is_reusable = Policy::is_remaining_known(decision) && figures.iter().all(|figure| *figure <= MAX_INTEGER);
        (is_reusable && body.is_limited_json(request)).then(|| Inputs { policy: policy.serial(), figures })
    }
}

impl ReusedResponse {
    /// Overwrites the numbers of the response, if all have as many digits as before and the words stay the same.
    fn update(&mut self, inputs: Inputs) -> Option<WrittenResponse> {
        let (before, message) = self.written.filter(|(before, _)| before.policy == inputs.policy)?;
        if before == inputs {
            return Some(message);
        }
        let length = |figure: u64| figure.checked_ilog10().unwrap_or(0);
        // The message has "1 second", and "2 seconds".
        let is_one = |inputs: &Inputs| inputs.figures[Figure::WaitSecs as usize] == 1;
        if before.figures.map(length) != inputs.figures.map(length) || is_one(&before) != is_one(&inputs) {
            return None;
        }
        let mut buffers = [itoa::Buffer::new(); 3];
        let [remaining, reset_at, wait] = &mut buffers;
        let digits = [
            remaining.format(inputs.figures[Figure::Remaining as usize]),
            reset_at.format(inputs.figures[Figure::ResetAtSecs as usize]),
            wait.format(inputs.figures[Figure::WaitSecs as usize]),
        ];
        for (at, figure) in &self.positions {
            let digits = digits[*figure as usize].as_bytes();
            self.bytes[*at..*at + digits.len()].copy_from_slice(digits);
        }
        self.written = Some((inputs, message));
        Some(message)
    }

    fn write(
        &mut self,
        answer: &RefusalBuilder<'_>,
        inputs: Option<Inputs>,
        body: &Body,
        request: Headers<'_>,
        more: &[u8],
    ) -> WrittenResponse {
        let Self { bytes, more: kept, positions, policies, written } = self;
        bytes.clear();
        bytes.shrink_to(KEPT_BYTES);
        positions.clear();
        kept.clear();
        *written = None;
        if let Some(inputs) = inputs {
            let on_number = |at, number: Number| positions.push((at, number.into()));
            if let Some(message) = answer.write_limited(body, request, more, bytes, on_number) {
                kept.extend_from_slice(more);
                policies.clear();
                answer.with_policies(|_, matched| policies.extend(matched.iter().map(|policy| policy.serial())));
                *written = Some((inputs, message));
                return message;
            }
        }
        answer.write_http1(body, request, more, bytes)
    }
}

#[cfg(test)]
mod tests {
    use tollgate::internal::{Admission, Verdict};
    use tollgate::{Decision, FixedWindow, Limit, MINUTE, Source, Timestamp};

    use super::*;
    use crate::internal::HeaderLine;
    use crate::{Families, HeaderFamily};

    /// All inputs of a response.
    #[derive(Clone, Debug)]
    struct Case {
        policy: Policy,
        /// Other policies that the request matched.
        others: Vec<Policy>,
        figures: [u64; 3],
        source: Source,
        refusal: Refusal,
        body: Body,
        accept: &'static str,
        more: &'static str,
    }

    impl Case {
        fn decision(&self) -> Decision {
            let [remaining, reset_at_secs, wait_secs] = self.figures;
            let admission = Admission::Denied { retry_after: wait_secs * 1_000_000 };
            let at = Timestamp::from_secs(1_000);
            let reset_after = (reset_at_secs - 1_000) * 1_000_000;
            let verdict = Verdict { admission, remaining, reset_after };
            Decision { limit: None, quota: 1, cost: 1, at, wall_offset: 0, source: self.source, verdict }
        }

        fn matched(&self) -> Vec<&Policy> {
            std::iter::once(&self.policy).chain(&self.others).collect()
        }

        /// Writes the response, reusing the last one.
        fn write_reusing(&self, reused: &mut ReusedResponse) -> (WrittenResponse, Vec<u8>) {
            let (decision, line) = (self.decision(), HeaderLine { name: "accept", value: self.accept.as_bytes() });
            let matched = self.matched();
            let answer = RefusalBuilder::new(&self.refusal).limit(&self.policy).matched(&matched).decision(&decision);
            let (message, bytes) = answer.write_http1_reusing(reused, &self.body, &[line][..], self.more.as_bytes());
            (message, bytes.to_vec())
        }

        /// Writes the response from scratch.
        fn write_alone(&self) -> (WrittenResponse, Vec<u8>) {
            let (decision, line) = (self.decision(), HeaderLine { name: "accept", value: self.accept.as_bytes() });
            let matched = self.matched();
            let answer = RefusalBuilder::new(&self.refusal).limit(&self.policy).matched(&matched).decision(&decision);
            let mut out = Vec::new();
            let message = answer.write_http1(&self.body, &[line][..], self.more.as_bytes(), &mut out);
            (message, out)
        }
    }

    fn policy(name: &str, quota: u64, families: Families) -> Policy {
        Policy::new(&Limit::new(name, FixedWindow::new(quota, MINUTE)).unwrap(), families)
    }

    fn base() -> Case {
        Case {
            policy: policy("a", 5, Families::default()),
            others: Vec::new(),
            figures: [3, 2_000, 45],
            source: Source::Store,
            refusal: Refusal::Limited,
            body: Body::Json,
            accept: "*/*",
            more: "x: y\r\n",
        }
    }

    /// Each case differs from the others in one input, or in the length of a number.
    fn cases() -> Vec<Case> {
        let with_figures = [
            [3, 2_000, 45],
            [4, 2_000, 45],
            [3, 2_001, 45],
            [3, 2_000, 46],
            [12, 2_000, 45],
            [3, 20_000, 45],
            [3, 2_000, 450],
            [0, 1_001, 1],
            [0, 1_001, 2],
            [MAX_INTEGER, 2_000, 45],
            [MAX_INTEGER + 1, 2_000, 45],
            [MAX_INTEGER + 2, 2_000, 45],
        ];
        let base = base();
        let mut cases: Vec<Case> = with_figures.map(|figures| Case { figures, ..base.clone() }).into();
        let families = [vec![], vec![HeaderFamily::Legacy], HeaderFamily::ALL.to_vec()];
        let policies = [policy("b", 5, Families::default()), policy("a", 6, Families::default())];
        let policies = policies.into_iter().chain(families.map(|chosen| policy("a", 5, chosen.into_iter().collect())));
        cases.extend(policies.map(|policy| Case { policy, ..base.clone() }));
        let template = Body::template("wait {{retry_after}}", "text/plain").unwrap();
        let others = ["b", "c"].map(|name| policy(name, 5, Families::default()));
        let lists = [others[..1].to_vec(), others[1..].to_vec(), others.to_vec()];
        cases.extend(lists.map(|others| Case { others, ..base.clone() }));
        cases.extend([
            Case { more: "x: z\r\n", ..base.clone() },
            Case { more: "", ..base.clone() },
            Case { accept: "application/problem+json", ..base.clone() },
            Case { body: Body::Problem, ..base.clone() },
            Case { body: template, ..base.clone() },
            Case { source: Source::Policy, ..base.clone() },
            Case { refusal: Refusal::Blocked, ..base.clone() },
            Case { refusal: Refusal::StoreUnavailable, ..base.clone() },
            Case { refusal: Refusal::Banned { retry_after: MINUTE }, ..base },
        ]);
        cases
    }

    #[test]
    fn reused_responses_equal_those_written_from_scratch() {
        let cases = cases();
        for first in &cases {
            for second in &cases {
                let mut reused = ReusedResponse::default();
                for case in [first, second, first] {
                    assert_eq!(
                        case.write_reusing(&mut reused),
                        case.write_alone(),
                        "{case:?} write_reusing {first:?} and {second:?}"
                    );
                }
            }
        }
    }

    /// Returns `true` if the second response reuses the first.
    fn is_reused(first: &Case, second: &Case) -> bool {
        let mut reused = ReusedResponse::default();
        first.write_reusing(&mut reused);
        // A response written from scratch overwrites this.
        reused.bytes[0] = b'!';
        second.write_reusing(&mut reused);
        reused.bytes[0] == b'!'
    }

    #[test]
    fn only_digits_are_written_where_only_digits_differ() {
        let base = base();
        assert!(is_reused(&base, &base));
        for figures in [[4, 2_000, 45], [3, 2_001, 45], [3, 2_000, 46], [9, 9_999, 99]] {
            assert!(is_reused(&base, &Case { figures, ..base.clone() }), "{figures:?}");
        }
        for figures in [[12, 2_000, 45], [3, 20_000, 45], [3, 2_000, 5]] {
            assert!(!is_reused(&base, &Case { figures, ..base.clone() }), "{figures:?}");
        }
    }
}
