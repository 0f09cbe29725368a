//! One case: every contender is looked at once, and then they take turns under load.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::Bench;
use super::contender::{Contender, LARGE_BYTES, NGINX, SMALL_BYTES};
use super::load::USERS;
use super::pace::{self, Pace};
use super::probe::{Answer, Connection};
use crate::clock;
use crate::race::{self, Times, quantile};
use crate::report::Table;

/// What is asked of all contenders.
pub(super) struct Case {
    pub(super) title: String,
    pub(super) body: Body,
    pub(super) status: u16,
    pub(super) load: Kind,
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
    /// As fast as it is answered.
    Http1,
    Http2,
    /// At this rate.
    Paced {
        per_second: f64,
    },
}

/// What a slice came to.
struct Slice {
    requests: u64,
    elapsed: Duration,
    cpu: Duration,
    p50_us: f64,
    p99_us: f64,
}

/// What a contender came to, round by round.
pub(super) struct Figures {
    /// Microseconds of processor time per request.
    pub(super) cpu_us: Times,
    pub(super) per_second: Times,
    pub(super) p50_us: Times,
    pub(super) p99_us: Times,
    /// The share of its core that the contender had.
    busy: Times,
}

impl Figures {
    fn new(name: &'static str) -> Self {
        let [cpu_us, per_second, p50_us, p99_us, busy] = [(); 5].map(|()| Times::new(name));
        Self { cpu_us, per_second, p50_us, p99_us, busy }
    }

    pub(super) fn name(&self) -> &'static str {
        self.cpu_us.name
    }

    fn push(&mut self, slice: &Slice) {
        self.cpu_us.push(slice.cpu.as_secs_f64() * 1e6 / slice.requests as f64);
        self.per_second.push(slice.requests as f64 / slice.elapsed.as_secs_f64());
        self.p50_us.push(slice.p50_us);
        self.p99_us.push(slice.p99_us);
        self.busy.push(slice.cpu.as_secs_f64() / slice.elapsed.as_secs_f64());
    }
}

pub(super) fn run(bench: &Bench, case: &Case, contenders: &[Contender]) -> anyhow::Result<Vec<Figures>> {
    let context = |contender: &Contender| format!("{}: {}", contender.name, case.title);
    let mut bodies = Vec::new();
    for contender in contenders {
        bodies.push(look(bench, case, contender).with_context(|| context(contender))?);
    }
    let mut figures: Vec<Figures> = contenders.iter().map(|contender| Figures::new(contender.name)).collect();
    race::take_turns(bench.scale.rounds, contenders.len(), |_, turn| {
        let contender = &contenders[turn];
        let ask = |seconds| slice(bench, case, contender, seconds).with_context(|| context(contender));
        ask(bench.scale.warm_up_s)?;
        figures[turn].push(&ask(bench.scale.slice_s)?);
        anyhow::Ok(())
    })?;
    tell(case, &figures, &bodies);
    Ok(figures)
}

fn tell(case: &Case, figures: &[Figures], bodies: &[usize]) {
    let header = ["", "CPU µs/request", "of nginx's", "requests/s", "busy", "p50 µs", "p99 µs", "body bytes"];
    let mut table = Table::new(&case.title, header);
    let nginx = figures.iter().find(|figures| figures.name() == NGINX);
    for (figures, body) in figures.iter().zip(bodies) {
        table.row([
            figures.name().to_owned(),
            format!("{:.2}", figures.cpu_us.median()),
            nginx.map_or(String::new(), |nginx| figures.cpu_us.ratio_to(&nginx.cpu_us).to_string()),
            format!("{:.0}", figures.per_second.median()),
            format!("{:.0} %", figures.busy.median() * 100.0),
            format!("{:.0}", figures.p50_us.median()),
            format!("{:.0}", figures.p99_us.median()),
            body.to_string(),
        ]);
    }
    table.print();
}

/// What it answers, before it is measured: how long the body is.
fn look(bench: &Bench, case: &Case, contender: &Contender) -> anyhow::Result<usize> {
    let (path, address) = (case.body.path(), contender.server.address);
    let (status, body) = match case.load {
        Kind::Http2 => (200, bench.generators.probe_http2(address, path)?),
        Kind::Http1 | Kind::Paced { .. } => {
            let mut connection = Connection::open(address)?;
            // Twice as often as it would take to use up what is to be used up.
            let asked = (0..2 * USERS).map(|number| connection.ask(path, 1 + number % USERS));
            let answers: Vec<Answer> = asked.collect::<anyhow::Result<_>>()?;
            answers.last().map(|answer| (answer.status, answer.body_bytes)).context("nothing was asked")?
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
    let cpu_before = contender.server.cpu()?;
    let load = match case.load {
        Kind::Http1 => bench.generators.wrk(address, path, seconds)?,
        Kind::Http2 => bench.generators.h2load(address, path, seconds)?,
        Kind::Paced { per_second } => {
            let began = clock::now();
            let pace = Pace { per_second, length: Duration::from_secs(seconds) };
            let latencies = pace::run(address, path, case.status, pace)?;
            let (requests, elapsed) = (latencies.len() as u64, clock::now() - began);
            let [p50_us, p99_us] = [0.5, 0.99].map(|share| quantile(latencies.clone(), share));
            let cpu = contender.server.cpu()? - cpu_before;
            return Ok(Slice { requests, elapsed, cpu, p50_us, p99_us });
        }
    };
    load.check(case.status)?;
    let cpu = contender.server.cpu()? - cpu_before;
    Ok(Slice { requests: load.requests, elapsed: load.elapsed, cpu, p50_us: load.p50_us, p99_us: load.p99_us })
}
