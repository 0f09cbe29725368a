//! What a limit counts by.

/// The identity a limit counts by: a user, an address, a tenant and an endpoint together.
///
/// Borrowed, and hashed in place: no string is built for it. Any bytes will do, of any length, the empty key
/// too. Several parts make one key without any way for two different lists of parts to mean the same key.
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
#[derive(Clone, Copy, Debug)]
pub struct Key<'a>(Repr<'a>);

#[derive(Clone, Copy, Debug)]
enum Repr<'a> {
    Whole(&'a [u8]),
    Parts(&'a [&'a str]),
    ByteParts(&'a [&'a [u8]]),
}

impl<'a> Key<'a> {
    /// A key made of several parts. One part is the same key as that part alone.
    #[must_use]
    pub const fn parts(parts: &'a [&'a str]) -> Self {
        Self(Repr::Parts(parts))
    }

    /// A key made of several parts that need not be text. It is the same key as that of the same parts as text.
    #[must_use]
    pub const fn byte_parts(parts: &'a [&'a [u8]]) -> Self {
        Self(Repr::ByteParts(parts))
    }

    /// The bytes of a key of one part.
    #[inline(always)]
    pub(crate) fn whole(&self) -> Option<&'a [u8]> {
        match self.0 {
            Repr::Whole(bytes) => Some(bytes),
            Repr::Parts([part]) => Some(part.as_bytes()),
            Repr::ByteParts([part]) => Some(part),
            Repr::Parts(_) | Repr::ByteParts(_) => None,
        }
    }

    /// The parts of a key of several, or of none.
    pub(crate) fn several(&self) -> impl Iterator<Item = &'a [u8]> {
        let (text, bytes): (&[&str], &[&[u8]]) = match self.0 {
            Repr::Whole(_) => (&[], &[]),
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
