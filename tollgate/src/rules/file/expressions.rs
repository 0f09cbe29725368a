//! Compiles the CEL expressions of a rule file to check them.

use super::forms::Expression as Text;
use crate::rules::cel::{Expression, ExpressionError, TextPosition, UnguardedRead};
use crate::rules::pattern::PatternBudget;

/// The purpose of an expression, which decides the type of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Returns true or false.
    Condition,
    /// Returns a whole number of units.
    Cost,
}

/// The properties of an expression that compiles.
#[derive(Default)]
pub(super) struct Compiled {
    /// Whether it reads the claims of a token.
    pub(super) reads_token: bool,
    /// The reads of entries that a request may lack, each with its offset.
    pub(super) unguarded_reads: Vec<(usize, UnguardedRead)>,
}

/// The error of an expression that does not compile.
pub(super) struct InvalidExpression {
    /// The offset of the error in characters.
    pub(super) offset: usize,
    pub(super) problem: String,
    pub(super) fix: String,
}

/// Checks that an expression compiles and has the right type. Its patterns share a budget with others of the file.
pub(super) fn check(
    purpose: Purpose,
    text: &Text,
    patterns: &mut PatternBudget,
) -> Result<Compiled, InvalidExpression> {
    let text = text.as_str();
    let read = match purpose {
        Purpose::Condition => Expression::condition_within(text, patterns),
        Purpose::Cost => Expression::cost_within(text, patterns),
    };
    let expression = read.map_err(|error| InvalidExpression::of(&error, text))?;
    let reads = expression.unguarded_reads().iter();
    let unguarded_reads = reads.map(|read| (offset_of(read.position, text), read.clone())).collect();
    Ok(Compiled { reads_token: expression.reads_token(), unguarded_reads })
}

/// Returns the offset of a position in characters.
fn offset_of(position: Option<TextPosition>, text: &str) -> usize {
    position.map_or(0, |position| {
        let before: usize = text.split_inclusive('\n').take(position.line - 1).map(|line| line.chars().count()).sum();
        before + position.column - 1
    })
}

impl InvalidExpression {
    fn of(error: &ExpressionError, text: &str) -> Self {
        let offset = offset_of(error.position(), text);
        Self { offset, problem: error.problem().to_owned(), fix: error.fix().to_owned() }
    }
}
