//! What of an answer matters to a limit: classes of statuses, and where a cost is told.

use super::super::problem::{InvalidValue, shown};
use super::{Form, HeaderName};

/// A class of statuses: `5xx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatusClass(u16);

impl StatusClass {
    /// The first status of the class: 500.
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
                format!("`{}` is no status and no class of them", shown(text)),
                "write a status such as 401, or a class such as 5xx",
            )),
        }
    }
}

/// Where an answer tells what it took: `header:NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SettleSource {
    /// `header:NAME`: a whole number in a header of the answer.
    Header(HeaderName),
}

impl Form for SettleSource {
    const FORMAT: &'static str = "settle-source";
    const PATTERN: &'static str = r"^header:[\s\S]+$";
    const NOUN: &'static str = "where an answer tells its cost";
    const EXAMPLE: &'static str = "header:x-cost";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        match text.strip_prefix("header:") {
            Some(name) => Ok(Self::Header(HeaderName::read(name)?)),
            None => Err(InvalidValue::new(
                format!("`{}` is no place where an answer tells its cost", shown(text)),
                "write header:NAME",
            )),
        }
    }
}
