//! The short way for several keys at once: each has one word, in its home bucket, that nobody is changing just now.
//!
//! All are decided on what was read, without holding anything. If all pass, their buckets are held by replacing
//! exactly the headers that were read, which proves that every word is still as it was decided on; then all are
//! written. Nobody waits here: whoever finds a bucket changed or held lets go and takes the long way. That is also how
//! two keys in one bucket go, because it cannot be held twice.

use std::cell::Cell;

use super::bucket::{hold_header, release_header, release_header_unchanged, unchanged_header};
use super::quick::{Home, word_of};
use super::table::Table;
use super::{Asked, MemoryStore, Mode};
use crate::algorithm::spill::Spill;
use crate::algorithm::{Cells, Compiled, Rules, Step, with_rules};
use crate::decision::{Decision, Verdict};
use crate::limit::Limit;
use crate::sync::{AtomicU64, Ordering};
use crate::units::Timestamp;

/// More keys than this have the long way.
const MOST: usize = 8;

/// What one key says, and what will be written if all pass.
pub(super) struct Draft<'a> {
    pub(super) verdict: Verdict,
    pub(super) change: Option<Change<'a>>,
}

/// A word that is to be replaced, and the header of its bucket when it was read.
pub(super) struct Change<'a> {
    bucket: &'a AtomicU64,
    header: u64,
    word: &'a AtomicU64,
    new: u64,
}

/// A copy of the one word of a key.
struct Copied<'a> {
    word: Cell<u64>,
    spill: &'a Spill,
}

impl Cells for Copied<'_> {
    #[inline(always)]
    fn get(&self, _: usize) -> u64 {
        self.word.get()
    }

    #[inline(always)]
    fn set(&self, _: usize, word: u64) {
        self.word.set(word);
    }

    fn spill(&self) -> &Spill {
        self.spill
    }
}

impl MemoryStore {
    /// Decides if it is as easy as it mostly is. `None` has changed nothing.
    #[inline]
    pub(super) fn decide_together(&self, limits: &[Limit], asked: &[Asked], now: Timestamp) -> Option<Decision> {
        let (mut homes, mut changes) = ([None; MOST], [const { None::<Change<'_>> }; MOST]);
        let (homes, changes) = (homes.get_mut(..asked.len())?, changes.get_mut(..asked.len())?);
        // All buckets are asked for before any is looked into, so that their cache misses overlap.
        for (home, one) in homes.iter_mut().zip(asked).filter(|(_, one)| one.cost > 0) {
            *home = Some(self.tables.get(one.limit.index())?.short_home(one.fingerprint)?);
        }
        // Of which limit what is said is to be told: only that becomes a decision.
        let mut foremost = None::<(&Asked, Verdict, u64)>;
        let mut delay = 0;
        for ((one, home), change) in asked.iter().zip(&*homes).zip(&mut *changes) {
            let (table, limit) = (self.tables.get(one.limit.index())?, limits.get(one.limit.index())?);
            let verdict = if let Some(home) = *home {
                let draft = match limit.compiled() {
                    Compiled::Meter(rules) => table.draft(rules, home, one, now.as_micros())?,
                    other => with_rules!(other, rules => table.draft_of_others(rules, home, one, now.as_micros()))?,
                };
                *change = draft.change;
                draft.verdict
            } else {
                Some(self.ask(limits, *one, now, Mode::Look)).filter(Verdict::is_allowed)?
            };
            delay = delay.max(verdict.delay());
            let quota = limit.quota();
            if foremost.is_none_or(|(_, said, others)| verdict.is_before(quota, (&said, others))) {
                foremost = Some((one, verdict, quota));
            }
        }
        let (one, verdict, _) = foremost?;
        let is_told = !verdict.is_allowed() || write_all(changes);
        is_told.then(|| self.answer(limits, *one, now, verdict.held_for(delay)))
    }
}

impl Table {
    /// What a key says to a cost that is not 0.
    #[inline(always)]
    fn draft<'a, R: Rules>(&'a self, rules: &R, home: Home<'a>, asked: &Asked, now: u64) -> Option<Draft<'a>> {
        if rules.must_lock() {
            return None;
        }
        let Home { words, header } = home;
        let word = word_of(words, asked.fingerprint)?;
        let cells = Copied { word: Cell::new(word.load(Ordering::Relaxed)), spill: &self.spill };
        let Step { verdict, edit } = rules.decide(&cells, now, asked.cost);
        match edit {
            Some(edit) if verdict.is_allowed() => {
                rules.apply(&cells, edit);
                let change = Change { bucket: &words[0], header, word, new: cells.word.get() };
                Some(Draft { verdict, change: Some(change) })
            }
            None if !verdict.is_allowed() && unchanged_header(&words[0], header) => {
                Some(Draft { verdict, change: None })
            }
            // A denial that is counted, or a bucket that has changed.
            _ => None,
        }
    }

    #[inline(never)]
    fn draft_of_others<'a, R: Rules>(
        &'a self,
        rules: &R,
        home: Home<'a>,
        asked: &Asked,
        now: u64,
    ) -> Option<Draft<'a>> {
        self.draft(rules, home, asked, now)
    }

    #[cfg(all(test, loom))]
    pub(super) fn draft_now<R: Rules>(&self, rules: &R, asked: &Asked, now: u64) -> Option<Draft<'_>> {
        self.draft(rules, self.short_home(asked.fingerprint)?, asked, now)
    }
}

/// Writes all, unless one of the buckets is not as it was.
#[inline(always)]
pub(super) fn write_all(changes: &[Option<Change<'_>>]) -> bool {
    for (held, change) in changes.iter().enumerate() {
        if change.as_ref().is_some_and(|change| !hold_header(change.bucket, change.header)) {
            changes[..held].iter().flatten().for_each(|other| release_header_unchanged(other.bucket, other.header));
            return false;
        }
    }
    for change in changes.iter().flatten() {
        change.word.store(change.new, Ordering::Relaxed);
        release_header(change.bucket, change.header);
    }
    true
}
