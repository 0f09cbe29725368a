//! Tests of accepted expressions with their values, of rejected ones with their errors, and of properties.

mod accepted;
mod guards;
mod hostile;
mod properties;
mod refused;

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue};
use serde_json::{Map, Value, json};

use super::{Expression, Facts, Input, ReadErrors};

/// An owned request, so that a test can define it in one place.
#[derive(Debug)]
struct Request {
    target: String,
    headers: HeaderMap,
    claims: Option<Map<String, Value>>,
    client: Option<IpAddr>,
}

impl Request {
    /// Returns a request in which every variable has a value.
    fn typical() -> Self {
        let mut headers = HeaderMap::new();
        headers.insert("x-beta", HeaderValue::from_static("1"));
        headers.insert("x-cost", HeaderValue::from_static("7"));
        headers.insert("x-minus", HeaderValue::from_static("-7"));
        headers.append("accept", HeaderValue::from_static("text/html"));
        headers.append("accept", HeaderValue::from_static("*/*"));
        headers.insert("x-latin", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        let claims = json!({
            "sub": "ann", "plan": "gold", "level": 3, "big": 18_446_744_073_709_551_615_u64, "ratio": 0.5,
            "admin": true, "none": null, "roles": ["dev", "ops"], "realm": { "access": { "roles": ["root"] } },
        });
        Self {
            target: "/API/Search?q=a+b&page=2&q=later".to_owned(),
            headers,
            claims: claims.as_object().cloned(),
            client: "10.1.2.3".parse().ok(),
        }
    }

    fn input<T>(&self, evaluate: impl FnOnce(&Input<'_>) -> T) -> T {
        let descriptors = [("tier", "free"), ("tenant", "acme")];
        let facts = Facts::new("POST", &self.target)
            .host("API.example.com:8443")
            .headers(&self.headers)
            .route("search")
            .domain("edge")
            .descriptors(&descriptors);
        evaluate(&Input {
            facts,
            path: "/api/search",
            client: self.client,
            errors: &ReadErrors::default(),
            claims: self.claims.as_ref(),
        })
    }

    fn holds(&self, text: &str) -> Result<bool, String> {
        let condition = Expression::condition(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        self.input(|input| condition.holds(input)).map_err(|error| error.to_string())
    }

    fn is_true(&self, text: &str) -> bool {
        self.holds(text) == Ok(true)
    }

    fn units(&self, text: &str) -> Result<u64, String> {
        let cost = Expression::cost(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        self.input(|input| cost.units(input)).map_err(|error| error.to_string())
    }
}
