//! The rate limit headers of one limit.
//!
//! The quota and the window do not change, so their headers are formatted once, when the rules are loaded. Only the
//! remaining quota and the reset times are formatted per response, with one small allocation.

use std::sync::atomic::{AtomicU64, Ordering};

use ::http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use ::http::{HeaderMap, HeaderName, HeaderValue};
use tollgate::internal::Refill;
use tollgate::{Decision, Limit, Source};

use super::families::{Families, HeaderFamily};
use super::fields::{
    End, LIMIT, Offer, POLICY, RATELIMIT, REMAINING, RESET, Texts, X_LIMIT, X_REMAINING, X_RESET, constant,
    has_rate_limit_headers, legacy_offer, remove_standard, standard_offer,
};
use super::{seconds, wait_seconds};

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
    #[doc(hidden)]
    pub fn in_flight(name: &str, max: u64, families: Families) -> Self {
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
    fn more_seconds(&self, decision: &Decision) -> u64 {
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
    #[doc(hidden)]
    pub fn merge_listing(&self, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) {
        if self.fields == 0 || !Self::is_remaining_known(decision) {
            return;
        }
        if self.replace_map(decision, matched, headers) {
            return;
        }
        let is_first = !has_rate_limit_headers(headers);
        if headers.try_reserve(self.fields + SERVER_HEADERS).is_err() {
            return;
        }
        if is_first {
            return self.write_kinds(HeaderKinds::ALL, decision, matched, headers);
        }
        let ours = Offer { remaining: decision.remaining(), reset_secs: reset_seconds(decision) };
        let theirs = legacy_offer(headers, decision.at());
        let legacy = !theirs.is_some_and(|theirs| theirs.is_stricter_than(ours));
        let ours = Offer { reset_secs: self.standard_seconds(decision), ..ours };
        let standard = !standard_offer(headers).is_some_and(|theirs| theirs.is_stricter_than(ours));
        if standard && self.has_standard() {
            remove_standard(headers);
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
    #[doc(hidden)]
    pub fn write_lines_listing(&self, decision: &Decision, matched: &[&Self], out: &mut Vec<u8>) {
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
fn reset_seconds(decision: &Decision) -> u64 {
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
pub fn percent_encoded(text: &str, stays: impl Fn(u8) -> bool) -> String {
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

/// The headers that most responses have, from the service or its server.
const OTHERS: [HeaderName; 2] = [CONTENT_TYPE, CONTENT_LENGTH];

/// The capacity of a map that was created for one header. More headers make it grow.
const SMALL_MAP: usize = 6;

impl Policy {
    /// Writes the headers of these kinds, if their families are selected.
    fn write_kinds(&self, kinds: HeaderKinds, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) {
        self.for_each(kinds, decision, matched, |name, value| {
            if let Some(value) = value.into_value() {
                headers.insert(name, value);
            }
        });
    }

    /// Moves the few headers of a response into a copy of the prepared map, which is cheaper than growing its own map
    /// and hashing each name. Returns `false` and changes nothing if the response has other headers.
    fn replace_map(&self, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) -> bool {
        let Some(prepared) = &self.prepared else { return false };
        let is_other = |name: &HeaderName| *name == CONTENT_TYPE || *name == CONTENT_LENGTH;
        if headers.len() > OTHERS.len() || matched.is_empty() || !headers.keys().all(is_other) {
            return false;
        }
        if headers.keys_len() < headers.len() {
            return false;
        }
        let mut map = prepared.clone();
        let (mut slots, mut is_complete) = (map.values_mut(), true);
        self.for_each(HeaderKinds::ALL, decision, matched, |_, value| match (slots.next(), value) {
            (Some(_), Value::Prepared(_)) => {}
            (Some(slot), Value::New(Some(value))) => *slot = value,
            _ => is_complete = false,
        });
        // These come last, in this order.
        let (Some(content_type), Some(content_length), true) = (slots.next(), slots.next(), is_complete) else {
            return false;
        };
        let (mut has_type, mut has_length) = (false, false);
        for (name, value) in headers.iter_mut() {
            let (slot, is_there) = match *name == CONTENT_TYPE {
                true => (&mut *content_type, &mut has_type),
                false => (&mut *content_length, &mut has_length),
            };
            std::mem::swap(slot, value);
            *is_there = true;
        }
        if !has_length {
            map.remove(CONTENT_LENGTH);
        }
        if !has_type {
            map.remove(CONTENT_TYPE);
        }
        *headers = map;
        true
    }

    /// Calls `write` with each header of these kinds, in the order of the prepared map. All values that are new for
    /// this response share one allocation.
    #[inline(always)]
    fn for_each(
        &self,
        kinds: HeaderKinds,
        decision: &Decision,
        matched: &[&Self],
        mut write: impl FnMut(&'static HeaderName, Value<'_>),
    ) {
        let legacy = self.legacy && kinds.legacy;
        let draft6 = self.draft6 && kinds.standard;
        let combined = self.combined.as_ref().filter(|_| kinds.standard);
        let mut texts = Texts::new();
        let remaining = (legacy || draft6).then(|| texts.number(decision.remaining()).end());
        let reset_at = legacy.then(|| texts.number(reset_at_seconds(decision)).end());
        let policies = match matched {
            [_] => None,
            several => push_policies(several, &mut texts),
        };
        let reset_in = draft6.then(|| texts.number(reset_seconds(decision)).end());
        let combined = combined.map(|combined| {
            texts.push(combined.before_remaining.as_bytes()).number(decision.remaining().min(MAX_INTEGER));
            texts.push(combined.before_reset.as_bytes()).number(self.standard_seconds(decision).min(MAX_INTEGER)).end()
        });
        let mut texts = texts.share();
        let mut take = |end: Option<End>| texts.take(end?);
        let mut remaining = take(remaining);
        if legacy {
            write(&X_LIMIT, Value::Prepared(&self.limit));
            write(&X_REMAINING, Value::New(if draft6 { remaining.clone() } else { remaining.take() }));
            write(&X_RESET, Value::New(take(reset_at)));
        }
        if kinds.standard && self.has_standard() {
            let policies = match matched {
                [only] if std::ptr::eq(*only, self) => self.policy.as_ref().map_or(Value::New(None), Value::Prepared),
                [only] => Value::New(only.policy.clone()),
                _ => Value::New(take(policies)),
            };
            write(&POLICY, policies);
        }
        if draft6 {
            write(&LIMIT, Value::Prepared(&self.limit));
            write(&REMAINING, Value::New(remaining));
            write(&RESET, Value::New(take(reset_in)));
        }
        if combined.is_some() {
            write(&RATELIMIT, Value::New(take(combined)));
        }
    }

    /// Prepares a map with all headers of this policy, and room for those that most responses have.
    fn prepare(&mut self) {
        if self.fields + OTHERS.len() <= SMALL_MAP || self.policy.is_none() {
            return;
        }
        let mut map = HeaderMap::with_capacity(self.fields + OTHERS.len());
        let names = [
            (self.legacy, &[&X_LIMIT, &X_REMAINING, &X_RESET][..]),
            (self.has_standard(), &[&POLICY]),
            (self.draft6, &[&LIMIT, &REMAINING, &RESET]),
            (self.combined.is_some(), &[&RATELIMIT]),
        ];
        for name in names.into_iter().filter(|(is_written, _)| *is_written).flat_map(|(_, names)| names) {
            let value = match *name {
                name if *name == X_LIMIT || *name == LIMIT => Some(&self.limit),
                name if *name == POLICY => self.policy.as_ref(),
                _ => None,
            };
            map.insert(*name, value.cloned().unwrap_or_else(|| HeaderValue::from_static("")));
        }
        for name in OTHERS {
            map.insert(name, HeaderValue::from_static(""));
        }
        self.prepared = Some(map);
    }
}

/// The value of a header.
enum Value<'a> {
    /// The same in every response.
    Prepared(&'a HeaderValue),
    /// Formatted for this response.
    New(Option<HeaderValue>),
}

impl Value<'_> {
    fn into_value(self) -> Option<HeaderValue> {
        match self {
            Self::Prepared(value) => Some(value.clone()),
            Self::New(value) => value,
        }
    }
}

/// Kinds of headers that are compared separately with those of an upstream.
#[derive(Clone, Copy)]
struct HeaderKinds {
    /// `X-RateLimit-*`.
    pub(super) legacy: bool,
    /// `RateLimit*`.
    standard: bool,
}

impl HeaderKinds {
    pub(super) const ALL: Self = Self { legacy: true, standard: true };
}

/// Formats `RateLimit-Policy` from the items of all policies.
fn push_policies(matched: &[&Policy], texts: &mut Texts) -> Option<End> {
    let mut end = None;
    for policy in matched.iter().filter_map(|policy| policy.policy.as_ref()) {
        if end.is_some() {
            texts.push(POLICY_SEPARATOR);
        }
        end = Some(texts.push(policy.as_bytes()).end());
    }
    end
}

/// Text into which numbers are inserted.
#[derive(Clone, Debug, Default)]
struct Prepared {
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
    use tollgate::{Decision, FixedWindow, Limit, Limiter, MINUTE};

    use super::*;
    use crate::internal::HeaderLine;
    use crate::{Body, Families, HeaderFamily, Headers, Policy, Refusal, RefusalBuilder};

    #[test]
    fn a_copied_map_has_what_a_grown_one_has() {
        let responses: [&[(&str, &str)]; 7] = [
            &[],
            &[("content-type", "text/plain")],
            &[("content-length", "5")],
            &[("content-type", "text/plain"), ("content-length", "5")],
            &[("location", "/"), ("x-limit", "1")],
            &[("set-cookie", "a"), ("set-cookie", "b")],
            &[("a", "1"), ("b", "2"), ("c", "3"), ("content-type", "text/plain")],
        ];
        for set in 0..16 {
            let chosen = HeaderFamily::ALL.into_iter().enumerate().filter(|(bit, _)| set >> bit & 1 == 1);
            let families: Families = chosen.map(|(_, family)| family).collect();
            let limits = ["first", "second"].map(|name| Limit::new(name, FixedWindow::new(5, MINUTE)).unwrap());
            let [first, second] = [&limits[0], &limits[1]].map(|limit| Policy::new(limit, families));
            let decision = Limiter::new(limits[0].clone()).check("key");
            for response in responses {
                for matched in [&[&first][..], &[&first, &second], &[&second, &first]] {
                    let given = || -> HeaderMap {
                        let header = |(name, value): &(&'static str, &'static str)| {
                            (HeaderName::from_static(name), HeaderValue::from_static(value))
                        };
                        let mut map = HeaderMap::new();
                        for (name, value) in response.iter().map(header) {
                            map.append(name, value);
                        }
                        map
                    };
                    let (mut merged, mut grown) = (given(), given());
                    first.merge_listing(&decision, matched, &mut merged);
                    first.write_kinds(HeaderKinds::ALL, &decision, matched, &mut grown);
                    assert_eq!(merged, grown);
                }
            }
        }
    }

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
