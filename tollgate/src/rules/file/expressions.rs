//! Expressions in CEL: the one place where the rule file asks whether they compile.

use super::forms::Expression as Text;
use crate::rules::cel::{Expression, ExpressionError};

/// What an expression is for, which decides what it must give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// True or false.
    Condition,
    /// A whole number of units.
    Cost,
}

/// Whether an expression looks at the claims of a token.
pub(super) struct AsksTokens(pub(super) bool);

/// Why an expression does not compile.
pub(super) struct Fault {
    /// How many characters of the expression come before it.
    pub(super) offset: usize,
    pub(super) problem: String,
    pub(super) fix: String,
}

/// Whether an expression compiles and gives what it is for, and whether it looks at tokens.
pub(super) fn check(purpose: Purpose, text: &Text) -> Result<AsksTokens, Fault> {
    let text = text.as_str();
    let read = match purpose {
        Purpose::Condition => Expression::condition(text),
        Purpose::Cost => Expression::cost(text),
    };
    read.map(|expression| AsksTokens(expression.asks_tokens())).map_err(|error| Fault::of(&error, text))
}

impl Fault {
    fn of(error: &ExpressionError, text: &str) -> Self {
        let offset = error.place().map_or(0, |place| {
            let before: usize = text.split_inclusive('\n').take(place.line - 1).map(|line| line.chars().count()).sum();
            before + place.column - 1
        });
        let message = error.to_string();
        let (problem, fix) = message.split_once("; ").unwrap_or((&message, "write it another way"));
        Self { offset, problem: problem.to_owned(), fix: fix.to_owned() }
    }
}
