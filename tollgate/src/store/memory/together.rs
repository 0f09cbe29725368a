//! The fast path for several keys at once: each has one word, in its home bucket.
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
use super::{Asked, MemoryStore, Mode};
use crate::algorithm::{Compiled, Rules, Step, with_rules};
use crate::decision::{Decision, Verdict};
use crate::limit::Limit;
use crate::sync::Ordering;
use crate::units::Timestamp;

/// More keys than this go the slow path.
const MOST: usize = 8;
/// How often to try to replace the decisive word while the others are sealed.
const TRIES: u32 = 2;

/// What one key says, and what will be written if all pass.
pub(super) struct Draft<'a> {
    pub(super) verdict: Verdict,
    /// `None` if it denies.
    pub(super) change: Option<Change<'a>>,
}

/// A word that is to be replaced.
pub(super) struct Change<'a> {
    place: Place<'a>,
    old: u64,
    new: u64,
}

/// Words that are sealed until this is dropped. Then they are what they were before, unless they were written.
struct Seals<'c, 'a> {
    changes: &'c [Option<Change<'a>>],
}

impl<'c, 'a> Seals<'c, 'a> {
    /// Seals all words that are to be replaced, or none if one of them is not what it was.
    #[inline(always)]
    fn new(changes: &'c [Option<Change<'a>>]) -> Option<Self> {
        let mut seals = Self { changes: &changes[..0] };
        for (index, change) in changes.iter().enumerate() {
            if change.as_ref().is_some_and(|change| !change.place.seal(change.old)) {
                return None;
            }
            seals.changes = &changes[..=index];
        }
        Some(seals)
    }

    /// Replaces the words.
    #[inline(always)]
    fn write(mut self) {
        let changes = std::mem::take(&mut self.changes);
        changes.iter().flatten().for_each(|change| change.place.unseal(change.new));
    }
}

impl Drop for Seals<'_, '_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.changes.iter().flatten().for_each(|change| change.place.unseal(change.old));
    }
}

impl MemoryStore {
    /// Decides if it is as easy as it mostly is. `None`: it has to be decided on the slow path.
    #[inline]
    pub(super) fn decide_together(&self, limits: &[Limit], asked: &[Asked], now: Timestamp) -> Option<Decision> {
        let mut contention = Contention::new();
        for _ in 0..ATTEMPTS {
            match self.try_together(limits, asked, now, !contention.is_likely()) {
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
    fn try_together(
        &self,
        limits: &[Limit],
        asked: &[Asked],
        now: Timestamp,
        look_first: bool,
    ) -> Result<Decision, Unready> {
        let (mut homes, mut changes) = ([None; MOST], [const { None::<Change<'_>> }; MOST]);
        let mut verdicts = [NOTHING_SAID; MOST];
        let homes = homes.get_mut(..asked.len()).ok_or(Unready::Unusual)?;
        let changes = changes.get_mut(..asked.len()).ok_or(Unready::Unusual)?;
        let verdicts = verdicts.get_mut(..asked.len()).ok_or(Unready::Unusual)?;
        let decisive = self.decisive(asked);
        // All buckets are asked for before any is looked into, so that their cache misses overlap.
        for (index, (home, one)) in homes.iter_mut().zip(asked).enumerate() {
            if one.cost > 0 && (look_first || Some(index) != decisive) {
                let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
                *home = Some(table.short_home(one.fingerprint)?);
            }
        }
        for (index, one) in asked.iter().enumerate() {
            if one.cost == 0 {
                let verdict = self.ask(limits, *one, now, Mode::Look);
                verdicts[index] = Some(verdict).filter(Verdict::is_allowed).ok_or(Unready::Unusual)?;
            } else if let Some(home) = homes[index] {
                let draft = self.draft(limits, one, home, now)?;
                (verdicts[index], changes[index]) = (draft.verdict, draft.change);
            }
        }
        let Some(decisive) = decisive else {
            return self.foremost(limits, asked, verdicts, now);
        };
        if !verdicts.iter().all(Verdict::is_allowed) {
            if !look_first {
                verdicts[decisive] = self.draft_anew(limits, &asked[decisive], now)?.verdict;
            }
            return self.foremost(limits, asked, verdicts, now);
        }
        let early = changes[decisive].take().map(|change| Draft { verdict: verdicts[decisive], change: Some(change) });
        verdicts[decisive] = write_all(changes, early, || self.draft_anew(limits, &asked[decisive], now))?;
        self.foremost(limits, asked, verdicts, now)
    }

    /// Which of the words is not sealed: of those that are to be replaced, the one of the table with the fewest keys.
    #[inline(always)]
    fn decisive(&self, asked: &[Asked]) -> Option<usize> {
        let taking = asked.iter().enumerate().filter(|(_, one)| one.cost > 0);
        let keys = |one: &Asked| self.tables.get(one.limit.index()).map(|table| table.occupied.load(Ordering::Relaxed));
        taking.min_by_key(|(_, one)| keys(one)).map(|(index, _)| index)
    }

    #[inline(always)]
    fn draft<'a>(
        &'a self,
        limits: &[Limit],
        one: &Asked,
        home: Home<'a>,
        now: Timestamp,
    ) -> Result<Draft<'a>, Unready> {
        let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
        match limits.get(one.limit.index()).ok_or(Unready::Unusual)?.compiled() {
            Compiled::Meter(rules) => table.draft(rules, home, one, now.as_micros()),
            other => with_rules!(other, rules => table.draft_of_others(rules, home, one, now.as_micros())),
        }
    }

    /// A draft by what is there now.
    #[inline(always)]
    fn draft_anew(&self, limits: &[Limit], one: &Asked, now: Timestamp) -> Result<Draft<'_>, Unready> {
        let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
        self.draft(limits, one, table.short_home(one.fingerprint)?, now)
    }

    /// The decision, by what each limit says.
    #[inline(always)]
    fn foremost(
        &self,
        limits: &[Limit],
        asked: &[Asked],
        verdicts: &[Verdict],
        now: Timestamp,
    ) -> Result<Decision, Unready> {
        let mut foremost = None::<(&Asked, &Verdict, u64)>;
        let mut delay = 0;
        for (one, verdict) in asked.iter().zip(verdicts) {
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

/// Writes all words, or none if the decisive key denies. Returns what that says. `early` is a draft of it that was made
/// before, and `anew` makes one.
#[inline(always)]
pub(super) fn write_all<'a>(
    others: &[Option<Change<'a>>],
    mut early: Option<Draft<'a>>,
    mut anew: impl FnMut() -> Result<Draft<'a>, Unready>,
) -> Result<Verdict, Unready> {
    let seals = Seals::new(others).ok_or(Unready::Changed)?;
    for _ in 0..TRIES {
        let Draft { verdict, change } = match early.take() {
            Some(draft) => draft,
            None => anew()?,
        };
        let Some(change) = change else {
            return Ok(verdict);
        };
        match change.place.replace(change.old, change.new) {
            Ok(()) => {
                seals.write();
                return Ok(verdict);
            }
            // At once: the swap that failed has brought the cache line here.
            Err(Lost::To(_)) => {}
            Err(Lost::Elsewhere) => break,
        }
    }
    Err(Unready::Changed)
}

/// Of a key that has not been looked at.
const NOTHING_SAID: Verdict = crate::algorithm::allowed(u64::MAX, 0);

impl Table {
    /// What a key says to a cost that is not 0.
    #[inline(always)]
    fn draft<'a, R: Rules>(&'a self, rules: &R, home: Home<'a>, asked: &Asked, now: u64) -> Result<Draft<'a>, Unready> {
        let place = home.place_of(asked.fingerprint).ok_or(Unready::Unusual)?;
        let tags = self.layout.tags;
        let old = place.word.load(Ordering::Relaxed);
        if old == SEAL {
            return Err(Unready::Changed);
        }
        let cells = Copied::new(old & !tags, &self.spill);
        let Step { verdict, edit } = rules.decide(&cells, now, asked.cost);
        match edit {
            Some(edit) if verdict.is_allowed() => {
                rules.apply(&cells, edit);
                Ok(Draft { verdict, change: Some(Change { place, old, new: old & tags | cells.state.get() }) })
            }
            None if verdict.is_allowed() => Err(Unready::Unusual),
            None if place.proves(old) => Ok(Draft { verdict, change: None }),
            None => Err(Unready::Changed),
            // A denial that changes something.
            Some(_) => Err(Unready::Unusual),
        }
    }

    #[inline(never)]
    fn draft_of_others<'a, R: Rules>(
        &'a self,
        rules: &R,
        home: Home<'a>,
        asked: &Asked,
        now: u64,
    ) -> Result<Draft<'a>, Unready> {
        self.draft(rules, home, asked, now)
    }

    #[cfg(all(test, loom))]
    pub(super) fn draft_now<R: Rules>(&self, rules: &R, asked: &Asked, now: u64) -> Result<Draft<'_>, Unready> {
        self.draft(rules, self.short_home(asked.fingerprint)?, asked, now)
    }
}
