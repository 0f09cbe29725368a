//! Requests of the Redis protocol: arrays of bulk strings, and inline commands.
//!
//! Sizes are checked before anything is stored: a request announces its lengths, and one that is too large is refused
//! as soon as it announces them. An incomplete request is parsed again when more bytes have arrived. That costs one
//! step per argument, because bulk strings are skipped by their length.

use std::borrow::Cow;

use smallvec::SmallVec;

/// Our own commands have at most six arguments, `CLIENT` and `HELLO` a few more.
const MAX_ARGUMENTS: usize = 64;
/// The longest argument: longer than any key that a limit accepts.
const MAX_ARGUMENT_BYTES: usize = 64 * 1024;
/// The longest inline command, as in Redis.
const MAX_INLINE_BYTES: usize = 64 * 1024;
/// The longest request.
pub(super) const MAX_REQUEST_BYTES: usize = 128 * 1024;
/// The longest line with a length: digits, a sign and the line end, with room to spare.
const MAX_LENGTH_LINE: usize = 32;

/// The name and the arguments of one command.
pub(super) type Arguments<'b> = SmallVec<[Cow<'b, [u8]>; 8]>;

/// A violation of the protocol. The connection has to be closed, because the start of the next request is unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProtocolError(pub(super) String);

fn error<T>(text: impl Into<String>) -> Result<T, ProtocolError> {
    Err(ProtocolError(text.into()))
}

/// Parses the first request in `bytes`. Returns it with its length, or `None` if it is incomplete. A request without
/// words, such as an empty line, gets no reply.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<(Arguments<'_>, usize)>, ProtocolError> {
    match bytes.first() {
        None => Ok(None),
        Some(b'*') => parse_array(bytes),
        Some(_) => parse_inline(bytes),
    }
}

fn parse_array(bytes: &[u8]) -> Result<Option<(Arguments<'_>, usize)>, ProtocolError> {
    let Some((count, mut at)) = length(&bytes[1..], "invalid multibulk length")? else { return Ok(None) };
    at += 1;
    if count > MAX_ARGUMENTS as i64 {
        return error(format!("too many arguments: {count}, at most {MAX_ARGUMENTS}"));
    }
    let mut arguments = Arguments::new();
    for _ in 0..count.max(0) {
        match bytes.get(at) {
            None => return Ok(None),
            Some(b'$') => at += 1,
            Some(other) => return error(format!("expected '$', got '{}'", other.escape_ascii())),
        }
        let Some((size, used)) = length(&bytes[at..], "invalid bulk length")? else { return Ok(None) };
        at += used;
        let Ok(size) = usize::try_from(size) else { return error("invalid bulk length") };
        if size > MAX_ARGUMENT_BYTES {
            return error(format!("an argument of {size} bytes is too long, at most {MAX_ARGUMENT_BYTES}"));
        }
        if at + size > MAX_REQUEST_BYTES {
            return error(format!("the request is too long, at most {MAX_REQUEST_BYTES} bytes"));
        }
        let Some(end) = bytes.get(at + size..at + size + 2) else { return Ok(None) };
        if end != b"\r\n" {
            return error("a bulk string is not followed by a line end");
        }
        arguments.push(Cow::Borrowed(&bytes[at..at + size]));
        at += size + 2;
    }
    Ok(Some((arguments, at)))
}

/// Parses a length and its line end. Returns it with the number of bytes consumed.
fn length(bytes: &[u8], problem: &str) -> Result<Option<(i64, usize)>, ProtocolError> {
    // Lengths of clients have a few digits, and parsing them here takes a third of the time.
    let mut number = 0;
    for (at, byte) in bytes.iter().take(6).enumerate() {
        match byte {
            b'0'..=b'9' => number = 10 * number + i64::from(byte - b'0'),
            b'\r' if at > 0 && bytes.get(at + 1) == Some(&b'\n') => return Ok(Some((number, at + 2))),
            _ => break,
        }
    }
    let line = &bytes[..bytes.len().min(MAX_LENGTH_LINE)];
    let Some(end) = memchr::memchr(b'\n', line) else {
        return if line.len() == MAX_LENGTH_LINE { error(problem) } else { Ok(None) };
    };
    let digits = line[..end].strip_suffix(b"\r").unwrap_or(&line[..end]);
    let number = std::str::from_utf8(digits).ok().filter(|text| !text.starts_with('+'));
    match number.and_then(|text| text.parse().ok()) {
        Some(number) => Ok(Some((number, end + 1))),
        None => error(problem),
    }
}

fn parse_inline(bytes: &[u8]) -> Result<Option<(Arguments<'_>, usize)>, ProtocolError> {
    let within = &bytes[..bytes.len().min(MAX_INLINE_BYTES)];
    let Some(end) = memchr::memchr(b'\n', within) else {
        return if within.len() == MAX_INLINE_BYTES { error("too big inline request") } else { Ok(None) };
    };
    let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
    let arguments = words(line)?;
    if arguments.len() > MAX_ARGUMENTS {
        return error(format!("too many arguments, at most {MAX_ARGUMENTS}"));
    }
    Ok(Some((arguments, end + 1)))
}

/// Splits a line at blanks. A word may be quoted: in single quotes, `\'` is a quote; in double quotes, the escapes of
/// `redis-cli` apply.
fn words(line: &[u8]) -> Result<Arguments<'_>, ProtocolError> {
    let mut words = Arguments::new();
    let mut rest = line.trim_ascii();
    while let Some(first) = rest.first() {
        let (word, after) = match first {
            b'"' | b'\'' => quoted(&rest[1..], *first)?,
            _ => {
                let end = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len());
                (Cow::Borrowed(&rest[..end]), &rest[end..])
            }
        };
        words.push(word);
        rest = after.trim_ascii_start();
    }
    Ok(words)
}

/// Parses the rest of a quoted word. Returns the word and the text after it.
fn quoted(text: &[u8], quote: u8) -> Result<(Cow<'_, [u8]>, &[u8]), ProtocolError> {
    const UNBALANCED: &str = "unbalanced quotes in request";
    let mut word = Vec::new();
    let mut at = 0;
    loop {
        match text.get(at) {
            None => return error(UNBALANCED),
            Some(byte) if *byte == quote => break,
            Some(b'\\') => {
                let Some(escaped) = text.get(at + 1) else { return error(UNBALANCED) };
                let hex = text.get(at + 2..at + 4).and_then(|hex| std::str::from_utf8(hex).ok());
                let hex = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
                match (quote, escaped, hex) {
                    (b'\'', b'\'', _) => word.push(b'\''),
                    (b'\'', _, _) => word.extend([b'\\', *escaped]),
                    (_, b'x', Some(byte)) => {
                        word.push(byte);
                        at += 2;
                    }
                    (_, b'n', _) => word.push(b'\n'),
                    (_, b'r', _) => word.push(b'\r'),
                    (_, b't', _) => word.push(b'\t'),
                    (_, b'b', _) => word.push(8),
                    (_, b'a', _) => word.push(7),
                    (_, other, _) => word.push(*other),
                }
                at += 2;
            }
            Some(byte) => {
                word.push(*byte);
                at += 1;
            }
        }
    }
    let after = &text[at + 1..];
    match after.first() {
        Some(byte) if !byte.is_ascii_whitespace() => error(UNBALANCED),
        _ => Ok((Cow::Owned(word), after)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(bytes: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
        let (words, used) = parse(bytes).expect("it is valid")?;
        Some((words.into_iter().map(Cow::into_owned).collect(), used))
    }

    fn problem(bytes: &[u8]) -> String {
        parse(bytes).expect_err("it is not valid").0
    }

    #[test]
    fn an_array_is_read_and_the_next_request_is_left_alone() {
        let bytes = b"*2\r\n$4\r\nECHO\r\n$3\r\na\r\n\r\n*1\r\n$4\r\nPING\r\n";
        assert_eq!(parsed(bytes), Some((vec![b"ECHO".to_vec(), b"a\r\n".to_vec()], 23)));
        assert_eq!(parsed(&bytes[23..]), Some((vec![b"PING".to_vec()], 14)));
    }

    #[test]
    fn a_request_is_read_once_all_of_it_is_there() {
        let bytes = b"*3\r\n$11\r\nCL.THROTTLE\r\n$0\r\n\r\n$2\r\n15\r\n";
        for end in 0..bytes.len() {
            assert_eq!(parsed(&bytes[..end]), None, "{end} bytes");
        }
        assert_eq!(parsed(bytes).expect("whole").1, bytes.len());
        for end in 0..b"PING\r\n".len() {
            assert_eq!(parsed(&b"PING\r\n"[..end]), None);
        }
    }

    #[test]
    fn nothing_to_do_is_skipped() {
        for bytes in [&b"*0\r\n"[..], b"*-1\r\n", b"\r\n", b"   \n"] {
            assert_eq!(parsed(bytes), Some((vec![], bytes.len())), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn inline_words_can_be_quoted() {
        let words = |line: &[u8]| parsed(line).expect("whole").0;
        assert_eq!(words(b"TOLLGATE.CHECK  per-user 42 \r\n"), [&b"TOLLGATE.CHECK"[..], b"per-user", b"42"]);
        assert_eq!(words(b"ECHO \"a b\\x41\\n\\\"\"\n"), [&b"ECHO"[..], b"a bA\n\""]);
        assert_eq!(words(b"ECHO 'it\\'s \\n'\n"), [&b"ECHO"[..], b"it's \\n"]);
        assert_eq!(problem(b"ECHO \"a\n"), "unbalanced quotes in request");
        assert_eq!(problem(b"ECHO \"a\"b\n"), "unbalanced quotes in request");
    }

    #[test]
    fn nonsense_is_refused() {
        let too_long = format!("*1\r\n${}\r\n", MAX_ARGUMENT_BYTES + 1);
        let endless = vec![b'a'; MAX_INLINE_BYTES];
        let cases: [(&[u8], &str); 9] = [
            (b"*x\r\n", "invalid multibulk length"),
            (b"*+1\r\n", "invalid multibulk length"),
            (b"*11111111111111111111111111111111", "invalid multibulk length"),
            (b"*100000\r\n", "too many arguments: 100000, at most 64"),
            (b"*1\r\n:1\r\n", "expected '$', got ':'"),
            (b"*1\r\n$-1\r\n", "invalid bulk length"),
            (b"*1\r\n$1\r\nab\r\n", "a bulk string is not followed by a line end"),
            (too_long.as_bytes(), "an argument of 65537 bytes is too long, at most 65536"),
            (&endless, "too big inline request"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(problem(bytes), expected);
        }
        let words: String = std::iter::repeat_n("*3\r\n", 1).chain(std::iter::repeat_n("$65536\r\n", 1)).collect();
        let mut large = words.into_bytes();
        large.extend(vec![b'a'; MAX_ARGUMENT_BYTES]);
        large.extend(b"\r\n$65536\r\n");
        assert_eq!(problem(&large), "the request is too long, at most 131072 bytes");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Some((_, used))) = parse(&bytes) {
                prop_assert!(used > 0 && used <= bytes.len());
            }
        }

        #[test]
        fn every_array_is_read_as_it_was_written(words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..9)) {
            let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
            for word in &words {
                bytes.extend(format!("${}\r\n", word.len()).bytes());
                bytes.extend(word);
                bytes.extend(b"\r\n");
            }
            let whole = bytes.len();
            bytes.extend(b"*1\r\n");
            prop_assert_eq!(parsed(&bytes), Some((words, whole)));
        }
    }
}
