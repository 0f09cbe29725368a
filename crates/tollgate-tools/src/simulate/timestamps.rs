//! Reads the times of requests, one per line: `TIME [KEY [COST]]`.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, Read as _};
use std::time::Duration;

use time::{Date, Month, PrimitiveDateTime, Time, UtcOffset};
use tollgate::MINUTE;

use super::traffic::{Arrival, MAX_SPAN, Traffic};
use super::{MAX_REQUESTS, micros};

/// The longest line. A time, a key and a cost need far less.
const MAX_LINE: u64 = 1024;
/// The most keys. Each has its own quota and its own worst window.
const MAX_KEYS: usize = 100_000;
/// The latest time in seconds of Unix time, in the year 2096: the simulated clock adds its start and must not overflow.
const MAX_SECONDS: u64 = 4_000_000_000;

/// A file of timestamps that cannot be used.
#[derive(Debug)]
#[expect(missing_docs, reason = "the description of a variant covers its fields")]
pub enum TimestampError {
    /// The file cannot be read.
    Unreadable(io::Error),
    /// A line is not a time.
    Line { number: u64, problem: String },
    /// The file has no times.
    Empty,
    /// The file has too many times.
    TooLong,
}

impl fmt::Display for TimestampError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(source) => write!(out, "cannot read it: {source}: check the path and its permissions"),
            Self::Line { number, problem } => write!(out, "line {number}: {problem}"),
            Self::Empty => out.write_str("there is no request in it: write one time per line, such as 12.5"),
            Self::TooLong => out.write_str(
                "the first and the last time are more than 10 years apart: write either seconds from the start or Unix times",
            ),
        }
    }
}

/// Reads the requests of a file, which may be out of order. The traffic starts at a full minute.
pub fn read(mut lines: impl BufRead) -> Result<Traffic, TimestampError> {
    let (mut arrivals, mut keys) = (Vec::new(), HashMap::new());
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read =
            lines.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut line).map_err(TimestampError::Unreadable)?;
        if read == 0 {
            break;
        }
        // The mark that some Windows programs write before the first line.
        if number == 1 && line.starts_with(&[0xef, 0xbb, 0xbf]) {
            line.drain(..3);
        }
        let arrival = if read as u64 > MAX_LINE {
            Err(format!("it is longer than {MAX_LINE} bytes: write TIME KEY COST"))
        } else {
            parse(&line, &mut keys)
        };
        arrivals.extend(arrival.map_err(|problem| TimestampError::Line { number, problem })?);
        if arrivals.len() > MAX_REQUESTS {
            let problem = format!("there are more than {MAX_REQUESTS} requests: use a part of the file");
            return Err(TimestampError::Line { number, problem });
        }
    }
    arrivals.sort_by_key(|arrival| arrival.at);
    let (Some(first), Some(last)) = (arrivals.first(), arrivals.last()) else { return Err(TimestampError::Empty) };
    let minute = micros(MINUTE);
    let lead = first.at / minute * minute;
    // Rounded up to a tenth of a second, so that the last request is inside.
    let span = Duration::from_micros(((last.at - lead) / 100_000 + 1) * 100_000);
    if span > MAX_SPAN {
        return Err(TimestampError::TooLong);
    }
    arrivals.iter_mut().for_each(|arrival| arrival.at -= lead);
    let (requests, clients) = (arrivals.len(), keys.len().max(1));
    let noun = |number: usize, one, several| if number == 1 { one } else { several };
    let (request, client) = (noun(requests, "request", "requests"), noun(clients, "client", "clients"));
    let description = format!("{requests} {request} of {clients} {client}");
    Ok(Traffic::listed(description, arrivals, Duration::from_micros(lead), span))
}

/// Parses a line. Empty lines and lines that start with `#` have no request.
fn parse(line: &[u8], keys: &mut HashMap<String, u32>) -> Result<Option<Arrival>, String> {
    let text = std::str::from_utf8(line).map_err(|_| "it is not UTF-8: write TIME KEY COST".to_owned())?.trim();
    if text.is_empty() || text.starts_with('#') {
        return Ok(None);
    }
    let mut fields =
        text.split(|letter: char| letter == ',' || letter.is_whitespace()).filter(|field| !field.is_empty());
    let shown = |field: &str| field.chars().take(40).collect::<String>();
    let time = fields.next().unwrap_or_default();
    let at = seconds(time).or_else(|| rfc3339(time)).filter(|at| *at <= MAX_SECONDS * 1_000_000).ok_or_else(|| {
        format!("`{}` is not a time: write seconds such as 12.5, or 2026-01-31T12:00:00Z", shown(time))
    })?;
    let key = fields.next().unwrap_or_default();
    let next = u32::try_from(keys.len()).unwrap_or(u32::MAX);
    let key = *keys.entry(key.to_owned()).or_insert(next);
    if keys.len() > MAX_KEYS {
        return Err(format!("there are more than {MAX_KEYS} keys: use a part of the file"));
    }
    let cost = match fields.next() {
        None => 1,
        Some(cost) => cost
            .parse::<u32>()
            .map_err(|_| format!("`{}` is not a cost: write a whole number such as 1", shown(cost)))?
            .into(),
    };
    match fields.next() {
        None => Ok(Some(Arrival { at, key, cost })),
        Some(more) => Err(format!("`{}` is one column too many: write TIME KEY COST", shown(more))),
    }
}

/// Parses seconds with up to six decimals that count. Returns microseconds.
fn seconds(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let micros = fraction.bytes().chain(std::iter::repeat(b'0')).take(6);
    let micros = micros.fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    whole.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(micros)
}

/// Parses a time such as `2026-01-31T12:00:00.25+09:00`. Returns microseconds of Unix time.
fn rfc3339(text: &str) -> Option<u64> {
    let (date, rest) = text.split_once(['T', 't'])?;
    let offset_at = rest.find(['Z', 'z', '+', '-'])?;
    let (clock, offset) = rest.split_at(offset_at);
    let number = |text: &str, digits: usize| {
        let is_number = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse::<u16>().ok()).flatten()
    };
    let small = |text: &str| u8::try_from(number(text, 2)?).ok();
    let mut date = date.split('-');
    let (year, month, day) = (number(date.next()?, 4)?, small(date.next()?)?, small(date.next()?)?);
    let (hms, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let mut hms = hms.split(':');
    let (hour, minute, second) = (small(hms.next()?)?, small(hms.next()?)?, small(hms.next()?)?);
    if date.next().is_some() || hms.next().is_some() || fraction.is_empty() {
        return None;
    }
    let fraction = u32::try_from(seconds(&format!("0.{fraction}"))?).ok()?;
    let offset = match offset {
        "Z" | "z" => UtcOffset::UTC,
        _ => {
            let (hours, minutes) = offset.get(1..)?.split_once(':')?;
            let (hours, minutes) = (i8::try_from(small(hours)?).ok()?, i8::try_from(small(minutes)?).ok()?);
            let sign = if offset.starts_with('-') { -1 } else { 1 };
            UtcOffset::from_hms(sign * hours, sign * minutes, 0).ok()?
        }
    };
    let date = Date::from_calendar_date(i32::from(year), Month::try_from(month).ok()?, day).ok()?;
    // A leap second counts as the second before it.
    let time = Time::from_hms_micro(hour, minute, second.min(59), fraction).ok().filter(|_| second <= 60)?;
    let nanos = PrimitiveDateTime::new(date, time).assume_offset(offset).unix_timestamp_nanos();
    u64::try_from(nanos / 1000).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(text: &str) -> Vec<(u64, u32, u64)> {
        let traffic = read(text.as_bytes()).unwrap();
        traffic.arrivals().map(|arrival| (arrival.at, arrival.key, arrival.cost)).collect()
    }

    #[test]
    fn times_keys_and_costs_are_read_in_any_order() {
        let text = "# time key cost\n10.5 ann 2\n\n  0\tbob\r\n10.25,ann\n";
        assert_eq!(arrivals(text), [(0, 1, 1), (10_250_000, 0, 1), (10_500_000, 0, 2)]);
    }

    #[test]
    fn times_may_be_dates_with_offsets() {
        let text = "2026-01-31T12:00:30Z\n2026-01-31T21:00:31.5+09:00\n2026-01-31T10:30:32-01:30\n1769860833.000001\n";
        let wanted = [30_000_000, 31_500_000, 32_000_000, 33_000_001].map(|at| (at, 0, 1));
        assert_eq!(arrivals(text), wanted, "from the full minute before the first");
    }

    #[test]
    fn windows_of_the_clock_stay_where_they_are() {
        let traffic = read("2026-01-31T11:59:50Z\n2026-01-31T12:00:10Z".as_bytes()).unwrap();
        assert_eq!(traffic.window_starts(Duration::from_secs(3600)), [Duration::from_secs(60)]);
    }

    #[test]
    fn a_bad_line_is_reported_with_its_number() {
        let error = |text: &[u8]| read(text).unwrap_err().to_string();
        let long = format!("1\n{}\n", "9".repeat(2000));
        for (text, message) in [
            (&b"1\nx"[..], "line 2: `x` is not a time: write seconds such as 12.5, or 2026-01-31T12:00:00Z"),
            (b"-1", "line 1: `-1` is not a time: write seconds such as 12.5, or 2026-01-31T12:00:00Z"),
            (
                b"99999999999",
                "line 1: `99999999999` is not a time: write seconds such as 12.5, or 2026-01-31T12:00:00Z",
            ),
            (
                b"2026-02-30T00:00:00Z",
                "line 1: `2026-02-30T00:00:00Z` is not a time: write seconds such as 12.5, or 2026-01-31T12:00:00Z",
            ),
            (b"1 ann many", "line 1: `many` is not a cost: write a whole number such as 1"),
            (b"1 ann 1 1", "line 1: `1` is one column too many: write TIME KEY COST"),
            (b"\xff", "line 1: it is not UTF-8: write TIME KEY COST"),
            (long.as_bytes(), "line 2: it is longer than 1024 bytes: write TIME KEY COST"),
            (b"# nothing\n", "there is no request in it: write one time per line, such as 12.5"),
            (
                b"5\n2026-01-31T12:00:00Z\n",
                "the first and the last time are more than 10 years apart: write either seconds from the start or Unix times",
            ),
        ] {
            assert_eq!(error(text), message);
        }
    }
}
