//! Replies of Redis: the scanner and the client's parser agree where each reply ends, and no reader panics.

use tollgate::internal::redis_replies::{ReplyScanner, read_reply};

/// Longer inputs are cut at fewer places.
const MAX_CUTS: usize = 24;

/// The bounds of the scanner.
const MAX_BYTES: usize = 64 << 10;
const MAX_DEPTH: usize = 8;

/// Receives bytes from a server.
pub fn redis_replies(input: &[u8]) {
    let (ends, error) = scan_bytes(input);
    let cuts = (0..input.len()).step_by(input.len() / MAX_CUTS + 1);
    for cut in cuts {
        let mut scanner = ReplyScanner::default();
        let (first, rest) = input.split_at(cut);
        let replies = scanner.scan(first).and_then(|replies| Ok(replies + scanner.scan(rest)?));
        match &error {
            None => assert_eq!(replies, Ok(ends.len() as u64), "cut at {cut}"),
            Some(error) => assert_eq!(replies.as_ref(), Err(error), "cut at {cut}"),
        }
    }
    let mut start = 0;
    for end in ends {
        let reply = &input[start..end];
        assert!(reply.len() <= MAX_BYTES, "a reply of {} bytes", reply.len());
        check_reply(reply);
        start = end;
    }
}

/// Returns where each reply ends, and why the connection is closed.
fn scan_bytes(input: &[u8]) -> (Vec<usize>, Option<String>) {
    let (mut scanner, mut ends) = (ReplyScanner::default(), Vec::new());
    for (index, byte) in input.chunks(1).enumerate() {
        match scanner.scan(byte) {
            Ok(0) => {}
            Ok(1) => ends.push(index + 1),
            Ok(replies) => panic!("{replies} replies end in one byte"),
            Err(error) => return (ends, Some(error)),
        }
    }
    (ends, None)
}

/// The client's parser reads the reply to its end, unless it refuses its content.
fn check_reply(reply: &[u8]) {
    let shown = || reply.escape_ascii().to_string();
    match redis::parse_redis_value(reply) {
        Ok(value) => {
            assert!(redis::parse_redis_value(&reply[..reply.len() - 1]).is_err(), "it ends earlier: {}", shown());
            assert!(depth(&value) <= MAX_DEPTH, "nested too deeply: {}", shown());
            read_reply(reply);
        }
        Err(error) => assert_eq!(error.kind(), redis::ErrorKind::Parse, "it ends later: {}", shown()),
    }
}

fn depth(value: &redis::Value) -> usize {
    match value {
        redis::Value::Array(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}
