//! A minimal HTTP/1 client, so that a test can send what no client library would, and sees every byte of the response.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use serde_json::Value;

use crate::client::{Stream, connect};
use crate::wait::{PATIENCE, in_time};

/// A time in which a server without a reason to wait answers many times.
pub(crate) const MOMENT: Duration = Duration::from_millis(200);

/// A client's connection.
pub struct Connection<S: Read + Write = TcpStream> {
    stream: BufReader<S>,
    body: Body,
}

/// The body of the last response whose head was read.
enum Body {
    /// Ends after its length, or with the connection.
    Plain,
    /// Chunked, with this many bytes left in the current chunk.
    Chunked(usize),
}

/// A response, with every byte of its body.
#[derive(Debug, Default)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// The version, such as `HTTP/1.1`.
    pub version: String,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body without its framing.
    pub body: Vec<u8>,
    /// The trailers of a chunked body.
    pub trailers: Vec<(String, String)>,
}

impl Connection {
    /// Connects to a server.
    pub fn to(address: SocketAddr) -> Self {
        Self::try_to(address).expect("the server accepts")
    }

    /// Connects to a server, or fails if nothing listens.
    pub fn try_to(address: SocketAddr) -> io::Result<Self> {
        Ok(Self::on(connect(address)?))
    }

    /// Sends a check to the decision service and returns the decision.
    pub fn check(&mut self, request: &Value) -> Value {
        let response = self.post(request.to_string());
        assert_eq!(response.status, 200, "{request}: {}", response.text());
        response.json()
    }

    /// Sends a check with this body to the decision service.
    pub fn post(&mut self, body: impl AsRef<[u8]>) -> Response {
        self.try_post(body).expect("the server answers")
    }

    /// Sends a check with this body, or fails if the connection is closed.
    pub fn try_post(&mut self, body: impl AsRef<[u8]>) -> io::Result<Response> {
        let body = body.as_ref();
        self.try_send(head(body.len()))?;
        self.try_send(body)?;
        self.try_receive()
    }
}

impl<S: Read + Write + AsFd> Connection<S> {
    /// Returns whether anything arrives within a time in which a server with a free slot would answer many times.
    pub fn has_answer_within_a_moment(&mut self) -> bool {
        self.tcp().set_read_timeout(Some(MOMENT)).expect("the timeout is not zero");
        let arrived = self.stream.fill_buf().is_ok();
        self.tcp().set_read_timeout(Some(PATIENCE)).expect("the timeout is not zero");
        arrived
    }

    /// Another handle of the same connection, below TLS.
    pub fn tcp(&self) -> TcpStream {
        self.stream.get_ref().as_fd().try_clone_to_owned().expect("there are descriptors left").into()
    }
}

impl Connection<Stream> {
    /// Ends the direction to the server.
    pub fn end_sending(&mut self) {
        self.stream.get_mut().end_sending().expect("the connection is open");
    }
}

impl<S: Read + Write> Connection<S> {
    /// Speaks HTTP over an open connection.
    pub fn on(stream: S) -> Self {
        Self { stream: BufReader::new(stream), body: Body::Plain }
    }

    /// Sends a GET.
    pub fn get(&mut self, target: &str) -> Response {
        self.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"))
    }

    /// Sends a GET in the name of a user.
    pub fn get_as(&mut self, user: &str, target: &str) -> Response {
        self.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\nX-User-Id: {user}\r\n\r\n"))
    }

    /// Sends a request and reads the response.
    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Response {
        self.send(request);
        self.receive()
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).expect("the server reads");
    }

    /// Sends bytes, or fails if the server does not read any more.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes.as_ref())?;
        self.stream.get_mut().flush()
    }

    /// Reads the next response.
    #[track_caller]
    pub fn receive(&mut self) -> Response {
        self.try_receive().expect("the server answers")
    }

    /// Reads the next response, interim ones too. Fails if the connection ends before the response does.
    #[track_caller]
    pub fn try_receive(&mut self) -> io::Result<Response> {
        in_time(self.response())
    }

    fn response(&mut self) -> io::Result<Response> {
        let mut answer = self.head()?;
        if (100..200).contains(&answer.status) || matches!(answer.status, 204 | 304) {
            return Ok(answer);
        }
        if answer.header("transfer-encoding") == Some("chunked") {
            self.chunks(&mut answer)?;
        } else if let Some(length) = answer.header("content-length").map(|length| length.parse().expect("a length")) {
            answer.body = vec![0; length];
            self.stream.read_exact(&mut answer.body)?;
        } else {
            self.stream.read_to_end(&mut answer.body)?;
        }
        Ok(answer)
    }

    /// Reads the head of the next response, and nothing after it.
    #[track_caller]
    pub fn receive_head(&mut self) -> io::Result<Response> {
        in_time(self.head())
    }

    fn head(&mut self) -> io::Result<Response> {
        let line = self.line()?;
        let mut words = line.split(' ');
        let version = words.next().unwrap_or_default().to_owned();
        let status = words.next().and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
        let response = Response { status, version, headers: self.fields()?, ..Response::default() };
        let is_chunked = response.header("transfer-encoding") == Some("chunked");
        self.body = if is_chunked { Body::Chunked(0) } else { Body::Plain };
        Ok(response)
    }

    /// Reads this many bytes of the body whose head was read, without their framing. Fails if the body ends before.
    #[track_caller]
    pub fn body_bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        in_time(self.part_of_body(count))
    }

    fn part_of_body(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        let mut filled = 0;
        while filled < count {
            let at_most = match self.body {
                Body::Plain => count - filled,
                Body::Chunked(0) => match self.chunk_size()? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    size => size.min(count - filled),
                },
                Body::Chunked(left) => left.min(count - filled),
            };
            self.stream.read_exact(&mut bytes[filled..filled + at_most])?;
            filled += at_most;
            if let Body::Chunked(left) = &mut self.body {
                *left -= at_most;
                if *left == 0 {
                    assert_eq!(self.line()?, "", "a chunk ends with a line");
                }
            }
        }
        Ok(bytes)
    }

    /// Reads the line before a chunk.
    fn chunk_size(&mut self) -> io::Result<usize> {
        let size = usize::from_str_radix(&self.line()?, 16).expect("the size of a chunk");
        self.body = Body::Chunked(size);
        Ok(size)
    }

    fn chunks(&mut self, answer: &mut Response) -> io::Result<()> {
        loop {
            let size = self.chunk_size()?;
            if size == 0 {
                answer.trailers = self.fields()?;
                return Ok(());
            }
            let before = answer.body.len();
            answer.body.resize(before + size, 0);
            self.stream.read_exact(&mut answer.body[before..])?;
            assert_eq!(self.line()?, "", "a chunk ends with a line");
        }
    }

    fn fields(&mut self) -> io::Result<Vec<(String, String)>> {
        let mut fields = Vec::new();
        loop {
            let line = self.line()?;
            match line.split_once(':') {
                Some((name, value)) => fields.push((name.to_ascii_lowercase(), value.trim().to_owned())),
                None => return Ok(fields),
            }
        }
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ if !line.ends_with('\n') => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    /// Reads this many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).expect("they come");
        bytes
    }

    /// Returns whether the server closes the connection without another byte and without a reset.
    pub fn is_closed_cleanly(&mut self) -> bool {
        matches!(self.stream.fill_buf(), Ok(bytes) if bytes.is_empty())
    }

    /// Returns whether the server ends the connection without another byte.
    pub fn is_closed(&mut self) -> bool {
        match self.stream.fill_buf() {
            Ok(bytes) => bytes.is_empty(),
            Err(error) => is_end(&error),
        }
    }

    /// Reads to the end of the connection. Returns the number of bytes.
    pub fn rest(&mut self) -> usize {
        let mut scratch = vec![0; 64 << 10];
        let mut all = 0;
        loop {
            match self.stream.read(&mut scratch) {
                Ok(0) => return all,
                Ok(read) => all += read,
                Err(error) if is_end(&error) => return all,
                Err(error) => panic!("it does not end: {error}"),
            }
        }
    }
}

/// Returns whether the server has ended the connection, be it without TLS's own end.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof)
}

impl Response {
    /// Returns the value of the only header of this name.
    #[track_caller]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(header, _)| header.eq_ignore_ascii_case(name));
        let value = values.next().map(|(_, value)| value.as_str());
        assert!(values.next().is_none(), "{name} is there twice: {:?}", self.headers);
        value
    }

    /// Returns the names of all headers, in lower case.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the body, which is UTF-8.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    /// Returns the body, which is JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        assert_eq!(self.header("content-type"), Some("application/json"));
        serde_json::from_slice(&self.body).expect("JSON")
    }
}

/// Sends a request on a new connection.
pub fn ask(address: SocketAddr, request: impl AsRef<[u8]>) -> Response {
    Connection::to(address).ask(request)
}

/// Returns the head of a check whose body has this length.
pub fn head(length_bytes: usize) -> String {
    format!(
        "POST /v1/check HTTP/1.1\r\nhost: tollgate\r\ncontent-type: application/json\r\n\
         content-length: {length_bytes}\r\n\r\n"
    )
}
