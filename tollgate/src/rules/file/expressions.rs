//! Expressions in CEL: the one place where the rule file asks whether they compile.

use super::forms::Expression;

/// What an expression is for, which decides what it must give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// True or false.
    Condition,
    /// A whole number of units.
    Cost,
}

/// Why an expression does not compile.
pub(super) struct Fault {
    /// How many characters of the expression come before it.
    pub(super) offset: usize,
    pub(super) problem: String,
    pub(super) fix: String,
}

/// The longest expression: more than this is a program, and belongs in one.
const MAX_EXPRESSION: usize = 4096;

/// Whether an expression compiles and gives what it is for.
pub(super) fn check(_purpose: Purpose, expression: &Expression) -> Result<(), Fault> {
    let bytes = expression.as_str().len();
    if bytes > MAX_EXPRESSION {
        let problem = format!("the expression has {bytes} bytes");
        return Err(Fault { offset: 0, problem, fix: format!("use {MAX_EXPRESSION} bytes or less") });
    }
    Ok(())
}
