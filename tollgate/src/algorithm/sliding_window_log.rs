//! Sliding window log: exact at every instant, because every admitted request is remembered for a window.

mod long;
mod short;

use std::time::Duration;

use super::packing::bits_for;
use super::{Algorithm, Cells, Charge, Compiled, Rules, Step, allowed, checked, denied, never_fits};
use crate::error::InvalidLimit;
use crate::units::MINUTE;

/// At most so many units in any window of time, at every instant.
///
/// It remembers each admitted request, some 4 to 6 bytes each, until it is a window old. By default 10 a
/// minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowLog {
    pub(super) limit: u64,
    window: Duration,
    count: Counted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    Admitted,
    All,
}

impl Default for SlidingWindowLog {
    fn default() -> Self {
        Self::new(10, MINUTE)
    }
}

impl SlidingWindowLog {
    /// Counts the requests that were let through.
    #[must_use]
    pub const fn new(limit: u64, window: Duration) -> Self {
        Self {
            limit,
            window,
            count: Counted::Admitted,
        }
    }

    /// Counts denied requests too: who keeps knocking stays out.
    #[must_use]
    pub const fn count_denied(self) -> Self {
        Self {
            count: Counted::All,
            ..self
        }
    }

    pub(super) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        let limit = checked::quota("limit", self.limit)?;
        let window = checked::span("window", self.window)?;
        Ok(Compiled::Log(Log::new(limit, window, self.count)))
    }
}

impl From<SlidingWindowLog> for Algorithm {
    fn from(spec: SlidingWindowLog) -> Self {
        Self::SlidingWindowLog(spec)
    }
}

/// Requests of the same microsecond are one entry. An entry's time is kept by its lowest bits, enough of them
/// to tell it within a window of the newest; its units by the bits of the limit.
///
/// A clock that steps back is held at the newest entry: entries wait for it, for a window at most. A longer
/// step back makes all of the log one entry of that moment, so that nothing is minted and nobody is locked out
/// for longer than a window.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    limit: u64,
    window: u64,
    counted: Counted,
    time_bits: u32,
    unit_bits: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    at: u64,
    units: u64,
}

/// A log of at most this many entries is kept whole in the words of its key.
const SHORT: u64 = 16;

/// What to change: forget the oldest entries, then perhaps all the others for one, then add one.
pub(crate) enum Edit {
    Log {
        forget: u64,
        collapse: Option<u64>,
        add: Option<(u64, u64)>,
    },
    GiveBack {
        at: u64,
        units: u64,
    },
}

/// A log to read: entries from the oldest to the newest.
trait Entries {
    /// The latest moment the log knows of; `None` when it is empty.
    fn newest(&self) -> Option<u64>;
    /// The moment of the newest entry that has any units.
    fn last_charge(&self) -> Option<u64>;
    /// All units of all entries, those too old to count included.
    fn units(&self) -> u64;
    /// Visits entries from the oldest on, until told to stop.
    fn visit(&self, visitor: impl FnMut(Entry) -> bool);
}

impl Log {
    fn new(limit: u64, window: u64, counted: Counted) -> Self {
        Self {
            limit,
            window,
            counted,
            time_bits: bits_for(window),
            unit_bits: bits_for(limit),
        }
    }

    fn entry_bits(&self) -> u32 {
        self.time_bits + self.unit_bits
    }

    fn is_short(&self) -> bool {
        self.limit <= SHORT
    }

    /// The moment whose lowest bits are these, at or before `newest` and within a window of it.
    fn moment(&self, newest: u64, low: u64) -> u64 {
        let mask = (1 << self.time_bits) - 1;
        newest.saturating_sub(newest.wrapping_sub(low) & mask)
    }

    fn judge(&self, log: &impl Entries, now: u64, cost: u64) -> Step<Edit> {
        let newest = log.newest().unwrap_or(0);
        if newest > now.saturating_add(self.window) {
            return self.judge_collapsed(log.units().min(self.limit), now, cost);
        }
        let held = newest.max(now);
        let (mut forget, mut gone) = (0, 0);
        log.visit(|entry| {
            let old = entry.at + self.window <= held;
            if old {
                (forget, gone) = (forget + 1, gone + entry.units);
            }
            old
        });
        let units = log.units().saturating_sub(gone);
        let remaining = self.limit.saturating_sub(units);
        let last = if units == 0 { None } else { log.last_charge() };
        let reset_after = last.map_or(0, |at| (at + self.window).saturating_sub(now));
        if cost == 0 {
            return Step {
                verdict: allowed(remaining, reset_after),
                edit: None,
            };
        }
        if cost > self.limit {
            return Step {
                verdict: never_fits(remaining, reset_after),
                edit: None,
            };
        }
        let until_added_is_gone = held + self.window - now;
        if cost <= remaining {
            let edit = Edit::Log {
                forget,
                collapse: None,
                add: Some((held, cost)),
            };
            return Step {
                verdict: allowed(remaining - cost, until_added_is_gone),
                edit: Some(edit),
            };
        }
        let (total, added) = match self.counted {
            Counted::Admitted => (units, 0),
            Counted::All => (units + cost, cost),
        };
        let (mut seen, mut left, mut trim) = (0, total, 0);
        let mut retry_after = None;
        log.visit(|entry| {
            seen += 1;
            if seen <= forget {
                return true;
            }
            left -= entry.units.min(left);
            // Of a log that is full beyond its limit, the oldest entries can never matter again.
            trim += u64::from(added > 0 && left >= self.limit);
            if left + cost <= self.limit {
                retry_after = Some((entry.at + self.window).saturating_sub(now));
            }
            retry_after.is_none()
        });
        let retry_after = retry_after.unwrap_or(until_added_is_gone);
        if added == 0 {
            return Step {
                verdict: denied(retry_after, remaining, reset_after),
                edit: None,
            };
        }
        let edit = Edit::Log {
            forget: forget + trim,
            collapse: None,
            add: Some((held, cost)),
        };
        let remaining = self.limit.saturating_sub(total);
        Step {
            verdict: denied(retry_after, remaining, until_added_is_gone),
            edit: Some(edit),
        }
    }

    /// After a long step back, all that was spent was spent just now.
    fn judge_collapsed(&self, units: u64, now: u64, cost: u64) -> Step<Edit> {
        let remaining = self.limit - units;
        let adds = cost > 0 && cost <= self.limit && (cost <= remaining || self.counted == Counted::All);
        let verdict = if cost > self.limit {
            never_fits(remaining, self.window)
        } else if cost <= remaining {
            allowed(remaining - cost, self.window)
        } else {
            denied(self.window, if adds { 0 } else { remaining }, self.window)
        };
        let edit = Edit::Log {
            forget: 0,
            collapse: Some(now),
            add: adds.then_some((now, cost)),
        };
        Step {
            verdict,
            edit: Some(edit),
        }
    }
}

impl Rules for Log {
    type Edit = Edit;

    fn words(&self) -> usize {
        if self.is_short() {
            self.short_words()
        } else {
            long::WORDS
        }
    }

    fn must_lock(&self) -> bool {
        // A long log is a list of chunks that others may be given meanwhile: it is only read when it is held.
        !self.is_short()
    }

    fn decide(&self, cells: &impl Cells, now: u64, cost: u64) -> Step<Edit> {
        if self.is_short() {
            self.judge(&self.read_short(cells), now, cost)
        } else {
            self.judge(&self.read_long(cells), now, cost)
        }
    }

    fn refund(&self, cells: &impl Cells, now: u64, charge: Charge) -> Option<Edit> {
        let _ = (cells, now);
        (charge.cost > 0).then_some(Edit::GiveBack {
            at: charge.at,
            units: charge.cost,
        })
    }

    fn apply(&self, cells: &impl Cells, edit: Edit) {
        if self.is_short() {
            self.apply_short(cells, edit)
        } else {
            self.apply_long(cells, edit)
        }
    }

    fn is_idle(&self, cells: &impl Cells, now: u64) -> bool {
        let newest = if self.is_short() {
            self.read_short(cells).newest()
        } else {
            self.read_long(cells).newest()
        };
        newest.is_none_or(|newest| newest + self.window <= now)
    }

    fn inherit(&self, cells: &impl Cells, from: &impl Cells) {
        if self.is_short() {
            (0..self.words()).for_each(|index| cells.set(index, from.get(index)));
        } else {
            self.inherit_long(cells, from);
        }
    }

    fn clear(&self, cells: &impl Cells) {
        if !self.is_short() {
            self.release_long(cells);
        }
        (0..self.words()).for_each(|index| cells.set(index, 0));
    }
}
