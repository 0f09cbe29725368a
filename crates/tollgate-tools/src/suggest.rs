//! `tollgate replay --suggest`: chooses the numbers of a limit from a log.
//!
//! The log is read twice. The first pass measures how large each limit would have to be for each client
//! ([`Demand`]), and `choice.rs` chooses numbers that leave the wanted share of the clients untouched. The second pass
//! checks them: it sends the same requests through the real limits and counts what they deny. If a sample of the clients
//! was too kind, larger numbers are tried. Input that can be read only once is not checked, and the result says so.
//!
//! Memory does not depend on the length of the log: see `MAX_SAMPLED_CLIENTS` and `DistinctKeys`.
//!
//! Deliberately not here: reading logs, and the rules that a limit is part of.

mod choice;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use tollgate::{InvalidLimit, Limit, Limiter, ManualClock, Rate, Timestamp};
use tollgate_config::{Problems, RuleFile};
use tollgate_rules::internal::CountedAs;
use tollgate_rules::internal::demand::{Cover, Demand, Measure};
use tollgate_rules::{Gate, RuleSet};

use self::choice::{Choice, refills};
pub use self::report::{Numbers, scalar};
use super::access_log::{AccessLog, FileSummary, Format, Mappings, OpenError, Record};
use super::replay::{DistinctKeys, Flag, KeyCount};

/// The most clients that are measured: about 80 MB. If a log has more, a sample of at least half as many stands for all.
const MAX_SAMPLED_CLIENTS: usize = 1 << 15;

/// The memory of the limits in the second pass, enough for a million clients.
const MAX_LIMITER_BYTES: usize = 128 << 20;

/// Fewer clients say nothing about others.
const MIN_CLIENTS: u64 = 30;

/// A log has to be this many windows long, because a bucket may take as long to refill.
const MIN_WINDOWS: u32 = choice::MAX_REFILL_WINDOWS;

/// The most times that larger numbers are tried.
const MAX_ATTEMPTS: u32 = 4;

/// The secret of the hashes is fixed, so that a log always gives the same numbers.
const HASH_SEED: [u64; 4] = [0x746f_6c6c, 0x6761_7465, 0x7375_6767, 0x6573_7421];

/// A log and the limit to choose numbers for.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The access logs.
    pub logs: Vec<PathBuf>,
    /// Their format; detected line by line if `None`.
    pub format: Option<Format>,
    /// The fields of logs in JSON.
    pub mappings: Mappings,
    /// The parts of the key.
    pub key: Vec<String>,
    /// The window of the limit.
    pub window: Window,
    /// The share of clients that the limit covers.
    pub cover: Cover,
    /// The command that shows the suggestion.
    pub command: Command,
}

/// The command that chooses numbers. Advice names its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `tollgate replay --suggest`
    Replay,
    /// `tollgate init --from-log`
    Init,
}

/// The window of a limit, and the time in which a bucket gets its refill.
#[derive(Clone, Debug)]
pub struct Window {
    /// As in a rule file.
    text: String,
    length: Duration,
}

/// Numbers for a limit.
#[derive(Clone, Debug)]
pub struct Suggestion {
    /// The settings that it was made with.
    pub settings: Settings,
    /// The contents of the logs.
    pub log: Summary,
    /// The clients in the logs.
    pub clients: Clients,
    /// The suggested numbers.
    pub choice: Choice,
    /// What the limits deny on the same log, or `None` if it cannot be read again.
    pub checked: Option<Checked>,
}

/// How a log was read.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Requests that have the key.
    pub requests: u64,
    /// Requests that lack a part of the key.
    pub without_key: u64,
    /// Lines that could not be read.
    pub unreadable: u64,
    /// Files that could not be read to their end, with the reason.
    pub incomplete: Vec<String>,
    first: Option<Timestamp>,
    last: Option<Timestamp>,
}

/// The number of clients.
#[derive(Clone, Copy, Debug)]
pub struct Clients {
    /// The clients in the logs.
    pub all: u64,
    /// Those whose requests were measured.
    pub measured: u64,
}

/// What both limits deny.
#[derive(Clone, Copy, Debug)]
pub struct Checked {
    /// Of the token bucket.
    pub bucket: Denials,
    /// Of the sliding window.
    pub window: Denials,
}

/// The denials that a limit would have caused.
#[derive(Clone, Copy, Debug)]
pub struct Denials {
    /// The denied requests.
    pub requests: u64,
    /// The clients, and those that were denied.
    pub clients: KeyCount,
}

/// Why there is no suggestion.
#[derive(Debug)]
#[expect(missing_docs, reason = "the description of a variant covers its fields")]
pub enum SuggestError {
    /// A log cannot be opened.
    Open(OpenError),
    /// The key is invalid.
    Key(Problems),
    /// The window is invalid.
    Window(Problems),
    /// The suggested limit is invalid.
    Limit(InvalidLimit),
    /// The logs have no requests.
    NoRequests { unreadable: u64, incomplete: Vec<String>, command: Command },
    /// The logs do not have the key.
    KeyNotLogged { key: String, requests: u64, command: Command },
    /// A part of the key that no log has.
    KeyNeverLogged { part: String },
    /// A file whose times go back, described.
    NotInOrder(String),
    /// There are too few clients for a suggestion.
    TooFewClients { clients: u64 },
    /// The logs span too short a time.
    TooShort { span: Duration, window: String },
}

impl SuggestError {
    /// Returns whether the log was read, and does not have enough to choose numbers from.
    pub fn is_lack_of_data(&self) -> bool {
        matches!(self, Self::TooFewClients { .. } | Self::TooShort { .. })
    }
}

impl Suggestion {
    /// Chooses numbers. `advance` is called after each request with the log that is being read.
    pub fn from_log(settings: Settings, mut advance: impl FnMut(&AccessLog)) -> Result<Self, SuggestError> {
        let (demand, log, clients) = measure(&settings, &mut advance)?;
        if clients.all < MIN_CLIENTS {
            return Err(SuggestError::TooFewClients { clients: clients.all });
        }
        if log.span() < settings.window.length.saturating_mul(MIN_WINDOWS) {
            return Err(SuggestError::TooShort { span: log.span(), window: settings.window.text });
        }
        let mut cover = settings.cover;
        let mut attempts = 1;
        loop {
            let choice = Choice::of(&demand, cover);
            if !settings.can_read_again() {
                return Ok(Self { settings, log, clients, choice, checked: None });
            }
            let checked = check(&settings, &choice, &mut advance)?;
            let holds = checked.hold(settings.cover);
            if holds || attempts == MAX_ATTEMPTS {
                return Ok(Self { settings, log, clients, choice, checked: Some(checked) });
            }
            attempts += 1;
            cover = stricter(cover);
        }
    }

    /// Returns whether the limits leave the share of clients untouched that was wanted.
    pub fn holds(&self) -> bool {
        self.checked.is_none_or(|checked| checked.hold(self.settings.cover))
    }
}

impl Checked {
    fn hold(&self, cover: Cover) -> bool {
        let holds = |denials: &Denials| denials.clients.denied <= cover.may_touch(denials.clients.keys);
        holds(&self.bucket) && holds(&self.window)
    }
}

/// Returns a cover that leaves half as many clients touched.
fn stricter(cover: Cover) -> Cover {
    let untouched = f64::from(cover.millionths()) / 1e6;
    Cover::new(f64::midpoint(untouched, 1.0)).unwrap_or(cover)
}

impl Window {
    /// Reads a window as in a rule file, such as `1m`.
    pub fn new(text: &str) -> Result<Self, SuggestError> {
        let rules = compile(&format!("limits: [{{ name: window, limit: 1, window: {} }}]\n", report::scalar(text)));
        let rules = rules.map_err(SuggestError::Window)?;
        let length = rules.limits().first().map_or(Duration::ZERO, Limit::window);
        Ok(Self { text: text.to_owned(), length })
    }
}

impl Settings {
    /// Returns whether every log is a regular file.
    fn can_read_again(&self) -> bool {
        self.logs.iter().all(|log| std::fs::metadata(log).is_ok_and(|file| file.is_file()))
    }

    fn open(&self) -> Result<AccessLog, SuggestError> {
        AccessLog::open(&self.logs, self.format, self.mappings.clone()).map_err(SuggestError::Open)
    }
}

impl Summary {
    fn add(&mut self, now: Timestamp) {
        self.requests += 1;
        self.first = Some(self.first.map_or(now, |first| first.min(now)));
        self.last = self.last.max(Some(now));
    }

    /// Returns the time from the first request to the last.
    pub fn span(&self) -> Duration {
        let micros = |time: Option<Timestamp>| time.map_or(0, Timestamp::as_micros);
        Duration::from_micros(micros(self.last).saturating_sub(micros(self.first)))
    }
}

/// Rules that decide at the times of a log.
struct Replay {
    gate: Gate,
    clock: ManualClock,
}

impl Replay {
    /// Creates limits with these names and numbers.
    fn new<const N: usize>(settings: &Settings, limits: [(&str, Numbers); N]) -> Result<Self, SuggestError> {
        let of = |(name, numbers)| report::shadow_limit(name, &settings.key, numbers, &settings.window);
        let rules = limits.map(of).concat();
        let clock = ManualClock::at(Timestamp::from_micros(0));
        let limiter = Limiter::builder().clock(clock.clone()).max_memory(MAX_LIMITER_BYTES).hash_seed(HASH_SEED);
        let rules = compile(&format!("limits:\n{rules}")).map_err(SuggestError::Key)?;
        let gate = Gate::with_limiter(rules, limiter).map_err(SuggestError::Limit)?;
        Ok(Self { gate, clock })
    }

    /// Checks a request. Calls `counted` with the number of each rule that counts it, the client, and whether the rule
    /// would deny it.
    fn check(&self, record: &Record, mut counted: impl FnMut(u32, u64, bool)) {
        self.clock.set(record.time());
        let Some(outcome) = record.with_facts(|facts| self.gate.decide_now(facts)) else { return };
        outcome.counted().for_each(|hit| counted(hit.rule, hit.fingerprint, hit.counted_as == CountedAs::ShadowDenied));
    }
}

fn compile(rules: &str) -> Result<RuleSet, Problems> {
    RuleFile::parse("the suggested limit", rules).and_then(|parsed| parsed.compile())
}

/// Measures the demand of the clients.
fn measure(
    settings: &Settings,
    advance: &mut impl FnMut(&AccessLog),
) -> Result<(Demand, Summary, Clients), SuggestError> {
    let is_never_logged = |part: &&String| ["jwt:", "cert:", "descriptor:"].iter().any(|kind| part.starts_with(kind));
    if let Some(part) = settings.key.iter().find(is_never_logged) {
        return Err(SuggestError::KeyNeverLogged { part: part.clone() });
    }
    let window = settings.window.length;
    let buckets = refills().map(|refill| Measure::bucket(Rate::new(refill, window)));
    let mut demand = Demand::new(buckets.chain([Measure::sliding_window(window)]), MAX_SAMPLED_CLIENTS);
    let mut clients = DistinctKeys::one_of(2);
    let mut summary = Summary::default();
    // Only the key is needed here, so the numbers do not matter.
    let replay = Replay::new(settings, [("clients", Numbers::Window(1))])?;
    let mut log = settings.open()?;
    while let Some(record) = log.next_record() {
        let now = record.time();
        let mut has_key = false;
        replay.check(record, |_, client, _| {
            has_key = true;
            clients.add(client);
            demand.observe(client, 1, now);
        });
        match has_key {
            true => summary.add(now),
            false => summary.without_key += 1,
        }
        advance(&log);
    }
    summary.unreadable = log.files().map(|file| file.unreadable + file.too_long).sum();
    let problem = |file: &FileSummary| Some(format!("{} ({})", file.path.display(), file.problem.as_ref()?));
    summary.incomplete = log.files().filter_map(problem).collect();
    // The needs of clients are those of requests in the order of time.
    if let Some(file) = log.files().find(|file| !file.is_in_order()) {
        return Err(SuggestError::NotInOrder(file.describe_disorder()));
    }
    if summary.requests == 0 {
        let (requests, key, command) = (summary.without_key, settings.key.join(", "), settings.command);
        let Summary { unreadable, incomplete, .. } = summary;
        return Err(match requests {
            0 => SuggestError::NoRequests { unreadable, incomplete, command },
            _ => SuggestError::KeyNotLogged { key, requests, command },
        });
    }
    let clients = Clients { all: clients.count().keys, measured: demand.clients() as u64 };
    Ok((demand, summary, clients))
}

/// Counts what the chosen limits deny.
fn check(settings: &Settings, choice: &Choice, advance: &mut impl FnMut(&AccessLog)) -> Result<Checked, SuggestError> {
    let limits = [("bucket", Numbers::Bucket(choice.bucket)), ("window", Numbers::Window(choice.window))];
    let replay = Replay::new(settings, limits)?;
    let mut clients = [(); 2].map(|()| DistinctKeys::one_of(2));
    let mut requests = [0; 2];
    let mut log = settings.open()?;
    while let Some(record) = log.next_record() {
        replay.check(record, |rule, client, is_denied| {
            let rule = rule as usize;
            clients[rule].add(client);
            if is_denied {
                requests[rule] += 1;
                clients[rule].flag(client, Flag::Denied);
            }
        });
        advance(&log);
    }
    let of = |rule: usize| Denials { requests: requests[rule], clients: clients[rule].count() };
    Ok(Checked { bucket: of(0), window: of(1) })
}
