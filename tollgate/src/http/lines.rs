//! Preformatted header lines of a limit, into which only numbers are inserted.

use super::policy::{MAX_INTEGER, Policy, reset_at_seconds, reset_seconds};
use crate::decision::Decision;

/// Text into which numbers are inserted.
#[derive(Clone, Debug, Default)]
pub(super) struct Prepared {
    /// The text between the numbers, concatenated.
    text: String,
    /// The position of each number in the text, and its meaning.
    numbers: Vec<(usize, Number)>,
}

/// A number that is known once a request is decided.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    Remaining,
    /// Seconds since the Unix epoch.
    ResetAt,
    /// Seconds from now.
    ResetIn,
    /// Capped at the largest integer of a structured field, like all `Small` numbers.
    SmallRemaining,
    SmallResetIn,
    /// The parameter `t` of `RateLimit`.
    SmallMoreIn,
}

impl Prepared {
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    pub(super) fn number(&mut self, number: Number) -> &mut Self {
        self.numbers.push((self.text.len(), number));
        self
    }

    /// Appends the text with its numbers to `out`. Calls `on_number` with the position of each number in `out`.
    #[inline]
    pub(super) fn write(
        &self,
        policy: &Policy,
        decision: &Decision,
        out: &mut Vec<u8>,
        mut on_number: impl FnMut(usize, Number),
    ) {
        const MAX_DIGITS: usize = 20;
        out.reserve(self.text.len() + MAX_DIGITS * self.numbers.len());
        let (mut from, mut digits) = (0, itoa::Buffer::new());
        for (to, number) in &self.numbers {
            out.extend_from_slice(&self.text.as_bytes()[from..*to]);
            on_number(out.len(), *number);
            let number = match number {
                Number::Remaining => decision.remaining(),
                Number::ResetAt => reset_at_seconds(decision),
                Number::ResetIn => reset_seconds(decision),
                Number::SmallRemaining => decision.remaining().min(MAX_INTEGER),
                Number::SmallResetIn => reset_seconds(decision).min(MAX_INTEGER),
                Number::SmallMoreIn => policy.more_seconds(decision).min(MAX_INTEGER),
            };
            out.extend_from_slice(digits.format(number).as_bytes());
            from = *to;
        }
        out.extend_from_slice(&self.text.as_bytes()[from..]);
    }
}

#[cfg(test)]
mod tests {
    use ::http::{HeaderMap, HeaderName, HeaderValue};

    use crate::http::{Body, Families, HeaderFamily, Headers, Policy, Refusal, RefusalBuilder};
    use crate::internal::HeaderLine;
    use crate::{Decision, FixedWindow, Limit, Limiter, MINUTE};

    fn decided(families: Families) -> (Policy, [Decision; 2]) {
        let limit = Limit::new("caf\u{e9} \"x\"", FixedWindow::new(1, MINUTE)).unwrap();
        let policy = Policy::new(&limit, families);
        let limiter = Limiter::new(limit);
        (policy, [limiter.check("k"), limiter.check("k")])
    }

    fn read(text: &str) -> HeaderMap {
        let lines = text.split_terminator("\r\n").map(|line| line.split_once(": ").unwrap());
        let values = lines.map(|(name, value)| {
            (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap())
        });
        values.collect()
    }

    #[test]
    fn header_lines_equal_the_header_map() {
        for set in 0..16 {
            let chosen = HeaderFamily::ALL.into_iter().enumerate().filter(|(bit, _)| set >> bit & 1 == 1);
            let (policy, decisions) = decided(chosen.map(|(_, family)| family).collect());
            for decision in decisions {
                let (mut map, mut text) = (HeaderMap::new(), Vec::new());
                policy.merge(&decision, &mut map);
                policy.write_lines(&decision, &mut text);
                assert_eq!(read(std::str::from_utf8(&text).unwrap()), map);
            }
        }
    }

    #[test]
    fn http1_bytes_equal_the_response() {
        let (policy, [_, denied]) = decided(Families::default());
        let template = Body::template("wait {retry_after}", "text/plain").unwrap();
        let refusals =
            [Refusal::Limited, Refusal::Blocked, Refusal::StoreUnavailable, Refusal::Banned { retry_after: MINUTE }];
        for refusal in &refusals {
            for (body, accept) in [
                (Body::Json, "*/*"),
                (Body::Json, "application/problem+json"),
                (Body::Problem, "*/*"),
                (template.clone(), "text/plain"),
            ] {
                let lines = [HeaderLine { name: "Accept", value: accept.as_bytes() }];
                for answer in
                    [RefusalBuilder::new(refusal), RefusalBuilder::new(refusal).limit(&policy).decision(&denied)]
                {
                    let response = answer.response(&body, Headers::from(&lines[..]));
                    let mut out = b"before".to_vec();
                    let message = answer.write_http1(&body, &lines[..], b"x-more: 1\r\n", &mut out);
                    let text = String::from_utf8(out).unwrap();
                    let (head, content) = text.split_once("\r\n\r\n").unwrap();
                    let (status, head) = head.split_once("\r\n").unwrap();
                    let mut headers = response.headers().clone();
                    headers.insert("content-length", response.body().len().into());
                    headers.insert("x-more", HeaderValue::from_static("1"));
                    assert_eq!((read(head), content.as_bytes()), (headers, &response.body()[..]));
                    assert_eq!(status, format!("beforeHTTP/1.1 {}", response.status()));
                    assert_eq!((message.status, message.body_bytes), (response.status(), content.len()));
                }
            }
        }
    }
}
