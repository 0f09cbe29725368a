//! Request lines as logs have them.

use memchr::{memchr, memchr2, memrchr};

use super::Record;

/// Methods are short words.
const MAX_METHOD_BYTES: usize = 32;

/// Returns the position of the quote that ends a quoted value.
pub(super) fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut start = 0;
    loop {
        let found = start + memchr2(b'"', b'\\', &text[start..])?;
        if text[found] == b'"' {
            return Some(found);
        }
        // The escaped character may be a quote.
        start = found + 2;
        if start > text.len() {
            return None;
        }
    }
}

/// Calls `read` with a quoted value, in which Apache and nginx write quotes, backslashes and bytes as `\"`, `\\` and
/// `\x22`.
pub(super) fn unescaped<T>(value: &[u8], read: impl FnOnce(&[u8]) -> T) -> T {
    if memchr(b'\\', value).is_none() {
        return read(value);
    }
    let mut plain = Vec::with_capacity(value.len());
    let mut rest = value;
    while let [first, tail @ ..] = rest {
        let (byte, tail) = match (first, tail) {
            (b'\\', [b'x' | b'X', high, low, tail @ ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                (hex(*high) << 4 | hex(*low), tail)
            }
            (b'\\', [b'n', tail @ ..]) => (b'\n', tail),
            (b'\\', [b'r', tail @ ..]) => (b'\r', tail),
            (b'\\', [b't', tail @ ..]) => (b'\t', tail),
            (b'\\', [escaped, tail @ ..]) => (*escaped, tail),
            (byte, tail) => (*byte, tail),
        };
        plain.push(byte);
        rest = tail;
    }
    read(&plain)
}

fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

/// Reads a line such as `GET /path HTTP/1.1`. Returns `false` if it is not a request.
pub(super) fn read(line: &[u8], record: &mut Record) -> bool {
    let Some(end) = memchr(b' ', line) else { return false };
    let (method, rest) = (&line[..end], &line[end + 1..]);
    let target = match memrchr(b' ', rest) {
        Some(end) if rest[end + 1..].starts_with(b"HTTP/") => &rest[..end],
        _ => rest,
    };
    set(method, target, record)
}

/// Sets the method and the target. Returns `false` if they are not those of a request.
pub(super) fn set(method: &[u8], target: &[u8], record: &mut Record) -> bool {
    let is_token = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let is_word = method.first().is_some_and(u8::is_ascii_alphabetic) && method.iter().all(is_token);
    if !is_word || method.len() > MAX_METHOD_BYTES {
        return false;
    }
    match target {
        [b'/', ..] | b"*" => record.set_target(target),
        [] => return false,
        _ if method == b"CONNECT" => {
            record.set_host(target);
            record.set_target(b"/");
        }
        _ => {
            let Some((host, path)) = absolute(target) else { return false };
            if !record.has_host() && !host.is_empty() {
                record.set_host(host);
            }
            match path {
                [b'/', ..] => record.set_target(path),
                _ => record.set_target(&[b"/", path].concat()),
            }
        }
    }
    record.set_method(method);
    true
}

/// Splits a URL into its host and its path.
fn absolute(url: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = [&b"http://"[..], b"https://", b"ws://", b"wss://"].iter().find_map(|scheme| {
        let (start, rest) = url.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    })?;
    let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?' | b'#')).unwrap_or(rest.len());
    Some(rest.split_at(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(line: &str) -> Option<(String, String, Option<String>)> {
        let mut record = Record::default();
        let owned = |text: &str| text.to_owned();
        read(line.as_bytes(), &mut record)
            .then(|| (owned(record.method()), owned(record.target()), record.host().map(owned)))
    }

    #[test]
    fn request_lines_of_every_form_are_read() {
        let of = |method: &str, target: &str, host: Option<&str>| {
            Some((method.to_owned(), target.to_owned(), host.map(str::to_owned)))
        };
        assert_eq!(request("GET /a?b HTTP/1.1"), of("GET", "/a?b", None));
        assert_eq!(request("GET /a b HTTP/2.0"), of("GET", "/a b", None));
        assert_eq!(request("GET /"), of("GET", "/", None));
        assert_eq!(request("OPTIONS * HTTP/1.1"), of("OPTIONS", "*", None));
        assert_eq!(request("GET http://a.example:80/x HTTP/1.1"), of("GET", "/x", Some("a.example:80")));
        assert_eq!(request("GET https://a.example?q HTTP/1.1"), of("GET", "/?q", Some("a.example")));
        assert_eq!(request("CONNECT a.example:443 HTTP/1.1"), of("CONNECT", "/", Some("a.example:443")));
    }

    #[test]
    fn other_lines_are_no_requests() {
        for line in ["", "-", "\u{16}\u{3}\u{1}", "GET", "GET  HTTP/1.1", "G\u{e9}T / HTTP/1.1", "GET a HTTP/1.1"] {
            assert_eq!(request(line), None, "{line}");
        }
    }

    #[test]
    fn escaped_values_are_read() {
        unescaped(br#"a\"b\\c\x22\xe2\x9c\x93\z\"#, |value| assert_eq!(value, b"a\"b\\c\"\xe2\x9c\x93z\\"));
        assert_eq!(closing_quote(br#"a\"b" c"#), Some(4));
        assert_eq!(closing_quote(br"a\"), None);
    }
}
