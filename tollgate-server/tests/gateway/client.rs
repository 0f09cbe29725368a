//! A minimal HTTP/1 client, so that a test can send what no client library would, and sees every byte of the response.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::process::PATIENCE;

/// A client's connection.
pub(crate) struct Connection<S: Read + Write = TcpStream> {
    stream: BufReader<S>,
}

#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) version: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Vec<(String, String)>,
}

impl Connection {
    pub(crate) fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the gateway accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is not zero");
        stream.set_write_timeout(Some(PATIENCE)).expect("the timeout is not zero");
        stream.set_nodelay(true).expect("it is a TCP connection");
        Self::on(stream)
    }

    /// Another handle of the same connection.
    pub(crate) fn tcp(&self) -> TcpStream {
        self.stream.get_ref().try_clone().expect("there are descriptors left")
    }
}

impl<S: Read + Write> Connection<S> {
    pub(crate) fn on(stream: S) -> Self {
        Self { stream: BufReader::new(stream) }
    }

    pub(crate) fn get(&mut self, target: &str) -> Answer {
        self.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"))
    }

    /// Sends a GET in the name of a user.
    pub(crate) fn get_as(&mut self, user: &str, target: &str) -> Answer {
        self.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\nX-User-Id: {user}\r\n\r\n"))
    }

    pub(crate) fn ask(&mut self, request: impl AsRef<[u8]>) -> Answer {
        self.send(request);
        self.receive()
    }

    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).expect("the gateway reads");
    }

    pub(crate) fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes.as_ref())?;
        self.stream.get_mut().flush()
    }

    #[track_caller]
    pub(crate) fn receive(&mut self) -> Answer {
        self.try_receive().expect("the gateway answers")
    }

    /// Reads the next response, interim ones too. Fails if the connection ends before the response does.
    pub(crate) fn try_receive(&mut self) -> io::Result<Answer> {
        let mut answer = self.receive_head()?;
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
    pub(crate) fn receive_head(&mut self) -> io::Result<Answer> {
        let line = self.line()?;
        let mut words = line.split(' ');
        let version = words.next().unwrap_or_default().to_owned();
        let status = words.next().and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
        Ok(Answer { status, version, headers: self.fields()?, ..Answer::default() })
    }

    fn chunks(&mut self, answer: &mut Answer) -> io::Result<()> {
        loop {
            let size = usize::from_str_radix(&self.line()?, 16).expect("the size of a chunk");
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
    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).expect("they come");
        bytes
    }

    /// Returns whether the gateway ends the connection without another byte.
    pub(crate) fn is_closed(&mut self) -> bool {
        match self.stream.fill_buf() {
            Ok(bytes) => bytes.is_empty(),
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    /// Reads to the end of the connection. Returns the number of bytes.
    pub(crate) fn rest(&mut self) -> usize {
        let mut scratch = vec![0; 64 << 10];
        let mut all = 0;
        loop {
            match self.stream.read(&mut scratch) {
                Ok(0) => return all,
                Ok(read) => all += read,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return all,
                Err(error) => panic!("it does not end: {error}"),
            }
        }
    }
}

impl Answer {
    /// Returns the value of the only header of this name.
    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(header, _)| header == name);
        let value = values.next().map(|(_, value)| value.as_str());
        assert!(values.next().is_none(), "{name} is there twice: {:?}", self.headers);
        value
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|(name, _)| name.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }
}
