//! Problems of a rule file: the position, the problem and the fix.
//!
//! Reading continues after a problem, so that all of them are reported at once. Deliberately not here: the checks that
//! find problems.

use std::fmt;
use std::sync::Arc;

use tollgate::InvalidLimit;
use tollgate::internal::is_control_or_format;
use tollgate_rules::internal::config::PatternBudget;

/// More than people read at once, and a bound on the output for a hostile file.
const MAX_REPORTED: usize = 100;

/// Checking stops after this many problems: enough to include the first hundred by position in any file that people
/// write, and few enough that a hostile file costs little.
const MAX_FOUND: usize = 1000;

/// The most characters of the file that a message repeats.
const MAX_TEXT: usize = 80;

/// The most characters of a line that are searched for a password.
const MAX_LINE: usize = 1000;

/// A position in a file. Lines and columns count from 1, and columns count characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The line number.
    pub line: u32,
    /// The number of the character in the line.
    pub column: u32,
}

impl Position {
    /// Returns the position after `text`. YAML ends a line at a line feed, a carriage return, or both together.
    pub(super) fn after(text: &str) -> Self {
        let text = text.replace("\r\n", "\n");
        let (before, line) =
            text.rsplit_once(['\n', '\r']).map_or((None, &*text), |(before, line)| (Some(before), line));
        let ends = before.map_or(0, |before| before.matches(['\n', '\r']).count() + 1);
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).saturating_add(1);
        Self { line: count(ends), column: count(line.chars().count()) }
    }
}

/// The severity of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Severity {
    /// The file is rejected.
    Error,
    /// The file is accepted, but the setting is probably not intended.
    Warning,
}

/// A value that cannot be used: the problem and the fix, without a position.
#[derive(Debug)]
pub(super) struct InvalidValue {
    pub(super) problem: String,
    pub(super) fix: String,
}

impl InvalidValue {
    pub(super) fn new(problem: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { problem: problem.into(), fix: fix.into() }
    }
}

impl fmt::Display for InvalidValue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl From<InvalidLimit> for InvalidValue {
    fn from(error: InvalidLimit) -> Self {
        Self::new(error.problem(), error.fix())
    }
}

/// One problem of a rule file, with its position and its fix.
///
/// `Display` writes it in one line:
/// `tollgate.yaml:14:9: capacity 0 admits nothing: use 1 or more, or `blocked` to refuse every request`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    file: Arc<str>,
    at: Position,
    text: String,
    message: String,
    fix: String,
    severity: Severity,
}

impl Problem {
    /// Returns the name of the file, as given to [`RuleFile::parse`](super::RuleFile::parse).
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the position.
    #[must_use]
    pub fn position(&self) -> Position {
        self.at
    }

    /// Returns the text at the position, up to the end of the line, shortened and without the password of a URL.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the problem, without the fix.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the fix.
    #[must_use]
    pub fn fix(&self) -> &str {
        &self.fix
    }

    /// Returns whether it is an error or a warning.
    #[must_use]
    pub fn severity(&self) -> Severity {
        self.severity
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position { line, column } = self.at;
        let kind = if self.severity == Severity::Warning { "warning: " } else { "" };
        write!(out, "{}:{line}:{column}: {kind}{}: {}", self.file, self.message, self.fix)
    }
}

/// Every problem of a rule file, in the order of the file. `Display` writes one per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    reported: Vec<Problem>,
    more: usize,
}

impl Problems {
    /// Returns the first hundred problems, errors and warnings.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.reported.iter()
    }

    /// Adds the problems that another check found, in the order of each file.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.reported.extend(other.reported);
        self.reported.sort_by(|one, other| (&one.file, one.at).cmp(&(&other.file, other.at)));
        self.more += other.more;
        self
    }

    /// Returns the number of problems that [`iter`](Self::iter) leaves out. Checking stops after a thousand problems.
    #[must_use]
    pub fn more(&self) -> usize {
        self.more
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.reported.iter().enumerate() {
            if index > 0 {
                writeln!(out)?;
            }
            write!(out, "{problem}")?;
        }
        if self.more > 0 {
            write!(out, "\nand {} more", self.more)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// The problems found so far.
#[derive(Default)]
pub(super) struct Findings {
    found: Vec<Finding>,
    refused: bool,
    /// The memory that is left for regular expressions.
    pub(super) patterns: PatternBudget,
}

struct Finding {
    at: Position,
    message: String,
    fix: String,
    severity: Severity,
}

impl Findings {
    pub(super) fn error(&mut self, at: Position, message: impl Into<String>, fix: impl Into<String>) {
        self.refused = true;
        self.add(Finding { at, message: message.into(), fix: fix.into(), severity: Severity::Error });
    }

    pub(super) fn warning(&mut self, at: Position, message: impl Into<String>, fix: impl Into<String>) {
        self.add(Finding { at, message: message.into(), fix: fix.into(), severity: Severity::Warning });
    }

    fn add(&mut self, found: Finding) {
        if !self.is_full() {
            self.found.push(found);
        }
    }

    /// Returns whether there are so many problems that checking can stop.
    pub(super) fn is_full(&self) -> bool {
        self.found.len() >= MAX_FOUND
    }

    pub(super) fn refused(&self) -> bool {
        self.refused
    }

    /// Returns the problems in the order of the file.
    pub(super) fn into_problems(mut self, file: &str, source: &str) -> Problems {
        self.found.sort_by_key(|found| found.at);
        // A value that aliases repeat is reported once.
        self.found.dedup_by(|a, b| a.at == b.at && a.message == b.message);
        let more = self.found.len().saturating_sub(MAX_REPORTED);
        // Warnings must not displace the errors that the file is rejected for.
        if self.found.len() > MAX_REPORTED && self.refused {
            self.found.retain(|found| found.severity == Severity::Error);
        }
        self.found.truncate(MAX_REPORTED);
        // YAML ends a line at a lone carriage return too.
        let source = source.replace("\r\n", "\n");
        let (file, lines): (Arc<str>, Vec<&str>) = (file.into(), source.split(['\n', '\r']).collect());
        let reported = self.found.into_iter().map(|found| {
            let line = lines.get((found.at.line as usize).saturating_sub(1)).copied().unwrap_or_default();
            let text = text_at(line, found.at.column);
            let Finding { at, message, fix, severity } = found;
            Problem { file: Arc::clone(&file), at, text, message: clean(&message), fix: clean(&fix), severity }
        });
        Problems { reported: reported.collect(), more }
    }
}

/// Returns the rest of a line from `column`, shortened.
fn text_at(line: &str, column: u32) -> String {
    let rest: String = line.chars().skip((column as usize).saturating_sub(1)).take(MAX_LINE).collect();
    shown(&without_password(rest.trim_end()))
}

/// Returns a text of the file for use in a message: shortened, and without control characters.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => clean(&text[..end]) + "…",
        None => clean(text),
    }
}

/// Replaces control and format characters by spaces. Messages of other parsers, such as that of expressions, repeat the file
/// unchanged.
fn clean(text: &str) -> String {
    text.chars().map(|letter| if is_control_or_format(letter) { ' ' } else { letter }).collect()
}

/// Removes the text between `://` and `@`, which may be a password: messages go to logs.
fn without_password(text: &str) -> String {
    match text.split_once("://") {
        Some((scheme, rest)) => match rest.rsplit_once('@') {
            Some((_, host)) => format!("{scheme}://…@{host}"),
            None => text.to_owned(),
        },
        None => text.to_owned(),
    }
}
