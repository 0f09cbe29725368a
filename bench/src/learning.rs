//! Limits that learn, beside fixed numbers: synthetic weeks through the real gate, in simulated time.

mod evaluation;
mod log;
#[allow(clippy::unwrap_used, reason = "shared with the tests of the library, whose traffic is fixed")]
#[path = "../../crates/tollgate-config/tests/learning/simulation.rs"]
mod simulation;

use std::path::{Path, PathBuf};

use anyhow::Result;

use self::evaluation::{COLUMNS, Extent, evaluate};
use self::log::Log;
use crate::report::{Results, Table, note};

/// Limits that learn, beside the best fixed number and their bounds
///
/// Clients with a daily pattern for three weeks, a product launch, and attacks that try to train the number. Time is
/// simulated.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// End in some seconds: half the clients, and two weeks instead of three
    #[arg(long)]
    quick: bool,
    /// Evaluate on this access log too, in the Common or Combined Log Format
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Evaluate on the access log only
    #[arg(long, requires = "log", conflicts_with = "quick")]
    only_log: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut results = Results::default();
    if !args.only_log {
        evaluate_scenarios(args, &mut results);
    }
    if let Some(path) = &args.log {
        evaluate_log(path, &mut results)?;
    }
    results.print();
    Ok(())
}

/// The limit learns from one day. The bounds are half and four times the best fixed number, which is known only
/// afterwards.
fn evaluate_log(path: &Path, results: &mut Results) -> Result<()> {
    let log = Log::read(path)?;
    let mut table = Table::new(format!("{}, and a limit per minute for 99 % of clients", log.title()), log::COLUMNS);
    let (rows, number) = log.evaluate();
    rows.into_iter().for_each(|row| table.row(row));
    table.print();
    results.quantity("learned_log_number".to_owned(), number as f64);
    Ok(())
}

fn evaluate_scenarios(args: &Args, results: &mut Results) {
    let full = Extent { clients: 3000, days: 21, event_day: 14 };
    let quick = Extent { clients: 1500, days: 14, event_day: 10 };
    let extent = if args.quick { quick } else { full };
    note(format_args!(
        "A limit per client and minute that learns from 7 days, for 99.9 % of {} clients. The event begins on day {}.\n\
         The best fixed number is known only afterwards.",
        extent.clients, extent.event_day
    ));
    for (name, evaluated) in
        ["daily", "launch", "attack_of_many", "attack_of_a_few", "attack_of_one"].into_iter().zip(evaluate(extent))
    {
        let mut table = Table::new(format!("{}; frozen for {} h", evaluated.title, evaluated.frozen_hours), COLUMNS);
        evaluated.rows.into_iter().for_each(|row| table.row(row));
        table.print();
        results.quantity(format!("learned_{name}_number"), evaluated.number as f64);
    }
}
