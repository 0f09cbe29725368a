//! Properties of responses: classes of statuses, and the source of the actual cost.

use super::super::problem::{InvalidValue, shown};
use super::{Form, HeaderName};

/// A class of statuses: `5xx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatusClass(u16);

impl StatusClass {
    /// Returns the first status of the class: 500.
    #[must_use]
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
        let digit = text.strip_suffix("xx").and_then(|digit| digit.parse::<u16>().ok());
        match digit.filter(|digit| (1..=5).contains(digit) && text.len() == 3) {
            Some(digit) => Ok(Self(digit * 100)),
            None => Err(InvalidValue::new(
                format!("`{}` is not a status or a class of statuses", shown(text)),
                "write a status such as 401, or a class such as 5xx",
            )),
        }
    }
}

/// The source of the actual cost of a request: `header:NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SettleSource {
    /// `header:NAME`: a whole number in a response header.
    Header(HeaderName),
}

impl Form for SettleSource {
    const FORMAT: &'static str = "settle-source";
    const PATTERN: &'static str = r"^header:[\s\S]+$";
    const NOUN: &'static str = "a source of the cost";
    const EXAMPLE: &'static str = "header:x-cost";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        match text.strip_prefix("header:") {
            Some(name) => Ok(Self::Header(HeaderName::read(name)?)),
            None => Err(InvalidValue::new(
                format!("`{}` is not a source of the cost", shown(text)),
                "write header:NAME with the response header that has the cost",
            )),
        }
    }
}
