//! Limits that learn, beside fixed numbers. The benchmark `learning` prints these tables.

use super::simulation::{Day, Event, Number, Outcome, Scenario, best_fixed, run};

const FROM: u64 = 40;
const TO: u64 = 400;
const TICKS_PER_DAY: usize = 288;

/// The heads of the columns of a table.
pub(crate) const COLUMNS: [&str; 7] =
    ["number", "day before", "after 1 h", "after 1 day", "at the end", "clients touched", "peak admitted per minute"];

/// The length of an evaluation, and the day on which the event begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) clients: u64,
    pub(crate) days: u64,
    pub(crate) event_day: u64,
}

/// The result of one scenario.
pub(crate) struct Evaluated {
    pub(crate) title: String,
    pub(crate) rows: Vec<[String; 7]>,
    /// Hours in which the number was frozen, from the event on.
    pub(crate) frozen_hours: u64,
    /// The learned number at the end.
    pub(crate) number: u64,
}

/// Runs all scenarios, each with the learned number and with fixed ones.
pub(crate) fn evaluate(extent: Extent) -> impl Iterator<Item = Evaluated> {
    let Extent { clients, days, event_day: day } = extent;
    let scenarios = [
        ("daily pattern", Event::None),
        ("product launch: clients send twice as much", Event::Launch { day, percent: 200 }),
        (
            "attack of many: one client in ten, one day",
            Event::Attack { day, days: 1, clients: clients / 10, units: 2000 },
        ),
        (
            "attack of a few: one client in 600, three days",
            Event::Attack { day, days: 3, clients: clients / 600, units: 2000 },
        ),
        ("attack of one client, three days", Event::Attack { day, days: 3, clients: 1, units: 100_000 }),
        ("attack of invented keys: 60 a minute, one request each", Event::Invented { day, per_minute: 60 }),
    ];
    scenarios.into_iter().map(move |(title, event)| {
        let scenario = Scenario { clients, days, event };
        let learned = run(scenario, Number::Learned { from: FROM, to: TO, over_days: 7, cover: 9990 });
        let best = best_fixed(scenario, day);
        let fixed = [("best fixed", best), ("from", FROM), ("to", TO)].map(|(label, number)| {
            let outcome = run(Scenario { days, ..scenario }, Number::Fixed(number));
            row(label, &outcome, day as usize)
        });
        let frozen: u64 = learned.days.iter().skip(day as usize).map(|day| day.frozen_ticks).sum();
        Evaluated {
            title: title.to_owned(),
            rows: [row("learned", &learned, day as usize)].into_iter().chain(fixed).collect(),
            frozen_hours: frozen / 12,
            number: learned.numbers.last().copied().unwrap_or(0),
        }
    })
}

/// The clients touched are those of an average day, and the peak is that of all days, from the event on.
fn row(label: &str, outcome: &Outcome, event_day: usize) -> [String; 7] {
    let after = outcome.days.get(event_day..).unwrap_or_default();
    let share = |day: &Day| day.touched as f64 / day.seen.max(1) as f64;
    let touched = after.iter().map(share).sum::<f64>() / after.len().max(1) as f64;
    let peak = after.iter().map(|day| day.peak_admitted).max().unwrap_or(0);
    let number =
        |tick: usize| outcome.numbers.get(tick).or(outcome.numbers.last()).map_or(0, |number| *number).to_string();
    let event = event_day * TICKS_PER_DAY;
    [
        label.to_owned(),
        number(event.saturating_sub(1)),
        number(event + 12),
        number(event + TICKS_PER_DAY),
        number(usize::MAX),
        format!("{:.2} %", touched * 100.0),
        peak.to_string(),
    ]
}
