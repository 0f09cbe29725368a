//! Query parameters (`application/x-www-form-urlencoded`).
//!
//! Names and values are decoded and trimmed, so that `a%62c` and `abc` are one client. Some frameworks read `key[]=1`,
//! `key[0]=1` and `[key]=1` as `key`, some ignore the case of names, and some split at `;` too. A parameter that only some
//! frameworks would find is found, and a value ends where the first of them ends it.
//!
//! Bytes that are not UTF-8 stay percent-encoded in upper case, so that different bytes stay different: with the usual
//! replacement character, all of them would be one key. As a result, `%FF` and `%25FF` are one key, which only joins a
//! client with itself.

use std::borrow::Cow;

use super::name::reads_as;
use super::{ReadErrors, Unreadable, only};

/// Returns the value of a parameter. Without an equals sign it is empty, but present. Several differing values are
/// recorded as an error.
pub(crate) fn query<'a>(query: &'a str, name: &str, errors: &ReadErrors) -> Option<Cow<'a, str>> {
    let values = pairs(query).filter(|(given, _)| is_name(given, name)).map(|(_, value)| trimmed(decoded(value)));
    only(values, errors, || Unreadable::DuplicateParameter(name.into()))
}

/// Returns the decoded names of all parameters, in order.
#[cfg_attr(not(any(feature = "file", test)), expect(dead_code, reason = "only expressions list all names"))]
pub(crate) fn names(query: &str) -> impl Iterator<Item = Cow<'_, str>> {
    pairs(query).map(|(name, _)| trimmed(decoded(name)))
}

/// Returns a query without the parameters whose names another query has, in any spelling. Frameworks disagree whether
/// the first or the last parameter of a name counts.
#[must_use]
pub fn without_names_of(other: &str, query: &str) -> String {
    let names: Vec<Cow<'_, str>> = pairs(other).map(|(name, _)| trimmed_name(decoded(name))).collect();
    let is_repeated = |piece: &&str| pairs(piece).any(|(given, _)| names.iter().any(|name| is_name(given, name)));
    let kept: Vec<&str> = query.split('&').filter(|piece| !is_repeated(piece)).collect();
    kept.join("&")
}

/// Returns names and values as sent.
fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    let pieces = query.split(['&', ';']).filter(|pair| !pair.is_empty());
    pieces.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

fn is_name(given: &str, name: &str) -> bool {
    if given == name {
        return true;
    }
    reads_as(trimmed_name(decoded(given)).as_bytes(), name.as_bytes())
}

/// Trims a name. Null bytes stay: they end the name.
fn trimmed_name(name: Cow<'_, str>) -> Cow<'_, str> {
    match name {
        Cow::Borrowed(name) => Cow::Borrowed(name.trim_matches(|letter| is_blank(letter) && letter != '\0')),
        Cow::Owned(name) => Cow::Owned(name.trim_matches(|letter| is_blank(letter) && letter != '\0').to_owned()),
    }
}

/// Trims a decoded value.
pub(crate) fn trimmed(value: Cow<'_, str>) -> Cow<'_, str> {
    match value {
        Cow::Borrowed(value) => Cow::Borrowed(value.trim_matches(is_blank)),
        Cow::Owned(value) => {
            let trimmed = value.trim_matches(is_blank);
            if trimmed.len() == value.len() { Cow::Owned(value) } else { Cow::Owned(trimmed.to_owned()) }
        }
    }
}

fn is_blank(letter: char) -> bool {
    letter.is_whitespace() || letter.is_control() || matches!(letter, '\u{200b}' | '\u{feff}')
}

fn decoded(text: &str) -> Cow<'_, str> {
    if is_plain(text) {
        return Cow::Borrowed(text);
    }
    let bytes: Vec<u8> = Decode(text.as_bytes()).collect();
    Cow::Owned(String::from_utf8(bytes).unwrap_or_else(|not_utf8| with_escapes(not_utf8.as_bytes())))
}

fn is_plain(text: &str) -> bool {
    !text.bytes().any(|byte| matches!(byte, b'%' | b'+'))
}

fn with_escapes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() + 8);
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.extend(['%', hex(byte >> 4), hex(byte & 15)]);
        }
    }
    text
}

fn hex(digit: u8) -> char {
    char::from_digit(digit.into(), 16).map_or('0', |digit| digit.to_ascii_uppercase())
}

/// Iterates over decoded bytes. A percent sign without two digits is literal.
struct Decode<'a>(&'a [u8]);

impl Iterator for Decode<'_> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        let (byte, rest) = match self.0 {
            [] => return None,
            [b'+', rest @ ..] => (b' ', rest),
            [b'%', high, low, rest @ ..] => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => (high << 4 | low, rest),
                _ => (b'%', self.0.get(1..)?),
            },
            [byte, rest @ ..] => (*byte, rest),
        };
        self.0 = rest;
        Some(byte)
    }
}

pub(super) fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> (Option<String>, bool) {
        let errors = ReadErrors::default();
        let value = query(text, "key", &errors).map(Cow::into_owned);
        (value, errors.take().is_some())
    }

    fn value(text: &str) -> Option<String> {
        let (value, differs) = read(text);
        assert!(!differs, "{text}");
        value
    }

    #[test]
    fn names_are_decoded_as_forms_write_them() {
        let read = |query: &str| names(query).map(Cow::into_owned).collect::<Vec<_>>();
        assert_eq!(read(""), [""; 0]);
        assert_eq!(read("&&a=1&flag&%71=%2F&u%C3%A9"), ["a", "flag", "q", "ué"]);
    }

    #[test]
    fn a_parameter_is_found_and_decoded() {
        for (text, expected) in [
            ("key=abc", Some("abc")),
            ("a=1&key=abc&b=2", Some("abc")),
            ("key=1&key=1", Some("1")),
            ("k%65y=a%62c", Some("abc")),
            ("key=a+b%20c", Some("a b c")),
            ("key=%E2%82%AC", Some("€")),
            ("key=€", Some("€")),
            ("key=1=2", Some("1=2")),
            ("key", Some("")),
            ("key=", Some("")),
            ("&&key=1&&", Some("1")),
            ("key=100%", Some("100%")),
            ("key=%4", Some("%4")),
            ("key=%zz%41", Some("%zzA")),
            ("key=%%41", Some("%A")),
            ("KEY=1", Some("1")),
            ("ke=1", None),
            ("keys=1", None),
            ("", None),
            ("=1", None),
        ] {
            assert_eq!(value(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn spellings_of_one_value_are_one() {
        for text in [
            "key=REAL",
            "key=+REAL",
            "key=REAL%20",
            "key=%0aREAL",
            "key=%C2%A0REAL",
            "key[]=REAL",
            "key%5B0%5D=REAL",
            "[key]=REAL",
            "a=1;key=REAL",
            "key=REAL;x",
            "+key=REAL",
            "key=REAL&key[]=REAL",
        ] {
            assert_eq!(value(text).as_deref(), Some("REAL"), "{text}");
        }
    }

    #[test]
    fn differing_values_of_a_name_are_an_error() {
        for text in ["key=1&key=2", "key=1&k%65y=2", "key=1&key[]=2", "key=1&a=1;key=2", "key&key=1"] {
            assert!(read(text).1, "{text}");
        }
        assert!(!read("a=1&a=2&key=1").1);
    }

    #[test]
    fn parameters_that_another_query_has_are_removed() {
        for (query, expected) in [
            ("a=1&b=2", "a=1&b=2"),
            ("id=8&a=1&ID=9&i%64=7&id[]=6&b", "a=1&b"),
            ("a=1;id=8&b=2;c", "b=2;c"),
            ("id", ""),
            ("", ""),
        ] {
            assert_eq!(without_names_of("x=1&id=7", query), expected, "{query}");
        }
    }

    #[test]
    fn a_plain_value_is_not_copied() {
        let errors = ReadErrors::default();
        assert!(matches!(query("key=plain", "key", &errors), Some(Cow::Borrowed("plain"))));
        assert!(matches!(query("k%65y=plain", "key", &errors), Some(Cow::Borrowed("plain"))));
    }

    #[test]
    fn bytes_that_are_not_utf8_stay_different() {
        assert_eq!(value("key=a%ff%e2%82b").as_deref(), Some("a%FF%E2%82b"));
        assert_ne!(value("key=%ff"), value("key=%fe"));
        assert_eq!(value("key=%fF"), value("key=%Ff"));
    }

    proptest! {
        /// Letters that are not hexadecimal digits, so that no fragments combine to a byte: the other crate treats
        /// invalid UTF-8 differently.
        #[test]
        fn agrees_with_form_urlencoded(text in "([gh%+=&]|%[46][12]|%c3%a9|é){0,16}", name in "[ghéaA]{0,2}") {
            let theirs = form_urlencoded::parse(text.as_bytes())
                // Names differ in more than their case.
                .find(|(given, _)| given.trim().eq_ignore_ascii_case(&name))
                .map(|(_, value)| value.trim().to_owned());
            let ours = query(&text, &name, &ReadErrors::default()).map(Cow::into_owned);
            prop_assert_eq!(ours, theirs);
        }

        #[test]
        fn different_bytes_are_different_values(one in "(%[8-9a-f][0-9a-f]|[a-z]){0,6}", other in "(%[8-9a-f][0-9a-f]|[a-z]){0,6}") {
            // Values are trimmed.
            let value = |text: &str| query(&format!("key=x{text}x"), "key", &ReadErrors::default()).map(Cow::into_owned);
            prop_assert_eq!(value(&one) == value(&other), one == other);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}", name in ".{0,4}") {
            _ = query(&text, &name, &ReadErrors::default());
        }
    }
}
