//! A limit that learns: its observer, its learner, and what was learned before or by other nodes.

use std::sync::Arc;

use tollgate::Timestamp;

use super::learner::{Evaluation, LearnSettings, LearnedState, Learner};
use super::meter::Measure;
use super::observer::Observer;
use super::sketch::Sketch;

/// A limit that learns.
#[derive(Clone, Debug)]
pub struct Learning {
    settings: LearnSettings,
    observer: Arc<Observer>,
    /// `None` before the first evaluation.
    learner: Option<Learner>,
    /// The clients of earlier runs and of other nodes, and those that this process has observed.
    sketch: Sketch,
    last: Option<Evaluation>,
}

impl Learning {
    /// Creates a limit that has learned nothing. `seed` has to be secret: a client that knows it can choose a key that
    /// is in the sample.
    #[must_use]
    pub fn new(settings: LearnSettings, measure: Measure, seed: u64) -> Self {
        let observer = Arc::new(Observer::new(measure, settings.over, seed));
        Self { settings, observer, learner: None, sketch: Sketch::default(), last: None }
    }

    /// Returns the settings.
    #[must_use]
    pub fn settings(&self) -> &LearnSettings {
        &self.settings
    }

    /// Returns the observer of the demand.
    #[must_use]
    pub fn observer(&self) -> &Arc<Observer> {
        &self.observer
    }

    /// Returns the number that was learned, or the smallest one.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.learner.map_or(self.settings.from, |learner| learner.value())
    }

    /// Returns the result of the last evaluation.
    #[must_use]
    pub fn last(&self) -> Option<&Evaluation> {
        self.last.as_ref()
    }

    /// Changes the settings if what was learned is still valid for them: another measure or another time needs other
    /// observations. The number moves into the new bounds at once. Returns whether the settings were changed.
    pub fn change(&mut self, settings: LearnSettings, measure: Measure) -> bool {
        if !self.observer.is_of(measure, settings.over) {
            return false;
        }
        self.change_settings(settings);
        true
    }

    /// Changes the bounds and the cover. The number moves into the new bounds at once.
    pub fn change_settings(&mut self, settings: LearnSettings) {
        self.settings = LearnSettings { over: self.settings.over, ..settings };
        if let Some(learner) = &mut self.learner {
            learner.clamp(&self.settings);
        }
    }

    /// Returns a number that identifies what is measured and for how long, the same on all nodes.
    #[must_use]
    pub fn measure_id(&self) -> u64 {
        self.observer.fingerprint()
    }

    /// Continues with a state that was [encoded](Self::encode): the number is its number, and its clients are added.
    /// Returns whether the state was usable.
    pub fn restore(&mut self, state: &[u8]) -> bool {
        let Some(LearnedState { mut learner, sketch, seed }) = LearnedState::decode(state, &self.observer) else {
            return false;
        };
        if self.observer.adopt_seed(seed) {
            self.sketch = Sketch::default();
        }
        learner.clamp(&self.settings);
        self.learner = Some(learner);
        self.sketch.merge(&sketch);
        if self.last.is_none() {
            self.last = Some(learner.peek(&self.settings, &self.sketch));
        }
        true
    }

    /// Returns the state in a portable form. `None` before the first evaluation.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let state = LearnedState { learner: self.learner?, sketch: self.sketch.clone(), seed: self.observer.seed() };
        Some(state.encode(&self.observer))
    }

    /// Evaluates the demand, and moves the number if it may move. Call it once per [`TICK`](super::TICK).
    pub fn evaluate(&mut self, now: Timestamp) -> Evaluation {
        let Self { settings, observer, learner, sketch, last } = self;
        let learner = learner.get_or_insert_with(|| Learner::new(settings, now));
        sketch.merge(&observer.sketch());
        let activity = sketch.activity(now);
        let commit = learner.watch(settings, activity, now);
        observer.commit(now, commit);
        sketch.merge(&observer.sketch());
        sketch.lower_level();
        observer.follow_level(sketch);
        let evaluation =
            Evaluation { activity, seen: sketch.clients(), ..learner.decide(settings, &sketch.needs(), now) };
        *last = Some(evaluation);
        evaluation
    }

    /// Adds what was observed since the last evaluation, before the state is [encoded](Self::encode) for the last time.
    /// Nothing moves. If denials surge, the observations are discarded.
    pub fn end(&mut self, now: Timestamp) {
        let Self { settings, observer, learner, sketch, .. } = self;
        let learner = learner.get_or_insert_with(|| Learner::new(settings, now));
        sketch.merge(&observer.sketch());
        observer.commit(now, learner.commit_at_end(settings, sketch.activity(now), now));
        sketch.merge(&observer.sketch());
    }

    /// Takes back a move that could not be shared with the other nodes.
    pub fn take_back(&mut self, evaluation: &Evaluation) {
        if let (Some((before, _)), Some(learner)) = (evaluation.moved, &mut self.learner) {
            learner.set_value(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate::{HOUR, MINUTE};

    use super::*;
    use crate::demand::observer::Observation;
    use crate::demand::sketch::TICK;
    use crate::demand::{Cover, Phase};

    const START: Timestamp = Timestamp::from_secs(1_700_000_000);

    fn learning(seed: u64) -> Learning {
        let settings = LearnSettings { from: 50, to: 400, over: HOUR * 7, cover: Cover::new(0.999).unwrap() };
        Learning::new(settings, Measure::fixed_window(MINUTE), seed)
    }

    /// More than a thousand clients that each need `need` units, for `ticks`.
    fn observe(learning: &mut Learning, from: Timestamp, ticks: u32, need: u64) -> Timestamp {
        let mut now = from;
        for _ in 0..ticks {
            for client in 0..1100u64 {
                let client = client.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let is_denied = need > learning.value() && client % 500 == 0;
                let seen = Observation { client, cost: need, at: now, is_denied, need_on_store: 0 };
                learning.observer().observe(seen);
            }
            learning.evaluate(now);
            now = now.saturating_add(TICK);
        }
        now
    }

    #[test]
    fn number_follows_the_demand_and_survives_a_restart() {
        let mut first = learning(1);
        let now = observe(&mut first, START, 12 + 12 * 3, 80);
        assert_eq!(first.value(), 66, "50, 55, 60, 66");
        let mut second = learning(2);
        assert_eq!(second.value(), 50);
        assert!(second.restore(&first.encode().unwrap()));
        assert_eq!(second.value(), 66);
        assert_eq!(second.last().map(|last| (last.clients, last.target)), Some((1100, Some(80))));
        observe(&mut second, now, 12 * 3, 80);
        assert_eq!(second.value(), 80, "72, 79, 80");
    }

    #[test]
    fn observations_before_the_first_evaluation_survive_a_restart() {
        let mut first = learning(1);
        let seen = |client: u64, is_denied| Observation {
            client: client.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            cost: 80,
            at: START,
            is_denied,
            need_on_store: 0,
        };
        (0..100).for_each(|client| first.observer().observe(seen(client, true)));
        assert_eq!(first.encode(), None);
        first.end(START);
        let mut second = learning(2);
        assert!(second.restore(&first.encode().unwrap()));
        assert_eq!(second.last().map(|last| (last.clients, last.target)), Some((0, None)), "nobody has returned yet");
        assert_eq!(second.last().map(|last| last.seen), Some(100));
        let later = START.saturating_add(HOUR);
        (0..100).for_each(|client| {
            second.observer().observe(Observation { cost: 60, at: later, ..seen(client, false) });
        });
        let evaluation = second.evaluate(later);
        assert_eq!((evaluation.clients, evaluation.target), (100, Some(80)));

        // Once a limit follows, a surge that begins with the end leaves nothing.
        let mut learning = learning(1);
        let now = observe(&mut learning, START, 12 + 12, 30);
        let clients = learning.last().map(|last| (last.clients, last.target));
        let surge = |client| Observation { cost: 300, at: now, ..seen(client, true) };
        (0..1100).for_each(|client| learning.observer().observe(surge(client)));
        learning.end(now);
        let mut restarted = self::learning(2);
        assert!(restarted.restore(&learning.encode().unwrap()));
        assert_eq!(restarted.last().map(|last| (last.clients, last.target)), clients);
    }

    #[test]
    fn bounds_that_change_move_the_number_and_another_measure_starts_again() {
        let mut learning = learning(1);
        observe(&mut learning, START, 12 + 12 * 3, 80);
        let tighter = LearnSettings { from: 10, to: 60, ..*learning.settings() };
        assert!(learning.change(tighter, Measure::fixed_window(MINUTE)));
        assert_eq!(learning.value(), 60);
        assert!(!learning.change(tighter, Measure::fixed_window(MINUTE * 2)));
        assert!(!learning.change(LearnSettings { over: HOUR, ..tighter }, Measure::fixed_window(MINUTE)));
    }

    #[test]
    fn move_that_cannot_be_shared_is_taken_back() {
        let mut learning = learning(1);
        let now = observe(&mut learning, START, 12, 80);
        let evaluation = learning.evaluate(now.saturating_add(HOUR));
        assert_eq!((evaluation.phase, evaluation.moved), (Phase::Following, Some((50, 55))));
        learning.take_back(&evaluation);
        assert_eq!(learning.value(), 50);
    }

    #[test]
    fn damaged_state_is_not_used() {
        let mut learning = learning(1);
        assert!(!learning.restore(b""));
        assert!(!learning.restore(&[7; 100]));
        assert_eq!(learning.value(), 50);
    }
}
