//! The output of a benchmark: tables for people, a `MACHINE` and a `RESULT` line for programs.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "printing is what a benchmark is for")]

use std::fmt::Display;
use std::fs;
use std::num::NonZeroUsize;

/// Starts the line with the results.
pub(crate) const RESULT: &str = "RESULT";
/// Starts the line with the name of the processor.
pub(crate) const MACHINE: &str = "MACHINE";

/// The results of a benchmark, in order.
#[derive(Default)]
pub(crate) struct Results(Vec<(String, String)>);

impl Results {
    /// A ratio to something measured in the same run.
    pub(crate) fn ratio(&mut self, name: impl Into<String>, value: f64) {
        self.0.push((name.into(), format!("{value:.3}")));
    }

    /// A quantity. Its name ends with its unit.
    pub(crate) fn quantity(&mut self, name: impl Into<String>, value: f64) {
        self.0.push((name.into(), format!("{value:.1}")));
    }

    /// A value that is far below 1 when it is good.
    pub(crate) fn fraction(&mut self, name: impl Into<String>, value: f64) {
        self.0.push((name.into(), format!("{value:.5}")));
    }

    /// Prints the last two lines of every benchmark.
    pub(crate) fn print(&self) {
        let fields: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        println!("{MACHINE} {}", machine());
        println!("{RESULT} {}", fields.join(" "));
    }
}

/// The name and the number of the processors.
fn machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let name = name.map_or("unknown processor", |(_, name)| name.trim());
    let count = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    format!("{name}, {count} processors")
}

/// A table with its first column to the left and the others to the right.
pub(crate) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<C: Into<String>>(title: impl Into<String>, header: impl IntoIterator<Item = C>) -> Self {
        let mut table = Self { title: title.into(), rows: Vec::new() };
        table.row(header);
        table
    }

    pub(crate) fn row<C: Into<String>>(&mut self, cells: impl IntoIterator<Item = C>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    pub(crate) fn print(&self) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        println!("\n{}", self.title);
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                line += &match column {
                    0 => format!("  {cell:<width$}"),
                    _ => format!("  {cell:>width$}"),
                };
            }
            println!("{}", line.trim_end());
        }
    }
}

/// A sentence between the tables.
pub(crate) fn note(text: impl Display) {
    println!("{text}");
}

/// Why there is no result.
pub(crate) fn error(text: impl Display) {
    eprintln!("bench: {text}");
}

/// One figure from a child process to its parent; [`parse_figure`] is the other end.
pub(crate) fn print_figure(name: &str, value: u64) {
    println!("{name}={value}");
}

/// Reads back what [`print_figure`] wrote.
pub(crate) fn parse_figure(output: &str, name: &str) -> Option<u64> {
    let mut fields = output.lines().filter_map(|line| line.split_once('='));
    let (_, value) = fields.find(|(field, _)| *field == name)?;
    value.parse().ok()
}
