//! Strikes, the algorithm of bans: after a number of strikes within a period, a key is denied for a period.
//!
//! It denies nothing by itself: the caller strikes a key when it denies a request, and checks with every request
//! whether the key is banned. So a hit of cost 0, which other algorithms never deny, can be denied here.

use std::time::Duration;

use super::arithmetic::{Fit, Pair};
use super::{Algorithm, Charge, Compiled, LimitAlgorithm, Owed, StateWords, Step, allowed, checked, denied};
use crate::decision::Verdict;
use crate::error::InvalidLimit;
use crate::units::Timestamp;

/// A ban: denies a key for a while after too many strikes.
///
/// A hit of cost n counts n strikes. The first strike opens a period of `within`. With `after` strikes in this period,
/// the key is banned for `for_`. A hit of cost 0 checks the ban: it is denied until exactly the end of the ban. Strikes
/// on a banned key are denied and change nothing. After the ban, the count starts from 0.
///
/// ```
/// use tollgate::{Ban, FixedWindow, Hit, HOUR, Limit, LimitSet, Limiter, MINUTE};
///
/// let limits = LimitSet::new()
///     .limit(Limit::new("login", FixedWindow::new(5, MINUTE))?)
///     .ban("login", Ban { after: 2, within: MINUTE, for_: HOUR });
/// let limiter = Limiter::builder().limits(limits).build()?;
/// let (login, ban) = (limiter.id("login").unwrap(), limiter.ban("login").unwrap());
///
/// // Every request checks the ban, and every denial strikes the key.
/// assert!(limiter.decide_now(&[Hit::new(login, "eve"), Hit::new(ban, "eve").cost(0)]).is_allowed());
/// let _ = limiter.decide_now(&[Hit::new(ban, "eve").cost(2)]);
/// let banned = limiter.decide_now(&[Hit::new(login, "eve"), Hit::new(ban, "eve").cost(0)]);
/// assert_eq!(banned.limit(), Some(ban));
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ban {
    /// Strikes that ban: 1 to 2^32.
    pub after: u64,
    /// Period in which strikes count together, from the first one.
    pub within: Duration,
    /// Duration of the ban.
    pub for_: Duration,
}

impl Ban {
    pub(super) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        let after = checked::quota("after", self.after)?;
        let within = checked::span("within", self.within)?;
        let lasts = checked::span("for", self.for_)?;
        let packing = Pair::new(Timestamp::MAX.as_micros(), Marks::most(after));
        Ok(Compiled::Strikes(Strikes { after, within, lasts, packing }))
    }
}

impl From<Ban> for Algorithm {
    fn from(spec: Ban) -> Self {
        Self::Ban(spec)
    }
}

/// The start of a period of strikes or of a ban.
///
/// A clock that steps back before the start moves the start back with it: strikes are kept, and no key is banned for
/// longer than one ban from then on.
#[derive(Clone, Debug)]
pub(crate) struct Strikes {
    pub(super) after: u64,
    pub(super) within: u64,
    pub(super) lasts: u64,
    pub(super) packing: Pair,
}

/// Twice the number of strikes, plus one during a ban. So a ban stays a ban when the number of strikes is changed.
#[derive(Clone, Copy)]
struct Marks(u64);

impl Marks {
    const BAN: u64 = 1;

    fn most(after: u64) -> u64 {
        2 * after + Self::BAN
    }

    fn strikes(self) -> u64 {
        self.0 >> 1
    }

    fn is_ban(self) -> bool {
        self.0 & Self::BAN != 0
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Struck {
    since: u64,
    marks: Marks,
}

impl Strikes {
    pub(super) fn most_marks(&self) -> u64 {
        Marks::most(self.after)
    }

    /// Returns the strikes that count at `now`, and whether they differ from the stored ones because the clock stepped
    /// back.
    fn struck(&self, cells: &impl StateWords, now: u64) -> (Struck, bool) {
        let (since, marks) = self.packing.load(cells);
        let marks = Marks(marks);
        let counts = marks.0 > 0 && now < since.saturating_add(self.span(marks));
        if !counts {
            return (Struck { since: now, marks: Marks(0) }, false);
        }
        (Struck { since: since.min(now), marks }, since > now)
    }

    /// Converts to other numbers. A ban keeps its start. Strikes keep their start if the new period has not ended yet,
    /// and otherwise count as made now.
    pub(super) fn convert(&self, into: &impl StateWords, old: &Self, from: &impl StateWords, now: u64) -> Fit {
        let (struck, _) = old.struck(from, now);
        let Struck { since, marks } = struck;
        if marks.0 == 0 {
            return Fit::Whole;
        }
        let is_open = marks.is_ban() || now < since.saturating_add(self.within);
        self.packing.store_at_most(into, if is_open { since } else { now }, marks.0)
    }

    fn span(&self, marks: Marks) -> u64 {
        if marks.is_ban() { self.lasts } else { self.within }
    }

    fn strike(&self, struck: Struck, now: u64, cost: u64) -> Struck {
        let strikes = struck.marks.strikes().saturating_add(cost);
        if strikes >= self.after {
            Struck { since: now, marks: Marks(Marks::most(self.after)) }
        } else {
            Struck { marks: Marks(2 * strikes), ..struck }
        }
    }

    fn allowed_after(&self, struck: Struck, now: u64) -> Verdict {
        let Struck { since, marks } = struck;
        let reset_after = if marks.0 > 0 { since + self.span(marks) - now } else { 0 };
        let left = if marks.is_ban() { 0 } else { self.after.saturating_sub(marks.strikes()) };
        allowed(left, reset_after)
    }
}

impl LimitAlgorithm for Strikes {
    type Edit = Struck;

    fn words(&self) -> usize {
        self.packing.words()
    }

    fn free_bits(&self) -> u32 {
        self.packing.free_bits()
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Struck> {
        let (struck, stepped_back) = self.struck(cells, now);
        let edit = stepped_back.then_some(struck);
        if struck.marks.is_ban() {
            let wait = struck.since + self.lasts - now;
            return Step { verdict: denied(wait, 0, wait), edit };
        }
        if cost == 0 {
            // Before a ban, all of the quota remains, so that the limit checked with the ban is reported.
            let Verdict { reset_after, .. } = self.allowed_after(struck, now);
            return Step { verdict: allowed(self.after, reset_after), edit };
        }
        let after = self.strike(struck, now, cost);
        Step { verdict: self.allowed_after(after, now), edit: Some(after) }
    }

    /// Gives back strikes while they still count. A ban is kept.
    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Struck> {
        let (struck, _) = self.struck(cells, now);
        let strikes = struck.marks.strikes();
        if struck.marks.is_ban() || charge.at < struck.since || strikes == 0 || charge.cost == 0 {
            return None;
        }
        Some(Struck { marks: Marks(2 * strikes.saturating_sub(charge.cost)), ..struck })
    }

    /// A ban counts strikes, not units.
    fn owe(&self, _: &impl StateWords, _: u64, _: u64) -> Option<Owed<Struck>> {
        None
    }

    fn apply(&self, cells: &impl StateWords, edit: Struck) {
        self.packing.store(cells, edit.since, edit.marks.0);
    }

    /// Shared strikes would ban keys that have none.
    fn has_floor(&self) -> bool {
        false
    }

    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool {
        self.struck(cells, now).0.marks.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::test_words::Words;
    use super::*;
    use crate::decision::{Admission, Verdict};

    /// One key, with strikes and checks.
    struct Key {
        algorithm: Strikes,
        words: Words,
    }

    impl Key {
        fn new(after: u64, within: u64, lasts: u64) -> Self {
            let ban = Ban { after, within: Duration::from_micros(within), for_: Duration::from_micros(lasts) };
            let Compiled::Strikes(algorithm) = ban.compile().unwrap() else { unreachable!() };
            Self { algorithm, words: Words::new(2) }
        }

        fn ask(&self, now: u64, cost: u64) -> Verdict {
            let Step { verdict, edit } = self.algorithm.decide(&self.words, now, cost);
            edit.into_iter().for_each(|edit| self.algorithm.apply(&self.words, edit));
            verdict
        }

        fn waits(&self, now: u64) -> Option<u64> {
            match self.ask(now, 0).admission {
                Admission::Denied { retry_after } => Some(retry_after),
                _ => None,
            }
        }
    }

    /// The definition: a list of all strikes that count.
    #[derive(Default)]
    struct Definition {
        strikes: Vec<u64>,
        banned_at: Option<u64>,
    }

    impl Definition {
        fn strike(&mut self, key: &Key, now: u64, cost: u64) {
            let Strikes { after, within, lasts, .. } = key.algorithm;
            if self.banned_at.is_some_and(|at| now < at + lasts) {
                return;
            }
            self.banned_at = None;
            if self.strikes.first().is_some_and(|first| now >= first + within) {
                self.strikes.clear();
            }
            self.strikes.extend((0..cost).map(|_| now));
            if self.strikes.len() as u64 >= after {
                (self.banned_at, self.strikes) = (Some(now), Vec::new());
            }
        }

        fn waits(&self, key: &Key, now: u64) -> Option<u64> {
            self.banned_at.and_then(|at| (at + key.algorithm.lasts).checked_sub(now)).filter(|wait| *wait > 0)
        }
    }

    const START: u64 = 1_700_000_000_000_000;

    proptest! {
        #[test]
        fn bans_are_as_defined(
            after in 1_u64..6, within in 1_000_u64..5_000, lasts in 1_000_u64..5_000,
            steps in proptest::collection::vec((prop_oneof![Just(0_u64), 0..2_000_u64, 0..20_000_u64], 0_u64..4), 1..60),
        ) {
            let (key, mut definition, mut now) = (Key::new(after, within, lasts), Definition::default(), START);
            for (gap, cost) in steps {
                now += gap;
                prop_assert_eq!(key.waits(now), definition.waits(&key, now));
                if cost > 0 {
                    let banned = definition.waits(&key, now).is_some();
                    prop_assert_eq!(key.ask(now, cost).is_allowed(), !banned);
                    definition.strike(&key, now, cost);
                }
                prop_assert_eq!(key.waits(now), definition.waits(&key, now));
            }
        }

        #[test]
        fn a_clock_that_steps_back_forgets_no_strike_and_bans_for_one_ban(
            after in 1_u64..6, within in 1_000_u64..5_000, lasts in 1_000_u64..5_000, struck in 1_u64..6, back in 0_u64..1 << 50,
        ) {
            let key = Key::new(after, within, lasts);
            let _ = key.ask(START, struck);
            let now = START - back;
            match key.waits(now) {
                Some(wait) => {
                    prop_assert!(struck >= after);
                    prop_assert!(wait <= lasts);
                    prop_assert_eq!(key.waits(now + wait - 1), Some(1));
                    prop_assert_eq!(key.waits(now + wait), None);
                }
                None => {
                    prop_assert!(struck < after);
                    prop_assert!(key.ask(now, after - struck).is_allowed());
                    prop_assert_eq!(key.waits(now), Some(lasts));
                }
            }
        }
    }

    #[test]
    fn a_key_at_rest_is_all_zeros_or_forgotten_in_time() {
        let key = Key::new(2, 1_000, 5_000);
        assert!(key.algorithm.is_idle(&key.words, START));
        let _ = key.ask(START, 1);
        assert!(!key.algorithm.is_idle(&key.words, START + 999));
        assert!(key.algorithm.is_idle(&key.words, START + 1_000));
        let _ = key.ask(START + 1_000, 2);
        assert!(!key.algorithm.is_idle(&key.words, START + 5_999));
        assert!(key.algorithm.is_idle(&key.words, START + 6_000));
    }

    #[test]
    fn strikes_are_taken_back_but_bans_are_not() {
        let key = Key::new(3, 1_000, 5_000);
        let give_back = |now: u64, at: u64, cost: u64| {
            let edit = key.algorithm.refund(&key.words, now, Charge { at, cost });
            edit.into_iter().for_each(|edit| key.algorithm.apply(&key.words, edit));
        };
        let _ = key.ask(START, 2);
        give_back(START + 1, START, 1);
        assert_eq!(key.ask(START + 1, 1).remaining, 1);
        let _ = key.ask(START + 1, 1);
        give_back(START + 2, START + 1, 2);
        assert_eq!(key.waits(START + 2), Some(4_999));
    }

    #[test]
    fn numbers_out_of_bounds_are_refused_by_name() {
        let second = Duration::from_secs(1);
        let field = |ban: Ban| ban.compile().unwrap_err().field().to_owned();
        assert_eq!(field(Ban { after: 0, within: second, for_: second }), "after");
        assert_eq!(field(Ban { after: (1 << 32) + 1, within: second, for_: second }), "after");
        assert_eq!(field(Ban { after: 1, within: Duration::ZERO, for_: second }), "within");
        assert_eq!(field(Ban { after: 1, within: second, for_: 2 * crate::MAX_SPAN }), "for");
    }
}
