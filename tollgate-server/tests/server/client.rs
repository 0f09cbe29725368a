//! A minimal HTTP/1.1 client, so that a test can also send what no client library would.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longer than every deadline of the server.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) text: String,
}

impl Connection {
    pub(crate) fn to(address: SocketAddr) -> Self {
        Self::try_to(address).expect("the server accepts")
    }

    /// Connects, or returns an error if nothing listens.
    pub(crate) fn try_to(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends a check and returns the decision.
    pub(crate) fn check(&mut self, question: &Value) -> Value {
        let response = self.post(question.to_string());
        assert_eq!(response.status, 200, "{question}: {}", response.text);
        response.json()
    }

    pub(crate) fn post(&mut self, body: impl AsRef<[u8]>) -> Response {
        let body = body.as_ref();
        self.send(head(body.len()));
        self.send(body);
        self.receive()
    }

    /// Sends a check, or returns the error of a connection that is closed.
    pub(crate) fn try_post(&mut self, body: &str) -> io::Result<Response> {
        self.stream.get_mut().write_all(format!("{}{body}", head(body.len())).as_bytes())?;
        self.try_receive()
    }

    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.get_mut().write_all(bytes.as_ref()).expect("the server reads");
    }

    pub(crate) fn receive(&mut self) -> Response {
        self.try_receive().expect("the server answers")
    }

    /// Returns the next response, or an error of kind `UnexpectedEof` if the server closed the connection.
    pub(crate) fn try_receive(&mut self) -> io::Result<Response> {
        let status_line = self.line()?;
        let status = status_line.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            match line.split_once(": ") {
                Some((name, value)) => headers.push((name.to_owned(), value.to_owned())),
                None => break,
            }
        }
        let mut response = Response { status, headers, text: String::new() };
        let length = response.header("content-length").map_or(0, |length| length.parse().expect("a length"));
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        response.text = String::from_utf8(body).expect("UTF-8");
        Ok(response)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    /// Returns whether the server closes the connection without another byte.
    pub(crate) fn is_closed_by_server(&mut self) -> bool {
        matches!(self.stream.fill_buf(), Ok(bytes) if bytes.is_empty())
    }
}

impl Response {
    /// Returns the value of the only header of this name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(header, _)| header.eq_ignore_ascii_case(name));
        let value = values.next().map(|(_, value)| value.as_str());
        assert!(values.next().is_none(), "{name} is there twice: {:?}", self.headers);
        value
    }

    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.header("content-type"), Some("application/json"));
        serde_json::from_str(&self.text).expect("JSON")
    }
}

/// Returns the head of a check whose body has this length.
pub(crate) fn head(length_bytes: usize) -> String {
    format!(
        "POST /v1/check HTTP/1.1\r\nhost: tollgate\r\ncontent-type: application/json\r\n\
         content-length: {length_bytes}\r\n\r\n"
    )
}
