//! `bench service`: the decision service over the Redis protocol, HTTP and gRPC, compared with throttlecrab-server and
//! with a gRPC server that decides nothing.
//!
//! Deliberately not here: a network, TLS, several cores, tokens, and a store on Redis.

mod contender;
pub(crate) mod empty_handler;
mod envoy;
mod load;
mod race;

use anyhow::Context as _;
use clap::ValueEnum;

use self::contender::{Programs, Servers};
use self::load::{Replies, Script};
use self::race::{Case, Contender, Figures, Rate, Work};
use crate::cores::Cores;
use crate::options::{Options, Scale};
use crate::race::Times;
use crate::report::{self, Results};

/// Requests in a pipeline.
const PIPELINE: usize = 16;

/// The decision service: decisions per second of processor time, and latency, compared with throttlecrab-server.
///
/// Contenders run in turn, each alone on the first core; the load has the others, four at most. Missing programs
/// (throttlecrab-server, h2load) are installed with tools/install-service-peers.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Redis protocol, one command at a time on each connection
    Resp,
    /// Redis protocol, 16 commands in a pipeline
    RespPipelined,
    /// HTTP, one request at a time on each connection
    Http,
    /// Envoy's rate limit service
    Rls,
}

/// The extent of a quick run.
const QUICK: Scale = Scale { rounds: 3, warm_up_s: 1, slice_s: 2 };

/// The environment of every measurement.
struct Bench {
    scale: Scale,
    cores: Cores,
    programs: Programs,
}

/// The names of a part's results.
struct Names {
    part: &'static str,
    peer: &'static str,
}

const TOLLGATE: &str = "tollgate";
const THROTTLECRAB: &str = "throttlecrab-server";
const TOLLGATE_PING: &str = "tollgate, PING";
const THROTTLECRAB_PING: &str = "throttlecrab-server, PING";
const EMPTY_HANDLER: &str = "empty tonic handler";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let cores = Cores::of_this_machine()?;
    let options = &args.options;
    let wants = |part| options.wants(part);
    let programs = Programs::find(options.tollgate.as_deref())?;
    let scale = if options.quick { QUICK } else { Scale::FULL };
    let bench = Bench { scale, cores, programs };
    introduce(&bench);
    let mut results = Results::default();
    if wants(Part::Resp) || wants(Part::RespPipelined) || wants(Part::Http) {
        let servers = Servers::start(&bench.programs, cores)?;
        if wants(Part::Resp) {
            resp(&bench, &servers, 1, &mut results)?;
        }
        if wants(Part::RespPipelined) {
            resp(&bench, &servers, PIPELINE, &mut results)?;
        }
        if wants(Part::Http) {
            http(&bench, &servers, &mut results)?;
        }
    }
    if wants(Part::Rls) {
        rls(&bench, &mut results)?;
    }
    report::note("");
    results.print();
    Ok(())
}

fn resp(bench: &Bench, servers: &Servers, batch: usize, results: &mut Results) -> anyhow::Result<()> {
    let (theirs, ours) = (&servers.throttlecrab, &servers.tollgate);
    let script = |replies| Work::Script(Script { requests: contender::resp_requests(replies), batch, replies });
    let contender = |name, server, replies| Contender { name, server, address: server.resp, work: script(replies) };
    let contenders = [
        contender(TOLLGATE, ours, Replies::Throttle),
        contender(THROTTLECRAB, theirs, Replies::Throttle),
        contender(TOLLGATE_PING, ours, Replies::Pong),
        contender(THROTTLECRAB_PING, theirs, Replies::Pong),
    ];
    let (title, part) = match batch {
        1 => ("Redis protocol: THROTTLE, one at a time".to_owned(), "resp"),
        _ => (format!("Redis protocol: THROTTLE, {batch} in a pipeline"), "resp_pipelined"),
    };
    compare(bench, &title, &contenders, Names { part, peer: THROTTLECRAB }, results)
}

fn http(bench: &Bench, servers: &Servers, results: &mut Results) -> anyhow::Result<()> {
    let contenders = [(TOLLGATE, &servers.tollgate), (THROTTLECRAB, &servers.throttlecrab)].map(|(name, server)| {
        let script = Script { requests: contender::http_requests(name), batch: 1, replies: Replies::Check };
        Contender { name, server, address: server.http, work: Work::Script(script) }
    });
    let title = "HTTP: POST /v1/check and POST /throttle, one at a time";
    compare(bench, title, &contenders, Names { part: "http", peer: THROTTLECRAB }, results)
}

fn rls(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let servers = Servers::start_grpc(&bench.programs, bench.cores)?;
    let mut contenders = Vec::new();
    for (name, server) in [(TOLLGATE, &servers.0), (EMPTY_HANDLER, &servers.1)] {
        envoy::check(server.http).with_context(|| name.to_owned())?;
        contenders.push(Contender { name, server, address: server.http, work: Work::Rls });
    }
    let title = "Envoy's rate limit service: ShouldRateLimit with one descriptor";
    compare(bench, title, &contenders, Names { part: "rls", peer: EMPTY_HANDLER }, results)
}

/// Measures at saturation, then at half of the peer's throughput.
fn compare(
    bench: &Bench,
    title: &str,
    contenders: &[Contender<'_>],
    names: Names,
    results: &mut Results,
) -> anyhow::Result<()> {
    let Names { part, peer } = names;
    let label = if peer == EMPTY_HANDLER { "empty_handler" } else { "throttlecrab" };
    let figures = race::run(bench, &Case { title, peer, rate: Rate::Saturation }, contenders)?;
    // Processor time per decision is the inverse of decisions per second of processor time.
    ratio(&figures, (peer, TOLLGATE), |figures| &figures.cpu_us, &format!("{part}_vs_{label}"), results);
    for (name, label) in [(TOLLGATE, "tollgate"), (peer, label)] {
        if let Some(found) = find(&figures, name) {
            results.quantity(format!("{part}_{label}_us"), found.cpu_us.median());
        }
    }
    ratio(&figures, (TOLLGATE_PING, TOLLGATE), |figures| &figures.cpu_us, &format!("{part}_vs_ping"), results);
    let saturation = find(&figures, peer).context("the peer was not measured")?.per_second.median();
    let per_second = saturation / 2.0;
    let title = format!("{title}, at {per_second:.0} decisions/s: half of what {peer} can do");
    let case = Case { title: &title, peer, rate: Rate::Fixed { per_second } };
    let deciding: Vec<&Contender<'_>> =
        contenders.iter().filter(|contender| [TOLLGATE, peer].contains(&contender.name)).collect();
    let figures = race::run_each(bench, &case, &deciding)?;
    ratio(&figures, (TOLLGATE, peer), |figures| &figures.p99_us, &format!("{part}_p99_vs_{label}"), results);
    Ok(())
}

/// Records the ratio of the first contender's figure to the second's.
fn ratio(
    figures: &[Figures],
    of: (&str, &str),
    figure: impl Fn(&Figures) -> &Times,
    name: &str,
    results: &mut Results,
) {
    if let (Some(above), Some(below)) = (find(figures, of.0), find(figures, of.1)) {
        results.ratio(name, figure(above).ratio_to(figure(below)).median);
    }
}

fn find<'a>(figures: &'a [Figures], name: &str) -> Option<&'a Figures> {
    figures.iter().find(|figures| figures.name() == name)
}

fn introduce(bench: &Bench) {
    let Scale { rounds, slice_s, .. } = bench.scale;
    let throttlecrab = crate::programs::version(&bench.programs.throttlecrab, "--version");
    let load_cores = bench.cores.load().len();
    report::note(format_args!(
        "{throttlecrab}. Cores for the load: {load_cores}. Contenders run in turn: {rounds} rounds of {slice_s} s each; \
         figures are medians of the rounds.\ndecisions per CPU-second, of the peer's = over the peer's in the same \
         round, median of the rounds (quartiles).\nbusy = the share of its core that the contender used, others = the \
         share that others used. If both are low, the load was the bottleneck, and the contender slept: sleeps/1000 = \
         how often per thousand decisions. Waking up is part of its CPU time."
    ));
}
