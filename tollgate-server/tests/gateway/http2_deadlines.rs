//! Deadlines of requests that share a connection: each has its own.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::gateway::{Gateway, site};
use testkit::upstream::{AnyBody, Served, Speaks, full, runtime};
use testkit::wait::PATIENCE;

use crate::http2::get;
use crate::http2_sharing::endless;

/// Frame types.
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;

/// A client that reads and writes frames.
pub(crate) struct Frames(TcpStream);

impl Frames {
    pub(crate) fn to(gateway: &Gateway) -> Self {
        let stream = TcpStream::connect(gateway.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut this = Self(stream);
        this.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        this.send(SETTINGS, 0, &[]).unwrap();
        this
    }

    /// Sends a frame of the whole connection.
    fn send(&mut self, kind: u8, flags: u8, payload: &[u8]) -> io::Result<()> {
        self.send_on(0, kind, flags, payload)
    }

    pub(crate) fn send_on(&mut self, stream: u32, kind: u8, flags: u8, payload: &[u8]) -> io::Result<()> {
        self.send_bytes(&Self::frame(stream, kind, flags, payload))
    }

    /// Returns the bytes of a frame.
    pub(crate) fn frame(stream: u32, kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags], &stream.to_be_bytes()[..], payload].concat()
    }

    /// Sends the bytes of frames at once.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    /// Returns the type, the flags and the payload of the next frame, or `None` if the gateway has closed the
    /// connection. Fails the test if no frame arrives in time.
    #[track_caller]
    pub(crate) fn next(&mut self) -> Option<(u8, u8, Vec<u8>)> {
        let mut head = [0; 9];
        self.read_or_end(&mut head)?;
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        self.read_or_end(&mut payload)?;
        Some((head[3], head[4], payload))
    }

    /// Returns whether the gateway answers a ping, and has not sent GOAWAY before.
    #[track_caller]
    fn is_open(&mut self) -> bool {
        if self.send(PING, 0, &[1; 8]).is_err() {
            return false;
        }
        while let Some((kind, flags, _)) = self.next() {
            match kind {
                PING if flags & ACK != 0 => return true,
                GOAWAY => return false,
                _ => {}
            }
        }
        false
    }

    /// Returns whether at least this many bytes wait to be read.
    pub(crate) fn has_arrived(&self, least: usize) -> bool {
        self.0.peek(&mut vec![0; least]).is_ok_and(|arrived| arrived == least)
    }

    #[track_caller]
    fn read_or_end(&mut self, buffer: &mut [u8]) -> Option<()> {
        match self.0.read_exact(buffer).map_err(|error| error.kind()) {
            Ok(()) => Some(()),
            Err(kind @ (io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)) => {
                panic!("the gateway sends nothing and does not close the connection: {kind}")
            }
            Err(_) => None,
        }
    }
}

/// Frames of the connection are not the head of a request.
#[test]
fn idle_http_2_connection_outlives_the_head_timeout() {
    let settings = "workers: 1\n  timeouts: { head: 1s, idle: 1h }";
    let gateway = Gateway::start(&site(settings, &["{ path: /**, respond: { body: ok } }"], ""));
    let mut frames = Frames::to(&gateway);
    frames.send(SETTINGS, ACK, &[]).unwrap();
    assert!(frames.is_open());
    // By the end of the second one, the timeout of a head that began with the connection is long over.
    for _ in 0..2 {
        let mut half = gateway.connect();
        half.send("GET / HTTP/1.1\r\nHo");
        assert!(half.is_closed());
    }
    assert!(frames.is_open(), "ended by the head timeout");
}

#[test]
fn idle_http_2_connection_gets_goaway() {
    let settings = "timeouts: { head: 1h, idle: 1s }";
    let gateway = Gateway::start(&site(settings, &["{ path: /**, respond: { body: ok } }"], ""));
    let mut frames = Frames::to(&gateway);
    let mut got_goaway = false;
    while let Some((kind, flags, payload)) = frames.next() {
        match kind {
            SETTINGS if flags & ACK == 0 => _ = frames.send(SETTINGS, ACK, &[]),
            PING if flags & ACK == 0 => _ = frames.send(PING, ACK, &payload),
            GOAWAY => got_goaway = true,
            _ => {}
        }
    }
    assert!(got_goaway, "a client has to know that nothing it sends now is served");
    // A silent client's connection is closed, too.
    let mut silent = Frames::to(&gateway);
    while silent.next().is_some() {}
}

/// Returns a body that sends a few bytes now and then.
fn dripping() -> AnyBody {
    let drip = |left: u32| async move {
        tokio::time::sleep(Duration::from_millis(200)).await;
        (left > 0).then(|| (Ok(Frame::data(Bytes::from_static(b"drip"))), left - 1))
    };
    let stream = futures_util::stream::unfold(20, drip);
    BodyExt::boxed(StreamBody::new(sync(stream)))
}

/// Makes a stream shareable between threads, which `unfold` is not.
fn sync<T: Send + 'static>(
    stream: impl futures_util::Stream<Item = T> + Send + 'static,
) -> impl futures_util::Stream<Item = T> + Send + Sync {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let mut stream = std::pin::pin!(stream);
        while let Some(item) = futures_util::StreamExt::next(&mut stream).await {
            if sender.send(item).await.is_err() {
                return;
            }
        }
    });
    futures_util::stream::unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) })
}

#[test]
fn an_answer_that_is_not_read_is_given_up_and_the_others_go_on() {
    let upstream = Served::start(Speaks::Http1, |request| async move {
        Response::new(match request.uri().path() {
            "/endless" => endless(),
            "/drip" => dripping(),
            _ => full("ok"),
        })
    });
    let route = format!("{{ path: /**, timeout: 3s, upstream: 'http://{}' }}", upstream.address);
    let gateway = Gateway::start(&site("timeouts: { write: 1s }", &[route], ""));
    runtime().block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(64 << 10);
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let ask = |path: &str| {
            let request = get(&gateway, path).body(full("")).unwrap();
            sender.clone().send_request(request)
        };
        let stuck = ask("/endless").await.unwrap();
        let read = ask("/drip").await.unwrap().into_body().collect().await;
        assert_eq!(read.expect("it goes on").to_bytes().len(), 80, "four seconds of it");
        // The bytes that had arrived are there; then it was reset.
        let rest = tokio::time::timeout(PATIENCE, stuck.into_body().collect()).await;
        assert!(rest.expect("it ends").is_err(), "it was given up");
        assert_eq!(ask("/").await.unwrap().status(), 200, "the connection goes on");
    });
}

#[test]
fn a_written_answer_that_is_not_read_is_given_up_too() {
    let body = "x".repeat(300_000);
    let gateway = Gateway::start(&site(
        "timeouts: { write: 1s }",
        &[format!("{{ path: /**, respond: {{ body: {body} }} }}")],
        "",
    ));
    runtime().block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(64 << 10);
        let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let read = sender.send_request(get(&gateway, "/").body(full("")).unwrap()).await.unwrap();
        assert_eq!(read.into_body().collect().await.unwrap().to_bytes().len(), 300_000);
        let stuck = sender.send_request(get(&gateway, "/").body(full("")).unwrap()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(4)).await;
        let rest = tokio::time::timeout(PATIENCE, stuck.into_body().collect()).await;
        assert!(rest.expect("it ends").is_err(), "it was given up");
    });
}

/// Only the client is at fault, and it gets a 408.
#[test]
fn a_body_that_does_not_come_is_408_before_an_upstream_of_http_2() {
    let upstream = Served::start(Speaks::Http2, |request| async move {
        let length = request.into_body().collect().await.map_or(0, |body| body.to_bytes().len());
        Response::new(full(length.to_string()))
    });
    let route = format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address);
    let gateway = Gateway::start(&site("timeouts: { body: 1s }", &[route], ""));
    for rest in ["Content-Length: 100\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhel"] {
        let mut connection = gateway.connect();
        connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\n{rest}"));
        assert_eq!(connection.receive().status, 408);
    }
    assert_eq!(gateway.get("/").text(), "0", "the shared connection is not to blame");
}
