//! Expressions in CEL: the one place where the rule file asks whether they compile.

use super::forms::Expression as Text;
use crate::rules::cel::{Expression, ExpressionError, TextPosition, UnguardedRead};

/// What an expression is for, which decides what it must give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// True or false.
    Condition,
    /// A whole number of units.
    Cost,
}

/// What is known of an expression that compiles.
#[derive(Default)]
pub(super) struct Compiled {
    /// Whether it looks at the claims of a token.
    pub(super) reads_token: bool,
    /// The reads of entries that a request may lack, each with its offset.
    pub(super) unguarded_reads: Vec<(usize, UnguardedRead)>,
}

/// Why an expression does not compile.
pub(super) struct InvalidExpression {
    /// How many characters of the expression come before it.
    pub(super) offset: usize,
    pub(super) problem: String,
    pub(super) fix: String,
}

/// Whether an expression compiles and gives what it is for.
pub(super) fn check(purpose: Purpose, text: &Text) -> Result<Compiled, InvalidExpression> {
    let text = text.as_str();
    let read = match purpose {
        Purpose::Condition => Expression::condition(text),
        Purpose::Cost => Expression::cost(text),
    };
    let expression = read.map_err(|error| InvalidExpression::of(&error, text))?;
    let reads = expression.unguarded_reads().iter();
    let unguarded_reads = reads.map(|read| (offset_of(read.position, text), read.clone())).collect();
    Ok(Compiled { reads_token: expression.reads_token(), unguarded_reads })
}

/// Returns how many characters of the text come before a position.
fn offset_of(position: Option<TextPosition>, text: &str) -> usize {
    position.map_or(0, |position| {
        let before: usize = text.split_inclusive('\n').take(position.line - 1).map(|line| line.chars().count()).sum();
        before + position.column - 1
    })
}

impl InvalidExpression {
    fn of(error: &ExpressionError, text: &str) -> Self {
        let offset = offset_of(error.position(), text);
        let message = error.to_string();
        let (problem, fix) = message.split_once("; ").unwrap_or((&message, "write it another way"));
        Self { offset, problem: problem.to_owned(), fix: fix.to_owned() }
    }
}
