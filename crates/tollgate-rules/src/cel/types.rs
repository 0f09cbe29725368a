//! Types of expressions. `dyn` is known only for a request, and fits everywhere.

use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Bool,
    Int,
    Uint,
    Double,
    String,
    Bytes,
    Null,
    List(Box<Type>),
    Map(Box<Type>, Box<Type>),
    Dyn,
}

impl Type {
    pub(super) fn list(of: Type) -> Self {
        Self::List(Box::new(of))
    }

    pub(super) fn map(keys: Type, values: Type) -> Self {
        Self::Map(Box::new(keys), Box::new(values))
    }

    /// Returns `true` if a value of one type may be a value of the other.
    pub(super) fn fits(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Dyn, _) | (_, Self::Dyn) => true,
            (Self::List(one), Self::List(another)) => one.fits(another),
            (Self::Map(key, value), Self::Map(other_key, other_value)) => {
                key.fits(other_key) && value.fits(other_value)
            }
            _ => self == other,
        }
    }

    /// Returns the type of a value that has either type.
    pub(super) fn or(self, other: Self) -> Self {
        match (self, other) {
            (one, another) if one == another => one,
            (Self::List(one), Self::List(another)) => Self::list(one.or(*another)),
            (Self::Map(key, value), Self::Map(other_key, other_value)) => {
                Self::map(key.or(*other_key), value.or(*other_value))
            }
            _ => Self::Dyn,
        }
    }

    pub(super) fn is_number(&self) -> bool {
        matches!(self, Self::Int | Self::Uint | Self::Double)
    }

    /// Maps can be read but not compared: the maps of a request are never built.
    pub(super) fn holds_a_map(&self) -> bool {
        match self {
            Self::Map(..) => true,
            Self::List(of) => of.holds_a_map(),
            _ => false,
        }
    }

    /// Returns the name with its article, for messages.
    pub(super) fn named(&self) -> String {
        match self {
            Self::Int => "an int".to_owned(),
            Self::Bytes | Self::Null => self.to_string(),
            Self::Dyn => "a value of any type".to_owned(),
            _ => format!("a {self}"),
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Bool => "bool",
            Self::Int => "int",
            Self::Uint => "uint",
            Self::Double => "double",
            Self::String => "string",
            Self::Bytes => "bytes",
            Self::Null => "null",
            Self::List(_) => "list",
            Self::Map(..) => "map",
            Self::Dyn => "dyn",
        })
    }
}
