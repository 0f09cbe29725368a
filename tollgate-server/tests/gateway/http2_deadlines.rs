//! Deadlines where many requests share a connection: each has its own.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};

use crate::http2::get;
use crate::http2_sharing::endless;
use crate::process::{Gateway, PATIENCE, site};
use crate::upstream::{AnyBody, Served, Speaks, full, runtime};

const SOON: Duration = Duration::from_secs(15);

/// Kinds of frames.
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;

/// A client that sees frames.
struct Frames(TcpStream);

impl Frames {
    fn to(gateway: &Gateway) -> Self {
        let stream = TcpStream::connect(gateway.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut this = Self(stream);
        this.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        this.send(SETTINGS, 0, &[]).unwrap();
        this
    }

    /// A frame of the whole connection.
    fn send(&mut self, kind: u8, flags: u8, payload: &[u8]) -> io::Result<()> {
        let length = u8::try_from(payload.len()).unwrap();
        self.0.write_all(&[&[0, 0, length, kind, flags, 0, 0, 0, 0], payload].concat())
    }

    /// The kind, the flags and the payload of the next frame; nothing at the end.
    fn next(&mut self) -> Option<(u8, u8, Vec<u8>)> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).ok()?;
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        self.0.read_exact(&mut payload).ok()?;
        Some((head[3], head[4], payload))
    }
}

/// Frames that are about the connection are no head of a request.
#[test]
fn a_connection_of_http_2_may_be_idle_and_is_told_when_it_ends() {
    let settings = "timeouts: { head: 1s, idle: 5s }";
    let gateway = Gateway::start(&site(settings, &["{ path: /**, respond: { body: ok } }"], ""));
    let mut frames = Frames::to(&gateway);
    let begun = Instant::now();
    let (mut was_told, mut pinged) = (false, false);
    while let Some((kind, flags, payload)) = frames.next() {
        match kind {
            SETTINGS if flags & ACK == 0 => _ = frames.send(SETTINGS, ACK, &[]),
            PING if flags & ACK == 0 => _ = frames.send(PING, ACK, &payload),
            GOAWAY => was_told = true,
            _ => {}
        }
        if !std::mem::replace(&mut pinged, true) {
            frames.send(PING, 0, &[1; 8]).unwrap();
        }
    }
    assert!(begun.elapsed() >= Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert!(was_told, "a client has to know that nothing it sends now is served");
    // One that says nothing at all ends, too.
    let mut silent = Frames::to(&gateway);
    let begun = Instant::now();
    while silent.next().is_some() {}
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}
