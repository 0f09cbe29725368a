//! The steps of an expression: a bound of the work that one request can cause.
//!
//! A step is the evaluation of one part of the tree. Only loops repeat steps, and a client controls how many names and
//! values they go through. So a loop over anything but a list in the expression itself goes through as many entries as
//! fit into [`MAX_STEPS`]: over a thousand if the expression is one loop with a short condition. An expression for which
//! that would be fewer than [`MIN_LOOP_ENTRIES`] is refused with its file.

use cel::common::ast::{CallExpr, EntryExpr, Expr, LiteralValue};
use cel::common::types::CelInt;
use cel::common::value::CowVal;
use cel::{ExecutionError, IdedExpr};

use super::error::ExpressionError;
use super::tree::children;

/// The entries that every loop must have steps for. Servers accept about 100 headers.
const MIN_LOOP_ENTRIES: u64 = 128;

/// The most steps of one evaluation. The interpreter takes up to a microsecond for each, so this is less than 10 ms of
/// processor time, and enough for a loop over all headers with a long condition.
const MAX_STEPS: u64 = 10_000;

/// The function around the range of a loop. No expression can name it.
pub(super) const LOOP_RANGE: &str = "@loop_range";

/// Bounds every loop, and refuses an expression that could take too many steps. To be called last: it changes the tree.
pub(super) fn bound(root: &mut IdedExpr) -> Result<(), ExpressionError> {
    match steps(root, MIN_LOOP_ENTRIES) {
        0..=MAX_STEPS => {
            bound_loops(root, most_entries(root));
            Ok(())
        }
        steps => Err(ExpressionError::whole(format!(
            "the expression may take {steps} steps for one request, more than {MAX_STEPS}; nest no loop over headers, \
             parameters or claims in another, or split the expression over several limits"
        ))),
    }
}

/// Returns the most entries for each loop with which all of them fit into [`MAX_STEPS`].
fn most_entries(root: &IdedExpr) -> u64 {
    let (mut fits, mut too_many) = (MIN_LOOP_ENTRIES, MAX_STEPS + 1);
    while fits + 1 < too_many {
        let entries = fits.midpoint(too_many);
        if steps(root, entries) <= MAX_STEPS {
            fits = entries;
        } else {
            too_many = entries;
        }
    }
    fits
}

/// Returns the most steps that a part takes, if a client chooses this many entries for each loop.
fn steps(part: &IdedExpr, entries: u64) -> u64 {
    let sum = |parts: &[&IdedExpr]| parts.iter().map(|part| steps(part, entries)).fold(0, u64::saturating_add);
    let of_parts = match &part.expr {
        Expr::Comprehension(of) => {
            let once = sum(&[&of.iter_range, &of.accu_init, &of.result]);
            let each = sum(&[&of.loop_cond, &of.loop_step]);
            once.saturating_add(each.saturating_mul(fixed_entries(&of.iter_range).unwrap_or(entries)))
        }
        _ => sum(&children(part)),
    };
    of_parts.saturating_add(1)
}

/// Returns the number of entries of a range that the expression itself lists.
fn fixed_entries(range: &IdedExpr) -> Option<u64> {
    match &range.expr {
        Expr::List(list) => Some(list.elements.len() as u64),
        Expr::Map(map) => Some(map.entries.len() as u64),
        _ => None,
    }
}

/// Bounds the loops in a part.
fn bound_loops(part: &mut IdedExpr, most: u64) {
    let id = part.id;
    let parts: Vec<&mut IdedExpr> = match &mut part.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => Vec::new(),
        Expr::Call(call) => call.target.as_deref_mut().into_iter().chain(&mut call.args).collect(),
        Expr::Select(select) => vec![&mut select.operand],
        Expr::List(list) => list.elements.iter_mut().collect(),
        Expr::Map(map) => map.entries.iter_mut().flat_map(|entry| values(&mut entry.expr)).collect(),
        Expr::Struct(of) => of.entries.iter_mut().flat_map(|entry| values(&mut entry.expr)).collect(),
        Expr::Comprehension(of) => {
            if fixed_entries(&of.iter_range).is_none() {
                let range = std::mem::take(&mut of.iter_range);
                let most = Expr::Literal(LiteralValue::Int(CelInt::from(most.cast_signed())));
                let args = vec![range, IdedExpr { id, expr: most }];
                let call = CallExpr { func_name: LOOP_RANGE.to_owned(), target: None, args };
                of.iter_range = IdedExpr { id, expr: Expr::Call(call) };
            }
            vec![&mut of.iter_range, &mut of.accu_init, &mut of.loop_cond, &mut of.loop_step, &mut of.result]
        }
    };
    parts.into_iter().for_each(|part| bound_loops(part, most));
}

fn values(entry: &mut EntryExpr) -> Vec<&mut IdedExpr> {
    match entry {
        EntryExpr::StructField(field) => vec![&mut field.value],
        EntryExpr::MapEntry(entry) => vec![&mut entry.key, &mut entry.value],
    }
}

/// Returns the range of a loop, if it has few enough entries. The second argument is the most.
pub(super) fn loop_range<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let Ok([range, most]) = <[CowVal<'b, 'v>; 2]>::try_from(arguments) else {
        return Err(ExecutionError::missing_argument_or_target());
    };
    let most = *most.downcast_ref::<CelInt>().ok_or_else(ExecutionError::missing_argument_or_target)?.inner();
    match range.as_sizer().map(|sizer| *sizer.size().inner()) {
        Some(entries) if entries > most => Err(ExecutionError::function_error(LOOP_RANGE, most)),
        _ => Ok(range),
    }
}
