//! Seconds in JSON and Unix time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::ser::{Error, Serialize, Serializer};
use serde_json::value::RawValue;
use smallvec::SmallVec;

/// A JSON number with six decimals. It is written from integers, because a float would round long times and print short
/// ones as `1e-6`.
pub(crate) struct Seconds(pub(crate) Duration);

impl Seconds {
    /// Appends the number.
    pub(crate) fn write(&self, output: &mut impl Extend<u8>) {
        output.extend(itoa::Buffer::new().format(self.0.as_secs()).bytes());
        output.extend([b'.']);
        // The 1 in front keeps the zeros, and is left out.
        output.extend(itoa::Buffer::new().format(1_000_000 + self.0.subsec_micros()).bytes().skip(1));
    }
}

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = SmallVec::<[u8; 32]>::new();
        self.write(&mut text);
        serde_json::from_slice::<&RawValue>(&text).map_err(S::Error::custom)?.serialize(serializer)
    }
}

/// Returns the current Unix time in seconds.
#[expect(clippy::disallowed_methods, reason = "for log lines and metrics only, never for decisions")]
pub(crate) fn unix_now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
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
