//! One case: every contender is checked once, and then they run in turn under load.

use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};

use super::Bench;
use super::contender::{Contender, LARGE_BYTES, NGINX, SMALL_BYTES};
use super::load::{Load, USERS};
use super::pace::{self, Pace};
use super::probe::{Connection, Response};
use crate::clock;
use crate::cores::worked;
use crate::race::{self, Times};
use crate::report::{self, Table};

/// If others use more than this share of the contender's core, the figures are unreliable.
const DISTURBED: f64 = 0.05;

/// Limits that are exhausted this far apart are refilled in different seconds.
const APART: Duration = Duration::from_millis(1100);

/// One measurement of all contenders.
pub(super) struct Case {
    pub(super) title: String,
    pub(super) body: Body,
    pub(super) status: u16,
    pub(super) load: Kind,
    pub(super) order: Order,
}

#[derive(Clone, Copy)]
pub(super) enum Order {
    /// One at a time, alone on the core.
    InTurn,
    /// All at once on the core, so that noise affects all equally and small differences show. Only the CPU per request
    /// is meaningful then.
    AtOnce,
}

#[derive(Clone, Copy)]
pub(super) enum Body {
    Small,
    Large,
}

impl Body {
    fn path(self) -> &'static str {
        match self {
            Self::Small => "/small",
            Self::Large => "/large",
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Small => SMALL_BYTES,
            Self::Large => LARGE_BYTES,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// As fast as responses arrive.
    Http1,
    Http2,
    /// At this rate.
    Paced {
        per_second: f64,
    },
}

/// The result of a slice.
struct Slice {
    load: Load,
    cpu: Duration,
    kernel: Duration,
    sleeps: u64,
    /// The share of the contender's core that others used.
    others: Duration,
}

/// The results of a contender, by round.
pub(super) struct Figures {
    /// Microseconds of processor time per request.
    pub(super) cpu_us: Times,
    /// The part of it in the kernel.
    kernel_us: Times,
    pub(super) per_second: Times,
    pub(super) p50_us: Times,
    pub(super) p99_us: Times,
    /// The share of its core that the contender used.
    busy: Times,
    /// How often it slept per thousand requests.
    sleeps: Times,
    /// The share of its core that others used.
    others: Times,
}

impl Figures {
    fn new(name: &'static str) -> Self {
        let [cpu_us, kernel_us, per_second, p50_us, p99_us, busy, sleeps, others] = [(); 8].map(|()| Times::new(name));
        Self { cpu_us, kernel_us, per_second, p50_us, p99_us, busy, sleeps, others }
    }

    pub(super) fn name(&self) -> &'static str {
        self.cpu_us.name
    }

    fn push(&mut self, slice: &Slice) {
        let Slice { load, cpu, kernel, sleeps, others } = slice;
        let elapsed_s = load.elapsed.as_secs_f64();
        self.cpu_us.push(cpu.as_secs_f64() * 1e6 / load.requests as f64);
        self.kernel_us.push(kernel.as_secs_f64() * 1e6 / load.requests as f64);
        self.per_second.push(load.requests as f64 / elapsed_s);
        self.p50_us.push(load.p50_us);
        self.p99_us.push(load.p99_us);
        self.busy.push(cpu.as_secs_f64() / elapsed_s);
        self.sleeps.push(*sleeps as f64 * 1e3 / load.requests as f64);
        self.others.push(others.as_secs_f64() / elapsed_s);
    }
}

pub(super) fn run(bench: &Bench, case: &Case, contenders: &[Contender]) -> anyhow::Result<Vec<Figures>> {
    let context = |contender: &Contender| format!("{}: {}", contender.name, case.title);
    if case.status == 429 {
        exhaust(case, contenders)?;
    }
    let mut bodies = Vec::new();
    for contender in contenders {
        bodies.push(check_response(bench, case, contender).with_context(|| context(contender))?);
    }
    let mut figures: Vec<Figures> = contenders.iter().map(|contender| Figures::new(contender.name)).collect();
    match case.order {
        Order::InTurn => race::take_turns(bench.scale.rounds, contenders.len(), |_, turn| {
            let contender = &contenders[turn];
            let ask = |seconds| slice(bench, case, contender, seconds).with_context(|| context(contender));
            ask(bench.scale.warm_up_s)?;
            figures[turn].push(&ask(bench.scale.slice_s)?);
            anyhow::Ok(())
        })?,
        Order::AtOnce => {
            for _ in 0..bench.scale.rounds {
                slices_at_once(bench, case, contenders, bench.scale.warm_up_s)?;
                let slices = slices_at_once(bench, case, contenders, bench.scale.slice_s)?;
                figures.iter_mut().zip(&slices).for_each(|(figures, slice)| figures.push(slice));
            }
        }
    }
    print_table(case, &figures, &bodies);
    Ok(figures)
}

/// Exhausts every user's limit in a different second, so that refusals of two users have different numbers.
fn exhaust(case: &Case, contenders: &[Contender]) -> anyhow::Result<()> {
    for user in 1..=USERS {
        for contender in contenders {
            let response = Connection::open(contender.server.address)?.send(case.body.path(), user);
            response.with_context(|| contender.name.to_owned())?;
        }
        clock::pause(APART);
    }
    Ok(())
}

fn print_table(case: &Case, figures: &[Figures], bodies: &[usize]) {
    let header = [
        "",
        "CPU µs/request",
        "in the kernel",
        "of nginx's",
        "requests/s",
        "busy",
        "sleeps/1000",
        "others",
        "p50 µs",
        "p99 µs",
        "body bytes",
    ];
    let mut table = Table::new(&case.title, header);
    let nginx = figures.iter().find(|figures| figures.name() == NGINX);
    for (figures, body) in figures.iter().zip(bodies) {
        table.row([
            figures.name().to_owned(),
            format!("{:.2}", figures.cpu_us.median()),
            format!("{:.2}", figures.kernel_us.median()),
            nginx.map_or(String::new(), |nginx| figures.cpu_us.ratio_to(&nginx.cpu_us).to_string()),
            format!("{:.0}", figures.per_second.median()),
            format!("{:.0} %", figures.busy.median() * 100.0),
            format!("{:.1}", figures.sleeps.median()),
            format!("{:.0} %", figures.others.median() * 100.0),
            format!("{:.0}", figures.p50_us.median()),
            format!("{:.0}", figures.p99_us.median()),
            body.to_string(),
        ]);
    }
    table.print();
    let most = figures.iter().map(|figures| figures.others.median()).fold(0.0, f64::max);
    if most > DISTURBED {
        let percent = most * 100.0;
        report::note(format_args!(
            "WARNING: others took {percent:.0} % of the contender's core; do not trust these figures."
        ));
    }
}

/// Checks the response of a contender before it is measured, and returns the length of its body.
fn check_response(bench: &Bench, case: &Case, contender: &Contender) -> anyhow::Result<usize> {
    let (path, address) = (case.body.path(), contender.server.address);
    let (status, body) = match case.load {
        Kind::Http2 => (200, bench.generators.probe_http2(address, path)?),
        Kind::Http1 | Kind::Paced { .. } => {
            let mut connection = Connection::open(address)?;
            // Twice as many requests as it takes to exhaust every limit.
            let responses = (0..2 * USERS).map(|number| connection.send(path, 1 + number % USERS));
            let responses: Vec<Response> = responses.collect::<anyhow::Result<_>>()?;
            responses.last().map(|answer| (answer.status, answer.body_bytes)).context("no request was sent")?
        }
    };
    ensure!(status == case.status, "answers with {status}, not {}", case.status);
    if status == 200 {
        let expected = case.body.bytes();
        ensure!(body == expected, "answers with a body of {body} bytes, not {expected}");
    }
    Ok(body)
}

fn slice(bench: &Bench, case: &Case, contender: &Contender, seconds: u64) -> anyhow::Result<Slice> {
    let (path, address) = (case.body.path(), contender.server.address);
    let core = bench.cores.contender().start;
    let (core_before, before) = (worked(core)?, contender.server.spent()?);
    let load = match case.load {
        Kind::Http1 => bench.generators.wrk(address, path, seconds)?,
        Kind::Http2 => bench.generators.h2load(address, path, seconds)?,
        Kind::Paced { per_second } => {
            let pace = Pace { per_second, length: Duration::from_secs(seconds) };
            pace::run(address, path, pace)?
        }
    };
    let after = contender.server.spent()?;
    let (cpu, kernel) = (after.cpu - before.cpu, after.kernel - before.kernel);
    let sleeps = after.sleeps.saturating_sub(before.sleeps);
    let others = (worked(core)? - core_before).saturating_sub(cpu);
    load.check(case.status)?;
    Ok(Slice { load, cpu, kernel, sleeps, others })
}

fn slices_at_once(bench: &Bench, case: &Case, contenders: &[Contender], seconds: u64) -> anyhow::Result<Vec<Slice>> {
    let mut slices: Vec<Slice> = thread::scope(|scope| {
        let begin = |contender| scope.spawn(move || slice(bench, case, contender, seconds));
        let running: Vec<_> = contenders.iter().map(begin).collect();
        let end = |slice: ScopedJoinHandle<'_, _>| slice.join().map_err(|_| anyhow!("a load has panicked"))?;
        running.into_iter().map(end).collect::<anyhow::Result<_>>()
    })?;
    let all: Duration = slices.iter().map(|slice| slice.cpu).sum();
    for slice in &mut slices {
        slice.others = slice.others.saturating_sub(all - slice.cpu);
    }
    Ok(slices)
}
