//! Chooses the number of a limit that learns.
//!
//! Every tick, the learner looks at how many clients the limit denied ([`Learner::watch`]), and then at what the clients
//! need ([`Learner::decide`]). It has no clock and no store.
//!
//! An attacker who wants a larger number has to bring many clients that need more than the present one, and those are
//! denied. So the learner stops while clearly more clients than usual are denied, and the needs of that time are
//! discarded. An attack below that threshold moves the number by at most 10 % an hour, and never beyond the bounds.

use std::time::Duration;

use tollgate::internal::whole_micros;
use tollgate::{HOUR, Timestamp};

use super::needs::{Cover, Needs};
use super::observer::{Commit, Observer};
use super::sketch::{Activity, Input, Sketch, epoch_length, tick};

/// Fewest clients to learn from, whatever the cover is.
const MIN_CLIENTS: u64 = 50;

/// Denied clients that are never a surge, because a few always come together.
const FEW_CLIENTS: u64 = 3;

/// Ticks without a surge after which the number may move again: 15 minutes.
const CALM_TICKS: u32 = 3;

/// Ticks after which a surge is the new normal: one day.
const MAX_SURGE_TICKS: u32 = 288;

/// The usual share of denied clients falls by one part in this many per tick, which halves it in a day.
const DECAY: u32 = 416;

/// A share of 1.
const WHOLE: u64 = 1_000_000;

/// The first bytes of the portable form.
const MAGIC: u64 = u64::from_le_bytes(*b"tollgL01");

/// How a limit learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnSettings {
    /// The smallest number, which is in force at first.
    pub from: u64,
    /// The largest number.
    pub to: u64,
    /// The time to learn from.
    pub over: Duration,
    /// The share of clients that are never denied.
    pub cover: Cover,
}

impl LearnSettings {
    /// Returns how many clients are needed to learn from: enough that one client alone cannot set the number.
    #[must_use]
    pub fn clients_needed(&self) -> u64 {
        WHOLE.div_ceil(WHOLE - u64::from(self.cover.millionths())).max(MIN_CLIENTS)
    }

    /// Returns how long a limit observes before its first move.
    #[must_use]
    pub fn first_observation(&self) -> Duration {
        epoch_length(self.over)
    }
}

/// The state of a limit that learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learner {
    value: u64,
    started: Timestamp,
    moved_at: Timestamp,
    /// The usual share of clients that are denied, in millionths: a recent maximum that halves every day.
    usual: u32,
    surge: Option<Surge>,
    /// The last tick that was watched.
    tick: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Surge {
    since: u32,
    /// Ticks without a surge since then.
    calm: u32,
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evaluation {
    /// What the learner does.
    pub phase: Phase,
    /// The clients in the sample that have returned, from which the number is learned.
    pub clients: u64,
    /// The clients in the sample.
    pub seen: u64,
    /// The number that the share of clients needs, inside the bounds. `None` without clients.
    pub target: Option<u64>,
    /// The numbers before and after a move.
    pub moved: Option<(u64, u64)>,
    /// The clients that were seen and denied in the last minutes.
    pub activity: Activity,
}

/// What a learner does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// There are too few clients or observations for a first move.
    Collecting,
    /// Denials surge, so the number does not move.
    Frozen,
    /// The number follows what clients need.
    Following,
}

impl Learner {
    /// Creates a learner that has seen nothing yet.
    #[must_use]
    pub fn new(settings: &LearnSettings, now: Timestamp) -> Self {
        Self { value: settings.from, started: now, moved_at: now, usual: 0, surge: None, tick: 0 }
    }

    /// Returns the number in force.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value
    }

    /// Returns whether denials surge.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.surge.is_some()
    }

    /// Moves the number into the bounds, which may have changed.
    pub fn clamp(&mut self, settings: &LearnSettings) {
        self.value = self.value.clamp(settings.from, settings.to);
    }

    /// Compares the clients that were denied with the usual number of them, once per tick. Returns what becomes of the
    /// needs since the last tick.
    pub fn watch(&mut self, settings: &LearnSettings, activity: Activity, now: Timestamp) -> Commit {
        let tick = tick(now);
        if tick > self.tick {
            self.tick = tick;
            self.watch_tick(settings, activity, now);
        }
        if self.surge.is_some() { Commit::Discard } else { Commit::Keep }
    }

    fn watch_tick(&mut self, settings: &LearnSettings, Activity { seen, denied }: Activity, now: Timestamp) {
        let share = (denied * WHOLE).checked_div(seen).unwrap_or(0).min(WHOLE) as u32;
        if now < self.started.saturating_add(settings.first_observation()) {
            self.usual = self.usual.max(share);
            return;
        }
        let is_surge = self.is_surge(settings, Activity { seen, denied });
        match &mut self.surge {
            None if is_surge => self.surge = Some(Surge { since: self.tick, calm: 0 }),
            None => self.usual = share.max(self.usual - self.usual / DECAY),
            Some(surge) if is_surge && self.tick - surge.since >= MAX_SURGE_TICKS => {
                (self.surge, self.usual) = (None, share);
            }
            Some(surge) if is_surge => surge.calm = 0,
            Some(surge) => {
                surge.calm += 1;
                if surge.calm >= CALM_TICKS {
                    self.surge = None;
                }
            }
        }
    }

    fn is_surge(&self, settings: &LearnSettings, Activity { seen, denied }: Activity) -> bool {
        let expected = u64::from(self.usual).max(WHOLE - u64::from(settings.cover.millionths()));
        denied > FEW_CLIENTS + 2 * expected * seen / WHOLE
    }

    /// Returns what becomes of the needs since the last tick when the process ends. The tick is not a whole one, so it
    /// changes nothing that is usual.
    pub fn commit_at_end(&self, settings: &LearnSettings, activity: Activity, now: Timestamp) -> Commit {
        let has_begun = now >= self.started.saturating_add(settings.first_observation());
        match self.surge.is_some() || (has_begun && self.is_surge(settings, activity)) {
            true => Commit::Discard,
            false => Commit::Keep,
        }
    }

    /// Moves the number towards what the clients need, if it may move.
    pub fn decide(&mut self, settings: &LearnSettings, needs: &Needs, now: Timestamp) -> Evaluation {
        let clients = needs.clients();
        let target = needs.quantile(settings.cover).map(|need| need.clamp(settings.from, settings.to));
        let has_begun = now >= self.started.saturating_add(settings.first_observation());
        let phase = match target {
            _ if self.surge.is_some() => Phase::Frozen,
            Some(_) if has_begun && clients >= settings.clients_needed() => Phase::Following,
            _ => Phase::Collecting,
        };
        let next = target.filter(|_| phase == Phase::Following).and_then(|target| self.next(target, now));
        let moved = next.map(|next| {
            self.moved_at = now;
            (std::mem::replace(&mut self.value, next), next)
        });
        Evaluation { phase, clients, seen: clients, target, moved, activity: Activity::default() }
    }

    /// Returns the evaluation of a state that is read again. Nothing moves.
    #[must_use]
    pub fn peek(&self, settings: &LearnSettings, sketch: &Sketch) -> Evaluation {
        let mut unmoved = *self;
        let evaluation = unmoved.decide(settings, &sketch.needs(), self.moved_at);
        Evaluation { moved: None, seen: sketch.clients(), ..evaluation }
    }

    pub(super) fn set_value(&mut self, value: u64) {
        self.value = value;
    }

    /// Returns the next number on the way to `target`. It moves at most once an hour and by at most 10 %; a number below
    /// 10 moves by 1, and waits for as many hours as make that 10 % an hour.
    fn next(&self, target: u64, now: Timestamp) -> Option<u64> {
        let value = self.value.max(1);
        // A smaller difference is within the precision of the histogram.
        if target.abs_diff(value) < (value / 50).max(1) {
            return None;
        }
        let (step, hours) = if value >= 10 { (value / 10, 1) } else { (1, 10u32.div_ceil(value as u32)) };
        if now < self.moved_at.saturating_add(HOUR * hours) {
            return None;
        }
        Some(target.clamp(value - step, value + step))
    }
}

/// The state of a limit that learns, in its portable form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LearnedState {
    /// The number, and when it may move.
    pub learner: Learner,
    /// The clients.
    pub sketch: Sketch,
    /// The seed of the hashes of keys on a shared store.
    pub seed: u64,
}

impl LearnedState {
    /// Returns the portable form. It can be read for a limit that measures the same as the observer.
    #[must_use]
    pub fn encode(&self, observer: &Observer) -> Vec<u8> {
        let Learner { value, started, moved_at, usual, surge, tick } = self.learner;
        let mut out = Vec::new();
        let words = [
            MAGIC,
            observer.fingerprint(),
            self.seed,
            value,
            started.as_micros(),
            moved_at.as_micros(),
            u64::from(usual),
        ];
        words.iter().for_each(|word| out.extend(word.to_le_bytes()));
        let Surge { since, calm } = surge.unwrap_or(Surge { since: u32::MAX, calm: 0 });
        [since, calm, tick].iter().for_each(|number| out.extend(number.to_le_bytes()));
        self.sketch.encode(&mut out);
        out
    }

    /// Reads the portable form. Returns `None` if the bytes are damaged, or belong to a limit that measures something
    /// else than the observer.
    #[must_use]
    pub fn decode(bytes: &[u8], observer: &Observer) -> Option<Self> {
        let mut input = Input(bytes);
        if (input.u64()?, input.u64()?) != (MAGIC, observer.fingerprint()) {
            return None;
        }
        let (seed, value) = (input.u64()?, input.u64()?);
        let (started, moved_at) = (Timestamp::from_micros(input.u64()?), Timestamp::from_micros(input.u64()?));
        let usual = u32::try_from(input.u64()?).ok().filter(|usual| u64::from(*usual) <= WHOLE)?;
        let (since, calm, tick) = (input.u32()?, input.u32()?, input.u32()?);
        let surge = (since != u32::MAX).then_some(Surge { since, calm });
        if surge.is_some_and(|surge| surge.since > tick) {
            return None;
        }
        let sketch = Sketch::decode(&mut input)?;
        let learner = Learner { value, started, moved_at, usual, surge, tick };
        input.0.is_empty().then_some(Self { learner, sketch, seed })
    }
}

impl Observer {
    /// Returns a number that identifies what is measured, in every release.
    pub(super) fn fingerprint(&self) -> u64 {
        let (measure, over) = self.measured();
        let numbers = measure.numbers().into_iter().chain([whole_micros(over)]);
        // FNV-1a.
        let add = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        numbers.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, add)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate::{DAY, MINUTE};

    use super::*;
    use crate::demand::Measure;
    use crate::demand::sketch::TICK;

    const START: Timestamp = Timestamp::from_secs(1_700_000_000);

    fn settings() -> LearnSettings {
        LearnSettings { from: 50, to: 400, over: DAY * 7, cover: Cover::new(0.999).unwrap() }
    }

    fn needs(each: u64, clients: usize) -> Needs {
        std::iter::repeat_n(each, clients).collect()
    }

    /// A learner that has observed calm traffic for a day.
    fn started() -> (Learner, Timestamp) {
        let mut learner = Learner::new(&settings(), START);
        let mut now = START;
        for _ in 0..=288 {
            learner.watch(&settings(), Activity { seen: 2000, denied: 2 }, now);
            now = now.saturating_add(TICK);
        }
        (learner, now)
    }

    proptest! {
        /// Whatever the clients need, and however often the number is evaluated.
        #[test]
        fn number_moves_by_ten_percent_an_hour_inside_the_bounds(
            from in 1u64..500, wide in 0u64..2000, steps in prop::collection::vec((0u64..5000, 1u64..5400), 1..200),
        ) {
            let settings = LearnSettings { from, to: from + wide, ..settings() };
            let (mut learner, mut now) = (Learner::new(&settings, START), START.saturating_add(DAY * 2));
            let mut history = vec![(START, learner.value())];
            for (need, seconds) in steps {
                now = now.saturating_add(Duration::from_secs(seconds));
                learner.decide(&settings, &needs(need, 1000), now);
                let value = learner.value();
                prop_assert!((settings.from..=settings.to).contains(&value));
                history.push((now, value));
                // Compared with every number that was in force within the last hour.
                let an_hour_ago = now.saturating_sub(HOUR - Duration::from_micros(1));
                let after: Vec<u64> = history.iter().filter(|(at, _)| *at >= an_hour_ago).map(|(_, value)| *value).collect();
                for other in after {
                    let most = if other < 10 { 1 } else { other.max(value) / 10 };
                    prop_assert!(value.abs_diff(other) <= most, "{} to {} within an hour", other, value);
                }
            }
        }

        #[test]
        fn state_survives_its_portable_form(value in 1u64..1000, usual in 0u32..1_000_000, since in prop::option::of(0u32..9)) {
            let observer = Observer::new(Measure::fixed_window(MINUTE), DAY * 7, 7);
            let surge = since.map(|since| Surge { since, calm: 1 });
            let learner = Learner { value, started: START, moved_at: START, usual, surge, tick: 9 };
            let state = LearnedState { learner, sketch: observer.sketch(), seed: 7 };
            let bytes = state.encode(&observer);
            prop_assert_eq!(LearnedState::decode(&bytes, &observer), Some(state));
            prop_assert_eq!(LearnedState::decode(&bytes[..bytes.len() - 1], &observer), None);
            let another = Observer::new(Measure::fixed_window(MINUTE * 2), DAY * 7, 7);
            prop_assert_eq!(LearnedState::decode(&bytes, &another), None);
        }
    }

    #[test]
    fn first_move_needs_a_seventh_of_the_time_and_enough_clients() {
        let settings = settings();
        let mut learner = Learner::new(&settings, START);
        let soon = START.saturating_add(DAY - MINUTE);
        assert_eq!(learner.decide(&settings, &needs(100, 5000), soon).phase, Phase::Collecting);
        let later = START.saturating_add(DAY);
        assert_eq!(learner.decide(&settings, &needs(100, 999), later).phase, Phase::Collecting);
        let evaluation = learner.decide(&settings, &needs(100, 1000), later);
        assert_eq!(evaluation.moved, Some((50, 55)));
        assert_eq!(evaluation.target, Some(100));
    }

    #[test]
    fn one_client_cannot_set_the_number() {
        let settings = settings();
        let mut all = needs(60, settings.clients_needed() as usize - 1);
        all.add(1_000_000);
        let evaluation = Learner::new(&settings, START).decide(&settings, &all, START.saturating_add(DAY));
        assert_eq!(evaluation.target, Some(60));
    }

    #[test]
    fn surge_of_denials_freezes_until_it_is_over() {
        let (mut learner, mut now) = started();
        let mut watch = |denied| {
            now = now.saturating_add(TICK);
            learner.watch(&settings(), Activity { seen: 2000, denied }, now)
        };
        assert_eq!(watch(4), Commit::Keep);
        assert_eq!(watch(500), Commit::Discard);
        assert_eq!(watch(2), Commit::Discard);
        assert_eq!(watch(2), Commit::Discard);
        assert_eq!(watch(2), Commit::Keep);
        let frozen = {
            watch(500);
            learner.decide(&settings(), &needs(100, 2000), now.saturating_add(DAY))
        };
        assert_eq!((frozen.phase, frozen.moved, frozen.target), (Phase::Frozen, None, Some(100)));
    }

    #[test]
    fn surge_of_a_day_is_the_new_normal() {
        let (mut learner, mut now) = started();
        let mut discarded = 0;
        loop {
            now = now.saturating_add(TICK);
            match learner.watch(&settings(), Activity { seen: 2000, denied: 500 }, now) {
                Commit::Discard => discarded += 1,
                Commit::Keep => break,
            }
        }
        assert_eq!(discarded, MAX_SURGE_TICKS);
    }

    #[test]
    fn growth_over_hours_is_no_surge() {
        let (mut learner, mut now) = started();
        for denied in 2..400 {
            now = now.saturating_add(TICK);
            assert_eq!(learner.watch(&settings(), Activity { seen: 2000, denied }, now), Commit::Keep, "{denied}");
        }
    }

    #[test]
    fn several_nodes_watch_a_tick_once() {
        let (mut learner, now) = started();
        let now = now.saturating_add(TICK);
        learner.watch(&settings(), Activity { seen: 2000, denied: 500 }, now);
        let once = learner;
        learner.watch(&settings(), Activity { seen: 2000, denied: 0 }, now);
        assert_eq!(learner, once);
    }
}
