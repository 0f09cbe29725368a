//! Expressions: conditions and costs in a rule file, written in CEL, the Common Expression Language.
//!
//! An expression is parsed and checked once, when the file is loaded. The checker knows the type of every variable,
//! field and function, so a misspelt field or a comparison that is always false is an error in the file, with a
//! position and a fix, rather than a limit that silently never applies. Patterns and address ranges are compiled then
//! too.
//!
//! An expression can still fail for a single request: a header is missing (`request.headers["x"]`), a text is not a
//! number (`int(…)`), a claim has another type. That is an error and not a value, and the caller then decides against
//! the client. `"x" in request.headers` or `has(request.headers.x)` avoids it, and reads without such a guard are
//! reported when the file is loaded.
//!
//! Rule files are not trusted to be small: the text, its depth and its loops are bounded. The work that a request can
//! cause is bounded by a number of steps, and otherwise by the size of request that the server allows: a text is scanned
//! in linear time.
//!
//! Not here: clocks, so that an expression has one value per request; optional values, protocol buffers and types as
//! values; patterns from requests, because a client could send one that is slow to compile.

mod check;
mod error;
mod functions;
mod operators;
mod prepared;
mod range;
mod reads;
mod steps;
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
use super::pattern::PatternBudget;
use super::{Facts, ReadErrors};

pub use self::error::{EvaluationError, ExpressionError, TextPosition};
pub use self::reads::UnguardedRead;

/// The input of an expression.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The request.
    pub facts: Facts<'a>,
    /// The path in its normal form, which can differ from the path as sent.
    pub path: &'a str,
    /// The client's address, which can differ from the peer's, for expressions that read it.
    pub client: Option<IpAddr>,
    /// Collects ambiguous values.
    pub errors: &'a ReadErrors,
    /// The claims of a verified token.
    pub claims: Option<&'a serde_json::Map<String, serde_json::Value>>,
}

/// A parsed and checked expression.
#[derive(Debug)]
pub struct Expression {
    tree: IdedExpr,
    prepared: Vec<Prepared>,
    reads_token: bool,
    reads_client: bool,
    unguarded_reads: Vec<UnguardedRead>,
}

impl Expression {
    /// Parses a condition. Its type is bool.
    pub fn condition(text: &str) -> Result<Self, ExpressionError> {
        Self::condition_within(text, &mut PatternBudget::default())
    }

    /// Parses a condition, whose patterns share a budget with others of the file.
    pub fn condition_within(text: &str, patterns: &mut PatternBudget) -> Result<Self, ExpressionError> {
        let (expression, gives) = Self::read(text, patterns)?;
        match gives {
            Type::Bool | Type::Dyn => Ok(expression),
            other => Err(ExpressionError::whole(format!(
                "a condition gives a bool, but this gives {}; compare it with something",
                other.named()
            ))),
        }
    }

    /// Parses a cost. Its type is int.
    pub fn cost(text: &str) -> Result<Self, ExpressionError> {
        Self::cost_within(text, &mut PatternBudget::default())
    }

    /// Parses a cost, whose patterns share a budget with others of the file.
    pub fn cost_within(text: &str, patterns: &mut PatternBudget) -> Result<Self, ExpressionError> {
        let (expression, gives) = Self::read(text, patterns)?;
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

    fn read(text: &str, patterns: &mut PatternBudget) -> Result<(Self, Type), ExpressionError> {
        let mut parsed = tree::parse(text)?;
        let checked = check::check(&mut parsed, patterns)?;
        let Checked { gives, prepared, reads_token, reads_client } = checked;
        let unguarded_reads = reads::unguarded(&mut parsed);
        steps::bound(&mut parsed.root)?;
        Ok((Self { tree: parsed.root, prepared, reads_token, reads_client, unguarded_reads }, gives))
    }

    /// Returns `true` if the expression reads the claims of a token.
    pub fn reads_token(&self) -> bool {
        self.reads_token
    }

    /// Returns `true` if the expression reads the client's address.
    pub fn reads_client(&self) -> bool {
        self.reads_client
    }

    /// Returns the unguarded reads of entries that a request may lack.
    pub fn unguarded_reads(&self) -> &[UnguardedRead] {
        &self.unguarded_reads
    }

    /// Returns the most units that a cost can evaluate to, if that does not depend on the request.
    pub fn max_units(&self) -> Option<u64> {
        range::max_units(&self.tree)
    }

    /// Evaluates a condition.
    pub fn holds(&self, input: &Input<'_>) -> Result<bool, EvaluationError> {
        self.evaluate(input, |value| match value.downcast_ref::<CelBool>() {
            Some(truth) => Ok(*truth.inner()),
            None => Err(EvaluationError::wrong_type(value, "a bool")),
        })
    }

    /// Evaluates a cost.
    pub fn units(&self, input: &Input<'_>) -> Result<u64, EvaluationError> {
        self.evaluate(input, |value| match (value.downcast_ref::<CelInt>(), value.downcast_ref::<CelUInt>()) {
            (Some(units), _) => u64::try_from(*units.inner()).map_err(|_| EvaluationError::Negative(*units.inner())),
            (None, Some(units)) => Ok(*units.inner()),
            (None, None) => Err(EvaluationError::wrong_type(value, "an int")),
        })
    }

    fn evaluate<T>(
        &self,
        input: &Input<'_>,
        take: impl FnOnce(&dyn Val) -> Result<T, EvaluationError>,
    ) -> Result<T, EvaluationError> {
        let variables = Variables::new(*input, &self.prepared);
        let mut context = Context::with_env(functions::environment());
        context.set_variable_resolver(&variables);
        let value = Value::resolve_val(&self.tree, &context).map_err(EvaluationError::failed)?;
        take(value.as_ref())
    }
}
