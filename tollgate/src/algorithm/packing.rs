//! Numbers in as few words as they need.

use super::Cells;

/// How many bits it takes to write every number up to `max`.
pub(super) fn bits_for(max: u64) -> u32 {
    u64::BITS - max.leading_zeros()
}

/// Two numbers: in one word where they fit, else in two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// The width of the second number when both share a word.
    low_bits: Option<u32>,
}

impl Pair {
    /// The second number gets all the bits that the first leaves it, so that it can grow when a limit is changed.
    pub(super) fn new(max_first: u64, max_second: u64) -> Self {
        let left = u64::BITS - bits_for(max_first);
        Self { low_bits: (bits_for(max_second) <= left).then_some(left) }
    }

    /// A word each, whatever they are.
    #[cfg(feature = "redis")]
    pub(super) const fn of_two_words() -> Self {
        Self { low_bits: None }
    }

    /// Whether a second number up to this one can be kept.
    pub(super) fn holds(self, max_second: u64) -> bool {
        self.low_bits.is_none_or(|bits| bits_for(max_second) <= bits)
    }

    pub(super) fn words(self) -> usize {
        if self.low_bits.is_some() { 1 } else { 2 }
    }

    #[inline]
    pub(super) fn load(self, cells: &impl Cells) -> (u64, u64) {
        let word = cells.get(0);
        match self.low_bits {
            Some(bits) => (word >> bits, word & ((1_u64 << bits) - 1)),
            None => (word, cells.get(1)),
        }
    }

    #[inline]
    pub(super) fn store(self, cells: &impl Cells, first: u64, second: u64) {
        match self.low_bits {
            Some(bits) => cells.set(0, first << bits | second),
            None => {
                cells.set(0, first);
                cells.set(1, second);
            }
        }
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
    fn counts_bits() {
        assert_eq!([0, 1, 2, 3, 4, u64::MAX].map(bits_for), [0, 1, 2, 2, 3, 64]);
    }
}
