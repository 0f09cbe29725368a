//! The order of the times of a log.
//!
//! Servers write a line when a request ends, and some date it with its start, so lines are often slightly out of order.
//! Such a line gets the newest time so far: decisions need a time that does not go back. A line that is far from its
//! neighbours is dated like them as well, because one wrong time must not move all the lines after it. If many lines in
//! a row agree, time has jumped, and their time is used. Time that jumps back is a sign of parts in the wrong order, such
//! as those of `cat access.log access.log.1`, and is counted line by line.

/// Lines that are older than the newest by up to this are out of order; others are misdated. Logs whose seconds were
/// removed or blurred are in order by the minute.
pub(super) const MAX_DISORDER_MICROS: u64 = 60_000_000;
/// Longer gaps are either pauses of the server or wrong times.
const MAX_GAP_MICROS: u64 = 86_400_000_000;
/// The number of lines in a row that have to agree on another time.
const LINES_THAT_AGREE: u32 = 16;

/// Dates the lines of one file.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    newest: Option<u64>,
    /// Misdated lines in a row.
    in_a_row: u32,
    /// The newest time before a jump back, or 0.
    jumped_back_from: u64,
    disorder: Disorder,
}

/// How far the lines of a file are out of order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Disorder {
    /// Lines that are up to a minute older than one before them.
    pub out_of_order: u64,
    /// Lines that are further from their neighbours: older by more than a minute, or newer by more than a day.
    pub misdated: u64,
    /// The most microseconds by which a line is older than one before it.
    pub largest_step_back_micros: u64,
    /// Jumps of the time, back by more than a minute or ahead by more than a day, that many lines agree on.
    pub jumps: u64,
    /// Lines that are older than one before them by more than a minute.
    pub went_back: u64,
}

impl Order {
    /// Returns the time that a line with the time `micros` gets.
    pub(super) fn place(&mut self, micros: u64) -> u64 {
        let Some(newest) = self.newest else {
            self.newest = Some(micros);
            return micros;
        };
        let back = newest.saturating_sub(micros);
        if back == 0 && micros - newest <= MAX_GAP_MICROS {
            self.newest = Some(micros);
            self.in_a_row = 0;
            self.disorder.went_back += u64::from(micros < self.jumped_back_from);
            return micros;
        }
        self.disorder.largest_step_back_micros = self.disorder.largest_step_back_micros.max(back);
        if (1..=MAX_DISORDER_MICROS).contains(&back) {
            self.disorder.out_of_order += 1;
            self.disorder.went_back += u64::from(micros < self.jumped_back_from);
            self.in_a_row = 0;
            return newest;
        }
        self.disorder.misdated += 1;
        self.disorder.went_back += u64::from(back > 0 || micros < self.jumped_back_from);
        self.in_a_row += 1;
        if self.in_a_row < LINES_THAT_AGREE {
            return newest;
        }
        self.in_a_row = 0;
        self.disorder.jumps += 1;
        if back > 0 {
            self.jumped_back_from = self.jumped_back_from.max(newest);
        }
        self.newest = Some(micros);
        micros
    }

    pub(super) fn disorder(&self) -> Disorder {
        self.disorder
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;
    const DAY: u64 = 86_400 * SECOND;

    fn placed(times: impl IntoIterator<Item = u64>) -> (Vec<u64>, Disorder) {
        let mut order = Order::default();
        let placed = times.into_iter().map(|time| order.place(time)).collect();
        (placed, order.disorder())
    }

    #[test]
    fn slightly_older_lines_get_the_newest_time() {
        let (placed, disorder) = placed([100 * SECOND, 95 * SECOND, 101 * SECOND, 41 * SECOND]);
        assert_eq!(placed, [100 * SECOND, 100 * SECOND, 101 * SECOND, 101 * SECOND]);
        assert_eq!((disorder.out_of_order, disorder.misdated), (2, 0));
        assert_eq!(disorder.largest_step_back_micros, 60 * SECOND);
    }

    #[test]
    fn one_wrong_time_moves_no_other_line() {
        let (placed, disorder) = placed([DAY, DAY * 365, DAY + SECOND, 0, DAY + 2 * SECOND]);
        assert_eq!(placed, [DAY, DAY, DAY + SECOND, DAY + SECOND, DAY + 2 * SECOND]);
        assert_eq!((disorder.misdated, disorder.jumps), (2, 0));
    }

    #[test]
    fn time_jumps_where_many_lines_agree() {
        for start in [DAY * 9, DAY] {
            let (placed, disorder) = placed([DAY * 5].into_iter().chain((0..20).map(|line| start + line)));
            assert_eq!(placed.last(), Some(&(start + 19)));
            assert_eq!((disorder.misdated, disorder.jumps), (16, 1));
        }
    }

    #[test]
    fn lines_behind_a_jump_back_are_counted_until_time_has_caught_up() {
        let part = |from: u64| (0..100).map(move |line| from + line * SECOND);
        assert_eq!(placed(part(DAY).chain(part(DAY + 99 * SECOND))).1, Disorder::default());
        let (_, disorder) = placed(part(DAY + 100 * SECOND).chain(part(DAY)).chain(part(DAY + 200 * SECOND)));
        assert_eq!((disorder.went_back, disorder.misdated, disorder.jumps), (100, 16, 1));
        assert_eq!(disorder.largest_step_back_micros, 199 * SECOND);
        // Single wrong times are counted too, those ahead are not.
        assert_eq!(placed([DAY, 0, DAY + 1, DAY * 9, DAY + 2]).1.went_back, 1);
    }
}
