//! One case: contenders run in turn under load, alone on their core.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;

use super::contender::ServiceServer;
use super::load::{self, Load, Pace, Script};
use super::{Bench, envoy};
use crate::cores::worked;
use crate::race::{self, Times};
use crate::report::{self, Table};

/// If others use more than this share of the contender's core, the figures are unreliable.
const DISTURBED: f64 = 0.05;

/// One measurement of all contenders.
pub(super) struct Case<'a> {
    pub(super) title: &'a str,
    /// The contender that the others are compared with.
    pub(super) peer: &'static str,
    pub(super) rate: Rate,
}

#[derive(Clone, Copy)]
pub(super) enum Rate {
    /// As fast as replies arrive.
    Saturation,
    Fixed {
        per_second: f64,
    },
}

/// A server and the requests for it.
pub(super) struct Contender<'a> {
    pub(super) name: &'static str,
    pub(super) server: &'a ServiceServer,
    pub(super) address: SocketAddr,
    pub(super) work: Work,
}

/// The requests of a contender.
pub(super) enum Work {
    /// Sent by this program.
    Script(Script),
    /// Envoy's rate limit service, sent by h2load.
    Rls,
}

/// The results of a contender, by round.
pub(super) struct Figures {
    /// Microseconds of processor time per decision.
    pub(super) cpu_us: Times,
    /// The part of it in the kernel.
    kernel_us: Times,
    pub(super) per_second: Times,
    p50_us: Times,
    pub(super) p99_us: Times,
    /// The share of its core that the contender used.
    busy: Times,
    /// How often it slept per thousand decisions.
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
}

pub(super) fn run(bench: &Bench, case: &Case<'_>, contenders: &[Contender<'_>]) -> anyhow::Result<Vec<Figures>> {
    run_each(bench, case, &contenders.iter().collect::<Vec<_>>())
}

pub(super) fn run_each(bench: &Bench, case: &Case<'_>, contenders: &[&Contender<'_>]) -> anyhow::Result<Vec<Figures>> {
    let mut figures: Vec<Figures> = contenders.iter().map(|contender| Figures::new(contender.name)).collect();
    race::take_turns(bench.scale.rounds, contenders.len(), |_, turn| {
        let contender = contenders[turn];
        let slice = |seconds, figures: Option<&mut Figures>| {
            measure(bench, case, contender, (seconds, figures))
                .with_context(|| format!("{}: {}", contender.name, case.title))
        };
        slice(bench.scale.warm_up_s, None)?;
        slice(bench.scale.slice_s, Some(&mut figures[turn]))
    })?;
    print_table(case, &figures);
    Ok(figures)
}

/// Puts a contender under load for some seconds, and adds its figures.
fn measure(
    bench: &Bench,
    case: &Case<'_>,
    contender: &Contender<'_>,
    (seconds, figures): (u64, Option<&mut Figures>),
) -> anyhow::Result<()> {
    let core = bench.cores.contender().start;
    let process = &contender.server.process;
    let per_second = match case.rate {
        Rate::Saturation => None,
        Rate::Fixed { per_second } => Some(per_second),
    };
    let (core_before, before) = (worked(core)?, process.spent()?);
    let pace = Pace { per_second, length: Duration::from_secs(seconds) };
    let load = match &contender.work {
        Work::Script(script) => load::run(contender.address, script, pace, bench.cores.load())?,
        Work::Rls => envoy::load(bench, contender.address, pace)?,
    };
    let after = process.spent()?;
    let (cpu, kernel) = (after.cpu - before.cpu, after.kernel - before.kernel);
    let others = (worked(core)? - core_before).saturating_sub(cpu);
    let Some(figures) = figures else { return Ok(()) };
    let Load { requests, elapsed, p50_us, p99_us } = load;
    let (requests, elapsed_s) = (requests as f64, elapsed.as_secs_f64());
    figures.cpu_us.push(cpu.as_secs_f64() * 1e6 / requests);
    figures.kernel_us.push(kernel.as_secs_f64() * 1e6 / requests);
    figures.per_second.push(requests / elapsed_s);
    figures.p50_us.push(p50_us);
    figures.p99_us.push(p99_us);
    figures.busy.push(cpu.as_secs_f64() / elapsed_s);
    figures.sleeps.push(after.sleeps.saturating_sub(before.sleeps) as f64 * 1e3 / requests);
    figures.others.push(others.as_secs_f64() / elapsed_s);
    Ok(())
}

fn print_table(case: &Case<'_>, figures: &[Figures]) {
    let header = [
        "",
        "decisions per CPU-second",
        "of the peer's",
        "CPU µs/decision",
        "in the kernel",
        "decisions/s",
        "busy",
        "sleeps/1000",
        "others",
        "p50 µs",
        "p99 µs",
    ];
    let mut table = Table::new(case.title, header);
    let peer = figures.iter().find(|figures| figures.name() == case.peer);
    for figures in figures {
        table.row([
            figures.name().to_owned(),
            format!("{:.0}", 1e6 / figures.cpu_us.median()),
            peer.map_or(String::new(), |peer| peer.cpu_us.ratio_to(&figures.cpu_us).to_string()),
            format!("{:.2}", figures.cpu_us.median()),
            format!("{:.2}", figures.kernel_us.median()),
            format!("{:.0}", figures.per_second.median()),
            format!("{:.0} %", figures.busy.median() * 100.0),
            format!("{:.1}", figures.sleeps.median()),
            format!("{:.0} %", figures.others.median() * 100.0),
            format!("{:.0}", figures.p50_us.median()),
            format!("{:.0}", figures.p99_us.median()),
        ]);
    }
    table.print();
    for figures in figures {
        let list = |times: &Times, digits: usize| {
            times.rounds().iter().map(|round| format!("{round:.digits$}")).collect::<Vec<_>>().join(" ")
        };
        report::note(format_args!(
            "  rounds of {}: CPU {} µs; p99 {} µs",
            figures.name(),
            list(&figures.cpu_us, 2),
            list(&figures.p99_us, 0)
        ));
    }
    let most = figures.iter().map(|figures| figures.others.median()).fold(0.0, f64::max);
    if most > DISTURBED {
        let percent = most * 100.0;
        report::note(format_args!(
            "WARNING: others took {percent:.0} % of the contender's core; do not trust these figures."
        ));
    }
}
