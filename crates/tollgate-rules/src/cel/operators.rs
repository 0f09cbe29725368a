//! Types of operators. Error messages end with the fix.

use cel::common::ast::operators as op;

use super::types::Type;

/// Returns the type of a binary operator.
pub(super) fn binary(operator: &str, left: &Type, right: &Type) -> Result<Type, String> {
    match operator {
        op::LOGICAL_AND | op::LOGICAL_OR => logical(operator, left, right),
        op::EQUALS | op::NOT_EQUALS => equality(operator, left, right),
        op::LESS | op::LESS_EQUALS | op::GREATER | op::GREATER_EQUALS => order(operator, left, right),
        op::IN => membership(left, right),
        op::INDEX => index(left, right),
        _ => arithmetic(operator, left, right),
    }
}

/// Returns the type of a unary operator.
pub(super) fn unary(operator: &str, of: &Type) -> Result<Type, String> {
    match (operator, of) {
        (op::LOGICAL_NOT, Type::Bool | Type::Dyn) => Ok(Type::Bool),
        (op::LOGICAL_NOT, _) => Err(format!("`!` does not take {}; compare it with something first", of.named())),
        (_, Type::Int | Type::Double | Type::Dyn) => Ok(of.clone()),
        (_, Type::Uint) => Err("`-` does not take a uint; convert it with `int(…)`".to_owned()),
        _ => Err(format!("`-` does not take {}; give it a number", of.named())),
    }
}

/// Returns the operator as written.
fn sign(operator: &str) -> &str {
    match operator {
        op::IN => "in",
        _ => operator.trim_matches('_'),
    }
}

fn logical(operator: &str, left: &Type, right: &Type) -> Result<Type, String> {
    match [left, right].into_iter().find(|side| !side.fits(&Type::Bool)) {
        None => Ok(Type::Bool),
        Some(side) => {
            Err(format!("`{}` does not take {}; compare it with something first", sign(operator), side.named()))
        }
    }
}

fn equality(operator: &str, left: &Type, right: &Type) -> Result<Type, String> {
    if left.holds_a_map() || right.holds_a_map() {
        return Err(format!("`{}` does not take a map; compare the values in it", sign(operator)));
    }
    if left.fits(right) { Ok(Type::Bool) } else { Err(different(operator, left, right)) }
}

fn order(operator: &str, left: &Type, right: &Type) -> Result<Type, String> {
    let without_order = |side: &&&Type| matches!(side, Type::List(_) | Type::Map(..) | Type::Null);
    if let Some(side) = [left, right].iter().find(without_order) {
        return Err(format!("`{}` does not take {}; compare numbers or strings", sign(operator), side.named()));
    }
    if left.fits(right) { Ok(Type::Bool) } else { Err(different(operator, left, right)) }
}

/// A comparison of different types is never true, which cannot be intended.
fn different(operator: &str, left: &Type, right: &Type) -> String {
    let fix = match (left, right) {
        (Type::String, number) | (number, Type::String) if number.is_number() => {
            format!("convert the string with `{number}(…)`, or put the number in quotes")
        }
        (Type::String, Type::Bool) | (Type::Bool, Type::String) => {
            "convert the string with `bool(…)`, or put the bool in quotes".to_owned()
        }
        (one, another) if one.is_number() && another.is_number() => {
            let target = if [one, another].contains(&&Type::Double) { "double" } else { "int" };
            format!("convert one side with `{target}(…)`")
        }
        (Type::Null, _) | (_, Type::Null) => "only a claim of `jwt` can be null".to_owned(),
        _ => "compare values of one type".to_owned(),
    };
    format!("`{}` compares {} with {}; {fix}", sign(operator), left.named(), right.named())
}

fn membership(of: &Type, container: &Type) -> Result<Type, String> {
    let held = match container {
        Type::Dyn => return Ok(Type::Bool),
        Type::List(held) | Type::Map(held, _) => held,
        Type::String => return Err("`in` does not look into a string; write `text.contains(part)`".to_owned()),
        _ => return Err(format!("`in` does not look into {}; give it a list or a map", container.named())),
    };
    if of.holds_a_map() || held.holds_a_map() {
        return Err("`in` does not compare maps; look for one of their values".to_owned());
    }
    if of.fits(held) {
        return Ok(Type::Bool);
    }
    let what = if matches!(container, Type::List(_)) { "list" } else { "map" };
    Err(format!("`in` looks for {} in a {what} of {held}; give both one type", of.named()))
}

fn index(of: &Type, by: &Type) -> Result<Type, String> {
    match (of, by) {
        (Type::Dyn, Type::String | Type::Int | Type::Uint | Type::Bool | Type::Dyn) => Ok(Type::Dyn),
        (Type::List(held), Type::Int | Type::Uint | Type::Dyn) => Ok((**held).clone()),
        (Type::List(_), _) => Err(format!("a list is indexed by an int, not by {}; write `list[0]`", by.named())),
        (Type::Map(key, value), _) if key.fits(by) => Ok((**value).clone()),
        (Type::Map(key, _), _) => {
            Err(format!("this map is indexed by {}, not by {}; convert it", key.named(), by.named()))
        }
        _ => Err(format!("{} has nothing to index by {}; give a list or a map", of.named(), by.named())),
    }
}

fn arithmetic(operator: &str, left: &Type, right: &Type) -> Result<Type, String> {
    let takes = |side: &Type| match side {
        Type::Dyn | Type::Int | Type::Uint => true,
        Type::Double => operator != op::MODULO,
        Type::String | Type::Bytes | Type::List(_) => operator == op::ADD,
        _ => false,
    };
    if takes(left) && takes(right) {
        match (left, right) {
            (Type::Dyn, _) | (_, Type::Dyn) => return Ok(Type::Dyn),
            (Type::List(one), Type::List(another)) => return Ok(Type::list((**one).clone().or((**another).clone()))),
            (one, another) if one == another => return Ok(one.clone()),
            _ => {}
        }
    }
    let fix = match (left, right) {
        (Type::String, number) | (number, Type::String) if number.is_number() => match operator {
            op::ADD => format!("convert one side with `string(…)` or `{number}(…)`"),
            _ => format!("convert the string with `{number}(…)`"),
        },
        (one, another) if one.is_number() && another.is_number() => "convert one side with `int(…)`".to_owned(),
        _ => "give both sides numbers".to_owned(),
    };
    Err(format!("`{}` does not take {} and {}; {fix}", sign(operator), left.named(), right.named()))
}
