//! The names and values in the query of a request, as forms write them.

use std::borrow::Cow;

/// Every `name=value`, in order, with `+` and `%20` read as a space. What is not UTF-8 becomes `U+FFFD`.
pub(super) fn pairs(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    })
}

fn decoded(text: &str) -> Cow<'_, str> {
    if !text.bytes().any(|byte| matches!(byte, b'%' | b'+')) {
        return Cow::Borrowed(text);
    }
    let mut rest = text.as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some((&first, behind)) = rest.split_first() {
        let escaped = if first == b'%' { behind.split_at_checked(2).and_then(hexadecimal) } else { None };
        match (first, escaped) {
            (_, Some((byte, after))) => {
                bytes.push(byte);
                rest = after;
                continue;
            }
            (b'+', None) => bytes.push(b' '),
            // A stray `%` stands for itself, as browsers read it.
            (byte, None) => bytes.push(byte),
        }
        rest = behind;
    }
    Cow::Owned(match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    })
}

fn hexadecimal<'a>((digits, after): (&'a [u8], &'a [u8])) -> Option<(u8, &'a [u8])> {
    let digit = |at: usize| char::from(*digits.get(at)?).to_digit(16);
    let byte = u8::try_from(digit(0)? * 16 + digit(1)?).ok()?;
    Some((byte, after))
}

#[cfg(test)]
mod tests {
    use super::pairs;

    fn read(query: &str) -> Vec<(String, String)> {
        pairs(query).map(|(name, value)| (name.into_owned(), value.into_owned())).collect()
    }

    #[test]
    fn pairs_are_decoded_as_forms_write_them() {
        for (query, expected) in [
            ("", vec![]),
            ("&&", vec![]),
            ("a=1&b=2", vec![("a", "1"), ("b", "2")]),
            ("flag", vec![("flag", "")]),
            ("a=b=c", vec![("a", "b=c")]),
            ("q=a+b%20c&%71=%2F", vec![("q", "a b c"), ("q", "/")]),
            ("p=100%&r=%4&s=%zz", vec![("p", "100%"), ("r", "%4"), ("s", "%zz")]),
            ("u=%C3%A9&bad=%ff", vec![("u", "é"), ("bad", "\u{fffd}")]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
            assert_eq!(read(query), expected, "{query}");
        }
    }
}
