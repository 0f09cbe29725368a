//! Names, expressions, content types and classes of statuses.

use tollgate::internal::check_name;

use super::super::problem::{InvalidValue, shown};
use super::{HeaderName, form, matches_pattern};

form! {
    /// The name of a limit.
    text LimitName {
        format: "limit-name", noun: "a name", example: "per-user",
        pattern: r"^[^\u0000-\u001f\u007f]{1,128}$"
    }
}

impl LimitName {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        check_name(text)?;
        Ok(Self(text.to_owned()))
    }
}

form! {
    /// The prefix of all keys on a Redis.
    text KeyPrefix { format: "key-prefix", noun: "a prefix", example: "checkout", pattern: r"^[A-Za-z0-9_.:/-]{1,64}$" }
}

impl KeyPrefix {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        // The same rule as in `redis/names.rs`: braces would be the hash tag of a cluster.
        if !matches_pattern!(KeyPrefix, text) {
            let problem = format!("`{}` is not a key prefix", shown(text));
            return Err(InvalidValue::new(problem, "use at most 64 letters, digits and _ - . : /"));
        }
        Ok(Self(text.to_owned()))
    }
}

form! {
    /// The name of a store in `stores`.
    text StoreName {
        format: "store-name", noun: "the name of a store", example: "sessions",
        pattern: r"^[A-Za-z0-9_.-]{1,64}$"
    }
}

impl StoreName {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        // The message must not repeat the URL: it may contain a password.
        if text.contains("://") {
            let problem = "a URL is not the name of a store";
            let fix = "add the URL to `stores` at the top of the file under a name, and write that name here";
            return Err(InvalidValue::new(problem, fix));
        }
        // The same rule as in `redis/stores.rs`.
        if !matches_pattern!(StoreName, text) {
            let problem = format!("`{}` is not the name of a store", shown(text));
            return Err(InvalidValue::new(problem, "use at most 64 letters, digits and _ - ."));
        }
        Ok(Self(text.to_owned()))
    }
}

form! {
    /// A CEL expression. `meaning` checks that it compiles.
    text Expression {
        format: "cel", noun: "an expression", example: "request.path.startsWith(\"/api/\")",
        pattern: r"\S"
    }
}

impl Expression {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        if text.trim().is_empty() {
            return Err(InvalidValue::new("the expression is empty", "write one, or remove the line"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// A cost that depends on the request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CostText {
    /// `header:NAME`: a whole number in a header. Any other value costs 1.
    Header(HeaderName),
    /// An expression that returns a whole number.
    Expression(Expression),
}

form! {
    CostText { format: "cost", noun: "header:NAME or an expression", example: "header:x-cost", pattern: r"\S" }
}

impl CostText {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        match text.strip_prefix("header:") {
            Some(name) => Ok(Self::Header(HeaderName::read(name)?)),
            None => Ok(Self::Expression(Expression::read(text)?)),
        }
    }
}

form! {
    /// A content type, such as `text/html; charset=utf-8`.
    text ContentType {
        format: "content-type", noun: "a content type", example: "text/html",
        pattern: r"^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+ *(;[ -~]*)?$"
    }
}

impl ContentType {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        if matches_pattern!(ContentType, text) {
            return Ok(Self(text.to_owned()));
        }
        let problem = format!("`{}` is not a content type", shown(text));
        Err(InvalidValue::new(problem, "write one such as text/html or application/json"))
    }
}

/// A class of statuses: `5xx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatusClass(u16);

form! {
    StatusClass { format: "status-class", noun: "a class of statuses", example: "5xx", pattern: "^[1-5]xx$" }
}

impl StatusClass {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let digit = text.strip_suffix("xx").filter(|_| matches_pattern!(StatusClass, text));
        match digit.and_then(|digit| digit.parse::<u16>().ok()) {
            Some(digit) => Ok(Self(digit * 100)),
            None => Err(InvalidValue::new(
                format!("`{}` is not a status or a class of statuses", shown(text)),
                "write a status such as 401, or a class such as 5xx",
            )),
        }
    }

    /// Returns the first status of the class: 500.
    pub const fn first(self) -> u16 {
        self.0
    }
}
