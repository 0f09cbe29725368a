//! Expressions: conditions and costs that a rule file says in CEL, the Common Expression Language.
//!
//! An expression is read and checked once, when the file is loaded. The check knows the type of every variable, field
//! and function, so that a misspelt field or a comparison that can never hold is an error in the file, with a place
//! and a fix, and not a limit that silently meets nobody. Patterns and address ranges are compiled then too.
//!
//! An expression can still fail for one request: a header is missing (`request.headers["x"]`), a text is not a number
//! (`int(…)`), a claim has another type. That is an error, never an answer: the caller decides against the client then.
//! `"x" in request.headers` or `has(request.headers.x)` avoids it, and reads without such a guard are reported when the
//! file is loaded.
//!
//! The files of rules are not trusted to be small: the text, its depth and its loops have bounds. What a request can
//! make an expression do is bounded by the names that a loop goes through, and otherwise by the size that the server
//! allows a request: a text is scanned in proportion to its length, and the lists in a token are as long as the token.
//!
//! Deliberately not here: clocks, so that an expression gives one answer for one request; optional values, protocol buffers, types as
//! values; patterns that come with a request, because a client could send one that is slow to compile.

mod check;
mod error;
mod functions;
mod operators;
mod prepared;
mod range;
mod reads;
mod tree;
mod types;
mod variables;

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use cel::common::types::{CelBool, CelInt, CelUInt};
use cel::common::value::Val;
use cel::{Context, IdedExpr, Value};

use self::check::Checked;
use self::prepared::Prepared;
use self::types::Type;
use self::variables::Variables;
use super::{Facts, ReadErrors};

pub(crate) use self::error::{EvaluationError, ExpressionError, Place};
pub(crate) use self::reads::UnguardedRead;

/// What an expression is asked about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    /// The request.
    pub(crate) facts: Facts<'a>,
    /// The path as rules match it, which need not be the one that was sent.
    pub(crate) path: &'a str,
    /// The client's address, which need not be the peer's.
    pub(crate) client: Option<IpAddr>,
    /// Where values that cannot be read in one way are noted.
    pub(crate) errors: &'a ReadErrors,
    /// The claims of a token that was verified.
    pub(crate) claims: Option<&'a serde_json::Map<String, serde_json::Value>>,
}

/// An expression that was read and checked.
#[derive(Debug)]
pub(crate) struct Expression {
    tree: IdedExpr,
    prepared: Vec<Prepared>,
    asks_tokens: bool,
    unguarded_reads: Vec<UnguardedRead>,
}

impl Expression {
    /// A condition: it gives a bool.
    pub(crate) fn condition(text: &str) -> Result<Self, ExpressionError> {
        let (expression, gives) = Self::read(text)?;
        match gives {
            Type::Bool | Type::Dyn => Ok(expression),
            other => Err(ExpressionError::whole(format!(
                "a condition gives a bool, but this gives {}; compare it with something",
                other.named()
            ))),
        }
    }

    /// A cost: it gives a whole number.
    pub(crate) fn cost(text: &str) -> Result<Self, ExpressionError> {
        let (expression, gives) = Self::read(text)?;
        match gives {
            Type::Int | Type::Uint | Type::Dyn => Ok(expression),
            other => Err(ExpressionError::whole(format!(
                "a cost gives an int, but this gives {}; {}",
                other.named(),
                if matches!(other, Type::Double | Type::String) {
                    "convert it with `int(…)`"
                } else {
                    "give a number"
                }
            ))),
        }
    }

    fn read(text: &str) -> Result<(Self, Type), ExpressionError> {
        let mut parsed = tree::parse(text)?;
        let checked = check::check(&mut parsed)?;
        let Checked { gives, prepared, asks_tokens } = checked;
        let unguarded_reads = reads::unguarded(&mut parsed);
        Ok((Self { tree: parsed.root, prepared, asks_tokens, unguarded_reads }, gives))
    }

    /// Whether it looks at the claims of a token, so that somebody has to verify one.
    pub(crate) fn asks_tokens(&self) -> bool {
        self.asks_tokens
    }

    /// The reads of entries that a request may lack, without a guard.
    pub(crate) fn unguarded_reads(&self) -> &[UnguardedRead] {
        &self.unguarded_reads
    }

    /// Returns the most units that a cost can give, if that can be told without a request.
    pub(crate) fn most_units(&self) -> Option<u64> {
        range::most_units(&self.tree)
    }

    /// Evaluates a condition.
    pub(crate) fn holds(&self, seen: &Seen<'_>) -> Result<bool, EvaluationError> {
        self.evaluate(seen, |value| match value.downcast_ref::<CelBool>() {
            Some(truth) => Ok(*truth.inner()),
            None => Err(EvaluationError::wrong_type(value, "a bool")),
        })
    }

    /// Evaluates a cost.
    pub(crate) fn units(&self, seen: &Seen<'_>) -> Result<u64, EvaluationError> {
        self.evaluate(seen, |value| match (value.downcast_ref::<CelInt>(), value.downcast_ref::<CelUInt>()) {
            (Some(units), _) => u64::try_from(*units.inner()).map_err(|_| EvaluationError::Negative(*units.inner())),
            (None, Some(units)) => Ok(*units.inner()),
            (None, None) => Err(EvaluationError::wrong_type(value, "an int")),
        })
    }

    fn evaluate<T>(
        &self,
        seen: &Seen<'_>,
        take: impl FnOnce(&dyn Val) -> Result<T, EvaluationError>,
    ) -> Result<T, EvaluationError> {
        let variables = Variables::new(*seen, &self.prepared);
        let mut context = Context::with_env(functions::environment());
        context.set_variable_resolver(&variables);
        let value = Value::resolve_val(&self.tree, &context).map_err(EvaluationError::failed)?;
        take(value.as_ref())
    }
}
