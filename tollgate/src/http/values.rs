//! Header values that share one allocation.
//!
//! The numbers of an answer change from request to request. Their texts are put together on the stack, one after the
//! other, and moved to the heap at once; each value is a part of that.

use ::http::HeaderValue;
use bytes::Bytes;
use smallvec::SmallVec;

/// The texts of several values, while they are put together. There is room for those of nearly all answers, several
/// policies with names of usual length included. Longer ones take an allocation more.
#[derive(Default)]
pub(super) struct Texts(SmallVec<[u8; 152]>);

/// Where the text of a value ends. Values are taken in the order in which their texts were put together.
#[derive(Clone, Copy)]
pub(super) struct End(usize);

impl Texts {
    /// Adds to the text of the current value.
    #[inline]
    pub(super) fn push(&mut self, text: &[u8]) -> &mut Self {
        self.0.extend_from_slice(text);
        self
    }

    #[inline]
    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        self.push(itoa::Buffer::new().format(number).as_bytes())
    }

    /// Ends the current value.
    #[inline]
    pub(super) fn end(&self) -> End {
        End(self.0.len())
    }

    /// Moves the texts to the heap.
    #[inline]
    pub(super) fn share(self) -> SharedTexts {
        SharedTexts { rest: Bytes::from_owner(self.0), taken: 0 }
    }
}

/// The texts of several values, to be taken one by one.
pub(super) struct SharedTexts {
    rest: Bytes,
    taken: usize,
}

impl SharedTexts {
    /// The next value, whose text ends there; `None` if the text cannot be a header value.
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
