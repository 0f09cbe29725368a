//! Access logs as a stream of requests in the order of their times.
//!
//! Logs of several files are merged: files of one server that were rotated follow each other, and files of several
//! servers are interleaved. The format is recognized line by line. Memory does not depend on the length of a log: one
//! record per open file is kept, and lines that are too long are skipped.
//!
//! Deliberately not here: anything about limits.

mod alb;
mod common;
mod fields;
mod input;
mod json;
mod lines;
mod order;
mod record;
mod request_line;
mod source;
mod time;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::PathBuf;

pub use self::fields::{HeaderField, Mappings};
pub use self::input::OpenError;
pub use self::record::Record;
use self::source::Source;
pub use self::source::{FileSummary, MERGE_FIX};
use self::time::CommonTimes;
pub use self::time::rfc3339;

/// The most files that are held open at the same time, unless more of them overlap in time or cannot be opened twice.
const MAX_HELD_OPEN: usize = 16;

/// The format of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Common Log Format of Apache and others
    Common,
    /// Combined Log Format of Apache, nginx and Tollgate, and what Traefik writes by default
    Combined,
    /// JSON lines of nginx, Envoy, Caddy, Traefik and Tollgate
    Json,
    /// Access logs of AWS Application Load Balancers
    Alb,
}

impl Format {
    /// All formats, in declaration order.
    pub const ALL: [Self; 4] = [Self::Common, Self::Combined, Self::Json, Self::Alb];

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Common => "common",
            Self::Combined => "combined",
            Self::Json => "json",
            Self::Alb => "alb",
        }
    }
}

/// How a line is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadLine {
    /// The record holds a request.
    Request(Format),
    /// The line is of a known format, but has no HTTP request, such as that of a client that sent something else.
    NoRequest(Format),
    /// The line is of no known format.
    Unknown,
}

/// The requests of access logs.
pub struct AccessLog {
    sources: Vec<Source>,
    /// The next request of each source except the current one, by time.
    next: BinaryHeap<Reverse<(u64, usize)>>,
    current: Option<usize>,
}

impl AccessLog {
    /// Opens the files. `-` is stdin. Without `format`, the format of each line is recognized.
    pub fn open(paths: &[PathBuf], format: Option<Format>, mappings: Mappings) -> Result<Self, OpenError> {
        let reader = LineReader { format, mappings, times: CommonTimes::default() };
        let mut log = Self { sources: Vec::with_capacity(paths.len()), next: BinaryHeap::new(), current: None };
        for path in paths {
            let mut source = Source::open(path, reader.clone())?;
            if source.advance() {
                log.next.push(Reverse((source.record().micros(), log.sources.len())));
                if paths.len() > MAX_HELD_OPEN {
                    source.suspend();
                }
            }
            log.sources.push(source);
        }
        Ok(log)
    }

    /// Returns the next request. It may be up to a few seconds older than the one before, and is then dated like it.
    pub fn next_record(&mut self) -> Option<&Record> {
        if let Some(current) = self.current {
            let source = &mut self.sources[current];
            let is_next = source.advance() && {
                let micros = source.record().micros();
                let is_first = self.next.peek().is_none_or(|Reverse((other, _))| micros <= *other);
                if !is_first {
                    self.next.push(Reverse((micros, current)));
                }
                is_first
            };
            if !is_next {
                self.current = None;
            }
        }
        while self.current.is_none() {
            let Reverse((_, next)) = self.next.pop()?;
            if self.sources[next].resume() {
                self.current = Some(next);
            }
        }
        self.current.map(|current| self.sources[current].record())
    }

    /// Returns the bytes read so far, before decompression.
    pub fn read_bytes(&self) -> u64 {
        self.sources.iter().map(Source::read_bytes).sum()
    }

    /// Returns the size of all files, or `None` if one is not a regular file.
    pub fn total_bytes(&self) -> Option<u64> {
        self.sources.iter().map(Source::total_bytes).sum()
    }

    /// Returns how each file was read so far.
    pub fn files(&self) -> impl Iterator<Item = &FileSummary> {
        self.sources.iter().map(Source::summary)
    }
}

/// Reads lines into records.
#[derive(Clone, Default)]
struct LineReader {
    /// The only format, or `None` to recognize it.
    format: Option<Format>,
    mappings: Mappings,
    times: CommonTimes,
}

impl LineReader {
    fn read(&mut self, line: &[u8], record: &mut Record) -> ReadLine {
        record.clear();
        match self.format.unwrap_or_else(|| recognize(line)) {
            Format::Json => self.read_json(line, record),
            Format::Alb => alb::read(line, record),
            Format::Common | Format::Combined => self.read_common(line, record),
        }
    }
}

/// Returns the only format in which a line can be.
fn recognize(line: &[u8]) -> Format {
    match line.trim_ascii_start().first() {
        Some(b'{') => Format::Json,
        _ if alb::is_likely(line) => Format::Alb,
        _ => Format::Combined,
    }
}

/// Reads a line in every format. For the fuzzer, which looks for lines that end the process.
pub fn read_in_every_format(line: &[u8]) {
    let mut record = Record::default();
    for format in Format::ALL.into_iter().map(Some).chain([None]) {
        let mut reader = LineReader { format, ..LineReader::default() };
        if matches!(reader.read(line, &mut record), ReadLine::Request(_)) {
            assert!(record.has_request(), "a request has a method and a target");
        }
    }
}

#[cfg(test)]
mod tests;
