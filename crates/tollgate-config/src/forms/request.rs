//! Conditions on requests: globs of paths and hosts, methods, header names.

use tollgate_rules::internal::config::{FILE_TOO_LARGE, MAX_PATTERN_BYTES, PatternBudget, PatternError};

use super::super::problem::{InvalidValue, shown};
use super::net::is_host_name;
use super::{form, nearest};

form! {
    /// A glob of paths: `*` matches anything within a segment, `**` any number of whole segments.
    text PathGlob { format: "path-glob", noun: "a path", example: "/api/**", pattern: r"^/[^\s?#{}]*$" }
}

impl PathGlob {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let read = text.parse::<tollgate_rules::PathGlob>();
        read.map_err(|error| InvalidValue::new(format!("path {}", error.problem()), error.fix()))?;
        Ok(Self(text.to_owned()))
    }

    /// Returns one spelling for globs that differ only in repeated `**`: `/a/**/**` is `/a/**`.
    pub(crate) fn normal(&self) -> String {
        let mut segments: Vec<&str> = self.0.split('/').collect();
        segments.dedup_by(|a, b| *a == "**" && *b == "**");
        segments.join("/")
    }
}

form! {
    /// A literal path, or the start of one.
    text PathText { format: "path", noun: "a path", example: "/api", pattern: r"^/[!-~]*$" }
}

impl PathText {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = |problem: &str, fix: &str| InvalidValue::new(format!("path `{}` {problem}", shown(text)), fix);
        if !text.starts_with('/') {
            return Err(invalid("does not start with a slash", "start it with one, such as /api"));
        }
        if text.contains('#') || text.parse::<http::uri::PathAndQuery>().is_err() {
            return Err(invalid("has characters that a path cannot have", "escape them, such as %20 for a space"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// A regular expression.
#[derive(Clone, Debug)]
pub struct Pattern(regex::Regex);

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

form! {
    Pattern { format: "pattern", noun: "a regular expression", example: "^/api/(.*)$", pattern: ".+" }
}

impl Pattern {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        Self::read_within(text, &mut PatternBudget::default())
    }

    /// Replaces the first match in a path by `to`, in which `$1` is the match of the first group. Returns the path and,
    /// if `to` has a question mark, the query. What the client has chosen is escaped there, so that it adds no parameter.
    /// Returns `None` if nothing matches.
    pub fn rewrite(&self, path: &str, to: &str) -> Option<(String, Option<String>)> {
        let groups = self.0.captures(path)?;
        let whole = groups.get(0)?;
        let (to_path, to_query) = to.split_once('?').map_or((to, None), |(path, query)| (path, Some(query)));
        let mut rewritten = path[..whole.start()].to_owned();
        groups.expand(to_path, &mut rewritten);
        let rest = &path[whole.end()..];
        let Some(to_query) = to_query else { return Some((rewritten + rest, None)) };
        let mut query = String::new();
        expand_escaped(to_query, &groups, &mut query);
        push_escaped(rest, &mut query);
        Some((rewritten, Some(query)))
    }

    /// Returns the same expression without regard to case, or `None` if that takes too much memory.
    pub fn case_insensitive(&self) -> Option<Self> {
        let mut builder = regex::RegexBuilder::new(self.0.as_str());
        builder.size_limit(MAX_PATTERN_BYTES).dfa_size_limit(MAX_PATTERN_BYTES);
        builder.case_insensitive(true).build().ok().map(Self)
    }

    /// Reads a pattern that shares a budget with others of the file.
    pub(crate) fn read_within(text: &str, patterns: &mut PatternBudget) -> Result<Self, InvalidValue> {
        /// A pattern of a path has some dozen characters. Parsing takes two hundred times the memory of the text,
        /// before the bound on the compiled pattern applies.
        const MAX_TEXT_BYTES: usize = 1024;
        if text.len() > MAX_TEXT_BYTES {
            let problem = format!("a regular expression of {} bytes is too long", text.len());
            return Err(InvalidValue::new(problem, format!("use {MAX_TEXT_BYTES} bytes or less")));
        }
        patterns.compile(text).map(Self).map_err(|error| {
            let problem = match error {
                PatternError::TooLarge => format!("compiles to more than {MAX_PATTERN_BYTES} bytes"),
                PatternError::Syntax(reason) => format!("is not a regular expression ({reason})"),
                PatternError::FileTooLarge => return InvalidValue::new(FILE_TOO_LARGE.0, FILE_TOO_LARGE.1),
            };
            InvalidValue::new(format!("`{}` {problem}", shown(text)), "write one such as ^/api/(.*)$")
        })
    }
}

/// Expands a template as [`regex::Captures::expand`] does, with escaped groups.
fn expand_escaped(template: &str, groups: &regex::Captures<'_>, out: &mut String) {
    let mut rest = template;
    while let Some((literal, behind)) = rest.split_once('$') {
        out.push_str(literal);
        let is_named = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let bare = behind.bytes().take_while(is_named).count();
        let braced = behind.strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let (name, after) = match braced {
            _ if behind.starts_with('$') => ("", &behind[1..]),
            Some((name, after)) => (name, after),
            None => behind.split_at(bare),
        };
        rest = after;
        if name.is_empty() {
            out.push('$');
            continue;
        }
        let group = name.parse().map_or_else(|_| groups.name(name), |number: usize| groups.get(number));
        push_escaped(group.map_or("", |group| group.as_str()), out);
    }
    out.push_str(rest);
}

/// Appends a part of a path to a query. Everything but unreserved characters is escaped; escapes stay.
fn push_escaped(text: &str, out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let bytes = text.as_bytes();
    for (at, byte) in bytes.iter().enumerate() {
        let is_escape = |digits: &[u8]| digits.iter().all(u8::is_ascii_hexdigit);
        let stays = byte.is_ascii_alphanumeric()
            || matches!(byte, b'-' | b'.' | b'_' | b'~')
            || (*byte == b'%' && bytes.get(at + 1..at + 3).is_some_and(is_escape));
        if stays {
            out.push(char::from(*byte));
        } else {
            out.extend(['%', char::from(DIGITS[usize::from(byte >> 4)]), char::from(DIGITS[usize::from(byte & 15)])]);
        }
    }
}

form! {
    /// A host name, or `*.` and the end of one.
    text HostGlob {
        format: "host-glob", noun: "a host name", example: "api.example.com",
        pattern: r"^(\*\.)?[A-Za-z0-9_.:\[\]-]+$"
    }
}

impl HostGlob {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = |problem: &str, fix: String| InvalidValue::new(format!("host `{}` {problem}", shown(text)), fix);
        if let Some((_, host)) = text.split_once("://") {
            let host = host.split(['/', ':']).next().unwrap_or_default();
            return Err(invalid("has a scheme", format!("write {}", shown(host))));
        }
        let address = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if address.parse::<std::net::Ipv6Addr>().is_ok() {
            return if address.len() == text.len() {
                Err(invalid("is an IPv6 address without brackets", format!("write [{text}]")))
            } else {
                Ok(Self(text.to_ascii_lowercase()))
            };
        }
        if let Some((address, _)) = text.strip_prefix('[').map(|rest| rest.split_once(']').unwrap_or((rest, ""))) {
            return Err(match address.parse::<std::net::Ipv6Addr>() {
                Ok(_) => invalid("has a port, but ports are not compared", format!("write [{address}]")),
                Err(_) => invalid("is not an address", "write one such as [2001:db8::7]".to_owned()),
            });
        }
        if let Some((host, _)) = text.split_once(':') {
            let fix = format!("write {}", shown(host));
            return Err(invalid("has a port, but ports are not compared", fix));
        }
        let name = text.strip_prefix("*.").unwrap_or(text);
        if name.contains('*') {
            let fix = "write *.example.com for all names under a domain".into();
            return Err(invalid("has a `*` where it is not supported", fix));
        }
        if text.len() > 253 || !is_host_name(name) {
            return Err(invalid("is not a host name", "write a name such as api.example.com or *.example.com".into()));
        }
        Ok(Self(text.to_ascii_lowercase()))
    }
}

const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];

form! {
    /// A request method, in upper case.
    text MethodName {
        format: "method", noun: "a request method", example: "POST",
        pattern: "^[A-Z0-9!#$%&'*+.^_`|~-]+$"
    }
}

impl MethodName {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let problem = |problem: &str| format!("method `{}` {problem}", shown(text));
        if text == "*" {
            return Err(InvalidValue::new(problem("is not valid"), "remove `methods` to match all of them"));
        }
        let is_token = text.len() <= 64 && http::Method::from_bytes(text.as_bytes()).is_ok();
        if is_token && text.bytes().any(|byte| byte.is_ascii_lowercase()) {
            let fix = format!("write {}", text.to_ascii_uppercase());
            return Err(InvalidValue::new(problem("matches no request, because methods are in upper case"), fix));
        }
        if METHODS.contains(&text) {
            return Ok(Self(text.to_owned()));
        }
        if let Some(near) = nearest(text, METHODS) {
            return Err(InvalidValue::new(problem("is not a standard method"), format!("did you mean {near}?")));
        }
        if !is_token {
            return Err(InvalidValue::new(problem("is not valid"), "write a method such as GET or POST"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// A header name, in lower case.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HeaderName(http::HeaderName);

form! {
    HeaderName {
        format: "header-name", noun: "a header name", example: "x-user-id",
        pattern: "^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
    }
}

impl HeaderName {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        http::HeaderName::from_bytes(text.as_bytes()).map(Self).map_err(|_| {
            InvalidValue::new(
                format!("`{}` is not a header name", shown(text)),
                "use letters, digits and hyphens, such as x-user-id",
            )
        })
    }

    /// Returns the name in lower case.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    pub(crate) fn to_http(&self) -> http::HeaderName {
        self.0.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_chooses_adds_no_parameter() {
        let rewrite = |pattern: &str, to: &str, path: &str| Pattern::read(pattern).unwrap().rewrite(path, to);
        let some = |path: &str, query: Option<&str>| Some((path.to_owned(), query.map(str::to_owned)));
        for (pattern, to, path, expected) in [
            ("^/item/(.+)$", "/items?id=$1", "/item/7&admin=1", some("/items", Some("id=7%26admin%3D1"))),
            ("^/item/", "/items?id=", "/item/7;a=1", some("/items", Some("id=7%3Ba%3D1"))),
            (
                "^/(?<a>.)/(.+)$",
                "/${a}?x=$$$2&${a}y=$a&z=$3",
                "/p/q+%2F/'",
                some("/p", Some("x=$q%2B%2F%2F%27&py=p&z=")),
            ),
            ("^/a/(.*)$", "/b/$1", "/a/x&y=%3F", some("/b/x&y=%3F", None)),
            ("a", "b", "/a/a", some("/b/a", None)),
            ("x", "b", "/a", None),
        ] {
            assert_eq!(rewrite(pattern, to, path), expected, "{path}");
        }
    }
}
