//! The report as a picture: a panel per limit with the admitted and the denied requests over time, and the quota left.
//!
//! The same report gives the same bytes, so that pictures in the documentation can be checked.

use std::fmt::Write as _;
use std::time::Duration;

use tollgate_telemetry::words::human;

use super::report::{COLUMNS, LimitReport, Report, merged};

const WIDTH: u64 = 720;
const MARGIN: u64 = 16;
/// Where the plots start, and how wide their columns are. A gap of one unit separates the bars.
const PLOT_X: u64 = 80;
const BARS: u64 = 120;
const BAR: u64 = 5;
const PLOT_WIDTH: u64 = BARS * BAR;

const HEADER: u64 = 62;
const TITLE: u64 = 20;
/// The heights of the bars and of the level below them.
const BARS_HEIGHT: u64 = 56;
const LEVEL_HEIGHT: u64 = 26;
const GAP: u64 = 6;
const PANEL: u64 = TITLE + BARS_HEIGHT + GAP + LEVEL_HEIGHT + 18;
const AXIS: u64 = 26;

/// Readable on a light and on a dark page.
const STYLE: &str = "text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600}\
    .small{font-size:11px;font-weight:400;fill:#59636e}.end{text-anchor:end}.admitted{fill:#1a7f37}.denied{fill:#e5534b}\
    .level{fill:none;stroke:#0969da;stroke-width:1.5}.area{fill:#0969da;fill-opacity:.14}\
    .line{stroke:#d1d9e0}.window{stroke:#818b98;stroke-dasharray:2 3}\
    @media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.admitted{fill:#3fb950}\
    .denied{fill:#f85149}.level{stroke:#4493f8}.area{fill:#4493f8;fill-opacity:.2}.line{stroke:#3d444d}\
    .window{stroke:#656c76}}";

/// Draws a report.
pub fn draw(report: &Report) -> String {
    let panels = report.limits.len() as u64;
    let height = HEADER + panels * PANEL + AXIS;
    let title = escaped(&report.title());
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" aria-label=\"{title}\">\n<style>{STYLE}</style>\n"
    );
    _ = writeln!(svg, "<text class=\"title\" x=\"{MARGIN}\" y=\"24\">{title}</text>");
    legend(&mut svg, report.span);
    let most = report.limits.iter().flat_map(totals).max().unwrap_or(0).max(1);
    for (index, limit) in report.limits.iter().enumerate() {
        panel(&mut svg, report, limit, (HEADER + index as u64 * PANEL, most));
    }
    axis(&mut svg, report.span, HEADER + panels * PANEL);
    svg.push_str("</svg>\n");
    svg
}

fn legend(svg: &mut String, span: Duration) {
    for (x, class, text) in [(MARGIN, "admitted", "admitted"), (MARGIN + 90, "denied", "denied")] {
        _ = writeln!(svg, "<path class=\"{class}\" d=\"M{x} 37h10v10h-10z\"/>");
        _ = writeln!(svg, "<text class=\"small\" x=\"{}\" y=\"46\">{text}</text>", x + 15);
    }
    let x = MARGIN + 170;
    _ = writeln!(
        svg,
        "<path class=\"level\" d=\"M{x} 42h14\"/><text class=\"small\" x=\"{}\" y=\"46\">quota left</text>",
        x + 19
    );
    let right = PLOT_X + PLOT_WIDTH;
    let bar = human(span / BARS as u32);
    _ = writeln!(svg, "<text class=\"small end\" x=\"{right}\" y=\"46\">a bar is {bar}</text>");
    let x = MARGIN + 270;
    _ = writeln!(
        svg,
        "<path class=\"window\" d=\"M{x} 36v12\"/><text class=\"small\" x=\"{}\" y=\"46\">a window starts</text>",
        x + 7
    );
}

/// Returns the requests of each bar, denied ones included.
fn totals(limit: &LimitReport) -> Vec<u64> {
    let (admitted, denied) = bars(limit);
    admitted.iter().zip(&denied).map(|(admitted, denied)| admitted + denied).collect()
}

fn bars(limit: &LimitReport) -> (Vec<u64>, Vec<u64>) {
    (merged(&limit.admitted_by_column, BARS as usize), merged(&limit.denied_by_column, BARS as usize))
}

fn panel(svg: &mut String, report: &Report, limit: &LimitReport, (top, most): (u64, u64)) {
    let (base, right) = (top + TITLE + BARS_HEIGHT, PLOT_X + PLOT_WIDTH);
    let result = format!(
        "{} of {} admitted, at most {} in {}",
        limit.admitted,
        report.offered,
        limit.worst_window,
        human(limit.window)
    );
    _ = writeln!(
        svg,
        "<text class=\"title\" x=\"{MARGIN}\" y=\"{y}\">{name}<tspan class=\"small\" dx=\"8\">{description}</tspan></text>\
         <text class=\"small end\" x=\"{right}\" y=\"{y}\">{result}</text>",
        y = top + 12,
        name = escaped(&limit.name),
        description = escaped(&limit.description),
    );
    for start in &limit.window_starts {
        let x = PLOT_X + scaled(start.as_micros(), report.span.as_micros(), PLOT_WIDTH);
        _ = writeln!(svg, "<path class=\"window\" d=\"M{x} {}V{}\"/>", top + TITLE, base + GAP + LEVEL_HEIGHT);
    }
    let (admitted, denied) = bars(limit);
    let (mut low, mut high) = (String::new(), String::new());
    for (index, (admitted, denied)) in admitted.iter().zip(&denied).enumerate() {
        let x = PLOT_X + index as u64 * BAR;
        let of = |count: u64| if count == 0 { 0 } else { scaled(count.into(), most.into(), BARS_HEIGHT).max(1) };
        let (admitted, denied) = (of(*admitted), of(*denied));
        bar(&mut low, (x, base), admitted);
        bar(&mut high, (x, base - admitted), denied.min(BARS_HEIGHT - admitted.min(BARS_HEIGHT)));
    }
    for (class, path) in [("admitted", low), ("denied", high)] {
        if !path.is_empty() {
            _ = writeln!(svg, "<path class=\"{class}\" d=\"{path}\"/>");
        }
    }
    _ = writeln!(svg, "<path class=\"line\" d=\"M{PLOT_X} {base}.5H{right}\"/>");
    label(svg, top + TITLE + 9, &most.to_string());
    level(svg, limit, base + GAP);
}

/// Draws the quota that is left, below the bars.
fn level(svg: &mut String, limit: &LimitReport, top: u64) {
    if limit.remaining.is_empty() {
        return;
    }
    let bottom = top + LEVEL_HEIGHT;
    let height = |left: u64| bottom - scaled(left.min(limit.quota).into(), limit.quota.max(1).into(), LEVEL_HEIGHT - 2);
    let mut line = format!("M{PLOT_X} {}", height(limit.quota));
    for (index, chunk) in limit.remaining.chunks(COLUMNS / BARS as usize).enumerate() {
        let left = chunk.last().copied().unwrap_or(0);
        _ = write!(line, "L{} {}", PLOT_X + (index as u64 + 1) * BAR, height(left));
    }
    let right = PLOT_X + PLOT_WIDTH;
    _ = writeln!(svg, "<path class=\"area\" d=\"{line}L{right} {bottom}L{PLOT_X} {bottom}z\"/>");
    _ = writeln!(svg, "<path class=\"level\" d=\"{line}\"/>");
    _ = writeln!(svg, "<path class=\"line\" d=\"M{PLOT_X} {bottom}.5H{right}\"/>");
    label(svg, top + 10, &limit.quota.to_string());
}

fn bar(path: &mut String, (x, base): (u64, u64), height: u64) {
    if height > 0 {
        let width = BAR - 1;
        _ = write!(path, "M{x} {base}v-{height}h{width}v{height}z");
    }
}

/// Writes the value of a full height to the left of a plot.
fn label(svg: &mut String, y: u64, text: &str) {
    _ = writeln!(svg, "<text class=\"small end\" x=\"{}\" y=\"{y}\">{text}</text>", PLOT_X - 6);
}

fn axis(svg: &mut String, span: Duration, top: u64) {
    const TICKS: u32 = 4;
    for tick in 0..=TICKS {
        let x = PLOT_X + PLOT_WIDTH * u64::from(tick) / u64::from(TICKS);
        let anchor = match tick {
            0 => "start",
            TICKS => "end",
            _ => "middle",
        };
        let text = human(span * tick / TICKS);
        _ = writeln!(svg, "<text class=\"small\" text-anchor=\"{anchor}\" x=\"{x}\" y=\"{}\">{text}</text>", top + 4);
    }
}

/// Returns `part / whole` of a length, rounded.
fn scaled(part: u128, whole: u128, length: u64) -> u64 {
    let whole = whole.max(1);
    u64::try_from((part * u128::from(length) + whole / 2) / whole).unwrap_or(length).min(length)
}

/// Escapes a text for XML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
