//! One HTTP/1.1 connection by hand: to see what a contender answers before it is measured, and to hold one open.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

/// Longer than anything here takes, unless it is broken.
const PATIENCE: Duration = Duration::from_secs(5);
/// Beyond what any of the contenders puts before a body.
const MOST_HEAD_BYTES: usize = 16 * 1024;

/// What came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body_bytes: usize,
    head_bytes: usize,
}

impl Answer {
    /// The answer whose bytes begin here, once all of them have come.
    pub(super) fn complete(bytes: &[u8]) -> anyhow::Result<Option<Self>> {
        let Some(head_bytes) = bytes.windows(4).position(|end| end == b"\r\n\r\n").map(|end| end + 4) else {
            ensure!(bytes.len() <= MOST_HEAD_BYTES, "an answer has no end of its headers");
            return Ok(None);
        };
        let head = std::str::from_utf8(&bytes[..head_bytes]).context("an answer has headers that are no text")?;
        let status = head.get(9..12).and_then(|status| status.parse().ok()).context("an answer has no status")?;
        let fields = head.lines().skip(1).filter_map(|line| line.split_once(':'));
        let length = fields.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let length = length.and_then(|(_, length)| length.trim().parse().ok());
        let body_bytes = length.context("an answer does not tell its length; every contender should")?;
        let answer = Self { status, body_bytes, head_bytes };
        Ok((bytes.len() >= head_bytes + body_bytes).then_some(answer))
    }
}

/// A request for this path; users are numbered.
pub(super) fn request(path: &str, user: usize) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-user-id: user-{user}\r\n\r\n").into_bytes()
}

/// A connection that is kept.
pub(super) struct Connection(TcpStream);

impl Connection {
    pub(super) fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    pub(super) fn ask(&mut self, path: &str, user: usize) -> anyhow::Result<Answer> {
        self.0.write_all(&request(path, user))?;
        let (mut bytes, mut chunk) = (Vec::new(), [0; 16 * 1024]);
        loop {
            let read = self.0.read(&mut chunk).context("no whole answer came")?;
            ensure!(read > 0, "the connection was closed in the middle of an answer");
            bytes.extend_from_slice(&chunk[..read]);
            if let Some(answer) = Answer::complete(&bytes)? {
                let whole = answer.head_bytes + answer.body_bytes;
                ensure!(bytes.len() == whole, "an answer is longer than it says");
                return Ok(answer);
            }
        }
    }

    /// Whether the other end still holds it, too.
    pub(super) fn is_open(&self) -> anyhow::Result<bool> {
        self.0.set_nonblocking(true)?;
        let open = match self.0.peek(&mut [0]) {
            Ok(0) => false,
            Ok(_) => bail!("something came that nobody has asked for"),
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        self.0.set_nonblocking(false)?;
        Ok(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_complete_with_the_last_byte_of_its_body() {
        let bytes = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 3\r\nx: y\r\n\r\nabc";
        let answer = Answer::complete(bytes).unwrap().unwrap();
        assert_eq!((answer.status, answer.body_bytes), (429, 3));
        assert_eq!(Answer::complete(&bytes[..bytes.len() - 1]).unwrap(), None);
        assert_eq!(Answer::complete(&bytes[..20]).unwrap(), None);
    }

    #[test]
    fn an_answer_without_a_length_is_an_error() {
        assert!(Answer::complete(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").is_err());
    }
}
