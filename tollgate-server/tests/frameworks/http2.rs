//! HTTP/2 requests as raw frames, so that any bytes can be sent in a field, and the bodies of their responses.
//!
//! Fields are sent as literals without Huffman coding or indexing. Response fields are not decoded: the upstreams
//! report in the body what ran.

use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::corpus::{Field, Spelling};
use crate::http1::connect;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// More than all responses of a connection together.
const WINDOW: u32 = 1 << 30;

/// A client that sends one request after the other on one connection, and opens another when the server closes it.
pub(crate) struct Client {
    address: SocketAddr,
    timeout: Duration,
    connection: Option<Connection>,
}

struct Connection {
    stream: BufReader<TcpStream>,
    next_stream: u32,
}

impl Client {
    pub(crate) fn new(address: SocketAddr, timeout: Duration) -> Self {
        Self { address, timeout, connection: None }
    }

    /// Sends the spelling and returns the body of the response, or `None` if there was no response to read.
    pub(crate) fn send(&mut self, spelling: &Spelling) -> Option<Vec<u8>> {
        let (head, trailers) = spelling.http2();
        // The server may have closed a kept connection after the last response, so a failure there is tried again.
        if let Some(mut kept) = self.connection.take()
            && let Ok(body) = kept.exchange(&head, &trailers)
        {
            self.connection = Some(kept);
            return body;
        }
        let mut connection = Connection::open(self.address, self.timeout).ok()?;
        let body = connection.exchange(&head, &trailers).ok()?;
        self.connection = Some(connection);
        body
    }
}

impl Connection {
    fn open(address: SocketAddr, timeout: Duration) -> io::Result<Self> {
        let mut connection = Self { stream: BufReader::new(connect(address, timeout)?), next_stream: 1 };
        let mut opening = PREFACE.to_vec();
        frame(&mut opening, SETTINGS, 0, 0, &[]);
        frame(&mut opening, WINDOW_UPDATE, 0, 0, &WINDOW.to_be_bytes());
        connection.stream.get_mut().write_all(&opening)?;
        Ok(connection)
    }

    /// Returns the body, or `None` if the server reset the stream. An error is one of the connection.
    fn exchange(&mut self, head: &[Field], trailers: &[Field]) -> io::Result<Option<Vec<u8>>> {
        let id = self.next_stream;
        self.next_stream += 2;
        let mut bytes = Vec::new();
        if trailers.is_empty() {
            frame(&mut bytes, HEADERS, END_HEADERS | END_STREAM, id, &block(head));
        } else {
            frame(&mut bytes, HEADERS, END_HEADERS, id, &block(head));
            frame(&mut bytes, DATA, 0, id, b"x");
            frame(&mut bytes, HEADERS, END_HEADERS | END_STREAM, id, &block(trailers));
        }
        self.stream.get_mut().write_all(&bytes)?;
        let mut body = Vec::new();
        loop {
            let (kind, flags, stream, payload) = self.read_frame()?;
            match kind {
                SETTINGS | PING if flags & ACK == 0 => {
                    let echoed = if kind == PING { &payload[..] } else { &[] };
                    let mut answer = Vec::new();
                    frame(&mut answer, kind, ACK, 0, echoed);
                    self.stream.get_mut().write_all(&answer)?;
                }
                GOAWAY => return Err(io::ErrorKind::ConnectionAborted.into()),
                RST_STREAM if stream == id => return Ok((!body.is_empty()).then_some(body)),
                DATA | HEADERS if stream == id => {
                    if kind == DATA {
                        body.extend_from_slice(&payload);
                    }
                    if flags & END_STREAM != 0 {
                        return Ok(Some(body));
                    }
                }
                _ => {}
            }
        }
    }

    fn read_frame(&mut self) -> io::Result<(u8, u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head)?;
        let [a, b, c, kind, flags, d, e, f, g] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok((kind, flags, u32::from_be_bytes([d, e, f, g]), payload))
    }
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a frame is short").to_be_bytes();
    bytes.extend_from_slice(&length[1..]);
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
}

/// RFC 7541, section 6.2.2: literals without indexing, each with a new name.
fn block(fields: &[Field]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        string(&mut block, name);
        string(&mut block, value);
    }
    block
}

fn string(block: &mut Vec<u8>, text: &[u8]) {
    const PREFIX: usize = 127;
    if text.len() < PREFIX {
        block.push(text.len() as u8);
    } else {
        block.push(PREFIX as u8);
        let mut rest = text.len() - PREFIX;
        while rest >= 128 {
            block.push((rest % 128) as u8 | 128);
            rest /= 128;
        }
        block.push(rest as u8);
    }
    block.extend_from_slice(text);
}
