//! Reads the rate limit headers of an upstream that has limits of its own.
//!
//! Reading is lenient, because the aim is not to promise a client more than the upstream allows: the strictest of
//! several values counts, and invalid values are ignored.

use ::http::{HeaderMap, HeaderName};
use sfv::{BareItem, Dictionary, List, ListEntry, Parser};

use super::policy::{LIMIT, POLICY, RATELIMIT, REMAINING, RESET, X_REMAINING, X_RESET};
use crate::units::Timestamp;

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
pub(super) fn legacy(headers: &HeaderMap, now: Timestamp) -> Option<Offer> {
    let remaining = numbers(headers, &X_REMAINING).min()?;
    let now_secs = now.as_micros() / 1_000_000;
    let from_now = |reset: u64| if reset < EARLIEST_EPOCH_SECS { reset } else { reset.saturating_sub(now_secs) };
    Some(Offer { remaining, reset_secs: numbers(headers, &X_RESET).map(from_now).max().unwrap_or(0) })
}

/// Reads `RateLimit` and `RateLimit-Remaining`, in the syntax of any draft.
pub(super) fn standard(headers: &HeaderMap) -> Option<Offer> {
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

    fn offer(lines: &[(&'static str, &'static str)]) -> (Option<Offer>, Option<Offer>) {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        (legacy(&headers, Timestamp::from_secs(1_640_000_000)), standard(&headers))
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
