//! The Redis protocol: any bytes get one reply for each request and a protocol error at the first malformed one, however
//! they arrive.

use std::io::Write as _;
use std::sync::LazyLock;

use tempfile::NamedTempFile;
use tollgate_server::fuzzing::{RespConversation, Service, parse_resp};

/// Longer inputs are cut at fewer places.
const MAX_CUTS: usize = 24;

const TOKEN: &str = "0123456789abcdef";

static TOKENS_FILE: LazyLock<NamedTempFile> = LazyLock::new(|| {
    let mut file = NamedTempFile::new().unwrap_or_else(|error| panic!("no temporary file: {error}"));
    file.write_all(TOKEN.as_bytes()).unwrap_or_else(|error| panic!("no temporary file: {error}"));
    file
});

/// Executes bytes as the requests of a connection.
pub fn resp(input: &[u8]) {
    let whole = Service::default().resp(None, [input]);
    let cuts = (1..input.len()).step_by(input.len() / MAX_CUTS + 1);
    for cut in cuts {
        let (first, rest) = input.split_at(cut);
        assert_eq!(Service::default().resp(None, [first, rest]), whole, "cut at {cut}");
    }
    let bytes = input.chunks(1 + input.len() / 1_000);
    assert_eq!(Service::default().resp(None, bytes), whole, "in small pieces");

    let (requests, is_malformed) = parse_resp(input);
    // A request that ends the connection, and those after it.
    let name = |request: &[Vec<u8>]| request.first().map(|name| name.to_ascii_lowercase()).unwrap_or_default();
    let last = requests.iter().position(|request| matches!(&name(request)[..], b"quit" | b"post" | b"host:"));
    let executed = &requests[..last.map_or(requests.len(), |last| last + 1)];
    let is_silent = |request: &&Vec<Vec<u8>>| matches!(&name(request)[..], b"" | b"post" | b"host:");
    // An empty word is a command that does not exist, and a request without words is nothing.
    let unanswered =
        executed.iter().filter(is_silent).filter(|request| request.is_empty() || !request[0].is_empty()).count();
    let has_error = is_malformed && last.is_none();
    assert_eq!(whole.is_closed, last.is_some() || has_error);
    let replies = count_replies(&whole.replies);
    assert_eq!(replies, executed.len() - unanswered + usize::from(has_error));
    if has_error {
        let text = String::from_utf8_lossy(&whole.replies);
        let last = text.trim_end().rsplit("\r\n").next();
        assert!(last.is_some_and(|last| last.starts_with("-ERR Protocol error: ")), "{text}");
    }
    as_arrays(executed, &whole, has_error);
    without_token(input, replies);
}

/// The same requests, written as arrays of bulk strings, get the same replies.
fn as_arrays(requests: &[Vec<Vec<u8>>], whole: &RespConversation, has_error: bool) {
    let mut bytes = Vec::new();
    for request in requests {
        bytes.extend(format!("*{}\r\n", request.len()).bytes());
        for word in request {
            bytes.extend(format!("${}\r\n", word.len()).bytes());
            bytes.extend(word);
            bytes.extend(b"\r\n");
        }
    }
    let (again, is_malformed) = parse_resp(&bytes);
    // Inline requests can be longer in this form, and then they are refused.
    if is_malformed {
        return;
    }
    assert_eq!(again, requests);
    let replies = Service::default().resp(None, [&bytes[..]]).replies;
    assert!(if has_error { whole.replies.starts_with(&replies) } else { whole.replies == replies });
}

/// Clients without a token get the same number of replies, and no decision.
fn without_token(input: &[u8], replies: usize) {
    if input.windows(TOKEN.len()).any(|word| word == TOKEN.as_bytes()) {
        return;
    }
    let service = Service::default();
    let refused = service.resp(Some(TOKENS_FILE.path()), [input]);
    assert_eq!(count_replies(&refused.replies), replies);
    let peek = service.resp(None, [&b"TOLLGATE.PEEK global\r\nTOLLGATE.PEEK per-user ann\r\n"[..]]);
    let fresh = Service::default().resp(None, [&b"TOLLGATE.PEEK global\r\nTOLLGATE.PEEK per-user ann\r\n"[..]]);
    assert_eq!(peek, fresh, "a client without a token has taken units");
}

/// Parses replies as a client does, and returns their number.
fn count_replies(mut replies: &[u8]) -> usize {
    let mut count = 0;
    while !replies.is_empty() {
        replies = after_value(replies, 0);
        count += 1;
    }
    count
}

/// Returns the bytes after the first value.
fn after_value(bytes: &[u8], depth: usize) -> &[u8] {
    assert!(depth < 8, "values are nested too deeply");
    let end = bytes.windows(2).position(|two| two == b"\r\n").unwrap_or_else(|| panic!("a line does not end"));
    let (line, rest) = (&bytes[1..end], &bytes[end + 2..]);
    let number = || {
        let text = std::str::from_utf8(line).unwrap_or_else(|_| panic!("a number is not text"));
        text.parse::<i64>().unwrap_or_else(|_| panic!("{text} is not a number"))
    };
    let values = |count: i64| (0..count).fold(rest, |rest, _| after_value(rest, depth + 1));
    match bytes[0] {
        b'+' | b'-' => {
            assert!(!line.iter().any(u8::is_ascii_control), "a line has a control character");
            rest
        }
        b':' => {
            number();
            rest
        }
        b'_' => rest,
        b'$' if number() == -1 => rest,
        b'$' => {
            let length = usize::try_from(number()).unwrap_or_else(|_| panic!("a length is negative"));
            assert_eq!(&rest[length..length + 2], b"\r\n");
            &rest[length + 2..]
        }
        b'*' => values(number()),
        b'%' => values(2 * number()),
        other => panic!("{} is no type of a reply", other.escape_ascii()),
    }
}
