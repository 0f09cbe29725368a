//! Why an expression cannot be used, and why one fails for a request.

use std::fmt;

use cel::ExecutionError;
use cel::common::value::Val;

use super::variables::MAX_LOOP_NAMES;

/// An expression that cannot be used: what is wrong with it, the fix, and the place if there is one.
///
/// `Display` leaves the place out, because whoever reads the file knows where in it the text begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExpressionError {
    place: Option<Place>,
    message: String,
}

/// A place in the text of an expression, counted in characters from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

impl ExpressionError {
    /// An error of the expression as a whole.
    pub(super) fn whole(message: String) -> Self {
        Self { place: None, message }
    }

    /// An error at a place.
    pub(super) fn at(place: Option<Place>, message: String) -> Self {
        Self { place, message }
    }

    /// Where in the text it is, unless the whole is meant.
    pub(crate) fn place(&self) -> Option<Place> {
        self.place
    }
}

impl Place {
    /// The place of the character that begins at that byte.
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
        out.write_str(&self.message)
    }
}

impl std::error::Error for ExpressionError {}

/// Why an expression failed for a request. `Display` repeats little of what the client sent, and no control characters.
#[derive(Debug)]
pub(crate) enum EvaluationError {
    /// The interpreter gave up.
    Failed(Box<ExecutionError>),
    /// The result has another type than the field needs, which only a claim can bring about.
    WrongType { found: String, wanted: &'static str },
    /// The cost is below 0.
    Negative(i64),
}

impl EvaluationError {
    pub(super) fn failed(error: ExecutionError) -> Self {
        Self::Failed(Box::new(error))
    }

    pub(super) fn wrong_type(found: &dyn Val, wanted: &'static str) -> Self {
        Self::WrongType { found: found.get_type().name().trim_end_matches("_type").to_owned(), wanted }
    }
}

impl fmt::Display for EvaluationError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => match &**error {
                ExecutionError::NoSuchKey(name) => write!(out, "there is no entry `{}`", printable(name)),
                ExecutionError::UnexpectedType { got, want } if got == "map" && want == "iterable" => {
                    write!(out, "a loop has more than {MAX_LOOP_NAMES} names to go through")
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
            Self::WrongType { found, wanted } => write!(out, "the result is of type {found}, not {wanted}"),
            Self::Negative(units) => write!(out, "the cost {units} is below 0"),
        }
    }
}

impl std::error::Error for EvaluationError {}

/// A text that may come from a client, short enough for a line and safe for a terminal.
fn printable(text: &str) -> String {
    const MAX_CHARACTERS: usize = 80;
    let mut shown: String = text.chars().take(MAX_CHARACTERS).collect::<String>().escape_debug().collect();
    if text.chars().nth(MAX_CHARACTERS).is_some() {
        shown.push('…');
    }
    shown
}

/// As much of the text as an error repeats.
pub(super) fn excerpt(text: &str) -> String {
    /// Enough to find the place, short enough for one line.
    const MAX_EXCERPT_CHARACTERS: usize = 40;
    match text.char_indices().nth(MAX_EXCERPT_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The known name that was probably meant.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Two slips of the finger; further off, a guess would mislead.
    const MAX_DISTANCE: usize = 2;
    let name = name.to_lowercase();
    known
        .into_iter()
        .map(|known| (strsim::damerau_levenshtein(&name, &known.to_lowercase()), known))
        .filter(|(distance, known)| *distance <= MAX_DISTANCE && *distance < known.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}
