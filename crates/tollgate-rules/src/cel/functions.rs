//! Functions of expressions: their signatures, and the ones that CEL lacks.

use std::cmp::Ordering;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use cel::common::types::{CelBool, CelString, DOUBLE_TYPE, DYN_TYPE, INT_TYPE, STRING_TYPE, UINT_TYPE};
use cel::common::value::CowVal;
use cel::{DeclarationError, Env, ExecutionError};

use super::error::nearest;
use super::prepared::Prepared;
use super::steps::{LOOP_RANGE, loop_range};
use super::types::Type;

/// The call syntax of a function.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// `f(x)`
    Plain,
    /// `x.f()`
    OnValue,
    Both,
}

/// The types that an argument accepts.
#[derive(Clone, Copy)]
enum Takes {
    Text,
    /// Checked together with its literal.
    Prepared,
    Sized,
    Number,
    NumberOrText,
    BoolOrText,
    BytesOrText,
    Scalar,
    Any,
}

struct Function {
    name: &'static str,
    form: Form,
    takes: &'static [Takes],
    /// The type of the first argument, if `None`.
    gives: Option<Type>,
    usage: &'static str,
}

const fn function(
    name: &'static str,
    form: Form,
    takes: &'static [Takes],
    gives: Option<Type>,
    usage: &'static str,
) -> Function {
    Function { name, form, takes, gives, usage }
}

static FUNCTIONS: [Function; 16] = [
    function("size", Form::Both, &[Takes::Sized], Some(Type::Int), "size(x)"),
    function("contains", Form::OnValue, &[Takes::Text, Takes::Text], Some(Type::Bool), "text.contains(part)"),
    function("startsWith", Form::OnValue, &[Takes::Text, Takes::Text], Some(Type::Bool), "text.startsWith(part)"),
    function("endsWith", Form::OnValue, &[Takes::Text, Takes::Text], Some(Type::Bool), "text.endsWith(part)"),
    function("matches", Form::Both, &[Takes::Text, Takes::Prepared], Some(Type::Bool), "text.matches(\"pattern\")"),
    function(
        "inCidr",
        Form::Both,
        &[Takes::Text, Takes::Prepared],
        Some(Type::Bool),
        "request.ip.inCidr(\"10.0.0.0/8\")",
    ),
    function("int", Form::Plain, &[Takes::NumberOrText], Some(Type::Int), "int(x)"),
    function("uint", Form::Plain, &[Takes::NumberOrText], Some(Type::Uint), "uint(x)"),
    function("double", Form::Plain, &[Takes::NumberOrText], Some(Type::Double), "double(x)"),
    function("string", Form::Plain, &[Takes::Scalar], Some(Type::String), "string(x)"),
    function("bytes", Form::Plain, &[Takes::BytesOrText], Some(Type::Bytes), "bytes(x)"),
    function("bool", Form::Plain, &[Takes::BoolOrText], Some(Type::Bool), "bool(x)"),
    function("dyn", Form::Plain, &[Takes::Any], Some(Type::Dyn), "dyn(x)"),
    function("min", Form::Plain, &[Takes::Number, Takes::Number], None, "min(x, y)"),
    function("max", Form::Plain, &[Takes::Number, Takes::Number], None, "max(x, y)"),
    // The parser replaces it, unless it is called in another form.
    function("has", Form::Plain, &[Takes::Any], Some(Type::Bool), "has(request.headers.name)"),
];

/// Names that the parser turns into loops, if they are called correctly.
const LOOPS: [(&str, &str); 6] = [
    ("all", "list.all(x, condition)"),
    ("exists", "list.exists(x, condition)"),
    ("exists_one", "list.exists_one(x, condition)"),
    ("existsOne", "list.existsOne(x, condition)"),
    ("map", "list.map(x, value)"),
    ("filter", "list.filter(x, condition)"),
];

impl Takes {
    fn accepts(self, given: &Type) -> bool {
        match (self, given) {
            (_, Type::Dyn) | (Self::Any | Self::Prepared, _) => true,
            (Self::Sized, Type::String | Type::Bytes | Type::List(_) | Type::Map(..)) => true,
            (Self::Text | Self::NumberOrText | Self::BoolOrText | Self::BytesOrText, Type::String) => true,
            (Self::Number | Self::NumberOrText, number) => number.is_number(),
            (Self::BoolOrText, Type::Bool) | (Self::BytesOrText, Type::Bytes) => true,
            (Self::Scalar, Type::Bool | Type::String | Type::Bytes) => true,
            (Self::Scalar, number) => number.is_number(),
            _ => false,
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Text => "a string",
            Self::Sized => "a string, bytes, a list or a map",
            Self::Number => "numbers",
            Self::NumberOrText => "a number or a string",
            Self::BoolOrText => "a bool or a string",
            Self::BytesOrText => "a string or bytes",
            Self::Scalar => "a number, a bool, a string or bytes",
            Self::Any | Self::Prepared => "a value",
        }
    }
}

/// Returns the type of a call. A receiver is the first argument.
pub(super) fn call(name: &str, on_value: bool, arguments: &[Type]) -> Result<Type, String> {
    let Some(function) = FUNCTIONS.iter().find(|function| function.name == name) else {
        return Err(unknown(name));
    };
    let form = if on_value { Form::OnValue } else { Form::Plain };
    if function.form != Form::Both && function.form != form || arguments.len() != function.takes.len() {
        return Err(format!("`{name}` is not called like this; write `{}`", function.usage));
    }
    for (takes, given) in function.takes.iter().zip(arguments) {
        if !takes.accepts(given) {
            return Err(format!("`{name}` does not take {}; give it {}", given.named(), takes.expected()));
        }
    }
    match (&function.gives, arguments) {
        (Some(gives), _) => Ok(gives.clone()),
        (None, [one, another]) if !one.fits(another) => Err(format!(
            "`{name}` takes numbers of one type, not {} and {}; convert one of them",
            one.named(),
            another.named()
        )),
        (None, [Type::Dyn, another]) => Ok(another.clone()),
        (None, _) => Ok(arguments.first().cloned().unwrap_or(Type::Dyn)),
    }
}

fn unknown(name: &str) -> String {
    if let Some((_, usage)) = LOOPS.iter().find(|(known, _)| *known == name) {
        return format!("`{name}` is not called like this; write `{usage}`");
    }
    let known = || FUNCTIONS.iter().map(|function| function.name).chain(LOOPS.iter().map(|(name, _)| *name));
    match nearest(name, known()) {
        Some(near) => format!("there is no function `{name}`; did you mean `{near}`?"),
        None => format!("there is no function `{name}`; there are {}", known().collect::<Vec<_>>().join(", ")),
    }
}

/// Returns the environment with CEL's functions and ours. It is shared, because it contains nothing of an expression.
pub(super) fn environment() -> Arc<Env> {
    static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
        let mut environment = Env::stdlib().with_optional_support(false);
        declare(&mut environment).expect("no name of ours is declared twice");
        Arc::new(environment)
    });
    ENVIRONMENT.clone()
}

fn declare(environment: &mut Env) -> Result<(), DeclarationError> {
    for (name, operation) in [("matches", matches as cel::common::functions::Function), ("inCidr", in_cidr)] {
        environment.add_overload(name, name, vec![STRING_TYPE, DYN_TYPE], operation)?;
        environment.add_member_overload(name, &format!("{name}_of"), STRING_TYPE, vec![DYN_TYPE], operation)?;
    }
    environment.add_overload(LOOP_RANGE, LOOP_RANGE, vec![DYN_TYPE, INT_TYPE], loop_range)?;
    for number in [INT_TYPE, UINT_TYPE, DOUBLE_TYPE] {
        let id = number.name().to_owned();
        environment.add_overload("min", &id, vec![number.to_owned(), number.to_owned()], min)?;
        environment.add_overload("max", &id, vec![number.to_owned(), number.to_owned()], max)?;
    }
    Ok(())
}

type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

fn matches<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    match text_and_prepared(&arguments) {
        Some((text, Prepared::Pattern(pattern))) => Ok(CowVal::owned(CelBool::from(pattern.is_match(text)))),
        _ => Err(ExecutionError::missing_argument_or_target()),
    }
}

fn in_cidr<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    match text_and_prepared(&arguments) {
        Some((text, Prepared::Range(range))) => {
            let address: IpAddr = text.parse().map_err(|error| ExecutionError::function_error("inCidr", error))?;
            // An IPv4 client on an IPv6 socket is still an IPv4 client.
            Ok(CowVal::owned(CelBool::from(range.contains(&address.to_canonical()))))
        }
        _ => Err(ExecutionError::missing_argument_or_target()),
    }
}

fn text_and_prepared<'a>(arguments: &'a [CowVal<'_, '_>]) -> Option<(&'a str, &'a Prepared)> {
    let [text, prepared] = arguments else { return None };
    Some((text.downcast_ref::<CelString<'_>>()?.inner(), prepared.downcast_ref::<Prepared>()?))
}

fn min<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    first_if(arguments, Ordering::is_le)
}

fn max<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    first_if(arguments, Ordering::is_ge)
}

/// Returns the first of two numbers if the comparison holds, and otherwise the second.
fn first_if<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>, expected: fn(Ordering) -> bool) -> Outcome<'b, 'v> {
    let Ok([first, second]) = <[CowVal<'b, 'v>; 2]>::try_from(arguments) else {
        return Err(ExecutionError::missing_argument_or_target());
    };
    let order = match first.as_comparer() {
        Some(comparer) => comparer.compare(second.as_ref())?,
        None => return Err(ExecutionError::missing_argument_or_target()),
    };
    Ok(if expected(order) { first } else { second })
}
