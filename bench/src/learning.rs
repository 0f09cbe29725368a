//! Limits that learn, beside fixed numbers: synthetic weeks through the real gate, in simulated time.

#[allow(clippy::unwrap_used, reason = "shared with the tests of the library, whose traffic is fixed")]
#[path = "../../tollgate/tests/learning/simulation.rs"]
mod simulation;

use anyhow::Result;

use self::simulation::{Day, Event, Number, Outcome, Scenario, best_fixed, run as simulate};
use crate::report::{Results, Table, note};

const CLIENTS: u64 = 3000;
const FROM: u64 = 40;
const TO: u64 = 400;

/// Limits that learn, beside the best fixed number and their bounds
///
/// 3,000 clients with a daily pattern for three weeks, a product launch, and attacks that try to train the number. Time
/// is simulated.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// End in some seconds: two weeks instead of three
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (event_day, days) = if args.quick { (10, 14) } else { (14, 21) };
    let attack = |clients, units, lasts| Event::Attack { day: event_day, days: lasts, clients, units };
    let scenarios = [
        ("daily pattern", Event::None),
        ("launch: clients send twice as much", Event::Launch { day: event_day, percent: 200 }),
        ("attack: 300 clients, a day", attack(300, 2000, 1)),
        ("attack: 5 clients, three days", attack(5, 2000, 3)),
        ("attack: 1 client, three days", attack(1, 100_000, 3)),
    ];
    note(format_args!(
        "One limit per client and minute, learned between {FROM} and {TO} over 7 days for 99.9 % of {CLIENTS} clients.\n\
         The event begins on day {event_day}. The best fixed number is known only afterwards."
    ));
    let mut results = Results::default();
    for (name, event) in scenarios {
        let scenario = Scenario { clients: CLIENTS, days, event };
        let best = best_fixed(scenario, event_day);
        let mut table = Table::new(
            name,
            [
                "number",
                "day before",
                "after 1 h",
                "after 1 day",
                "at the end",
                "clients touched",
                "peak admitted per minute",
            ],
        );
        let learned = Number::Learned { from: FROM, to: TO, over_days: 7 };
        let numbers = [
            ("learned", learned),
            ("best fixed", Number::Fixed(best)),
            ("from", Number::Fixed(FROM)),
            ("to", Number::Fixed(TO)),
        ];
        for (label, number) in numbers {
            let outcome = simulate(scenario, number);
            table.row(row(label, &outcome, event_day as usize));
            if label == "learned" {
                let day = |day: usize| outcome.days.get(day).copied().unwrap_or_default();
                let frozen: u64 = outcome.days.iter().skip(event_day as usize).map(|day| day.frozen_ticks).sum();
                note(format_args!("\n{name}: frozen for {} h from day {event_day} on", frozen / 12));
                let key = name.split([':', ' ']).next().unwrap_or(name);
                let clients =
                    if let Event::Attack { clients, .. } = event { clients.to_string() } else { String::new() };
                results.quantity(format!("learned_{key}{clients}_number"), day(days as usize - 1).number as f64);
            }
        }
        table.print();
    }
    results.print();
    Ok(())
}

/// The clients touched and the peak are those of the days from the event on.
fn row(label: &str, outcome: &Outcome, event_day: usize) -> [String; 7] {
    let after = outcome.days.get(event_day..).unwrap_or_default();
    let touched =
        after.iter().map(|day: &Day| day.touched as f64 / day.seen.max(1) as f64).sum::<f64>() / after.len() as f64;
    let peak = after.iter().map(|day| day.peak_admitted).max().unwrap_or(0);
    let number =
        |tick: usize| outcome.numbers.get(tick).or(outcome.numbers.last()).map_or(0, |number| *number).to_string();
    let event = event_day * 288;
    [
        label.to_owned(),
        number(event - 1),
        number(event + 12),
        number(event + 288),
        number(usize::MAX),
        format!("{:.2} %", touched * 100.0),
        peak.to_string(),
    ]
}
