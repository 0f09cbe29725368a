//! The fast path for several keys at once: each has one word, in its home bucket, that nobody is changing just now.
//!
//! All are decided on what was read, without holding anything. If all pass, every word but one is sealed, if it is still
//! as it was decided on. The last one is replaced, and that decides for all of them; then the others get their new
//! words, or their old ones back. The last one is of the table with the fewest keys: a global limit, which every thread
//! wants, is never sealed.
//!
//! Nobody waits here with a seal. Whoever finds a word changed lets go and starts over; whatever is out of the ordinary
//! goes the slow path.

use super::bucket::pause;
use super::quick::Home;
use super::table::Table;
use super::word::{Copied, Place};
use super::{Asked, MemoryStore, Mode};
use crate::algorithm::{Compiled, Rules, Step, with_rules};
use crate::decision::{Decision, Verdict};
use crate::limit::Limit;
use crate::sync::Ordering;
use crate::units::Timestamp;

/// More keys than this go the slow path.
const MOST: usize = 8;
/// How often to start over before going the slow path, which holds the buckets.
const ATTEMPTS: u32 = 64;

/// Why several keys are not decided here and now.
pub(super) enum Unready {
    /// Someone else has changed one of the words.
    Changed,
    /// One of the keys needs the slow path.
    Unusual,
}

/// What one key says, and what will be written if all pass.
pub(super) struct Draft<'a> {
    pub(super) verdict: Verdict,
    pub(super) change: Option<Change<'a>>,
}

/// A word that is to be replaced.
pub(super) struct Change<'a> {
    place: Place<'a>,
    old: u64,
    new: u64,
    /// Slots in use in its table.
    occupied: usize,
}

impl MemoryStore {
    /// Decides if it is as easy as it mostly is. `None`: it has to be decided on the slow path.
    #[inline]
    pub(super) fn decide_together(&self, limits: &[Limit], asked: &[Asked], now: Timestamp) -> Option<Decision> {
        let mut attempts = 0;
        loop {
            match self.try_together(limits, asked, now) {
                Ok(decision) => return Some(decision),
                Err(Unready::Changed) if attempts < ATTEMPTS => attempts = pause(attempts),
                Err(_) => return None,
            }
        }
    }

    #[inline(always)]
    fn try_together(&self, limits: &[Limit], asked: &[Asked], now: Timestamp) -> Result<Decision, Unready> {
        let (mut homes, mut changes) = ([None; MOST], [const { None::<Change<'_>> }; MOST]);
        let homes = homes.get_mut(..asked.len()).ok_or(Unready::Unusual)?;
        let changes = changes.get_mut(..asked.len()).ok_or(Unready::Unusual)?;
        // All buckets are asked for before any is looked into, so that their cache misses overlap.
        for (home, one) in homes.iter_mut().zip(asked).filter(|(_, one)| one.cost > 0) {
            let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
            *home = Some(table.short_home(one.fingerprint).ok_or(Unready::Unusual)?);
        }
        // Of which limit what is said is to be told: only that becomes a decision.
        let mut foremost = None::<(&Asked, Verdict, u64)>;
        let mut delay = 0;
        for ((one, home), change) in asked.iter().zip(&*homes).zip(&mut *changes) {
            let table = self.tables.get(one.limit.index()).ok_or(Unready::Unusual)?;
            let limit = limits.get(one.limit.index()).ok_or(Unready::Unusual)?;
            let verdict = if let Some(home) = *home {
                let draft = match limit.compiled() {
                    Compiled::Meter(rules) => table.draft(rules, home, one, now.as_micros())?,
                    other => with_rules!(other, rules => table.draft_of_others(rules, home, one, now.as_micros()))?,
                };
                *change = draft.change;
                draft.verdict
            } else {
                Some(self.ask(limits, *one, now, Mode::Look)).filter(Verdict::is_allowed).ok_or(Unready::Unusual)?
            };
            delay = delay.max(verdict.delay());
            let quota = limit.quota();
            if foremost.is_none_or(|(_, said, others)| verdict.is_before(quota, (&said, others))) {
                foremost = Some((one, verdict, quota));
            }
        }
        let (one, verdict, _) = foremost.ok_or(Unready::Unusual)?;
        if verdict.is_allowed() && !write_all(changes) {
            return Err(Unready::Changed);
        }
        Ok(self.answer(limits, *one, now, verdict.held_for(delay)))
    }
}

impl Table {
    /// What a key says to a cost that is not 0.
    #[inline(always)]
    fn draft<'a, R: Rules>(&'a self, rules: &R, home: Home<'a>, asked: &Asked, now: u64) -> Result<Draft<'a>, Unready> {
        let place = home.place_of(asked.fingerprint).ok_or(Unready::Unusual)?;
        let tags = self.layout.tags;
        let old = place.word.load(Ordering::Relaxed);
        let cells = Copied::new(old & !tags, &self.spill);
        let Step { verdict, edit } = rules.decide(&cells, now, asked.cost);
        match edit {
            Some(edit) if verdict.is_allowed() => {
                rules.apply(&cells, edit);
                let (new, occupied) = (old & tags | cells.state.get(), self.occupied.load(Ordering::Relaxed));
                Ok(Draft { verdict, change: Some(Change { place, old, new, occupied }) })
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
    pub(super) fn draft_now<R: Rules>(&self, rules: &R, asked: &Asked, now: u64) -> Option<Draft<'_>> {
        self.draft(rules, self.short_home(asked.fingerprint)?, asked, now).ok()
    }
}

/// Writes all, unless one of the words is not as it was.
#[inline(always)]
pub(super) fn write_all(changes: &[Option<Change<'_>>]) -> bool {
    let fewest = |(_, change): &(usize, &Change<'_>)| change.occupied;
    let all = || changes.iter().enumerate().filter_map(|(index, change)| Some((index, change.as_ref()?)));
    let Some((last, decisive)) = all().min_by_key(fewest) else {
        return true;
    };
    let others = || all().filter(|(index, _)| *index != last);
    for (index, change) in others() {
        if !change.place.seal(change.old) {
            others().take_while(|(sealed, _)| *sealed < index).for_each(|(_, other)| other.place.unseal(other.old));
            return false;
        }
    }
    let is_written = decisive.place.replace(decisive.old, decisive.new);
    others().for_each(|(_, other)| other.place.unseal(if is_written { other.new } else { other.old }));
    is_written
}
