//! One cookie of a request (RFC 6265), found where it stands. Nothing is copied, and nothing is decoded: browsers
//! send a value back byte by byte as it was set.

use http::header::COOKIE;

use crate::http::Headers;

/// The value of the first cookie of that name, whose case counts, without the quotes round it.
///
/// HTTP/2 may divide the header into several lines, so all are looked at. Browsers send the most specific cookie of
/// a name first, so the first counts.
pub(crate) fn cookie<'a>(headers: Headers<'a>, name: &str) -> Option<&'a [u8]> {
    headers
        .get_all(&COOKIE)
        .flat_map(|line| line.split(|byte| *byte == b';'))
        .filter_map(pair)
        .find_map(|(given, value)| (given == name.as_bytes()).then_some(value))
}

fn pair(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let (name, value) = text.split_at(text.iter().position(|byte| *byte == b'=')?);
    Some((name.trim_ascii(), unquoted(value.get(1..)?.trim_ascii())))
}

fn unquoted(value: &[u8]) -> &[u8] {
    match value {
        [b'"', inner @ .., b'"'] => inner,
        _ => value,
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

    fn found(lines: &[&str], name: &str) -> Option<String> {
        cookie((&headers(lines)).into(), name).map(|value| String::from_utf8(value.to_vec()).unwrap())
    }

    #[test]
    fn a_cookie_is_found_by_its_exact_name() {
        let lines = ["session=abc; theme=dark", "Session=upper; other=1=2; quoted=\"a b\"; empty=; bare; =nameless"];
        for (name, expected) in [
            ("session", Some("abc")),
            ("theme", Some("dark")),
            ("Session", Some("upper")),
            ("SESSION", None),
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
    fn the_first_of_a_name_counts() {
        assert_eq!(found(&["a=1; a=2"], "a").as_deref(), Some("1"));
        assert_eq!(found(&["b=0", "a=1", "a=2"], "a").as_deref(), Some("1"));
    }

    #[test]
    fn untidy_lines_are_read_all_the_same() {
        assert_eq!(found(&[" a = 1 ;;; b=2;"], "a").as_deref(), Some("1"));
        assert_eq!(found(&[" a = 1 ;;; b=2;"], "b").as_deref(), Some("2"));
        assert_eq!(found(&["a=\"1"], "a").as_deref(), Some("\"1"));
        assert_eq!(found(&["a=\""], "a").as_deref(), Some("\""));
        assert_eq!(found(&["a=\"\""], "a").as_deref(), Some(""));
        assert_eq!(found(&[], "a"), None);
    }

    proptest! {
        #[test]
        fn agrees_with_the_cookie_crate(
            line in r#"([a-c ]{0,3}(=["0-9= ]{0,4})?;? ?){0,6}"#,
            name in "[a-c]{1,2}",
        ) {
            let theirs = cookie::Cookie::split_parse(line.as_str())
                .filter_map(Result::ok)
                .find(|cookie| cookie.name() == name)
                .map(|cookie| cookie.value_trimmed().to_owned());
            prop_assert_eq!(found(&[&line], &name), theirs);
        }

        #[test]
        fn no_bytes_panic(line in prop::collection::vec(32_u8..=255, 0..60), name in ".{0,4}") {
            let Ok(value) = HeaderValue::from_bytes(&line) else { return Ok(()) };
            _ = super::cookie((&HeaderMap::from_iter([(COOKIE, value)])).into(), &name);
        }
    }
}
