//! The message that was written last, kept because the next one differs from it in a few digits, or in none.
//!
//! Who is refused in a flood is told the same over and over, but for the seconds that go by. What a message depends on
//! is a few numbers, and putting those in their places costs far less than writing it.

use smallvec::SmallVec;

use super::answer::{Answer, WrittenResponse};
use super::body::Body;
use super::headers::Headers;
use super::lines::Number;
use super::policy::{MAX_INTEGER, Policy, reset_at_seconds};
use super::refusal::Refusal;

/// A message that has made the memory longer than this does not keep it so.
const KEPT_BYTES: usize = 16 << 10;

/// The message of HTTP/1.1 that a refusal was answered with last; see [`Answer::write_http1_reusing`].
///
/// Have one for each thread, or for each connection.
#[derive(Debug, Default)]
pub struct ReusedResponse {
    bytes: Vec<u8>,
    /// What went among its headers.
    more: Vec<u8>,
    /// Where its numbers are, and which they are.
    places: Vec<(usize, Figure)>,
    /// The policies that it lists, by their serial numbers.
    policies: SmallVec<[u64; 8]>,
    /// `None` if it cannot be told of another refusal whether its message is the same.
    written: Option<(Told, WrittenResponse)>,
}

/// All that the message of a denial depends on, in the body that most clients get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    policy: u64,
    /// By their [`Figure`]s.
    figures: [u64; 3],
}

/// What a number of a message tells.
#[derive(Clone, Copy, Debug)]
enum Figure {
    Remaining,
    ResetAtSecs,
    WaitSecs,
}

impl From<Number> for Figure {
    /// Numbers of structured fields are those of other headers, up to a bound. To a denial, the reset is the end of the
    /// wait.
    fn from(number: Number) -> Self {
        match number {
            Number::Remaining | Number::SmallRemaining => Self::Remaining,
            Number::ResetAt => Self::ResetAtSecs,
            Number::ResetIn | Number::SmallResetIn | Number::SmallMoreIn => Self::WaitSecs,
        }
    }
}

impl Answer<'_> {
    /// The same as [`write_http1`](Self::write_http1), but only what differs from the message before is written.
    #[doc(hidden)]
    pub fn write_http1_reusing<'l, 'h>(
        &self,
        last: &'l mut ReusedResponse,
        body: &Body,
        request: impl Into<Headers<'h>>,
        more: &[u8],
    ) -> (WrittenResponse, &'l [u8]) {
        let request = request.into();
        let told = self.told(body, request);
        let again = told.filter(|_| *more == *last.more && self.lists(&last.policies)).and_then(|told| last.tell(told));
        let message = again.unwrap_or_else(|| last.write(self, told, body, request, more));
        (message, &last.bytes)
    }

    /// Whether it lists the policies with these serial numbers.
    fn lists(&self, policies: &[u64]) -> bool {
        self.with_policies(|_, matched| matched.iter().map(|policy| policy.serial()).eq(policies.iter().copied()))
            .unwrap_or(policies.is_empty())
    }

    /// What the message depends on beside its policies and what goes among its headers; `None` if that is more than a few numbers.
    fn told(&self, body: &Body, request: Headers<'_>) -> Option<Told> {
        let (Refusal::Limited, Some(policy), Some(decision)) = (self.refusal, self.policy, self.decision) else {
            return None;
        };
        let figures = [decision.remaining(), reset_at_seconds(decision), self.wait_secs()?];
        let is_told = Policy::tells_left(decision) && figures.iter().all(|figure| *figure <= MAX_INTEGER);
        (is_told && body.is_limited_json(request)).then(|| Told { policy: policy.serial(), figures })
    }
}

impl ReusedResponse {
    /// Makes the message one that tells this, if only digits have to be changed for that.
    fn tell(&mut self, told: Told) -> Option<WrittenResponse> {
        let (before, message) = self.written.filter(|(before, _)| before.policy == told.policy)?;
        if before == told {
            return Some(message);
        }
        let length = |figure: u64| figure.checked_ilog10().unwrap_or(0);
        if before.figures.map(length) != told.figures.map(length) {
            return None;
        }
        let mut buffers = [itoa::Buffer::new(); 3];
        let [remaining, reset_at, wait] = &mut buffers;
        let digits = [
            remaining.format(told.figures[Figure::Remaining as usize]),
            reset_at.format(told.figures[Figure::ResetAtSecs as usize]),
            wait.format(told.figures[Figure::WaitSecs as usize]),
        ];
        for (at, figure) in &self.places {
            let digits = digits[*figure as usize].as_bytes();
            self.bytes[*at..*at + digits.len()].copy_from_slice(digits);
        }
        self.written = Some((told, message));
        Some(message)
    }

    fn write(
        &mut self,
        answer: &Answer<'_>,
        told: Option<Told>,
        body: &Body,
        request: Headers<'_>,
        more: &[u8],
    ) -> WrittenResponse {
        let Self { bytes, more: kept, places, policies, written } = self;
        bytes.clear();
        bytes.shrink_to(KEPT_BYTES);
        places.clear();
        kept.clear();
        *written = None;
        if let Some(told) = told {
            let placed = |at, number: Number| places.push((at, number.into()));
            if let Some(message) = answer.write_limited(body, request, more, bytes, placed) {
                kept.extend_from_slice(more);
                policies.clear();
                answer.with_policies(|_, matched| policies.extend(matched.iter().map(|policy| policy.serial())));
                *written = Some((told, message));
                return message;
            }
        }
        answer.write_http1(body, request, more, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::{Admission, Source, Verdict};
    use crate::http::{Families, HeaderFamily};
    use crate::internal::HeaderLine;
    use crate::{Decision, FixedWindow, Limit, MINUTE, Timestamp};

    /// All that a message can depend on.
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

        /// Its message, by what was written before.
        fn after(&self, last: &mut ReusedResponse) -> (WrittenResponse, Vec<u8>) {
            let (decision, line) = (self.decision(), HeaderLine { name: "accept", value: self.accept.as_bytes() });
            let matched = self.matched();
            let answer = Answer::new(&self.refusal).limit(&self.policy).matched(&matched).decision(&decision);
            let (message, bytes) = answer.write_http1_reusing(last, &self.body, &[line][..], self.more.as_bytes());
            (message, bytes.to_vec())
        }

        /// Its message, by itself.
        fn alone(&self) -> (WrittenResponse, Vec<u8>) {
            let (decision, line) = (self.decision(), HeaderLine { name: "accept", value: self.accept.as_bytes() });
            let matched = self.matched();
            let answer = Answer::new(&self.refusal).limit(&self.policy).matched(&matched).decision(&decision);
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

    /// Each differs from the others in one thing, or in the lengths of numbers.
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
    fn whatever_was_written_before_a_message_is_what_it_is_by_itself() {
        let cases = cases();
        for first in &cases {
            for second in &cases {
                let mut last = ReusedResponse::default();
                for case in [first, second, first] {
                    assert_eq!(case.after(&mut last), case.alone(), "{case:?} after {first:?} and {second:?}");
                }
            }
        }
    }

    /// Whether the message is made of the one before.
    fn is_made_of(first: &Case, second: &Case) -> bool {
        let mut last = ReusedResponse::default();
        first.after(&mut last);
        // What is written anew does not have it.
        last.bytes[0] = b'!';
        second.after(&mut last);
        last.bytes[0] == b'!'
    }

    #[test]
    fn only_digits_are_written_where_only_digits_differ() {
        let base = base();
        assert!(is_made_of(&base, &base));
        for figures in [[4, 2_000, 45], [3, 2_001, 45], [3, 2_000, 46], [9, 9_999, 99]] {
            assert!(is_made_of(&base, &Case { figures, ..base.clone() }), "{figures:?}");
        }
        for figures in [[12, 2_000, 45], [3, 20_000, 45], [3, 2_000, 5]] {
            assert!(!is_made_of(&base, &Case { figures, ..base.clone() }), "{figures:?}");
        }
    }
}
