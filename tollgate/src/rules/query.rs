//! The parameters of a query (`application/x-www-form-urlencoded`).
//!
//! Names and values are decoded, so that `a%62c` and `abc` are one client and not two. Bytes that are not UTF-8 stay
//! as their percent sign and two digits in upper case, so that different bytes stay different: replaced by a mark,
//! as is usual, all of them would be one key. Then `%FF` and `%25FF` are one key, which only joins a client with
//! itself.

use std::borrow::Cow;

/// The value of the first parameter of that name. One without an equals sign is empty, but it is there.
pub(crate) fn query<'a>(query: &'a str, name: &str) -> Option<Cow<'a, str>> {
    pairs(query).find(|(given, _)| is_name(given, name)).map(|(_, value)| decoded(value))
}

/// All parameters, in order, decoded.
#[cfg_attr(not(any(feature = "file", test)), expect(dead_code, reason = "only expressions look at all of them"))]
pub(crate) fn parameters(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    pairs(query).map(|(name, value)| (decoded(name), decoded(value)))
}

/// Names and values as they were sent.
fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

fn is_name(given: &str, name: &str) -> bool {
    if is_plain(given) { given == name } else { Decode(given.as_bytes()).eq(name.bytes()) }
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

/// The bytes that are meant. A percent sign without two digits means itself.
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

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parameters_are_decoded_as_forms_write_them() {
        let read = |query: &str| -> Vec<(String, String)> {
            parameters(query).map(|(name, value)| (name.into_owned(), value.into_owned())).collect()
        };
        for (query, expected) in [
            ("", vec![]),
            ("&&", vec![]),
            ("a=1&b=2", vec![("a", "1"), ("b", "2")]),
            ("flag", vec![("flag", "")]),
            ("a=b=c", vec![("a", "b=c")]),
            ("q=a+b%20c&%71=%2F", vec![("q", "a b c"), ("q", "/")]),
            ("p=100%&r=%4&s=%zz", vec![("p", "100%"), ("r", "%4"), ("s", "%zz")]),
            ("u=%C3%A9&bad=%ff", vec![("u", "é"), ("bad", "%FF")]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
            assert_eq!(read(query), expected, "{query}");
        }
    }

    #[test]
    fn a_parameter_is_found_and_decoded() {
        for (text, expected) in [
            ("key=abc", Some("abc")),
            ("a=1&key=abc&b=2", Some("abc")),
            ("key=1&key=2", Some("1")),
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
            ("KEY=1", None),
            ("keys=1", None),
            ("", None),
            ("=1", None),
        ] {
            assert_eq!(query(text, "key").as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_plain_value_is_not_copied() {
        assert!(matches!(query("key=plain", "key"), Some(Cow::Borrowed("plain"))));
        assert!(matches!(query("k%65y=plain", "key"), Some(Cow::Borrowed("plain"))));
    }

    #[test]
    fn bytes_that_are_not_utf8_stay_different() {
        assert_eq!(query("key=a%ff%e2%82b", "key").as_deref(), Some("a%FF%E2%82b"));
        assert_ne!(query("key=%ff", "key"), query("key=%fe", "key"));
        assert_eq!(query("key=%fF", "key"), query("key=%Ff", "key"));
    }

    proptest! {
        /// Letters that are no digits, so that no pieces make a byte together: of those that are not UTF-8 the other has
        /// its own opinion.
        #[test]
        fn agrees_with_form_urlencoded(text in "([gh%+=&]|%[46][12]|%c3%a9|é){0,16}", name in "[ghéaA]{0,2}") {
            let theirs = form_urlencoded::parse(text.as_bytes())
                .find(|(given, _)| *given == name)
                .map(|(_, value)| value.into_owned());
            let ours = query(&text, &name).map(Cow::into_owned);
            prop_assert_eq!(ours, theirs);
        }

        #[test]
        fn different_bytes_are_different_values(one in "(%[8-9a-f][0-9a-f]|[a-z]){0,6}", other in "(%[8-9a-f][0-9a-f]|[a-z]){0,6}") {
            let value = |text: &str| query(&format!("key={text}"), "key").map(Cow::into_owned);
            prop_assert_eq!(value(&one) == value(&other), one == other);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}", name in ".{0,4}") {
            _ = query(&text, &name);
        }
    }
}
