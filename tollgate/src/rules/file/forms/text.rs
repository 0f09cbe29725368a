//! Names, expressions, content types and classes of statuses.

use super::super::problem::{InvalidValue, shown};
use super::{Form, HeaderName, matches_pattern, texts};
use crate::limit::check_name;

texts! {
    /// The name of a limit.
    LimitName;
    /// The prefix of all keys on a Redis.
    KeyPrefix;
    /// The name of a store in `stores`.
    StoreName;
    /// A CEL expression. `meaning` checks that it compiles.
    Expression;
    /// A content type, such as `text/html; charset=utf-8`.
    ContentType;
}

impl Form for LimitName {
    const FORMAT: &'static str = "limit-name";
    const PATTERN: &'static str = r"^[^\u0000-\u001f\u007f]{1,128}$";
    const NOUN: &'static str = "a name";
    const EXAMPLE: &'static str = "per-user";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        check_name(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl Form for KeyPrefix {
    const FORMAT: &'static str = "key-prefix";
    const PATTERN: &'static str = r"^[A-Za-z0-9_.:/-]{1,64}$";
    const NOUN: &'static str = "a prefix";
    const EXAMPLE: &'static str = "checkout";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        // The same rule as in `redis/names.rs`: braces would be the hash tag of a cluster.
        if !matches_pattern!(KeyPrefix, text) {
            let problem = format!("`{}` is not a key prefix", shown(text));
            return Err(InvalidValue::new(problem, "use at most 64 letters, digits and _ - . : /"));
        }
        Ok(Self(text.to_owned()))
    }
}

impl Form for StoreName {
    const FORMAT: &'static str = "store-name";
    const PATTERN: &'static str = r"^[A-Za-z0-9_.-]{1,64}$";
    const NOUN: &'static str = "the name of a store";
    const EXAMPLE: &'static str = "sessions";

    fn read(text: &str) -> Result<Self, InvalidValue> {
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

impl Form for Expression {
    const FORMAT: &'static str = "cel";
    const PATTERN: &'static str = r"\S";
    const NOUN: &'static str = "an expression";
    const EXAMPLE: &'static str = "request.path.startsWith(\"/api/\")";

    fn read(text: &str) -> Result<Self, InvalidValue> {
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

impl Form for CostText {
    const FORMAT: &'static str = "cost";
    const PATTERN: &'static str = r"\S";
    const NOUN: &'static str = "header:NAME or an expression";
    const EXAMPLE: &'static str = "header:x-cost";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        match text.strip_prefix("header:") {
            Some(name) => Ok(Self::Header(HeaderName::read(name)?)),
            None => Ok(Self::Expression(Expression::read(text)?)),
        }
    }
}

impl Form for ContentType {
    const FORMAT: &'static str = "content-type";
    const PATTERN: &'static str = r"^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+ *(;[ -~]*)?$";
    const NOUN: &'static str = "a content type";
    const EXAMPLE: &'static str = "text/html";

    fn read(text: &str) -> Result<Self, InvalidValue> {
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

impl StatusClass {
    /// Returns the first status of the class: 500.
    pub const fn first(self) -> u16 {
        self.0
    }
}

impl Form for StatusClass {
    const FORMAT: &'static str = "status-class";
    const PATTERN: &'static str = "^[1-5]xx$";
    const NOUN: &'static str = "a class of statuses";
    const EXAMPLE: &'static str = "5xx";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        let digit = text.strip_suffix("xx").filter(|_| matches_pattern!(StatusClass, text));
        match digit.and_then(|digit| digit.parse::<u16>().ok()) {
            Some(digit) => Ok(Self(digit * 100)),
            None => Err(InvalidValue::new(
                format!("`{}` is not a status or a class of statuses", shown(text)),
                "write a status such as 401, or a class such as 5xx",
            )),
        }
    }
}
