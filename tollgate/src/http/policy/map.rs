//! Writes the headers of a limit to a header map.

use ::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use ::http::{HeaderMap, HeaderName, HeaderValue};

use super::{
    LIMIT, MAX_INTEGER, POLICY, POLICY_SEPARATOR, Policy, RATELIMIT, REMAINING, RESET, X_LIMIT, X_REMAINING, X_RESET,
    reset_at_seconds, reset_seconds,
};
use crate::decision::Decision;
use crate::http::values::{End, Texts};

/// The headers that most responses have, from the service or its server.
const OTHERS: [HeaderName; 2] = [CONTENT_TYPE, CONTENT_LENGTH];

/// The capacity of a map that was created for one header. More headers make it grow.
const SMALL_MAP: usize = 6;

impl Policy {
    /// Writes the headers of these kinds, if their families are selected.
    pub(super) fn write_kinds(
        &self,
        kinds: HeaderKinds,
        decision: &Decision,
        matched: &[&Self],
        headers: &mut HeaderMap,
    ) {
        self.for_each(kinds, decision, matched, |name, value| {
            if let Some(value) = value.into_value() {
                headers.insert(name, value);
            }
        });
    }

    /// Moves the few headers of a response into a copy of the prepared map, which is cheaper than growing its own map
    /// and hashing each name. Returns `false` and changes nothing if the response has other headers.
    pub(super) fn replace_map(&self, decision: &Decision, matched: &[&Self], headers: &mut HeaderMap) -> bool {
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
    pub(super) fn prepare(&mut self) {
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
pub(super) struct HeaderKinds {
    /// `X-RateLimit-*`.
    pub(super) legacy: bool,
    /// `RateLimit*`.
    pub(super) standard: bool,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{Families, HeaderFamily};
    use crate::{FixedWindow, Limit, Limiter, MINUTE};

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
}
