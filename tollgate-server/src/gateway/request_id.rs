//! Request IDs: unique, and not predictable from each other.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use http::HeaderValue;

/// A generator of request IDs.
#[derive(Debug)]
pub(super) struct RequestIds {
    secret: RandomState,
    next: AtomicU64,
}

impl RequestIds {
    pub(super) fn new() -> Self {
        Self { secret: RandomState::new(), next: AtomicU64::new(0) }
    }

    /// Returns a new ID as a header.
    pub(super) fn next(&self) -> HeaderValue {
        // Hexadecimal digits are valid in a header.
        HeaderValue::from_bytes(&self.next_text()).unwrap_or(HeaderValue::from_static("0"))
    }

    /// Returns a new ID of 32 hexadecimal digits.
    pub(super) fn next_text(&self) -> [u8; 32] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let number = self.next.fetch_add(1, Relaxed);
        let halves = [self.secret.hash_one(number), self.secret.hash_one(!number)];
        let mut text = [0; 32];
        let bytes = halves.iter().flat_map(|half| half.to_be_bytes());
        for (digits, byte) in text.chunks_exact_mut(2).zip(bytes) {
            digits.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_are_of_one_form() {
        let ids = RequestIds::new();
        let made: std::collections::HashSet<_> = (0..1000).map(|_| ids.next()).collect();
        assert_eq!(made.len(), 1000);
        assert!(made.iter().all(|id| id.len() == 32 && id.as_bytes().iter().all(u8::is_ascii_hexdigit)));
    }
}
