//! One file of a log, read line by line.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use tollgate::internal::is_control_or_format;
use tollgate_telemetry::words::{Grouped, Span, counted};

use super::input::{Input, OpenError};
use super::lines::{Line, Lines};
pub(super) use super::order::Disorder;
use super::order::Order;
use super::{Format, LineReader, ReadLine, Record};

/// The number of unreadable lines of a file that are shown.
const MAX_SHOWN_LINES: usize = 3;
/// The number of characters of such a line that are shown.
const MAX_SHOWN_CHARS: usize = 120;

/// One file. It holds the current request.
pub(super) struct Source {
    reader: LineReader,
    input: InputState,
    record: Record,
    order: Order,
    summary: FileSummary,
    finished_bytes: u64,
    total_bytes: Option<u64>,
}

enum InputState {
    Open {
        lines: Lines<Box<dyn std::io::Read + Send>>,
        read_bytes: std::sync::Arc<std::sync::atomic::AtomicU64>,
    },
    /// The first request was read, and the file was closed again.
    Suspended,
    Finished,
}

/// How a file was read.
#[derive(Clone, Debug, Default)]
pub struct FileSummary {
    /// The file.
    pub path: PathBuf,
    /// The lines that were read.
    pub lines: u64,
    /// The requests among them.
    pub requests: u64,
    /// Lines of a known format without an HTTP request.
    pub without_request: u64,
    /// Lines of no known format.
    pub unreadable: u64,
    /// Lines that exceed the maximum length.
    pub too_long: u64,
    /// The requests by format.
    pub formats: FormatCounts,
    /// The first unreadable lines.
    pub bad_lines: Vec<BadLine>,
    /// Requests that are not in the order of time.
    pub disorder: Disorder,
    /// Why the file could not be read to its end.
    pub problem: Option<String>,
}

impl FileSummary {
    /// Returns whether the requests are in the order of their times, except for one of them or 1 %: some servers date a
    /// line with the start of a request that took long. Those that are older by up to a minute are in order.
    pub fn is_in_order(&self) -> bool {
        self.disorder.went_back <= (self.requests / 100).max(1)
    }

    /// Describes requests that are not in the order of their times.
    pub fn describe_disorder(&self) -> String {
        let Disorder { went_back, largest_step_back_micros, .. } = self.disorder;
        format!(
            "{} is not in order of time: {} of {} older than one before, by up to {}",
            self.path.display(),
            Grouped(went_back),
            counted(self.requests, "request is", "requests are"),
            Span(largest_step_back_micros / 1_000_000)
        )
    }
}

/// The fix for a log that is not in the order of time.
pub const MERGE_FIX: &str = "name each log file by itself, because files are merged by time";

/// A line that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// The number of the line, from 1.
    pub number: u64,
    /// The start of the line, printable.
    pub text: String,
}

/// Lines by format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatCounts([u64; Format::ALL.len()]);

impl FormatCounts {
    /// Returns the formats that occurred, with their number of lines.
    pub fn iter(&self) -> impl Iterator<Item = (Format, u64)> {
        Format::ALL.into_iter().zip(self.0).filter(|(_, lines)| *lines > 0)
    }
}

impl Source {
    pub(super) fn open(path: &Path, reader: LineReader) -> Result<Self, OpenError> {
        let Input { reader: input, read_bytes, total_bytes } = Input::open(path)?;
        Ok(Self {
            reader,
            input: InputState::Open { lines: Lines::new(input), read_bytes },
            record: Record::default(),
            order: Order::default(),
            summary: FileSummary { path: path.to_owned(), ..FileSummary::default() },
            finished_bytes: 0,
            total_bytes,
        })
    }

    /// Returns the current request.
    pub(super) fn record(&self) -> &Record {
        &self.record
    }

    /// Reads the next request. Returns `false` at the end.
    pub(super) fn advance(&mut self) -> bool {
        let Self { reader, input, record, order, summary, .. } = self;
        let InputState::Open { lines, .. } = input else { return false };
        while let Some(line) = lines.next() {
            summary.lines += 1;
            let text = match line {
                Line::Text([]) => continue,
                Line::Text(text) => text,
                Line::TooLong => {
                    summary.too_long += 1;
                    continue;
                }
            };
            match reader.read(text, record) {
                ReadLine::Request(format) => {
                    summary.formats.0[format as usize] += 1;
                    summary.requests += 1;
                    record.set_micros(order.place(record.micros()));
                    return true;
                }
                ReadLine::NoRequest(format) => {
                    summary.formats.0[format as usize] += 1;
                    summary.without_request += 1;
                }
                ReadLine::Unknown => {
                    summary.unreadable += 1;
                    if summary.bad_lines.len() < MAX_SHOWN_LINES {
                        summary.bad_lines.push(BadLine { number: summary.lines, text: shown(text) });
                    }
                }
            }
        }
        self.finish();
        false
    }

    fn finish(&mut self) {
        if let InputState::Open { lines, read_bytes } = &self.input {
            self.summary.problem = lines.problem().map(ToString::to_string);
            self.finished_bytes = read_bytes.load(Relaxed);
        }
        self.summary.disorder = self.order.disorder();
        self.input = InputState::Finished;
    }

    /// Closes a regular file until it is resumed, so that any number of files can be merged.
    pub(super) fn suspend(&mut self) {
        if self.total_bytes.is_some() && matches!(self.input, InputState::Open { .. }) {
            self.input = InputState::Suspended;
            self.order = Order::default();
            self.summary = FileSummary { path: std::mem::take(&mut self.summary.path), ..FileSummary::default() };
        }
    }

    /// Opens a suspended file again and reads its first request. Returns `false` if it has none any more.
    pub(super) fn resume(&mut self) -> bool {
        if !matches!(self.input, InputState::Suspended) {
            return true;
        }
        match Self::open(&self.summary.path, self.reader.clone()) {
            Ok(source) => {
                *self = source;
                self.advance()
            }
            Err(error) => {
                self.summary.problem = Some(error.to_string());
                self.input = InputState::Finished;
                false
            }
        }
    }

    pub(super) fn read_bytes(&self) -> u64 {
        match &self.input {
            InputState::Open { read_bytes, .. } => read_bytes.load(Relaxed),
            InputState::Suspended => 0,
            InputState::Finished => self.finished_bytes,
        }
    }

    pub(super) fn total_bytes(&self) -> Option<u64> {
        self.total_bytes
    }

    pub(super) fn summary(&self) -> &FileSummary {
        &self.summary
    }
}

/// Returns the start of a line, without characters that control a terminal.
fn shown(line: &[u8]) -> String {
    let start = &line[..line.len().min(4 * MAX_SHOWN_CHARS)];
    let text = String::from_utf8_lossy(start);
    let mut shown = String::new();
    for char in text.chars().take(MAX_SHOWN_CHARS) {
        match char {
            '\t' => shown.push(' '),
            _ if is_control_or_format(char) => shown.push('\u{fffd}'),
            _ => shown.push(char),
        }
    }
    if text.chars().count() > MAX_SHOWN_CHARS || start.len() < line.len() {
        shown.push('…');
    }
    shown
}
