//! `bench tower`: the cost that the layer adds to a handler, compared with tower_governor's.
//!
//! Deliberately not here: sockets and a server, which cost far more than the layers and would hide the difference.

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

/// Many short rounds: noise lasts longer than a slice, and the result is a difference of two measurements.
const FULL: Rounds = Rounds { count: 61, slice: Duration::from_millis(20) };
const QUICK: Rounds = Rounds { count: 21, slice: Duration::from_millis(10) };

/// Requests between two clock reads.
const BATCH: usize = 128;

/// The layer: processor time per request, in process, on one thread.
///
/// Every contender is the same axum handler with another layer, called as a server would call it: a request is created,
/// served and dropped before the next, so that memory is allocated and freed as in a server. The time of the handler
/// and of creating a request is measured separately and subtracted. Every request is allowed.
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

/// Ratios are of the time that the layers add, so that the handler does not move them towards 1. The first is with the
/// headers that both can write, `X-RateLimit-*`: three of Tollgate's and two of tower_governor's. The second is with
/// Tollgate's default headers. The last compares three limits with the handler alone.
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
        // The first batch warms the cache.
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
