//! A client that sends one request per connection, and a service that counts its requests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use testkit::wait::PATIENCE;

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    /// Returns the value of a header. A proxy may send it once only.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(':'));
        let mut values = lines.filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim());
        let value = values.next();
        assert!(values.next().is_none(), "{name} is there twice: {}", self.head);
        value
    }
}

/// Sends a request with this start and these headers. Returns `None` if the connection fails.
pub(crate) fn send(port: u16, start: &str, headers: &[(&str, &str)]) -> Option<Response> {
    let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let text = format!("{start} HTTP/1.1\r\nHost: shop.example.com\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(text.as_bytes()).ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let mut response = Response { status, head: head.to_owned(), body: body.to_owned() };
    // A response to HEAD has no chunks.
    if response.header("transfer-encoding") == Some("chunked") && !body.is_empty() {
        response.body = unchunked(body)?;
    }
    Some(response)
}

fn unchunked(mut text: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (length, rest) = text.split_once("\r\n")?;
        let length = usize::from_str_radix(length, 16).ok()?;
        if length == 0 {
            return Some(body);
        }
        body.push_str(rest.get(..length)?);
        text = rest.get(length + 2..)?;
    }
}

/// The service behind a proxy.
pub(crate) struct App {
    pub(crate) port: u16,
    served: Arc<AtomicU32>,
}

pub(crate) const GREETING: &str = "hello from the app";

impl App {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&served);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let counter = Arc::clone(&counter);
                std::thread::spawn(move || serve(stream.ok()?, &counter));
            }
        });
        Self { port, served }
    }

    /// Returns the number of requests that arrived.
    pub(crate) fn served(&self) -> u32 {
        self.served.load(Ordering::SeqCst)
    }
}

fn serve(stream: TcpStream, served: &AtomicU32) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    let mut lines = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        match line.as_str() {
            "" => return None,
            "\r\n" if lines > 0 => break,
            _ => lines += 1,
        }
    }
    served.fetch_add(1, Ordering::SeqCst);
    let length = GREETING.len();
    let text =
        format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nX-Tokens: 2\r\nConnection: close\r\n\r\n{GREETING}");
    reader.get_mut().write_all(text.as_bytes()).ok()
}
