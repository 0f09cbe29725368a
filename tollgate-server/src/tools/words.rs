//! Numbers, counts and times as people read them.

use std::fmt::{self, Write};

/// A number with commas between thousands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouped(pub(crate) u64);

impl fmt::Display for Grouped {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                out.write_char(',')?;
            }
            out.write_char(digit)?;
        }
        Ok(())
    }
}

/// A number of seconds, in its two largest units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span(pub(crate) u64);

impl fmt::Display for Span {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, hours, minutes, seconds) = (self.0 / 86_400, self.0 / 3600 % 24, self.0 / 60 % 60, self.0 % 60);
        match (days, hours, minutes) {
            (0, 0, 0) => write!(out, "{seconds} s"),
            (0, 0, _) => write!(out, "{minutes} min {seconds} s"),
            (0, _, _) => write!(out, "{hours} h {minutes} min"),
            _ => write!(out, "{days} d {hours} h"),
        }
    }
}

/// Returns a number with its noun, such as `1 line` or `1,200 lines`.
pub(crate) fn counted(number: u64, one: &str, several: &str) -> String {
    format!("{} {}", Grouped(number), if number == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_readable() {
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(|number| Grouped(number).to_string()),
            ["0", "999", "1,000", "1,234,567"]
        );
        let spans = [59, 61, 3661, 90_000].map(|seconds| Span(seconds).to_string());
        assert_eq!(spans, ["59 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]);
        assert_eq!([0, 1, 2000].map(|number| counted(number, "line", "lines")), ["0 lines", "1 line", "2,000 lines"]);
    }
}
