//! The time of a line, formatted once per second.

use std::time::Duration;

use time::OffsetDateTime;

pub(super) use crate::seconds::rfc3339;
use crate::seconds::since_epoch;

/// The last formatted second.
#[derive(Default)]
pub(super) struct Stamp {
    second: i64,
    text: String,
}

/// A time format.
pub(super) type TimeFormat = fn(&OffsetDateTime) -> String;

impl Stamp {
    /// Returns the current second in that format, and the milliseconds. A stamp must always be used with the same
    /// format.
    pub(super) fn now(&mut self, format_time: TimeFormat) -> (&str, u32) {
        self.at(since_epoch(), format_time)
    }

    fn at(&mut self, since: Duration, format_time: TimeFormat) -> (&str, u32) {
        let second = i64::try_from(since.as_secs()).unwrap_or_default();
        if second != self.second || self.text.is_empty() {
            let date = OffsetDateTime::from_unix_timestamp(second).unwrap_or(OffsetDateTime::UNIX_EPOCH);
            (self.second, self.text) = (second, format_time(&date));
        }
        (&self.text, since.subsec_millis())
    }
}

/// `15/Nov/2026:12:25:53 +0000`.
pub(super) fn common(date: &OffsetDateTime) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (hour, minute, second) = date.to_hms();
    let month = MONTHS[usize::from(u8::from(date.month())) - 1];
    format!("{:02}/{month}/{}:{hour:02}:{minute:02}:{second:02} +0000", date.day(), date.year())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_both_formats_and_change_with_the_second() {
        let leap_day = Duration::from_millis(1_709_210_096_789);
        assert_eq!(Stamp::default().at(leap_day, rfc3339), ("2024-02-29T12:34:56", 789));
        let mut stamp = Stamp::default();
        assert_eq!(stamp.at(leap_day, common), ("29/Feb/2024:12:34:56 +0000", 789));
        assert_eq!(stamp.at(leap_day + Duration::from_millis(300), common), ("29/Feb/2024:12:34:57 +0000", 89));
        assert_eq!(Stamp::default().at(Duration::ZERO, rfc3339), ("1970-01-01T00:00:00", 0));
    }
}
