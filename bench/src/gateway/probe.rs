//! A minimal HTTP/1.1 connection: checks the responses of a contender before it is measured, and holds idle
//! connections.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

/// Longer than any request takes, unless the contender is broken.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longer than the response head of any contender.
const MOST_HEAD_BYTES: usize = 16 * 1024;

/// A response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body_bytes: usize,
    pub(crate) head_bytes: usize,
}

impl Response {
    /// Parses the response at the start of `bytes`, or returns `None` while it is incomplete.
    pub(crate) fn complete(bytes: &[u8]) -> anyhow::Result<Option<Self>> {
        let Some(head_bytes) = bytes.windows(4).position(|end| end == b"\r\n\r\n").map(|end| end + 4) else {
            ensure!(bytes.len() <= MOST_HEAD_BYTES, "an answer has no end of its headers");
            return Ok(None);
        };
        let head = std::str::from_utf8(&bytes[..head_bytes]).context("an answer has headers that are no text")?;
        let status = head.get(9..12).and_then(|status| status.parse().ok()).context("an answer has no status")?;
        let fields = head.lines().skip(1).filter_map(|line| line.split_once(':'));
        let length = fields.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let length = length.and_then(|(_, length)| length.trim().parse().ok());
        let body_bytes = length.context("a response has no Content-Length; every contender should send one")?;
        let answer = Self { status, body_bytes, head_bytes };
        Ok((bytes.len() >= head_bytes + body_bytes).then_some(answer))
    }
}

/// Returns a request for this path by a user, given by number.
pub(super) fn request(path: &str, user: usize) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-user-id: user-{user}\r\n\r\n").into_bytes()
}

/// A keep-alive connection.
pub(super) struct Connection(TcpStream);

impl Connection {
    pub(super) fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    pub(super) fn send(&mut self, path: &str, user: usize) -> anyhow::Result<Response> {
        self.0.write_all(&request(path, user))?;
        let (mut bytes, mut chunk) = (Vec::new(), [0; 16 * 1024]);
        loop {
            let read = self.0.read(&mut chunk).context("no whole answer came")?;
            ensure!(read > 0, "the connection was closed in the middle of an answer");
            bytes.extend_from_slice(&chunk[..read]);
            if let Some(answer) = Response::complete(&bytes)? {
                let whole = answer.head_bytes + answer.body_bytes;
                ensure!(bytes.len() == whole, "an answer is longer than it says");
                return Ok(answer);
            }
        }
    }

    /// Returns whether the other side has kept the connection open.
    pub(super) fn is_open(&self) -> anyhow::Result<bool> {
        self.0.set_nonblocking(true)?;
        let open = match self.0.peek(&mut [0]) {
            Ok(0) => false,
            Ok(_) => bail!("the connection has unexpected data"),
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
        let answer = Response::complete(bytes).unwrap().unwrap();
        assert_eq!((answer.status, answer.body_bytes), (429, 3));
        assert_eq!(Response::complete(&bytes[..bytes.len() - 1]).unwrap(), None);
        assert_eq!(Response::complete(&bytes[..20]).unwrap(), None);
    }

    #[test]
    fn an_answer_without_a_length_is_an_error() {
        assert!(Response::complete(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").is_err());
    }
}
