//! A minimal HTTP/2 client, which takes requests as HTTP/1 messages.
//!
//! Each message becomes a stream. Its `Host` becomes `:authority`, chunks become data, and the headers that only
//! HTTP/1 has are left out. Messages may arrive in any pieces. The next message may follow before the response.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Version};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::client::Protocol;
use crate::http1::{MOMENT, Response};
use crate::upstream::runtime;
use crate::wait::{PATIENCE, in_time};

/// Headers that only HTTP/1 has. The first `Host` is sent as `:authority`, another one stays a header.
const HTTP1_ONLY: [&str; 4] = ["connection", "host", "keep-alive", "transfer-encoding"];

/// A client's connection. It is blocking, and waits at most [`PATIENCE`].
pub struct Connection {
    sender: SendRequest<Bytes>,
    scheme: &'static str,
    /// The bytes of an incomplete head or chunk.
    unsent: Vec<u8>,
    upload: Option<Upload>,
    /// The requests without a response so far.
    awaited: VecDeque<ResponseFuture>,
    /// The body of the last response whose head was read.
    body: Option<Body>,
    task: JoinHandle<()>,
}

/// A request whose body is not complete.
struct Upload {
    stream: SendStream<Bytes>,
    framing: Framing,
}

/// The position in the body of an HTTP/1 message.
enum Framing {
    /// This many bytes are left.
    Length(usize),
    /// This many bytes are left in the chunk.
    Chunk(usize),
    /// The line before a chunk comes next, after the line that ends the previous one.
    ChunkSize { is_first: bool },
    /// The trailers come next.
    Trailers,
}

/// A body of which a part may have been read.
struct Body {
    stream: RecvStream,
    /// Bytes that have arrived and were not read.
    unread: Vec<u8>,
    /// The length that the head announced, and the number of bytes that have arrived.
    announced: Option<usize>,
    arrived: usize,
}

impl Connection {
    /// Connects to a gateway, with this protocol.
    pub fn to(address: SocketAddr, protocol: Protocol) -> io::Result<Self> {
        blocking(async {
            let stream = protocol.open(address).await?;
            let (sender, connection) = h2::client::handshake(stream).await.map_err(into_io)?;
            // Its error is that of the streams, too.
            let task = tokio::spawn(async move { _ = connection.await });
            let (upload, awaited, body) = (None, VecDeque::new(), None);
            Ok(Self { sender, scheme: protocol.scheme(), unsent: Vec::new(), upload, awaited, body, task })
        })
    }

    /// Sends bytes of HTTP/1 messages, or fails if the server does not read any more.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.unsent.extend_from_slice(bytes);
        let sent = blocking(async {
            loop {
                let has_sent = match self.upload.take() {
                    Some(upload) => self.send_body(upload).await?,
                    None => self.send_head().await?,
                };
                if !has_sent {
                    return Ok(());
                }
            }
        });
        if sent.is_err() {
            // The rest of this message is not the next one.
            self.unsent.clear();
        }
        sent
    }

    /// Takes the bytes up to `end` from those that are not sent.
    fn take_until(&mut self, end: &[u8]) -> Option<String> {
        let at = self.unsent.windows(end.len()).position(|window| window == end)?;
        let mut bytes: Vec<u8> = self.unsent.drain(..at + end.len()).collect();
        bytes.truncate(at);
        Some(String::from_utf8(bytes).expect("heads and chunk sizes of tests are UTF-8"))
    }

    /// Sends the head of a message if it is complete. Returns whether it is.
    async fn send_head(&mut self) -> io::Result<bool> {
        let Some(head) = self.take_until(b"\r\n\r\n") else { return Ok(false) };
        let (request_line, fields) = head.split_once("\r\n").unwrap_or((&head, ""));
        let [method, target, "HTTP/1.1"] = request_line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("not a request of HTTP/1.1: {request_line:?}")
        };
        let mut fields = headers(fields);
        let mut hosts = fields.get_all("host").iter().cloned().collect::<Vec<_>>().into_iter();
        let host = hosts.next().expect("a request has a host").to_str().expect("text").to_owned();
        let is_chunked = fields.contains_key("transfer-encoding");
        let length =
            fields.get("content-length").map(|length| length.to_str().expect("text").parse().expect("a length"));
        HTTP1_ONLY.iter().for_each(|name| _ = fields.remove(*name));
        fields.extend(hosts.map(|host| (http::header::HOST, host)));
        let uri = format!("{}://{host}{target}", self.scheme);
        let mut request = Request::builder().method(method).uri(&uri).version(Version::HTTP_2).body(());
        let request = request.as_mut().unwrap_or_else(|error| panic!("{method} {uri}: {error}"));
        *request.headers_mut() = fields;
        poll_fn(|context| self.sender.poll_ready(context)).await.map_err(into_io)?;
        let framing = match length {
            _ if is_chunked => Some(Framing::ChunkSize { is_first: true }),
            Some(length) if length > 0 => Some(Framing::Length(length)),
            _ => None,
        };
        let (response, stream) =
            self.sender.send_request(std::mem::take(request), framing.is_none()).map_err(into_io)?;
        self.awaited.push_back(response);
        self.upload = framing.map(|framing| Upload { stream, framing });
        Ok(true)
    }

    /// Sends a part of a body if there is one. Returns whether there is.
    async fn send_body(&mut self, mut upload: Upload) -> io::Result<bool> {
        let stream = &mut upload.stream;
        let next = match upload.framing {
            Framing::Length(left) | Framing::Chunk(left) => {
                let part: Bytes = self.unsent.drain(..left.min(self.unsent.len())).collect();
                let (is_empty, left) = (part.is_empty(), left - part.len());
                let is_chunk = matches!(upload.framing, Framing::Chunk(_));
                send_data(stream, part, left == 0 && !is_chunk).await?;
                match (is_chunk, left) {
                    _ if is_empty => None,
                    (false, 0) => return Ok(true),
                    (false, left) => Some(Framing::Length(left)),
                    (true, 0) => Some(Framing::ChunkSize { is_first: false }),
                    (true, left) => Some(Framing::Chunk(left)),
                }
            }
            Framing::ChunkSize { is_first: false } => {
                self.take_until(b"\r\n").map(|_| Framing::ChunkSize { is_first: true })
            }
            Framing::ChunkSize { is_first: true } => self.take_until(b"\r\n").map(|line| {
                let size = line.split(';').next().unwrap_or_default();
                match usize::from_str_radix(size, 16).expect("the size of a chunk") {
                    0 => Framing::Trailers,
                    size => Framing::Chunk(size),
                }
            }),
            Framing::Trailers if self.unsent.starts_with(b"\r\n") => {
                self.unsent.drain(..2);
                send_data(stream, Bytes::new(), true).await?;
                return Ok(true);
            }
            Framing::Trailers => match self.take_until(b"\r\n\r\n") {
                Some(fields) => {
                    stream.send_trailers(headers(&fields)).map_err(into_io)?;
                    return Ok(true);
                }
                None => None,
            },
        };
        let has_sent = next.is_some();
        upload.framing = next.unwrap_or(upload.framing);
        self.upload = Some(upload);
        Ok(has_sent)
    }

    /// Reads the next response. Fails if its stream ends before it is complete.
    #[track_caller]
    pub fn receive(&mut self) -> io::Result<Response> {
        let mut response = self.receive_head()?;
        let mut body = self.body.take().expect("the head was read");
        in_time(blocking(async {
            while body.more().await? {}
            if let Some(trailers) = body.trailers().await? {
                response.trailers = fields(&trailers);
            }
            Ok(())
        }))?;
        response.body = body.unread;
        Ok(response)
    }

    /// Reads the head of the next response.
    #[track_caller]
    pub fn receive_head(&mut self) -> io::Result<Response> {
        let awaited = self.awaited.pop_front().expect("a request was sent");
        let response = in_time(blocking(async { awaited.await.map_err(into_io) }))?;
        let (parts, stream) = response.into_parts();
        let announced = parts.headers.get("content-length").filter(|_| !stream.is_end_stream());
        let announced = announced.and_then(|length| length.to_str().ok()?.parse().ok());
        self.body = Some(Body { stream, unread: Vec::new(), announced, arrived: 0 });
        let headers = fields(&parts.headers);
        Ok(Response { status: parts.status.as_u16(), version: "HTTP/2".to_owned(), headers, ..Response::default() })
    }

    /// Reads this many bytes of the body whose head was read. Fails if the body ends before.
    #[track_caller]
    pub fn body_bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let body = self.body.as_mut().expect("the head was read");
        in_time(blocking(async {
            while body.unread.len() < count {
                if !body.more().await? {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Ok(body.unread.drain(..count).collect())
        }))
    }

    /// Returns whether the server closes the connection.
    pub fn is_closed(&mut self) -> bool {
        blocking(async { (&mut self.task).await.map_err(io::Error::other) }).is_ok()
    }

    /// Returns whether the next response begins within a moment.
    pub fn has_answer_within_a_moment(&mut self) -> bool {
        let awaited = self.awaited.front_mut().expect("a request was sent");
        runtime()
            .block_on(async { timeout(MOMENT, poll_fn(|context| awaited.poll_informational(context))).await.is_ok() })
    }

    /// Resets the streams of all requests.
    pub fn reset_streams(&mut self) {
        // A stream without a handle is reset.
        (self.upload, self.body) = (None, None);
        self.awaited.clear();
        self.unsent.clear();
    }
}

impl Body {
    /// Waits for more bytes. Returns false at the end of the body.
    async fn more(&mut self) -> io::Result<bool> {
        match self.stream.data().await {
            Some(Ok(data)) => {
                self.stream.flow_control().release_capacity(data.len()).map_err(into_io)?;
                self.unread.extend_from_slice(&data);
                self.arrived += data.len();
                Ok(true)
            }
            Some(Err(error)) if self.is_complete(&error) => Ok(false),
            Some(Err(error)) => Err(into_io(error)),
            None => Ok(false),
        }
    }

    async fn trailers(&mut self) -> io::Result<Option<HeaderMap>> {
        match self.stream.trailers().await {
            Err(error) if self.is_complete(&error) => Ok(None),
            other => other.map_err(into_io),
        }
    }

    /// Returns whether the error is a reset after the whole response, which stops the upload of the rest of a request.
    fn is_complete(&self, error: &h2::Error) -> bool {
        error.is_remote() && error.reason() == Some(Reason::NO_ERROR) && self.announced == Some(self.arrived)
    }
}

async fn send_data(stream: &mut SendStream<Bytes>, mut data: Bytes, is_end: bool) -> io::Result<()> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        if stream.capacity() == 0 {
            let granted = poll_fn(|context| stream.poll_capacity(context)).await;
            granted.ok_or(io::ErrorKind::ConnectionReset)?.map_err(into_io)?;
        }
        let part = data.split_to(stream.capacity().min(data.len()));
        stream.send_data(part, is_end && data.is_empty()).map_err(into_io)?;
        if data.is_empty() {
            return Ok(());
        }
    }
    match is_end {
        true => stream.send_data(data, true).map_err(into_io),
        false => Ok(()),
    }
}

/// Returns the fields of an HTTP/1 head.
fn headers(lines: &str) -> HeaderMap {
    let fields = lines.split("\r\n").filter(|line| !line.is_empty());
    fields
        .map(|line| {
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("not a header: {line:?}"));
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap_or_else(|error| panic!("{line:?}: {error}"));
            let value = HeaderValue::from_bytes(value.trim().as_bytes());
            (name, value.unwrap_or_else(|error| panic!("{line:?}: {error}")))
        })
        .collect()
}

/// Returns the names and values of fields.
fn fields(map: &HeaderMap) -> Vec<(String, String)> {
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    map.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

/// Waits for a future, for at most [`PATIENCE`].
fn blocking<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    runtime()
        .block_on(async { timeout(PATIENCE, future).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) })
}

/// Returns whether the server has not processed a request that failed, so that a client may send it again: GOAWAY names
/// an earlier one as the last, or arrived before the request was sent.
pub fn is_unprocessed(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<h2::Error>());
    error.is_some_and(|error| {
        let is_goaway = error.is_go_away() && error.is_remote() && error.reason() == Some(Reason::NO_ERROR);
        is_goaway || error.reason() == Some(Reason::REFUSED_STREAM)
    })
}

fn into_io(error: h2::Error) -> io::Error {
    match error.is_io() {
        true => error.into_io().unwrap_or_else(|| io::ErrorKind::ConnectionReset.into()),
        false => io::Error::new(io::ErrorKind::ConnectionReset, error),
    }
}
