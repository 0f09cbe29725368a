//! The range of a cost, as far as it follows from the expression alone.
//!
//! A cost that fails for a request takes its maximum. The analysis is sound but not complete: a bound holds for every
//! request for which the expression does not fail.

use cel::IdedExpr;
use cel::common::ast::{EntryExpr, Expr, LiteralValue, operators as op};

/// The minimum and the maximum of an expression. `None` if they depend on the request.
#[derive(Clone, Copy)]
struct Range {
    least: Option<i128>,
    most: Option<i128>,
}

/// Returns the most units that a cost can evaluate to, at least 1, or `None` if it depends on the request.
pub(super) fn max_units(tree: &IdedExpr) -> Option<u64> {
    range(tree).most.map(|most| u64::try_from(most.max(1)).unwrap_or(u64::MAX))
}

impl Range {
    const UNKNOWN: Self = Self { least: None, most: None };

    fn exactly(value: i128) -> Self {
        Self { least: Some(value), most: Some(value) }
    }

    /// Returns the union of two ranges.
    fn either(self, other: Self) -> Self {
        Self { least: both(self.least, other.least, i128::min), most: both(self.most, other.most, i128::max) }
    }
}

/// Combines two bounds that are both known.
fn both(one: Option<i128>, other: Option<i128>, combine: impl FnOnce(i128, i128) -> i128) -> Option<i128> {
    one.zip(other).map(|(one, other)| combine(one, other))
}

fn range(tree: &IdedExpr) -> Range {
    match &tree.expr {
        Expr::Literal(LiteralValue::Int(value)) => Range::exactly(i128::from(*value.inner())),
        Expr::Literal(LiteralValue::UInt(value)) => Range::exactly(i128::from(*value.inner())),
        Expr::Call(call) if call.target.is_none() => match (call.func_name.as_str(), call.args.as_slice()) {
            (op::CONDITIONAL, [_, then, otherwise]) => range(then).either(range(otherwise)),
            (op::NEGATE, [of]) => {
                let of = range(of);
                Range { least: of.most.and_then(i128::checked_neg), most: of.least.and_then(i128::checked_neg) }
            }
            (op::INDEX, [of, _]) => elements(of),
            ("size", _) => Range { least: Some(0), most: None },
            (name, [left, right]) => binary(name, range(left), range(right)),
            _ => Range::UNKNOWN,
        },
        _ => Range::UNKNOWN,
    }
}

fn binary(name: &str, left: Range, right: Range) -> Range {
    let sum = |one: Option<i128>, other: Option<i128>| one.zip(other).and_then(|(one, other)| one.checked_add(other));
    let difference =
        |one: Option<i128>, other: Option<i128>| one.zip(other).and_then(|(one, other)| one.checked_sub(other));
    match name {
        // One known side is enough: the minimum is not above it.
        "min" => Range {
            least: both(left.least, right.least, i128::min),
            most: left.most.into_iter().chain(right.most).min(),
        },
        "max" => Range {
            least: left.least.into_iter().chain(right.least).max(),
            most: both(left.most, right.most, i128::max),
        },
        op::ADD => Range { least: sum(left.least, right.least), most: sum(left.most, right.most) },
        op::SUBSTRACT => Range { least: difference(left.least, right.most), most: difference(left.most, right.least) },
        op::MULTIPLY => product(left, right),
        _ => Range::UNKNOWN,
    }
}

fn product(left: Range, right: Range) -> Range {
    let ends = |of: Range| of.least.zip(of.most).map(|(least, most)| [least, most]);
    let Some((left, right)) = ends(left).zip(ends(right)) else { return Range::UNKNOWN };
    let products: Option<Vec<i128>> =
        left.iter().flat_map(|one| right.iter().map(|other| one.checked_mul(*other))).collect();
    let products = products.unwrap_or_default();
    Range { least: products.iter().copied().min(), most: products.iter().copied().max() }
}

/// Returns the range of the values in a literal list or map.
fn elements(of: &IdedExpr) -> Range {
    let ranges: Vec<Range> = match &of.expr {
        Expr::List(list) => list.elements.iter().map(range).collect(),
        Expr::Map(map) => map
            .entries
            .iter()
            .map(|entry| match &entry.expr {
                EntryExpr::MapEntry(entry) => range(&entry.value),
                EntryExpr::StructField(_) => Range::UNKNOWN,
            })
            .collect(),
        _ => Vec::new(),
    };
    ranges.into_iter().reduce(Range::either).unwrap_or(Range::UNKNOWN)
}
