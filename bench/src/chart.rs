//! `bench chart`: a bar chart of tollgate and its peers as an SVG file.
//!
//! Every number and the name of the processor come from the saved output of other benchmarks: their `MACHINE` and
//! `RESULT` lines. A panel without numbers is left out.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};

use crate::report::{MACHINE, RESULT};

/// Draws a bar chart from the saved output of `bench memory` and `bench gateway`
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Files with the output of benchmarks
    #[arg(required = true)]
    files: Vec<PathBuf>,

    /// The SVG file to write
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
}

/// One group of bars.
struct Panel {
    title: &'static str,
    unit: &'static str,
    /// Labels and the names of the results. The first is tollgate's.
    bars: &'static [(&'static str, &'static str)],
}

const PANELS: [Panel; 3] = [
    Panel {
        title: "In memory: one decision on a hot key, one thread",
        unit: "ns",
        bars: &[
            ("Tollgate", "hot_allow_ns"),
            ("governor", "hot_allow_governor_ns"),
            ("gcra", "hot_allow_gcra_ns"),
            ("throttlecrab", "hot_allow_throttlecrab_ns"),
            ("limitador", "hot_allow_limitador_ns"),
        ],
    },
    Panel {
        title: "In memory: one decision on one of 1 million keys, one thread",
        unit: "ns",
        bars: &[
            ("Tollgate", "uniform_ns"),
            ("governor", "uniform_governor_ns"),
            ("gcra", "uniform_gcra_ns"),
            ("throttlecrab", "uniform_throttlecrab_ns"),
            ("limitador", "uniform_limitador_ns"),
        ],
    },
    Panel {
        title: "Gateway: processor time per request, one limit",
        unit: "µs",
        bars: &[("Tollgate", "allow_us"), ("nginx", "allow_nginx_us"), ("HAProxy", "allow_haproxy_us")],
    },
];

/// Bars longer than this many times the shortest one are cut, so that the others differ visibly.
const CUT: f64 = 8.0;

const WIDTH: f64 = 720.0;
const MARGIN: f64 = 16.0;
/// Where the bars start, and how long the longest is.
const BARS_X: f64 = 120.0;
const BARS_WIDTH: f64 = 500.0;
const ROW: f64 = 22.0;
const BAR: f64 = 15.0;

/// Readable on a light and on a dark page.
const STYLE: &str = "text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } \
                     .small { font-size: 11px; fill: #656d76 } .ours { fill: #1a7f37 } .theirs { fill: #afb8c1 } \
                     .cut { stroke: #ffffff; stroke-width: 3; fill: none } \
                     @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #8d96a0 } \
                     .ours { fill: #3fb950 } .theirs { fill: #6e7681 } .cut { stroke: #0d1117 } }";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut figures = Figures::default();
    for file in &args.files {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        figures.add(&text).with_context(|| format!("cannot use {}", file.display()))?;
    }
    fs::write(&args.svg, draw(&figures)?).with_context(|| format!("cannot write {}", args.svg.display()))
}

/// A result, and the machine it was measured on.
struct Figure {
    value: f64,
    machine: String,
}

/// All results by name.
#[derive(Default)]
struct Figures(BTreeMap<String, Figure>);

impl Figures {
    /// Adds the results in the output of one benchmark.
    fn add(&mut self, output: &str) -> anyhow::Result<()> {
        let last = |prefix: &str| output.lines().rev().find_map(|line| line.strip_prefix(prefix)?.strip_prefix(' '));
        let machine = last(MACHINE).context("there is no MACHINE line: save the whole output of a benchmark")?;
        let results = last(RESULT).context("there is no RESULT line: save the whole output of a benchmark")?;
        for field in results.split_whitespace() {
            let (name, value) = field.split_once('=').with_context(|| format!("`{field}` is not NAME=VALUE"))?;
            let value: f64 = value.parse().with_context(|| format!("`{field}` has no number"))?;
            let figure = Figure { value, machine: machine.trim().to_owned() };
            ensure!(self.0.insert(name.to_owned(), figure).is_none(), "`{name}` is in two files: name only one");
        }
        Ok(())
    }

    /// The bars of a panel. `None` without tollgate or without any peer.
    fn bars(&self, panel: &Panel) -> Option<Vec<(&'static str, &Figure)>> {
        let (_, ours) = panel.bars.first()?;
        self.0.get(*ours)?;
        let bars: Vec<_> = panel.bars.iter().filter_map(|(label, name)| Some((*label, self.0.get(*name)?))).collect();
        (bars.len() > 1).then_some(bars)
    }
}

fn draw(figures: &Figures) -> anyhow::Result<String> {
    let mut body = String::new();
    let mut y = MARGIN;
    for panel in &PANELS {
        if let Some(bars) = figures.bars(panel) {
            y = draw_panel(&mut body, panel, &bars, y)?;
        }
    }
    if body.is_empty() {
        bail!("no panel has figures: run `bench memory --only hot,uniform` or `bench gateway --only allowed`");
    }
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" width=\"{WIDTH}\" height=\"{y}\" \
         role=\"img\" aria-label=\"Tollgate and its peers; shorter is better\">\n<style>{STYLE}</style>\n{body}</svg>\n"
    ))
}

/// Draws one panel and returns where the next one starts.
fn draw_panel(out: &mut String, panel: &Panel, bars: &[(&str, &Figure)], top: f64) -> anyhow::Result<f64> {
    let Panel { title, unit, .. } = panel;
    let machine = bars.first().map_or("", |(_, ours)| ours.machine.as_str());
    let y = top + 12.0;
    writeln!(out, "<text class=\"title\" x=\"{MARGIN}\" y=\"{y}\">{title} ({unit}, shorter is better)</text>")?;
    let y = y + 16.0;
    writeln!(out, "<text class=\"small\" x=\"{MARGIN}\" y=\"{y}\">{}</text>", escape(machine))?;
    let shortest = bars.iter().map(|(_, bar)| bar.value).fold(f64::INFINITY, f64::min);
    let shown = bars.iter().map(|(_, bar)| bar.value).filter(|value| *value <= shortest * CUT);
    let longest = shown.fold(0.0, f64::max);
    ensure!(longest > 0.0, "the results of the panel `{title}` are not above 0");
    let mut y = y + 8.0;
    for (place, (label, bar)) in bars.iter().enumerate() {
        let length = (bar.value / longest).min(1.0) * BARS_WIDTH;
        let class = if place == 0 { "ours" } else { "theirs" };
        let (base, label_x, end) = (y + BAR - 3.0, BARS_X - 8.0, BARS_X + length);
        writeln!(out, "<text x=\"{label_x}\" y=\"{base:.1}\" text-anchor=\"end\">{label}</text>")?;
        writeln!(
            out,
            "<rect class=\"{class}\" x=\"{BARS_X}\" y=\"{y:.1}\" width=\"{length:.1}\" height=\"{BAR}\" rx=\"2\"/>"
        )?;
        if bar.value > longest {
            // A gap in the bar: it is longer than it is drawn.
            let x = end - 24.0;
            writeln!(
                out,
                "<path class=\"cut\" d=\"M{x:.1} {:.1}l6 -{:.1}l-3 -1l6 -{:.1}\"/>",
                y + BAR,
                BAR / 2.0,
                BAR / 2.0
            )?;
        }
        let number = show(bar.value);
        writeln!(out, "<text x=\"{:.1}\" y=\"{base:.1}\">{number} {unit}</text>", end + 6.0)?;
        y += ROW;
    }
    Ok(y + MARGIN)
}

/// One decimal where it matters: below 30.
fn show(value: f64) -> String {
    if value < 30.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "Some table\n\nMACHINE A <fast> processor, 2 processors\n\
                         RESULT hot_allow_ns=60.0 hot_allow_governor_ns=82.4 hot_allow_limitador_ns=3404.0 grow_max_us=3.0\n";

    #[test]
    fn numbers_and_machine_come_from_the_saved_output() {
        let mut figures = Figures::default();
        figures.add(SAVED).unwrap();
        let svg = draw(&figures).unwrap();
        for expected in ["60 ns", "82 ns", "3404 ns", "A &lt;fast&gt; processor, 2 processors"] {
            assert!(svg.contains(expected), "{expected} is missing in {svg}");
        }
        assert!(!svg.contains("throttlecrab") && !svg.contains("HAProxy"), "bars without results: {svg}");
        assert_eq!(svg.matches("class=\"cut\"").count(), 1, "only limitador's bar is cut: {svg}");
    }

    #[test]
    fn output_without_usable_lines_is_rejected() {
        let message = |output: &str| format!("{:#}", Figures::default().add(output).unwrap_err());
        assert!(message("RESULT a=1").contains("no MACHINE line"));
        assert!(message("MACHINE x").contains("no RESULT line"));
        assert!(message("MACHINE x\nRESULT a").contains("`a` is not NAME=VALUE"));
        assert!(message("MACHINE x\nRESULT a=b").contains("`a=b` has no number"));
    }

    #[test]
    fn one_result_is_not_taken_from_two_files() {
        let mut figures = Figures::default();
        figures.add(SAVED).unwrap();
        assert!(format!("{:#}", figures.add(SAVED).unwrap_err()).contains("is in two files"));
    }

    #[test]
    fn panels_need_tollgate_and_a_peer() {
        let mut figures = Figures::default();
        figures.add("MACHINE x\nRESULT hot_allow_ns=60.0 uniform_governor_ns=700.0").unwrap();
        assert!(draw(&figures).unwrap_err().to_string().contains("no panel has figures"));
    }

    #[test]
    fn the_published_chart_is_drawn_from_the_saved_runs() {
        let mut figures = Figures::default();
        figures.add(include_str!("../results/memory.txt")).unwrap();
        figures.add(include_str!("../results/gateway.txt")).unwrap();
        assert_eq!(draw(&figures).unwrap(), include_str!("../../docs/speed.svg"), "run `make chart`");
    }
}
