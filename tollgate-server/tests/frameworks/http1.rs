//! HTTP/1 requests as raw bytes, and the bodies of their responses.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::corpus::Spelling;

/// A client that keeps its connection if the end of the last exchange was unambiguous.
pub(crate) struct Client {
    address: SocketAddr,
    timeout: Duration,
    kept: Option<BufReader<TcpStream>>,
}

impl Client {
    pub(crate) fn new(address: SocketAddr, timeout: Duration) -> Self {
        Self { address, timeout, kept: None }
    }

    /// Sends the spelling and returns the body of the response, or `None` if there was no response to read.
    pub(crate) fn send(&mut self, spelling: &Spelling, extra: &[(&str, &str)]) -> Option<Vec<u8>> {
        let request = spelling.http1(extra);
        if let Some(kept) = self.kept.take()
            && let Ok(body) = self.exchange(kept, &request, spelling.is_unambiguous())
        {
            return Some(body);
        }
        let mut fresh = || {
            let stream = connect(self.address, self.timeout)?;
            self.exchange(BufReader::new(stream), &request, spelling.is_unambiguous())
        };
        match fresh() {
            // On a busy machine a server may be late. One that waits for more of a malformed request is late again.
            Err(error) if is_timeout(&error) => fresh().ok(),
            answered => answered.ok(),
        }
    }

    fn exchange(&mut self, mut stream: BufReader<TcpStream>, request: &[u8], keep: bool) -> io::Result<Vec<u8>> {
        stream.get_mut().write_all(request)?;
        let response = read_response(&mut stream, HasBody::ByItsHead)?;
        self.kept = (keep && response.may_continue).then_some(stream);
        Ok(response.body)
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

pub(crate) fn connect(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A response to a request.
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    /// Whether another request can follow on the connection.
    pub(crate) may_continue: bool,
}

/// Whether a response has a body.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HasBody {
    ByItsHead,
    /// It answers HEAD.
    No,
}

pub(crate) fn read_response(stream: &mut BufReader<TcpStream>, has_body: HasBody) -> io::Result<Response> {
    let status_line = line(stream)?;
    let status = std::str::from_utf8(&status_line).ok().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let status: u16 = status.ok_or(io::ErrorKind::InvalidData)?;
    let mut length = None;
    let mut is_chunked = false;
    let mut may_continue = status_line.starts_with(b"HTTP/1.1");
    loop {
        let field = line(stream)?.to_ascii_lowercase();
        if field.is_empty() {
            break;
        }
        let field = String::from_utf8_lossy(&field);
        match field.split_once(':').map(|(name, value)| (name, value.trim())) {
            Some(("content-length", value)) => length = value.parse::<u64>().ok(),
            Some(("transfer-encoding", "chunked")) => is_chunked = true,
            Some(("connection", "close")) => may_continue = false,
            _ => {}
        }
    }
    let mut body = Vec::new();
    // Another response follows `100 Continue`.
    if status < 200 {
        return read_response(stream, has_body);
    }
    if has_body == HasBody::No {
        return Ok(Response { status, body, may_continue });
    }
    if is_chunked {
        loop {
            let size = String::from_utf8_lossy(&line(stream)?).into_owned();
            let size = u64::from_str_radix(size.trim(), 16).map_err(|_| io::ErrorKind::InvalidData)?;
            stream.take(size).read_to_end(&mut body)?;
            line(stream)?;
            if size == 0 {
                return Ok(Response { status, body, may_continue });
            }
        }
    }
    let Some(length) = length else {
        stream.read_to_end(&mut body)?;
        return Ok(Response { status, body, may_continue: false });
    };
    stream.take(length).read_to_end(&mut body)?;
    Ok(Response { status, body, may_continue })
}

fn line(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line)?;
    if line.pop() != Some(b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    line.pop_if(|last| *last == b'\r');
    Ok(line)
}
