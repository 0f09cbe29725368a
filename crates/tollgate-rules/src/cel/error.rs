//! Errors of expressions: when a file is loaded, and for a single request.

use std::fmt;

use cel::ExecutionError;
use cel::common::value::Val;

use super::steps::LOOP_RANGE;

/// An expression that cannot be used: the problem, the fix, and the position if there is one.
///
/// `Display` omits the position, because the reader of the file knows where the text begins in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpressionError {
    position: Option<TextPosition>,
    problem: String,
    fix: String,
}

/// A position in the text of an expression, in characters from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextPosition {
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
}

impl ExpressionError {
    /// Creates an error of the whole expression. The message has the form `problem; fix`.
    pub(super) fn whole(message: String) -> Self {
        Self::at(None, message)
    }

    /// Creates an error at a position. The message has the form `problem; fix`.
    pub(super) fn at(position: Option<TextPosition>, message: String) -> Self {
        // The problem may repeat a text of the file with a semicolon in it; a fix has none.
        let (problem, fix) = message.rsplit_once("; ").unwrap_or((&message, "write it another way"));
        Self { position, problem: problem.to_owned(), fix: fix.to_owned() }
    }

    /// Returns the problem, without the fix.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// Returns the fix.
    pub fn fix(&self) -> &str {
        &self.fix
    }

    /// Returns the position, or `None` for the whole expression.
    pub fn position(&self) -> Option<TextPosition> {
        self.position
    }
}

impl TextPosition {
    /// Returns the position of the character at a byte offset.
    pub(super) fn of_byte(text: &str, offset: usize) -> Self {
        let before = text.char_indices().take_while(|(at, _)| *at < offset);
        let (line, column) = before.fold((1, 1), |(line, column), (_, character)| match character {
            '\n' => (line + 1, 1),
            _ => (line, column + 1),
        });
        Self { line, column }
    }
}

impl fmt::Display for ExpressionError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl std::error::Error for ExpressionError {}

/// The reason that an expression failed for a request. `Display` repeats little of what the client sent, and no control
/// characters.
#[derive(Debug)]
pub enum EvaluationError {
    /// The interpreter failed.
    Failed(Box<ExecutionError>),
    /// The result has another type than the field needs. Only a claim can cause this.
    WrongType {
        /// The type of the result.
        found: String,
        /// The type that it must have.
        expected: &'static str,
    },
    /// The cost is below 0.
    Negative(i64),
}

impl EvaluationError {
    pub(super) fn failed(error: ExecutionError) -> Self {
        Self::Failed(Box::new(error))
    }

    pub(super) fn wrong_type(found: &dyn Val, expected: &'static str) -> Self {
        Self::WrongType { found: found.get_type().name().trim_end_matches("_type").to_owned(), expected }
    }
}

impl fmt::Display for EvaluationError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => match &**error {
                ExecutionError::NoSuchKey(name) => write!(out, "there is no entry `{}`", printable(name)),
                ExecutionError::FunctionError { function, message: most } if function == LOOP_RANGE => {
                    write!(out, "a loop has more than {most} entries to go through")
                }
                ExecutionError::FunctionError { function, message } => {
                    write!(out, "`{function}` failed: {}", printable(message))
                }
                ExecutionError::DivisionByZero(_) | ExecutionError::RemainderByZero(_) => {
                    out.write_str("division by zero")
                }
                ExecutionError::Overflow(..) => out.write_str("a number is too large or too small"),
                ExecutionError::IndexOutOfBounds(_) => out.write_str("an index is outside its list"),
                other => out.write_str(&printable(&other.to_string())),
            },
            Self::WrongType { found, expected } => write!(out, "the result is of type {found}, not {expected}"),
            Self::Negative(units) => write!(out, "the cost {units} is below 0"),
        }
    }
}

impl std::error::Error for EvaluationError {}

/// Shortens a text that may come from a client, and removes control characters.
fn printable(text: &str) -> String {
    const MAX_CHARACTERS: usize = 80;
    let mut shown: String = text.chars().take(MAX_CHARACTERS).collect::<String>().escape_debug().collect();
    if text.chars().nth(MAX_CHARACTERS).is_some() {
        shown.push('…');
    }
    shown
}

/// Returns the part of the text that an error repeats.
pub(super) fn excerpt(text: &str) -> String {
    /// Enough to find the position, and short enough for one line.
    const MAX_EXCERPT_CHARACTERS: usize = 40;
    match text.char_indices().nth(MAX_EXCERPT_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns the known name that was probably meant.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Two typing errors. A guess for more would mislead.
    const MAX_DISTANCE: usize = 2;
    let name = name.to_lowercase();
    known
        .into_iter()
        .map(|known| (strsim::damerau_levenshtein(&name, &known.to_lowercase()), known))
        .filter(|(distance, known)| *distance <= MAX_DISTANCE && *distance < known.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}
