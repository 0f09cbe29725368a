//! The request that a client of the decision service wants checked.
//!
//! The client is another service, so nothing is taken from its connection: a field that it leaves out is unknown.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use tollgate_rules::internal::{Unreadable, check_method};
use tollgate_rules::{Check, Gate};
use tollgate_rules::{Facts, RuleSet};
use tollgate_telemetry::unknown::Unknown;

use super::values::{OneOrMany, StringOrStrings};
use crate::service::error_body::quoted;

/// The same limit as for the headers of an HTTP request.
const MAX_HEADERS: usize = 100;

/// Far more descriptors than a check needs.
const MAX_DESCRIPTORS: usize = 100;

/// The default method and path.
const METHOD: &str = "GET";
const PATH: &str = "/";

/// A description of a request. Fields that are left out are unknown.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RequestFacts {
    /// `GET` by default. Registered methods must be in upper case.
    method: Option<String>,
    /// `/` by default; may have a query.
    path: Option<String>,
    /// With or without a port; the header `host` by default.
    host: Option<String>,
    /// The address that the request came from.
    ip: Option<IpAddr>,
    /// Header names and values. A value is a string, or a list of strings for a header that occurs several times.
    #[schemars(with = "Option<BTreeMap<String, StringOrStrings>>")]
    headers: Option<Headers>,
    /// Names and values for the key part `descriptor:NAME`.
    #[schemars(with = "Option<BTreeMap<String, String>>")]
    descriptors: Option<Descriptors>,
    /// For `match: { domain: … }`.
    domain: Option<String>,
}

/// Headers with case-insensitive, unique names. The order of duplicates would be ambiguous.
#[derive(Debug, Default)]
struct Headers(HeaderMap);

#[derive(Debug, Default)]
struct Descriptors(Vec<(String, String)>);

impl RequestFacts {
    /// Returns the problem with a path that no server would receive. Services would read it differently.
    pub(super) fn path_problem(&self) -> Option<&'static str> {
        let path = self.path.as_deref()?;
        if path != "*" && !path.starts_with('/') {
            return Some("does not begin with a slash: send the path of the URL, such as /api/users?page=2");
        }
        if path.contains('#') {
            return Some("has a fragment: send it without `#` and the text behind it");
        }
        let is_blank = |byte: u8| byte.is_ascii_whitespace() || byte.is_ascii_control();
        path.bytes().any(is_blank).then_some("has white space or control characters: encode or remove them")
    }

    /// Returns why the method is ambiguous, if it is. Some services read `post` as `POST`.
    pub(super) fn method_problem(&self) -> Option<&'static str> {
        let target = self.path.as_deref().unwrap_or(PATH);
        match check_method(self.method.as_deref().unwrap_or(METHOD), target).err()? {
            Unreadable::AsteriskTarget => Some("must be OPTIONS if the path is `*`: send OPTIONS, or another path"),
            _ => Some("is a registered method in another case: send it in upper case, such as POST"),
        }
    }

    pub(super) fn start(&self, gate: &Gate, cost: Option<u64>) -> Check {
        self.with_facts(cost, |facts| gate.check(facts))
    }

    /// Returns the plan of the request, if a limit has no numbers for it.
    pub(super) fn unknown_plan(&self, rules: &RuleSet) -> Option<Unknown> {
        self.with_facts(None, |facts| rules.unknown_plan(facts)).map(Unknown::Plan)
    }

    /// Returns whether a limit applies to the request.
    pub(super) fn meets_limit(&self, rules: &RuleSet) -> bool {
        self.with_facts(None, |facts| rules.apply_to(facts))
    }

    /// Returns the names of the request's descriptors.
    pub(super) fn descriptor_names(&self) -> impl Iterator<Item = &str> {
        self.descriptors.iter().flat_map(|all| &all.0).map(|(name, _)| &**name)
    }

    fn with_facts<T>(&self, cost: Option<u64>, with: impl FnOnce(&Facts<'_>) -> T) -> T {
        let descriptors: Vec<(&str, &str)> = self.descriptors.iter().flat_map(|all| all.0.iter()).map(pair).collect();
        let target = self.path.as_deref().unwrap_or(PATH);
        let method = self.method.as_deref().unwrap_or(METHOD);
        let mut facts = Facts::new(method, target).descriptors(&descriptors).served_elsewhere();
        if let Some(host) = &self.host {
            facts = facts.host(host);
        }
        if let Some(address) = self.ip {
            facts = facts.peer(address);
        }
        if let Some(headers) = &self.headers {
            facts = facts.headers(&headers.0);
        }
        if let Some(domain) = &self.domain {
            facts = facts.domain(domain);
        }
        if let Some(cost) = cost {
            facts = facts.cost(cost);
        }
        with(&facts)
    }
}

fn pair((name, value): &(String, String)) -> (&str, &str) {
    (name, value)
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamesAndValues;

        impl<'de> Visitor<'de> for NamesAndValues {
            type Value = Headers;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object of header names and their values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Headers, A::Error> {
                let mut headers = HeaderMap::new();
                while let Some((name, values)) = map.next_entry::<String, OneOrMany>()? {
                    insert(&mut headers, &name, &values).map_err(A::Error::custom)?;
                    if headers.len() > MAX_HEADERS {
                        return Err(A::Error::custom(format_args!(
                            "a request has at most {MAX_HEADERS} headers: send those that keys are made of"
                        )));
                    }
                }
                Ok(Headers(headers))
            }
        }

        deserializer.deserialize_map(NamesAndValues)
    }
}

fn insert(headers: &mut HeaderMap, name: &str, values: &OneOrMany) -> Result<(), String> {
    let parsed = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| format!("{} is not a header name: use letters, digits and hyphens", quoted(name)))?;
    if headers.contains_key(&parsed) {
        return Err(format!("{} is duplicated (header names are case-insensitive): send it once", quoted(name)));
    }
    for value in values.as_slice() {
        let value = HeaderValue::from_bytes(value.as_bytes())
            .map_err(|_| format!("the value of {} has control characters: remove them", quoted(name)))?;
        headers.append(parsed.clone(), value);
    }
    Ok(())
}

impl<'de> Deserialize<'de> for Descriptors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamesAndValues;

        impl<'de> Visitor<'de> for NamesAndValues {
            type Value = Descriptors;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object of names and their values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Descriptors, A::Error> {
                let mut descriptors: Vec<(String, String)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    if descriptors.iter().any(|(known, _)| *known == name) {
                        let problem = format!("{} is duplicated: send it once", quoted(&name));
                        return Err(A::Error::custom(problem));
                    }
                    if descriptors.len() == MAX_DESCRIPTORS {
                        return Err(A::Error::custom(format_args!(
                            "a request has at most {MAX_DESCRIPTORS} descriptors: send those that rules name"
                        )));
                    }
                    descriptors.push((name, value));
                }
                Ok(Descriptors(descriptors))
            }
        }

        deserializer.deserialize_map(NamesAndValues)
    }
}
