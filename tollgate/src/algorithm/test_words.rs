//! The state of one key, for tests of algorithms.

use std::cell::Cell;

use super::StateWords;
use super::spill::Spill;
use crate::budget::Budget;

pub(super) struct Words {
    words: Vec<Cell<u64>>,
    spill: Spill,
}

impl Words {
    /// Returns the state of a key that has spent nothing.
    pub(super) fn new(count: usize) -> Self {
        Self { words: (0..count).map(|_| Cell::new(0)).collect(), spill: Spill::new(Budget::new(1 << 20)) }
    }
}

impl StateWords for Words {
    fn get(&self, index: usize) -> u64 {
        self.words[index].get()
    }

    fn set(&self, index: usize, word: u64) {
        self.words[index].set(word);
    }

    fn spill(&self) -> &Spill {
        &self.spill
    }
}
