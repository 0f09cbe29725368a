//! Worked examples: traffic with numbers that can be checked by hand, each with an explanation.

use std::time::Duration;

use tollgate::{
    FixedWindow, InvalidLimit, LeakyBucket, MINUTE, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog, TokenBucket,
};

use super::limits::{Quota, SimulatedLimit};
use super::micros;
use super::traffic::{Arrival, Traffic};

const HOUR: Duration = tollgate::HOUR;

/// A worked example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// 200 requests in 20 seconds around a boundary, at 100 per hour
    Boundary,
    /// 100 requests at 59 s and 100 at 60 s, at 100 per minute
    Doubling,
    /// 5 per minute, exact at every instant
    Log,
    /// Denied requests in the log or not
    CountDenied,
    /// 8 × 0.5 + 3: the estimate of a sliding window counter
    Counter,
    /// 80 × 0.5 + 30: how much is left of 100
    Remaining,
    /// Six segments instead of one
    Segments,
    /// 20 requests at once into a bucket of 10 that leaks one a second
    Leak,
    /// Half a unit a second, with whole requests
    LostHalf,
    /// 3 tokens spent, 2 returned
    Tokens,
    /// 50 tokens and 5 seconds of refill
    LazyRefill,
    /// 150,000 requests a second on portions of 100,000
    Portions,
    /// A window that opens with the first request
    FirstRequest,
    /// 10,000 requests in one second at a limit of 100
    Flood,
}

impl Scenario {
    /// All examples, in declaration order.
    pub const ALL: [Self; 14] = [
        Self::Boundary,
        Self::Doubling,
        Self::Log,
        Self::CountDenied,
        Self::Counter,
        Self::Remaining,
        Self::Segments,
        Self::Leak,
        Self::LostHalf,
        Self::Tokens,
        Self::LazyRefill,
        Self::Portions,
        Self::FirstRequest,
        Self::Flood,
    ];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Boundary => "boundary",
            Self::Doubling => "doubling",
            Self::Log => "log",
            Self::CountDenied => "count-denied",
            Self::Counter => "counter",
            Self::Remaining => "remaining",
            Self::Segments => "segments",
            Self::Leak => "leak",
            Self::LostHalf => "lost-half",
            Self::Tokens => "tokens",
            Self::LazyRefill => "lazy-refill",
            Self::Portions => "portions",
            Self::FirstRequest => "first-request",
            Self::Flood => "flood",
        }
    }

    /// Returns the headline.
    pub fn title(self) -> &'static str {
        match self {
            Self::Boundary => "200 requests in 20 seconds around a boundary, at 100 per hour",
            Self::Doubling => "100 requests at 59 s and 100 at 60 s, at 100 per minute",
            Self::Log => "5 per minute, exact at every instant",
            Self::CountDenied => "Denied requests in the log or not, at 2 per minute",
            Self::Counter => "8 × 0.5 + 3: the estimate of a sliding window counter",
            Self::Remaining => "80 × 0.5 + 30: how much is left of 100",
            Self::Segments => "Six segments instead of one, at 100 per minute",
            Self::Leak => "20 requests at once into a bucket of 10 that leaks one a second",
            Self::LostHalf => "The lost half: a leak of half a unit a second",
            Self::Tokens => "3 tokens spent, 2 returned, 15 requests",
            Self::LazyRefill => "50 tokens and 5 seconds of refill",
            Self::Portions => "150,000 requests a second on portions of 100,000",
            Self::FirstRequest => "A window that opens with the first request",
            Self::Flood => "10,000 requests in one second at a limit of 100",
        }
    }

    /// Returns the text below the headline.
    pub fn explanation(self) -> &'static str {
        match self {
            Self::Boundary => {
                "The hour changes at 60 s. A fixed window counts the 100 requests before it and the 100 after it in \
                 different windows, so 200 pass within 20 seconds. The log still counts the first 100 and admits no \
                 more, the counter admits one more, and not one token has returned to the token bucket. The leaky \
                 bucket admits 100 and lets them leave 36 s apart."
            }
            Self::Doubling => {
                "One second before the minute ends, the fixed window admits 100 requests, and at the start of the next \
                 minute another 100: twice the limit within a second. The log and the counter admit none of the second \
                 hundred. Both buckets admit one, because 100/60 of a unit have returned."
            }
            Self::Log => {
                "The log remembers the time of each admitted request. At 50 s it has five, so the sixth is denied. At \
                 70 s the request at 0 s is older than a minute, and so is the one at 10 s, which is exactly one minute \
                 old: the seventh passes."
            }
            Self::CountDenied => {
                "The request at 50 s is denied. By default the log does not have it, so the last request passes. With \
                 `count_denied` the denied request still counts at 102 s, and the last one is denied as well: a client \
                 that keeps trying stays denied."
            }
            Self::Counter => {
                "The previous minute had 8 requests, this one has 3. After a tenth of the minute the estimate is \
                 8 × 0.9 + 3 = 10.2, which is not below the limit of 10, so the request is denied. Half way through it \
                 is 8 × 0.5 + 3 = 7, and the request passes."
            }
            Self::Remaining => {
                "The previous minute had 80 requests, this one has 29. Half way through, one more makes it 30, the \
                 estimate is 80 × 0.5 + 30 = 70, and 30 of 100 are left."
            }
            Self::Segments => {
                "Six segments of ten seconds have 20, 10, 10, 10, 10 and 10 requests. At 65 s half of the first segment \
                 is outside the window: the estimate is 10 + 50, and the request makes it 61. With one segment, the \
                 whole minute of 70 counts for 55/60, which is 64 and a fraction, and the request makes it 65."
            }
            Self::Leak => {
                "Both buckets admit 10 requests and deny 10. Without a queue the 10 proceed at once, and the bucket \
                 drains for 10 seconds. With a queue they leave at 0, 1, 2 up to 9 s: the output is steady."
            }
            Self::LostHalf => {
                "The bucket is full at 0 s and leaks 1.5 units in 3 seconds. One request fits at 3 s, and half a unit of \
                 room is left. An implementation that rounds it away would lose it: at 6 s it would have leaked 2 units \
                 in all. Here two more fit at 6 s, 3 in all, because 6 × 0.5 = 3."
            }
            Self::Tokens => {
                "A bucket of 10 tokens refills one a second. At 0 s, 3 requests leave 7. At 2 s two tokens have \
                 returned: of 15 requests 9 pass, 6 are denied, and no token is left."
            }
            Self::LazyRefill => {
                "At 0 s the bucket of 100 has 50 tokens left. Nothing runs in the meantime. When the next request comes \
                 at 5 s, the refill of 5 × 10 tokens is computed, the bucket is full, and 100 requests pass."
            }
            Self::Portions => {
                "With `refill_mode: interval`, tokens return in whole portions at the end of each second. 100,000 \
                 requests in the first tenth of a second pass, and the 50,000 in the rest of the second are denied. A \
                 smooth refill admits 10 of them each 100 µs instead. At 1 s the interval bucket is full again."
            }
            Self::FirstRequest => {
                "A client starts at 30 s. A window of the clock ends at 60 s, so 100 more pass 30 seconds later. With \
                 `align: first_request` the window opens at 30 s and closes at 90 s."
            }
            Self::Flood => {
                "All algorithms admit 100 of 10,000 requests in one second, and at most two more for tokens that return \
                 within the second. The other 9,900 get the status 429."
            }
        }
    }

    /// Returns the limits and the traffic.
    pub fn parts(self) -> Result<(Vec<SimulatedLimit>, Traffic), InvalidLimit> {
        let per_minute = Quota::new(100, MINUTE);
        Ok(match self {
            Self::Boundary => {
                let half = |from: u64| spread(100, from * 1_000_000, 10_000_000);
                let arrivals = [half(50), half(60)].concat();
                let text = "100 requests in the 10 s before a full hour and 100 in the 10 s after it";
                let lead = HOUR - MINUTE;
                (Quota::new(100, HOUR).all()?, Traffic::listed(text, arrivals, lead, MINUTE * 2))
            }
            Self::Doubling => (
                per_minute.all()?,
                at_moments("100 requests at 59 s and 100 at 60 s", &[(59, 100), (60, 100)], MINUTE * 2),
            ),
            Self::Log => {
                let moments = [0, 10, 20, 30, 40, 50, 70].map(|at| (at, 1));
                let log = log("sliding_window_log", "5 per 60 s", SlidingWindowLog::new(5, MINUTE))?;
                (vec![log], at_moments("requests at 0, 10, 20, 30, 40, 50 and 70 s", &moments, SECOND * 80))
            }
            Self::CountDenied => {
                let moments = [1, 30, 50, 100, 102].map(|at| (at, 1));
                let two = SlidingWindowLog::new(2, MINUTE);
                let limits = vec![
                    log("default", "2 per 60 s", two)?,
                    log("count_denied", "2 per 60 s, count_denied", two.count_denied())?,
                ];
                (limits, at_moments("requests at 1, 30, 50, 100 and 102 s", &moments, SECOND * 120))
            }
            Self::Counter => {
                let moments = [(10, 8), (61, 1), (62, 1), (63, 1), (66, 1), (90, 1)];
                let text = "8 requests in the first minute, 3 early in the second, then one at 66 s and one at 90 s";
                let counter = counter("sliding_window_counter", "10 per 60 s", SlidingWindowCounter::new(10, MINUTE))?;
                (vec![counter], at_moments(text, &moments, MINUTE * 2))
            }
            Self::Remaining => {
                let moments = [(30, 80), (75, 29), (90, 1)];
                let text = "80 requests in the first minute, 29 in the second, then one at 90 s";
                let counter =
                    counter("sliding_window_counter", "100 per 60 s", SlidingWindowCounter::new(100, MINUTE))?;
                (vec![counter], at_moments(text, &moments, MINUTE * 2))
            }
            Self::Segments => {
                let moments = [(5, 20), (15, 10), (25, 10), (35, 10), (45, 10), (55, 10), (65, 1)];
                let one = SlidingWindowCounter::new(100, MINUTE);
                let limits = vec![
                    counter("one segment", "100 per 60 s", one)?,
                    counter("six segments", "100 per 60 s, 6 segments", one.segments(6))?,
                ];
                (
                    limits,
                    at_moments(
                        "20, 10, 10, 10, 10 and 10 requests in six parts of a minute, then one at 65 s",
                        &moments,
                        MINUTE * 2,
                    ),
                )
            }
            Self::Leak => {
                let bucket = LeakyBucket::new(10, Rate::per_second(1));
                let limits = vec![
                    leaky("reject", "10, then 1/s", bucket)?,
                    leaky("queue", "10, then 1/s, queued", bucket.queue(MINUTE))?.queued(),
                ];
                (limits, at_moments("20 requests at once", &[(0, 20)], SECOND * 12))
            }
            Self::LostHalf => {
                let bucket = leaky("leaky_bucket", "4, then 1/2s", LeakyBucket::new(4, Rate::new(1, SECOND * 2)))?;
                let text = "4 requests fill the bucket at 0 s; 4 more try at 3 s and 4 at 6 s";
                (vec![bucket], at_moments(text, &[(0, 4), (3, 4), (6, 4)], SECOND * 8))
            }
            Self::Tokens => {
                let bucket = token("token_bucket", "10, then 1/s", TokenBucket::new(10, Rate::per_second(1)))?;
                (vec![bucket], at_moments("3 requests at 0 s and 15 at 2 s", &[(0, 3), (2, 15)], SECOND * 12))
            }
            Self::LazyRefill => {
                let bucket = token("token_bucket", "100, then 10/s", TokenBucket::new(100, Rate::per_second(10)))?;
                (vec![bucket], at_moments("50 requests at 0 s and 101 at 5 s", &[(0, 50), (5, 101)], SECOND * 10))
            }
            Self::Portions => {
                let bucket = TokenBucket::new(100_000, Rate::per_second(100_000));
                let limits = vec![
                    token("interval", "100000, then 100000/s at once", bucket.interval())?,
                    token("smooth", "100000, then 100000/s", bucket)?,
                ];
                let second = [spread(100_000, 0, 100_000), spread(50_000, 100_000, 900_000)].concat();
                let next = second.iter().map(|arrival| Arrival { at: arrival.at + 1_000_000, ..*arrival });
                let arrivals = second.iter().copied().chain(next).collect();
                let text = "100,000 requests in the first tenth of each second and 50,000 in the rest";
                (limits, Traffic::listed(text, arrivals, Duration::ZERO, SECOND * 2))
            }
            Self::FirstRequest => {
                let window = FixedWindow::new(100, MINUTE);
                let limits = vec![
                    fixed("clock", "100 per 60 s", window)?,
                    fixed("first_request", "100 per 60 s from the first request", window.from_first_request())?,
                ];
                let moments = [(30, 100), (60, 100), (90, 100)];
                (limits, at_moments("100 requests at 30, 60 and 90 s", &moments, MINUTE * 2))
            }
            Self::Flood => {
                let text = "10,000 requests in one second";
                let arrivals = spread(10_000, 0, 1_000_000);
                (per_minute.all()?, Traffic::listed(text, arrivals, Duration::ZERO, SECOND * 2))
            }
        })
    }
}

fn token(name: &str, numbers: &str, bucket: TokenBucket) -> Result<SimulatedLimit, InvalidLimit> {
    let limit = SimulatedLimit::new((name, "token_bucket"), numbers, bucket, MINUTE)?;
    let window = limit.limit().window();
    Ok(limit.measured_in(window))
}

fn leaky(name: &str, numbers: &str, bucket: LeakyBucket) -> Result<SimulatedLimit, InvalidLimit> {
    let limit = SimulatedLimit::new((name, "leaky_bucket"), numbers, bucket, MINUTE)?;
    let window = limit.limit().window();
    Ok(limit.measured_in(window))
}

fn fixed(name: &str, numbers: &str, windows: FixedWindow) -> Result<SimulatedLimit, InvalidLimit> {
    SimulatedLimit::new((name, "fixed_window"), numbers, windows, MINUTE)
}

fn log(name: &str, numbers: &str, log: SlidingWindowLog) -> Result<SimulatedLimit, InvalidLimit> {
    SimulatedLimit::new((name, "sliding_window_log"), numbers, log, MINUTE)
}

fn counter(name: &str, numbers: &str, counter: SlidingWindowCounter) -> Result<SimulatedLimit, InvalidLimit> {
    SimulatedLimit::new((name, "sliding_window_counter"), numbers, counter, MINUTE)
}

/// Returns traffic of some requests at once, at moments in seconds.
fn at_moments(description: &str, moments: &[(u64, usize)], span: Duration) -> Traffic {
    let arrival = |at: u64| Arrival { at: micros(Duration::from_secs(at)), key: 0, cost: 1 };
    let arrivals = moments.iter().flat_map(|(at, count)| std::iter::repeat_n(arrival(*at), *count)).collect();
    Traffic::listed(description, arrivals, Duration::ZERO, span)
}

/// Returns requests at equal distances, in microseconds.
fn spread(count: u64, from: u64, length: u64) -> Vec<Arrival> {
    (0..count).map(|n| Arrival { at: from + n * length / count, key: 0, cost: 1 }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::report::Report;
    use super::super::simulate;
    use super::*;

    fn report(scenario: Scenario) -> Report {
        let (limits, traffic) = scenario.parts().unwrap();
        simulate(&limits, &traffic).unwrap()
    }

    /// Returns the requests that each limit admits at each moment.
    fn admitted(scenario: Scenario) -> Vec<Vec<u64>> {
        let limits = report(scenario).limits;
        limits.iter().map(|limit| limit.steps.iter().map(|step| step.admitted).collect()).collect()
    }

    fn totals(scenario: Scenario) -> Vec<(String, u64)> {
        report(scenario).limits.into_iter().map(|limit| (limit.name, limit.admitted)).collect()
    }

    #[test]
    fn a_fixed_window_admits_200_in_20_seconds() {
        let report = report(Scenario::Boundary);
        let of = |name: &str| report.limits.iter().find(|limit| limit.name == name).unwrap();
        assert_eq!((of("fixed_window").admitted, of("fixed_window").worst_window), (200, 200));
        for name in ["token_bucket", "leaky_bucket", "sliding_window_log", "sliding_window_counter"] {
            assert!((100..=101).contains(&of(name).admitted), "{name}: {}", of(name).admitted);
        }
        assert_eq!(of("fixed_window").window_starts, [MINUTE], "the hour changes in the middle");
    }

    #[test]
    fn a_fixed_window_admits_200_in_one_second() {
        let admitted = admitted(Scenario::Doubling);
        assert_eq!(admitted[2], [100, 100], "fixed window");
        assert_eq!(admitted[3], [100, 0], "log");
        assert_eq!(admitted[4], [100, 0], "counter");
        assert_eq!(admitted[0], [100, 1], "token bucket: 100/60 of a token returned");
    }

    #[test]
    fn the_log_decides_as_in_the_example() {
        assert_eq!(admitted(Scenario::Log), [[1, 1, 1, 1, 1, 0, 1]]);
        assert_eq!(admitted(Scenario::CountDenied), [[1, 1, 0, 1, 1], [1, 1, 0, 1, 0]]);
    }

    #[test]
    fn the_counter_decides_as_in_the_example() {
        assert_eq!(admitted(Scenario::Counter), [[8, 1, 1, 1, 0, 1]]);
        let remaining = report(Scenario::Remaining);
        assert_eq!(remaining.limits[0].steps[2].remaining, 30);
        let segments = report(Scenario::Segments);
        let left: Vec<u64> = segments.limits.iter().map(|limit| limit.steps[6].remaining).collect();
        assert_eq!(left, [35, 39], "the estimates are 65.17 and 61, and a request passes while it is below 100");
    }

    #[test]
    fn the_buckets_decide_as_in_the_examples() {
        assert_eq!(admitted(Scenario::Leak), [[10], [10]]);
        let leak = report(Scenario::Leak);
        let leaving = |limit: usize| {
            let columns = leak.limits[limit].admitted_by_column.iter().enumerate();
            columns.filter(|(_, count)| **count > 0).map(|(column, count)| (column / 20, *count)).collect::<Vec<_>>()
        };
        assert_eq!(leaving(0), [(0, 10)]);
        assert_eq!(leaving(1), (0..10).map(|second| (second, 1)).collect::<Vec<_>>());
        assert_eq!(admitted(Scenario::LostHalf), [[4, 1, 2]]);
        assert_eq!(admitted(Scenario::Tokens), [[3, 9]]);
        assert_eq!(admitted(Scenario::LazyRefill), [[50, 100]]);
    }

    #[test]
    fn the_other_examples_admit_what_they_explain() {
        assert_eq!(admitted(Scenario::FirstRequest), [[100, 100, 0], [100, 0, 100]]);
        assert_eq!(totals(Scenario::Portions)[0], ("interval".to_owned(), 200_000));
        assert!(totals(Scenario::Flood).iter().all(|(_, admitted)| (100..=102).contains(admitted)));
    }

    #[test]
    fn every_scenario_has_its_name_on_the_command_line() {
        use clap::ValueEnum;
        assert_eq!(Scenario::value_variants(), Scenario::ALL);
        for scenario in Scenario::ALL {
            assert_eq!(scenario.to_possible_value().unwrap().get_name(), scenario.name());
        }
    }
}
