//! Paths in normal form.
//!
//! A clean path has one spelling: characters that a path may contain are not escaped, all others are escaped in upper
//! case, dot segments are resolved (RFC 3986, 5.2.4) and slashes are merged. The gateway routes by it and forwards it.
//! A trailing slash stays, because services distinguish `/a/` from `/a`; rules do not.
//!
//! Two things have no single reading, because services disagree: `%2F` is a slash to some and data to others, and so is
//! `;`. [`PathReading`] selects the service's reading; by default both readings count.

use std::borrow::Cow;

use smallvec::SmallVec;

use super::Unreadable;
use crate::named_key::{InvalidPart, shown};

/// How the service reads paths.
///
/// ```
/// use tollgate_rules::internal::CleanPath;
/// use tollgate_rules::{EncodedSlash, PathReading};
///
/// let path = CleanPath::new("/api%2flogin")?;
/// let any = PathReading::default();
/// assert_eq!(path.clone().readings(any).as_slice(), ["/api/login", "/api%2Flogin"]);
/// let decoded = PathReading { encoded_slash: EncodedSlash::Decode, ..any };
/// assert_eq!(path.forwarded(decoded)?, "/api/login");
/// # Ok::<(), tollgate_rules::internal::Unreadable>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathReading {
    /// How it reads `%2F`, and `%5C`, which few services read as a slash.
    pub encoded_slash: EncodedSlash,
    /// How it reads `;` and the text after it, up to the next slash.
    pub parameters: PathParameters,
    /// Whether it distinguishes `/API` from `/api`.
    pub case: PathCase,
}

/// How a service reads an encoded slash (`%2F`) or backslash (`%5C`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "file", derive(serde::Deserialize, schemars::JsonSchema), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EncodedSlash {
    /// Unknown: a limit applies if either reading matches it. The path is forwarded as sent.
    #[default]
    Any,
    /// Requests with one are refused with 400.
    Refuse,
    /// As a slash, so the gateway forwards it decoded. An encoded backslash stays.
    Decode,
    /// As data.
    Keep,
}

/// How a service reads the parameters of a path segment, as in `/cart;session=1/items`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "file", derive(serde::Deserialize, schemars::JsonSchema), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PathParameters {
    /// Unknown: a limit applies if the path with or without them matches it. They are forwarded.
    #[default]
    Any,
    /// Requests with parameters are refused with 400.
    Refuse,
    /// Not as part of the path. The gateway removes them.
    Strip,
    /// As part of the segment.
    Keep,
}

/// Whether a service distinguishes `/API` from `/api`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "file", derive(serde::Deserialize, schemars::JsonSchema), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PathCase {
    /// The service distinguishes them.
    #[default]
    Sensitive,
    /// The service does not distinguish them.
    Insensitive,
}

impl PathReading {
    /// Encoded slashes and `;` are data. Used to route a path before the service, and so its reading, is known.
    pub const AS_WRITTEN: Self =
        Self { encoded_slash: EncodedSlash::Keep, parameters: PathParameters::Keep, case: PathCase::Sensitive };
}

/// The readings of a path. Nearly always there is one, and it is not copied.
pub type PathReadings<'a> = SmallVec<[Cow<'a, str>; 1]>;

/// A path in its normal spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CleanPath<'a> {
    text: Cow<'a, str>,
    has_encoded_slash: bool,
    has_parameters: bool,
    /// An encoded slash follows a `;` in its segment, so the end of the parameter is ambiguous.
    has_slash_in_parameters: bool,
    has_resolved_dots: bool,
}

impl<'a> CleanPath<'a> {
    /// Cleans a path without a query.
    ///
    /// # Errors
    ///
    /// If the path cannot be read safely.
    pub fn new(path: &'a str) -> Result<Self, Unreadable> {
        if plain(path).is_some() {
            return Ok(Self {
                text: Cow::Borrowed(path),
                has_encoded_slash: false,
                has_parameters: false,
                has_slash_in_parameters: false,
                has_resolved_dots: false,
            });
        }
        clean(path)
    }

    /// Returns the clean path, with encoded slashes and `;` as sent.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns `true` if the path was clean as sent, and has one reading.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        matches!(self.text, Cow::Borrowed(_)) && !self.has_encoded_slash && !self.has_parameters
    }

    /// Returns the path to forward to a service with this reading.
    ///
    /// # Errors
    ///
    /// If the path contains something that the reading refuses.
    pub fn forwarded(&self, reading: PathReading) -> Result<Cow<'_, str>, Unreadable> {
        if self.has_encoded_slash && reading.encoded_slash == EncodedSlash::Refuse {
            return Err(Unreadable::EncodedSlash);
        }
        if self.has_parameters && reading.parameters == PathParameters::Refuse {
            return Err(Unreadable::PathParameters);
        }
        let is_open = reading.encoded_slash == EncodedSlash::Any && reading.parameters == PathParameters::Any;
        if self.has_slash_in_parameters && is_open {
            return Err(Unreadable::EncodedSlash);
        }
        let strip = self.has_parameters && reading.parameters == PathParameters::Strip;
        let decode = self.has_encoded_slash && reading.encoded_slash == EncodedSlash::Decode;
        let text = if strip { Cow::Owned(stripped(&self.text)) } else { Cow::Borrowed(&*self.text) };
        Ok(if decode { Cow::Owned(decoded_slashes(&text)) } else { text })
    }

    /// Returns the readings that rules match, without a trailing slash. The first one merges the most and is used in
    /// keys, so that all spellings of a path share it.
    #[must_use]
    pub fn readings(self, reading: PathReading) -> PathReadings<'a> {
        if !self.has_encoded_slash && !self.has_parameters {
            return SmallVec::from_buf([folded(without_end(self.text), reading.case)]);
        }
        let text = &*self.text;
        let (decodes, keeps_slash) = match reading.encoded_slash {
            EncodedSlash::Any => (self.has_encoded_slash, true),
            EncodedSlash::Decode => (self.has_encoded_slash, !self.has_encoded_slash),
            EncodedSlash::Refuse | EncodedSlash::Keep => (false, true),
        };
        let (strips, keeps_parameters) = match reading.parameters {
            PathParameters::Any => (self.has_parameters, true),
            PathParameters::Strip => (self.has_parameters, !self.has_parameters),
            PathParameters::Refuse | PathParameters::Keep => (false, true),
        };
        let mut readings = PathReadings::new();
        let mut add = |reading_text: String| {
            let one = folded(without_end(Cow::Owned(reading_text)), reading.case);
            if !readings.contains(&one) {
                readings.push(one);
            }
        };
        // Few services read a backslash as a slash.
        let takes_backslash = reading.encoded_slash == EncodedSlash::Any && text.contains("%5C");
        if strips && decodes {
            if takes_backslash {
                add(decoded_backslashes(&decoded_slashes(&stripped(text))));
            }
            add(decoded_slashes(&stripped(text)));
        }
        if strips && keeps_slash {
            add(stripped(text));
        }
        if decodes && keeps_parameters {
            if takes_backslash {
                add(decoded_backslashes(&decoded_slashes(text)));
            }
            add(decoded_slashes(text));
        }
        if keeps_slash && keeps_parameters {
            add(text.to_owned());
        }
        readings
    }
}

/// The readings of a request's path, for rules.
#[derive(Debug)]
pub(crate) struct Readings<'a> {
    list: PathReadings<'a>,
    has_upper_case: bool,
}

impl<'a> Readings<'a> {
    /// Reads a path that the service gets as sent.
    pub(crate) fn new(path: &'a str, reading: PathReading) -> Result<Self, Unreadable> {
        match plain(path) {
            Some(Plain { has_upper_case }) if !has_upper_case || reading.case == PathCase::Sensitive => {
                let list = SmallVec::from_buf([without_end(Cow::Borrowed(path))]);
                Ok(Self { list, has_upper_case })
            }
            _ => Self::of_other(path, reading),
        }
    }

    #[inline(never)]
    fn of_other(path: &'a str, reading: PathReading) -> Result<Self, Unreadable> {
        let path = CleanPath::new(path)?;
        // The gateway forwards the clean path, with dots resolved. Other servers serve the path as sent, and may read
        // it so.
        if path.has_resolved_dots {
            return Err(Unreadable::DotSegment);
        }
        path.forwarded(reading)?;
        let list = path.readings(reading);
        let has_upper_case = list.iter().any(|path| has_upper_case(path));
        Ok(Self { list, has_upper_case })
    }

    pub(crate) fn as_slice(&self) -> &[Cow<'a, str>] {
        &self.list
    }

    /// Returns `true` if any reading has upper-case letters.
    pub(crate) fn has_upper_case(&self) -> bool {
        self.has_upper_case
    }
}

/// Returns the readings of a path that a caller names.
///
/// # Errors
///
/// If it is not a path, or cannot be read safely.
pub(crate) fn named(value: &[u8], reading: PathReading) -> Result<PathReadings<'_>, InvalidPart> {
    let Ok(text) = std::str::from_utf8(value) else {
        let problem = format!("`{}` is not a path", shown(value));
        return Err(InvalidPart::new(problem, "encode bytes that are not UTF-8, as in /caf%E9"));
    };
    if text.contains('?') {
        let problem = format!("`{}` has a query, which is not part of the path", shown(value));
        return Err(InvalidPart::new(problem, "write the path alone, or ? as %3F"));
    }
    Readings::new(text, reading).map(|readings| readings.list).map_err(|unreadable| {
        let message = unreadable.to_string();
        let (reason, fix) = message.trim_end_matches('.').split_once(": ").unwrap_or((&message, "write another path"));
        let reason = reason.strip_prefix("The ").map_or(reason.to_owned(), |reason| format!("the {reason}"));
        InvalidPart::new(format!("`{}` is not a key, because {reason}", shown(value)), fix)
    })
}

/// Returns a path as read by a service with this case sensitivity.
pub(crate) fn folded(path: Cow<'_, str>, case: PathCase) -> Cow<'_, str> {
    match case {
        PathCase::Insensitive if has_upper_case(&path) => Cow::Owned(without_case(&path)),
        _ => path,
    }
}

/// Returns a path, or the segment of a glob, as services that ignore case compare it: letters of all scripts are folded,
/// whether they are escaped or not.
#[must_use]
pub fn without_case(path: &str) -> String {
    if path.is_ascii() && !path.contains('%') {
        return path.to_ascii_lowercase();
    }
    let mut out = String::with_capacity(path.len());
    let mut beyond_ascii: SmallVec<[u8; 64]> = SmallVec::new();
    let mut rest = path.as_bytes();
    loop {
        let next = match rest.split_first() {
            Some((b'%', behind)) => escape(behind).map(|(byte, after)| (byte, after, true)),
            _ => None,
        };
        let next = next.or_else(|| rest.split_first().map(|(byte, after)| (*byte, after, false)));
        if let Some((byte, after, _)) = next
            && !byte.is_ascii()
        {
            beyond_ascii.push(byte);
            rest = after;
            continue;
        }
        for chunk in beyond_ascii.utf8_chunks() {
            chunk.valid().chars().for_each(|letter| push_folded(fold(letter), &mut out));
            chunk.invalid().iter().for_each(|byte| push_lower_escape(*byte, &mut out));
        }
        beyond_ascii.clear();
        match next {
            Some((byte, after, true)) => {
                push_lower_escape(byte, &mut out);
                rest = after;
            }
            Some((byte, after, false)) => {
                out.push(char::from(byte.to_ascii_lowercase()));
                rest = after;
            }
            None => return out,
        }
    }
}

/// Returns a letter without its case. Services fold to upper case, to lower case, or by Unicode's table: letters that any
/// of them joins are joined. A letter that would become several stays.
fn fold(letter: char) -> char {
    fn single(mut letters: impl Iterator<Item = char>) -> Option<char> {
        letters.next().filter(|_| letters.next().is_none())
    }
    let upper = single(letter.to_uppercase()).unwrap_or(letter);
    single(upper.to_lowercase()).unwrap_or(upper)
}

fn push_folded(letter: char, out: &mut String) {
    if letter.is_ascii() {
        out.push(letter);
    } else {
        letter.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| push_lower_escape(byte, out));
    }
}

fn push_lower_escape(byte: u8, out: &mut String) {
    let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or('0');
    out.extend(['%', digit(byte >> 4), digit(byte & 15)]);
}

/// Returns `true` if a path has letters that [`PathCase::Insensitive`] folds.
pub(crate) fn has_upper_case(path: &str) -> bool {
    path.bytes().any(|byte| byte.is_ascii_uppercase())
}

fn without_end(path: Cow<'_, str>) -> Cow<'_, str> {
    match path {
        path if path.len() <= 1 || !path.ends_with('/') => path,
        Cow::Borrowed(path) => Cow::Borrowed(&path[..path.len() - 1]),
        Cow::Owned(mut path) => {
            path.pop();
            Cow::Owned(path)
        }
    }
}

/// Properties of a path that is clean already and has one reading.
struct Plain {
    has_upper_case: bool,
}

/// Returns `Some` if a path is plain. Reads every byte of every request's path, once and without branches.
fn plain(path: &str) -> Option<Plain> {
    let (mut seen, mut pairs, mut before) = (0, 0, 0);
    for byte in path.bytes() {
        let class = CLASSES[usize::from(byte)];
        seen |= class;
        // A slash, followed by a slash or a dot.
        pairs |= before << 1 & class;
        before = class;
    }
    // `*` by itself is not a path, but the target of a request about the server.
    let is_plain = seen & ODD == 0 && pairs & SLASH_OR_DOT == 0 && path.starts_with('/');
    (is_plain || path == "*").then_some(Plain { has_upper_case: seen & UPPER_CASE != 0 })
}

fn clean(path: &str) -> Result<CleanPath<'_>, Unreadable> {
    let mut has_encoded_slash = false;
    let mut has_parameters = false;
    let mut has_slash_in_parameters = false;
    let mut has_resolved_dots = false;
    // The start of each segment in `text`. Empty segments are kept until dots are resolved, because `..` removes one.
    let mut text = String::with_capacity(path.len() + 8);
    let mut begins: SmallVec<[usize; 16]> = SmallVec::new();
    let segments = path.strip_prefix('/').unwrap_or(path).split('/');
    let mut ends_in_slash = false;
    for segment in segments {
        let is_dots = matches!(segment, "." | "..");
        ends_in_slash = segment.is_empty() || is_dots;
        has_resolved_dots |= is_dots;
        match segment {
            "." => {}
            ".." => {
                if let Some(begin) = begins.pop() {
                    text.truncate(begin);
                }
            }
            _ => {
                begins.push(text.len());
                text.push('/');
                let at = text.len();
                spell(segment, &mut text)?;
                let spelled = &text[at..];
                has_encoded_slash |= spelled.contains("%2F") || spelled.contains("%5C");
                if let Some((_, parameters)) = spelled.split_once(';') {
                    has_parameters = true;
                    has_slash_in_parameters |= parameters.contains("%2F") || parameters.contains("%5C");
                }
                if has_dots(spelled) {
                    return Err(Unreadable::DotSegment);
                }
            }
        }
    }
    let mut merged = merge_slashes(&text);
    if ends_in_slash && !merged.ends_with('/') {
        merged.push('/');
    }
    let text = if merged == path { Cow::Borrowed(path) } else { Cow::Owned(merged) };
    Ok(CleanPath { text, has_encoded_slash, has_parameters, has_slash_in_parameters, has_resolved_dots })
}

/// Writes a segment in its normal spelling. Characters that need no escape are written as they are, all others are
/// escaped in upper case.
fn spell(segment: &str, out: &mut String) -> Result<(), Unreadable> {
    let mut rest = segment.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        let escaped = if *first == b'%' { escape(behind) } else { None };
        let (byte, after) = escaped.unwrap_or((*first, behind));
        if byte.is_ascii_control() {
            return Err(Unreadable::ControlCharacter);
        }
        if byte == b'\\' && escaped.is_none() {
            return Err(Unreadable::Backslash);
        }
        if is_unescaped(byte) || (byte == b';' && escaped.is_none()) {
            out.push(char::from(byte));
        } else {
            push_escape(byte, out);
        }
        rest = after;
    }
    Ok(())
}

/// Returns `true` if a normalized segment, or a part of it that some services treat as one, is `.` or `..`.
fn has_dots(segment: &str) -> bool {
    if !segment.contains('.') {
        return false;
    }
    let mut parts = segment.split("%2F").flat_map(|part| part.split("%5C"));
    parts.any(|part| {
        let name = part.split(';').next().unwrap_or_default();
        let name = name.split("%3B").next().unwrap_or_default();
        matches!(name, "." | "..")
    })
}

/// Returns a path without the parameters of its segments.
fn stripped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for segment in path.strip_prefix('/').unwrap_or(path).split('/') {
        out.push('/');
        out.push_str(segment.split(';').next().unwrap_or_default());
    }
    merge_slashes(&out)
}

/// Returns a path in which encoded slashes separate segments.
fn decoded_slashes(path: &str) -> String {
    merge_slashes(&path.replace("%2F", "/"))
}

/// Returns a path in which encoded backslashes separate segments too.
fn decoded_backslashes(path: &str) -> String {
    merge_slashes(&path.replace("%5C", "/"))
}

fn merge_slashes(path: &str) -> String {
    let mut merged = String::with_capacity(path.len().max(1));
    for letter in path.chars() {
        if letter != '/' || !merged.ends_with('/') {
            merged.push(letter);
        }
    }
    if merged.is_empty() {
        merged.push('/');
    }
    merged
}

/// Returns `true` if a byte is written without an escape: the `pchar` of RFC 3986, except the star, which is special in
/// globs, and the semicolon, which is data when escaped.
const fn is_unescaped(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')')
        || matches!(byte, b'+' | b',' | b'=' | b':' | b'@')
}

/// A byte that no plain path has.
const ODD: u8 = 1;
const UPPER_CASE: u8 = 1 << 1;
const SLASH: u8 = 1 << 2;
const SLASH_OR_DOT: u8 = SLASH << 1;

/// The class of each byte, for [`plain`].
static CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < classes.len() {
        let letter = byte as u8;
        classes[byte] = match letter {
            b'/' => SLASH | SLASH_OR_DOT,
            b'.' => SLASH_OR_DOT,
            b'A'..=b'Z' => UPPER_CASE,
            _ if is_unescaped(letter) => 0,
            _ => ODD,
        };
        byte += 1;
    }
    classes
};

/// Normalizes a segment of a glob, and keeps its stars. Control characters and backslashes are escaped: no request that
/// is matched has them.
pub(crate) fn spell_glob(segment: &str) -> String {
    let mut out = String::with_capacity(segment.len());
    for (number, literal) in segment.split('*').enumerate() {
        if number > 0 {
            out.push('*');
        }
        let mut rest = literal.as_bytes();
        while let Some((first, behind)) = rest.split_first() {
            let escaped = if *first == b'%' { escape(behind) } else { None };
            let (byte, after) = escaped.unwrap_or((*first, behind));
            if is_unescaped(byte) || (byte == b';' && escaped.is_none()) {
                out.push(char::from(byte));
            } else {
                push_escape(byte, &mut out);
            }
            rest = after;
        }
    }
    out
}

fn push_escape(byte: u8, out: &mut String) {
    let digit = |value: u8| char::from(b"0123456789ABCDEF"[usize::from(value)]);
    out.extend(['%', digit(byte >> 4), digit(byte & 15)]);
}

/// Decodes the two digits after a percent sign. Returns the byte and the rest.
fn escape(behind: &[u8]) -> Option<(u8, &[u8])> {
    let digit = |at: usize| char::from(*behind.get(at)?).to_digit(16);
    let byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
    Some((byte, behind.get(2..)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cleaned(path: &str) -> Result<String, Unreadable> {
        CleanPath::new(path).map(|path| path.as_str().to_owned())
    }

    fn readings(path: &str, reading: PathReading) -> Vec<String> {
        CleanPath::new(path).unwrap().readings(reading).into_iter().map(Cow::into_owned).collect()
    }

    #[test]
    fn a_path_has_one_spelling() {
        for (path, expected) in [
            ("/", "/"),
            ("", "/"),
            ("*", "*"),
            ("/a/b", "/a/b"),
            ("/a/b/", "/a/b/"),
            ("/%61%2Db", "/a-b"),
            ("/users/%40me", "/users/@me"),
            ("/a//b", "/a/b"),
            ("//a", "/a"),
            ("/a/./b", "/a/b"),
            ("/a/../b", "/b"),
            ("/graphql/../x", "/x"),
            // `..` removes the empty segment, as in RFC 3986.
            ("/api//../login", "/api/login"),
            ("/..", "/"),
            ("/a/..", "/"),
            ("/a/b/..", "/a/"),
            ("/a/.", "/a/"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/a b", "/a%20b"),
            ("/a%2fb", "/a%2Fb"),
            ("/a%5cb", "/a%5Cb"),
            ("/a;b/c", "/a;b/c"),
            ("/a%3bb", "/a%3Bb"),
            ("/*", "/%2A"),
            ("/%2a", "/%2A"),
            ("/100%", "/100%25"),
            ("/%%32e", "/%252e"),
            ("/%252e%252e/x", "/%252e%252e/x"),
            ("/...", "/..."),
            ("/.well-known/x", "/.well-known/x"),
            ("/{a}|b", "/%7Ba%7D%7Cb"),
        ] {
            assert_eq!(cleaned(path).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn paths_that_cannot_be_read_safely_are_refused() {
        for (path, expected) in [
            ("/graphql/%2e%2e/y", Unreadable::DotSegment),
            ("/a/.%2E/b", Unreadable::DotSegment),
            ("/a/%2e/b", Unreadable::DotSegment),
            ("/x/..;/api/login", Unreadable::DotSegment),
            ("/x/.;a/api", Unreadable::DotSegment),
            ("/x/..%3B/api", Unreadable::DotSegment),
            ("/x/..%2fapi", Unreadable::DotSegment),
            ("/x%2F..%2Fapi", Unreadable::DotSegment),
            ("/x%5c..%5capi", Unreadable::DotSegment),
            ("/a%2f..", Unreadable::DotSegment),
            ("/login%0a", Unreadable::ControlCharacter),
            ("/login%00", Unreadable::ControlCharacter),
            ("/a\tb", Unreadable::ControlCharacter),
            ("/a%7f", Unreadable::ControlCharacter),
            ("/a\\b", Unreadable::Backslash),
        ] {
            assert_eq!(cleaned(path), Err(expected), "{path}");
        }
    }

    #[test]
    fn encoded_slashes_and_parameters_have_every_plausible_reading() {
        let any = PathReading::default();
        assert_eq!(readings("/api/login/", any), ["/api/login"]);
        assert_eq!(readings("/api%2Flogin", any), ["/api/login", "/api%2Flogin"]);
        assert_eq!(readings("/api%5clogin", any), ["/api/login", "/api%5Clogin"]);
        assert_eq!(readings("/s%2Ffoo%5Cbar", any), ["/s/foo/bar", "/s/foo%5Cbar", "/s%2Ffoo%5Cbar"]);
        assert_eq!(readings("/api%2F%2flogin/", any), ["/api/login", "/api%2F%2Flogin"]);
        assert_eq!(readings("/api;a/login;b=1", any), ["/api/login", "/api;a/login;b=1"]);
        assert_eq!(readings("/;/api", any), ["/api", "/;/api"]);
        assert_eq!(readings("/a%2Fb;x", any), ["/a/b", "/a%2Fb", "/a/b;x", "/a%2Fb;x"]);
        let of = |encoded_slash, parameters| PathReading { encoded_slash, parameters, ..any };
        assert_eq!(readings("/a;x%2Fb", of(EncodedSlash::Decode, PathParameters::Keep)), ["/a;x/b"]);
        assert_eq!(readings("/a;x%2Fb", of(EncodedSlash::Keep, PathParameters::Strip)), ["/a"]);
        assert_eq!(readings("/a;x%2Fb", of(EncodedSlash::Keep, PathParameters::Keep)), ["/a;x%2Fb"]);
        assert_eq!(readings("/A;x", PathReading { case: PathCase::Insensitive, ..any }), ["/a", "/a;x"]);
        assert_eq!(readings("/A/B", PathReading { case: PathCase::Insensitive, ..any }), ["/a/b"]);
    }

    #[test]
    fn the_setting_selects_the_forwarded_path() {
        let forwarded =
            |path: &str, reading| CleanPath::new(path).and_then(|path| path.forwarded(reading).map(Cow::into_owned));
        let any = PathReading::default();
        let of = |encoded_slash, parameters| PathReading { encoded_slash, parameters, ..any };
        assert_eq!(forwarded("/a%2fb;c/", any).as_deref(), Ok("/a%2Fb;c/"));
        let read = of(EncodedSlash::Decode, PathParameters::Strip);
        assert_eq!(forwarded("/a%2fb;c/", read).as_deref(), Ok("/a/b/"));
        assert_eq!(forwarded("/a%2fb", of(EncodedSlash::Refuse, PathParameters::Any)), Err(Unreadable::EncodedSlash));
        assert_eq!(forwarded("/a;b", of(EncodedSlash::Any, PathParameters::Refuse)), Err(Unreadable::PathParameters));
        assert_eq!(forwarded("/a;%2Fb", any), Err(Unreadable::EncodedSlash), "where does the parameter end?");
        assert_eq!(forwarded("/a%5Cb", of(EncodedSlash::Decode, PathParameters::Any)).as_deref(), Ok("/a%5Cb"));
        assert_eq!(forwarded("/a%3Bb", of(EncodedSlash::Any, PathParameters::Refuse)).as_deref(), Ok("/a%3Bb"));
    }

    #[test]
    fn a_plain_path_is_not_copied() {
        for path in ["/api/v1/users/", "/.well-known/acme", "/a%20b"] {
            assert!(CleanPath::new(path).unwrap().is_unchanged(), "{path}");
        }
        assert!(!CleanPath::new("/a%2Fb").unwrap().is_unchanged());
        let readings = CleanPath::new("/api/v1/users/").unwrap().readings(PathReading::default());
        assert!(matches!(readings.as_slice(), [Cow::Borrowed("/api/v1/users")]));
    }

    proptest! {
        #[test]
        fn a_clean_path_is_its_own(path in "(/|[a.%235eE+*;]|%2[eEfF]|%5[cC]|%3[bB]|é){0,20}") {
            let path = format!("/{path}");
            let Ok(clean) = CleanPath::new(&path) else { return Ok(()) };
            let once = clean.as_str().to_owned();
            prop_assert_eq!(CleanPath::new(&once).map(|again| again.as_str().to_owned()), Ok(once.clone()));
            prop_assert!(once.starts_with('/') && !once.contains("//"));
            for reading in clean.readings(PathReading::default()) {
                let is_dots = |segment: &str| segment == "." || segment == "..";
                prop_assert!(!reading.split('/').any(is_dots), "{}", reading);
                prop_assert!(reading.starts_with('/') && !reading.contains("//"), "{}", reading);
                // Every reading of a service is one that rules have matched.
                prop_assert!(CleanPath::new(&reading).is_ok());
            }
        }

        #[test]
        fn no_text_panics(path in ".{0,40}") {
            _ = CleanPath::new(&path).map(|path| path.readings(PathReading::default()));
        }
    }
}
