//! Weeks of synthetic traffic through a gate, in simulated time.
//!
//! The gate, the observers and the learner are those of the server; only the clock and the clients are simulated. The
//! benchmark `learning` runs the same scenarios at full length.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tollgate::{Limiter, ManualClock, Timestamp};
use tollgate_config::RuleFile;
use tollgate_rules::internal::demand::{Cover, Demand, Learning, LearningLimit, Measure, Phase, TICK};
use tollgate_rules::{Check, Gate};

/// The name of the limit.
const LIMIT: &str = "per-user";
/// A Monday.
const START: Timestamp = Timestamp::from_secs(1_699_833_600);
const MINUTES_PER_DAY: u64 = 24 * 60;
/// Checks of a client within a minute. Each takes a part of its units.
const CHECKS: u64 = 2;

/// How the number of the limit is chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {
    /// `cover` is in hundredths of a percent.
    Learned {
        from: u64,
        to: u64,
        over_days: u64,
        cover: u64,
    },
    Fixed(u64),
}

/// Traffic in addition to the daily pattern. Days count from the start.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    None,
    /// All clients need more from this day on, in hundredths.
    Launch {
        day: u64,
        percent: u64,
    },
    /// New clients that each send as many units per minute as they can, during these days.
    Attack {
        day: u64,
        days: u64,
        clients: u64,
        units: u64,
    },
    /// New keys in every minute from this day on. Each sends one unit, once.
    Invented {
        day: u64,
        per_minute: u64,
    },
}

/// A scenario: clients for some days, and an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) clients: u64,
    pub(crate) days: u64,
    pub(crate) event: Event,
}

/// The result of one day.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Day {
    /// The number in force at the end of the day.
    pub(crate) number: u64,
    /// Clients of the daily pattern that were seen, and those that were denied something.
    pub(crate) seen: u64,
    pub(crate) touched: u64,
    /// The most units admitted within a minute, over all clients.
    pub(crate) peak_admitted: u64,
    /// Ticks in which the number was frozen.
    pub(crate) frozen_ticks: u64,
}

/// The result of a scenario.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) days: Vec<Day>,
    /// The number in force after each tick.
    pub(crate) numbers: Vec<u64>,
}

/// A small generator with good bits: SplitMix64.
fn random(seed: u64) -> u64 {
    let mut word = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Returns the most units that a client sends within a minute: most need 10 to 40, one in a thousand about 130.
fn size(client: u64) -> u64 {
    let random = random(client ^ 0x00c1_1e47);
    // Pareto with index 3: 12 / u^(1/3), with u in (0, 1].
    let share = ((random >> 11) + 1) as f64 / (1u64 << 53) as f64;
    ((12.0 / share.cbrt()) as u64).min(5000)
}

/// Returns how busy a minute of the day is, in hundredths: 20 at four in the morning, 100 at four in the afternoon.
fn busyness(minute: u64) -> u64 {
    let angle = (minute % MINUTES_PER_DAY) as f64 / MINUTES_PER_DAY as f64 * std::f64::consts::TAU;
    (60.0 - 40.0 * (angle - std::f64::consts::TAU / 6.0).cos()) as u64
}

/// The gate under test, with what it learns.
pub(crate) struct Site {
    gate: Gate,
    file: tollgate_config::Parsed,
    pub(crate) clock: ManualClock,
    learning: Option<Learning>,
}

impl Site {
    pub(crate) fn new(number: Number, start: Timestamp) -> Self {
        let quota = match number {
            Number::Fixed(number) => number.to_string(),
            Number::Learned { from, to, over_days, cover } => {
                format!("{{ learn: {{ from: {from}, to: {to}, over: {over_days}d, cover: 0.{cover:04} }} }}")
            }
        };
        let text = format!("limits:\n  - {{ name: {LIMIT}, key: header:x-user-id, window: 1m, limit: {quota} }}\n");
        let file = RuleFile::parse("tollgate.yaml", text).unwrap();
        let rule = &file.limits[0];
        let learning = rule.learn().map(|learn| Learning::new(learn.settings().unwrap(), rule.measure().unwrap(), 1));
        let file = attached(&file, learning.as_ref());
        let clock = ManualClock::at(start);
        let limiter = Limiter::builder().clock(clock.clone()).hash_seed([1, 2, 3, 4]);
        let gate = Gate::with_limiter(file.compile().unwrap(), limiter).unwrap();
        Self { gate, file, clock, learning }
    }

    /// Sends units of a client in several checks, as if each unit were a request: those that are left are admitted, and
    /// the others are denied. Returns the units that were admitted.
    fn send(&self, client: &str, units: u64) -> u64 {
        if units == 0 {
            return 0;
        }
        // A check that costs nothing is not observed.
        let mut left = self.check(client, 0).decision().map_or(0, |decision| decision.remaining());
        let mut admitted = 0;
        for check in 0..CHECKS {
            let cost = units / CHECKS + u64::from(check < units % CHECKS);
            let fits = cost.min(left);
            for part in [fits, cost - fits].into_iter().filter(|part| *part > 0) {
                if self.check(client, part).is_allowed() {
                    admitted += part;
                    left = left.saturating_sub(part);
                }
            }
        }
        admitted
    }

    pub(crate) fn check(&self, client: &str, cost: u64) -> tollgate_rules::Outcome {
        match self.gate.check_by_name(LIMIT, &[client.as_bytes()], cost).unwrap() {
            Check::Ready(outcome) => outcome,
            Check::Pending(_) => unreachable!("the store is in memory"),
        }
    }

    /// Evaluates the demand, and puts another number in force. Returns the number, and whether it is frozen.
    pub(crate) fn tick(&mut self) -> (u64, bool) {
        let Some(learning) = &mut self.learning else { return (self.file.limits[0].limit().unwrap().quota(), false) };
        let evaluation = learning.evaluate(self.clock.now());
        let number = learning.value();
        if evaluation.moved.is_some() {
            let file = attached(&self.file, self.learning.as_ref());
            self.gate.replace(file.compile().unwrap()).unwrap();
        }
        (number, evaluation.phase == Phase::Frozen)
    }
}

fn attached(file: &tollgate_config::Parsed, learning: Option<&Learning>) -> tollgate_config::Parsed {
    let limits = learning.map(|learning| {
        let limit = LearningLimit { quota: learning.value(), observer: Arc::clone(learning.observer()) };
        (LIMIT.to_owned(), limit)
    });
    file.clone().with_learning(Arc::new(limits.into_iter().collect::<BTreeMap<_, _>>()))
}

/// Runs a scenario.
pub(crate) fn run(scenario: Scenario, number: Number) -> Outcome {
    let mut site = Site::new(number, START);
    let mut outcome = Outcome::default();
    let ticks_per_day = Duration::from_secs(86_400).as_secs() / TICK.as_secs();
    let minutes_per_tick = TICK.as_secs() / 60;
    for day in 0..scenario.days {
        let (mut result, mut touched, mut seen) = (Day::default(), vec![false; scenario.clients as usize], 0);
        let mut has_sent = vec![false; scenario.clients as usize];
        for tick in 0..ticks_per_day {
            for minute in 0..minutes_per_tick {
                let minute = day * MINUTES_PER_DAY + tick * minutes_per_tick + minute;
                site.clock.set(START.saturating_add(Duration::from_secs(minute * 60 + 1)));
                let mut admitted = 0;
                for client in 0..scenario.clients {
                    let units = units(scenario, day, minute, client);
                    if units == 0 {
                        continue;
                    }
                    let passed = site.send(&format!("user-{client}"), units);
                    admitted += passed;
                    let index = client as usize;
                    touched[index] |= passed < units;
                    seen += u64::from(!std::mem::replace(&mut has_sent[index], true));
                }
                if let Event::Attack { day: from, days, clients, units } = scenario.event
                    && (from..from + days).contains(&day)
                {
                    admitted += (0..clients).map(|client| site.send(&format!("attacker-{client}"), units)).sum::<u64>();
                }
                if let Event::Invented { day: from, per_minute } = scenario.event
                    && day >= from
                {
                    let minute = day * MINUTES_PER_DAY + tick * minutes_per_tick + minute;
                    let keys = minute * per_minute..(minute + 1) * per_minute;
                    admitted += keys.map(|key| site.send(&format!("invented-{key}"), 1)).sum::<u64>();
                }
                result.peak_admitted = result.peak_admitted.max(admitted);
            }
            let (number, is_frozen) = site.tick();
            result.number = number;
            result.frozen_ticks += u64::from(is_frozen);
            outcome.numbers.push(number);
        }
        (result.seen, result.touched) = (seen, touched.into_iter().filter(|touched| *touched).count() as u64);
        outcome.days.push(result);
    }
    outcome
}

/// Returns the units that a client of the daily pattern sends in a minute. Each is active about every twenty minutes at
/// the busiest time of the day.
fn units(scenario: Scenario, day: u64, minute: u64, client: u64) -> u64 {
    let random = random(minute.wrapping_mul(0x0001_0000_0001).wrapping_add(client));
    if random % 2000 >= busyness(minute) {
        return 0;
    }
    // Between 30 and 100 hundredths of its size.
    let part = 30 + (random >> 32) % 71;
    let percent = match scenario.event {
        Event::Launch { day: from, percent } if day >= from => percent,
        _ => 100,
    };
    (size(client) * part * percent / 10_000).max(1)
}

/// Returns the smallest number that touches at most one client of the daily pattern in a thousand from the day `from` on.
/// It is known only afterwards.
pub(crate) fn best_fixed(scenario: Scenario, from: u64) -> u64 {
    let mut demand = Demand::new([Measure::sliding_window(Duration::from_secs(60))], usize::MAX);
    for day in from..scenario.days {
        for minute in day * MINUTES_PER_DAY..(day + 1) * MINUTES_PER_DAY {
            let now = START.saturating_add(Duration::from_secs(minute * 60 + 1));
            for client in 0..scenario.clients {
                let units = units(scenario, day, minute, client);
                if units > 0 {
                    demand.observe(random(client), units, now);
                }
            }
        }
    }
    demand.needs(0).quantile(Cover::new(0.999).unwrap()).unwrap()
}
