//! `bench tower`: what the layer adds to a handler, beside what tower_governor's adds.
//!
//! What is deliberately not here: sockets and a server, which cost far more than any of this and would hide it.

mod contender;
mod requests;

use std::convert::Infallible;
use std::time::Duration;

use self::contender::{BARE, Contender, FIELD, GOVERNOR, GOVERNOR_HEADERS, LAYER1, LAYER1_PLAIN, LAYER3};
use crate::clock;
use crate::race::{self, Rounds, Times, per_decision};
use crate::report::{self, Results, Table};
use crate::rules;

/// Requests of one batch. They are made before the watch starts, and few enough to stay in the cache as those that
/// a server has just read would.
const BATCH: usize = 128;

/// The layer: processor time per request, in process, on one thread.
///
/// Every contender is the same axum handler with another layer around it, called as a server would call it, with
/// requests that were made before the watch starts. All limits have room for every request.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// End in some seconds: fewer and shorter rounds
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let rounds = if args.quick { rules::QUICK } else { rules::FULL };
    let mut field: Vec<Contender> = FIELD.iter().map(|build| build()).collect::<Result<_, _>>()?;
    let times = race(&mut field, rounds);
    let of = |name: &str| times.iter().find(|times| times.name == name);
    let (Some(bare), Some(layer3), Some(layer1), Some(plain)) = (of(BARE), of(LAYER3), of(LAYER1), of(LAYER1_PLAIN))
    else {
        anyhow::bail!("a contender is missing");
    };
    let (Some(governor), Some(governor_headers)) = (of(GOVERNOR), of(GOVERNOR_HEADERS)) else {
        anyhow::bail!("tower_governor is missing");
    };

    let mut table = Table::new("An axum handler and the layers around it", ["", "ns", "above the handler"]);
    for times in &times {
        let added = times.above(bare).median();
        table.row([times.name.to_owned(), format!("{:.0}", times.median()), format!("{added:.0}")]);
    }
    table.print();
    let added = |times: &Times| times.above(bare);
    let with_headers = added(layer1).ratio_to(&added(governor_headers));
    let without = added(plain).ratio_to(&added(governor));
    report::note(format_args!(
        "\nWhat one limit adds, over what tower_governor's adds: both with headers {with_headers}, both without \
         {without}."
    ));
    report::note("");
    let mut results = Results::default();
    results.quantity("layer3_ns", added(layer3).median());
    results.quantity("layer1_ns", added(layer1).median());
    results.ratio("layer1_vs_tower_governor", with_headers.median);
    results.ratio("layer1_plain_vs_tower_governor_plain", without.median);
    results.quantity("rules1000_ns", rules::many(rounds)?);
    results.print();
    Ok(())
}

/// Nanoseconds of processor time per request of each contender.
fn race(field: &mut [Contender], rounds: Rounds) -> Vec<Times> {
    let mut times: Vec<Times> = field.iter().map(|contender| Times::new(contender.name)).collect();
    let Ok(()) = race::take_turns::<Infallible>(rounds.count, field.len(), |_, turn| {
        let (mut spent, mut batches) = (Duration::ZERO, 0);
        // The first batch brings the contender's own data into the cache.
        field[turn].serve(requests::batch(0));
        while spent < rounds.slice {
            batches += 1;
            let batch = requests::batch(batches);
            let before = clock::thread_time();
            field[turn].serve(batch);
            spent += clock::thread_time() - before;
        }
        times[turn].push(per_decision(spent, batches * BATCH));
        Ok(())
    });
    times
}
