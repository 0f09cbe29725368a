//! Seconds in JSON, Unix time, and the wall clock of log lines.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::ser::{Error, Serialize, Serializer};
use serde_json::value::RawValue;
use smallvec::SmallVec;
use time::OffsetDateTime;

/// A JSON number with six decimals. It is written from integers, because a float would round long times and print short
/// ones as `1e-6`.
#[derive(Clone, Copy, Debug)]
pub struct Seconds(pub Duration);

impl Seconds {
    /// Appends the number.
    pub fn write(&self, output: &mut impl Extend<u8>) {
        output.extend(itoa::Buffer::new().format(self.0.as_secs()).bytes());
        output.extend([b'.']);
        // The 1 in front keeps the zeros, and is left out.
        output.extend(itoa::Buffer::new().format(1_000_000 + self.0.subsec_micros()).bytes().skip(1));
    }
}

impl JsonSchema for Seconds {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Seconds".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "number", "minimum": 0, "description": "Seconds." })
    }
}

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = SmallVec::<[u8; 32]>::new();
        self.write(&mut text);
        serde_json::from_slice::<&RawValue>(&text).map_err(S::Error::custom)?.serialize(serializer)
    }
}

/// Returns the time since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "for log lines and metrics only, never for decisions")]
#[inline]
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the current Unix time in seconds.
#[inline]
pub fn unix_now() -> i64 {
    i64::try_from(since_epoch().as_secs()).unwrap_or(i64::MAX)
}

/// `2026-11-15T12:25:53`.
pub fn rfc3339(date: &OffsetDateTime) -> String {
    let (hour, minute, second) = date.to_hms();
    let (year, month, day) = (date.year(), u8::from(date.month()), date.day());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
}

/// `2026-11-15T12:25:53.218Z`, from the time since the Unix epoch.
pub fn rfc3339_millis(since: Duration) -> String {
    let seconds = i64::try_from(since.as_secs()).unwrap_or_default();
    let date = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    format!("{}.{:03}Z", rfc3339(&date), since.subsec_millis())
}

/// Returns the current Unix time in seconds, with fractions.
#[expect(clippy::disallowed_methods, reason = "for the admin API only, never for decisions")]
pub fn unix_seconds() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Microseconds, because more digits of a float are noise.
    since.as_micros() as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_exact_to_the_microsecond_at_any_length() {
        let written = |micros| serde_json::to_string(&Seconds(Duration::from_micros(micros))).unwrap();
        assert_eq!(written(0), "0.000000");
        assert_eq!(written(1), "0.000001");
        assert_eq!(written(59_999_999), "59.999999");
        assert_eq!(written(60_000_000), "60.000000");
        assert_eq!(written(u64::MAX), "18446744073709.551615");
    }
}
