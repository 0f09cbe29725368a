//! The fast path for several keys that have one word each: `mixed_vs_governor` of the benchmark `memory`.
//!
//! One of the words is decisive: that of the table with the fewest keys, for example a global limit, for which all
//! threads compete. There is little competition for the others.
//!
//! 1. Decide on all words as they were read. If one denies, that is the answer, and nothing was written.
//! 2. Seal all words but the decisive one, each only if it is still the word that was decided on.
//! 3. Decide on the decisive word and replace it, once more if another thread was faster: only this word is read again.
//! 4. Write the others: their new words if it was replaced, else the old ones.
//!
//! The replacement is the moment at which all of it happens: the other words cannot change between step 2 and step 4.
//! If the decisive key denies in step 3, the sealed words get their old values back, as if nothing had happened.
//!
//! A thread that has lost races recently leaves the decisive word out of step 1. Reading it early would take its cache
//! line from a thread that is about to replace it.
//!
//! No thread waits while it has a seal. One that finds a word sealed, or loses the decisive word twice, takes its seals
//! back, waits, and starts again, so no two threads wait for each other. After too many attempts, and in unusual cases,
//! the slow path decides.

use super::decide::{ATTEMPTS, Contention, Copied, FastPathMiss, HomeBucket, LostRace, SEAL, WordRef};
use super::table::Table;
use super::{HashedHit, MemoryStore, Mode};
use crate::algorithm::{Compiled, LimitAlgorithm, Step, with_algorithm};
use crate::decision::{Decision, Verdict};
use crate::limit::Limit;
use crate::sync::Ordering;
use crate::units::Timestamp;

/// Most keys on this path. Requests with more take the slow path.
const MOST: usize = 8;
/// Few enough for most requests. Initialising room for [`MOST`] would take longer.
const FEW: usize = 4;
/// How often to try to replace the decisive word while the others are sealed.
const TRIES: u32 = 2;

/// The verdict on one key, and the word to write if all keys allow.
pub(super) struct Draft<'a> {
    pub(super) verdict: Verdict,
    /// `None` if the key denies or was not read yet.
    pub(super) change: Option<Change<'a>>,
}

impl Draft<'_> {
    /// The draft of a key that was not read yet.
    pub(super) const UNKNOWN: Self = Self { verdict: crate::algorithm::allowed(u64::MAX, 0), change: None };
}

/// A word that is to be replaced.
pub(super) struct Change<'a> {
    word_ref: WordRef<'a>,
    old: u64,
    new: u64,
}

/// Sealed words. On drop they get their old values back, unless they were written.
struct Seals<'c, 'a> {
    drafts: &'c [Draft<'a>],
}

impl<'c, 'a> Seals<'c, 'a> {
    /// Seals all words that are to be replaced, or none if one of them has changed.
    #[inline(always)]
    fn new(drafts: &'c [Draft<'a>]) -> Option<Self> {
        let mut seals = Self { drafts: &drafts[..0] };
        for (index, draft) in drafts.iter().enumerate() {
            if draft.change.as_ref().is_some_and(|change| !change.word_ref.seal(change.old)) {
                return None;
            }
            seals.drafts = &drafts[..=index];
        }
        Some(seals)
    }

    /// Replaces the words.
    #[inline(always)]
    fn write(mut self) {
        let drafts = std::mem::take(&mut self.drafts);
        changes(drafts).for_each(|change| change.word_ref.unseal(change.new));
    }
}

impl Drop for Seals<'_, '_> {
    #[inline(always)]
    fn drop(&mut self) {
        changes(self.drafts).for_each(|change| change.word_ref.unseal(change.old));
    }
}

#[inline(always)]
fn changes<'c, 'a>(drafts: &'c [Draft<'a>]) -> impl Iterator<Item = &'c Change<'a>> {
    drafts.iter().filter_map(|draft| draft.change.as_ref())
}

impl MemoryStore {
    /// Decides in the common case. `None` if the slow path must decide.
    #[inline]
    pub(super) fn decide_several_fast(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Option<Decision> {
        if hits.len() <= FEW {
            self.decide_up_to::<FEW>(limits, hits, now)
        } else {
            self.decide_up_to::<MOST>(limits, hits, now)
        }
    }

    fn decide_up_to<const N: usize>(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Option<Decision> {
        let mut contention = Contention::new();
        for _ in 0..ATTEMPTS {
            match self.try_several::<N>(limits, hits, now, !contention.is_likely()) {
                Ok(decision) => {
                    contention.end();
                    return Some(decision);
                }
                Err(FastPathMiss::Changed) => contention.wait(),
                Err(FastPathMiss::Unusual) => return None,
            }
        }
        None
    }

    #[inline(always)]
    fn try_several<const N: usize>(
        &self,
        limits: &[Limit],
        hits: &[HashedHit],
        now: Timestamp,
        look_first: bool,
    ) -> Result<Decision, FastPathMiss> {
        let (mut homes, mut drafts) = ([None; N], [const { Draft::UNKNOWN }; N]);
        let homes = homes.get_mut(..hits.len()).ok_or(FastPathMiss::Unusual)?;
        let drafts = drafts.get_mut(..hits.len()).ok_or(FastPathMiss::Unusual)?;
        // The draft of the decisive key, whose word is not sealed.
        let mut last = Draft::UNKNOWN;
        let decisive = self.decisive(hits);
        // Prefetch all buckets before reading any, so that their cache misses overlap.
        for (index, (home, hit)) in homes.iter_mut().zip(hits).enumerate() {
            if hit.cost > 0 && (look_first || Some(index) != decisive) {
                let table = self.tables.get(hit.limit.index()).ok_or(FastPathMiss::Unusual)?;
                *home = Some(table.short_home(hit.fingerprint)?);
            }
        }
        for (index, ((hit, home), draft)) in hits.iter().zip(&*homes).zip(&mut *drafts).enumerate() {
            if hit.cost == 0 {
                let verdict = self.check(limits, *hit, now, Mode::Peek);
                draft.verdict = Some(verdict).filter(Verdict::is_allowed).ok_or(FastPathMiss::Unusual)?;
            } else if let Some(home) = *home {
                let draft = if Some(index) == decisive { &mut last } else { draft };
                self.draft(limits, hit, (home, Displaced::Search), now, draft)?;
            }
        }
        if let Some(decisive) = decisive {
            let all_pass = last.verdict.is_allowed() && drafts.iter().all(|draft| draft.verdict.is_allowed());
            if all_pass {
                write_all(drafts, &mut last, |last| self.draft_anew(limits, &hits[decisive], now, last))?;
            } else if !look_first {
                self.draft_anew(limits, &hits[decisive], now, &mut last)?;
            }
            drafts[decisive].verdict = last.verdict;
        }
        self.most_restrictive(limits, hits, drafts, now)
    }

    /// Returns the index of the decisive word: of those to be replaced, the one of the table with the fewest keys.
    #[inline(always)]
    fn decisive(&self, hits: &[HashedHit]) -> Option<usize> {
        let taking = hits.iter().enumerate().filter(|(_, hit)| hit.cost > 0);
        let keys =
            |hit: &HashedHit| self.tables.get(hit.limit.index()).map(|table| table.occupied.load(Ordering::Relaxed));
        taking.min_by_key(|(_, hit)| keys(hit)).map(|(index, _)| index)
    }

    #[inline(always)]
    fn draft<'a>(
        &'a self,
        limits: &[Limit],
        one: &HashedHit,
        (home, displaced): (HomeBucket<'a>, Displaced),
        now: Timestamp,
        draft: &mut Draft<'a>,
    ) -> Result<(), FastPathMiss> {
        let table = self.tables.get(one.limit.index()).ok_or(FastPathMiss::Unusual)?;
        let word_ref = match home.word_of(one.fingerprint) {
            Some(word_ref) => word_ref,
            None => table.find_displaced(one.fingerprint, displaced)?,
        };
        match limits.get(one.limit.index()).ok_or(FastPathMiss::Unusual)?.compiled() {
            Compiled::Meter(algorithm) => table.draft(algorithm, word_ref, one, now.as_micros(), draft),
            other => {
                with_algorithm!(other, algorithm => table.draft_of_others(algorithm, word_ref, one, now.as_micros(), draft))
            }
        }
    }

    /// Makes a draft from the current word, without waiting.
    #[inline(always)]
    fn draft_anew<'a>(
        &'a self,
        limits: &[Limit],
        one: &HashedHit,
        now: Timestamp,
        draft: &mut Draft<'a>,
    ) -> Result<(), FastPathMiss> {
        let table = self.tables.get(one.limit.index()).ok_or(FastPathMiss::Unusual)?;
        let home = table.short_home(one.fingerprint)?;
        self.draft(limits, one, (home, Displaced::GiveUp), now, draft)
    }

    /// Combines the verdicts of all limits into a decision.
    #[inline(always)]
    fn most_restrictive(
        &self,
        limits: &[Limit],
        hits: &[HashedHit],
        drafts: &[Draft<'_>],
        now: Timestamp,
    ) -> Result<Decision, FastPathMiss> {
        let mut most_restrictive = None::<(&HashedHit, &Verdict, u64)>;
        let mut delay = 0;
        for (hit, Draft { verdict, .. }) in hits.iter().zip(drafts) {
            delay = delay.max(verdict.delay());
            let quota = limits.get(hit.limit.index()).ok_or(FastPathMiss::Unusual)?.quota();
            if most_restrictive.is_none_or(|(_, said, others)| verdict.takes_precedence(quota, (said, others))) {
                most_restrictive = Some((hit, verdict, quota));
            }
        }
        let (hit, verdict, _) = most_restrictive.ok_or(FastPathMiss::Unusual)?;
        Ok(self.decision(limits, *hit, now, verdict.with_delay(delay)))
    }
}

/// How to treat a key that is not in its home bucket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Displaced {
    /// Search the next buckets, and wait for locked ones.
    Search,
    /// Take the slow path: a thread that has a seal must not wait.
    GiveUp,
}

/// Writes all words, or none if the decisive key denies. `last` is the draft of that key; `anew` makes one if there is
/// none yet, or if another thread was faster.
#[inline(always)]
pub(super) fn write_all<'a>(
    others: &[Draft<'a>],
    last: &mut Draft<'a>,
    mut anew: impl FnMut(&mut Draft<'a>) -> Result<(), FastPathMiss>,
) -> Result<(), FastPathMiss> {
    let seals = Seals::new(others).ok_or(FastPathMiss::Changed)?;
    for attempt in 0..TRIES {
        if attempt > 0 || last.change.is_none() {
            anew(last)?;
        }
        let Some(change) = &last.change else {
            return Ok(());
        };
        match change.word_ref.replace(change.old, change.new) {
            Ok(()) => {
                seals.write();
                return Ok(());
            }
            // Retry at once: the failed swap has brought the cache line here.
            Err(LostRace::To(_)) => {}
            Err(LostRace::Moved) => break,
        }
    }
    Err(FastPathMiss::Changed)
}

impl Table {
    /// Drafts the decision on a key and a cost above 0.
    #[inline(always)]
    fn draft<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        word_ref: WordRef<'a>,
        hit: &HashedHit,
        now: u64,
        draft: &mut Draft<'a>,
    ) -> Result<(), FastPathMiss> {
        let tags = self.layout.tags;
        let old = word_ref.word.load(Ordering::Relaxed);
        if old == SEAL {
            return Err(FastPathMiss::Changed);
        }
        let cells = Copied::new(old & !tags, &self.spill);
        let Step { verdict, edit } = algorithm.decide(&cells, now, hit.cost);
        draft.verdict = verdict;
        draft.change = match edit {
            Some(edit) if verdict.is_allowed() => {
                algorithm.apply(&cells, edit);
                Some(Change { word_ref, old, new: old & tags | cells.state.get() })
            }
            None if verdict.is_allowed() => return Err(FastPathMiss::Unusual),
            None if word_ref.proves(old) => None,
            None => return Err(FastPathMiss::Changed),
            // A denial that changes something.
            Some(_) => return Err(FastPathMiss::Unusual),
        };
        Ok(())
    }

    #[inline(never)]
    fn draft_of_others<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        word_ref: WordRef<'a>,
        hit: &HashedHit,
        now: u64,
        draft: &mut Draft<'a>,
    ) -> Result<(), FastPathMiss> {
        self.draft(algorithm, word_ref, hit, now, draft)
    }

    /// Finds the word of a key that is not in its home bucket, if it has a slot.
    #[cold]
    #[inline(never)]
    fn find_displaced(&self, fingerprint: u64, displaced: Displaced) -> Result<WordRef<'_>, FastPathMiss> {
        match displaced {
            Displaced::Search => self.find(fingerprint).map(|found| self.word_ref(found)).ok_or(FastPathMiss::Unusual),
            Displaced::GiveUp => Err(FastPathMiss::Unusual),
        }
    }

    #[cfg(all(test, loom))]
    pub(super) fn draft_now<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        hit: &HashedHit,
        now: u64,
        draft: &mut Draft<'a>,
    ) -> Result<(), FastPathMiss> {
        let word_ref = self.short_home(hit.fingerprint)?.word_of(hit.fingerprint).ok_or(FastPathMiss::Unusual)?;
        self.draft(algorithm, word_ref, hit, now, draft)
    }
}
