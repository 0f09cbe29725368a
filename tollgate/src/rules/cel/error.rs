//! Why an expression cannot be used.

use std::fmt;

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
