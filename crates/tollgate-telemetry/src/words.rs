//! Numbers, counts, times and texts of clients as people read them.

use std::fmt::{self, Write};
use std::time::Duration;

/// A number with commas between thousands.
#[derive(Clone, Copy, Debug)]
pub struct Grouped(pub u64);

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
pub struct Span(pub u64);

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
pub fn counted(number: u64, one: &str, several: &str) -> String {
    format!("{} {}", Grouped(number), if number == 1 { one } else { several })
}

/// Formats a duration for people: `0 s`, `250 ms`, `12.5 s`, `12m30s`, `2h05m`.
pub fn human(span: Duration) -> String {
    let micros = span.as_micros();
    let decimal = |value: u128, unit: u128, name: &str| {
        let tenths = (value * 10 + unit / 2) / unit;
        match tenths % 10 {
            0 => format!("{} {name}", tenths / 10),
            tenth => format!("{}.{tenth} {name}", tenths / 10),
        }
    };
    let secs = span.as_secs();
    match secs {
        _ if micros == 0 => "0 s".to_owned(),
        0 if micros < 1_000 => format!("{micros} us"),
        0 if micros < 10_000 => decimal(micros, 1_000, "ms"),
        0 if micros < 999_500 => format!("{} ms", (micros + 500) / 1_000),
        0..600 => decimal(micros, 1_000_000, "s"),
        600..3_600 if secs.is_multiple_of(60) => format!("{}m", secs / 60),
        600..3_600 => format!("{}m{:02}s", secs / 60, secs % 60),
        _ if secs.is_multiple_of(86_400) => format!("{}d", secs / 86_400),
        _ if secs.is_multiple_of(3_600) => format!("{}h", secs / 3_600),
        _ => format!("{}h{:02}m", secs / 3_600, secs / 60 % 60),
    }
}

/// The longest part of a client's text in an error message.
const MAX_QUOTED_CHARS: usize = 80;

/// Returns a client's text in backticks, shortened.
pub fn quoted(text: &str) -> String {
    format!("`{}`", cut(text, MAX_QUOTED_CHARS))
}

/// Shortens a text to this many characters, and marks that with an ellipsis.
pub fn cut(text: &str, max_chars: usize) -> String {
    let mut start = text.chars().take(max_chars).collect::<String>();
    if start.len() < text.len() {
        start.push('…');
    }
    start
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

    #[test]
    fn durations_are_short_and_readable() {
        let cases = [
            (0, "0 s"),
            (7, "7 us"),
            (1_500, "1.5 ms"),
            (250_000, "250 ms"),
            (999_999, "1 s"),
            (12_500_000, "12.5 s"),
            (60_000_000, "60 s"),
            (600_000_000, "10m"),
            (754_000_000, "12m34s"),
            (3_600_000_000, "1h"),
            (7_500_000_000, "2h05m"),
            (86_400_000_000, "1d"),
        ];
        for (micros, text) in cases {
            assert_eq!(human(Duration::from_micros(micros)), text);
        }
    }
}
