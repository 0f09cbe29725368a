//! Counts of decisions.

use tollgate::Timestamp;
use tollgate_http::Refusal;
use tollgate_rules::Outcome;

use super::distinct::DistinctKeys;

const MINUTE_MICROS: u64 = 60_000_000;

/// The decisions about all requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) admitted: u64,
    /// Requests that a limit denied.
    pub(super) denied: u64,
    /// Requests that were refused for another reason: blocked, without a key, or ambiguous.
    pub(super) refused: u64,
    /// Admitted requests that a queue delayed.
    pub(super) delayed: u64,
}

impl Totals {
    pub(super) fn add(&mut self, outcome: &Outcome) {
        match outcome.refusal() {
            None => {
                self.admitted += 1;
                self.delayed += u64::from(!outcome.delay().is_zero());
            }
            Some(Refusal::Limited | Refusal::Pending | Refusal::Banned { .. }) => self.denied += 1,
            Some(_) => self.refused += 1,
        }
    }
}

/// The decisions of one limit.
pub(super) struct LimitTally {
    /// Requests that the limit counted or refused.
    pub(super) offered: u64,
    /// Those of them that all limits admitted; of a shadow limit, those that it would admit.
    pub(super) admitted: u64,
    pub(super) denied: u64,
    /// Requests that another limit denied.
    pub(super) denied_by_others: u64,
    /// Requests that the limit refused regardless of the remaining quota.
    pub(super) refused: u64,
    pub(super) keys: DistinctKeys,
    pub(super) denials: Option<Denials>,
}

/// When a limit denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Denials {
    pub(super) first: Timestamp,
    pub(super) last: Timestamp,
    /// The start of the minute with the most denials, and their number.
    pub(super) peak: (Timestamp, u64),
    /// The current minute, and its denials.
    current: (Timestamp, u64),
}

impl LimitTally {
    pub(super) fn new(keys: DistinctKeys) -> Self {
        Self { offered: 0, admitted: 0, denied: 0, denied_by_others: 0, refused: 0, keys, denials: None }
    }

    pub(super) fn pass(&mut self, is_admitted: bool) {
        self.offered += 1;
        self.admitted += u64::from(is_admitted);
        self.denied_by_others += u64::from(!is_admitted);
    }

    pub(super) fn refuse(&mut self) {
        self.offered += 1;
        self.refused += 1;
    }

    pub(super) fn deny(&mut self, time: Timestamp) {
        self.offered += 1;
        self.denied += 1;
        let minute = Timestamp::from_micros(time.as_micros() / MINUTE_MICROS * MINUTE_MICROS);
        let new = Denials { first: time, last: time, peak: (minute, 0), current: (minute, 0) };
        let denials = self.denials.get_or_insert(new);
        // Time goes back in a log whose parts are in the wrong order.
        (denials.first, denials.last) = (denials.first.min(time), denials.last.max(time));
        if denials.current.0 != minute {
            denials.current = (minute, 0);
        }
        denials.current.1 += 1;
        if denials.current.1 > denials.peak.1 {
            denials.peak = denials.current;
        }
    }
}

/// The decisions about one key of a limit, since it was first denied.
#[derive(Clone, Debug)]
pub(super) struct KeyTally {
    pub(super) rule: u32,
    pub(super) key: String,
    pub(super) offered: u64,
    pub(super) first: Timestamp,
    pub(super) last: Timestamp,
}

impl KeyTally {
    pub(super) fn new(rule: u32, key: String, first: Timestamp) -> Self {
        Self { rule, key, offered: 0, first, last: first }
    }

    pub(super) fn deny(&mut self, time: Timestamp) {
        self.offered += 1;
        (self.first, self.last) = (self.first.min(time), self.last.max(time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minute_with_the_most_denials_is_the_peak() {
        let mut tally = LimitTally::new(DistinctKeys::one_of(1));
        for second in [10, 70, 80, 90, 130, 131] {
            tally.deny(Timestamp::from_secs(second));
        }
        let denials = tally.denials.unwrap();
        assert_eq!((denials.first, denials.last), (Timestamp::from_secs(10), Timestamp::from_secs(131)));
        assert_eq!(denials.peak, (Timestamp::from_secs(60), 3));
    }
}
