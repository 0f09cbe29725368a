//! Reads of entries that a request may lack: `request.headers["x"]`, `request.query.page`, `jwt.plan`.
//!
//! Such a read fails for a request without the entry, and a failed expression decides against the client. That is safe
//! but rarely intended, so an unguarded read is reported when the file is loaded. A guard is `"x" in map` or
//! `has(map.x)` that holds wherever the read matters: beside it in a conjunction, negated beside it in a disjunction,
//! or as the condition of an enclosing `? :`.

use cel::IdedExpr;
use cel::common::ast::{CallExpr, Expr, LiteralValue, SourceInfo, operators as op};

use super::error::TextPosition;
use super::tree::{Parsed, position_of};
use super::variables::TOKENS;

/// An unguarded read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnguardedRead {
    /// The position in the expression.
    pub position: Option<TextPosition>,
    /// The read as written: `request.query["page"]`.
    pub text: String,
    /// A condition that is true if the entry is present: `"page" in request.query`.
    pub guard: String,
}

/// An entry of one of a request's maps, or of an object in a claim.
#[derive(Clone, Debug)]
struct Entry {
    /// `request.headers`, `request.query`, `descriptors` or `jwt`.
    root: &'static str,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    name: Name,
    /// `.name` or `["name"]`.
    is_field: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    Literal(String),
    /// The variable of a loop.
    Variable(String),
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        let names = |entry: &Self| entry.steps.iter().map(|step| step.name.clone()).collect::<Vec<_>>();
        self.root == other.root && names(self) == names(other)
    }
}

/// Returns the unguarded reads, each entry once, in the order of the text.
pub(super) fn unguarded(parsed: &mut Parsed) -> Vec<UnguardedRead> {
    let (root, source) = parsed.parts();
    let mut walk = Walk { source, found: Vec::new() };
    walk.part(root, &[]);
    let mut reads: Vec<UnguardedRead> = walk.found.into_iter().map(|(read, _)| read).collect();
    reads.sort_by_key(|read| read.position.map(|position| (position.line, position.column)));
    reads
}

struct Walk<'s> {
    source: &'s SourceInfo,
    found: Vec<(UnguardedRead, Entry)>,
}

impl Walk<'_> {
    /// Walks a part of the expression. `present` are the entries that exist whenever its value matters.
    fn part(&mut self, part: &IdedExpr, present: &[Entry]) {
        if let Some(entry) = Entry::of(part) {
            return self.read(part, &entry, present);
        }
        match &part.expr {
            Expr::Call(call) => self.call(call, present),
            // `has` reads the operand before the last dot.
            Expr::Select(select) => self.part(&select.operand, present),
            Expr::Comprehension(of) => {
                self.part(&of.iter_range, present);
                let variable = Name::Variable(of.iter_var.clone());
                let is_outer = |entry: &&Entry| entry.steps.iter().all(|step| step.name != variable);
                let mut present: Vec<Entry> = present.iter().filter(is_outer).cloned().collect();
                present.extend(Entry::of(&of.iter_range).map(|map| map.with(variable, false)));
                self.part(&of.loop_step, &present);
            }
            _ => super::tree::children(part).into_iter().for_each(|child| self.part(child, present)),
        }
    }

    fn call(&mut self, call: &CallExpr, present: &[Entry]) {
        match (call.func_name.as_str(), call.args.as_slice()) {
            // CEL returns the deciding side even if the other fails, so each side guards the other.
            (op::LOGICAL_AND, [left, right]) => {
                self.part(left, &join(present, present_if(right, true)));
                self.part(right, &join(present, present_if(left, true)));
            }
            (op::LOGICAL_OR, [left, right]) => {
                self.part(left, &join(present, present_if(right, false)));
                self.part(right, &join(present, present_if(left, false)));
            }
            (op::CONDITIONAL, [condition, then, otherwise]) => {
                self.part(condition, present);
                self.part(then, &join(present, present_if(condition, true)));
                self.part(otherwise, &join(present, present_if(condition, false)));
            }
            _ => {
                let parts = call.target.as_deref().into_iter().chain(&call.args);
                parts.for_each(|part| self.part(part, present));
            }
        }
    }

    /// Reports the outermost entry of a chain that may be missing.
    fn read(&mut self, part: &IdedExpr, entry: &Entry, present: &[Entry]) {
        let missing = (1..=entry.steps.len()).map(|length| entry.first(length)).find(|one| !present.contains(one));
        let Some(missing) = missing else { return };
        if self.found.iter().any(|(_, known)| *known == missing) {
            return;
        }
        let position = position_of(self.source, beginning(part).id);
        let read = UnguardedRead { position, text: missing.text(), guard: missing.guard() };
        self.found.push((read, missing));
    }
}

/// Returns the leftmost part, where the text of a chain begins.
fn beginning(part: &IdedExpr) -> &IdedExpr {
    match &part.expr {
        Expr::Select(select) => beginning(&select.operand),
        Expr::Call(call) if call.func_name == op::INDEX => call.args.first().map_or(part, beginning),
        _ => part,
    }
}

fn join(present: &[Entry], more: Vec<Entry>) -> Vec<Entry> {
    present.iter().cloned().chain(more).collect()
}

/// Returns the entries that exist if a condition evaluates to `value`.
fn present_if(condition: &IdedExpr, value: bool) -> Vec<Entry> {
    let with_parents = |entry: Entry| (1..=entry.steps.len()).map(|length| entry.first(length)).collect();
    match &condition.expr {
        Expr::Select(select) if select.test && value => {
            let name = Name::Literal(select.field.clone());
            Entry::of(&select.operand).map(|map| with_parents(map.with(name, true))).unwrap_or_default()
        }
        Expr::Call(call) => match (call.func_name.as_str(), call.args.as_slice()) {
            (op::IN, [name, map]) if value => {
                let entry = Entry::of(map).zip(Name::of(name)).map(|(map, name)| map.with(name, false));
                entry.map(with_parents).unwrap_or_default()
            }
            (op::LOGICAL_NOT, [of]) => present_if(of, !value),
            (op::LOGICAL_AND, [left, right]) | (op::LOGICAL_OR, [left, right]) => {
                let (left, right) = (present_if(left, value), present_if(right, value));
                // A conjunction is true only if both sides are. A disjunction is false only if both sides are.
                if (call.func_name == op::LOGICAL_AND) == value {
                    join(&left, right)
                } else {
                    left.into_iter().filter(|entry| right.contains(entry)).collect()
                }
            }
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}

impl Name {
    fn of(part: &IdedExpr) -> Option<Self> {
        match &part.expr {
            Expr::Literal(LiteralValue::String(text)) => Some(Self::Literal(text.inner().to_owned())),
            Expr::Ident(name) => Some(Self::Variable(name.clone())),
            _ => None,
        }
    }
}

impl Entry {
    /// Returns the entry that a part reads. A map itself has no steps.
    fn of(part: &IdedExpr) -> Option<Self> {
        let root = |root| Some(Self { root, steps: Vec::new() });
        match &part.expr {
            Expr::Ident(name) if name == "descriptors" => root("descriptors"),
            Expr::Ident(name) if name == TOKENS => root(TOKENS),
            Expr::Select(select) if select.test => None,
            Expr::Select(select) => match (&select.operand.expr, select.field.as_str()) {
                (Expr::Ident(name), "headers") if name == "request" => root("request.headers"),
                (Expr::Ident(name), "query") if name == "request" => root("request.query"),
                _ => Some(Self::of(&select.operand)?.with(Name::Literal(select.field.clone()), true)),
            },
            Expr::Call(call) if call.func_name == op::INDEX => match call.args.as_slice() {
                [map, name] => Some(Self::of(map)?.with(Name::of(name)?, false)),
                _ => None,
            },
            _ => None,
        }
    }

    fn with(mut self, name: Name, is_field: bool) -> Self {
        let name = match name {
            // Header names are case-insensitive.
            Name::Literal(name) if self.root == "request.headers" => Name::Literal(name.to_ascii_lowercase()),
            name => name,
        };
        self.steps.push(Step { name, is_field });
        self
    }

    fn first(&self, length: usize) -> Self {
        Self { root: self.root, steps: self.steps[..length].to_vec() }
    }

    fn text(&self) -> String {
        self.steps.iter().fold(self.root.to_owned(), |text, step| match &step.name {
            Name::Literal(name) if step.is_field => format!("{text}.{name}"),
            name => format!("{text}[{}]", name.text()),
        })
    }

    fn guard(&self) -> String {
        let Some((last, map)) = self.steps.split_last() else { return self.text() };
        format!("{} in {}", last.name.text(), Self { root: self.root, steps: map.to_vec() }.text())
    }
}

impl Name {
    /// Formats the entry as an expression.
    fn text(&self) -> String {
        match self {
            Self::Literal(name) => format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\"")),
            Self::Variable(name) => name.clone(),
        }
    }
}
