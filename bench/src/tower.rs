//! `bench tower`: what the layer adds to a handler, beside what tower_governor's adds.
//!
//! What is deliberately not here: sockets and a server, which cost far more than any of this and would hide it.

mod contender;
mod requests;

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Context;

use self::contender::{Contender, FIELD, GOVERNOR, GOVERNOR_HEADERS, LAYER1, LAYER1_LEGACY, LAYER1_PLAIN, LAYER3};
use crate::clock;
use crate::race::{self, Rounds, Times, per_decision};
use crate::report::{self, Results, Table};
use crate::rules;

/// Many short rounds: what disturbs a machine lasts longer than a slice, and what a layer adds is a difference.
const FULL: Rounds = Rounds { count: 61, slice: Duration::from_millis(20) };
const QUICK: Rounds = Rounds { count: 21, slice: Duration::from_millis(10) };

/// Requests between two looks at the watch.
const BATCH: usize = 128;

/// The layer: processor time per request, in process, on one thread.
///
/// Every contender is the same axum handler with another layer around it, called as a server would call it: a request
/// is made, served and forgotten before the next, so that memory is taken and given back as in a server. What the
/// handler and the making of a request take is measured by itself, and taken off. All limits have room for every
/// request.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// End in some seconds: fewer and shorter rounds
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let rounds = if args.quick { QUICK } else { FULL };
    let mut field: Vec<Contender> = FIELD.iter().map(|build| build()).collect::<Result<_, _>>()?;
    field.iter_mut().for_each(Contender::fill);
    let times = race(&mut field, rounds);
    let added: Vec<Times> = times.iter().map(|whole| whole.above(&times[0])).collect();
    let mut table = Table::new("An axum handler and the layers around it", ["", "ns", "added by the layer"]);
    for (whole, added) in times.iter().zip(&added) {
        table.row([whole.name.to_owned(), format!("{:.0}", whole.median()), format!("{:.0}", added.median())]);
    }
    table.print();
    conclude(&times[0], &added, rounds)
}

/// Ratios are of what the layers add, so that the handler does not draw them nearer to 1. The first is of the headers
/// that both can write, `X-RateLimit-*`, of which tollgate's are three and tower_governor's two; the second of what each
/// is with its headers as tollgate has them by default. The last compares three limits to the handler alone.
fn conclude(handler: &Times, added: &[Times], rounds: Rounds) -> anyhow::Result<()> {
    let of = |name: &str| added.iter().find(|times| times.name == name).context("a contender is missing");
    let ratios = [
        ("layer1_vs_tower_governor", LAYER1_LEGACY, GOVERNOR_HEADERS),
        ("layer1_default_vs_tower_governor", LAYER1, GOVERNOR_HEADERS),
        ("layer1_plain_vs_tower_governor_plain", LAYER1_PLAIN, GOVERNOR),
        // The same under the name that goes with `layer1_default_vs_tower_governor`.
        ("layer1_bare_vs_tower_governor", LAYER1_PLAIN, GOVERNOR),
    ];
    let mut results = Results::default();
    results.quantity("layer3_ns", of(LAYER3)?.median());
    results.quantity("layer1_ns", of(LAYER1)?.median());
    let title = "What a layer adds, over what tower_governor's adds, or over the handler";
    let mut table = Table::new(title, ["", "ratio"]);
    for (name, ours, theirs) in ratios {
        let ratio = of(ours)?.ratio_to(of(theirs)?);
        table.row([format!("{ours} / {theirs}"), ratio.to_string()]);
        results.ratio(name, ratio.median);
    }
    let ratio = of(LAYER3)?.ratio_to(handler);
    table.row([format!("{LAYER3} / {}", handler.name), ratio.to_string()]);
    results.ratio("layer3_vs_handler", ratio.median);
    table.print();
    results.quantity("rules1000_ns", rules::many(rounds)?);
    report::note("");
    results.print();
    Ok(())
}

/// Nanoseconds of processor time per request of each contender.
fn race(field: &mut [Contender], rounds: Rounds) -> Vec<Times> {
    let mut times: Vec<Times> = field.iter().map(|contender| Times::new(contender.name)).collect();
    let Ok(()) = race::take_turns::<Infallible>(rounds.count, field.len(), |_, turn| {
        let (mut spent, mut batches) = (Duration::ZERO, 0);
        // The first batch brings the contender's own data into the cache.
        field[turn].serve(0..BATCH);
        while spent < rounds.slice {
            batches += 1;
            let before = clock::thread_time();
            field[turn].serve(batches * BATCH..(batches + 1) * BATCH);
            spent += clock::thread_time() - before;
        }
        times[turn].push(per_decision(spent, batches * BATCH));
        Ok(())
    });
    times
}
