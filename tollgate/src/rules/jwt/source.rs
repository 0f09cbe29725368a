//! Where in a request its token is.

use std::borrow::Cow;
use std::str::FromStr;

use http::header::{AUTHORIZATION, HeaderName};

use crate::rules::cookies::cookie;
use crate::rules::facts::Facts;
use crate::rules::query::query;

const SCHEME: &str = "Bearer ";

/// Where the token is looked for; in `Authorization` unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenSource {
    /// Behind `Bearer`, which only `Authorization` must have.
    Header(HeaderName),
    Cookie(String),
    Query(String),
}

impl Default for TokenSource {
    fn default() -> Self {
        Self::Header(AUTHORIZATION)
    }
}

impl TokenSource {
    /// The token, which nobody has verified yet. Of several headers of one name the first counts.
    pub(crate) fn token<'a>(&self, facts: &Facts<'a>) -> Option<Cow<'a, str>> {
        match self {
            Self::Header(name) => {
                let text = std::str::from_utf8(facts.header(name.as_str())?).ok()?.trim_ascii();
                match text.split_at_checked(SCHEME.len()) {
                    Some((scheme, token)) if scheme.eq_ignore_ascii_case(SCHEME) => {
                        Some(token.trim_ascii_start().into())
                    }
                    _ if *name == AUTHORIZATION => None,
                    _ => Some(text.into()),
                }
            }
            Self::Cookie(name) => std::str::from_utf8(cookie(facts.header_map()?, name)?).ok().map(Cow::Borrowed),
            Self::Query(name) => query(facts.query()?, name),
        }
    }
}

/// From `header:NAME`, `cookie:NAME` or `query:NAME`. The error is the fix.
impl FromStr for TokenSource {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FIX: &str = "use header:NAME, cookie:NAME or query:NAME";
        match text.split_once(':').ok_or(FIX)? {
            (_, "") => Err(FIX),
            ("header", name) => name.parse().map(Self::Header).map_err(|_| "use the name of a header after `header:`"),
            ("cookie", name) => Ok(Self::Cookie(name.to_owned())),
            ("query", name) => Ok(Self::Query(name.to_owned())),
            _ => Err(FIX),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::*;

    fn found(source: &str, name: &'static str, value: &str) -> Option<String> {
        let headers = HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())]);
        let facts = Facts::new("GET", "/a?token=in.the.query&t=%41.b.c").headers(&headers);
        source.parse::<TokenSource>().unwrap().token(&facts).map(Cow::into_owned)
    }

    #[test]
    fn a_token_is_found_where_it_is_looked_for() {
        for (source, name, value, expected) in [
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
            assert_eq!(found(source, name, value).as_deref(), expected, "{source} in {name}: {value}");
        }
    }

    #[test]
    fn a_request_without_headers_or_query_has_no_token() {
        for source in ["header:authorization", "cookie:token", "query:token"] {
            assert_eq!(source.parse::<TokenSource>().unwrap().token(&Facts::new("GET", "/")), None);
        }
    }

    #[test]
    fn a_wrong_source_is_answered_with_the_fix() {
        for text in ["", "authorization", "header:", "body:token", "Header:x"] {
            assert_eq!(text.parse::<TokenSource>(), Err("use header:NAME, cookie:NAME or query:NAME"), "{text}");
        }
        assert_eq!("header:a b".parse::<TokenSource>(), Err("use the name of a header after `header:`"));
        assert_eq!("header:AUTHORIZATION".parse(), Ok(TokenSource::default()));
    }
}
