//! The variables of expressions.
//!
//! Values are computed on demand: an expression that reads one header costs one header lookup. A missing fact, such as
//! the route, is an empty string. A missing entry of a map is an error, which `in` and `has` avoid.

use std::borrow::Cow;
use std::sync::OnceLock;

use cel::ExecutionError;
use cel::common::traits::{Container, Indexer, Iterable, Iterator as ValIterator, Sizer};
use cel::common::types::{CelBool, CelDouble, CelInt, CelList, CelNull, CelString, CelUInt, MAP_TYPE, Type as CelType};
use cel::common::value::{CowVal, Val};
use cel::context::VariableResolver;
use serde_json::{Map, Value};
use tollgate_http::Headers;

use super::Input;
use super::prepared::Prepared;
use super::types::Type;
use crate::ReadErrors;
use crate::normal::{descriptor, header, host, method, query};

/// The fields of `request`.
pub(super) const REQUEST_FIELDS: [&str; 8] =
    ["method", "path", "query", "host", "headers", CLIENT_FIELD, "route", "domain"];

/// The field that holds the client's address.
pub(super) const CLIENT_FIELD: &str = "ip";

/// The variables other than `request`. This one holds the claims of a token.
pub(super) const TOKENS: &str = "jwt";

pub(super) const VARIABLES: [&str; 3] = ["request", "descriptors", TOKENS];

/// Returns the type of a field of `request`.
pub(super) fn type_of_field(field: &str) -> Option<Type> {
    match field {
        "query" | "headers" => Some(Type::map(Type::String, Type::String)),
        _ => REQUEST_FIELDS.contains(&field).then_some(Type::String),
    }
}

/// Returns the type of a variable. `request` has none: only its fields are values.
pub(super) fn type_of_variable(name: &str) -> Option<Type> {
    match name {
        "descriptors" => Some(Type::map(Type::String, Type::String)),
        TOKENS => Some(Type::map(Type::String, Type::Dyn)),
        _ => None,
    }
}

/// Resolves variables for the interpreter.
pub(super) struct Variables<'a> {
    input: Input<'a>,
    prepared: &'a [Prepared],
}

impl<'a> Variables<'a> {
    pub(super) fn new(input: Input<'a>, prepared: &'a [Prepared]) -> Self {
        Self { input, prepared }
    }

    fn text(&self, field: &str) -> Option<Cow<'a, str>> {
        let facts = &self.input.facts;
        Some(match field {
            "method" => method::form(facts.method()),
            "path" => self.input.path.into(),
            "host" => host::host(facts, self.input.errors).unwrap_or_default(),
            CLIENT_FIELD => {
                self.input.client.map(|address| address.to_canonical().to_string()).unwrap_or_default().into()
            }
            "route" => facts.route_name().unwrap_or_default().into(),
            "domain" => facts.domain_name().unwrap_or_default().into(),
            _ => return None,
        })
    }

    fn entries(&self, name: &str) -> Option<Entries<'a>> {
        let facts = &self.input.facts;
        Some(match name {
            "request.headers" => {
                host::check_only_host(facts, self.input.errors);
                Entries::Headers(facts.all_headers(), self.input.errors)
            }
            "request.query" => Entries::Query(facts.query().unwrap_or_default(), self.input.errors),
            "descriptors" => Entries::Descriptors(facts.all_descriptors(), self.input.errors),
            TOKENS => Entries::Claims(self.input.claims),
            _ => return None,
        })
    }
}

impl VariableResolver for Variables<'_> {
    fn resolve<'b>(&'b self, name: &str) -> Option<CowVal<'b, 'b>> {
        if let Some(index) = Prepared::index(name) {
            return self.prepared.get(index).map(|prepared| CowVal::Borrowed(prepared as &dyn Val));
        }
        if let Some(entries) = self.entries(name) {
            return Some(CowVal::owned(View::of(entries)));
        }
        let text = self.text(name.strip_prefix("request.")?)?;
        Some(CowVal::owned(CelString::from(text)))
    }
}

/// Names and values, without copies.
#[derive(Clone, Copy, Debug)]
enum Entries<'a> {
    /// The single value of each header. Names are case-insensitive.
    Headers(Option<Headers<'a>>, &'a ReadErrors),
    /// The single value of each query parameter.
    Query(&'a str, &'a ReadErrors),
    /// The single value of each descriptor.
    Descriptors(&'a [(&'a str, &'a str)], &'a ReadErrors),
    Claims(Option<&'a Map<String, Value>>),
}

impl<'a> Entries<'a> {
    fn get(&self, name: &str) -> Option<Box<dyn Val + 'a>> {
        let text: Cow<'a, str> = match self {
            Self::Headers(headers, errors) => match header::header((*headers)?, &name.parse().ok()?, errors)? {
                Cow::Borrowed(value) => String::from_utf8_lossy(value),
                Cow::Owned(value) => String::from_utf8_lossy(&value).into_owned().into(),
            },
            Self::Query(text, errors) => query::query(text, name, errors)?,
            Self::Descriptors(given, errors) => descriptor(given, name, errors)?.into(),
            Self::Claims(claims) => return claims.as_ref()?.get(name).map(json),
        };
        Some(Box::new(CelString::from(text)))
    }

    /// Returns `true` if there is an entry with this name, with any number of values.
    fn has(&self, name: &str) -> bool {
        match self {
            Self::Headers(headers, _) => {
                headers.zip(name.parse().ok()).is_some_and(|(headers, name)| headers.get_named(&name).is_some())
            }
            Self::Query(text, _) => query::query(text, name, &ReadErrors::default()).is_some(),
            Self::Descriptors(given, _) => given.iter().any(|(given, _)| *given == name),
            Self::Claims(claims) => claims.is_some_and(|claims| claims.contains_key(name)),
        }
    }

    fn names(&self) -> Vec<CelString<'a>> {
        let mut names: Vec<CelString<'a>> = match self {
            Self::Headers(headers, _) => {
                headers.iter().flat_map(Headers::names).map(|name| name.to_ascii_lowercase().into()).collect()
            }
            Self::Query(text, _) => query::names(text).map(Into::into).collect(),
            Self::Descriptors(given, _) => given.iter().map(|(name, _)| (*name).into()).collect(),
            Self::Claims(claims) => {
                claims.iter().flat_map(|claims| claims.keys()).map(|name| name.as_str().into()).collect()
            }
        };
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// Converts a claim. Members of an object are converted on demand.
fn json(value: &Value) -> Box<dyn Val + '_> {
    match value {
        Value::Null => Box::new(CelNull),
        Value::Bool(truth) => Box::new(CelBool::from(*truth)),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Box::new(CelInt::from(number)),
            (None, Some(number)) => Box::new(CelUInt::from(number)),
            (None, None) => Box::new(CelDouble::from(number.as_f64().unwrap_or(f64::NAN))),
        },
        Value::String(text) => Box::new(CelString::from(text.as_str())),
        Value::Array(items) => Box::new(CelList::from(items.iter().map(json).collect::<Vec<_>>())),
        Value::Object(claims) => Box::new(View::of(Entries::Claims(Some(claims)))),
    }
}

/// A CEL map over entries that are not copied.
#[derive(Clone, Debug)]
struct View<'a> {
    entries: Entries<'a>,
    /// Needed for loops and sizes only.
    names: OnceLock<Vec<CelString<'a>>>,
}

impl<'a> View<'a> {
    fn of(entries: Entries<'a>) -> Self {
        Self { entries, names: OnceLock::new() }
    }

    fn names(&self) -> &[CelString<'a>] {
        self.names.get_or_init(|| self.entries.names())
    }

    fn name<'k>(key: &'k dyn Val) -> Result<&'k CelString<'k>, ExecutionError> {
        key.downcast_ref::<CelString<'_>>().ok_or_else(|| ExecutionError::UnexpectedType {
            got: key.get_type().name().to_owned(),
            want: "string".to_owned(),
        })
    }

    fn find(&self, key: &dyn Val) -> Result<Box<dyn Val + 'a>, ExecutionError> {
        let name = Self::name(key)?;
        self.entries.get(name.inner()).ok_or_else(|| ExecutionError::no_such_key(name.inner()))
    }
}

impl Val for View<'_> {
    fn get_type(&self) -> &CelType {
        &MAP_TYPE
    }

    fn cel_type() -> &'static CelType {
        &MAP_TYPE
    }

    fn as_container(&self) -> Option<&dyn Container> {
        Some(self)
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_iterable<'b, 'v>(&'b self) -> Option<&'b (dyn Iterable + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_sizer(&self) -> Option<&dyn Sizer> {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(self.clone())
    }
}

impl Container for View<'_> {
    fn contains(&self, key: &dyn Val) -> Result<bool, ExecutionError> {
        let name = Self::name(key)?;
        Ok(self.entries.has(name.inner()))
    }
}

impl Indexer for View<'_> {
    fn get<'b, 'v>(&'b self, key: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.find(key).map(|value| CowVal::Owned(value as Box<dyn Val + 'v>))
    }

    fn steal<'v>(self: Box<Self>, key: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.find(key).map(|value| value as Box<dyn Val + 'v>)
    }
}

impl Sizer for View<'_> {
    fn size(&self) -> CelInt {
        CelInt::from(i64::try_from(self.names().len()).unwrap_or(i64::MAX))
    }
}

impl Iterable for View<'_> {
    fn iter<'b, 'v>(&'b self) -> Box<dyn ValIterator<'b, 'v> + 'b>
    where
        Self: 'v,
    {
        Box::new(Names(self.names().iter()))
    }
}

struct Names<'b, 'a>(std::slice::Iter<'b, CelString<'a>>);

impl<'b, 'v, 'a: 'v> ValIterator<'b, 'v> for Names<'b, 'a> {
    fn next(&mut self) -> Option<&'b (dyn Val + 'v)> {
        self.0.next().map(|name| name as &(dyn Val + 'v))
    }
}
