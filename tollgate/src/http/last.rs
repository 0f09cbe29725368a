//! The message that was written last, kept because the next one is often the same.
//!
//! Who is refused in a flood is told the same over and over, but for the seconds that go by. What a message depends on
//! is a few numbers, and comparing those costs far less than writing it.

use super::answer::{Answer, Message};
use super::body::Body;
use super::headers::Headers;
use super::policy::{Policy, reset_at_seconds};
use super::refusal::Refusal;

/// A message that has made the memory longer than this does not keep it so.
const KEPT_BYTES: usize = 16 << 10;

/// The message of HTTP/1.1 that a refusal was answered with last; see [`Answer::message_after`].
///
/// Have one for each thread, or for each connection.
#[derive(Debug, Default)]
pub struct LastMessage {
    bytes: Vec<u8>,
    of: Option<Written>,
}

/// What was written, and what it was made of.
#[derive(Debug)]
struct Written {
    told: Told,
    more: Vec<u8>,
    message: Message,
}

/// All that the message of a denial depends on, in the body that most clients get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    policy: u64,
    remaining: u64,
    reset_at_secs: u64,
    wait_secs: u64,
}

impl Answer<'_> {
    /// The same as [`write_message`](Self::write_message), but written only if it is not what was written last.
    pub fn message_after<'l, 'h>(
        &self,
        last: &'l mut LastMessage,
        body: &Body,
        request: impl Into<Headers<'h>>,
        more: &[u8],
    ) -> (Message, &'l [u8]) {
        let request = request.into();
        let told = self.told(body, request);
        if let (Some(told), Some(of)) = (&told, &last.of)
            && *told == of.told
            && *more == *of.more
        {
            return (of.message, &last.bytes);
        }
        last.bytes.clear();
        last.bytes.shrink_to(KEPT_BYTES);
        let message = self.write_message(body, request, more, &mut last.bytes);
        last.of = told.map(|told| Written { told, more: more.to_vec(), message });
        (message, &last.bytes)
    }

    /// What the message depends on beside what goes among its headers; `None` if that is more than a few numbers.
    fn told(&self, body: &Body, request: Headers<'_>) -> Option<Told> {
        let (Refusal::Limited, Some(policy), Some(decision)) = (self.refusal, self.policy, self.decision) else {
            return None;
        };
        let wait_secs = self.wait_secs()?;
        let is_short = Policy::tells_left(decision) && body.is_limited_json(request);
        is_short.then(|| Told {
            policy: policy.serial(),
            remaining: decision.remaining(),
            reset_at_secs: reset_at_seconds(decision),
            wait_secs,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::http::{Families, HeaderLine, Policy};
    use crate::{Limit, Limiter, MINUTE, ManualClock, SlidingWindowLog, Timestamp};

    /// Whatever was written before, the message is what it would be without that.
    #[test]
    fn what_was_written_last_is_never_taken_for_another() {
        let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
        let limits = ["a", "b"].map(|name| Limit::new(name, SlidingWindowLog::new(3, MINUTE)).unwrap());
        let policies = limits.each_ref().map(|limit| Policy::new(limit, Families::default()));
        let limiters =
            limits.map(|limit| Limiter::builder().limit(limit).clock(clock.clone()).build().expect("one limit fits"));
        let template = Body::template("wait {{retry_after}}", "text/plain").unwrap();
        let accepts = ["*/*", "application/problem+json"];
        let (mut last, mut repeated) = (LastMessage::default(), 0);
        for step in 0..4000_u64 {
            // Few numbers, each of which is often the same as before and often not.
            let of = |choices: u64, shift: u32| (step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> shift) % choices;
            if of(16, 20) == 0 {
                clock.advance(Duration::from_millis(700));
            }
            let which = usize::from(of(8, 24) == 0);
            let cost = 1 + u64::from(of(8, 28) == 0);
            let decision = limiters[which].check_n("k", cost);
            let refusal = match of(16, 32) {
                0 => Refusal::Blocked,
                1 => Refusal::Banned { retry_after: MINUTE },
                _ => match Refusal::of(&decision) {
                    Some(refusal) => refusal,
                    None => continue,
                },
            };
            let line = HeaderLine { name: "accept", value: accepts[usize::from(of(8, 36) == 0)].as_bytes() };
            let body = if of(8, 40) == 0 { &template } else { &Body::Json };
            let more: &[u8] = if of(8, 44) == 0 { b"x: y\r\n" } else { b"x: z\r\n" };
            let answer = Answer::new(&refusal).limit(&policies[which]).decision(&decision);
            let mut expected = Vec::new();
            let message = answer.write_message(body, &[line][..], more, &mut expected);
            let before = last.bytes.clone();
            let (told, bytes) = answer.message_after(&mut last, body, &[line][..], more);
            assert_eq!((told, bytes), (message, &expected[..]), "{answer:?}");
            repeated += usize::from(before == expected);
        }
        assert!(repeated > 100, "{repeated}");
    }
}
