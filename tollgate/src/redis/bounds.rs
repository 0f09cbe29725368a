//! Bounds on what a server may send. A reply beyond them ends its connection before it takes memory.
//!
//! The client's parser has no bounds: it buffers a string of any length that a server announces. So every connection
//! scans the framing of the bytes that it receives before the parser sees them. The scanner reads headers only and skips
//! the content of strings, so it copies nothing and costs a decision a few nanoseconds.
//!
//! It accepts RESP2 in the form in which servers write it. Other forms are refused even if the parser reads them: a
//! length that the two read differently would get past the bounds.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::{fmt, io};

use redis::{ErrorKind, RedisError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum nesting of arrays. The deepest reply is that to `CLUSTER SLOTS`, with four levels.
const MAX_DEPTH: usize = 8;
/// Maximum length of a status, an error or an integer. Redis shortens the parts of a request that an error repeats, and
/// an error in a script names a line of it.
const MAX_LINE_BYTES: u64 = 16 << 10;

/// The bounds on the replies of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyBounds {
    /// Maximum bytes of one reply.
    bytes: u64,
    /// Maximum values in the arrays of one reply, on all levels. Each takes more memory than it has bytes.
    values: u64,
    /// Maximum bytes of messages that were received and not yet handled. `None` on a connection without messages.
    backlog: Option<u64>,
}

impl ReplyBounds {
    /// Replies to script calls, and other commands on the same connections. The longest are the states of 1,024 sliding
    /// window counters with 1,440 segments each, and a `CLUSTER SLOTS` of thousands of ranges.
    pub(super) const DECISIONS: Self = Self { bytes: 16 << 20, values: 1 << 17, backlog: None };
    /// Published rules of at most 4 MiB, with their ids.
    pub(super) const RULE_SETS: Self = Self { bytes: 5 << 20, values: 1 << 17, backlog: None };
    /// The address of a master.
    pub(super) const SENTINELS: Self = Self { bytes: 64 << 10, values: 64, backlog: None };
    /// Resets and announcements. Names of keys have at most some hundred bytes.
    pub(super) const MESSAGES: Self = Self { bytes: 16 << 10, values: 64, backlog: Some(4 << 20) };
}

/// The reason why a connection was closed: the server exceeded a bound, or does not speak RESP2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReplyError {
    /// A string, and the bytes that its reply may have.
    String {
        bytes: u64,
        maximum: u64,
    },
    Bytes {
        maximum: u64,
    },
    Values {
        maximum: u64,
    },
    Depth,
    Line,
    Backlog {
        maximum: u64,
    },
    /// The server does not speak RESP2.
    Malformed,
}

impl fmt::Display for ReplyError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String { bytes, maximum } => {
                write!(out, "the server announced a string of {bytes} bytes in a reply of at most {maximum} bytes")
            }
            Self::Bytes { maximum } => write!(out, "the server sent a reply of more than {maximum} bytes"),
            Self::Values { maximum } => write!(out, "the server sent a reply of more than {maximum} values"),
            Self::Depth => write!(out, "the server sent a reply with arrays nested more than {MAX_DEPTH} deep"),
            Self::Line => write!(out, "the server sent a line of more than {MAX_LINE_BYTES} bytes"),
            Self::Backlog { maximum } => {
                write!(out, "the server sent more than {maximum} bytes of messages faster than they are handled")
            }
            Self::Malformed => out.write_str("the server does not speak the protocol of Redis (RESP2)"),
        }
    }
}

impl std::error::Error for ReplyError {}

impl From<&ReplyError> for RedisError {
    fn from(error: &ReplyError) -> Self {
        (ErrorKind::Parse, "invalid reply", error.to_string()).into()
    }
}

/// Follows the framing of replies.
#[derive(Debug)]
pub(super) struct Scanner {
    bounds: ReplyBounds,
    position: Position,
    /// The values that are still to come in each array around the current value, the outermost first.
    arrays: [u64; MAX_DEPTH],
    depth: usize,
    /// Bytes of the current reply.
    bytes: u64,
    /// Values that the arrays of the current reply have announced.
    values: u64,
}

/// The position of the next byte.
#[derive(Debug)]
enum Position {
    /// The type of a value.
    Type,
    /// A status, an error or an integer, up to the end of its line.
    Line { length: u64, is_after_cr: bool },
    /// The length of a string or an array, up to the end of its line.
    Length { is_array: bool, is_negative: bool, digits: u8, number: u64, is_after_cr: bool },
    /// The content of a string.
    Content { left: u64 },
    /// The end of the line after a string.
    End { is_after_cr: bool },
}

impl Scanner {
    pub(super) fn new(bounds: ReplyBounds) -> Self {
        Self { bounds, position: Position::Type, arrays: [0; MAX_DEPTH], depth: 0, bytes: 0, values: 0 }
    }

    /// Scans the next bytes, and returns the number of replies that end in them.
    pub(super) fn scan(&mut self, mut bytes: &[u8]) -> Result<u64, ReplyError> {
        let mut replies = 0;
        while let Some((byte, rest)) = bytes.split_first() {
            let (taken, is_complete) = match &mut self.position {
                Position::Content { left } => {
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= taken as u64;
                    if *left == 0 {
                        self.position = Position::End { is_after_cr: false };
                    }
                    (taken, false)
                }
                Position::Line { length, is_after_cr } => {
                    let end = bytes.iter().position(|byte| *byte == b'\n');
                    let taken = end.map_or(bytes.len(), |end| end + 1);
                    *length += taken as u64;
                    if *length > MAX_LINE_BYTES {
                        return Err(ReplyError::Line);
                    }
                    // A line may contain a `\n` without a `\r`.
                    let before_last = taken.checked_sub(2).map_or(*is_after_cr, |before| bytes[before] == b'\r');
                    *is_after_cr = bytes[taken - 1] == b'\r';
                    (taken, end.is_some() && before_last)
                }
                Position::Type => {
                    self.position = match byte {
                        b'+' | b'-' | b':' => Position::Line { length: 1, is_after_cr: false },
                        b'$' | b'*' => Position::Length {
                            is_array: *byte == b'*',
                            is_negative: false,
                            digits: 0,
                            number: 0,
                            is_after_cr: false,
                        },
                        _ => return Err(ReplyError::Malformed),
                    };
                    (1, false)
                }
                Position::Length { is_array, is_negative, digits, number, is_after_cr } => match byte {
                    b'\n' if *is_after_cr => {
                        let (is_array, is_negative, number) = (*is_array, *is_negative, *number);
                        (1, self.begin(is_array, is_negative, number)?)
                    }
                    _ if *is_after_cr => return Err(ReplyError::Malformed),
                    b'\r' if *digits > 0 => {
                        *is_after_cr = true;
                        (1, false)
                    }
                    b'-' if *digits == 0 && !*is_negative => {
                        *is_negative = true;
                        (1, false)
                    }
                    // 18 digits do not overflow.
                    b'0'..=b'9' if *digits < 18 => {
                        *number = *number * 10 + u64::from(byte - b'0');
                        *digits += 1;
                        (1, false)
                    }
                    _ => return Err(ReplyError::Malformed),
                },
                Position::End { is_after_cr } => match byte {
                    b'\r' if !*is_after_cr => {
                        *is_after_cr = true;
                        (1, false)
                    }
                    b'\n' if *is_after_cr => (1, true),
                    _ => return Err(ReplyError::Malformed),
                },
            };
            self.bytes += taken as u64;
            if self.bytes > self.bounds.bytes {
                return Err(ReplyError::Bytes { maximum: self.bounds.bytes });
            }
            replies += u64::from(is_complete && self.end_value());
            bytes = if taken == 1 { rest } else { &bytes[taken..] };
        }
        Ok(replies)
    }

    /// Begins a string or an array of that length. Returns whether it ends at once.
    fn begin(&mut self, is_array: bool, is_negative: bool, number: u64) -> Result<bool, ReplyError> {
        if is_negative {
            // A null value. No server writes another negative length.
            return if number == 1 { Ok(true) } else { Err(ReplyError::Malformed) };
        }
        if !is_array {
            let maximum = self.bounds.bytes;
            if number > maximum.saturating_sub(self.bytes) {
                return Err(ReplyError::String { bytes: number, maximum });
            }
            self.position = match number {
                0 => Position::End { is_after_cr: false },
                left => Position::Content { left },
            };
            return Ok(false);
        }
        self.values = self.values.saturating_add(number);
        if self.values > self.bounds.values {
            return Err(ReplyError::Values { maximum: self.bounds.values });
        }
        let array = self.arrays.get_mut(self.depth).ok_or(ReplyError::Depth)?;
        if number == 0 {
            return Ok(true);
        }
        *array = number;
        self.depth += 1;
        self.position = Position::Type;
        Ok(false)
    }

    /// Ends a value, and the arrays of which it is the last. Returns whether that ends the reply.
    fn end_value(&mut self) -> bool {
        self.position = Position::Type;
        while let Some(array) = self.depth.checked_sub(1) {
            self.arrays[array] -= 1;
            if self.arrays[array] > 0 {
                return false;
            }
            self.depth = array;
        }
        (self.bytes, self.values) = (0, 0);
        true
    }
}

/// The state of a connection that its stream and its users share.
#[derive(Debug, Default)]
pub(super) struct Received {
    /// Why the connection was closed.
    error: OnceLock<ReplyError>,
    /// Bytes of messages that are not yet handled.
    backlog: AtomicU64,
}

impl Received {
    /// Returns the error that closed the connection in place of `error`, which is only that it is closed.
    pub(super) fn cause(&self, error: RedisError) -> RedisError {
        self.error.get().map_or(error, RedisError::from)
    }

    /// Records that bytes of messages have been handled.
    pub(super) fn handled(&self, bytes: u64) {
        let subtract = |backlog: u64| Some(backlog.saturating_sub(bytes));
        let _ = self.backlog.fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract);
    }
}

/// A stream that fails once the server exceeds a bound.
pub(super) struct Bounded<S, R> {
    stream: S,
    scanner: Scanner,
    received: Arc<Received>,
    /// Called with the bound that the server exceeded.
    report: R,
}

impl<S, R: Fn(&ReplyError)> Bounded<S, R> {
    pub(super) fn new(stream: S, bounds: ReplyBounds, received: Arc<Received>, report: R) -> Self {
        Self { stream, scanner: Scanner::new(bounds), received, report }
    }

    fn check(&mut self, bytes: &[u8]) -> Result<(), ReplyError> {
        if let Some(error) = self.received.error.get() {
            return Err(error.clone());
        }
        self.scanner.scan(bytes)?;
        if let Some(maximum) = self.scanner.bounds.backlog {
            let received = bytes.len() as u64;
            let backlog = self.received.backlog.fetch_add(received, Ordering::Relaxed) + received;
            if backlog > maximum {
                return Err(ReplyError::Backlog { maximum });
            }
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin, R: Fn(&ReplyError) + Unpin> AsyncRead for Bounded<S, R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, into);
        if let Err(error) = self.check(&into.filled()[before..]) {
            into.set_filled(before);
            if self.received.error.set(error.clone()).is_ok() {
                (self.report)(&error);
            }
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
        }
        result
    }
}

impl<S: AsyncWrite + Unpin, R: Unpin> AsyncWrite for Bounded<S, R> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: ReplyBounds = ReplyBounds { bytes: 40_000, values: 100, backlog: None };

    /// Scans bytes at once, and one by one: both must agree.
    fn scan(bytes: &[u8]) -> Result<u64, ReplyError> {
        let whole = Scanner::new(SMALL).scan(bytes);
        let mut scanner = Scanner::new(SMALL);
        let single = bytes.chunks(1).try_fold(0, |replies, byte| Ok(replies + scanner.scan(byte)?));
        assert_eq!(whole, single, "{}", bytes.escape_ascii());
        whole
    }

    #[test]
    fn replies_of_every_type_are_counted() {
        for (bytes, replies) in [
            (&b"+OK\r\n"[..], 1),
            (b"-ERR a\nb\r\r\n", 1),
            (b":-12\r\n", 1),
            (b"$5\r\nhe\r\nl\r\n", 1),
            (b"$0\r\n\r\n", 1),
            (b"$-1\r\n*-1\r\n*0\r\n", 3),
            (b"*2\r\n*2\r\n:1\r\n*0\r\n$2\r\nab\r\n+PONG\r\n", 2),
            (b"*2\r\n:1\r\n", 0),
            (b"$5\r\nhel", 0),
            (b"+OK\n", 0),
        ] {
            assert_eq!(scan(bytes), Ok(replies), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn a_reply_beyond_a_bound_is_refused_at_its_header() {
        let string = |bytes| Err(ReplyError::String { bytes, maximum: SMALL.bytes });
        assert_eq!(scan(b"$39991\r\n"), Ok(0));
        assert_eq!(scan(b"$40001\r\n"), string(40_001));
        assert_eq!(scan(b"$900000000000000000\r\n"), string(900_000_000_000_000_000));
        assert_eq!(scan(b"*2\r\n$2\r\nab\r\n$39990\r\n"), string(39_990), "the bytes before it count");
        let values = Err(ReplyError::Values { maximum: SMALL.values });
        assert_eq!(scan(b"*100\r\n"), Ok(0));
        assert_eq!(scan(b"*101\r\n"), values);
        assert_eq!(scan(b"*2\r\n*99\r\n"), values, "the values of all levels count");
        assert_eq!(scan(&b"*1\r\n".repeat(MAX_DEPTH)), Ok(0));
        for deeper in [b"*1\r\n", b"*0\r\n"] {
            let nested = [&b"*1\r\n".repeat(MAX_DEPTH)[..], deeper].concat();
            assert_eq!(scan(&nested), Err(ReplyError::Depth), "{}", nested.escape_ascii());
        }
    }

    #[test]
    fn the_bytes_of_a_reply_are_counted_together_and_anew_for_each_reply() {
        let line = |length: u64| [b"+".to_vec(), vec![b'x'; length as usize - 3], b"\r\n".to_vec()].concat();
        assert_eq!(scan(&line(MAX_LINE_BYTES)), Ok(1));
        assert_eq!(scan(&line(MAX_LINE_BYTES + 1)), Err(ReplyError::Line));
        let lines = |count: u64| [format!("*{count}\r\n").into_bytes(), line(13_000).repeat(count as usize)].concat();
        assert_eq!(scan(&lines(3)), Ok(1));
        assert_eq!(scan(&lines(3).repeat(3)), Ok(3));
        assert_eq!(scan(&lines(4)), Err(ReplyError::Bytes { maximum: SMALL.bytes }));
    }

    #[test]
    fn other_protocols_and_other_forms_of_lengths_are_refused() {
        let others = [
            &b"HTTP/1.1 400 Bad Request\r\n"[..],
            b"\r\n",
            b"%1\r\n+a\r\n+b\r\n",
            b"~1\r\n",
            b">2\r\n",
            b"=9\r\n",
            b"$?\r\n",
            b"$ 5\r\n",
            b"$+5\r\n",
            b"$5 \r\n",
            b"$\r\n",
            b"$-\r\n",
            b"$-0\r\n",
            b"$-2\r\n",
            b"*-2\r\n",
            b"$--1\r\n",
            b"$5\n",
            b"$5\r\r\n",
            b"$1000000000000000000\r\n",
            b"$2\r\nabc\r\n",
            b"$2\r\nab\n",
        ];
        for bytes in others {
            assert_eq!(scan(bytes), Err(ReplyError::Malformed), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn handled_messages_are_taken_off_the_backlog() {
        let received = Received::default();
        received.backlog.store(100, Ordering::Relaxed);
        received.handled(30);
        assert_eq!(received.backlog.load(Ordering::Relaxed), 70);
        received.handled(80);
        assert_eq!(received.backlog.load(Ordering::Relaxed), 0);
    }
}
