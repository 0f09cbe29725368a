//! A limit as clients see it: the headers that tell what is left of it.
//!
//! The quota and the window do not change, so their headers are made once, when rules are loaded. Only what is
//! left and when it comes back is formatted for each answer, with one small allocation for each value.

use std::sync::atomic::{AtomicU64, Ordering};

use ::http::header::RETRY_AFTER;
use ::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;

use super::families::{Families, HeaderFamily};
use super::lines::{Number, Prepared};
use super::upstream::{self, Offer};
use super::{seconds, wait_seconds};
use crate::decision::{Decision, Source};
use crate::limit::Limit;

pub(super) static X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
pub(super) static X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
pub(super) static X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
pub(super) static LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
pub(super) static REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
pub(super) static RESET: HeaderName = HeaderName::from_static("ratelimit-reset");
pub(super) static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
pub(super) static POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// What servers add to an answer behind our back, its length. Room is made for it too, so that a map that has to grow
/// does it once, and while there is little in it.
const AFTERWARDS: usize = 1;

/// The largest integer of a structured field, fifteen digits (RFC 9651, section 3.3.1).
pub(super) const MAX_INTEGER: u64 = 999_999_999_999_999;

/// What the headers say of one limit, prepared.
///
/// Make one for each [`Limit`] when it is loaded, plans and single keys with numbers of their own included, and
/// use the one of the limit that decided.
#[derive(Clone, Debug)]
pub struct Policy {
    /// No two that differ have the same.
    serial: u64,
    name: Box<str>,
    ascii_name: Box<str>,
    quota: u64,
    limit: HeaderValue,
    legacy: bool,
    draft6: bool,
    /// How many fields an answer gets.
    fields: usize,
    /// `RateLimit-Policy`, in the form of the newest family that has it.
    policy: Option<HeaderValue>,
    /// `RateLimit`, likewise.
    combined: Option<Combined>,
    /// All of it as text.
    lines: Prepared,
}

/// `RateLimit`, but for its two numbers.
#[derive(Clone, Debug)]
struct Combined {
    before_remaining: Box<str>,
    before_reset: &'static str,
}

impl Policy {
    /// The headers of that limit in these families.
    ///
    /// In the `ietf` family a limit goes by its name, which is a string of printable ASCII there. A name with other
    /// characters has those and its percent signs percent-encoded as UTF-8: `café` is `"caf%C3%A9"`. The drafts
    /// know whole seconds only, so a window is rounded up, to a second at least.
    #[must_use]
    pub fn new(limit: &Limit, families: Families) -> Self {
        let (quota, window) = (limit.quota(), wait_seconds(limit.window()));
        let old_policy = Some(format!("{quota};w={window}"));
        Self::of(limit.name(), quota, families, old_policy, &format!("w={window}"))
    }

    /// The headers of a limit of so many requests at the same time. It has no window, and the older drafts have no words
    /// for such a policy.
    #[cfg(feature = "rules")]
    pub(crate) fn in_flight(name: &str, most: u64, families: Families) -> Self {
        Self::of(name, most, families, None, "qu=\"concurrent-requests\"")
    }

    fn of(limit_name: &str, quota: u64, families: Families, old_policy: Option<String>, unit: &str) -> Self {
        let ascii_name = ascii(limit_name);
        let (policy, combined) = if families.has(HeaderFamily::Ietf) {
            let name = quoted(&ascii_name);
            let combined = Combined { before_remaining: format!("{name};r=").into(), before_reset: ";t=" };
            (Some(format!("{name};q={quota};{unit}")), Some(combined))
        } else if families.has(HeaderFamily::Draft7) {
            let before_remaining = format!("limit={quota}, remaining=").into();
            (old_policy, Some(Combined { before_remaining, before_reset: ", reset=" }))
        } else {
            (old_policy.filter(|_| families.has(HeaderFamily::Draft6)), None)
        };
        let (legacy, draft6) = (families.has(HeaderFamily::Legacy), families.has(HeaderFamily::Draft6));
        let fields = [3 * usize::from(legacy), 3 * usize::from(draft6), policy.iter().len(), combined.iter().len()];
        let mut lines = Prepared::default();
        if legacy {
            lines.text(&format!("x-ratelimit-limit: {quota}\r\nx-ratelimit-remaining: ")).number(Number::Remaining);
            lines.text("\r\nx-ratelimit-reset: ").number(Number::ResetAt).text("\r\n");
        }
        if let Some(policy) = &policy {
            lines.text(&format!("ratelimit-policy: {policy}\r\n"));
        }
        if draft6 {
            lines.text(&format!("ratelimit-limit: {quota}\r\nratelimit-remaining: ")).number(Number::Remaining);
            lines.text("\r\nratelimit-reset: ").number(Number::ResetIn).text("\r\n");
        }
        if let Some(Combined { before_remaining, before_reset }) = &combined {
            lines.text(&format!("ratelimit: {before_remaining}")).number(Number::SmallRemaining);
            lines.text(before_reset).number(Number::SmallResetIn).text("\r\n");
        }
        let policy = policy.map(|text| HeaderValue::try_from(text).expect("names are made printable ASCII"));
        static MADE: AtomicU64 = AtomicU64::new(0);
        Self {
            serial: MADE.fetch_add(1, Ordering::Relaxed),
            name: limit_name.into(),
            ascii_name: ascii_name.into(),
            quota,
            limit: HeaderValue::from(quota),
            legacy,
            draft6,
            fields: fields.into_iter().sum(),
            policy,
            combined,
            lines,
        }
    }

    /// The name of the limit.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    /// The name as `RateLimit-Policy` has it.
    pub(super) fn ascii_name(&self) -> &str {
        &self.ascii_name
    }

    /// The whole quota of the limit.
    #[must_use]
    pub fn quota(&self) -> u64 {
        self.quota
    }

    /// How many headers it writes.
    pub(super) fn fields(&self) -> usize {
        self.fields
    }

    /// Writes what is left, over any such headers there are; and for a denial that waiting helps, `Retry-After`.
    ///
    /// When the store failed and its limit denies for that, nobody knows what is left, so only `Retry-After` is
    /// written.
    pub fn write(&self, decision: &Decision, headers: &mut HeaderMap) {
        self.write_left(decision, headers);
        if let Some(wait) = decision.retry_after() {
            set_number(headers, &RETRY_AFTER, wait_seconds(wait));
        }
    }

    /// Whether it is known what is left.
    pub(super) fn tells_left(decision: &Decision) -> bool {
        decision.is_allowed() || decision.source() != Source::Policy
    }

    /// Writes what is left, without `Retry-After`.
    pub(super) fn write_left(&self, decision: &Decision, headers: &mut HeaderMap) {
        if Self::tells_left(decision) && headers.try_reserve(self.fields).is_ok() {
            self.write_new(decision, headers);
        }
    }

    /// The same as lines of HTTP/1.1.
    pub(super) fn write_left_lines(&self, decision: &Decision, out: &mut Vec<u8>, placed: impl FnMut(usize, Number)) {
        if Self::tells_left(decision) {
            self.lines.write(decision, out, placed);
        }
    }

    /// Writes what is left on the response of an upstream that may limit requests too: where its headers are
    /// stricter than these, they stay.
    ///
    /// `X-RateLimit-*` are judged as one, and so are all `RateLimit*` together, whatever their form: the side with
    /// less remaining wins, and of two with the same the one that resets later. Headers that make no sense are
    /// written over, those of families that were not chosen are left alone.
    pub fn merge(&self, decision: &Decision, headers: &mut HeaderMap) {
        if self.fields == 0 || headers.try_reserve(self.fields + AFTERWARDS).is_err() {
            return;
        }
        if !upstream::says_anything(headers) {
            return self.write_new(decision, headers);
        }
        let ours = Offer { remaining: decision.remaining(), reset_secs: reset_seconds(decision) };
        if self.legacy && !upstream::legacy(headers, decision.at()).is_some_and(|theirs| theirs.is_stricter_than(ours))
        {
            self.write_legacy(decision, headers);
        }
        if !self.has_standard() {
            return;
        }
        match upstream::standard(headers) {
            Some(theirs) if theirs.is_stricter_than(ours) => {}
            _ => {
                upstream::remove_standard(headers);
                self.write_standard(decision, headers);
            }
        }
    }

    fn has_standard(&self) -> bool {
        self.draft6 || self.combined.is_some()
    }

    /// Writes what is left as lines of HTTP/1.1, to the head of an answer that says nothing of limits yet.
    pub fn write_lines(&self, decision: &Decision, out: &mut Vec<u8>) {
        self.lines.write(decision, out, |_, _| {});
    }

    fn write_new(&self, decision: &Decision, headers: &mut HeaderMap) {
        self.write_legacy(decision, headers);
        if self.has_standard() {
            self.write_standard(decision, headers);
        }
    }

    fn write_legacy(&self, decision: &Decision, headers: &mut HeaderMap) {
        if self.legacy {
            headers.insert(&X_LIMIT, self.limit.clone());
            set_number(headers, &X_REMAINING, decision.remaining());
            set_number(headers, &X_RESET, reset_at_seconds(decision));
        }
    }

    fn write_standard(&self, decision: &Decision, headers: &mut HeaderMap) {
        let reset_secs = reset_seconds(decision);
        if let Some(policy) = &self.policy {
            headers.insert(&POLICY, policy.clone());
        }
        if self.draft6 {
            headers.insert(&LIMIT, self.limit.clone());
            set_number(headers, &REMAINING, decision.remaining());
            set_number(headers, &RESET, reset_secs);
        }
        if let Some(combined) = &self.combined {
            let (mut remaining, mut reset) = (itoa::Buffer::new(), itoa::Buffer::new());
            let text = [
                &*combined.before_remaining,
                remaining.format(decision.remaining().min(MAX_INTEGER)),
                combined.before_reset,
                reset.format(reset_secs.min(MAX_INTEGER)),
            ]
            .concat();
            if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(text)) {
                headers.insert(&RATELIMIT, value);
            }
        }
    }
}

/// What the drafts call reset or `t`: for a denial the time to wait, for others the time until all is back.
///
/// Drafts 06 and 07 want the moment of `Retry-After` here, and the later ones one that is not after it. Draft 11
/// reads it as the time in which a client can use no more than what remains: a denied client gets more once it may
/// retry, and one that was allowed spends no more than it may if it makes the rest last until all is back.
pub(super) fn reset_seconds(decision: &Decision) -> u64 {
    decision.retry_after().map_or_else(|| seconds(decision.reset_after()), wait_seconds)
}

/// When all is back, in seconds of the epoch.
pub(super) fn reset_at_seconds(decision: &Decision) -> u64 {
    decision.at().as_micros().saturating_add(decision.verdict.reset_after).div_ceil(1_000_000)
}

pub(super) fn set_number(headers: &mut HeaderMap, name: &'static HeaderName, number: u64) {
    // Digits are always a header value, and only a map of thousands of headers is ever full.
    if let Ok(value) = HeaderValue::from_bytes(itoa::Buffer::new().format(number).as_bytes()) {
        _ = headers.try_insert(name, value);
    }
}

/// A name in printable ASCII: as it is where it can be.
fn ascii(name: &str) -> String {
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~');
    if name.bytes().all(is_plain) {
        return name.to_owned();
    }
    percent_encoded(name, |byte| is_plain(byte) && byte != b'%')
}

/// The bytes of a text that may stay, and the others as `%` and two digits.
pub(super) fn percent_encoded(text: &str, stays: impl Fn(u8) -> bool) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if stays(byte) {
            encoded.push(char::from(byte));
        } else {
            let digits = [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]];
            encoded.extend(['%', char::from(digits[0]), char::from(digits[1])]);
        }
    }
    encoded
}

/// A string of a structured field (RFC 9651, section 3.3.3).
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        if matches!(letter, '"' | '\\') {
            quoted.push('\\');
        }
        quoted.push(letter);
    }
    quoted.push('"');
    quoted
}
