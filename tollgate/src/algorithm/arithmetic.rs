//! Arithmetic that algorithms share: numbers packed into as few words as possible, and division by a constant number,
//! by multiplication.

use super::{MAX_QUOTA, StateWords};

/// Returns the bits needed for every number up to `max`.
pub(super) fn bits_for(max: u64) -> u32 {
    u64::BITS - max.leading_zeros()
}

/// The high bits that a state of one word leaves to the store, where there is room for them: see
/// [`LimitAlgorithm::free_bits`](super::LimitAlgorithm::free_bits).
pub(super) const FREE_BITS: u32 = 2;

/// Two numbers: in one word where they fit, else in two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// The width of the second number when both share a word.
    low_bits: Option<u32>,
    /// The high bits of that word that neither number uses.
    free_bits: u32,
}

impl Pair {
    /// The second number gets all the bits that the first and the store leave it, so that it can grow when a limit is
    /// changed. The first number never has all of its bits set, so no state is a word of ones.
    pub(super) fn new(max_first: u64, max_second: u64) -> Self {
        let left = u64::BITS - bits_for(max_first + 1);
        let Some(spare) = left.checked_sub(bits_for(max_second)) else {
            return Self { low_bits: None, free_bits: 0 };
        };
        // No number that grows needs more than a quota does.
        let low_bits = (left - spare.min(FREE_BITS)).min(bits_for(max_second.max(MAX_QUOTA)));
        Self { low_bits: Some(low_bits), free_bits: left - low_bits }
    }

    /// Returns a packing with one word for each number.
    #[cfg(feature = "redis")]
    pub(super) const fn of_two_words() -> Self {
        Self { low_bits: None, free_bits: 0 }
    }

    pub(super) fn free_bits(self) -> u32 {
        self.free_bits
    }

    /// Returns whether a second number up to `max_second` fits.
    pub(super) fn holds(self, max_second: u64) -> bool {
        self.low_bits.is_none_or(|bits| bits_for(max_second) <= bits)
    }

    pub(super) fn words(self) -> usize {
        if self.low_bits.is_some() { 1 } else { 2 }
    }

    #[inline]
    pub(super) fn load(self, cells: &impl StateWords) -> (u64, u64) {
        let word = cells.get(0);
        match self.low_bits {
            Some(bits) => (word >> bits, word & ((1_u64 << bits) - 1)),
            None => (word, cells.get(1)),
        }
    }

    #[inline]
    pub(super) fn store(self, cells: &impl StateWords, first: u64, second: u64) {
        match self.low_bits {
            Some(bits) => cells.set(0, first << bits | second),
            None => {
                cells.set(0, first);
                cells.set(1, second);
            }
        }
    }
}

impl Pair {
    /// Stores two numbers. A second number that does not fit is stored as the largest that does.
    pub(super) fn store_at_most(self, cells: &impl StateWords, first: u64, second: u64) -> Fit {
        let most = self.low_bits.map_or(u64::MAX, |bits| (1_u64 << bits) - 1);
        self.store(cells, first, second.min(most));
        Fit::of(second <= most)
    }
}

/// Units that still count, and the latest time at which they can have been spent: now, unless the clock has stepped
/// back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spent {
    pub(crate) at: u64,
    pub(crate) units: u64,
}

/// Whether the new words have room for all charges of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Fit {
    Whole,
    /// Some charges did not fit. A store must not replace the old state.
    Cut,
}

impl Fit {
    pub(super) fn of(whole: bool) -> Self {
        if whole { Self::Whole } else { Self::Cut }
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self::of(self == Self::Whole && other == Self::Whole)
    }
}

/// Reads `width` bits, at most 64, that begin at bit `at` of the words.
#[inline]
pub(super) fn read_bits(word: impl Fn(usize) -> u64, at: usize, width: u32) -> u64 {
    if width == 0 {
        return 0;
    }
    let (index, shift) = (at / 64, at as u32 % 64);
    let mut value = word(index) >> shift;
    if shift + width > 64 {
        value |= word(index + 1) << (64 - shift);
    }
    if width == 64 { value } else { value & ((1_u64 << width) - 1) }
}

/// Writes `width` bits, at most 64, that begin at bit `at` of the words.
#[inline]
pub(super) fn write_bits(
    word: impl Fn(usize) -> u64,
    mut set: impl FnMut(usize, u64),
    at: usize,
    width: u32,
    value: u64,
) {
    if width == 0 {
        return;
    }
    let (index, shift) = (at / 64, at as u32 % 64);
    let mask = if width == 64 { u64::MAX } else { (1_u64 << width) - 1 };
    set(index, word(index) & !(mask << shift) | value << shift);
    if shift + width > 64 {
        let spilt = 64 - shift;
        set(index + 1, word(index + 1) & !(mask >> spilt) | value >> spilt);
    }
}

/// A divisor with its inverse. A 64-bit division takes tens of cycles on many processors, a multiplication three, and
/// every decision divides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divisor {
    by: u64,
    inverse: u64,
}

impl Divisor {
    pub(super) fn new(by: u64) -> Self {
        Self { by, inverse: u64::MAX / by }
    }

    pub(super) fn get(self) -> u64 {
        self.by
    }

    /// Returns quotient and remainder. The inverse is less than one `by`-th too small, so the first guess of the
    /// quotient is right or one too small.
    #[inline(always)]
    pub(super) fn divide(self, number: u64) -> (u64, u64) {
        let guess = ((u128::from(number) * u128::from(self.inverse)) >> u64::BITS) as u64;
        let rest = number - guess * self.by;
        if rest >= self.by { (guess + 1, rest - self.by) } else { (guess, rest) }
    }

    /// Divides and rounds down, where the quotient is known to fit.
    #[inline(always)]
    pub(super) fn div(self, number: u128) -> u64 {
        u64::try_from(number).map_or_else(|_| super::div_wide(number, self.by), |number| self.divide(number).0)
    }

    /// Divides and rounds up, where the quotient is known to fit.
    #[inline(always)]
    pub(super) fn div_ceil(self, number: u128) -> u64 {
        match u64::try_from(number) {
            Ok(number) => {
                let (quotient, rest) = self.divide(number);
                quotient + u64::from(rest > 0)
            }
            Err(_) => super::div_wide(number + u128::from(self.by - 1), self.by),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_come_back_and_leave_their_neighbours_alone(
            words in proptest::collection::vec(any::<u64>(), 4), at in 0_usize..190, width in 0_u32..=64, value: u64,
        ) {
            let value = if width == 64 { value } else { value & ((1 << width) - 1) };
            let cells = RefCell::new(words.clone());
            write_bits(|i| cells.borrow()[i], |i, w| cells.borrow_mut()[i] = w, at, width, value);
            prop_assert_eq!(read_bits(|i| cells.borrow()[i], at, width), value);
            for bit in (0..256).filter(|bit| *bit < at || *bit >= at + width as usize) {
                let before = words[bit / 64] >> (bit % 64) & 1;
                prop_assert_eq!(cells.borrow()[bit / 64] >> (bit % 64) & 1, before, "bit {}", bit);
            }
        }
    }

    #[test]
    fn a_pair_leaves_bits_to_the_store_where_there_is_room() {
        let layout = |max_first, max_second| {
            let pair = Pair::new(max_first, max_second);
            (pair.low_bits, pair.free_bits)
        };
        assert_eq!(layout(1 << 52, 100), (Some(9), 2));
        assert_eq!(layout(1 << 52, 1023), (Some(10), 1));
        assert_eq!(layout(1 << 52, 2047), (Some(11), 0));
        assert_eq!(layout(1 << 52, 2048), (None, 0));
        // The largest first number is not all ones.
        assert_eq!(layout((1 << 53) - 1, 1), (Some(8), 2));
        assert_eq!(layout(1 << 26, 1), (Some(33), 4));
        assert_eq!(layout(1 << 20, 1 << 39), (Some(40), 3));
    }

    #[test]
    fn counts_bits() {
        assert_eq!([0, 1, 2, 3, 4, u64::MAX].map(bits_for), [0, 1, 2, 2, 3, 64]);
    }

    proptest! {
        #[test]
        fn a_divisor_divides_exactly(
            number: u64, by in 1..=u64::MAX, shifts in (0_u32..64, 0_u32..64), near in -1_i64..=1,
        ) {
            let (number, by) = (number >> shifts.0, (by >> shifts.1).max(1));
            // Also next to a multiple, where a guess that is too small shows.
            for number in [number, (number / by * by).wrapping_add_signed(near), u64::MAX, 0] {
                prop_assert_eq!(Divisor::new(by).divide(number), (number / by, number % by));
                prop_assert_eq!(Divisor::new(by).div(number.into()), number / by);
                prop_assert_eq!(Divisor::new(by).div_ceil(number.into()), number.div_ceil(by));
            }
        }
    }
}
