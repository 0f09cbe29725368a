//! Header values: trimmed, and one per name. Hosts and credentials have forms of their own.
//!
//! HTTP/1 parsers trim spaces and tabs. Python's `strip` and JavaScript's `trim`, which services call on keys, also
//! remove the no-break space and the next-line character, in Latin-1 or UTF-8.

use std::borrow::Cow;

use http::HeaderName;
use http::header::{AUTHORIZATION, COOKIE, HOST, PROXY_AUTHORIZATION};
use tollgate_http::Headers;

use super::base64::Ambiguous;
use super::credentials::{self, Credentials};
use super::{ReadErrors, Unreadable, host, only, signed_token};

/// Returns the value of a header, trimmed. Several differing values, and a name with a password that upstreams decode
/// differently, are recorded as errors. The lines of cookies are joined.
#[inline]
pub(crate) fn header<'a>(headers: Headers<'a>, name: &HeaderName, errors: &ReadErrors) -> Option<Cow<'a, [u8]>> {
    read(headers, name, errors, |value| checked_text(name, value, errors))
}

/// Returns the value of a header for a key. Several differing values, and credentials that upstreams read differently,
/// are recorded as errors.
#[inline(always)]
pub(crate) fn key<'a>(headers: Headers<'a>, name: &HeaderName, errors: &ReadErrors) -> Option<Cow<'a, [u8]>> {
    read(headers, name, errors, |value| {
        key_text(name, value).unwrap_or_else(|problem| {
            errors.note(problem);
            Cow::Borrowed(trimmed(value))
        })
    })
}

#[inline(always)]
fn read<'a>(
    headers: Headers<'a>,
    name: &HeaderName,
    errors: &ReadErrors,
    form: impl Fn(&'a [u8]) -> Cow<'a, [u8]>,
) -> Option<Cow<'a, [u8]>> {
    if headers.has_no_repeats() {
        return headers.get_named(name).map(form);
    }
    if *name == COOKIE {
        return cookie_lines(headers);
    }
    only(headers.get_all(name).map(form), errors, || Unreadable::DuplicateHeader(name.as_str().into()))
}

/// Returns the normal form of a value, for conditions. A name with a password that upstreams decode differently is
/// recorded as an error.
#[inline]
pub(crate) fn checked_text<'v>(name: &HeaderName, value: &'v [u8], errors: &ReadErrors) -> Cow<'v, [u8]> {
    if !is_credentials(name) {
        return text(name, value);
    }
    let credentials = Credentials::new(value);
    if let Err(Ambiguous) = credentials.check() {
        errors.note(ambiguous(name));
    }
    credentials.text()
}

fn ambiguous(name: &HeaderName) -> Unreadable {
    Unreadable::InvalidCredentials(format!("header {name}").into())
}

/// Returns the normal form of a value, for conditions.
#[inline]
pub(crate) fn text<'v>(name: &HeaderName, value: &'v [u8]) -> Cow<'v, [u8]> {
    if is_credentials(name) {
        Credentials::new(value).text()
    } else if *name == HOST {
        host::text(trimmed(value))
    } else {
        Cow::Borrowed(trimmed(value))
    }
}

/// Returns the normal form of a value, for keys.
///
/// # Errors
///
/// If upstreams would read different tokens in it.
#[inline(always)]
pub(crate) fn key_text<'v>(name: &HeaderName, value: &'v [u8]) -> Result<Cow<'v, [u8]>, Unreadable> {
    let form = if is_credentials(name) { credentials::key(value) } else { signed_token::normal(trimmed(value)) };
    form.map_err(|Ambiguous| ambiguous(name))
}

#[inline]
fn is_credentials(name: &HeaderName) -> bool {
    *name == AUTHORIZATION || *name == PROXY_AUTHORIZATION
}

/// Returns all lines of the `Cookie` header as one. HTTP/2 clients may split it (RFC 9113, 8.2.3), and services join the
/// lines of HTTP/1 in the same way.
pub(crate) fn cookie_lines(headers: Headers<'_>) -> Option<Cow<'_, [u8]>> {
    let mut lines = headers.get_all(&COOKIE).map(trimmed);
    let first = lines.next()?;
    let Some(second) = lines.next() else { return Some(Cow::Borrowed(first)) };
    let all: Vec<&[u8]> = [first, second].into_iter().chain(lines).filter(|line| !line.is_empty()).collect();
    Some(Cow::Owned(all.join(&b"; "[..])))
}

/// Returns `true` if a value begins or ends with a space or a tab. HTTP/2 forbids that (RFC 9113, 8.2.1), and an HTTP/1
/// server would trim it.
#[must_use]
pub fn is_padded(value: &[u8]) -> bool {
    let is_blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    is_blank(value.first()) || is_blank(value.last())
}

/// Trims a value.
#[inline]
pub(crate) fn trimmed(value: &[u8]) -> &[u8] {
    match value {
        // Nearly every value: neither end can be part of something that is trimmed.
        [b'!'..=b'~'] | [b'!'..=b'~', .., b'!'..=b'~'] => value,
        _ => trim(value),
    }
}

#[inline(never)]
fn trim(mut value: &[u8]) -> &[u8] {
    loop {
        if let Some((blank, rest)) = value.split_first_chunk()
            && is_wide_blank(*blank)
        {
            value = rest;
            continue;
        }
        if let Some((rest, blank)) = value.split_last_chunk()
            && is_wide_blank(*blank)
        {
            value = rest;
            continue;
        }
        value = match value {
            [0x09..=0x0D | b' ' | 0x1C..=0x1F | 0x85 | 0xA0, rest @ ..] => rest,
            [0xC2, 0x85 | 0xA0, rest @ ..] => rest,
            [rest @ .., 0xC2, 0x85 | 0xA0] => rest,
            [rest @ .., 0x09..=0x0D | b' ' | 0x1C..=0x1F] => rest,
            // In Latin-1, and not the end of a UTF-8 character.
            [rest @ .., 0x85 | 0xA0] if !ends_in_utf8(value) => rest,
            _ => return value,
        };
    }
}

/// Returns `true` if there is white space in a trimmed value.
pub(super) fn is_blank_within(value: &[u8]) -> bool {
    if value.iter().all(u8::is_ascii_graphic) {
        return false;
    }
    match std::str::from_utf8(value) {
        Ok(text) => text.contains(|letter: char| is_blank(letter) || letter.is_ascii_control()),
        Err(_) => value.iter().any(|byte| matches!(byte, 0..=b' ' | 0x7F | 0x85 | 0xA0)),
    }
}

/// Returns `true` if the last byte ends a multi-byte UTF-8 character. Only the last four bytes are read, because a
/// client controls the length.
fn ends_in_utf8(value: &[u8]) -> bool {
    let tails = (2..=4).filter_map(|bytes| value.get(value.len().checked_sub(bytes)?..));
    tails
        .into_iter()
        .any(|tail| tail[0] >= 0xC2 && std::str::from_utf8(tail).is_ok_and(|text| text.chars().count() == 1))
}

/// Returns `true` for a blank that takes three bytes of UTF-8.
fn is_wide_blank(bytes: [u8; 3]) -> bool {
    bytes[0] >= 0xE1 && std::str::from_utf8(&bytes).is_ok_and(|text| text.chars().all(is_blank))
}

/// Returns `true` for Unicode white space, and for zero-width characters that some treat as such.
fn is_blank(letter: char) -> bool {
    letter.is_whitespace() || matches!(letter, '\u{200b}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::*;

    #[test]
    fn white_space_around_a_value_is_trimmed() {
        for value in [&b"KEY"[..], b" KEY\t", b"\xA0KEY", b"KEY\xA0", b"KEY \xC2\xA0", b"\xC2\xA0 KEY", b"\x85KEY\x85"]
        {
            assert_eq!(trimmed(value), b"KEY", "{value:?}");
        }
        for blank in ["\u{1680}", "\u{2003}", "\u{2005}", "\u{200b}", "\u{3000}", "\u{feff}", "\u{3000} \u{2003}"] {
            let padded = [format!("{blank}KEY"), format!("KEY{blank}"), format!("{blank} KEY {blank}")];
            assert!(padded.iter().all(|value| trimmed(value.as_bytes()) == b"KEY"), "{padded:?}");
        }
        // The last byte of `à` is 0xA0.
        assert_eq!(trimmed("voilà".as_bytes()), "voilà".as_bytes());
        assert_eq!(trimmed(b" \t"), b"");
        assert_eq!(trimmed(b"a b"), b"a b");
        let long = ["\u{e9}".repeat(16_000).as_bytes(), &[0xA0; 30_000][..]].concat();
        assert_eq!(trimmed(&long), "\u{e9}".repeat(16_000).as_bytes());
    }

    #[test]
    fn differing_values_are_an_error_and_equal_ones_are_not() {
        let name = HeaderName::from_static("x-key");
        let read = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(&name, HeaderValue::from_str(value).unwrap());
            }
            let errors = ReadErrors::default();
            let found = header((&headers).into(), &name, &errors).map(Cow::into_owned);
            (found, errors.take())
        };
        assert_eq!(read(&["a"]), (Some(b"a".to_vec()), None));
        assert_eq!(read(&["a", " a\t"]), (Some(b"a".to_vec()), None));
        assert_eq!(read(&["a", "b"]), (Some(b"a".to_vec()), Some(Unreadable::DuplicateHeader("x-key".into()).into())));
        assert_eq!(
            read(&["a", "a", "b"]),
            (Some(b"a".to_vec()), Some(Unreadable::DuplicateHeader("x-key".into()).into()))
        );
        assert_eq!(read(&[]), (None, None));
    }

    #[test]
    fn lines_of_cookies_are_one() {
        let read = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(COOKIE, HeaderValue::from_str(line).unwrap());
            }
            let errors = ReadErrors::default();
            let joined =
                header((&headers).into(), &COOKIE, &errors).map(|value| String::from_utf8(value.into()).unwrap());
            (joined, errors.take())
        };
        assert_eq!(read(&["a=1"]), (Some("a=1".into()), None));
        assert_eq!(read(&["a=1", " b=2 ", "", "b=2"]), (Some("a=1; b=2; b=2".into()), None));
        assert_eq!(read(&[]), (None, None));
    }
}
