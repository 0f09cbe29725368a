//! The cases of the campaign: what happens to regular keys, banned keys and new keys while invented keys flood a limit.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate::{LimitId, Limiter, ManualClock, Overflow, Source, Timestamp};
use tollgate_config::RuleFile;
use tollgate_http::Refusal;
use tollgate_rules::{Check, Gate, Outcome};

const LIMIT: &str = "besieged";
const QUOTA: u64 = 10;
/// A midnight, so that no window ends early.
const START: Timestamp = Timestamp::from_secs(1_699_920_000);
/// Regular keys of each kind, and new keys that arrive during the flood and after it.
const REGULARS: u64 = 20;
const NEW_KEYS: u64 = 100;
/// Requests of the flood for each slot of the limit.
const PER_SLOT: usize = 8;
/// A ban that lasts longer than the floods.
const BAN: &str = ", ban: { after: 2, within: 1m, for: 2h }";

/// An algorithm with its mode.
#[derive(Clone, Copy)]
pub(crate) enum Mode {
    Token,
    Interval,
    Leaky,
    Queue,
    ClockWindow,
    FirstRequest,
    Log,
    LogOfDenials,
    Counter,
    Segments,
}

pub(crate) const ALGORITHMS: [Mode; 10] = [
    Mode::Token,
    Mode::Interval,
    Mode::Leaky,
    Mode::Queue,
    Mode::ClockWindow,
    Mode::FirstRequest,
    Mode::Log,
    Mode::LogOfDenials,
    Mode::Counter,
    Mode::Segments,
];

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Self::Token => "token_bucket",
            Self::Interval => "token_bucket, interval",
            Self::Leaky => "leaky_bucket",
            Self::Queue => "leaky_bucket, queue",
            Self::ClockWindow => "fixed_window",
            Self::FirstRequest => "fixed_window, first_request",
            Self::Log => "sliding_window_log",
            Self::LogOfDenials => "sliding_window_log, count_denied",
            Self::Counter => "sliding_window_counter",
            Self::Segments => "sliding_window_counter, 6 segments",
        }
    }

    /// Returns the settings of a limit of 10 per window in a rule file.
    fn settings(self, window: Duration) -> String {
        let (limit, seconds) = (QUOTA, window.as_secs());
        match self {
            Self::Token => format!("algorithm: token_bucket, capacity: {limit}, refill: {limit}/{seconds}s"),
            Self::Interval => {
                format!("algorithm: token_bucket, capacity: {limit}, refill: {limit}/{seconds}s, refill_mode: interval")
            }
            Self::Leaky => format!("algorithm: leaky_bucket, capacity: {limit}, leak: {limit}/{seconds}s"),
            Self::Queue => format!(
                "algorithm: leaky_bucket, capacity: {limit}, leak: {limit}/{seconds}s, overflow: queue, max_wait: {}s",
                2 * seconds
            ),
            Self::ClockWindow => format!("algorithm: fixed_window, limit: {limit}, window: {seconds}s"),
            Self::FirstRequest => {
                format!("algorithm: fixed_window, limit: {limit}, window: {seconds}s, align: first_request")
            }
            Self::Log => format!("algorithm: sliding_window_log, limit: {limit}, window: {seconds}s"),
            Self::LogOfDenials => {
                format!("algorithm: sliding_window_log, limit: {limit}, window: {seconds}s, count_denied: true")
            }
            Self::Counter => format!("algorithm: sliding_window_counter, limit: {limit}, window: {seconds}s"),
            Self::Segments => {
                format!("algorithm: sliding_window_counter, limit: {limit}, window: {seconds}s, segments: 6")
            }
        }
    }
}

/// What each invented key does.
#[derive(Clone, Copy)]
pub(crate) enum Flood {
    /// It sends one request.
    OneRequest,
    /// It spends its quota and goes on until it is denied three times, which a ban punishes.
    WholeQuota,
    /// First keys of one request, then keys that spend their quota.
    BothInTurn,
}

impl Flood {
    const fn name(self) -> &'static str {
        match self {
            Self::OneRequest => "1 request",
            Self::WholeQuota => "13 requests",
            Self::BothInTurn => "1, then 13 requests",
        }
    }

    /// Returns the costs of the requests of an invented key.
    fn costs(self, is_first_half: bool) -> &'static [u64] {
        const ONE: [u64; 1] = [1];
        const ALL: [u64; 4] = [QUOTA, 1, 1, 1];
        match self {
            Self::OneRequest => &ONE,
            Self::BothInTurn if is_first_half => &ONE,
            Self::WholeQuota | Self::BothInTurn => &ALL,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) algorithm: Mode,
    pub(crate) max_memory: usize,
    pub(crate) window: Duration,
    pub(crate) with_ban: bool,
    pub(crate) flood: Flood,
}

/// A gate with one limit, in memory.
pub(crate) struct Site {
    gate: Gate,
    limiter: Limiter,
    limit: LimitId,
    pub(crate) clock: ManualClock,
}

pub(crate) fn is_banned(outcome: &Outcome) -> bool {
    matches!(outcome.refusal(), Some(Refusal::Banned { .. }))
}

impl Site {
    pub(crate) fn new(settings: &str, max_memory: usize) -> Self {
        let text = format!("limits:\n  - {{ name: {LIMIT}, key: header:x-user-id, {settings} }}\n");
        let rules = RuleFile::parse("tollgate.yaml", text).unwrap().compile().unwrap();
        let clock = ManualClock::at(START);
        // A fixed seed, so that the figures are the same in every run.
        let limiter = Limiter::builder().clock(clock.clone()).max_memory(max_memory).hash_seed([1, 2, 3, 4]);
        let gate = Gate::with_limiter(rules, limiter).unwrap();
        let limiter = gate.memory().unwrap();
        let limit = limiter.id(LIMIT).unwrap();
        Self { gate, limiter, limit, clock }
    }

    pub(crate) fn check(&self, key: &str, cost: u64) -> Outcome {
        match self.gate.check_by_name(LIMIT, &[key.as_bytes()], cost).unwrap() {
            Check::Ready(outcome) => outcome,
            Check::Pending(_) => unreachable!("the store is in memory"),
        }
    }

    pub(crate) fn overflow(&self) -> Overflow {
        self.limiter.overflow(self.limit)
    }

    pub(crate) fn ban_overflow(&self) -> Overflow {
        self.limiter.ban(LIMIT).map_or_else(Overflow::default, |ban| self.limiter.overflow(ban))
    }

    fn slots(&self) -> usize {
        self.limiter.occupancy(self.limit).slots
    }
}

/// The figures of a case.
#[derive(Default)]
pub(crate) struct Figures {
    pub(crate) case: Option<Case>,
    slots: usize,
    requests: usize,
    /// New keys whose first request was allowed during the flood.
    pub(crate) new_keys_served: u64,
    overflow: Overflow,
    lost_strikes: u64,
}

impl Case {
    pub(crate) fn describe(&self) -> String {
        let ban = if self.with_ban { "with a ban" } else { "without a ban" };
        let Self { max_memory, window, algorithm, flood, .. } = self;
        format!("{}, {window:?}, {max_memory} bytes, {ban}, keys of {}", algorithm.name(), flood.name())
    }

    /// Runs the case next to an equal gate that has room for all keys and no flood.
    fn run(self) -> Figures {
        let name = self.describe();
        let settings = self.algorithm.settings(self.window) + if self.with_ban { BAN } else { "" };
        let (site, alone) = (Site::new(&settings, self.max_memory), Site::new(&settings, 64 << 20));
        let both = |key: &str, cost: u64, moment: &str| {
            let (outcome, expected) = (site.check(key, cost), alone.check(key, cost));
            assert_eq!(outcome.decision(), expected.decision(), "{name}: {key} {moment}");
            assert_eq!(outcome.refusal(), expected.refusal(), "{name}: {key} {moment}");
        };
        // Some regular keys have spent little before the flood, and others most of their quota.
        for regular in 0..REGULARS {
            both(&format!("light-{regular}"), 1, "before the flood");
            both(&format!("heavy-{regular}"), QUOTA - 3, "before the flood");
        }
        for _ in 0..4 {
            both("greedy", QUOTA - 1, "before the flood");
        }
        let mut figures = self.flood(&site, |percent| {
            alone.clock.set(site.clock.now());
            if percent % 33 == 32 {
                for regular in 0..REGULARS {
                    both(&format!("light-{regular}"), 1, "during the flood");
                    both(&format!("heavy-{regular}"), 1, "during the flood");
                }
                both("greedy", QUOTA, "during the flood");
            }
        });
        (figures.overflow, figures.lost_strikes) = (site.overflow(), site.ban_overflow().lost_strikes);
        self.after(&site, &name);
        figures
    }

    /// Sends the requests of the flood in a twentieth of the window, in which no state of a regular key comes to rest.
    fn flood(self, site: &Site, mut between: impl FnMut(usize)) -> Figures {
        let name = self.describe();
        let (mut sent, mut denied, mut percent) = (0, 0, 0);
        let mut figures = Figures { case: Some(self), ..Figures::default() };
        let mut lacks_room = |outcome: &Outcome| {
            let lacks_room = outcome.decision().unwrap().source() == Source::SharedQuota;
            denied += u64::from(lacks_room);
            lacks_room
        };
        let mut key = 0_u64;
        while percent < 100 {
            let total = PER_SLOT * site.slots();
            for cost in self.flood.costs(percent < 50) {
                lacks_room(&site.check(&format!("invented-{key}"), *cost));
                sent += 1;
            }
            key += 1;
            while percent < 100 && sent * 100 >= total * (percent + 1) {
                between(percent);
                let new_key = format!("new-{percent}");
                let outcome = site.check(&new_key, 1);
                assert!(!is_banned(&outcome), "{name}: {new_key}");
                assert!(lacks_room(&outcome) != outcome.is_allowed(), "{name}: {new_key} is denied by its own count");
                figures.new_keys_served += u64::from(outcome.is_allowed());
                site.clock.advance(self.window / 2_000);
                percent += 1;
            }
        }
        assert_eq!(site.overflow().denied, denied, "{name}: the operator sees all denials for lack of room");
        (figures.requests, figures.slots) = (sent, site.slots());
        figures
    }

    /// New keys have their whole quota again once everything that was spent during the flood is back.
    fn after(self, site: &Site, name: &str) {
        // A counter of a whole window counts in part until the end of the next one, and a queue drains in two.
        site.clock.advance(2 * self.window);
        for key in 0..NEW_KEYS {
            let key = format!("fresh-{key}");
            let outcome = site.check(&key, QUOTA);
            assert!(outcome.is_allowed(), "{name}: {key} after the flood: {:?}", outcome.refusal());
        }
    }
}

/// Runs the cases on all processors, and returns their figures in order.
pub(crate) fn run(cases: &[Case]) -> Vec<Figures> {
    let (next, figures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((number, case)) = {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(number).map(|case| (number, case))
                } {
                    let result = case.run();
                    figures.lock().unwrap().push((number, result));
                }
            });
        }
    });
    let mut figures = figures.into_inner().unwrap();
    figures.sort_by_key(|(number, _)| *number);
    figures.into_iter().map(|(_, figures)| figures).collect()
}

/// Returns the figures as a table in Markdown.
pub(crate) fn table(results: &[Figures]) -> String {
    let mut text = String::from(
        "| algorithm | window | `max_memory` | ban | invented keys send | requests | slots | new keys served | evicted | denied for lack of room | strikes lost |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for Figures { case, slots, requests, new_keys_served, overflow, lost_strikes } in results {
        let Some(case) = case else { continue };
        let Case { algorithm, max_memory, window, with_ban, flood } = case;
        let _ = writeln!(
            text,
            "| {} | {window:?} | {max_memory} | {} | {} | {requests} | {slots} | {new_keys_served} % | {} | {} | {lost_strikes} |",
            algorithm.name(),
            if *with_ban { "yes" } else { "no" },
            flood.name(),
            overflow.evicted,
            overflow.denied,
        );
    }
    text
}
