//! A suggestion as rules to paste, and as JSON.

use std::borrow::Cow;
use std::fmt;

use serde_json::{Value, json};
use tollgate_config::Problems;
use tollgate_telemetry::words::{Grouped, Span, counted};

use super::choice::{Bucket, MAX_REFILL_WINDOWS};
use super::{Command, Denials, MAX_SAMPLED_CLIENTS, MIN_CLIENTS, SuggestError, Suggestion, Window};
use crate::access_log::MERGE_FIX;

/// The rows of the curve before and after the chosen one.
const ROWS_AROUND: usize = 3;

/// The numbers of a limit.
#[derive(Clone, Copy, Debug)]
pub enum Numbers {
    /// A token bucket.
    Bucket(Bucket),
    /// The limit of a sliding window.
    Window(u64),
}

/// Returns the key of a limit in a rule file.
fn key_setting(key: &[String]) -> String {
    let parts: Vec<Cow<'_, str>> = key.iter().map(|part| scalar(part)).collect();
    match &*parts {
        [part] => format!("    key: {part}\n"),
        parts => format!("    key: [{}]\n", parts.join(", ")),
    }
}

/// Returns the numbers of a limit in a rule file.
fn number_settings(numbers: Numbers, window: &Window) -> String {
    match numbers {
        Numbers::Bucket(Bucket { capacity, refill }) => {
            let rate = window.rate(refill);
            format!("    algorithm: token_bucket\n    capacity: {capacity}\n    refill: {rate}\n")
        }
        Numbers::Window(limit) => format!("    limit: {limit}\n    window: {}\n", scalar(&window.text)),
    }
}

/// Returns a limit that counts and denies nothing, and ignores requests without the key.
pub(super) fn shadow_limit(name: &str, key: &[String], numbers: Numbers, window: &Window) -> String {
    let (key, numbers) = (key_setting(key), number_settings(numbers, window));
    format!("  - name: {name}\n{key}{numbers}    missing: skip\n    shadow: true\n")
}

impl Window {
    /// Returns the rate of this many units in a window, such as `60/m`.
    fn rate(&self, units: u64) -> String {
        const PERIODS: [(u128, &str); 6] =
            [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1000, "ms"), (1, "us")];
        let micros = self.length.as_micros().max(1);
        let period = PERIODS.into_iter().find(|(period, _)| micros.is_multiple_of(*period));
        let (period, unit) = period.unwrap_or((1, "us"));
        match micros / period {
            1 => format!("{units}/{unit}"),
            count => format!("{units}/{count}{unit}"),
        }
    }
}

/// Returns text as a YAML scalar, in quotes unless it needs none.
pub fn scalar(text: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b":/._-".contains(&byte);
    let starts_plain = text.starts_with(|char: char| char.is_ascii_alphanumeric() || char == '/');
    if starts_plain && !text.ends_with(':') && text.bytes().all(is_plain) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("'{}'", text.replace('\'', "''")))
}

/// A rule file with the suggested limits. Everything else is in comments.
impl fmt::Display for Suggestion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { settings, log, clients, choice, checked } = self;
        let window = &settings.window;
        let key = settings.key.join(", ");
        let span = Span(log.span().as_secs());
        let requests = counted(log.requests, "request", "requests");
        writeln!(out, "# {} clients (key {key}) sent {requests} in {span}.", Grouped(clients.all))?;
        self.notes().iter().try_for_each(|note| writeln!(out, "# {note}"))?;
        writeln!(out, "# Next: docs/choosing-numbers.md\n#")?;
        let most = format!("most in {}", window.text);
        writeln!(
            out,
            "# What {} of clients need. The most that a bucket admits is capacity + refill:",
            settings.cover
        )?;
        writeln!(out, "#   {:>9}  {:>9}  {most:>11}", "refill", "capacity")?;
        for pair in self.shown_curve() {
            let Bucket { capacity, refill } = pair;
            let chosen = if refill == choice.bucket.refill { "  (chosen)" } else { "" };
            let (rate, capacity, sum) = (window.rate(refill), Grouped(capacity), Grouped(capacity + refill));
            writeln!(out, "#   {rate:>9}  {:>9}  {:>11}{chosen}", capacity.to_string(), sum.to_string())?;
        }
        writeln!(out, "\nlimits:\n  # {}", self.effect(checked.map(|checked| checked.bucket)))?;
        let key = key_setting(&settings.key);
        writeln!(out, "  - name: per-client\n{key}{}", self.settings(Numbers::Bucket(choice.bucket)))?;
        writeln!(out, "  # Or as a limit per window:\n  # {}", self.effect(checked.map(|checked| checked.window)))?;
        let entry = format!("  - name: per-client\n{key}{}", self.settings(Numbers::Window(choice.window)));
        entry.lines().try_for_each(|line| writeln!(out, "  # {}", &line[2..]))
    }
}

impl Suggestion {
    /// Returns the settings of the suggested bucket in a rule file, after its key.
    pub fn bucket_settings(&self) -> String {
        self.settings(Numbers::Bucket(self.choice.bucket))
    }

    /// Returns what the suggested bucket does on the log.
    pub fn bucket_effect(&self) -> String {
        self.effect(self.checked.map(|checked| checked.bucket))
    }

    fn settings(&self, numbers: Numbers) -> String {
        let missing = if self.log.without_key == 0 { "" } else { "    missing: skip\n" };
        format!("{}{missing}", number_settings(numbers, &self.settings.window))
    }

    /// Returns the limits with their effect as JSON.
    pub fn json(&self) -> Value {
        let Self { settings, log, clients, choice, checked } = self;
        let effect = |denials: Option<Denials>| {
            denials.map(|denials| {
                json!({
                    "denied": denials.requests,
                    "clients": denials.clients.keys,
                    "clients_denied": denials.clients.denied,
                    "clients_exact": denials.clients.exact,
                })
            })
        };
        let curve: Vec<Value> = choice
            .curve
            .iter()
            .map(|pair| json!({ "capacity": pair.capacity, "refill": settings.window.rate(pair.refill) }))
            .collect();
        json!({
            "key": settings.key,
            "cover": f64::from(settings.cover.millionths()) / 1e6,
            "requests": log.requests,
            "requests_without_key": log.without_key,
            "unreadable_lines": log.unreadable,
            "incomplete_files": log.incomplete,
            "seconds": log.span().as_secs(),
            "clients": clients.all,
            "clients_measured": clients.measured,
            "holds": self.checked.map(|_| self.holds()),
            "limits": [
                {
                    "algorithm": "token_bucket",
                    "capacity": choice.bucket.capacity,
                    "refill": settings.window.rate(choice.bucket.refill),
                    "on_this_log": effect(checked.map(|checked| checked.bucket)),
                },
                {
                    "algorithm": "sliding_window_counter",
                    "limit": choice.window,
                    "window": settings.window.text,
                    "on_this_log": effect(checked.map(|checked| checked.window)),
                },
            ],
            "capacity_by_refill": curve,
            "notes": self.notes(),
        })
    }

    /// Returns what a reader has to know before they use the numbers.
    pub fn notes(&self) -> Vec<String> {
        let Self { settings, log, clients, checked, .. } = self;
        let mut notes = Vec::new();
        for file in &log.incomplete {
            notes.push(format!(
                "WARNING: a file could not be read to its end, and the numbers are those of what could be read: check \
                 that it is complete: {file}"
            ));
        }
        if settings.cover.may_touch(clients.all) == 0 {
            let (cover, all) = (settings.cover, Grouped(clients.all));
            let lower = match settings.command {
                Command::Replay => ", or a lower --cover",
                Command::Init => "",
            };
            notes.push(format!(
                "{cover} of {all} clients are all of them, so the heaviest client sets the numbers: use a longer log{lower}"
            ));
        }
        if clients.measured < clients.all {
            let (measured, most) = (Grouped(clients.measured), Grouped(MAX_SAMPLED_CLIENTS as u64));
            notes.push(format!(
                "Measured by a random sample of {measured} clients, because there are more than {most}."
            ));
        }
        if log.without_key > 0 {
            let (without, key) = (counted(log.without_key, "request lacks", "requests lack"), settings.key.join(", "));
            notes.push(format!(
                "{without} {key}, and `missing: skip` leaves such requests without a limit: add one by ip for them"
            ));
        }
        if log.unreadable > 0 {
            notes.push(format!("{} could not be read.", counted(log.unreadable, "line", "lines")));
        }
        if checked.is_none() {
            notes.push(
                "Not checked by a replay, because this input can be read only once: use files for that.".to_owned(),
            );
        } else if !self.holds() {
            notes.push(format!(
                "No numbers were found that leave {} of clients untouched: choose larger ones",
                settings.cover
            ));
        }
        notes
    }

    fn effect(&self, denials: Option<Denials>) -> String {
        let Some(denials) = denials else { return "Its effect on this log is not known.".to_owned() };
        let requests = Share { part: denials.requests, whole: self.log.requests, noun: "requests" };
        let clients = Share { part: denials.clients.denied, whole: denials.clients.keys, noun: "clients" };
        format!("On this log it denies {requests} and touches {clients}.")
    }

    /// Returns the part of the curve around the chosen pair.
    fn shown_curve(&self) -> impl Iterator<Item = Bucket> {
        let curve = &self.choice.curve;
        let chosen = curve.iter().position(|pair| pair.refill == self.choice.bucket.refill).unwrap_or_default();
        curve.iter().copied().skip(chosen.saturating_sub(ROWS_AROUND)).take(2 * ROWS_AROUND + 1)
    }
}

impl fmt::Display for SuggestError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(error) => error.fmt(out),
            Self::Key(problems) => write_problem(out, "--key", problems),
            Self::Window(problems) => write_problem(out, "--window", problems),
            Self::Limit(error) => error.fmt(out),
            Self::NoRequests { incomplete, .. } if !incomplete.is_empty() => {
                write!(out, "no request could be read from {}: check that the file is complete", incomplete.join(", "))
            }
            Self::NoRequests { unreadable: 0, .. } => out.write_str("the log has no requests: name another file"),
            Self::NoRequests { unreadable, command, .. } => {
                let lines = counted(*unreadable, "line", "lines");
                let fix = match command {
                    Command::Replay => "name the format with --format",
                    Command::Init => "name a log in a format that `tollgate replay --help` lists",
                };
                write!(out, "none of {lines} could be read as a request: {fix}")
            }
            Self::KeyNotLogged { key, requests, command } => {
                let requests = counted(*requests, "request", "requests");
                let fix = match command {
                    Command::Replay => "use --map header:NAME=FIELD if a field of the log has it, or another --key",
                    Command::Init => {
                        "use another --key, or choose the numbers with `tollgate replay --suggest --map header:NAME=FIELD`"
                    }
                };
                write!(out, "none of {requests} in the log has {key}: {fix}")
            }
            Self::KeyNeverLogged { part } => write!(
                out,
                "--key: no log has {part}, so there are no numbers to choose from: use a part that the log has, such as ip \
                 or header:x-user-id"
            ),
            Self::NotInOrder(disorder) => write!(out, "{disorder}: {MERGE_FIX}"),
            Self::TooFewClients { clients } => {
                let clients = counted(*clients, "client is", "clients are");
                write!(
                    out,
                    "{clients} too few to choose numbers for others: use a log with {MIN_CLIENTS} clients or more, or \
                     another --key"
                )
            }
            Self::TooShort { span, window } => write!(
                out,
                "the log is {} long, too short for a window of {window}: use a log of {MAX_REFILL_WINDOWS} windows or \
                 more, or a shorter --window",
                Span(span.as_secs())
            ),
        }
    }
}

fn write_problem(out: &mut fmt::Formatter<'_>, option: &str, problems: &Problems) -> fmt::Result {
    match problems.iter().next() {
        Some(problem) => write!(out, "{option}: {}: {}", problem.message(), problem.fix()),
        None => write!(out, "{option} cannot be used: choose another value"),
    }
}

/// A part of a whole: `12 of 1,240 clients (0.97 %)`.
struct Share {
    part: u64,
    whole: u64,
    noun: &'static str,
}

impl fmt::Display for Share {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, whole, noun } = *self;
        let percent = part as f64 * 100.0 / whole.max(1) as f64;
        write!(out, "{} of {} {noun} ({percent:.2} %)", Grouped(part), Grouped(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_readable() {
        let share = Share { part: 12, whole: 1240, noun: "clients" };
        assert_eq!(share.to_string(), "12 of 1,240 clients (0.97 %)");
    }

    #[test]
    fn rates_are_those_of_a_rule_file() {
        let rates = [
            ("1m", "60/m"),
            ("1h", "60/h"),
            ("10s", "60/10s"),
            ("1h30m", "60/90m"),
            ("90s", "60/90s"),
            ("1500us", "60/1500us"),
        ];
        for (text, rate) in rates {
            assert_eq!(Window::new(text).unwrap().rate(60), rate);
            assert!(rate.parse::<tollgate::Rate>().is_ok(), "{rate}");
        }
        assert!(Window::new("soon").is_err());
    }
}
