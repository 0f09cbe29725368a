//! Reads one cookie of a request (RFC 6265).
//!
//! Frameworks accept more than the RFC allows, and each differently: quotes with octal escapes (Python), percent
//! escapes (Express), pairs after a comma (older parsers) or a space (Python's `SimpleCookie`). A value is therefore
//! unquoted, unescaped and trimmed, which joins the spellings of one user, and a pair that only some frameworks would
//! find is found.
//!
//! Behind a quote that is not closed before the next semicolon, some read on until it is closed, some stop, and some
//! remove it. A request in which that affects the cookie is refused.

use std::borrow::Cow;
use std::cell::Cell;

use http::header::COOKIE;
use smallvec::SmallVec;
use tollgate_http::Headers;

use super::header::trimmed;
use super::name::reads_as;
use super::query::digit;
use super::{ReadErrors, Unreadable, only};

/// Returns the value of a cookie. Several differing values, and open quotes, are recorded as errors.
///
/// HTTP/2 may split the header into several lines, so all are read.
pub(crate) fn cookie<'a>(headers: Headers<'a>, name: &str, errors: &ReadErrors) -> Option<Cow<'a, [u8]>> {
    let pieces = headers.get_all(&COOKIE).flat_map(|line| line.split(|byte| *byte == b';'));
    let quotes = Quotes::default();
    let values = pieces.flat_map(|piece| {
        let piece = trimmed(piece);
        let found = values(piece, name.as_bytes(), &quotes);
        quotes.follow(piece, !found.is_empty());
        found
    });
    let value = only(values, errors, || Unreadable::DuplicateCookie(name.into()));
    if quotes.affect_cookie.get() {
        errors.note(Unreadable::InvalidCookie(name.into()));
    }
    value
}

/// The quotes that are not closed before the semicolon.
#[derive(Default)]
struct Quotes {
    /// Whether the value of an earlier pair has such a quote, and none has closed it.
    is_open: Cell<bool>,
    affect_cookie: Cell<bool>,
}

impl Quotes {
    /// Reads the text between two semicolons.
    fn follow(&self, piece: &[u8], has_cookie: bool) {
        let was_open = self.is_open.get();
        if was_open && has_cookie {
            self.affect_cookie.set(true);
        }
        // Nearly always.
        let Some((_, value @ [b'"', ..])) = pair(piece) else {
            if was_open && piece.contains(&b'"') {
                self.is_open.set(false);
            }
            return;
        };
        self.is_open.set(!was_open && quoted_bytes(value).is_none());
    }

    /// Notes the value of the cookie itself.
    fn note(&self, value: &[u8]) {
        let is_open = value.first() == Some(&b'"') && quoted_bytes(value).is_none();
        // Some handlers remove quotes from either end.
        if is_open || (value.last() == Some(&b'"') && value.first() != Some(&b'"')) {
            self.affect_cookie.set(true);
        }
    }
}

/// Returns the values of a cookie in the text between two semicolons: of the pair itself, in full and as read by
/// parsers that split at blanks and commas, and of the pairs that those parsers find after it. Some split quoted values too.
fn values<'a>(piece: &'a [u8], name: &[u8], quotes: &Quotes) -> SmallVec<[Cow<'a, [u8]>; 2]> {
    let mut found = SmallVec::new();
    if let Some((_, value)) = pair(piece).filter(|(given, _)| is_name(given, name)) {
        quotes.note(value);
        found.push(plain(value));
        found.extend(ended_early(value).map(plain));
    }
    if piece.iter().any(is_divider) {
        let closed = without_blanks_around_equals(piece);
        let behind = pairs_behind(&closed).filter(|(given, _)| is_name(given, name));
        found.extend(behind.map(|(_, value)| Cow::Owned(plain(value).into_owned())));
    }
    found
}

/// Returns the pairs that parsers find which split at blanks, at commas or at both, except for the first pair.
fn pairs_behind(piece: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let words = piece.split(|byte| matches!(byte, b' ' | b'\t')).enumerate();
    words
        .flat_map(|(nth, word)| {
            let is_first = nth == 0;
            let whole = (!is_first && word.contains(&b',')).then_some(word);
            word.split(|byte| *byte == b',').skip(usize::from(is_first)).chain(whole)
        })
        .filter_map(pair)
}

/// Returns `true` if a framework may take a cookie for the one named `name`. Some decode names.
fn is_name(given: &[u8], name: &[u8]) -> bool {
    given == name
        || match given.contains(&b'%') {
            true => reads_as(trimmed(&wholly_decoded(given)), name),
            false => reads_as(given, name),
        }
}

fn is_divider(byte: &u8) -> bool {
    matches!(byte, b',' | b' ' | b'\t')
}

/// Returns the part of a value that is read by parsers which end it at a blank, at a comma or after its closing quote.
/// Returns `None` if that is the whole value.
fn ended_early(value: &[u8]) -> Option<&[u8]> {
    if let Some(bytes) = quoted_bytes(value) {
        return (bytes < value.len()).then(|| &value[..bytes]);
    }
    value.iter().position(is_divider).map(|end| &value[..end])
}

/// Returns the length of a leading quoted string, including its quotes.
fn quoted_bytes(value: &[u8]) -> Option<usize> {
    let inner = value.strip_prefix(b"\"")?;
    let mut is_escaped = false;
    let end = inner.iter().position(|byte| {
        let ends = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        ends
    })?;
    Some(end + 2)
}

/// Removes blanks around equals signs.
fn without_blanks_around_equals(piece: &[u8]) -> Vec<u8> {
    let mut closed: Vec<u8> = Vec::with_capacity(piece.len());
    for byte in piece {
        match byte {
            b'=' => {
                while matches!(closed.last(), Some(b' ' | b'\t')) {
                    closed.pop();
                }
                closed.push(b'=');
            }
            b' ' | b'\t' if closed.last() == Some(&b'=') => {}
            _ => closed.push(*byte),
        }
    }
    closed
}

fn pair(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let (name, value) = text.split_at(text.iter().position(|byte| *byte == b'=')?);
    Some((trimmed(name), value.get(1..)?.trim_ascii()))
}

/// Decodes a value from any of its spellings, and from spellings of spellings: the form of a form is itself, so a key
/// that a report shows can be named.
pub(crate) fn plain(value: &[u8]) -> Cow<'_, [u8]> {
    let value = trimmed(value);
    let value = match value {
        [b'"', inner @ .., b'"'] if inner.contains(&b'\\') => Cow::Owned(unescaped(inner)),
        [b'"', inner @ .., b'"'] => Cow::Borrowed(inner),
        _ => Cow::Borrowed(value),
    };
    let value = if value.contains(&b'%') { Cow::Owned(wholly_decoded(&value)) } else { value };
    match value {
        Cow::Borrowed(value) => Cow::Borrowed(without_quotes(value)),
        Cow::Owned(value) => Cow::Owned(without_quotes(&value).to_vec()),
    }
}

/// Percent-decodes until no escape is left, in one pass: a client may nest thousands. A plus sign stays.
fn wholly_decoded(value: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(value.len());
    for byte in value {
        out.push(*byte);
        while let [rest @ .., b'%', high, low] = &*out
            && let (Some(high), Some(low)) = (digit(*high), digit(*low))
        {
            out.truncate(rest.len());
            out.push(high << 4 | low);
        }
    }
    out
}

/// Trims a value, and removes all quotes around it.
fn without_quotes(mut value: &[u8]) -> &[u8] {
    loop {
        value = match trimmed(value) {
            [b'"', inner @ .., b'"'] => inner,
            other => return other,
        };
    }
}

/// Decodes the escapes of a quoted value: a backslash with three octal digits, or with the character itself.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    loop {
        rest = match rest {
            [] => return out,
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..] => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest
            }
            [b'\\', byte, rest @ ..] | [byte, rest @ ..] => {
                out.push(*byte);
                rest
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};
    use proptest::prelude::*;

    use super::*;

    fn headers(lines: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(COOKIE, HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        headers
    }

    fn read(lines: &[&str], name: &str) -> (Option<String>, bool) {
        let (headers, errors) = (headers(lines), ReadErrors::default());
        let value = cookie((&headers).into(), name, &errors);
        let value = value.map(|value| String::from_utf8(value.into_owned()).unwrap());
        (value, errors.take().is_some())
    }

    fn found(lines: &[&str], name: &str) -> Option<String> {
        let (value, differs) = read(lines, name);
        assert!(!differs, "{lines:?}");
        value
    }

    #[test]
    fn a_cookie_is_found_by_its_name() {
        let lines = ["session=abc; theme=dark", "other=1=2; quoted=\"a b\"; empty=; bare; =nameless"];
        for (name, expected) in [
            ("session", Some("abc")),
            ("theme", Some("dark")),
            ("SESSION", Some("abc")),
            ("sess", None),
            ("other", Some("1=2")),
            ("quoted", Some("a b")),
            ("empty", Some("")),
            ("bare", None),
            ("", Some("nameless")),
            ("missing", None),
        ] {
            assert_eq!(found(&lines, name).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn differing_values_of_a_name_are_an_error() {
        for lines in [
            &["s=1; s=2"][..],
            &["b=0", "s=1", "s=2"],
            &["a=1, s=1; s=2"],
            &["a=1 s=2; s=1"],
            &["s=; s=1"],
            &["s=1 a=2"],
            &["s=1,a=2"],
            &["s=1,2"],
            &["s=1,"],
            &["a=1 s=1,2"],
            &["a=\", s=1,\"; s=2"],
            &["s=1; S=2"],
            &["s=1; s[]=2"],
            &["s=1; %73=2"],
        ] {
            assert!(read(lines, "s").1, "{lines:?}");
        }
        for lines in [&["s=1; s=1"][..], &["s=1", "s=\"1\""], &["s=%31; s=1"], &["t=1; t=2; s=1"]] {
            assert_eq!(found(lines, "s").as_deref(), Some("1"), "{lines:?}");
        }
    }

    #[test]
    fn spellings_of_one_value_are_one() {
        for line in [
            "s=REAL",
            "s=\"REAL\"",
            "s=\"\\122EAL\"",
            "s=\"\\REAL\"",
            "s=%52EAL",
            "s= REAL ",
            "s =REAL",
            "a=1, s=REAL",
            "a=1 s=REAL",
            "a=1,s=REAL",
            "a=b s =REAL",
            "a=b s= REAL",
            "a=b, s =REAL",
            "x s= REAL",
            "a=b\ts\t=\tREAL",
            "s=\"REAL \"",
            "s=%20REAL",
            "a=s s=REAL",
            "a=1; \u{a0}s\u{a0}=REAL",
            "a=1; \u{2003}s\u{2003}=\u{2003}REAL\u{2003}",
            "s=%2552EAL",
            "s=%25252552EAL",
            "s=%%35%32EAL",
            "s=%22REAL%22",
            "s=\"%22 REAL%20%22\"",
        ] {
            assert_eq!(found(&[line], "s").as_deref(), Some("REAL"), "{line}");
        }
    }

    #[test]
    fn untidy_lines_are_accepted() {
        assert_eq!(found(&[" a = 1 ;;; b=2;"], "a").as_deref(), Some("1"));
        assert_eq!(found(&[" a = 1 ;;; b=2;"], "b").as_deref(), Some("2"));
        assert_eq!(found(&["a=\"\""], "a").as_deref(), Some(""));
        assert_eq!(found(&["a=\"1, b=2\""], "a").as_deref(), Some("1, b=2"));
        assert_eq!(found(&["a=\", b=2 ,\""], "b").as_deref(), Some("2"), "some split quoted values");
        assert_eq!(found(&[], "a"), None);
    }

    #[test]
    fn open_quotes_that_affect_the_cookie_are_an_error() {
        let problem = |line: &str| {
            let (headers, errors) = (headers(&[line]), ReadErrors::default());
            _ = cookie((&headers).into(), "s", &errors);
            errors.take()
        };
        for line in [
            "s=\"1",
            "s=1\"",
            "s=\"",
            "s=\"1\\\"",
            "s=\"1; b=2\"",
            "a=\"x; s=1",
            "a=\"x; s=1; b=y\"",
            "a=\"x; b=2, s=1",
        ] {
            assert_eq!(problem(line), Some(Unreadable::InvalidCookie("s".into()).into()), "{line}");
        }
        for line in [
            "s=1; a=\"x",
            "a=\"x; b=y\"; s=1",
            "a=\"x\"; s=1",
            "a={\"x\":1}; s=1",
            "a=\"x; b=2",
            "a=x\"; s=1",
            "s={\"x\"}",
        ] {
            assert_eq!(problem(line), None, "{line}");
        }
    }

    proptest! {
        /// For lines without repeated names and escapes, the crate must agree.
        #[test]
        fn agrees_with_the_cookie_crate(
            line in r#"a=["0-9]{0,4}; ?(b ?=["0-9= ]{0,4}; ?)?c(=["0-9]{0,3})?"#,
            name in "[a-c]",
        ) {
            let theirs = cookie::Cookie::split_parse(line.as_str())
                .filter_map(Result::ok)
                .find(|cookie| cookie.name() == name)
                .map(|cookie| String::from_utf8(without_quotes(cookie.value_trimmed().as_bytes()).to_vec()).unwrap());
            prop_assert_eq!(read(&[&line], &name).0, theirs);
        }

        #[test]
        fn the_form_of_a_form_is_itself(value in r#"["\\\\%0-9a-fA-F +,]{0,14}"#) {
            let once = plain(value.as_bytes()).into_owned();
            prop_assert_eq!(plain(&once).into_owned(), once);
        }

        #[test]
        fn no_bytes_panic(line in prop::collection::vec(32_u8..=255, 0..60), name in ".{0,4}") {
            let Ok(value) = HeaderValue::from_bytes(&line) else { return Ok(()) };
            _ = super::cookie((&HeaderMap::from_iter([(COOKIE, value)])).into(), &name, &ReadErrors::default());
        }
    }
}
