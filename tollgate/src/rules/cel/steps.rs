//! The steps of an expression: a bound of the work that one request can cause.
//!
//! A step is the evaluation of one part of the tree. Only loops repeat steps, and a client controls how many names and
//! values they go through. So a loop over anything but a list in the expression itself goes through at most
//! [`MAX_LOOP_ENTRIES`], and an expression that could take more than [`MAX_STEPS`] with these is refused with its file.

use cel::common::ast::{CallExpr, EntryExpr, Expr};
use cel::common::value::CowVal;
use cel::{ExecutionError, IdedExpr};

use super::error::ExpressionError;

/// A loop over more entries is an error of the request. Servers accept about 100 headers.
pub(super) const MAX_LOOP_ENTRIES: usize = 128;

/// The most steps of one evaluation. The interpreter takes up to a microsecond for each, so this is less than 10 ms of
/// processor time, and enough for a loop over all headers with a long condition.
pub(super) const MAX_STEPS: u64 = 10_000;

/// The function around the range of a loop. No expression can name it.
pub(super) const LOOP_RANGE: &str = "@loop_range";

/// Bounds every loop, and refuses an expression that could take too many steps. To be called last: it changes the tree.
pub(super) fn bound(root: &mut IdedExpr) -> Result<(), ExpressionError> {
    match most(root) {
        0..=MAX_STEPS => Ok(()),
        steps => Err(ExpressionError::whole(format!(
            "the expression may take {steps} steps for one request, more than {MAX_STEPS}; nest no loop over headers, \
             parameters or claims in another, or split the expression over several limits"
        ))),
    }
}

/// Returns the most steps that a part takes, and bounds its loops.
fn most(part: &mut IdedExpr) -> u64 {
    let id = part.id;
    let of_parts = match &mut part.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => 0,
        Expr::Call(call) => sum(call.target.as_deref_mut().into_iter().chain(&mut call.args)),
        Expr::Select(select) => most(&mut select.operand),
        Expr::List(list) => sum(&mut list.elements),
        Expr::Map(map) => sum(map.entries.iter_mut().flat_map(|entry| values(&mut entry.expr))),
        Expr::Struct(of) => sum(of.entries.iter_mut().flat_map(|entry| values(&mut entry.expr))),
        Expr::Comprehension(of) => {
            let once = sum([&mut of.iter_range, &mut of.accu_init, &mut of.result]);
            let entries = match &of.iter_range.expr {
                Expr::List(list) => list.elements.len(),
                Expr::Map(map) => map.entries.len(),
                _ => {
                    let range = std::mem::take(&mut of.iter_range);
                    let call = CallExpr { func_name: LOOP_RANGE.to_owned(), target: None, args: vec![range] };
                    of.iter_range = IdedExpr { id, expr: Expr::Call(call) };
                    MAX_LOOP_ENTRIES
                }
            };
            let each = sum([&mut of.loop_cond, &mut of.loop_step]);
            once.saturating_add(each.saturating_mul(entries as u64))
        }
    };
    of_parts.saturating_add(1)
}

fn sum<'p>(parts: impl IntoIterator<Item = &'p mut IdedExpr>) -> u64 {
    parts.into_iter().map(most).fold(0, u64::saturating_add)
}

fn values(entry: &mut EntryExpr) -> Vec<&mut IdedExpr> {
    match entry {
        EntryExpr::StructField(field) => vec![&mut field.value],
        EntryExpr::MapEntry(entry) => vec![&mut entry.key, &mut entry.value],
    }
}

/// Returns the range of a loop, if it has few enough entries.
pub(super) fn loop_range<'b, 'v>(mut arguments: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let range = arguments.pop().ok_or_else(ExecutionError::missing_argument_or_target)?;
    match range.as_sizer().map(|sizer| *sizer.size().inner()) {
        Some(entries) if entries > MAX_LOOP_ENTRIES as i64 => Err(ExecutionError::function_error(LOOP_RANGE, entries)),
        _ => Ok(range),
    }
}
