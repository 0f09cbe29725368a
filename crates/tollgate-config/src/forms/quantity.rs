//! Durations, rates and sizes.

use std::time::Duration;

use tollgate::Rate;
use tollgate::internal::parse_period;

use super::super::problem::{InvalidValue, shown};
use super::form;

/// A duration such as `50ms`, `1m` or `1h30m`. `sec`, `second`, `min`, `minute`, `hour` and `day` are units too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DurationText(Duration);

form! {
    DurationText {
        format: "span", noun: "a duration", example: "1m",
        pattern: "^([0-9]+(us|ms|s|sec|second|m|min|minute|h|hour|d|day))+$"
    }
}

impl DurationText {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = || {
            let problem = format!("`{}` is not a duration", shown(text));
            InvalidValue::new(
                problem,
                "write a whole number and one of us, ms, s, m, h or d, such as 50ms, 1m or 1h30m",
            )
        };
        let (mut rest, mut sum) = (text, Duration::ZERO);
        while !rest.is_empty() || text.is_empty() {
            let unit_at =
                rest.find(|letter: char| !letter.is_ascii_digit()).filter(|at| *at > 0).ok_or_else(invalid)?;
            let end =
                rest[unit_at..].find(|letter: char| letter.is_ascii_digit()).map_or(rest.len(), |at| unit_at + at);
            let part = parse_period(&rest[..end]).ok_or_else(invalid)?;
            sum = sum.checked_add(part).ok_or_else(invalid)?;
            rest = &rest[end..];
        }
        Ok(Self(sum))
    }

    pub(crate) const fn new(span: Duration) -> Self {
        Self(span)
    }

    /// Returns the duration.
    pub const fn duration(self) -> Duration {
        self.0
    }
}

/// A rate such as `10/s`, `100/m` or `1/3s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateText(Rate);

form! {
    RateText {
        format: "rate", noun: "a rate", example: "10/s",
        pattern: r"^\s*[0-9]+(\.[0-9]*)?\s*/\s*[0-9]*(us|ms|s|sec|second|m|min|minute|h|hour|d|day)\s*$"
    }
}

impl RateText {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        text.parse().map(Self).map_err(|error: tollgate::InvalidLimit| {
            // nginx writes `10r/s`.
            let ours = text.replacen("r/", "/", 1);
            match ours.parse::<Rate>() {
                Ok(_) => InvalidValue::new(error.problem(), format!("write {}", shown(&ours))),
                Err(_) => error.into(),
            }
        })
    }

    /// Returns the rate.
    pub const fn rate(self) -> Rate {
        self.0
    }
}

/// A number of bytes: `512MiB`, `2GiB`, `64KiB`, `1000000B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSize(u64);

form! {
    ByteSize { format: "bytes", noun: "a size", example: "512MiB", pattern: "^[0-9]+ ?(B|KiB|MiB|GiB)$" }
}

impl ByteSize {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = || {
            let problem = format!("`{}` is not a size", shown(text));
            InvalidValue::new(problem, "write a whole number and one of B, KiB, MiB or GiB, such as 512MiB")
        };
        let unit_at = text.find(|letter: char| !letter.is_ascii_digit()).ok_or_else(invalid)?;
        let (count, unit) = text.split_at(unit_at);
        let shift = match unit.strip_prefix(' ').unwrap_or(unit) {
            "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            _ => return Err(invalid()),
        };
        let count: u64 = count.parse().map_err(|_| invalid())?;
        count.checked_mul(1 << shift).map(Self).ok_or_else(invalid)
    }

    pub(crate) const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns the number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_add_up() {
        let read = |text| DurationText::read(text).ok().map(DurationText::duration);
        assert_eq!(read("1h30m"), Some(Duration::from_secs(5400)));
        assert_eq!(read("50ms"), Some(Duration::from_millis(50)));
        assert_eq!(read("2d"), Some(Duration::from_secs(172_800)));
        for text in ["", "m", "1", "1x", "1.5s", "-1s", "1 m", "4294967295d4294967296d", "1m2"] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
