//! Where a request carries its token.

use std::borrow::Cow;

use http::header::{AUTHORIZATION, HeaderName};

use crate::facts::Facts;
use crate::normal::{ReadErrors, cookies, header, query};

const SCHEME: &str = "Bearer ";

/// Where a request carries its token. The default is `Authorization`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// In a header. The prefix `Bearer` is required only in `Authorization`.
    Header(HeaderName),
    /// A cookie.
    Cookie(String),
    /// A parameter of the query.
    Query(String),
}

impl Default for TokenSource {
    fn default() -> Self {
        Self::Header(AUTHORIZATION)
    }
}

impl TokenSource {
    /// Returns the unverified token. Several differing values are recorded as an error.
    pub fn token<'a>(&self, facts: &Facts<'a>, errors: &ReadErrors) -> Option<Cow<'a, str>> {
        match self {
            Self::Header(name) => {
                let value = header::header(facts.all_headers()?, name, errors)?;
                let text = match value {
                    Cow::Borrowed(value) => Cow::Borrowed(std::str::from_utf8(value).ok()?),
                    Cow::Owned(value) => Cow::Owned(String::from_utf8(value).ok()?),
                };
                match text.split_at_checked(SCHEME.len()) {
                    Some((scheme, token)) if scheme.eq_ignore_ascii_case(SCHEME) => Some(match &text {
                        Cow::Borrowed(text) => text[SCHEME.len()..].trim_ascii_start().into(),
                        Cow::Owned(_) => token.trim_ascii_start().to_owned().into(),
                    }),
                    _ if *name == AUTHORIZATION => None,
                    _ => Some(text),
                }
            }
            Self::Cookie(name) => {
                let value = cookies::cookie(facts.all_headers()?, name, errors)?;
                String::from_utf8(value.into_owned()).ok().map(Cow::Owned)
            }
            Self::Query(name) => query::query(facts.query()?, name, errors),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::*;

    /// Parses a source as in the rule file.
    fn source(text: &str) -> TokenSource {
        match text.split_once(':').unwrap() {
            ("header", name) => TokenSource::Header(name.parse().unwrap()),
            ("cookie", name) => TokenSource::Cookie(name.to_owned()),
            (_, name) => TokenSource::Query(name.to_owned()),
        }
    }

    fn found(text: &str, name: &'static str, value: &str) -> Option<String> {
        let headers = HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())]);
        let facts = Facts::new("GET", "/a?token=in.the.query&t=%41.b.c").headers(&headers);
        source(text).token(&facts, &ReadErrors::default()).map(Cow::into_owned)
    }

    #[test]
    fn a_token_is_read_from_its_source() {
        for (text, name, value, expected) in [
            ("header:authorization", "authorization", "Bearer a.b.c", Some("a.b.c")),
            ("header:Authorization", "authorization", "bEARER   a.b.c ", Some("a.b.c")),
            ("header:authorization", "authorization", "a.b.c", None),
            ("header:authorization", "authorization", "Basic a.b.c", None),
            ("header:authorization", "authorization", "Bearer", None),
            ("header:authorization", "authorization", "", None),
            ("header:authorization", "authorization", "Beärer a.b.c", None),
            ("header:authorization", "x-token", "Bearer a.b.c", None),
            ("header:x-token", "x-token", "a.b.c", Some("a.b.c")),
            ("header:x-token", "x-token", "Bearer a.b.c", Some("a.b.c")),
            ("cookie:token", "cookie", "x=1; token=a.b.c", Some("a.b.c")),
            ("cookie:token", "cookie", "x=1", None),
            ("query:token", "x-token", "a.b.c", Some("in.the.query")),
            ("query:t", "x-token", "a.b.c", Some("A.b.c")),
            ("query:other", "x-token", "a.b.c", None),
        ] {
            assert_eq!(found(text, name, value).as_deref(), expected, "{text} in {name}: {value}");
        }
    }

    #[test]
    fn a_request_without_headers_or_query_has_no_token() {
        for text in ["header:authorization", "cookie:token", "query:token"] {
            assert_eq!(source(text).token(&Facts::new("GET", "/"), &ReadErrors::default()), None);
        }
    }
}
