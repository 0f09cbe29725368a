//! Expressions that failed for a request: counted by limit and field, or recorded if a request is only explained.
//!
//! A failed expression never decides in favour of the client. The value used instead is chosen where the expression is
//! compiled; this module only makes the failure visible.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The field of a limit that holds an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ExpressionField {
    /// `match.when`: the limit applies if it fails.
    MatchWhen,
    /// `exempt.when`: the request is not exempt if it fails.
    ExemptWhen,
    /// `blocked.when`: the request is blocked if it fails.
    BlockedWhen,
    /// `cost`: the request takes `when_error` if it fails.
    Cost,
}

impl ExpressionField {
    /// Returns the path of the field within its limit, such as `match.when`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MatchWhen => "match.when",
            Self::ExemptWhen => "exempt.when",
            Self::BlockedWhen => "blocked.when",
            Self::Cost => "cost",
        }
    }
}

impl fmt::Display for ExpressionField {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// An expression that failed for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedExpression {
    /// The field that holds it.
    pub field: ExpressionField,
    /// The reason, for people.
    pub error: String,
}

/// The failures of a request that is explained.
#[derive(Debug, Default)]
pub struct FailedExpressions(RefCell<Vec<FailedExpression>>);

impl FailedExpressions {
    /// Returns the failures recorded since the last call.
    pub(crate) fn take(&self) -> Vec<FailedExpression> {
        self.0.take()
    }

    /// Records a failure once, however often the expression is evaluated.
    fn push(&self, failed: FailedExpression) {
        let mut all = self.0.borrow_mut();
        if !all.contains(&failed) {
            all.push(failed);
        }
    }
}

/// The number of failures of one expression. Clones share the count.
#[derive(Clone, Debug)]
pub struct ErrorCount {
    field: ExpressionField,
    count: Arc<AtomicU64>,
}

impl ErrorCount {
    /// Creates a count for the expressions of a field.
    pub fn new(field: ExpressionField) -> Self {
        Self { field, count: Arc::default() }
    }

    /// Counts a failure, or records it if the request is only explained.
    pub fn note(&self, explained: Option<&FailedExpressions>, error: &dyn fmt::Display) {
        match explained {
            Some(failed) => failed.push(FailedExpression { field: self.field, error: error.to_string() }),
            None => _ = self.count.fetch_add(1, Relaxed),
        }
    }
}

impl ErrorCount {
    pub(super) fn field(&self) -> ExpressionField {
        self.field
    }

    pub(super) fn value(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Continues the count of the expression that this one replaces, so that the metric never falls.
    pub(super) fn adopt(&self, before: &Self) {
        self.count.fetch_max(before.value(), Relaxed);
    }
}
