//! The order of the times of a log.
//!
//! Servers write a line when a request ends, and some date it with its start, so lines are often slightly out of order.
//! Such a line gets the newest time so far: decisions need a time that does not go back. A line that is far from its
//! neighbours is dated like them as well, because one wrong time must not move all the lines after it. If many lines in
//! a row agree, time has jumped, and their time is used.

/// Lines that are older than the newest by up to this are out of order; others are misdated.
const MAX_DISORDER_MICROS: u64 = 10_000_000;
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
    disorder: Disorder,
}

/// How far the lines of a file are out of order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Disorder {
    /// Lines that are up to ten seconds older than one before them.
    pub(crate) out_of_order: u64,
    /// Lines that are further from their neighbours: older by more than ten seconds, or newer by more than a day.
    pub(crate) misdated: u64,
    /// The most microseconds by which a line is older than one before it.
    pub(crate) largest_step_back_micros: u64,
    /// Jumps of the time, back by more than ten seconds or ahead by more than a day, that many lines agree on.
    pub(crate) jumps: u64,
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
            return micros;
        }
        self.disorder.largest_step_back_micros = self.disorder.largest_step_back_micros.max(back);
        if (1..=MAX_DISORDER_MICROS).contains(&back) {
            self.disorder.out_of_order += 1;
            self.in_a_row = 0;
            return newest;
        }
        self.disorder.misdated += 1;
        self.in_a_row += 1;
        if self.in_a_row < LINES_THAT_AGREE {
            return newest;
        }
        self.in_a_row = 0;
        self.disorder.jumps += 1;
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
        let (placed, disorder) = placed([100 * SECOND, 95 * SECOND, 101 * SECOND, 91 * SECOND]);
        assert_eq!(placed, [100 * SECOND, 100 * SECOND, 101 * SECOND, 101 * SECOND]);
        assert_eq!((disorder.out_of_order, disorder.misdated), (2, 0));
        assert_eq!(disorder.largest_step_back_micros, 10 * SECOND);
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
}
