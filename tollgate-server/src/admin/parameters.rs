//! The query parameters of a request to the admin API.

use std::str::FromStr;

use axum::http::Uri;

use crate::service::error_body::{ErrorBody, quoted};

/// The parameters of a request. Their number is bounded by the length of the target.
#[derive(Debug)]
pub(super) struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Parses the query of a request. Unknown parameters are refused, because a typo would be ignored otherwise.
    pub(super) fn parse(uri: &Uri, known: &[&str]) -> Result<Self, ErrorBody> {
        let query = uri.query().unwrap_or_default();
        let all: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        match all.iter().find(|(name, _)| !known.contains(&&**name)) {
            Some((name, _)) => {
                let message = format!("unknown parameter {}: use {}", quoted(name), known.join(", "));
                Err(ErrorBody::invalid(message))
            }
            None => Ok(Self(all)),
        }
    }

    /// Returns all values of a parameter, in their order.
    pub(super) fn all(&self, name: &str) -> Vec<&str> {
        self.0.iter().filter(|(given, _)| given == name).map(|(_, value)| value.as_str()).collect()
    }

    /// Returns the value of a parameter that is given at most once.
    pub(super) fn one(&self, name: &str) -> Result<Option<&str>, ErrorBody> {
        match *self.all(name) {
            [] => Ok(None),
            [value] => Ok(Some(value)),
            _ => Err(ErrorBody::invalid(format!("{name} is given twice: give it once"))),
        }
    }

    /// Returns the value of a parameter, or its default. `expected` names the values that are allowed.
    pub(super) fn value<T: FromStr>(&self, name: &str, default: T, expected: &str) -> Result<T, ErrorBody> {
        match self.one(name)? {
            None => Ok(default),
            Some(text) => {
                let invalid = |_| ErrorBody::invalid(format!("{name} is {}: use {expected}", quoted(text)));
                text.parse().map_err(invalid)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_and_checked() {
        let parse = |target: &str| Parameters::parse(&target.parse().unwrap(), &["key", "count"]);
        let parameters = parse("/v1/keys?key=a%20b&key=%2Fc+d&count=3").unwrap();
        assert_eq!(parameters.all("key"), ["a b", "/c d"]);
        assert_eq!(parameters.value("count", 1, "a number").unwrap(), 3);
        assert_eq!(parse("/").unwrap().value("count", 1, "a number").unwrap(), 1);
        let message = |result: Result<u32, ErrorBody>| result.unwrap_err().message;
        assert_eq!(message(parameters.value("key", 1, "a number")), "key is given twice: give it once");
        let parameters = parse("/?count=x").unwrap();
        assert_eq!(message(parameters.value("count", 1, "a number")), "count is `x`: use a number");
        assert_eq!(parse("/?kye=a").unwrap_err().message, "unknown parameter `kye`: use key, count");
    }
}
