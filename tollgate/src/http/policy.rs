//! The rate limit headers of one limit.
//!
//! The quota and the window do not change, so their headers are formatted once, when the rules are loaded. Only the
//! remaining quota and the reset times are formatted per response, with one small allocation.

mod map;

use std::sync::atomic::{AtomicU64, Ordering};

use ::http::header::RETRY_AFTER;
use ::http::{HeaderMap, HeaderName, HeaderValue};

use self::map::HeaderKinds;
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

/// Headers that servers add later, such as `content-length`. Reserving room for them too makes the map grow once, while
/// it is still small.
const SERVER_HEADERS: usize = 1;

/// Separator of list items.
const POLICY_SEPARATOR: &[u8] = b", ";

/// The largest integer of a structured field, with fifteen digits (RFC 9651, section 3.3.1).
pub(super) const MAX_INTEGER: u64 = 999_999_999_999_999;

/// The preformatted rate limit headers of one limit.
///
/// Create one for each [`Limit`] when it is loaded, including the variants for plans and single keys, and use the one
/// of the limit that decided.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Unique for each policy.
    serial: u64,
    name: Box<str>,
    ascii_name: Box<str>,
    quota: u64,
    /// How the quota refills.
    refill: Refill,
    limit: HeaderValue,
    legacy: bool,
    draft6: bool,
    /// The number of headers that a response gets.
    fields: usize,
    /// The item of `RateLimit-Policy`, in the syntax of the newest family.
    policy: Option<HeaderValue>,
    /// `RateLimit`, in the syntax of the newest family.
    combined: Option<Combined>,
    /// A map with all headers of the policy, if they do not fit into the map that a response usually has.
    prepared: Option<HeaderMap>,
    /// `X-RateLimit-*` as text.
    legacy_lines: Prepared,
    /// `RateLimit*` as text, except `RateLimit-Policy`.
    standard_lines: Prepared,
}

/// `RateLimit` without its two numbers.
#[derive(Clone, Debug)]
struct Combined {
    before_remaining: Box<str>,
    before_reset: &'static str,
    /// The kind of time that follows.
    until: Number,
}

impl Policy {
    /// Formats the headers of a limit in the given families.
    ///
    /// The `ietf` family contains the limit's name as a string of printable ASCII. In a name with other characters,
    /// those and percent signs are percent-encoded as UTF-8: `café` becomes `"caf%C3%A9"`. The drafts have whole
    /// seconds only, so a window is rounded up, to at least one second.
    #[must_use]
    pub fn new(limit: &Limit, families: Families) -> Self {
        let (quota, window) = (limit.quota(), wait_seconds(limit.window()));
        let old_policy = Some(format!("{quota};w={window}"));
        let mut policy = Self::of(limit.name(), quota, families, old_policy, &format!("w={window}"));
        policy.refill = Refill::of(limit.algorithm());
        policy
    }

    /// Formats the headers of a limit on requests in flight. It has no window, and the older drafts cannot express such
    /// a policy.
    #[cfg(feature = "rules")]
    pub(crate) fn in_flight(name: &str, max: u64, families: Families) -> Self {
        Self::of(name, max, families, None, "qu=\"concurrent-requests\"")
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

    /// Returns the name of the limit.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    /// Returns the name as written in `RateLimit-Policy`.
    pub(super) fn ascii_name(&self) -> &str {
        &self.ascii_name
    }

    /// Returns the quota of the limit.
    #[must_use]
    pub fn quota(&self) -> u64 {
        self.quota
    }

    /// Returns the number of headers that the policy writes.
    pub(super) fn fields(&self) -> usize {
        self.fields
    }

    /// Returns the parameter `t` of `RateLimit`: the time until more quota becomes available, or for a denial, the time
    /// until a retry can succeed.
    ///
    /// Draft 10 defines it as the time until additional quota becomes available, and draft 11 as the window in which
    /// the available quota may be used. This value satisfies both, and `Retry-After` never ends before it.
    pub(super) fn more_seconds(&self, decision: &Decision) -> u64 {
        match decision.retry_after() {
            Some(wait) => wait_seconds(wait),
            None => self.refill.more_after(decision).div_ceil(1_000_000),
        }
    }

    /// Returns the time in `RateLimit`, or in `RateLimit-Reset` if there is no `RateLimit`.
    fn standard_seconds(&self, decision: &Decision) -> u64 {
        match &self.combined {
            Some(Combined { until: Number::SmallMoreIn, .. }) => self.more_seconds(decision),
            _ => reset_seconds(decision),
        }
    }

    /// Writes the rate limit headers, replacing existing ones, and `Retry-After` for a denial that ends.
    ///
    /// If the failure policy decided because the store failed, the remaining quota is unknown, so only `Retry-After` of a
    /// denial is written.
    pub fn write(&self, decision: &Decision, headers: &mut HeaderMap) {
        self.write_remaining(decision, &[self], headers);
        if let Some(wait) = decision.retry_after() {
            set_number(headers, &RETRY_AFTER, wait_seconds(wait));
        }
    }

    /// Returns `true` if the remaining quota is known.
    pub(super) fn is_remaining_known(decision: &Decision) -> bool {
        decision.source() != Source::Policy
    }

    /// Writes the rate limit headers without `Retry-After`. `RateLimit-Policy` lists the policies in `matched`.
    pub(super) fn write_remaining(&self, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) {
        if self.fields > 0 && Self::is_remaining_known(decision) && headers.try_reserve(self.fields).is_ok() {
            self.write_kinds(HeaderKinds::ALL, decision, matched, headers);
        }
    }

    /// Appends the same headers as HTTP/1.1 lines.
    pub(super) fn write_remaining_lines(
        &self,
        decision: &Decision,
        matched: &[&Self],
        out: &mut Vec<u8>,
        on_number: impl FnMut(usize, Number),
    ) {
        if Self::is_remaining_known(decision) {
            self.write_all_lines(decision, matched, out, on_number);
        }
    }

    /// Adds the rate limit headers to the response of an upstream that may have its own limits. Stricter headers of the
    /// upstream stay.
    ///
    /// `X-RateLimit-*` are compared as a group, and so are all `RateLimit*` headers, in any syntax. The side with less
    /// remaining wins, and of two with the same remaining, the one that resets later. Invalid headers are replaced.
    /// Headers of families that are not selected stay.
    pub fn merge(&self, decision: &Decision, headers: &mut HeaderMap) {
        self.merge_listing(decision, &[self], headers);
    }

    /// The same for a request that matched several policies. `RateLimit-Policy` lists them all.
    pub(crate) fn merge_listing(&self, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) {
        if self.fields == 0 || !Self::is_remaining_known(decision) {
            return;
        }
        if self.replace_map(decision, matched, headers) {
            return;
        }
        let is_first = !upstream::has_rate_limit_headers(headers);
        if headers.try_reserve(self.fields + SERVER_HEADERS).is_err() {
            return;
        }
        if is_first {
            return self.write_kinds(HeaderKinds::ALL, decision, matched, headers);
        }
        let ours = Offer { remaining: decision.remaining(), reset_secs: reset_seconds(decision) };
        let theirs = upstream::legacy(headers, decision.at());
        let legacy = !theirs.is_some_and(|theirs| theirs.is_stricter_than(ours));
        let ours = Offer { reset_secs: self.standard_seconds(decision), ..ours };
        let standard = !upstream::standard(headers).is_some_and(|theirs| theirs.is_stricter_than(ours));
        if standard && self.has_standard() {
            upstream::remove_standard(headers);
        }
        self.write_kinds(HeaderKinds { legacy, standard }, decision, matched, headers);
    }

    fn has_standard(&self) -> bool {
        self.draft6 || self.combined.is_some()
    }

    /// Appends the rate limit headers as HTTP/1.1 lines, to a head that has none yet.
    #[doc(hidden)]
    pub fn write_lines(&self, decision: &Decision, out: &mut Vec<u8>) {
        self.write_lines_listing(decision, &[self], out);
    }

    /// The same for a request that matched several policies. `RateLimit-Policy` lists them all.
    pub(crate) fn write_lines_listing(&self, decision: &Decision, matched: &[&Self], out: &mut Vec<u8>) {
        self.write_remaining_lines(decision, matched, out, |_, _| {});
    }

    #[inline]
    fn write_all_lines(
        &self,
        decision: &Decision,
        matched: &[&Self],
        out: &mut Vec<u8>,
        mut on_number: impl FnMut(usize, Number),
    ) {
        self.legacy_lines.write(self, decision, out, &mut on_number);
        let mut before: &[u8] = b"ratelimit-policy: ";
        for policy in matched.iter().filter_map(|policy| policy.policy.as_ref()) {
            out.extend_from_slice(before);
            out.extend_from_slice(policy.as_bytes());
            before = POLICY_SEPARATOR;
        }
        if before == POLICY_SEPARATOR {
            out.extend_from_slice(b"\r\n");
        }
        self.standard_lines.write(self, decision, out, on_number);
    }
}

/// Returns the reset of drafts 06 and 07: the time to wait for a denial, and otherwise the time until the quota is full
/// again.
pub(super) fn reset_seconds(decision: &Decision) -> u64 {
    decision.retry_after().map_or_else(|| seconds(decision.reset_after()), wait_seconds)
}

/// Returns the time at which the quota is full again, in seconds since the Unix epoch.
pub(super) fn reset_at_seconds(decision: &Decision) -> u64 {
    decision.at().as_micros().saturating_add(decision.verdict.reset_after).div_ceil(1_000_000)
}

pub(super) fn set_number(headers: &mut HeaderMap, name: &'static HeaderName, number: u64) {
    // Digits are always a valid header value, and only a map with thousands of headers is ever full.
    if let Ok(value) = HeaderValue::from_bytes(itoa::Buffer::new().format(number).as_bytes()) {
        _ = headers.try_insert(name, value);
    }
}

/// Returns a name in printable ASCII, unchanged if it is already.
fn ascii(name: &str) -> String {
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~');
    if name.bytes().all(is_plain) {
        return name.to_owned();
    }
    percent_encoded(name, |byte| is_plain(byte) && byte != b'%')
}

/// Percent-encodes all bytes except those for which `stays` returns `true`.
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

/// Formats a string of a structured field (RFC 9651, section 3.3.3).
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
