//! `bench gateway`: requests through the gateway, compared with nginx's `limit_req` and HAProxy's stick tables.
//!
//! Deliberately not here: a network, TLS, several cores, and a store on Redis.

mod config;
mod contender;
pub(crate) mod load;
mod memory;
mod pace;
mod peers;
pub(crate) mod probe;
mod race;
mod streams;

use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::ValueEnum;

use self::config::{Limits, Protocol};
use self::contender::{Contender, HAPROXY, NGINX, Product, TOLLGATE, TOLLGATE_THREE, TOLLGATE_WATCHED, Upstream};
use self::load::Generators;

use self::peers::Programs;
use self::race::{Body, Case, Figures, Kind, Order};
use crate::cores::{Cores, stay_on};
use crate::options::{Options, Scale};
use crate::programs::version;
use crate::race::Times;
use crate::report::{self, Results};

/// The gateway: processor time per request, latency, and memory, compared with nginx and HAProxy.
///
/// Contenders run in turn, each alone on the first core. An nginx as the upstream has the second core, and the load the
/// next four, or as many as there are; with two cores it shares the second. Missing programs (nginx, HAProxy, wrk,
/// h2load) are installed with tools/install-gateway-peers.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// One limit, always allowed
    Allowed,
    /// Tollgate with three limits, compared with one limit
    ThreeLimits,
    /// One limit, always denied
    Denied,
    /// No limit
    NoLimit,
    /// A body of 100 KB
    Large,
    /// One upload and one download of 1 GB
    Streams,
    /// HTTP/2 clients
    Http2,
    /// Latency at half of nginx's throughput
    HalfLoad,
    /// Ten thousand idle connections
    Memory,
    /// Limited keys, counted and read once a second, compared with not counting them
    Watch,
}

/// The extent of a quick run.
const QUICK: Scale = Scale { rounds: 2, warm_up_s: 1, slice_s: 2 };

/// The environment of every measurement.
struct Bench {
    scale: Scale,
    cores: Cores,
    programs: Programs,
    generators: Generators,
    upstream: Upstream,
    /// Why Tollgate cannot run.
    without_tollgate: Option<String>,
}

impl Bench {
    fn products(&self) -> impl Iterator<Item = Product> {
        let with_tollgate = self.without_tollgate.is_none();
        Product::ALL.into_iter().filter(move |product| with_tollgate || *product != Product::Tollgate)
    }

    fn start(&self, product: Product, limits: Limits, protocol: Protocol) -> anyhow::Result<Contender> {
        self.start_before(product, limits, protocol, self.upstream.port())
    }

    /// Starts a contender with another upstream.
    fn start_before(
        &self,
        product: Product,
        limits: Limits,
        protocol: Protocol,
        upstream_port: u16,
    ) -> anyhow::Result<Contender> {
        Contender::start(product, limits, protocol, &self.programs, (upstream_port, self.cores))
    }

    fn field(&self, limits: Limits, protocol: Protocol) -> anyhow::Result<Vec<Contender>> {
        self.products().map(|product| self.start(product, limits, protocol)).collect()
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let cores = Cores::of_this_machine()?;
    let options = &args.options;
    let wants = |part| options.wants(part);
    if wants(Part::Memory) {
        memory::raise_open_files()?;
    }
    let programs = Programs::find(options.tollgate.as_deref())?;
    // The paced load comes from this thread.
    stay_on(cores.load())?;
    let scale = if options.quick { QUICK } else { Scale::FULL };
    let (generators, upstream) = (Generators::new(&programs, cores)?, Upstream::start(&programs, cores)?);
    let mut bench = Bench { scale, cores, programs, generators, upstream, without_tollgate: None };
    introduce(&bench);
    if let Err(error) = bench.start(Product::Tollgate, Limits::One, Protocol::Http1) {
        report::note(format_args!("WITHOUT tollgate, which did not come up as a gateway: {error:#}"));
        bench.without_tollgate = Some(format!("{error:#}"));
    }
    let mut results = Results::default();
    at_saturation(&bench, wants, &mut results)?;
    if wants(Part::Streams) {
        streams::run(&bench, &mut results)?;
    }
    if wants(Part::Memory) {
        memory::run(&bench, &mut results)?;
    }
    if let Some(reason) = &bench.without_tollgate {
        bail!("there is no result without tollgate: {reason}");
    }
    report::note("");
    results.print();
    Ok(())
}

fn at_saturation(bench: &Bench, wants: impl Fn(Part) -> bool, results: &mut Results) -> anyhow::Result<()> {
    let ample = wants(Part::Allowed) || wants(Part::Large) || wants(Part::HalfLoad);
    if ample {
        one_limit(bench, &wants, results)?;
    }
    if wants(Part::ThreeLimits) && bench.without_tollgate.is_none() {
        three_limits(bench, results)?;
    }
    if wants(Part::Watch) && bench.without_tollgate.is_none() {
        watch(bench, results)?;
    }
    if wants(Part::Denied) {
        let case = Case { status: 429, ..case("Denied: one limit, used up", Body::Small, Kind::Http1) };
        let figures = self::race::run(bench, &case, &bench.field(Limits::Exhausted, Protocol::Http1)?)?;
        conclude(&figures, "deny", results);
    }
    if wants(Part::NoLimit) {
        let case = case("No limit", Body::Small, Kind::Http1);
        let figures = self::race::run(bench, &case, &bench.field(Limits::None, Protocol::Http1)?)?;
        conclude(&figures, "no_limit", results);
    }
    if wants(Part::Http2) {
        let case = case("HTTP/2: one limit, allowed, body of 1 KB", Body::Small, Kind::Http2);
        let figures = self::race::run(bench, &case, &bench.field(Limits::One, Protocol::Http2)?)?;
        conclude(&figures, "http2", results);
    }
    Ok(())
}

/// Returns a case in which all requests are served.
fn case(title: &str, body: Body, load: Kind) -> Case {
    Case { title: title.into(), body, status: 200, load, order: Order::InTurn }
}

/// The cases in which one limit allows every request.
fn one_limit(bench: &Bench, wants: impl Fn(Part) -> bool, results: &mut Results) -> anyhow::Result<()> {
    let contenders = bench.field(Limits::One, Protocol::Http1)?;
    let mut saturation = None;
    // Half load needs nginx's throughput, too.
    if wants(Part::Allowed) || wants(Part::HalfLoad) {
        let case = case("Allowed: one limit, body of 1 KB", Body::Small, Kind::Http1);
        let figures = self::race::run(bench, &case, &contenders)?;
        saturation = find(&figures, NGINX).map(|nginx| nginx.per_second.median());
        conclude(&figures, "allow", results);
    }
    if wants(Part::HalfLoad) {
        let per_second = saturation.context("nginx was not measured")? / 2.0;
        let title = format!("Allowed, at {per_second:.0} requests/s: half of what nginx can do");
        let figures = self::race::run(bench, &case(&title, Body::Small, Kind::Paced { per_second }), &contenders)?;
        ratio(&figures, |figures| &figures.p99_us, NGINX, "p99_half_load_vs_nginx", results);
    }
    if wants(Part::Large) {
        let case = case("Allowed: one limit, body of 100 KB", Body::Large, Kind::Http1);
        let figures = self::race::run(bench, &case, &contenders)?;
        conclude(&figures, "large", results);
    }
    Ok(())
}

/// Tollgate with three limits and with one.
fn three_limits(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let start = |limits| bench.start(Product::Tollgate, limits, Protocol::Http1);
    let case = Case {
        order: Order::AtOnce,
        ..case("Allowed: three limits beside one, both at once on the one core", Body::Small, Kind::Http1)
    };
    let figures = self::race::run(bench, &case, &[start(Limits::One)?, start(Limits::Three)?])?;
    if let (Some(one), Some(three)) = (find(&figures, TOLLGATE), find(&figures, TOLLGATE_THREE)) {
        results.ratio("three_limits_vs_one", three.cpu_us.ratio_to(&one.cpu_us).median);
    }
    Ok(())
}

/// Tollgate that counts limited keys while a viewer reads them, and without.
fn watch(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let start = |product, limits| bench.start(product, limits, Protocol::Http1);
    let mut most = 0.0_f64;
    for (name, limits, status) in [("allow", Limits::One, 200), ("deny", Limits::Exhausted, 429)] {
        let title = format!("Limited keys counted and read, beside not counted: {name}, both at once on the one core");
        let case = Case { order: Order::AtOnce, status, ..case(&title, Body::Small, Kind::Http1) };
        let contenders = [start(Product::Tollgate, limits)?, start(Product::TollgateWatched, limits)?];
        let viewer =
            Viewer::start(contenders.iter().find_map(|contender| contender.admin).context("no admin listener")?);
        let figures = self::race::run(bench, &case, &contenders)?;
        let reads = viewer.end()?;
        report::note(format_args!("The limited keys were read {reads} times."));
        if let (Some(plain), Some(watched)) = (find(&figures, TOLLGATE), find(&figures, TOLLGATE_WATCHED)) {
            let ratio = watched.cpu_us.ratio_to(&plain.cpu_us).median;
            results.ratio(format!("watch_{name}_vs_unwatched"), ratio);
            most = most.max(ratio);
        }
    }
    results.ratio("watch_overhead", most);
    Ok(())
}

/// Reads the limited keys and the rates of decisions once a second, like a dashboard.
struct Viewer {
    end: mpsc::Sender<()>,
    thread: JoinHandle<anyhow::Result<usize>>,
}

impl Viewer {
    fn start(admin: SocketAddr) -> Self {
        let (end, ended) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let mut reads = 0;
            while ended.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                for path in ["/v1/status", "/v1/live", "/v1/top?kind=denied", "/v1/top?kind=near_limit&over=1h"] {
                    let response = self::probe::Connection::open(admin)?.send(path, 0)?;
                    ensure!(response.status == 200, "{path} answers with {}", response.status);
                }
                reads += 1;
            }
            Ok(reads)
        });
        Self { end, thread }
    }

    /// Returns how often it has read.
    fn end(self) -> anyhow::Result<usize> {
        drop(self.end);
        self.thread.join().map_err(|_| anyhow!("the viewer has panicked"))?
    }
}

fn conclude(figures: &[Figures], name: &str, results: &mut Results) {
    ratio(figures, |figures| &figures.cpu_us, NGINX, &format!("{name}_vs_nginx"), results);
    ratio(figures, |figures| &figures.cpu_us, HAPROXY, &format!("{name}_vs_haproxy"), results);
    if let Some(ours) = find(figures, TOLLGATE) {
        results.quantity(format!("{name}_us"), ours.cpu_us.median());
    }
    for (peer, label) in [(NGINX, "nginx"), (HAPROXY, "haproxy")] {
        if let Some(theirs) = find(figures, peer) {
            results.quantity(format!("{name}_{label}_us"), theirs.cpu_us.median());
        }
    }
}

fn ratio(figures: &[Figures], of: impl Fn(&Figures) -> &Times, peer: &str, name: &str, results: &mut Results) {
    if let (Some(ours), Some(theirs)) = (find(figures, TOLLGATE), find(figures, peer)) {
        results.ratio(name, of(ours).ratio_to(of(theirs)).median);
    }
}

fn find<'a>(figures: &'a [Figures], name: &str) -> Option<&'a Figures> {
    figures.iter().find(|figures| figures.name() == name)
}

fn introduce(bench: &Bench) {
    let Scale { rounds, slice_s, .. } = bench.scale;
    let nginx = version(&bench.programs.nginx, "-v");
    let haproxy = version(&bench.programs.haproxy, "-v");
    let load_cores = bench.cores.load().len();
    report::note(format_args!(
        "{nginx}; {haproxy}. Cores for the load: {load_cores}. Contenders run in turn: {rounds} rounds of {slice_s} s \
         each; figures are medians of the rounds.\nof nginx's = CPU over nginx's in the same round, median of the \
         rounds (quartiles).\nbusy = the share of its core that the contender used, others = the share that others \
         used. If both are low, the load was the bottleneck, and the contender slept: sleeps/1000 = how often per \
         thousand requests. Waking up is part of its CPU."
    ));
}
