//! Where the headers of an answer are written: into a map, or as text.

use ::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;

/// Takes headers, each over any of its name.
pub(super) trait Fields {
    /// Makes room for so many at once, if there can be.
    fn make_room(&mut self, fields: usize) -> bool;
    fn put(&mut self, name: &'static HeaderName, value: &HeaderValue);
    fn put_number(&mut self, name: &'static HeaderName, number: u64);
    /// A value of several parts, which have nothing in them that no header has.
    fn put_parts<const N: usize>(&mut self, name: &'static HeaderName, parts: [&str; N]);
}

impl Fields for HeaderMap {
    fn make_room(&mut self, fields: usize) -> bool {
        self.try_reserve(fields).is_ok()
    }

    fn put(&mut self, name: &'static HeaderName, value: &HeaderValue) {
        // Only a map of thousands of headers is ever full.
        _ = self.try_insert(name, value.clone());
    }

    fn put_number(&mut self, name: &'static HeaderName, number: u64) {
        // Digits are always a header value.
        if let Ok(value) = HeaderValue::from_bytes(itoa::Buffer::new().format(number).as_bytes()) {
            _ = self.try_insert(name, value);
        }
    }

    fn put_parts<const N: usize>(&mut self, name: &'static HeaderName, parts: [&str; N]) {
        if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(parts.concat())) {
            _ = self.try_insert(name, value);
        }
    }
}

/// Lines of HTTP/1.1. Whoever writes them sees to it that none is there twice.
pub(super) struct Lines<'a>(pub(super) &'a mut Vec<u8>);

impl Lines<'_> {
    fn put_bytes(&mut self, name: &HeaderName, value: &[u8]) {
        self.0.extend_from_slice(name.as_str().as_bytes());
        self.0.extend_from_slice(b": ");
        self.0.extend_from_slice(value);
        self.0.extend_from_slice(b"\r\n");
    }
}

impl Fields for Lines<'_> {
    fn make_room(&mut self, _fields: usize) -> bool {
        true
    }

    fn put(&mut self, name: &'static HeaderName, value: &HeaderValue) {
        self.put_bytes(name, value.as_bytes());
    }

    fn put_number(&mut self, name: &'static HeaderName, number: u64) {
        self.put_bytes(name, itoa::Buffer::new().format(number).as_bytes());
    }

    fn put_parts<const N: usize>(&mut self, name: &'static HeaderName, parts: [&str; N]) {
        self.put_bytes(name, b"");
        self.0.truncate(self.0.len() - 2);
        parts.iter().for_each(|part| self.0.extend_from_slice(part.as_bytes()));
        self.0.extend_from_slice(b"\r\n");
    }
}
