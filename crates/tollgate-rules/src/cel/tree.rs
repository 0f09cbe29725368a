//! Parses text to a tree of bounded depth.
//!
//! The parser uses a stack frame for every operator in a row (`1+1+1…`), and so does everything that walks the tree. A
//! file must not control that depth: the length of the text is bounded, it is parsed on a thread whose stack is large
//! enough for the worst text of that length, and only a tree that is shallow enough for any thread is accepted.

use std::thread;

use cel::common::ast::{EntryExpr, Expr, SourceInfo};
use cel::{IdedExpr, ParseError, ParseErrors};

use super::error::{ExpressionError, TextPosition, excerpt};
use super::functions;

/// A longer expression is better written as several limits. It also bounds the work of the parser.
pub(super) const MAX_TEXT_BYTES: usize = 4096;

/// Deeper than people write: `&&` and `||` in a row make a balanced tree. Requests are evaluated on a shared stack,
/// usually of two megabytes, and without optimisation the interpreter needs almost 40 kB per level.
pub(super) const MAX_DEPTH: usize = 24;

/// Nested brackets, which the parser limits itself. Larger than the depth, because some brackets add no level.
const MAX_BRACKETS: u16 = 32;

/// Several times enough for the deepest text of [`MAX_TEXT_BYTES`]. Only touched pages use memory.
pub(super) const PARSER_STACK_BYTES: usize = 64 << 20;

/// A text and its tree.
pub(super) struct Parsed {
    pub(super) root: IdedExpr,
    source: SourceInfo,
}

impl Parsed {
    /// Returns the tree for modification, and the source positions.
    pub(super) fn parts(&mut self) -> (&mut IdedExpr, &SourceInfo) {
        (&mut self.root, &self.source)
    }
}

/// Returns the position of a part of the tree.
pub(super) fn position_of(source: &SourceInfo, id: u64) -> Option<TextPosition> {
    let (start, _) = source.offset_for(id)?;
    Some(TextPosition::of_byte(&source.source, usize::try_from(start).ok()?))
}

pub(super) fn parse(text: &str) -> Result<Parsed, ExpressionError> {
    if text.trim().is_empty() {
        return Err(ExpressionError::whole("the expression is empty; write one, or remove it".to_owned()));
    }
    if text.len() > MAX_TEXT_BYTES {
        return Err(ExpressionError::whole(format!(
            "the expression has {} bytes, more than {MAX_TEXT_BYTES}; split it over several limits",
            text.len()
        )));
    }
    thread::scope(|scope| {
        let parser = thread::Builder::new().stack_size(PARSER_STACK_BYTES).spawn_scoped(scope, || read(text));
        parser.map_err(|_| unreadable())?.join().map_err(|_| unreadable())?
    })
}

/// Parses a text. Call it on a thread with a large stack: see the module.
pub(super) fn read(text: &str) -> Result<Parsed, ExpressionError> {
    let parser = functions::environment().parser().max_recursion_depth(MAX_BRACKETS);
    let (root, source) = parser.parse_with_source_info(text).map_err(|errors| syntax_error(text, &errors))?;
    if depth(&root) > MAX_DEPTH { Err(too_deep()) } else { Ok(Parsed { root, source }) }
}

fn unreadable() -> ExpressionError {
    ExpressionError::whole("the expression cannot be read; write it more simply".to_owned())
}

fn too_deep() -> ExpressionError {
    ExpressionError::whole("the expression nests too deeply; split it over several limits".to_owned())
}

fn depth(tree: &IdedExpr) -> usize {
    1 + children(tree).into_iter().map(depth).max().unwrap_or(0)
}

pub(super) fn children(tree: &IdedExpr) -> Vec<&IdedExpr> {
    match &tree.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => Vec::new(),
        Expr::Call(call) => call.target.as_deref().into_iter().chain(&call.args).collect(),
        Expr::Select(select) => vec![&select.operand],
        Expr::List(list) => list.elements.iter().collect(),
        Expr::Comprehension(of) => {
            vec![&of.iter_range, &of.accu_init, &of.loop_cond, &of.loop_step, &of.result]
        }
        Expr::Map(map) => map.entries.iter().flat_map(|entry| entry_children(&entry.expr)).collect(),
        Expr::Struct(fields) => fields.entries.iter().flat_map(|entry| entry_children(&entry.expr)).collect(),
    }
}

fn entry_children(entry: &EntryExpr) -> Vec<&IdedExpr> {
    match entry {
        EntryExpr::StructField(field) => vec![&field.value],
        EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
    }
}

/// Rewrites the parser's first error for people. The original lists every token that would have been accepted.
fn syntax_error(text: &str, errors: &ParseErrors) -> ExpressionError {
    // Errors after a syntax error refer to a tree that the parser invented to continue.
    let of_syntax = errors.errors.iter().find(|error| error.msg.starts_with("Syntax error"));
    match of_syntax.or(errors.errors.first()) {
        Some(first) if first.pos.0 == 0 || first.msg.contains("Recursion limit") => too_deep(),
        Some(first) => ExpressionError::at(position(text, first), reworded(&first.msg)),
        None => unreadable(),
    }
}

/// The parser counts columns in characters, and may point past the end.
fn position(text: &str, error: &ParseError) -> Option<TextPosition> {
    let line = usize::try_from(error.pos.0).ok()?;
    let column = usize::try_from(error.pos.1).ok()?.max(1);
    let length = text.lines().nth(line.checked_sub(1)?)?.chars().count();
    Some(TextPosition { line, column: column.min(length + 1) })
}

fn reworded(message: &str) -> String {
    if message.contains("has() macro") {
        return "`has` takes a field; write `has(request.headers.name)` or `\"a-name\" in request.headers`".to_owned();
    }
    if message.contains("'<EOF>'") {
        return "the expression ends too early; close its brackets and complete it".to_owned();
    }
    let unreadable = message.split_once("token recognition error at: ").map(|(_, rest)| rest.trim_matches('\''));
    let found = message.split_once('\'').and_then(|(_, rest)| rest.split_once('\'')).map(|(found, _)| found);
    if let Some((written, meant)) = unreadable.or(found).and_then(of_another_language) {
        return format!("`{written}` is not an operator; write `{meant}`");
    }
    match (unreadable, found) {
        (Some(unreadable), _) => {
            format!("`{}` cannot be read; close quotes, and escape special characters in them", excerpt(unreadable))
        }
        (None, Some(found)) if message.starts_with("Syntax error") => {
            format!("`{}` is not expected here; check the operator or bracket before it", excerpt(found))
        }
        _ => format!("{}; write it another way", excerpt(message)),
    }
}

/// Operators of other languages, and ours for them.
fn of_another_language(found: &str) -> Option<(&str, &'static str)> {
    let found = found.trim();
    let meant = match found {
        "=" => "==",
        "&" | "and" => "&&",
        "|" | "or" => "||",
        _ => return None,
    };
    Some((found, meant))
}
