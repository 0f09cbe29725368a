//! Type checker: every part of an expression gets a type, or the expression is rejected.
//!
//! The checker is sound: a part with a type other than `dyn` has that type for every request, or fails. It is stricter
//! than CEL for likely mistakes, such as `request.path == 1`, which is never true.
//!
//! It also compiles the literals of `matches` and `inCidr`, and replaces them with names; see `prepared.rs`.

use cel::IdedExpr;
use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedEntryExpr, LiteralValue, SelectExpr, SourceInfo, operators as op,
};

use super::error::{ExpressionError, nearest};
use super::prepared::Prepared;
use super::tree::{Parsed, position_of};
use super::types::Type;
use super::variables::{CLIENT_FIELD, REQUEST_FIELDS, TOKENS, VARIABLES, type_of_field, type_of_variable};
use super::{functions, operators};
use crate::pattern::PatternBudget;

/// Nested loops. More are hard to read, and take thousands of steps even over short lists.
const MAX_NESTED_LOOPS: usize = 2;

/// Each `map` can multiply the size of its input, so a chain of them could exhaust memory.
const MAX_MAPS: usize = 1;

/// The result of the check.
pub(super) struct Checked {
    pub(super) gives: Type,
    pub(super) prepared: Vec<Prepared>,
    /// `true` if the expression reads the claims of a token.
    pub(super) reads_token: bool,
    /// `true` if the expression reads the client's address.
    pub(super) reads_client: bool,
}

pub(super) fn check(parsed: &mut Parsed, patterns: &mut PatternBudget) -> Result<Checked, ExpressionError> {
    let (root, source) = parsed.parts();
    let mut checker = Checker {
        source,
        scope: Vec::new(),
        maps: 0,
        patterns,
        prepared: Vec::new(),
        reads_token: false,
        reads_client: false,
    };
    let gives = checker.part(root)?;
    let Checker { prepared, reads_token, reads_client, .. } = checker;
    Ok(Checked { gives, prepared, reads_token, reads_client })
}

struct Checker<'s> {
    source: &'s SourceInfo,
    /// The variables of the enclosing loops.
    scope: Vec<(String, Type)>,
    maps: usize,
    patterns: &'s mut PatternBudget,
    prepared: Vec<Prepared>,
    reads_token: bool,
    reads_client: bool,
}

impl Checker<'_> {
    fn refused(&self, id: u64, message: String) -> ExpressionError {
        ExpressionError::at(position_of(self.source, id), message)
    }

    fn part(&mut self, part: &mut IdedExpr) -> Result<Type, ExpressionError> {
        let id = part.id;
        match &mut part.expr {
            Expr::Literal(literal) => Ok(type_of_literal(literal)),
            Expr::Ident(name) => self.variable(id, name),
            Expr::Select(select) => self.select(id, select),
            Expr::Call(call) => self.call(id, call),
            Expr::List(list) => self.one_type(&mut list.elements).map(Type::list),
            Expr::Map(map) => self.map(&mut map.entries),
            Expr::Comprehension(of) => self.comprehension(id, of),
            Expr::Struct(made) => Err(self
                .refused(id, format!("there is no type `{}` to make a value of; use lists and maps", made.type_name))),
            Expr::Unspecified => Err(self.refused(id, "this cannot be read; write it another way".to_owned())),
        }
    }

    fn variable(&mut self, id: u64, name: &str) -> Result<Type, ExpressionError> {
        if let Some((_, known)) = self.scope.iter().rev().find(|(known, _)| known == name) {
            return Ok(known.clone());
        }
        if let Some(known) = type_of_variable(name) {
            self.reads_token |= name == TOKENS;
            return Ok(known);
        }
        let in_scope = self.scope.iter().map(|(name, _)| name.as_str());
        Err(self.refused(
            id,
            if name == "request" {
                format!("`request` is not a value by itself; use one of its fields: {}", REQUEST_FIELDS.join(", "))
            } else if REQUEST_FIELDS.contains(&name) {
                format!("there is no variable `{name}`; did you mean `request.{name}`?")
            } else if let Some(near) = nearest(name, VARIABLES.into_iter().chain(in_scope)) {
                format!("there is no variable `{name}`; did you mean `{near}`?")
            } else {
                format!("there is no variable `{name}`; there are {}", VARIABLES.join(", "))
            },
        ))
    }

    fn select(&mut self, id: u64, select: &mut SelectExpr) -> Result<Type, ExpressionError> {
        let field = select.field.clone();
        // No loop may name its variable `request`, so the name is always ours.
        if matches!(&select.operand.expr, Expr::Ident(name) if name == "request") {
            let known = type_of_field(&field).ok_or_else(|| self.refused(id, unknown_field(&field)))?;
            self.reads_client |= field == CLIENT_FIELD;
            return match select.test {
                true => Err(self.refused(id, format!("`request.{field}` is always there; leave out `has`"))),
                false => Ok(known),
            };
        }
        let held = match self.part(&mut select.operand)? {
            Type::Map(key, held) if key.fits(&Type::String) => *held,
            Type::Dyn => Type::Dyn,
            other => {
                return Err(
                    self.refused(id, format!("{} has no field `{field}`; only maps have fields", other.named()))
                );
            }
        };
        Ok(if select.test { Type::Bool } else { held })
    }

    fn call(&mut self, id: u64, call: &mut CallExpr) -> Result<Type, ExpressionError> {
        match (&call.target, call.func_name.as_str(), call.args.as_mut_slice()) {
            (None, op::CONDITIONAL, [condition, then, otherwise]) => self.choice(id, condition, then, otherwise),
            (None, operator @ (op::LOGICAL_NOT | op::NEGATE), [of]) => {
                let of = self.part(of)?;
                operators::unary(operator, &of).map_err(|message| self.refused(id, message))
            }
            (None, operator, [left, right]) if operator.starts_with('_') || operator == op::IN => {
                let (left, right) = (self.part(left)?, self.part(right)?);
                operators::binary(operator, &left, &right).map_err(|message| self.refused(id, message))
            }
            _ => self.function(id, call),
        }
    }

    fn choice(
        &mut self,
        id: u64,
        condition: &mut IdedExpr,
        then: &mut IdedExpr,
        otherwise: &mut IdedExpr,
    ) -> Result<Type, ExpressionError> {
        self.condition(condition, "before `?`")?;
        let (then, otherwise) = (self.part(then)?, self.part(otherwise)?);
        if then.fits(&otherwise) {
            return Ok(then.or(otherwise));
        }
        let (one, another) = (then.named(), otherwise.named());
        Err(self.refused(id, format!("`?` gives {one} or {another}; give both sides of `:` one type")))
    }

    /// Checks a part that must be a condition.
    fn condition(&mut self, condition: &mut IdedExpr, context: &str) -> Result<(), ExpressionError> {
        let id = condition.id;
        match self.part(condition)? {
            Type::Bool | Type::Dyn => Ok(()),
            other => Err(self.refused(
                id,
                format!("the value {context} is {}, not a bool; compare it with something", other.named()),
            )),
        }
    }

    fn function(&mut self, id: u64, call: &mut CallExpr) -> Result<Type, ExpressionError> {
        let name = call.func_name.clone();
        let on_value = call.target.is_some();
        let mut given = Vec::with_capacity(call.args.len() + 1);
        let parts = call.target.as_deref_mut().into_iter().chain(&mut call.args);
        for (index, argument) in parts.enumerate() {
            given.push(match (name.as_str(), index) {
                ("matches" | "inCidr", 1) => self.prepare(&name, argument)?,
                _ => self.part(argument)?,
            });
        }
        functions::call(&name, on_value, &given).map_err(|message| self.refused(id, message))
    }

    /// Compiles a literal, and replaces it with the name of the compiled value.
    fn prepare(&mut self, function: &str, argument: &mut IdedExpr) -> Result<Type, ExpressionError> {
        let Expr::Literal(LiteralValue::String(text)) = &argument.expr else {
            let what = if function == "matches" { "pattern" } else { "range" };
            return Err(self.refused(
                argument.id,
                format!("the {what} of `{function}` is compiled with the file; write it here, in quotes"),
            ));
        };
        let prepared = match function {
            "matches" => Prepared::pattern(text.inner(), self.patterns),
            _ => Prepared::range(text.inner()),
        };
        let prepared = prepared.map_err(|message| self.refused(argument.id, message))?;
        argument.expr = Expr::Ident(Prepared::name(self.prepared.len()));
        self.prepared.push(prepared);
        Ok(Type::String)
    }

    fn one_type(&mut self, parts: &mut [IdedExpr]) -> Result<Type, ExpressionError> {
        let mut joined = None;
        for part in parts {
            let found = self.part(part)?;
            joined = Some(match joined {
                None => found,
                Some(before) => found.or(before),
            });
        }
        Ok(joined.unwrap_or(Type::Dyn))
    }

    fn map(&mut self, entries: &mut [IdedEntryExpr]) -> Result<Type, ExpressionError> {
        let mut joined = None;
        for IdedEntryExpr { id, expr } in entries {
            let EntryExpr::MapEntry(entry) = expr else {
                return Err(self.refused(*id, "this cannot be read; write it another way".to_owned()));
            };
            let key = self.part(&mut entry.key)?;
            if !matches!(key, Type::String | Type::Int | Type::Uint | Type::Bool | Type::Dyn) {
                return Err(self.refused(*id, format!("a map has no key that is {}; use a string", key.named())));
            }
            let value = self.part(&mut entry.value)?;
            joined = Some(match joined {
                None => (key, value),
                Some((keys, values)) => (key.or(keys), value.or(values)),
            });
        }
        let (keys, values) = joined.unwrap_or((Type::Dyn, Type::Dyn));
        Ok(Type::map(keys, values))
    }

    /// Checks a loop. Only the parser creates them, from `all`, `exists`, `exists_one`, `map` and `filter`.
    fn comprehension(&mut self, id: u64, of: &mut ComprehensionExpr) -> Result<Type, ExpressionError> {
        let over = match self.part(&mut of.iter_range)? {
            Type::List(held) | Type::Map(held, _) => *held,
            Type::Dyn => Type::Dyn,
            other => {
                let message = format!("a loop cannot go through {}; give it a list or a map", other.named());
                return Err(self.refused(id, message));
            }
        };
        if VARIABLES.contains(&of.iter_var.as_str()) {
            let message =
                format!("`{}` has a meaning already; give the variable of the loop another name", of.iter_var);
            return Err(self.refused(id, message));
        }
        if self.scope.len() == MAX_NESTED_LOOPS {
            let message = format!("more than {MAX_NESTED_LOOPS} loops are nested; split the expression");
            return Err(self.refused(id, message));
        }
        self.scope.push((of.iter_var.clone(), over));
        let gives = self.step(id, of);
        self.scope.pop();
        gives
    }

    /// Checks the step of a loop. The kind of loop follows from its initial value.
    fn step(&mut self, id: u64, of: &mut ComprehensionExpr) -> Result<Type, ExpressionError> {
        const WHEREABOUTS: &str = "in the condition of the loop";
        let Expr::Call(step) = &mut of.loop_step.expr else {
            return Err(self.refused(id, "this loop cannot be read; write it another way".to_owned()));
        };
        match (&of.accu_init.expr, step.func_name.as_str(), step.args.as_mut_slice()) {
            // `@result && condition`
            (Expr::Literal(LiteralValue::Boolean(_)), op::LOGICAL_AND | op::LOGICAL_OR, [_, condition]) => {
                self.condition(condition, WHEREABOUTS).map(|()| Type::Bool)
            }
            // `condition ? @result + 1 : @result`, and at the end `@result == 1`
            (Expr::Literal(LiteralValue::Int(_)), op::CONDITIONAL, [condition, _, _]) => {
                self.condition(condition, WHEREABOUTS).map(|()| Type::Bool)
            }
            // `condition ? @result + [value] : @result`
            (Expr::List(_), op::CONDITIONAL, [condition, then, _]) => {
                self.condition(condition, WHEREABOUTS)?;
                match &mut then.expr {
                    Expr::Call(append) => self.appended(id, &of.iter_var, &mut append.args),
                    _ => Err(self.refused(id, "this loop cannot be read; write it another way".to_owned())),
                }
            }
            // `@result + [value]`
            (Expr::List(_), op::ADD, append) => self.appended(id, &of.iter_var, append),
            _ => Err(self.refused(id, "this loop cannot be read; write it another way".to_owned())),
        }
    }

    /// Returns the type of the list that `map` or `filter` produces, from `@result` and `[value]`.
    fn appended(&mut self, id: u64, variable: &str, append: &mut [IdedExpr]) -> Result<Type, ExpressionError> {
        let [_, IdedExpr { expr: Expr::List(appended), .. }] = append else {
            return Err(self.refused(id, "this loop cannot be read; write it another way".to_owned()));
        };
        let is_filter = matches!(&*appended.elements, [IdedExpr { expr: Expr::Ident(name), .. }] if name == variable);
        if !is_filter {
            self.maps += 1;
        }
        if self.maps > MAX_MAPS {
            let message = format!("there is more than {MAX_MAPS} `map`; use `all`, `exists` or `filter`");
            return Err(self.refused(id, message));
        }
        self.one_type(&mut appended.elements).map(Type::list)
    }
}

fn type_of_literal(literal: &LiteralValue) -> Type {
    match literal {
        LiteralValue::Boolean(_) => Type::Bool,
        LiteralValue::Bytes(_) => Type::Bytes,
        LiteralValue::Double(_) => Type::Double,
        LiteralValue::Int(_) => Type::Int,
        LiteralValue::Null => Type::Null,
        LiteralValue::String(_) => Type::String,
        LiteralValue::UInt(_) => Type::Uint,
    }
}

fn unknown_field(field: &str) -> String {
    match nearest(field, REQUEST_FIELDS) {
        Some(near) => format!("`request` has no field `{field}`; did you mean `{near}`?"),
        None => format!("`request` has no field `{field}`; it has {}", REQUEST_FIELDS.join(", ")),
    }
}
