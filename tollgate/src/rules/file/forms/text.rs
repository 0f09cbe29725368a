//! Names, expressions, sizes and content types.

use super::super::problem::{InvalidValue, shown};
use super::{Form, HeaderName};
use crate::limit::check_name;

/// The name of a limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LimitName(String);

impl LimitName {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Form for LimitName {
    const FORMAT: &'static str = "limit-name";
    const PATTERN: &'static str = r"^[^\u0000-\u001f\u007f]{1,128}$";
    const NOUN: &'static str = "a name";
    const EXAMPLE: &'static str = "per-user";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        check_name(text).map_err(|error| InvalidValue::new(error.problem(), error.fix()))?;
        Ok(Self(text.to_owned()))
    }
}

/// The prefix of all keys on a Redis.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyPrefix(String);

impl KeyPrefix {
    /// Returns the prefix, without the colon that follows it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Form for KeyPrefix {
    const FORMAT: &'static str = "key-prefix";
    const PATTERN: &'static str = r"^[A-Za-z0-9_.:/-]{1,64}$";
    const NOUN: &'static str = "a prefix";
    const EXAMPLE: &'static str = "checkout";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        // The same rule as in `redis/names.rs`: braces would be the hash tag of a cluster.
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/');
        if text.is_empty() || text.len() > 64 || !text.bytes().all(is_good) {
            let problem = format!("`{}` is not a key prefix", shown(text));
            return Err(InvalidValue::new(problem, "use at most 64 letters, digits and _ - . : /"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// The name of a store in `stores`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StoreName(String);

impl StoreName {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
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
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
        if text.is_empty() || text.len() > 64 || !text.bytes().all(is_good) {
            let problem = format!("`{}` is not the name of a store", shown(text));
            return Err(InvalidValue::new(problem, "use at most 64 letters, digits and _ - ."));
        }
        Ok(Self(text.to_owned()))
    }
}

/// A CEL expression. `meaning` checks that it compiles.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expression(String);

impl Expression {
    /// Returns the expression as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
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
#[non_exhaustive]
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

/// A number of bytes: `512MiB`, `2GiB`, `64KiB`, `1000000B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSize(u64);

impl ByteSize {
    pub(in crate::rules::file) const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl Form for ByteSize {
    const FORMAT: &'static str = "bytes";
    const PATTERN: &'static str = "^[0-9]+ ?(B|KiB|MiB|GiB)$";
    const NOUN: &'static str = "a size";
    const EXAMPLE: &'static str = "512MiB";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = || {
            let problem = format!("`{}` is not a size", shown(text));
            InvalidValue::new(problem, "write a whole number and one of B, KiB, MiB or GiB, such as 512MiB")
        };
        let unit_at = text.find(|letter: char| !letter.is_ascii_digit()).ok_or_else(invalid)?;
        let (count, unit) = text.split_at(unit_at);
        let shift = match unit.strip_prefix(' ').unwrap_or(unit) {
            "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            _ => return Err(invalid()),
        };
        let count: u64 = count.parse().map_err(|_| invalid())?;
        count.checked_mul(1 << shift).map(Self).ok_or_else(invalid)
    }
}

/// A content type, such as `text/html; charset=utf-8`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContentType(String);

impl ContentType {
    /// Returns the content type as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Form for ContentType {
    const FORMAT: &'static str = "content-type";
    const PATTERN: &'static str = r"^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+ *(;[ -~]*)?$";
    const NOUN: &'static str = "a content type";
    const EXAMPLE: &'static str = "text/html";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        let (kind, parameters) = text.split_once(';').unwrap_or((text, ""));
        let is_word = |word: &str| {
            let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&^_.+-".contains(&byte);
            !word.is_empty() && word.bytes().all(legal)
        };
        let (whole, part) = kind.trim_end_matches(' ').split_once('/').unwrap_or((kind, ""));
        if is_word(whole) && is_word(part) && parameters.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            return Ok(Self(text.to_owned()));
        }
        let problem = format!("`{}` is not a content type", shown(text));
        Err(InvalidValue::new(problem, "write one such as text/html or application/json"))
    }
}
