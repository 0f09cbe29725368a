//! Keys: the identities that limits count by.

use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The identity that a limit counts by: a user, an address, or a tenant and an endpoint together.
///
/// A key is borrowed and hashed in place, without building a string. It can be any bytes of any length, even empty. A
/// key can have several parts, and different lists of parts are always different keys.
///
/// ```
/// use tollgate::{Key, Limiter, Limit, FixedWindow, MINUTE};
///
/// let limiter = Limiter::new(Limit::new("endpoint", FixedWindow::new(1, MINUTE))?);
/// assert!(limiter.check(Key::parts(&["ann", "/search"])).is_allowed());
/// assert!(limiter.check(Key::parts(&["ann/", "search"])).is_allowed());
/// assert!(!limiter.check(Key::parts(&["ann", "/search"])).is_allowed());
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
///
/// Integers, IP addresses and, with the feature `uuid`, UUIDs convert to keys. Each is the same key as its text, so
/// processes that share limits may use either. An IPv4-mapped IPv6 address is the same key as the IPv4 address.
///
/// ```
/// use std::net::IpAddr;
/// use tollgate::{Limiter, Limit, FixedWindow, MINUTE};
///
/// let limiter = Limiter::new(Limit::new("per-user", FixedWindow::new(1, MINUTE))?);
/// assert!(limiter.check(42).is_allowed());
/// assert!(!limiter.check("42").is_allowed());
/// assert!(limiter.check(IpAddr::from([192, 0, 2, 1])).is_allowed());
/// assert!(!limiter.check("192.0.2.1").is_allowed());
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Key<'a>(Repr<'a>);

#[derive(Clone, Copy, Debug)]
enum Repr<'a> {
    Whole(&'a [u8]),
    Parts(&'a [&'a str]),
    ByteParts(&'a [&'a [u8]]),
    Inline(Text),
}

/// The text of a number, an address or a UUID.
#[derive(Clone, Copy, Debug)]
struct Text {
    bytes: [u8; MAX_TEXT],
    length: u8,
}

/// Length of the longest IPv6 address and of the largest `u128`, plus a sign.
const MAX_TEXT: usize = 40;

impl<'a> Key<'a> {
    /// Creates a key of several parts. A single part is the same key as the part alone.
    #[must_use]
    pub const fn parts(parts: &'a [&'a str]) -> Self {
        Self(Repr::Parts(parts))
    }

    /// Creates a key of several parts that need not be text. It is the same key as the same parts as text.
    #[must_use]
    pub const fn byte_parts(parts: &'a [&'a [u8]]) -> Self {
        Self(Repr::ByteParts(parts))
    }

    /// Returns the bytes of a key of one part.
    #[inline(always)]
    #[doc(hidden)]
    pub fn whole(&self) -> Option<&[u8]> {
        match &self.0 {
            Repr::Whole(bytes) => Some(bytes),
            Repr::Parts([part]) => Some(part.as_bytes()),
            Repr::ByteParts([part]) => Some(part),
            Repr::Inline(text) => Some(text.as_bytes()),
            Repr::Parts(_) | Repr::ByteParts(_) => None,
        }
    }

    /// Returns the parts of a key that does not have exactly one part.
    #[doc(hidden)]
    #[inline]
    pub fn several(&self) -> impl Iterator<Item = &'a [u8]> {
        let (text, bytes): (&[&str], &[&[u8]]) = match self.0 {
            Repr::Whole(_) | Repr::Inline(_) => (&[], &[]),
            Repr::Parts(parts) => (parts, &[]),
            Repr::ByteParts(parts) => (&[], parts),
        };
        text.iter().map(|part| part.as_bytes()).chain(bytes.iter().copied())
    }
}

impl<'a> From<&'a str> for Key<'a> {
    fn from(text: &'a str) -> Self {
        Self(Repr::Whole(text.as_bytes()))
    }
}

impl<'a> From<&'a String> for Key<'a> {
    fn from(text: &'a String) -> Self {
        Self(Repr::Whole(text.as_bytes()))
    }
}

impl<'a> From<&'a [u8]> for Key<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self(Repr::Whole(bytes))
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Key<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Self(Repr::Whole(bytes))
    }
}

impl From<IpAddr> for Key<'_> {
    fn from(address: IpAddr) -> Self {
        let mut text = Text::EMPTY;
        match address.to_canonical() {
            IpAddr::V4(address) => {
                for (index, octet) in address.octets().into_iter().enumerate() {
                    if index > 0 {
                        text.push(b'.');
                    }
                    text.push_decimal(octet.into());
                }
            }
            // An address always fits.
            IpAddr::V6(address) => _ = write!(text, "{address}"),
        }
        Self(Repr::Inline(text))
    }
}

impl From<Ipv4Addr> for Key<'_> {
    fn from(address: Ipv4Addr) -> Self {
        IpAddr::V4(address).into()
    }
}

impl From<Ipv6Addr> for Key<'_> {
    fn from(address: Ipv6Addr) -> Self {
        IpAddr::V6(address).into()
    }
}

#[cfg(feature = "uuid")]
impl From<uuid::Uuid> for Key<'_> {
    /// In lower case with hyphens: `67e55044-10b1-426f-9247-bb680e5fe0c8`.
    fn from(id: uuid::Uuid) -> Self {
        let mut text = Text::EMPTY;
        text.length = id.hyphenated().encode_lower(&mut text.bytes).len() as u8;
        Self(Repr::Inline(text))
    }
}

macro_rules! from_integers {
    ($($integer:ty),*) => {
        $(impl From<$integer> for Key<'_> {
            #[inline]
            fn from(number: $integer) -> Self {
                let mut text = Text::EMPTY;
                #[allow(unused_comparisons, reason = "half of these types have no sign")]
                if number < 0 {
                    text.push(b'-');
                }
                #[allow(clippy::cast_lossless, reason = "usize has no other conversion")]
                text.push_decimal(number.abs_diff(0) as u64);
                Self(Repr::Inline(text))
            }
        })*
    };
}
from_integers!(u8, u16, u32, u64, usize, i8, i16, i32, i64, isize);

impl From<u128> for Key<'_> {
    fn from(number: u128) -> Self {
        let mut text = Text::EMPTY;
        // It always fits.
        _ = write!(text, "{number}");
        Self(Repr::Inline(text))
    }
}

impl Text {
    const EMPTY: Self = Self { bytes: [0; MAX_TEXT], length: 0 };

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    #[inline]
    fn push(&mut self, byte: u8) {
        self.bytes[usize::from(self.length)] = byte;
        self.length += 1;
    }

    #[inline]
    fn push_decimal(&mut self, number: u64) {
        let begin = usize::from(self.length);
        let mut rest = number;
        loop {
            self.push(b'0' + (rest % 10) as u8);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.bytes[begin..usize::from(self.length)].reverse();
    }
}

impl Write for Text {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let begin = usize::from(self.length);
        let end = begin + part.len();
        self.bytes.get_mut(begin..end).ok_or(fmt::Error)?.copy_from_slice(part.as_bytes());
        self.length = end as u8;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text<'k>(key: impl Into<Key<'k>>) -> String {
        String::from_utf8(key.into().whole().unwrap().to_vec()).unwrap()
    }

    #[test]
    fn extreme_numbers_are_their_text() {
        assert_eq!((text(0), text(-1), text(u64::MAX)), ("0".into(), "-1".into(), u64::MAX.to_string()));
        assert_eq!((text(i64::MIN), text(u128::MAX)), (i64::MIN.to_string(), u128::MAX.to_string()));
        assert_eq!((text(i8::MIN), text(usize::MAX)), ("-128".into(), usize::MAX.to_string()));
    }

    #[test]
    fn mapped_address_is_the_ipv4_address() {
        assert_eq!(text("::ffff:192.0.2.1".parse::<IpAddr>().unwrap()), "192.0.2.1");
        assert_eq!(text(Ipv6Addr::from_bits(u128::MAX)), "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
    }

    #[test]
    #[cfg(feature = "uuid")]
    fn uuid_is_its_text_in_lower_case() {
        let id: uuid::Uuid = "67E55044-10B1-426F-9247-BB680E5FE0C8".parse().unwrap();
        assert_eq!(text(id), "67e55044-10b1-426f-9247-bb680e5fe0c8");
    }

    proptest! {
        #[test]
        fn numbers_and_addresses_are_the_same_keys_as_their_texts(number: i64, bits: u128, octets: u32) {
            prop_assert_eq!(text(number), number.to_string());
            prop_assert_eq!(text(number.unsigned_abs()), number.unsigned_abs().to_string());
            prop_assert_eq!(text(bits), bits.to_string());
            let (v4, v6) = (Ipv4Addr::from_bits(octets), IpAddr::from(Ipv6Addr::from_bits(bits)));
            prop_assert_eq!(text(v4), v4.to_string());
            prop_assert_eq!(text(v6), v6.to_canonical().to_string());
        }
    }
}
