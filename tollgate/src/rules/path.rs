//! Paths and the globs that match them.
//!
//! What is matched is the path as the service behind would understand it: a client cannot get round a rule by
//! writing `/api//x`, `/api/./x`, `/api/%78` or `/api/x/` for `/api/x`, nor `/users/%40me` for `/users/@me`. Globs
//! are brought to the same form, so an operator may write either.

use std::borrow::Cow;
use std::fmt;

/// A glob of more bytes than this is longer than any path that servers accept in practice.
const MAX_BYTES: usize = 2048;

/// A path pattern: `*` stands for anything within one segment, `**` for any number of whole segments.
///
/// ```
/// use tollgate::rules::PathGlob;
///
/// let glob: PathGlob = "/api/**".parse()?;
/// assert!(glob.matches("/api") && glob.matches("/api/v1/users") && !glob.matches("/apis"));
/// let glob: PathGlob = "/users/*/photo-*.png".parse()?;
/// assert!(glob.matches("/users/42/photo-1.png") && !glob.matches("/users/4/2/photo-1.png"));
/// # Ok::<(), tollgate::rules::InvalidGlob>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathGlob {
    pub(super) segments: Box<[Segment]>,
}

/// What stands between two slashes of a glob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    Literal(Box<str>),
    /// `*`, alone.
    One,
    /// Text with `*` in it.
    Pattern(Box<str>),
    /// `**`.
    Any,
}

/// Why a text is no glob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidGlob {
    text: String,
    problem: &'static str,
}

impl InvalidGlob {
    pub(super) fn new(text: &str, problem: &'static str) -> Self {
        Self { text: text.chars().take(80).collect(), problem }
    }
}

impl fmt::Display for InvalidGlob {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "`{}` {}", self.text, self.problem)
    }
}

impl std::error::Error for InvalidGlob {}

impl std::str::FromStr for PathGlob {
    type Err = InvalidGlob;

    fn from_str(text: &str) -> Result<Self, InvalidGlob> {
        let invalid = |problem| InvalidGlob::new(text, problem);
        if text.len() > MAX_BYTES {
            return Err(invalid("is longer than 2048 bytes; match a prefix of it with **"));
        }
        let Some(rest) = text.strip_prefix('/') else {
            return Err(invalid("does not begin with a slash; write /api/** rather than api/**"));
        };
        if text.contains(['?', '#']) {
            return Err(invalid("has a query in it; match the path alone, and the query in a `when` expression"));
        }
        let spelled = rest.split('/').map(decode_glob);
        let mut segments: Vec<Segment> =
            spelled.filter(|text| !text.is_empty() && text != ".").map(Segment::new).collect();
        segments.dedup_by(|one, other| matches!((one, other), (Segment::Any, Segment::Any)));
        if segments.iter().any(|segment| matches!(segment, Segment::Pattern(text) if text.contains("**"))) {
            return Err(invalid("has ** beside other text; ** stands alone between slashes, as in /api/**"));
        }
        if segments.iter().any(|segment| matches!(segment, Segment::Literal(text) if &**text == "..")) {
            return Err(invalid("has .. in it, which no path has once it is resolved; write the path itself"));
        }
        // More than one in the middle would cost a crafted path quadratic time.
        let last = segments.len().saturating_sub(1);
        if segments[..last].iter().filter(|segment| matches!(segment, Segment::Any)).count() > 1 {
            return Err(invalid("has more than one ** before its end; use one, or two globs"));
        }
        Ok(Self { segments: segments.into() })
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

    pub(super) fn matches(&self, text: &str) -> bool {
        match self {
            Self::Literal(literal) => **literal == *text,
            Self::Pattern(pattern) => wildcard(pattern.as_bytes(), text.as_bytes()),
            Self::One | Self::Any => true,
        }
    }
}

impl PathGlob {
    /// Whether the path matches, however it is written.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        self.matches_normal(&normal(path))
    }

    /// Whether a path in its normal form matches.
    pub(super) fn matches_normal(&self, path: &str) -> bool {
        matches_from(&self.segments, path)
    }

    /// Whether it matches every path.
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

fn matches_from(globs: &[Segment], path: &str) -> bool {
    let Some((glob, further)) = globs.split_first() else {
        return first_segment(path).is_none();
    };
    if matches!(glob, Segment::Any) {
        let mut rest = path;
        loop {
            if further.is_empty() || matches_from(further, rest) {
                return true;
            }
            match first_segment(rest) {
                Some((_, after)) => rest = after,
                None => return false,
            }
        }
    }
    first_segment(path).is_some_and(|(segment, rest)| glob.matches(segment) && matches_from(further, rest))
}

/// The first segment of a normal path, and the path after it.
pub(super) fn first_segment(path: &str) -> Option<(&str, &str)> {
    let path = path.strip_prefix('/').unwrap_or(path);
    if path.is_empty() {
        return None;
    }
    // Segments are short: looking at each byte is faster than setting up a search.
    let slash = path.bytes().position(|byte| byte == b'/');
    Some(slash.map_or((path, ""), |slash| path.split_at(slash)))
}

/// Whether text matches a pattern in which `*` stands for anything. Linear in both, but for a factor of the
/// pattern's length when stars repeat.
pub(super) fn wildcard(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while seen < text.len() {
        if pattern.get(at) == Some(&b'*') {
            star = Some((at, seen));
            at += 1;
        } else if pattern.get(at) == Some(&text[seen]) {
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

/// The path as a service understands it: what can be written without an escape is, all else is escaped in capitals,
/// `.`, `..` and empty segments are resolved, and no slash stands at the end.
pub(super) fn normal(path: &str) -> Cow<'_, str> {
    let mut before = 0;
    let is_plain = path.bytes().all(|byte| {
        let is_odd = !IN_PLAIN_PATHS[usize::from(byte)] || (before == b'/' && matches!(byte, b'/' | b'.'));
        before = byte;
        !is_odd
    });
    // `*` alone is no path, but what a server is asked about itself.
    if path == "*" || (is_plain && !path.starts_with('.')) {
        return Cow::Borrowed(if path.len() > 1 { path.strip_suffix('/').unwrap_or(path) } else { path });
    }
    let decoded = decode(path);
    let mut normal = String::with_capacity(decoded.len());
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => normal.truncate(normal.rfind('/').unwrap_or(0)),
            _ => {
                normal.push('/');
                normal.push_str(segment);
            }
        }
    }
    if !path.starts_with('/') {
        // Not a path of HTTP, but somebody may ask about it.
        normal.drain(..1.min(normal.len()));
    } else if normal.is_empty() {
        normal.push('/');
    }
    Cow::Owned(normal)
}

/// Whether a byte is written as it is rather than as an escape. Services take both for the same, but for a slash.
/// Not a star, which is special in globs, nor a backslash, which some take for a slash.
const fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~') && !matches!(byte, b'%' | b'/' | b'?' | b'#' | b'*' | b'\\')
}

/// The bytes of paths that are in their normal form already, in a table: it is asked of every byte of every request.
static IN_PLAIN_PATHS: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = 0;
    while byte < plain.len() {
        plain[byte] = byte == b'/' as usize || stands_for_itself(byte as u8);
        byte += 1;
    }
    plain
};

/// Writes everything in its one spelling, but for slashes, which divide.
fn decode(path: &str) -> String {
    let mut decoded = String::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        let escaped = if *first == b'%' { escape(behind) } else { None };
        let (byte, after) = escaped.unwrap_or((*first, behind));
        if stands_for_itself(byte) || (byte == b'/' && escaped.is_none()) {
            decoded.push(char::from(byte));
        } else {
            let digit = |value: u8| char::from(b"0123456789ABCDEF"[usize::from(value)]);
            decoded.extend(['%', digit(byte >> 4), digit(byte & 15)]);
        }
        rest = after;
    }
    decoded
}

/// The same for a segment of a glob, whose stars stay.
fn decode_glob(segment: &str) -> String {
    segment.split('*').map(decode).collect::<Vec<_>>().join("*")
}

/// The byte that the two digits behind a percent sign mean, and what follows them.
fn escape(behind: &[u8]) -> Option<(u8, &[u8])> {
    let digit = |at: usize| char::from(*behind.get(at)?).to_digit(16);
    let byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
    Some((byte, behind.get(2..)?))
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
    fn what_is_no_glob_says_what_would_be() {
        for (text, fix) in [
            ("api/**", "write /api/**"),
            ("/a**", "** stands alone"),
            ("/a/../b", "write the path itself"),
            ("/a/%2e%2E/b", "write the path itself"),
            ("/**/a/**/b", "use one"),
            ("/a?b=c", "match the path alone"),
        ] {
            let error = text.parse::<PathGlob>().unwrap_err().to_string();
            assert!(error.contains(fix), "{error}");
        }
    }

    #[test]
    fn a_plain_path_is_not_copied() {
        assert!(matches!(normal("/api/v1/users/"), Cow::Borrowed("/api/v1/users")));
    }

    #[test]
    fn an_escape_is_undone_once() {
        for (path, expected) in [("/%%32e", "/%252e"), ("/%252e", "/%252e"), ("/%+f", "/%25+f"), ("/%2", "/%252")] {
            assert_eq!(normal(path), expected, "{path}");
            assert_eq!(normal(expected), expected, "{path}");
        }
        assert_eq!(normal("*"), "*");
    }

    proptest! {
        #[test]
        fn the_normal_form_is_its_own(path in "(/|[a.%235eE+*]|%2[eEfF]|é){0,20}") {
            let path = format!("/{path}");
            let once = normal(&path).into_owned();
            prop_assert_eq!(&normal(&once), &once);
            prop_assert!(once.starts_with('/'));
            let is_dots = |segment: &str| segment == "." || segment == "..";
            prop_assert!(!once.split('/').any(is_dots));
        }

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
}
