//! Header values that share one allocation.
//!
//! The numbers of a response change with each request. Their texts are concatenated on the stack and moved to the heap
//! together. Each header value is a slice of that allocation.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use ::http::HeaderValue;
use ::http::header::InvalidHeaderValue;
use bytes::Bytes;

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

#[cfg(test)]
mod tests {
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
}
