//! The report for a terminal: a table, the results at each moment if there are few, and a timeline per limit.

use std::fmt::Write as _;
use std::time::Duration;

use tollgate_telemetry::words::{counted, human};

use super::report::{COLUMNS, LimitReport, Report, merged};

/// The width if the output is not a terminal.
pub const DEFAULT_WIDTH: usize = 80;
/// The numbers of columns that a plot may have. All divide [`COLUMNS`].
const PLOT_WIDTHS: [usize; 9] = [240, 120, 80, 60, 48, 40, 30, 24, 20];
/// The width of the labels in front of a plot.
const LABEL: usize = 11;
/// The columns of a plot: no requests, then eight heights.
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// How the output looks.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Letters per line.
    pub width: usize,
    /// Whether colours are used.
    pub style: Style,
}

/// Whether colours are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Without escape sequences.
    Plain,
    /// With ANSI colours, for a terminal.
    Coloured,
}

const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const BOLD: &str = "\x1b[1m";
const RESET: &str = "\x1b[0m";

/// Formats a report. The result has no line break at its end.
pub fn show(report: &Report, layout: Layout) -> String {
    let mut text = heading(report, layout);
    text += &table(report);
    if let Some(moments) = moments(report) {
        text.push('\n');
        text += &moments;
    }
    text.push('\n');
    text += &timelines(report, layout);
    text += &notes(report);
    text.truncate(text.trim_end().len());
    text
}

fn heading(report: &Report, layout: Layout) -> String {
    let mut text = paint(&report.title(), BOLD, layout.style);
    text.push('\n');
    if let Some(scenario) = &report.scenario {
        text += &wrapped(scenario.explanation, layout.width);
    }
    text.push('\n');
    text
}

/// Breaks a text into lines of at most `width` letters.
fn wrapped(text: &str, width: usize) -> String {
    let (mut lines, mut length) = (String::new(), 0);
    for word in text.split_whitespace() {
        let letters = word.chars().count();
        if length > 0 && length + 1 + letters > width {
            lines.push('\n');
            length = 0;
        } else if length > 0 {
            lines.push(' ');
            length += 1;
        }
        lines += word;
        length += letters;
    }
    lines.push('\n');
    lines
}

fn table(report: &Report) -> String {
    let worst =
        report.common_window().map_or_else(|| "worst window".to_owned(), |window| format!("worst {}", human(window)));
    let header = ["limit", "offered", "admitted", "denied", &worst, "burst", "wait p50", "p99"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(report.limits.iter().map(|limit| row(report, limit)));
    aligned(&rows, " ")
}

fn row(report: &Report, limit: &LimitReport) -> Vec<String> {
    let worst = match report.common_window() {
        Some(_) => limit.worst_window.to_string(),
        None => format!("{} in {}", limit.worst_window, human(limit.window)),
    };
    let wait = |wait: Option<Duration>| wait.map_or_else(|| "-".to_owned(), human);
    vec![
        limit.name.clone(),
        report.offered.to_string(),
        limit.admitted.to_string(),
        limit.denied.to_string(),
        worst,
        limit.largest_burst.to_string(),
        wait(limit.wait_p50),
        wait(limit.wait_p99),
    ]
}

/// Returns what each limit admits at each moment, if requests arrive at a few moments only.
fn moments(report: &Report) -> Option<String> {
    let first = report.limits.first().filter(|limit| !limit.steps.is_empty())?;
    let names = report.limits.iter().map(|limit| limit.name.clone());
    let mut rows = vec![["at".to_owned(), "offered".to_owned()].into_iter().chain(names).collect::<Vec<_>>()];
    for (index, step) in first.steps.iter().enumerate() {
        let results = report.limits.iter().map(|limit| {
            limit
                .steps
                .get(index)
                .map_or_else(String::new, |step| format!("{}, {} left", step.admitted, step.remaining))
        });
        rows.push([human(step.at), step.offered.to_string()].into_iter().chain(results).collect());
    }
    // Several long names would not fit; the timelines show the same.
    (report.limits.len() <= 2).then(|| format!("Admitted at each moment:\n{}", aligned(&rows, "  ")))
}

/// Aligns the first column to the left and the others to the right, with `gap` between them.
fn aligned(rows: &[Vec<String>], gap: &str) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let letters = |row: &Vec<String>, column: usize| row.get(column).map_or(0, |cell| cell.chars().count());
    let widths: Vec<usize> =
        (0..columns).map(|column| rows.iter().map(|row| letters(row, column)).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            _ = match column {
                0 => write!(text, "{cell:<width$}"),
                _ => write!(text, "{gap}{cell:>width$}"),
            };
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }
    text
}

fn timelines(report: &Report, layout: Layout) -> String {
    let room = layout.width.saturating_sub(LABEL);
    let columns = PLOT_WIDTHS.into_iter().find(|width| *width <= room).unwrap_or(20);
    let offered = merged(&report.offered_by_column, columns);
    let admitted: Vec<Vec<u64>> =
        report.limits.iter().map(|limit| merged(&limit.admitted_by_column, columns)).collect();
    let most_offered = offered.iter().max().copied().unwrap_or(0);
    let most_admitted = admitted.iter().flatten().max().copied().unwrap_or(0);
    let span = u64::try_from(report.span.as_micros()).unwrap_or(u64::MAX) / columns as u64;
    let mut text = format!(
        "A column is {}. A full column is {most_admitted} requests in the rows of admitted requests, and {most_offered} in the \
         others.\n\n",
        human(Duration::from_micros(span))
    );
    text = wrapped(&text, layout.width) + "\n";
    text += &plot("offered", &offered, most_offered, None, layout);
    for (limit, admitted) in report.limits.iter().zip(&admitted) {
        text.push('\n');
        text += &wrapped(&format!("{}: {}", limit.name, limit.description), layout.width);
        text += &plot("admitted", admitted, most_admitted, Some(GREEN), layout);
        text += &plot("denied", &merged(&limit.denied_by_column, columns), most_offered, Some(RED), layout);
    }
    let end = human(report.span);
    _ = writeln!(text, "{:LABEL$}0 s{end:>rest$}", "", rest = columns.saturating_sub(3));
    text
}

fn plot(label: &str, columns: &[u64], most: u64, colour: Option<&str>, layout: Layout) -> String {
    let blocks: String = columns.iter().map(|count| block(*count, most)).collect();
    let blocks = blocks.trim_end();
    let blocks = colour.map_or_else(|| blocks.to_owned(), |colour| paint(blocks, colour, layout.style));
    let line = format!("  {label:<width$}{blocks}", width = LABEL - 2);
    format!("{}\n", line.trim_end())
}

/// Returns the block for a count. Every count above zero is visible.
fn block(count: u64, most: u64) -> char {
    let heights = BLOCKS.len() as u128 - 1;
    let height = (u128::from(count) * heights).div_ceil(u128::from(most.max(1))).min(heights);
    BLOCKS[usize::try_from(height).unwrap_or(0)]
}

fn notes(report: &Report) -> String {
    let mut text = String::new();
    for limit in report.limits.iter().filter(|limit| limit.queued_at_end > 0) {
        _ = writeln!(
            text,
            "\n{}: {} still in the queue at the end.",
            limit.name,
            counted(limit.queued_at_end, "request is", "requests are")
        );
    }
    let never: Vec<&str> =
        report.limits.iter().filter(|limit| limit.never_fits > 0).map(|limit| limit.name.as_str()).collect();
    if !never.is_empty() {
        _ = writeln!(text, "\nSome requests cost more than the whole quota and never pass: {}.", never.join(", "));
    }
    text
}

fn paint(text: &str, colour: &str, style: Style) -> String {
    match style {
        Style::Coloured if !text.is_empty() => format!("{colour}{text}{RESET}"),
        _ => text.to_owned(),
    }
}

const _: () = {
    let mut index = 0;
    while index < PLOT_WIDTHS.len() {
        assert!(COLUMNS.is_multiple_of(PLOT_WIDTHS[index]), "plots have equal columns");
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_count_is_visible_and_the_most_is_full() {
        let plot: String = [0, 1, 50, 51, 99, 100].map(|count| block(count, 100)).into_iter().collect();
        assert_eq!(plot, " ▁▄▅██");
        assert_eq!(block(0, 0), ' ');
    }

    #[test]
    fn long_texts_are_wrapped() {
        assert_eq!(wrapped("one two three", 7), "one two\nthree\n");
        assert_eq!(wrapped("immeasurable", 5), "immeasurable\n");
    }
}
