//! Path globs. Paths and globs are normalized ([`normal`](super::normal)), so an operator may write either `/users/@me`
//! or `/users/%40me`.

use std::borrow::Cow;
use std::fmt;

use tollgate::InvalidLimit;
use tollgate::internal::is_control_or_format;

use super::normal::path::{has_upper_case, spell_glob, without_case};
use super::normal::{CleanPath, PathCase, PathReading};

/// Longer than any path that servers accept in practice.
const MAX_BYTES: usize = 2048;
/// Characters of an invalid text in an error.
const MAX_SHOWN: usize = 80;

/// A path pattern: `*` matches anything within one segment, `**` any number of whole segments.
///
/// ```
/// use tollgate_rules::PathGlob;
///
/// let glob: PathGlob = "/api/**".parse()?;
/// assert!(glob.matches("/api") && glob.matches("/api/v1/users") && !glob.matches("/apis"));
/// let glob: PathGlob = "/users/*/photo-*.png".parse()?;
/// assert!(glob.matches("/users/42/photo-1.png") && !glob.matches("/users/4/2/photo-1.png"));
/// # Ok::<(), tollgate_rules::InvalidGlob>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathGlob {
    pub(super) segments: Box<[Segment]>,
}

/// A segment of a glob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    Literal(Box<str>),
    /// `*` by itself.
    One,
    /// Text with `*`.
    Pattern(Box<str>),
    /// `**`.
    Any,
}

/// The error of a text that is not a glob: the problem and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidGlob {
    text: String,
    problem: &'static str,
    fix: Cow<'static, str>,
}

impl InvalidGlob {
    pub(super) fn new(text: &str, problem: &'static str, fix: impl Into<Cow<'static, str>>) -> Self {
        Self { text: shown(text), problem, fix: fix.into() }
    }

    /// Returns the problem, without the fix.
    #[doc(hidden)]
    pub fn problem(&self) -> String {
        format!("`{}` {}", self.text, self.problem)
    }

    /// Returns the fix.
    #[doc(hidden)]
    pub fn fix(&self) -> &str {
        &self.fix
    }

    /// Returns the error for a field of a rule.
    pub(super) fn of_field(&self, field: &'static str) -> InvalidLimit {
        InvalidLimit::new(field, self.problem(), self.fix.clone())
    }
}

impl fmt::Display for InvalidGlob {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "`{}` {}: {}", self.text, self.problem, self.fix)
    }
}

impl std::error::Error for InvalidGlob {}

impl std::str::FromStr for PathGlob {
    type Err = InvalidGlob;

    fn from_str(text: &str) -> Result<Self, InvalidGlob> {
        fn invalid(text: &str, problem: &'static str, fix: impl Into<Cow<'static, str>>) -> InvalidGlob {
            InvalidGlob::new(text, problem, fix)
        }
        if text.len() > MAX_BYTES {
            return Err(invalid(text, "is longer than 2048 bytes", "match a prefix of it with **"));
        }
        if let Some((problem, fix)) = of_another_notation(text) {
            return Err(invalid(text, problem, fix));
        }
        let Some(rest) = text.strip_prefix('/') else {
            let fix = format!("write /{}", shown(text));
            return Err(invalid(text, "matches no request, because every path starts with `/`", fix));
        };
        if text.contains(['?', '#']) {
            let fix = "remove the `?` or `#` and the text after it, and match the query in `when`";
            return Err(invalid(text, "matches no request, because a path has no query", fix));
        }
        if text.contains(['{', '}']) {
            return Err(invalid(text, "has braces", "write * for one segment and ** for any number"));
        }
        if text.chars().any(|letter| letter.is_whitespace() || letter.is_control()) {
            let problem = "matches no request, because paths have no spaces";
            return Err(invalid(text, problem, "write %20 for a space"));
        }
        for segment in rest.split('/') {
            if segment.contains("**") && segment != "**" {
                let fix = "put ** alone between slashes, or write * for part of a segment";
                return Err(invalid(text, "has a `**` next to other text", fix));
            }
            if matches!(segment, "." | "..") {
                let problem = "matches no request, because `.` and `..` are resolved first";
                return Err(invalid(text, problem, "write the resolved path"));
            }
        }
        let spelled = rest.split('/').map(spell_glob);
        let mut segments: Vec<Segment> =
            spelled.filter(|text| !text.is_empty() && text != ".").map(Segment::new).collect();
        segments.dedup_by(|one, other| matches!((one, other), (Segment::Any, Segment::Any)));
        if segments.iter().any(|segment| matches!(segment, Segment::Literal(text) if &**text == "..")) {
            return Err(invalid(text, "has .. in it, which no path has once it is resolved", "write the path itself"));
        }
        // With more than one in the middle, a crafted path would take quadratic time.
        let last = segments.len().saturating_sub(1);
        if segments[..last].iter().filter(|segment| matches!(segment, Segment::Any)).count() > 1 {
            return Err(invalid(text, "has more than one ** before its end", "use one, or two globs"));
        }
        Ok(Self { segments: segments.into() })
    }
}

/// Returns the problem and the fix of a path in the notation of a router or of regular expressions.
fn of_another_notation(text: &str) -> Option<(&'static str, String)> {
    let parameter = || Some(("has a router parameter, but paths are globs", parameter_fix(text)?));
    // The pattern of a parameter, as in `{id:[0-9]+}`, is no reason to take the whole path for one.
    if text.starts_with('/')
        && text.contains('{')
        && let Some(found) = parameter()
    {
        return Some(found);
    }
    match regex_fix(text) {
        Some(fix) => Some(("looks like a regular expression, but paths are globs", fix)),
        None => parameter(),
    }
}

/// Returns the fix if a path is a regular expression. `/files/report.*` and `/Products(5)` are not. As a glob it would
/// match these characters literally, which is rarely intended.
fn regex_fix(text: &str) -> Option<String> {
    let is_anchored = text.starts_with('^') || text.ends_with('$');
    let has_class = text.contains('\\') || ["[^", "[0-9", "[a-z", "[A-Z"].iter().any(|class| text.contains(class));
    let has_group = text.contains("(?") || text.contains("(.") || (text.contains('(') && text.contains('|'));
    let begins_anything = |segment: &str| segment.starts_with(".*") || segment.starts_with(".+");
    if !is_anchored && !has_class && !has_group && !text.split('/').any(begins_anything) {
        return None;
    }
    let ends = text.ends_with('$');
    let plain = text.trim_start_matches('^').trim_end_matches('$');
    let is_literal =
        |segment: &&str| segment.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_~".contains(&byte));
    let segments: Vec<&str> = plain.split('/').filter(|segment| !segment.is_empty()).collect();
    let literal: Vec<&str> = segments.iter().copied().take_while(is_literal).collect();
    let path = format!("/{}", literal.join("/"));
    let is_rest = |segment: &&str| matches!(*segment, ".*" | ".+" | "(.*)" | "(.+)");
    let glob = match segments.get(literal.len()..).unwrap_or_default() {
        [] if ends => format!("write {} for that path alone", shown(&path)),
        [one] if literal.is_empty() && is_rest(one) => "write /** for every path".into(),
        _ if literal.is_empty() => "write a glob for each path, where * matches one segment and ** any number".into(),
        _ => format!("write {}/** for {} and everything under it", shown(&path), shown(&path)),
    };
    let escaped = text.chars().find_map(|letter| match letter {
        '^' => Some("%5E"),
        '$' => Some("%24"),
        '.' => Some("%2E"),
        '(' => Some("%28"),
        '[' => Some("%5B"),
        _ => None,
    });
    let letters = escaped
        .map_or_else(String::new, |escape| format!("; to match these characters literally, escape them: {escape}"));
    Some(format!("{glob}; a limit can match a regular expression in `when: request.path.matches(\"…\")`{letters}"))
}

/// Returns the fix if a segment is a parameter such as `:id`, `<id>` or `{id}`.
fn parameter_fix(text: &str) -> Option<String> {
    let parameter = |segment: &str| {
        if let Some(name) = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            let is_rest = name.starts_with('*') || name.ends_with(":.*") || name.ends_with(":.+");
            return Some(if is_rest { "**" } else { "*" });
        }
        let name = segment.strip_prefix(':').or_else(|| segment.strip_prefix('<')?.strip_suffix('>'))?;
        let begins = name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_');
        begins.then(|| if name.ends_with(['*', '+']) || name.starts_with("path:") { "**" } else { "*" })
    };
    if !text.split('/').any(|segment| parameter(segment).is_some()) {
        return None;
    }
    let glob: Vec<&str> = text.split('/').map(|segment| parameter(segment).unwrap_or(segment)).collect();
    let mut fix = format!("write {}, where * matches one segment and ** any number", shown(&glob.join("/")));
    if text.contains("/:") {
        fix.push_str("; to match a colon literally, escape it: %3A");
    }
    Some(fix)
}

/// Returns a text for an error, without control characters and not too long.
fn shown(text: &str) -> String {
    let printable = |letter: char| if is_control_or_format(letter) { ' ' } else { letter };
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => text[..end].chars().map(printable).chain(['…']).collect(),
        None => text.chars().map(printable).collect(),
    }
}

impl Segment {
    fn new(text: String) -> Self {
        match text.as_str() {
            "*" => Self::One,
            "**" => Self::Any,
            _ if text.contains('*') => Self::Pattern(text.into()),
            _ => Self::Literal(text.into()),
        }
    }

    /// Returns `true` if the segment matches. If case is ignored, `text` must be without case.
    pub(super) fn matches(&self, text: &str, case: PathCase) -> bool {
        match (self, case) {
            (Self::Literal(literal), PathCase::Sensitive) => **literal == *text,
            (Self::Literal(literal), PathCase::Insensitive) if !literal.contains('%') => {
                literal.eq_ignore_ascii_case(text)
            }
            (Self::Literal(literal), PathCase::Insensitive) => without_case(literal) == text,
            (Self::Pattern(pattern), PathCase::Sensitive) => wildcard(pattern.as_bytes(), text.as_bytes()),
            (Self::Pattern(pattern), PathCase::Insensitive) => {
                wildcard(without_case(pattern).as_bytes(), text.as_bytes())
            }
            (Self::One | Self::Any, _) => true,
        }
    }
}

impl PathGlob {
    /// Returns `true` if any reading of the path matches, in any spelling. A path that cannot be read safely does not
    /// match.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        let readings = CleanPath::new(path).map(|path| path.readings(PathReading::default()));
        readings.is_ok_and(|readings| readings.iter().any(|path| self.matches_reading(path, PathCase::Sensitive)))
    }

    /// Returns `true` if one reading of a path matches.
    pub(super) fn matches_reading(&self, path: &str, case: PathCase) -> bool {
        matches_from(&self.segments, path, case)
    }

    /// Returns `true` if the glob has upper-case letters.
    pub(super) fn has_upper_case(&self) -> bool {
        self.segments.iter().any(|segment| match segment {
            Segment::Literal(text) | Segment::Pattern(text) => has_upper_case(text),
            Segment::One | Segment::Any => false,
        })
    }

    /// Returns `true` if the glob matches every path.
    pub(super) fn is_everything(&self) -> bool {
        matches!(&*self.segments, [Segment::Any])
    }
}

impl fmt::Display for PathGlob {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for segment in &self.segments {
            let text = match segment {
                Segment::Literal(text) | Segment::Pattern(text) => text,
                Segment::One => "*",
                Segment::Any => "**",
            };
            write!(out, "/{text}")?;
        }
        if self.segments.is_empty() { out.write_str("/") } else { Ok(()) }
    }
}

fn matches_from(globs: &[Segment], path: &str, case: PathCase) -> bool {
    let Some((glob, further)) = globs.split_first() else {
        return first_segment(path).is_none();
    };
    if matches!(glob, Segment::Any) {
        let mut rest = path;
        loop {
            if further.is_empty() || matches_from(further, rest, case) {
                return true;
            }
            match first_segment(rest) {
                Some((_, after)) => rest = after,
                None => return false,
            }
        }
    }
    first_segment(path).is_some_and(|(segment, rest)| glob.matches(segment, case) && matches_from(further, rest, case))
}

/// Splits a normalized path into its first segment and the rest.
pub(super) fn first_segment(path: &str) -> Option<(&str, &str)> {
    let path = path.strip_prefix('/').unwrap_or(path);
    if path.is_empty() {
        return None;
    }
    // Segments are short: a byte loop is faster than setting up a search.
    let slash = path.bytes().position(|byte| byte == b'/');
    Some(slash.map_or((path, ""), |slash| path.split_at(slash)))
}

/// Returns `true` if `text` matches a pattern in which `*` matches anything. Takes linear time in both, times the
/// length of the pattern if stars repeat.
pub(super) fn wildcard(pattern: &[u8], text: &[u8]) -> bool {
    wildcard_by(pattern, text, |byte| byte)
}

/// Returns `true` if `text` in lower case matches a pattern.
pub(super) fn wildcard_in_any_case(pattern: &[u8], text: &[u8]) -> bool {
    wildcard_by(pattern, text, |byte| byte.to_ascii_lowercase())
}

fn wildcard_by(pattern: &[u8], text: &[u8], form: impl Fn(u8) -> u8) -> bool {
    let (mut at, mut seen) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while seen < text.len() {
        if pattern.get(at) == Some(&b'*') {
            star = Some((at, seen));
            at += 1;
        } else if pattern.get(at) == Some(&form(text[seen])) {
            (at, seen) = (at + 1, seen + 1);
        } else if let Some((star_at, star_seen)) = star {
            star = Some((star_at, star_seen + 1));
            (at, seen) = (star_at + 1, star_seen + 1);
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn glob(text: &str) -> PathGlob {
        text.parse().unwrap()
    }

    #[test]
    fn globs_match_whole_paths() {
        let cases = [
            ("/", &["/", "//", "/."][..], &["/a"][..]),
            ("/a", &["/a", "/a/", "//a", "/%61", "/b/../a", "/./a"], &["/", "/a/b", "/A", "/aa"]),
            ("/a/*", &["/a/b", "/a/b/"], &["/a", "/a/b/c"]),
            ("/a/**", &["/a", "/a/", "/a/b", "/a/b/c", "/a%2Fb/../a"], &["/ab", "/", "/b/a", "/a/../b"]),
            ("/**", &["/", "/a", "/a/b"], &[]),
            ("/**/z", &["/z", "/a/z", "/a/b/z"], &["/", "/z/a"]),
            ("/a/**/z/**", &["/a/z", "/a/b/z/c", "/a/z/z"], &["/a", "/a/b"]),
            ("/v*/x", &["/v/x", "/v1/x"], &["/w/x", "/v1/y", "/v1"]),
            ("/*.json", &["/a.json", "/.json"], &["/a.jsonp", "/a/b.json"]),
            ("/a%2fb", &["/a%2Fb", "/a%2fb"], &["/a/b"]),
            ("/users/@me", &["/users/@me", "/users/%40me", "/users/%40%6De"], &["/users/me"]),
            ("/users/%40me", &["/users/@me"], &[]),
            ("/%61b*", &["/abc", "/%61b%63"], &["/%2561bc"]),
            ("/café/*", &["/caf%c3%A9/x", "/café/x"], &["/caf%C3/x", "/cafe/x"]),
            ("/%2a", &["/*", "/%2A"], &["/a"]),
            ("/a%20b", &["/a b", "/a%20b"], &["/a+b"]),
            ("/%2e/a", &["/a"], &["/"]),
            ("/100%", &["/100%", "/100%25"], &["/100"]),
            ("/a", &["a", "../a", "./a", "b/../a"], &[]),
        ];
        for (text, yes, no) in cases {
            let glob = glob(text);
            yes.iter().for_each(|path| assert!(glob.matches(path), "{text} {path}"));
            no.iter().for_each(|path| assert!(!glob.matches(path), "{text} {path}"));
        }
    }

    #[test]
    fn an_invalid_glob_reports_the_fix() {
        for (text, fix) in [
            ("api/**", "write /api/**"),
            ("/a**", "put ** alone"),
            ("/a/../b", "write the resolved path"),
            ("/a/%2e%2E/b", "write the path itself"),
            ("/**/a/**/b", "use one"),
            ("/a?b=c", "match the query in `when`"),
        ] {
            let error = text.parse::<PathGlob>().unwrap_err().to_string();
            assert!(error.contains(fix), "{error}");
        }
    }

    proptest! {
        #[test]
        fn wildcards_agree_with_backtracking(pattern in "[ab*]{0,6}", text in "[ab]{0,8}") {
            fn slow(pattern: &[u8], text: &[u8]) -> bool {
                match pattern.split_first() {
                    None => text.is_empty(),
                    Some((b'*', rest)) => (0..=text.len()).any(|from| slow(rest, &text[from..])),
                    Some((byte, rest)) => text.first() == Some(byte) && slow(rest, &text[1..]),
                }
            }
            prop_assert_eq!(wildcard(pattern.as_bytes(), text.as_bytes()), slow(pattern.as_bytes(), text.as_bytes()));
        }
    }

    #[test]
    fn globs_and_paths_of_services_are_not_refused() {
        for text in [
            "/",
            "/**",
            "/api/**",
            "/files/report.*",
            "/*.json",
            "/.well-known/**",
            "/Products(5)",
            "/odata/$metadata",
            "/v1/docs/7:batchGet",
            "/users/@me",
            "/pages/[id].js",
            "/a/%3Aid",
            "/a/%2E*",
            "/price/10$/x",
        ] {
            assert_eq!((regex_fix(text), parameter_fix(text)), (None, None), "{text}");
        }
    }

    #[test]
    fn suggested_spellings_are_valid() {
        let paths =
            ["^/api", "^/api/v1$", "/api/.*", ".*", "/users/[0-9]+", "^/a/(b|c)$", "/a/:id/b", "/f/:rest*", "/u/<id>"];
        for text in paths {
            let fix = regex_fix(text).or_else(|| parameter_fix(text)).unwrap();
            let path = fix.strip_prefix("write ").unwrap().split([' ', ',']).next().unwrap();
            assert!(path.parse::<PathGlob>().is_ok(), "{fix}");
            assert_eq!((regex_fix(path), parameter_fix(path)), (None, None), "{fix}");
        }
    }
}
