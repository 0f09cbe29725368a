//! Times of logs, in microseconds since the Unix epoch.

use tollgate::Timestamp;

/// The length of `10/Oct/2000:13:55:36 -0700`.
pub(super) const COMMON_BYTES: usize = 26;
/// The part of such a time up to the seconds.
const MINUTE_BYTES: usize = 18;
const MONTHS: [&[u8; 3]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

/// Numbers above these are not seconds, but milliseconds, microseconds or nanoseconds. Seconds reach the first in the
/// year 5138.
const MILLIS_FROM: u64 = 100_000_000_000;
const MICROS_FROM: u64 = 100_000_000_000_000;
const NANOS_FROM: u64 = 100_000_000_000_000_000;

/// Reads times of the Common Log Format. Neighbouring lines are mostly of the same minute, which it remembers.
#[derive(Clone, Debug, Default)]
pub(super) struct CommonTimes {
    /// The text of the last minute, and its zone.
    minute: [u8; MINUTE_BYTES],
    zone: [u8; 6],
    /// The minute in microseconds.
    micros: Option<u64>,
}

impl CommonTimes {
    /// Reads a time such as `10/Oct/2000:13:55:36 -0700` at the start of `text`.
    pub(super) fn read(&mut self, text: &[u8]) -> Option<u64> {
        let text = text.first_chunk::<COMMON_BYTES>()?;
        let (minute, rest) = text.split_first_chunk::<MINUTE_BYTES>()?;
        let (seconds, zone) = rest.split_first_chunk::<2>()?;
        let zone = zone.first_chunk::<6>()?;
        let seconds = u64::from(two_digits(seconds)?).min(60);
        let micros = match self.micros {
            Some(micros) if self.minute == *minute && self.zone == *zone => micros,
            _ => {
                let micros = common_minute(minute, zone)?;
                (self.minute, self.zone, self.micros) = (*minute, *zone, Some(micros));
                micros
            }
        };
        Some(micros + seconds * 1_000_000)
    }
}

/// Reads `10/Oct/2000:13:55:` and ` -0700`.
fn common_minute(minute: &[u8; MINUTE_BYTES], zone: &[u8; 6]) -> Option<u64> {
    let [d1, d2, b'/', m1, m2, m3, b'/', y1, y2, y3, y4, b':', h1, h2, b':', n1, n2, b':'] = *minute else {
        return None;
    };
    let [b' ', sign, z1, z2, z3, z4] = *zone else { return None };
    let month = MONTHS.iter().position(|month| **month == [m1, m2, m3])? + 1;
    let year = u32::from(two_digits(&[y1, y2])?) * 100 + u32::from(two_digits(&[y3, y4])?);
    let date = Date { year, month: u8::try_from(month).ok()?, day: two_digits(&[d1, d2])? };
    let minutes = u32::from(hours(&[h1, h2])?) * 60 + u32::from(sixtieths(&[n1, n2])?);
    let zone_minutes = i64::from(hours(&[z1, z2])?) * 60 + i64::from(sixtieths(&[z3, z4])?);
    micros_of(date, u64::from(minutes) * 60_000_000, if sign == b'-' { -zone_minutes } else { zone_minutes })
}

/// Reads a time such as `2018-07-02T22:23:00.186641Z`, with or without a fraction.
pub(super) fn read_rfc3339(text: &[u8]) -> Option<u64> {
    let (head, mut rest) = text.split_first_chunk::<19>()?;
    let [y1, y2, y3, y4, b'-', m1, m2, b'-', d1, d2, b'T' | b't' | b' ', h1, h2, b':', n1, n2, b':', s1, s2] = *head
    else {
        return None;
    };
    let year = u32::from(two_digits(&[y1, y2])?) * 100 + u32::from(two_digits(&[y3, y4])?);
    let date = Date { year, month: two_digits(&[m1, m2])?, day: two_digits(&[d1, d2])? };
    let minutes = u64::from(hours(&[h1, h2])?) * 60 + u64::from(sixtieths(&[n1, n2])?);
    let mut micros = (minutes * 60 + u64::from(two_digits(&[s1, s2])?.min(60))) * 1_000_000;
    if let [b'.' | b',', fraction @ ..] = rest {
        let digits = fraction.iter().take_while(|byte| byte.is_ascii_digit()).count();
        micros += fraction_micros(&fraction[..digits])?;
        rest = &fraction[digits..];
    }
    let zone_minutes = match *rest {
        [] | [b'Z' | b'z'] => 0,
        [sign @ (b'+' | b'-'), z1, z2, b':', z3, z4] | [sign @ (b'+' | b'-'), z1, z2, z3, z4] => {
            let minutes = i64::from(hours(&[z1, z2])?) * 60 + i64::from(sixtieths(&[z3, z4])?);
            if sign == b'-' { -minutes } else { minutes }
        }
        _ => return None,
    };
    micros_of(date, micros, zone_minutes)
}

/// Reads a number such as `1646861401.524`: seconds since the epoch, or milliseconds, microseconds or nanoseconds where
/// it is too large for seconds.
pub(super) fn read_epoch(text: &[u8]) -> Option<u64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let whole: u64 = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    let fraction = match &text[digits..] {
        [] => &[][..],
        [b'.', fraction @ ..] if fraction.iter().all(u8::is_ascii_digit) => fraction,
        _ => return None,
    };
    match whole {
        0..MILLIS_FROM => whole.checked_mul(1_000_000)?.checked_add(fraction_micros(fraction)?),
        MILLIS_FROM..MICROS_FROM => whole.checked_mul(1_000)?.checked_add(fraction_micros(fraction)? / 1_000),
        MICROS_FROM..NANOS_FROM => Some(whole),
        _ => Some(whole / 1_000),
    }
}

/// Reads the digits of a fraction as microseconds.
fn fraction_micros(digits: &[u8]) -> Option<u64> {
    let mut micros = 0;
    for place in 0..6 {
        micros = micros * 10 + digits.get(place).map_or(Some(0), |digit| digit_value(*digit)).map(u64::from)?;
    }
    Some(micros)
}

struct Date {
    year: u32,
    month: u8,
    day: u8,
}

/// Returns the microseconds since the epoch of a time of day in a zone that is `zone_minutes` east of Greenwich.
fn micros_of(date: Date, micros_of_day: u64, zone_minutes: i64) -> Option<u64> {
    let days = days_since_epoch(&date)?;
    let micros = days * 86_400_000_000 + i64::try_from(micros_of_day).ok()? - zone_minutes * 60_000_000;
    u64::try_from(micros).ok()
}

/// Counts days with years that begin in March, so that the leap day is the last of its year.
fn days_since_epoch(date: &Date) -> Option<i64> {
    let Date { year, month, day } = *date;
    if !(1..=days_in(year, month)?).contains(&day) {
        return None;
    }
    let (year, month) = (i64::from(year) - i64::from(month <= 2), i64::from(month));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + i64::from(day) - 1;
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    Some(era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468)
}

/// Returns the number of days of a month, from 1 to 12.
fn days_in(year: u32, month: u8) -> Option<u8> {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    match month {
        2 => Some(if is_leap { 29 } else { 28 }),
        4 | 6 | 9 | 11 => Some(30),
        1..=12 => Some(31),
        _ => None,
    }
}

/// Writes a time such as `2018-07-02T22:23:00Z`, with a fraction where there is one.
pub fn rfc3339(time: Timestamp) -> String {
    let micros = time.as_micros();
    let (days, of_day) = (micros / 86_400_000_000, micros % 86_400_000_000);
    // Years begin in March here too.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3_600_000_000, of_day / 60_000_000 % 60, of_day / 1_000_000 % 60);
    let text = format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}");
    match of_day % 1_000_000 {
        0 => format!("{text}Z"),
        fraction => format!("{text}.{fraction:06}Z"),
    }
}

fn hours(digits: &[u8; 2]) -> Option<u8> {
    two_digits(digits).filter(|hours| *hours < 24)
}

fn sixtieths(digits: &[u8; 2]) -> Option<u8> {
    two_digits(digits).filter(|minutes| *minutes < 60)
}

fn two_digits(digits: &[u8; 2]) -> Option<u8> {
    Some(digit_value(digits[0])? * 10 + digit_value(digits[1])?)
}

fn digit_value(digit: u8) -> Option<u8> {
    digit.is_ascii_digit().then(|| digit - b'0')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_every_form_are_read() {
        let mut times = CommonTimes::default();
        assert_eq!(times.read(b"10/Oct/2000:13:55:36 -0700"), Some(971_211_336_000_000));
        assert_eq!(times.read(b"10/Oct/2000:13:55:37 -0700] more"), Some(971_211_337_000_000));
        assert_eq!(times.read(b"10/Oct/2000:13:55:37 +0000"), Some(971_186_137_000_000));
        assert_eq!(times.read(b"29/Feb/2024:23:59:59 +0530"), Some(1_709_231_399_000_000));
        assert_eq!(read_rfc3339(b"2018-07-02T22:23:00.186641Z"), Some(1_530_570_180_186_641));
        assert_eq!(read_rfc3339(b"2018-07-03T00:23:00+02:00"), Some(1_530_570_180_000_000));
        assert_eq!(read_rfc3339(b"2018-07-03T00:23:00.1+0200"), Some(1_530_570_180_100_000));
        for seconds in ["1646861401.524102", "1646861401524.102", "1646861401524102", "1646861401524102999"] {
            assert_eq!(read_epoch(seconds.as_bytes()).map(|micros| micros / 1000), Some(1_646_861_401_524));
        }
    }

    #[test]
    fn written_times_are_read_again() {
        for micros in (0..4_000_000_000_000_000).step_by(123_456_789_123_457) {
            let text = rfc3339(Timestamp::from_micros(micros));
            assert_eq!(read_rfc3339(text.as_bytes()), Some(micros), "{text}");
        }
        assert_eq!(rfc3339(Timestamp::from_secs(1_709_231_399)), "2024-02-29T18:29:59Z");
    }

    #[test]
    fn other_texts_are_not_times() {
        let mut times = CommonTimes::default();
        for text in [
            "",
            "10/Okt/2000:13:55:36 -0700",
            "10/Oct/2000:25:55:36 -0700",
            "10/Oct/2000:13:55:3x -0700",
            "31/Feb/2024:13:55:36 +0000",
            "30/Feb/2024:13:55:36 +0000",
            "29/Feb/2023:13:55:36 +0000",
            "29/Feb/1900:13:55:36 +0000",
            "31/Apr/2024:13:55:36 +0000",
            "00/Jan/2024:13:55:36 +0000",
        ] {
            assert_eq!(times.read(text.as_bytes()), None, "{text}");
        }
        for text in [
            "",
            "2018-13-02T22:23:00Z",
            "2018-00-02T22:23:00Z",
            "2018-02-29T22:23:00Z",
            "2018-06-31T22:23:00Z",
            "2018-07-02T22:23:00 noon",
            "1969-07-02T22:23:00Z",
        ] {
            assert_eq!(read_rfc3339(text.as_bytes()), None, "{text}");
        }
        for text in ["", "-1", "12e3", "99999999999999999999", "."] {
            assert_eq!(read_epoch(text.as_bytes()), None, "{text}");
        }
    }
}
