//! Rates as exact ratios of units and time, never floats.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::InvalidLimit;
use crate::units::{DAY, HOUR, MINUTE, SECOND};

/// A rate such as `7/s`, `100/m` or `1/3s`, stored as an exact ratio.
///
/// ```
/// use tollgate::Rate;
///
/// assert_eq!("100/m".parse::<Rate>()?, Rate::per_minute(100));
/// assert_eq!("0.5/s".parse::<Rate>()?.to_string(), "1/2s");
/// assert!("-1/s".parse::<Rate>().is_err());
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
///
/// A rate can be any ratio; [`Limit::new`](crate::Limit::new) checks that it is valid for a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    count: u64,
    period: Duration,
}

impl Rate {
    /// Creates a rate of `count` units per `period`.
    #[must_use]
    pub const fn new(count: u64, period: Duration) -> Self {
        Self { count, period }
    }

    /// Creates a rate of `count` units per second.
    #[must_use]
    pub const fn per_second(count: u64) -> Self {
        Self::new(count, SECOND)
    }

    /// Creates a rate of `count` units per minute.
    #[must_use]
    pub const fn per_minute(count: u64) -> Self {
        Self::new(count, MINUTE)
    }

    /// Creates a rate of `count` units per hour.
    #[must_use]
    pub const fn per_hour(count: u64) -> Self {
        Self::new(count, HOUR)
    }

    /// Creates a rate of `count` units per day.
    #[must_use]
    pub const fn per_day(count: u64) -> Self {
        Self::new(count, DAY)
    }

    /// Returns the units per period.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.count
    }

    /// Returns the rate that gives fewer units, or this one if both give as many.
    pub(crate) fn slower(self, other: Self) -> Self {
        let units = |one: Self, period: Duration| u128::from(one.count).saturating_mul(period.as_micros());
        if units(other, self.period) < units(self, other.period) { other } else { self }
    }

    /// Returns the period.
    #[must_use]
    pub const fn period(self) -> Duration {
        self.period
    }
}

/// Converts units per second, as the decimal number that the float prints as: `0.1` is exactly one unit per ten
/// seconds.
impl TryFrom<f64> for Rate {
    type Error = InvalidLimit;

    fn try_from(per_second: f64) -> Result<Self, InvalidLimit> {
        if !per_second.is_finite() || per_second < 0.0 {
            return Err(invalid(&per_second.to_string()));
        }
        format!("{per_second}/s").parse()
    }
}

impl FromStr for Rate {
    type Err = InvalidLimit;

    fn from_str(text: &str) -> Result<Self, InvalidLimit> {
        parse(text).ok_or_else(|| invalid(text))
    }
}

fn invalid(text: &str) -> InvalidLimit {
    let shown: String = text.chars().take(40).collect();
    InvalidLimit::new(
        "rate",
        format!("`{shown}` is not a rate"),
        "write a number and a unit, such as 7/s, 100/m, 1/3s or 0.5/s",
    )
}

fn parse(text: &str) -> Option<Rate> {
    let (count, period) = text.split_once('/')?;
    let (count, scale) = parse_decimal(count.trim())?;
    let period = parse_period(period.trim())?;
    // 0.5/s is 5 per 10 s, which is 1 per 2 s: the fraction moves into the period, and then both are reduced by the
    // factor that the fraction added.
    let common = gcd(count, scale).max(1);
    let period = period.checked_mul(u32::try_from(scale / common).ok()?)?;
    Some(Rate::new(count / common, period))
}

/// Parses a decimal number into digits and a power of ten to divide them by.
fn parse_decimal(text: &str) -> Option<(u64, u64)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits_only = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    // Nine decimals keep the scale within a u32, and are finer than any rate that fits the bounds of a limit.
    if whole.is_empty() || !digits_only(whole) || !digits_only(fraction) || fraction.len() > 9 {
        return None;
    }
    let scale = 10_u64.pow(u32::try_from(fraction.len()).ok()?);
    let whole: u64 = whole.parse().ok()?;
    let fraction: u64 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    Some((whole.checked_mul(scale)?.checked_add(fraction)?, scale))
}

/// Parses a period such as `s`, `10s`, `m`, `500ms`, `h` or `d`.
pub fn parse_period(text: &str) -> Option<Duration> {
    let unit_at = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (count, unit) = text.split_at(unit_at);
    let count: u32 = if count.is_empty() { 1 } else { count.parse().ok()? };
    let unit = match unit {
        "us" => Duration::from_micros(1),
        "ms" => Duration::from_millis(1),
        "s" | "sec" | "second" => SECOND,
        "m" | "min" | "minute" => MINUTE,
        "h" | "hour" => HOUR,
        "d" | "day" => DAY,
        _ => return None,
    };
    unit.checked_mul(count)
}

pub(crate) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl fmt::Display for Rate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.period.as_micros();
        let units = [(DAY, "d"), (HOUR, "h"), (MINUTE, "m"), (SECOND, "s"), (Duration::from_millis(1), "ms")];
        for (unit, name) in units {
            let unit = unit.as_micros();
            if micros >= unit && micros.is_multiple_of(unit) {
                return match micros / unit {
                    1 => write!(out, "{}/{name}", self.count),
                    many => write!(out, "{}/{many}{name}", self.count),
                };
            }
        }
        write!(out, "{}/{micros}us", self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_whole_fractional_and_stretched_rates() {
        let cases = [
            ("7/s", Rate::per_second(7)),
            ("100/m", Rate::per_minute(100)),
            ("1/3s", Rate::new(1, SECOND * 3)),
            ("0.5/s", Rate::new(1, SECOND * 2)),
            ("2.5/m", Rate::new(5, MINUTE * 2)),
            ("10/500ms", Rate::new(10, Duration::from_millis(500))),
            ("1000/day", Rate::per_day(1000)),
            (" 7 / s ", Rate::per_second(7)),
            ("0/s", Rate::per_second(0)),
        ];
        for (text, rate) in cases {
            assert_eq!(text.parse::<Rate>().unwrap(), rate, "{text}");
        }
    }

    #[test]
    fn keeps_the_portion_of_a_whole_rate() {
        // Interval refill needs the portion as written: 100 a minute is not 5 every 3 seconds.
        let rate: Rate = "100/m".parse().unwrap();
        assert_eq!((rate.count(), rate.period()), (100, MINUTE));
    }

    #[test]
    fn refuses_what_is_not_a_rate_and_says_what_is() {
        for text in ["", "7", "7/", "/s", "-1/s", "NaN/s", "inf/s", "1e9/s", "7/fortnight", "1.2.3/s", "0.1234567891/s"]
        {
            let error = text.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains("such as 7/s"), "{text}: {error}");
        }
        for float in [f64::NAN, f64::INFINITY, -0.5] {
            assert!(Rate::try_from(float).is_err(), "{float}");
        }
    }

    #[test]
    fn a_float_is_the_decimal_it_prints_as() {
        assert_eq!(Rate::try_from(0.1).unwrap(), Rate::new(1, SECOND * 10));
        assert_eq!(Rate::try_from(2.0).unwrap(), Rate::per_second(2));
    }

    #[test]
    fn prints_as_it_is_read() {
        for text in ["7/s", "100/m", "1/3s", "1/2s", "10/500ms", "5/7d"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
    }
}
