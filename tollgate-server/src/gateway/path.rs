//! Paths that servers disagree on.
//!
//! A rule matches a path as most services read it: an escaped slash divides nothing. Some decode it first and resolve `..`
//! then, and some take a backslash for a slash. To them `/x/..%2fapi` is `/api`, and a limit of `/api` would not have seen
//! it. Nobody who means well writes such a path.

/// Whether a segment that is `.` or `..` appears once escaped slashes and backslashes divide segments.
pub(super) fn has_two_readings(path: &str) -> bool {
    if !may_have_hidden_slashes(path) {
        return false;
    }
    let bytes = path.as_bytes();
    let (mut at, mut dots, mut is_dots, mut hidden) = (0, 0, true, false);
    // What a segment is made of so far, and whether a hidden slash stands at either end of it.
    while at <= bytes.len() {
        let (byte, length) = match bytes.get(at) {
            None => (b'/', 1),
            Some(b'%') => escaped(&bytes[at..]),
            Some(byte) => (*byte, 1),
        };
        let is_hidden = byte == b'\\' || (byte == b'/' && length > 1);
        match byte {
            b'/' | b'\\' => {
                if is_dots && (1..=2).contains(&dots) && (hidden || is_hidden) {
                    return true;
                }
                (dots, is_dots, hidden) = (0, true, is_hidden);
            }
            b'.' => dots += 1,
            _ => is_dots = false,
        }
        at += length;
    }
    false
}

/// A first look, which most paths end with.
pub(super) fn may_have_hidden_slashes(path: &str) -> bool {
    let is_one = |at: usize| {
        matches!(path.as_bytes()[at..], [b'\\', ..] | [b'%', b'2', b'f' | b'F', ..] | [b'%', b'5', b'c' | b'C', ..])
    };
    memchr::memchr2_iter(b'%', b'\\', path.as_bytes()).any(is_one)
}

/// The byte that an escape means, and how long it is written.
fn escaped(bytes: &[u8]) -> (u8, usize) {
    let digit = |at: usize| bytes.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    match (digit(1), digit(2)) {
        (Some(high), Some(low)) => (u8::try_from(high << 4 | low).unwrap_or(b'%'), 3),
        _ => (b'%', 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_beside_hidden_slashes_are_found() {
        for path in ["/x/..%2fapi", "/x%2F..%2Fapi", "/x/%2e%2E%5capi", "/..\\api", "/a\\.\\b", "/a%2f..", "/%2f../x"] {
            assert!(has_two_readings(path), "{path}");
        }
        for path in [
            "/",
            "/a/../b",
            "/a%2fb",
            "/a%2Fb/../c",
            "/a...%2fb",
            "/files/x%5cy",
            "/100%",
            "/%2",
            "/.a%2fb",
            "/%252e%252f",
        ] {
            assert!(!has_two_readings(path), "{path}");
        }
    }
}
