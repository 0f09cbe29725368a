//! What is wrong with a rule file: where, what, and the fix.
//!
//! Reading goes on after a problem, so that all of them are told at once. Deliberately not here: what counts as a
//! problem.

use std::fmt;
use std::sync::Arc;

/// More than people read at once, and a bound on what a hostile file makes us write.
const MAX_REPORTED: usize = 100;

/// Nobody looks for more after so many: enough that the first hundred by position are among them in any file that
/// people write, and few enough that a hostile one costs little.
const MAX_FOUND: usize = 1000;

/// The longest piece of the file that is repeated.
const MAX_TEXT: usize = 80;

/// The widest line that is searched for what is repeated of it.
const MAX_LINE: usize = 1000;

/// Where something stands, both counted from 1. Columns count characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The line.
    pub line: u32,
    /// The character in it.
    pub column: u32,
}

impl Position {
    /// Where the next character stands. YAML ends a line at a line feed, a carriage return, or both together.
    pub(super) fn after(text: &str) -> Self {
        let text = text.replace("\r\n", "\n");
        let (before, line) =
            text.rsplit_once(['\n', '\r']).map_or((None, &*text), |(before, line)| (Some(before), line));
        let ends = before.map_or(0, |before| before.matches(['\n', '\r']).count() + 1);
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).saturating_add(1);
        Self { line: count(ends), column: count(line.chars().count()) }
    }
}

/// Whether a file with such a problem is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Severity {
    /// The file is refused.
    Error,
    /// The file is taken, though this is hardly what was meant.
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

/// One problem of a rule file, with its position and its fix.
///
/// It shows as `tollgate.yaml:14:9: capacity 0 admits nothing; use 1 or more, or `blocked` to refuse every request`.
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
    /// The name of the file, as it was given.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Where it is.
    #[must_use]
    pub fn position(&self) -> Position {
        self.at
    }

    /// What stands there, to the end of the line, cut short. A password in a URL is left out.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What is wrong.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> &str {
        &self.fix
    }

    /// Whether the file is refused for it.
    #[must_use]
    pub fn severity(&self) -> Severity {
        self.severity
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position { line, column } = self.at;
        let kind = if self.severity == Severity::Warning { "warning: " } else { "" };
        write!(out, "{}:{line}:{column}: {kind}{}; {}", self.file, self.message, self.fix)
    }
}

/// Why a rule file is refused: every problem in it, in the order of the file. Shown one to a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    reported: Vec<Problem>,
    more: usize,
}

impl Problems {
    /// The problems, the first hundred of them, errors and warnings.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.reported.iter()
    }

    /// These and those of another look at the same file, in its order.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.reported.extend(other.reported);
        self.reported.sort_by_key(Problem::position);
        self.more += other.more;
        self
    }

    /// How many were found beside those. After a thousand in all, nobody looked for more.
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

    /// Whether enough is wrong, so that looking for more can end.
    pub(super) fn is_full(&self) -> bool {
        self.found.len() >= MAX_FOUND
    }

    pub(super) fn refused(&self) -> bool {
        self.refused
    }

    /// All of them, in the order of the file.
    pub(super) fn into_problems(mut self, file: &str, source: &str) -> Problems {
        self.found.sort_by_key(|found| found.at);
        // A part of the file that stands for several, by an alias, has its problem once.
        self.found.dedup_by(|a, b| a.at == b.at && a.message == b.message);
        let more = self.found.len().saturating_sub(MAX_REPORTED);
        // Errors must not be pushed out by warnings before them: whoever reads has to see why.
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

/// The rest of the line from a column on, cut short.
fn text_at(line: &str, column: u32) -> String {
    let rest: String = line.chars().skip((column as usize).saturating_sub(1)).take(MAX_LINE).collect();
    shown(&without_password(rest.trim_end()))
}

/// A piece of the file as a message may repeat it: short, and without what a terminal would obey.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => clean(&text[..end]) + "…",
        None => clean(text),
    }
}

/// The same letters in one line. Messages of other parsers, such as that of expressions, repeat the file as it is.
fn clean(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// What stands between `://` and `@` may be a password, and messages go to logs.
fn without_password(text: &str) -> String {
    match text.split_once("://") {
        Some((scheme, rest)) => match rest.rsplit_once('@') {
            Some((_, host)) => format!("{scheme}://…@{host}"),
            None => text.to_owned(),
        },
        None => text.to_owned(),
    }
}
