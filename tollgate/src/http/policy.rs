//! A limit as clients see it: the headers that tell what is left of it.
//!
//! The quota and the window do not change, so their headers are made once, when rules are loaded. Only what is
//! left and when it comes back is formatted for each answer, with one small allocation for all of it.

mod map;

use std::sync::atomic::{AtomicU64, Ordering};

use ::http::header::RETRY_AFTER;
use ::http::{HeaderMap, HeaderName, HeaderValue};

use self::map::Kinds;
use super::families::{Families, HeaderFamily};
use super::lines::{Number, Prepared};
use super::upstream::{self, Offer};
use super::values::constant;
use super::{seconds, wait_seconds};
use crate::algorithm::refill::Refill;
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

/// What stands between two items of a list.
const BETWEEN_POLICIES: &[u8] = b", ";

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
    /// How its quota comes back.
    refill: Refill,
    limit: HeaderValue,
    legacy: bool,
    draft6: bool,
    /// How many fields an answer gets.
    fields: usize,
    /// Its item of `RateLimit-Policy`, in the form of the newest family that has it.
    policy: Option<HeaderValue>,
    /// `RateLimit`, likewise.
    combined: Option<Combined>,
    /// All of its headers, where they do not fit into the map that a response usually has.
    prepared: Option<HeaderMap>,
    /// `X-RateLimit-*` as text.
    legacy_lines: Prepared,
    /// `RateLimit*` as text, but for `RateLimit-Policy`.
    standard_lines: Prepared,
}

/// `RateLimit`, but for its two numbers.
#[derive(Clone, Debug)]
struct Combined {
    before_remaining: Box<str>,
    before_reset: &'static str,
    /// Which time follows.
    until: Number,
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
        let mut policy = Self::of(limit.name(), quota, families, old_policy, &format!("w={window}"));
        policy.refill = Refill::of(limit.algorithm());
        policy
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
            let before_remaining = format!("{name};r=").into();
            let combined = Combined { before_remaining, before_reset: ";t=", until: Number::SmallMoreIn };
            (Some(format!("{name};q={quota};{unit}")), Some(combined))
        } else if families.has(HeaderFamily::Draft7) {
            let before_remaining = format!("limit={quota}, remaining=").into();
            let until = Number::SmallResetIn;
            (old_policy, Some(Combined { before_remaining, before_reset: ", reset=", until }))
        } else {
            (old_policy.filter(|_| families.has(HeaderFamily::Draft6)), None)
        };
        let (legacy, draft6) = (families.has(HeaderFamily::Legacy), families.has(HeaderFamily::Draft6));
        let fields = [3 * usize::from(legacy), 3 * usize::from(draft6), policy.iter().len(), combined.iter().len()];
        let (mut legacy_lines, mut lines) = (Prepared::default(), Prepared::default());
        if legacy {
            let limit = format!("x-ratelimit-limit: {quota}\r\nx-ratelimit-remaining: ");
            legacy_lines.text(&limit).number(Number::Remaining);
            legacy_lines.text("\r\nx-ratelimit-reset: ").number(Number::ResetAt).text("\r\n");
        }
        if draft6 {
            lines.text(&format!("ratelimit-limit: {quota}\r\nratelimit-remaining: ")).number(Number::Remaining);
            lines.text("\r\nratelimit-reset: ").number(Number::ResetIn).text("\r\n");
        }
        if let Some(Combined { before_remaining, before_reset, until }) = &combined {
            lines.text(&format!("ratelimit: {before_remaining}")).number(Number::SmallRemaining);
            lines.text(before_reset).number(*until).text("\r\n");
        }
        let policy = policy.map(|text| constant(&text).expect("names are made printable ASCII"));
        let limit = constant(itoa::Buffer::new().format(quota)).expect("digits are a header value");
        static MADE: AtomicU64 = AtomicU64::new(0);
        let mut made = Self {
            serial: MADE.fetch_add(1, Ordering::Relaxed),
            name: limit_name.into(),
            ascii_name: ascii_name.into(),
            quota,
            refill: Refill::AtOnce,
            limit,
            legacy,
            draft6,
            fields: fields.into_iter().sum(),
            policy,
            combined,
            prepared: None,
            legacy_lines,
            standard_lines: lines,
        };
        made.prepare();
        made
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

    /// `t` of `RateLimit`: until then no more than what remains can be used, because then more becomes available; for a
    /// denial, when a retry is worth it.
    ///
    /// Draft 10 defines it as the time until additional quota becomes available, draft 11 as the window within which the
    /// available quota may be used. This satisfies both, and `Retry-After` never ends before it.
    pub(super) fn more_seconds(&self, decision: &Decision) -> u64 {
        match decision.retry_after() {
            Some(wait) => wait_seconds(wait),
            None => self.refill.more_after(decision).div_ceil(1_000_000),
        }
    }

    /// The time in `RateLimit`, or in `RateLimit-Reset` where there is no `RateLimit`.
    fn standard_seconds(&self, decision: &Decision) -> u64 {
        match &self.combined {
            Some(Combined { until: Number::SmallMoreIn, .. }) => self.more_seconds(decision),
            _ => reset_seconds(decision),
        }
    }

    /// Writes what is left, over any such headers there are; and for a denial that waiting helps, `Retry-After`.
    ///
    /// When the store failed and its limit denies for that, nobody knows what is left, so only `Retry-After` is
    /// written.
    pub fn write(&self, decision: &Decision, headers: &mut HeaderMap) {
        self.write_left(decision, &[self], headers);
        if let Some(wait) = decision.retry_after() {
            set_number(headers, &RETRY_AFTER, wait_seconds(wait));
        }
    }

    /// Whether it is known what is left.
    pub(super) fn tells_left(decision: &Decision) -> bool {
        decision.is_allowed() || decision.source() != Source::Policy
    }

    /// Writes what is left, without `Retry-After`. `matched` are the policies that `RateLimit-Policy` lists.
    pub(super) fn write_left(&self, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) {
        if self.fields > 0 && Self::tells_left(decision) && headers.try_reserve(self.fields).is_ok() {
            self.write_kinds(Kinds::ALL, decision, matched, headers);
        }
    }

    /// The same as lines of HTTP/1.1.
    pub(super) fn write_left_lines(
        &self,
        decision: &Decision,
        matched: &[&Self],
        out: &mut Vec<u8>,
        placed: impl FnMut(usize, Number),
    ) {
        if Self::tells_left(decision) {
            self.write_all_lines(decision, matched, out, placed);
        }
    }

    /// Writes what is left on the response of an upstream that may limit requests too: where its headers are
    /// stricter than these, they stay.
    ///
    /// `X-RateLimit-*` are judged as one, and so are all `RateLimit*` together, whatever their form: the side with
    /// less remaining wins, and of two with the same the one that resets later. Headers that make no sense are
    /// written over, those of families that were not chosen are left alone.
    pub fn merge(&self, decision: &Decision, headers: &mut HeaderMap) {
        self.merge_listing(decision, &[self], headers);
    }

    /// The same for a request that matched several policies, all of which `RateLimit-Policy` lists.
    pub(crate) fn merge_listing(&self, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) {
        if self.fields == 0 {
            return;
        }
        if self.replace_map(decision, matched, headers) {
            return;
        }
        let is_first = !upstream::says_anything(headers);
        if headers.try_reserve(self.fields + AFTERWARDS).is_err() {
            return;
        }
        if is_first {
            return self.write_kinds(Kinds::ALL, decision, matched, headers);
        }
        let ours = Offer { remaining: decision.remaining(), reset_secs: reset_seconds(decision) };
        let theirs = upstream::legacy(headers, decision.at());
        let legacy = !theirs.is_some_and(|theirs| theirs.is_stricter_than(ours));
        let ours = Offer { reset_secs: self.standard_seconds(decision), ..ours };
        let standard = !upstream::standard(headers).is_some_and(|theirs| theirs.is_stricter_than(ours));
        if standard && self.has_standard() {
            upstream::remove_standard(headers);
        }
        self.write_kinds(Kinds { legacy, standard }, decision, matched, headers);
    }

    fn has_standard(&self) -> bool {
        self.draft6 || self.combined.is_some()
    }

    /// Writes what is left as lines of HTTP/1.1, to the head of an answer that says nothing of limits yet.
    #[doc(hidden)]
    pub fn write_lines(&self, decision: &Decision, out: &mut Vec<u8>) {
        self.write_lines_listing(decision, &[self], out);
    }

    /// The same for a request that matched several policies, all of which `RateLimit-Policy` lists.
    pub(crate) fn write_lines_listing(&self, decision: &Decision, matched: &[&Self], out: &mut Vec<u8>) {
        self.write_all_lines(decision, matched, out, |_, _| {});
    }

    #[inline]
    fn write_all_lines(
        &self,
        decision: &Decision,
        matched: &[&Self],
        out: &mut Vec<u8>,
        mut placed: impl FnMut(usize, Number),
    ) {
        self.legacy_lines.write(self, decision, out, &mut placed);
        let mut before: &[u8] = b"ratelimit-policy: ";
        for policy in matched.iter().filter_map(|policy| policy.policy.as_ref()) {
            out.extend_from_slice(before);
            out.extend_from_slice(policy.as_bytes());
            before = BETWEEN_POLICIES;
        }
        if before == BETWEEN_POLICIES {
            out.extend_from_slice(b"\r\n");
        }
        self.standard_lines.write(self, decision, out, placed);
    }
}

/// What drafts 06 and 07 call reset: for a denial the time to wait, for others the time until the quota is full again.
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
