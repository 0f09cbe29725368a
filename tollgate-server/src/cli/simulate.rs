//! `tollgate simulate`: limits on generated or recorded traffic, side by side.

use std::fs;
use std::io::{self, BufReader, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum as _;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use serde::Deserialize as _;
use serde::de::IntoDeserializer as _;
use serde::de::value::{Error as ValueError, StrDeserializer};
use tollgate::Rate;
use tollgate_config::internal::{AlgorithmName, DurationText};
use tollgate_telemetry::notice;
use tollgate_tools::simulate::limits::{ALGORITHMS, Overflow, Quota, SimulatedLimit};
use tollgate_tools::simulate::numbers::{Kind, TrafficNumbers};
use tollgate_tools::simulate::report::Report;
use tollgate_tools::simulate::scenario::Scenario;
use tollgate_tools::simulate::text::{DEFAULT_WIDTH, Layout, Style};
use tollgate_tools::simulate::traffic::Traffic;
use tollgate_tools::simulate::{SimulationError, html, simulate, svg, text, timestamps};

use super::{Completion, Error, load_once, print, whole_number};

/// The largest number of units that a limit can have.
const MAX_QUOTA: u64 = 1 << 32;

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate simulate --limit 100 --window 1m --traffic boundary
  tollgate simulate --limit 10 --window 1s --traffic poisson --rate 15/s --for 30s --svg limits.svg
  tollgate simulate --config tollgate.yaml --only per-user --traffic attack
  tollgate simulate --scenario boundary
  cut -d' ' -f1 requests.txt | tollgate simulate --timestamps -";

#[derive(clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    limits: LimitArguments,
    #[command(flatten)]
    traffic: TrafficArguments,
    /// Run a worked example, with its own limits and traffic, and explain it
    #[arg(long, value_name = "NAME", hide_possible_values = true, help_heading = "Examples with an explanation",
          conflicts_with_all = ["LimitArguments", "TrafficArguments"])]
    scenario: Option<Scenario>,
    /// List the worked examples
    #[arg(long, exclusive = true, help_heading = "Examples with an explanation")]
    list_scenarios: bool,
    /// Print the results as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Also write a picture
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
    /// Also write a page with the table and the picture
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Limits")]
#[group(multiple = true)]
struct LimitArguments {
    /// Simulate the limits of a rule file
    #[arg(long, value_name = "FILE", conflicts_with_all =
          ["algorithms", "limit", "window", "capacity", "refill", "segments", "overflow"])]
    config: Option<PathBuf>,
    /// Limit of the rule file; repeatable [default: all]
    #[arg(long, value_name = "NAME", requires = "config")]
    only: Vec<String>,
    /// Algorithm; repeatable [default: all five]
    #[arg(long = "algorithm", value_name = "NAME", value_parser = algorithm_parser())]
    algorithms: Vec<AlgorithmName>,
    /// Units per window [default: 100]
    #[arg(long, value_name = "N", value_parser = whole_number(1..=MAX_QUOTA))]
    limit: Option<u64>,
    /// Length of the window [default: 1m]
    #[arg(long, value_name = "DURATION", value_parser = window)]
    window: Option<Duration>,
    /// Units in a full bucket, for both buckets [default: the limit]
    #[arg(long, value_name = "N", value_parser = whole_number(1..=MAX_QUOTA))]
    capacity: Option<u64>,
    /// Rate of both buckets [default: the limit per window]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    refill: Option<Rate>,
    /// Segments of the sliding window counter [default: 1]
    #[arg(long, value_name = "N")]
    segments: Option<u32>,
    /// Requests that do not fit into the leaky bucket [default: queue]
    #[arg(long, value_name = "MODE")]
    overflow: Option<OverflowName>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum OverflowName {
    Reject,
    Queue,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Traffic")]
#[group(multiple = true)]
struct TrafficArguments {
    /// Shape of the traffic [default: poisson]
    #[arg(long = "traffic", value_name = "KIND")]
    kind: Option<Kind>,
    /// Requests at the times in a file (- for stdin), one per line: TIME [KEY [COST]]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kind", "rate", "span", "burst", "every", "cost", "seed"])]
    timestamps: Option<PathBuf>,
    /// Rate of requests; the highest rate of a ramp [default: 1.5 times the fastest limit]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate: Option<Rate>,
    /// Length of the traffic, up to 3650d [default: five windows, or five times the time to fill a bucket]
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    span: Option<Duration>,
    /// Requests of a burst [default: twice the largest limit], and on each side of a boundary [default: the limit]
    #[arg(long, value_name = "N", value_parser = whole_number(1..=MAX_QUOTA))]
    burst: Option<u64>,
    /// Time from one burst to the next, and from on to on [default: the window]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    every: Option<Duration>,
    /// Cost of a request [default: 1]
    #[arg(long, value_name = "UNITS")]
    cost: Option<u32>,
    /// Seed of random traffic; the same seed gives the same requests [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

pub(super) fn run(arguments: &Arguments) -> Result<Completion, Error> {
    if arguments.list_scenarios {
        let width = Scenario::ALL.iter().map(|scenario| scenario.name().len()).max().unwrap_or(0);
        for scenario in Scenario::ALL {
            print(format_args!("{:width$}  {}", scenario.name(), scenario.title()))?;
        }
        return Ok(Completion::Positive);
    }
    let report = arguments.report()?;
    if let Some(path) = &arguments.svg {
        write(path, &svg::draw(&report))?;
    }
    if let Some(path) = &arguments.html {
        write(path, &html::page(&report))?;
    }
    if arguments.json {
        print(serde_json::to_string(&report).unwrap_or_default())?;
    } else {
        print(text::show(&report, layout()))?;
    }
    Ok(Completion::Positive)
}

impl Arguments {
    fn report(&self) -> Result<Report, Error> {
        let (limits, traffic) = match self.scenario {
            Some(scenario) => scenario.parts().map_err(|error| Error::Usage(error.to_string()))?,
            None => {
                self.limits.check()?;
                self.traffic.check()?;
                let limits = self.limits.build()?;
                let traffic = self.traffic.build(&limits)?;
                (limits, traffic)
            }
        };
        let report = simulate(&limits, &traffic).map_err(|error| self.traffic.failed(&error))?;
        Ok(match self.scenario {
            Some(scenario) => report.of_scenario(scenario),
            None => report,
        })
    }
}

impl LimitArguments {
    /// Refuses options that no chosen algorithm reads.
    fn check(&self) -> Result<(), Error> {
        let has = |algorithm| self.algorithms.is_empty() || self.algorithms.contains(&algorithm);
        let has_bucket = has(AlgorithmName::TokenBucket) || has(AlgorithmName::LeakyBucket);
        let has_window =
            ALGORITHMS[2..].iter().any(|algorithm| has(*algorithm)) || self.capacity.is_none() || self.refill.is_none();
        let options = [
            ("--limit", self.limit.is_some() && !has_window, "remove it, because --capacity and --refill replace it"),
            ("--capacity", self.capacity.is_some() && !has_bucket, "remove it, or add --algorithm token_bucket"),
            ("--refill", self.refill.is_some() && !has_bucket, "remove it, or add --algorithm token_bucket"),
            (
                "--segments",
                self.segments.is_some() && !has(AlgorithmName::SlidingWindowCounter),
                "remove it, or add --algorithm sliding_window_counter",
            ),
            (
                "--overflow",
                self.overflow.is_some() && !has(AlgorithmName::LeakyBucket),
                "remove it, or add --algorithm leaky_bucket",
            ),
        ];
        match options.into_iter().find(|(_, is_idle, _)| *is_idle) {
            Some((option, _, fix)) => Err(Error::Usage(format!("{option} has no effect on these algorithms: {fix}"))),
            None => Ok(()),
        }
    }

    fn build(&self) -> Result<Vec<SimulatedLimit>, Error> {
        if let Some(path) = &self.config {
            return self.of_file(path);
        }
        let mut quota = Quota::new(self.limit.unwrap_or(100), self.window.unwrap_or(tollgate::MINUTE));
        quota.capacity = self.capacity;
        quota.refill = self.refill;
        quota.segments = self.segments.unwrap_or(quota.segments);
        quota.overflow = match self.overflow {
            Some(OverflowName::Reject) => Overflow::Reject,
            Some(OverflowName::Queue) | None => Overflow::Queue,
        };
        let algorithms = if self.algorithms.is_empty() { &ALGORITHMS[..] } else { &self.algorithms };
        let limits: Result<Vec<_>, _> = algorithms.iter().map(|algorithm| quota.with(*algorithm)).collect();
        limits.map_err(|error| Error::Usage(error.to_string()))
    }

    fn of_file(&self, path: &Path) -> Result<Vec<SimulatedLimit>, Error> {
        let file = load_once(path)?;
        let names: Vec<&str> = file.limits.iter().map(|rule| rule.name.as_str()).collect();
        if let Some(unknown) = self.only.iter().find(|name| !names.contains(&name.as_str())) {
            let file = path.display();
            let names = names.join(", ");
            return Err(Error::Usage(format!("--only: {file} has no limit `{unknown}`: use one of {names}")));
        }
        let mut limits = Vec::new();
        for rule in &file.limits {
            let name = rule.name.as_str();
            if !self.only.is_empty() && !self.only.iter().any(|only| only == name) {
                continue;
            }
            if rule.in_flight.is_some() {
                notice::warn(format_args!("limit {name} is left out: in_flight limits count no requests over time"));
                continue;
            }
            if let Some(learn) = rule.learn() {
                let (quota, from) = (rule.quota_name(), learn.from);
                notice::warn(format_args!(
                    "limit {name} learns its {quota}, and is simulated with the number that it starts from, {from}: put \
                     another in `from` to simulate it"
                ));
            }
            limits.push(SimulatedLimit::of_rule(rule).map_err(|error| Error::Usage(error.to_string()))?);
        }
        if limits.is_empty() {
            let file = path.display();
            return Err(Error::Usage(format!("{file} has no limit to simulate: add one under `limits`")));
        }
        Ok(limits)
    }
}

impl TrafficArguments {
    fn kind(&self) -> Kind {
        self.kind.unwrap_or(Kind::Poisson)
    }

    /// Refuses options that the shape of the traffic does not read.
    fn check(&self) -> Result<(), Error> {
        let is = |kinds: &[Kind]| kinds.contains(&self.kind());
        let at_once = is(&[Kind::Burst, Kind::Boundary]);
        let options = [
            ("--rate", self.rate.is_some() && at_once, "use --burst for its requests"),
            ("--burst", self.burst.is_some() && !at_once, "remove it, or use --traffic burst"),
            ("--every", self.every.is_some() && !is(&[Kind::Burst, Kind::OnOff]), "remove it, or use --traffic burst"),
            ("--seed", self.seed.is_some() && !is(&[Kind::Poisson]), "remove it, or use --traffic poisson"),
        ];
        match options.into_iter().find(|(_, is_idle, _)| *is_idle) {
            Some((option, _, fix)) => {
                let kind = self.kind().to_possible_value();
                let kind = kind.as_ref().map_or_else(Default::default, |kind| kind.get_name());
                Err(Error::Usage(format!("{option} has no effect on {kind} traffic: {fix}")))
            }
            None => Ok(()),
        }
    }

    /// Describes a simulation that cannot run, with the options that this traffic has.
    fn failed(&self, error: &SimulationError) -> Error {
        let fix = match (error, self.kind()) {
            (SimulationError::NoRequests, Kind::Burst) => "lengthen --for, or shorten --every",
            (SimulationError::NoRequests, Kind::Boundary) => "lengthen --for, or shorten --window",
            (SimulationError::NoRequests, _) => "lengthen --for, or raise --rate",
            (SimulationError::TooManyRequests(_), Kind::Burst | Kind::Boundary) => "lower --burst, or shorten --for",
            (SimulationError::TooManyRequests(_), _) => "lower --rate, or shorten --for",
            (SimulationError::TooManyLimits(_), _) => "choose some of them with --only",
            (SimulationError::Limit(error), _) => return Error::Usage(error.to_string()),
        };
        Error::Usage(format!("{}: {fix}", error.problem()))
    }

    fn build(&self, limits: &[SimulatedLimit]) -> Result<Traffic, Error> {
        if let Some(path) = &self.timestamps {
            return self.of_file(path);
        }
        let Self { rate, span, burst, every, cost, seed, .. } = *self;
        let numbers = TrafficNumbers { kind: self.kind(), rate, span, burst, every, cost, seed };
        numbers.traffic(limits).map_err(|error| Error::Usage(format!("--{error}")))
    }

    fn of_file(&self, path: &Path) -> Result<Traffic, Error> {
        let traffic = if path == Path::new("-") {
            timestamps::read(io::stdin().lock())
        } else {
            let file = fs::File::open(path).map_err(timestamps::TimestampError::Unreadable);
            file.and_then(|file| timestamps::read(BufReader::new(file)))
        };
        traffic.map_err(|error| Error::Usage(format!("--timestamps {}: {error}", path.display())))
    }
}

fn write(path: &Path, content: &str) -> Result<(), Error> {
    let cannot =
        |error| Error::Usage(format!("cannot write {}: {error}: check the path and its permissions", path.display()));
    fs::write(path, content).map_err(cannot)
}

/// Returns the layout for stdout: wide and coloured on a terminal, unless `NO_COLOR` is set.
fn layout() -> Layout {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return Layout { width: DEFAULT_WIDTH, style: Style::Plain };
    }
    let size = rustix::termios::tcgetwinsize(&stdout).ok();
    let width = size.map(|size| usize::from(size.ws_col)).filter(|width| *width > 0).unwrap_or(DEFAULT_WIDTH);
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Layout { width, style: if no_colour { Style::Plain } else { Style::Coloured } }
}

fn algorithm_parser() -> impl clap::builder::TypedValueParser<Value = AlgorithmName> {
    PossibleValuesParser::new(ALGORITHMS.map(AlgorithmName::as_str)).map(|name| {
        let known = ALGORITHMS.into_iter().find(|algorithm| algorithm.as_str() == name);
        known.unwrap_or_default()
    })
}

/// Parses a duration as a rule file does.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let deserializer: StrDeserializer<'_, ValueError> = text.into_deserializer();
    DurationText::deserialize(deserializer).map(DurationText::duration).map_err(|error| error.to_string())
}

/// Parses a window that an algorithm can have.
fn window(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        window if window < Duration::from_millis(1) => {
            Err("it is shorter than a millisecond: use 1ms or more".to_owned())
        }
        window if window > tollgate::MAX_SPAN => Err("it is too long: use a shorter window, such as 1d".to_owned()),
        window => Ok(window),
    }
}

fn rate(text: &str) -> Result<Rate, String> {
    text.parse().map_err(|error: tollgate::InvalidLimit| format!("{}: {}", error.problem(), error.fix()))
}
