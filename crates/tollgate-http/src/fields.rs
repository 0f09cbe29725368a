//! The fields of rate limits: their names, values that share one allocation, and the fields of an upstream that has
//! limits of its own.
//!
//! The numbers of a response change with each request. Their texts are concatenated on the stack and moved to the heap
//! together. Each header value is a slice of that allocation.
//!
//! Reading the fields of an upstream is lenient, because the aim is not to promise a client more than the upstream
//! allows: the strictest of several values counts, and invalid values are ignored.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use ::http::header::InvalidHeaderValue;
use ::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;
use sfv::{BareItem, Dictionary, List, ListEntry, Parser};
use tollgate::Timestamp;

pub(super) static X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
pub(super) static X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
pub(super) static X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
pub(super) static LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
pub(super) static REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
pub(super) static RESET: HeaderName = HeaderName::from_static("ratelimit-reset");
pub(super) static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
pub(super) static POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Room for the texts of nearly all responses, including several policies with names of usual length. Longer ones need
/// another allocation.
const ROOM: usize = 152;

/// The concatenated texts of several values.
pub(super) struct Texts {
    bytes: [u8; ROOM],
    length: usize,
    /// All texts, once they are longer than the room.
    long: Vec<u8>,
}

/// The end of a value's text. Values are taken in the order in which they were added.
#[derive(Clone, Copy)]
pub(super) struct End(usize);

impl Texts {
    #[inline]
    pub(super) fn new() -> Self {
        Self { bytes: [0; ROOM], length: 0, long: Vec::new() }
    }

    /// Appends to the current value.
    #[inline]
    pub(super) fn push(&mut self, text: &[u8]) -> &mut Self {
        let end = self.length + text.len();
        match self.bytes.get_mut(self.length..end) {
            Some(room) => room.copy_from_slice(text),
            None => self.push_long(text),
        }
        self.length = end;
        self
    }

    /// Once a text does not fit, the length exceeds the room, so no later text fits either.
    #[cold]
    fn push_long(&mut self, text: &[u8]) {
        if self.long.is_empty() {
            self.long.extend_from_slice(&self.bytes[..self.length]);
        }
        self.long.extend_from_slice(text);
    }

    #[inline]
    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        self.push(itoa::Buffer::new().format(number).as_bytes())
    }

    /// Ends the current value.
    #[inline]
    pub(super) fn end(&self) -> End {
        End(self.length)
    }

    /// Moves the texts to the heap.
    #[inline]
    pub(super) fn share(self) -> SharedTexts {
        let Self { bytes, length, long } = self;
        let rest = if length <= ROOM { Bytes::from_owner(Short { bytes, length }) } else { Bytes::from(long) };
        SharedTexts { rest, taken: 0 }
    }
}

/// Texts that fit into the room.
struct Short {
    bytes: [u8; ROOM],
    length: usize,
}

impl AsRef<[u8]> for Short {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// The texts of several values, to be taken one by one.
pub(super) struct SharedTexts {
    rest: Bytes,
    taken: usize,
}

impl SharedTexts {
    /// Returns the next value, which ends at `end`. Returns `None` if the text is not a valid header value.
    #[inline]
    pub(super) fn take(&mut self, end: End) -> Option<HeaderValue> {
        let text = match end.0 - self.taken {
            all if all == self.rest.len() => std::mem::take(&mut self.rest),
            some => self.rest.split_to(some),
        };
        self.taken = end.0;
        HeaderValue::from_maybe_shared(text).ok()
    }
}

/// Bytes of constant values that are kept for the lifetime of the process, enough for a thousand limits.
const MAX_KEPT_BYTES: usize = 64 << 10;

/// The constant values that are kept.
static KEPT: Mutex<Kept> = Mutex::new(Kept { texts: BTreeSet::new(), bytes: 0 });

struct Kept {
    texts: BTreeSet<&'static str>,
    bytes: usize,
}

impl Kept {
    /// Returns a copy of the text that is never freed, or `None` if there is no room for it. Reloaded rules reuse the
    /// texts of the rules before.
    fn keep(&mut self, text: &str) -> Option<&'static str> {
        if let Some(kept) = self.texts.get(text) {
            return Some(kept);
        }
        if self.bytes + text.len() > MAX_KEPT_BYTES {
            return None;
        }
        let kept: &'static str = Box::leak(text.into());
        self.bytes += kept.len();
        self.texts.insert(kept);
        Some(kept)
    }
}

/// Creates a header value that many responses share. Clones of a static value have no reference count, which all
/// threads would otherwise contend for.
pub(super) fn constant(text: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    let value = HeaderValue::from_str(text)?;
    let kept = if text.is_ascii() { KEPT.lock().unwrap_or_else(PoisonError::into_inner).keep(text) } else { None };
    Ok(kept.map_or(value, HeaderValue::from_static))
}

/// A smaller `X-RateLimit-Reset` cannot be a time of this century, so it is a number of seconds from now.
const EARLIEST_EPOCH_SECS: u64 = 1_000_000_000;

/// The quota that one side offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) remaining: u64,
    pub(super) reset_secs: u64,
}

impl Offer {
    pub(super) fn is_stricter_than(self, other: Self) -> bool {
        (self.remaining, other.reset_secs) < (other.remaining, self.reset_secs)
    }

    fn stricter(self, other: Self) -> Self {
        if other.is_stricter_than(self) { other } else { self }
    }
}

/// Returns `true` if the response has any rate limit headers. Most have none, and looking at the few names in a
/// response is cheaper than searching for each of ours.
pub(super) fn has_rate_limit_headers(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().strip_prefix("x-").unwrap_or(name.as_str()).starts_with("ratelimit"))
}

/// Reads `X-RateLimit-*`.
pub(super) fn legacy_offer(headers: &HeaderMap, now: Timestamp) -> Option<Offer> {
    let remaining = numbers(headers, &X_REMAINING).min()?;
    let now_secs = now.as_micros() / 1_000_000;
    let from_now = |reset: u64| if reset < EARLIEST_EPOCH_SECS { reset } else { reset.saturating_sub(now_secs) };
    Some(Offer { remaining, reset_secs: numbers(headers, &X_RESET).map(from_now).max().unwrap_or(0) })
}

/// Reads `RateLimit` and `RateLimit-Remaining`, in the syntax of any draft.
pub(super) fn standard_offer(headers: &HeaderMap) -> Option<Offer> {
    let draft6 = numbers(headers, &REMAINING)
        .min()
        .map(|remaining| Offer { remaining, reset_secs: numbers(headers, &RESET).max().unwrap_or(0) });
    let combined = headers.get_all(&RATELIMIT).iter().filter_map(|line| {
        let line = line.as_bytes();
        listed(line).or_else(|| named(line))
    });
    combined.chain(draft6).reduce(Offer::stricter)
}

/// Removes all `RateLimit*` headers, so that no two syntaxes or sides are mixed.
pub(super) fn remove_standard(headers: &mut HeaderMap) {
    for name in [&LIMIT, &REMAINING, &RESET, &RATELIMIT, &POLICY] {
        headers.remove(name);
    }
}

fn numbers<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = u64> + 'h {
    headers.get_all(name).iter().filter_map(|value| value.to_str().ok()?.trim().parse().ok())
}

/// Parses `"default";r=50;t=30`, one or several.
fn listed(line: &[u8]) -> Option<Offer> {
    let list: List = Parser::new(line).parse().ok()?;
    let offers = list.iter().filter_map(|entry| {
        let ListEntry::Item(item) = entry else { return None };
        let number = |name: &str| item.params.get(name).and_then(whole);
        Some(Offer { remaining: number("r")?, reset_secs: number("t").unwrap_or(0) })
    });
    offers.reduce(Offer::stricter)
}

/// Parses `limit=100, remaining=50, reset=30`.
fn named(line: &[u8]) -> Option<Offer> {
    let dictionary: Dictionary = Parser::new(line).parse().ok()?;
    let number = |name: &str| match dictionary.get(name)? {
        ListEntry::Item(item) => whole(&item.bare_item),
        ListEntry::InnerList(_) => None,
    };
    Some(Offer { remaining: number("remaining")?, reset_secs: number("reset").unwrap_or(0) })
}

fn whole(item: &BareItem) -> Option<u64> {
    u64::try_from(i64::from(item.as_integer()?)).ok()
}

#[cfg(test)]
mod tests {
    use ::http::HeaderValue;

    use super::*;

    #[test]
    fn constant_values_are_kept_once_and_up_to_a_bound() {
        let mut kept = Kept { texts: BTreeSet::new(), bytes: 0 };
        let first = kept.keep("100").unwrap();
        assert!(std::ptr::eq(first, kept.keep("100").unwrap()));
        assert_eq!(kept.bytes, 3);
        let long = "x".repeat(MAX_KEPT_BYTES);
        assert_eq!(kept.keep(&long), None);
        assert_eq!(kept.keep(&long[3..]).map(str::len), Some(MAX_KEPT_BYTES - 3));
        assert_eq!(kept.keep("1"), None);
        assert_eq!(constant("100").unwrap(), "100");
        assert!(constant("1\n").is_err());
    }

    #[test]
    fn texts_of_any_length_come_out_in_their_order() {
        for length in [1, ROOM - 3, ROOM - 2, ROOM - 1, ROOM, 3 * ROOM] {
            let long = "x".repeat(length);
            let mut texts = Texts::new();
            let first = texts.number(7).end();
            let second = texts.push(long.as_bytes()).number(8).end();
            let third = texts.push(b"end").end();
            let mut shared = texts.share();
            assert_eq!(shared.take(first).unwrap(), "7");
            assert_eq!(shared.take(second).unwrap(), format!("{long}8"));
            assert_eq!(shared.take(third).unwrap(), "end");
        }
    }

    fn offer(lines: &[(&'static str, &'static str)]) -> (Option<Offer>, Option<Offer>) {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        (legacy_offer(&headers, Timestamp::from_secs(1_640_000_000)), standard_offer(&headers))
    }

    fn left(remaining: u64, reset_secs: u64) -> Option<Offer> {
        Some(Offer { remaining, reset_secs })
    }

    #[test]
    fn every_form_is_read() {
        assert_eq!(offer(&[("x-ratelimit-remaining", "7"), ("x-ratelimit-reset", "1640000030")]).0, left(7, 30));
        assert_eq!(offer(&[("x-ratelimit-remaining", " 7 "), ("x-ratelimit-reset", "30")]).0, left(7, 30));
        assert_eq!(offer(&[("ratelimit-remaining", "7"), ("ratelimit-reset", "30")]).1, left(7, 30));
        assert_eq!(offer(&[("ratelimit", "limit=100, remaining=7, reset=30")]).1, left(7, 30));
        assert_eq!(offer(&[("ratelimit", "\"default\";r=7;t=30")]).1, left(7, 30));
        assert_eq!(offer(&[("ratelimit", "\"default\";r=7")]).1, left(7, 0));
    }

    #[test]
    fn the_strictest_of_several_values_counts() {
        assert_eq!(offer(&[("x-ratelimit-remaining", "9"), ("x-ratelimit-remaining", "7")]).0, left(7, 0));
        assert_eq!(offer(&[("ratelimit", "\"day\";r=900;t=9000, \"hour\";r=7;t=30")]).1, left(7, 30));
        assert_eq!(offer(&[("ratelimit", "\"a\";r=7;t=30"), ("ratelimit", "\"b\";r=7;t=40")]).1, left(7, 40));
        assert_eq!(offer(&[("ratelimit", "\"a\";r=7;t=30"), ("ratelimit-remaining", "2")]).1, left(2, 0));
    }

    #[test]
    fn invalid_values_are_ignored() {
        for value in ["", "-1", "many", "1.5", "7 of 9", "99999999999999999999"] {
            assert_eq!(offer(&[("x-ratelimit-remaining", value), ("ratelimit-remaining", value)]), (None, None));
        }
        for value in ["", "7", "\"a\"", "\"a\";r=-7", "\"a\";r=many", "\"a;r=7", "remaining=x", "limit=7", "(1 2);r=7"]
        {
            assert_eq!(offer(&[("ratelimit", value)]).1, None, "{value}");
        }
    }
}
