//! The fast path for several keys at once: each has one word.
//!
//! One of the words is decisive: that of the table with the fewest keys, a global limit for example, which every thread
//! wants. The others are mostly wanted by nobody else.
//!
//! 1. Decide on all words as they were read. If one denies, that is the answer, and nothing was written.
//! 2. Seal all words but the decisive one, each only if it is still the word that was decided on.
//! 3. Decide on the decisive word and replace it, once more if another thread was faster: only this word is read again.
//! 4. Write the others: their new words if it was replaced, else the old ones.
//!
//! The replacement is the moment at which all of it happens: the other words cannot change between step 2 and step 4. If
//! the decisive key denies in step 3, the sealed words get their old values back, and it is as if they had not been
//! touched.
//!
//! A thread that has lost races lately leaves the decisive word out of step 1. Reading it early would take its cache
//! line from a thread that is about to replace it.
//!
//! No thread waits while it has a seal. One that finds a word sealed, or loses the decisive word twice, takes its seals
//! back, waits, and starts again, so no two threads wait for each other. After too many attempts, and for whatever is out
//! of the ordinary, there is the slow path.

use super::contention::Contention;
use super::quick::{ATTEMPTS, Home, Unready};
use super::table::Table;
use super::word::{Copied, Lost, Place, SEAL};
use super::{HashedHit, MemoryStore, Mode};
use crate::algorithm::{Compiled, LimitAlgorithm, Step, with_rules};
use crate::decision::{Decision, Verdict};
use crate::limit::Limit;
use crate::sync::Ordering;
use crate::units::Timestamp;

/// More keys than this go the slow path.
const MOST: usize = 8;
/// Most requests have no more than this. Preparing room for [`MOST`] takes them longer.
const FEW: usize = 4;
/// How often to try to replace the decisive word while the others are sealed.
const TRIES: u32 = 2;

/// What one key says, and what will be written if all pass.
pub(super) struct Draft<'a> {
    pub(super) verdict: Verdict,
    /// `None` if it denies, or has not been looked at.
    pub(super) change: Option<Change<'a>>,
}

impl Draft<'_> {
    /// Of a key that has not been looked at.
    pub(super) const UNKNOWN: Self = Self { verdict: crate::algorithm::allowed(u64::MAX, 0), change: None };
}

/// A word that is to be replaced.
pub(super) struct Change<'a> {
    place: Place<'a>,
    old: u64,
    new: u64,
}

/// Words that are sealed until this is dropped. Then they are what they were before, unless they were written.
struct Seals<'c, 'a> {
    drafts: &'c [Draft<'a>],
}

impl<'c, 'a> Seals<'c, 'a> {
    /// Seals all words that are to be replaced, or none if one of them is not what it was.
    #[inline(always)]
    fn new(drafts: &'c [Draft<'a>]) -> Option<Self> {
        let mut seals = Self { drafts: &drafts[..0] };
        for (index, draft) in drafts.iter().enumerate() {
            if draft.change.as_ref().is_some_and(|change| !change.place.seal(change.old)) {
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
        changes(drafts).for_each(|change| change.place.unseal(change.new));
    }
}

impl Drop for Seals<'_, '_> {
    #[inline(always)]
    fn drop(&mut self) {
        changes(self.drafts).for_each(|change| change.place.unseal(change.old));
    }
}

#[inline(always)]
fn changes<'c, 'a>(drafts: &'c [Draft<'a>]) -> impl Iterator<Item = &'c Change<'a>> {
    drafts.iter().filter_map(|draft| draft.change.as_ref())
}

impl MemoryStore {
    /// Decides if it is as easy as it mostly is. `None`: it has to be decided on the slow path.
    #[inline]
    pub(super) fn decide_together(&self, limits: &[Limit], asked: &[HashedHit], now: Timestamp) -> Option<Decision> {
        if asked.len() <= FEW {
            self.decide_up_to::<FEW>(limits, asked, now)
        } else {
            self.decide_up_to::<MOST>(limits, asked, now)
        }
    }

    fn decide_up_to<const N: usize>(&self, limits: &[Limit], asked: &[HashedHit], now: Timestamp) -> Option<Decision> {
        let mut contention = Contention::new();
        for _ in 0..ATTEMPTS {
            match self.try_together::<N>(limits, asked, now, !contention.is_likely()) {
                Ok(decision) => {
                    contention.end();
                    return Some(decision);
                }
                Err(Unready::Changed) => contention.wait(),
                Err(Unready::Unusual) => return None,
            }
        }
        None
    }

    #[inline(always)]
    fn try_together<const N: usize>(
        &self,
        limits: &[Limit],
        asked: &[HashedHit],
        now: Timestamp,
        look_first: bool,
    ) -> Result<Decision, Unready> {
        let (mut homes, mut drafts) = ([None; N], [const { Draft::UNKNOWN }; N]);
        let homes = homes.get_mut(..asked.len()).ok_or(Unready::Unusual)?;
        let drafts = drafts.get_mut(..asked.len()).ok_or(Unready::Unusual)?;
        // Of the decisive key, whose word is not sealed with the others.
        let mut last = Draft::UNKNOWN;
        let decisive = self.decisive(asked);
        // All buckets are asked for before any is looked into, so that their cache misses overlap.
        for (index, (home, one)) in homes.iter_mut().zip(asked).enumerate() {
            if one.cost > 0 && (look_first || Some(index) != decisive) {
                let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
                *home = Some(table.short_home(one.fingerprint)?);
            }
        }
        for (index, ((one, home), draft)) in asked.iter().zip(&*homes).zip(&mut *drafts).enumerate() {
            if one.cost == 0 {
                let verdict = self.ask(limits, *one, now, Mode::Look);
                draft.verdict = Some(verdict).filter(Verdict::is_allowed).ok_or(Unready::Unusual)?;
            } else if let Some(home) = *home {
                let draft = if Some(index) == decisive { &mut last } else { draft };
                self.draft(limits, one, (home, Displaced::Search), now, draft)?;
            }
        }
        if let Some(decisive) = decisive {
            let all_pass = last.verdict.is_allowed() && drafts.iter().all(|draft| draft.verdict.is_allowed());
            if all_pass {
                write_all(drafts, &mut last, |last| self.draft_anew(limits, &asked[decisive], now, last))?;
            } else if !look_first {
                self.draft_anew(limits, &asked[decisive], now, &mut last)?;
            }
            drafts[decisive].verdict = last.verdict;
        }
        self.foremost(limits, asked, drafts, now)
    }

    /// Which of the words is not sealed: of those that are to be replaced, the one of the table with the fewest keys.
    #[inline(always)]
    fn decisive(&self, asked: &[HashedHit]) -> Option<usize> {
        let taking = asked.iter().enumerate().filter(|(_, one)| one.cost > 0);
        let keys =
            |one: &HashedHit| self.tables.get(one.limit.index()).map(|table| table.occupied.load(Ordering::Relaxed));
        taking.min_by_key(|(_, one)| keys(one)).map(|(index, _)| index)
    }

    #[inline(always)]
    fn draft<'a>(
        &'a self,
        limits: &[Limit],
        one: &HashedHit,
        (home, displaced): (Home<'a>, Displaced),
        now: Timestamp,
        draft: &mut Draft<'a>,
    ) -> Result<(), Unready> {
        let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
        let place = match home.place_of(one.fingerprint) {
            Some(place) => place,
            None => table.place_elsewhere(one.fingerprint, displaced)?,
        };
        match limits.get(one.limit.index()).ok_or(Unready::Unusual)?.compiled() {
            Compiled::Meter(rules) => table.draft(rules, place, one, now.as_micros(), draft),
            other => with_rules!(other, rules => table.draft_of_others(rules, place, one, now.as_micros(), draft)),
        }
    }

    /// Makes a draft by what is there now, without waiting for anybody.
    #[inline(always)]
    fn draft_anew<'a>(
        &'a self,
        limits: &[Limit],
        one: &HashedHit,
        now: Timestamp,
        draft: &mut Draft<'a>,
    ) -> Result<(), Unready> {
        let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
        let home = table.short_home(one.fingerprint)?;
        self.draft(limits, one, (home, Displaced::GiveUp), now, draft)
    }

    /// The decision, by what each limit says.
    #[inline(always)]
    fn foremost(
        &self,
        limits: &[Limit],
        asked: &[HashedHit],
        drafts: &[Draft<'_>],
        now: Timestamp,
    ) -> Result<Decision, Unready> {
        let mut foremost = None::<(&HashedHit, &Verdict, u64)>;
        let mut delay = 0;
        for (one, Draft { verdict, .. }) in asked.iter().zip(drafts) {
            delay = delay.max(verdict.delay());
            let quota = limits.get(one.limit.index()).ok_or(Unready::Unusual)?.quota();
            if foremost.is_none_or(|(_, said, others)| verdict.is_before(quota, (said, others))) {
                foremost = Some((one, verdict, quota));
            }
        }
        let (one, verdict, _) = foremost.ok_or(Unready::Unusual)?;
        Ok(self.answer(limits, *one, now, verdict.held_for(delay)))
    }
}

/// What to do about a key that is not in its home bucket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Displaced {
    /// Look into the next buckets, and wait for one that another thread holds.
    Search,
    /// Go the slow path: a thread that has a seal must not wait.
    GiveUp,
}

/// Writes all words, or none if the decisive key denies. `last` is the draft of that key; `anew` makes one if there is none
/// yet, or if another thread was faster.
#[inline(always)]
pub(super) fn write_all<'a>(
    others: &[Draft<'a>],
    last: &mut Draft<'a>,
    mut anew: impl FnMut(&mut Draft<'a>) -> Result<(), Unready>,
) -> Result<(), Unready> {
    let seals = Seals::new(others).ok_or(Unready::Changed)?;
    for attempt in 0..TRIES {
        if attempt > 0 || last.change.is_none() {
            anew(last)?;
        }
        let Some(change) = &last.change else {
            return Ok(());
        };
        match change.place.replace(change.old, change.new) {
            Ok(()) => {
                seals.write();
                return Ok(());
            }
            // At once: the swap that failed has brought the cache line here.
            Err(Lost::To(_)) => {}
            Err(Lost::Elsewhere) => break,
        }
    }
    Err(Unready::Changed)
}

impl Table {
    /// Drafts what a key says to a cost that is not 0.
    #[inline(always)]
    fn draft<'a, R: LimitAlgorithm>(
        &'a self,
        rules: &R,
        place: Place<'a>,
        asked: &HashedHit,
        now: u64,
        draft: &mut Draft<'a>,
    ) -> Result<(), Unready> {
        let tags = self.layout.tags;
        let old = place.word.load(Ordering::Relaxed);
        if old == SEAL {
            return Err(Unready::Changed);
        }
        let cells = Copied::new(old & !tags, &self.spill);
        let Step { verdict, edit } = rules.decide(&cells, now, asked.cost);
        draft.verdict = verdict;
        draft.change = match edit {
            Some(edit) if verdict.is_allowed() => {
                rules.apply(&cells, edit);
                Some(Change { place, old, new: old & tags | cells.state.get() })
            }
            None if verdict.is_allowed() => return Err(Unready::Unusual),
            None if place.proves(old) => None,
            None => return Err(Unready::Changed),
            // A denial that changes something.
            Some(_) => return Err(Unready::Unusual),
        };
        Ok(())
    }

    #[inline(never)]
    fn draft_of_others<'a, R: LimitAlgorithm>(
        &'a self,
        rules: &R,
        place: Place<'a>,
        asked: &HashedHit,
        now: u64,
        draft: &mut Draft<'a>,
    ) -> Result<(), Unready> {
        self.draft(rules, place, asked, now, draft)
    }

    /// The word of a key that is not in its home bucket, if it has a slot.
    #[cold]
    #[inline(never)]
    fn place_elsewhere(&self, fingerprint: u64, displaced: Displaced) -> Result<Place<'_>, Unready> {
        match displaced {
            Displaced::Search => self.find(fingerprint).map(|found| self.place(found)).ok_or(Unready::Unusual),
            Displaced::GiveUp => Err(Unready::Unusual),
        }
    }

    #[cfg(all(test, loom))]
    pub(super) fn draft_now<'a, R: LimitAlgorithm>(
        &'a self,
        rules: &R,
        asked: &HashedHit,
        now: u64,
        draft: &mut Draft<'a>,
    ) -> Result<(), Unready> {
        let place = self.short_home(asked.fingerprint)?.place_of(asked.fingerprint).ok_or(Unready::Unusual)?;
        self.draft(rules, place, asked, now, draft)
    }
}
