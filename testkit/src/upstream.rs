//! Upstreams: some that a test scripts and that keep every byte they got, and some that hyper serves.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::runtime::Runtime;

use crate::wait::PATIENCE;

/// A scripted upstream.
pub struct Raw {
    /// The address to connect to.
    pub address: SocketAddr,
    seen: Seen,
}

/// The bytes of each connection, in the order in which they were accepted.
type Seen = Arc<Mutex<Vec<Vec<u8>>>>;

/// The longest wait of an upstream for the gateway. A test gives up earlier, so it never takes the end of this wait for the
/// end of a connection.
const UPSTREAM_PATIENCE: Duration = PATIENCE.saturating_mul(4);

/// One connection of the gateway to an upstream.
pub struct Conversation {
    /// The number of connections before this one.
    pub number: usize,
    /// The connection itself.
    pub stream: TcpStream,
    unread: Vec<u8>,
    seen: Seen,
}

/// A request as it arrived.
#[derive(Debug)]
pub struct ReceivedRequest {
    /// The request line and the header fields.
    pub head: String,
    /// The body without its framing.
    pub body: Vec<u8>,
    /// The bytes after the last chunk.
    pub trailers: String,
}

impl ReceivedRequest {
    /// Returns the values of a header.
    pub fn values(&self, name: &str) -> Vec<&str> {
        let fields = self.head.lines().skip(1).filter_map(|line| line.split_once(':'));
        fields.filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).collect()
    }

    fn is_chunked(&self) -> bool {
        self.values("transfer-encoding") == ["chunked"]
    }
}

impl Raw {
    /// Starts an upstream. `serve` handles each connection on its own thread, and the connection is closed when it
    /// returns.
    pub fn start(serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        Self::at("127.0.0.1:0", serve)
    }

    /// Starts an upstream on this address.
    pub fn at(address: &str, serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind(address).expect("a port is free"), serve)
    }

    /// Starts an upstream with small socket buffers, as over a network.
    pub fn far_away(serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("sockets and locks work");
        socket.set_tcp_mss(88).expect("sockets and locks work");
        socket.set_recv_buffer_size(2304).expect("sockets and locks work");
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("sockets and locks work");
        socket.listen(16).expect("sockets and locks work");
        Self::on(socket.into(), serve)
    }

    fn on(listener: TcpListener, serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        let (address, seen) = (listener.local_addr().expect("it is bound"), Seen::default());
        let (serve, all) = (Arc::new(serve), Arc::clone(&seen));
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let Ok(stream) = stream else { return };
                all.lock().expect("sockets and locks work").push(Vec::new());
                let mut conversation = Conversation { number, stream, unread: Vec::new(), seen: Arc::clone(&all) };
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || {
                    conversation.stream.set_read_timeout(Some(UPSTREAM_PATIENCE)).expect("sockets and locks work");
                    serve(&mut conversation);
                });
            }
        });
        Self { address, seen }
    }

    /// Starts an upstream that answers every request with these bytes.
    pub fn answering(answer: impl Into<Vec<u8>>) -> Self {
        let answer = answer.into();
        Self::start(move |conversation| {
            while conversation.request().is_some() {
                conversation.send(&answer);
            }
        })
    }

    /// Starts an upstream that answers every request with its head, and with its own name in a header.
    pub fn named(name: &'static str) -> Self {
        Self::at_named("127.0.0.1:0", name)
    }

    /// Starts the same upstream on this address.
    pub fn at_named(address: &str, name: &'static str) -> Self {
        Self::on_named(TcpListener::bind(address).expect("a port is free"), name)
    }

    /// Starts the same upstream on a socket that listens.
    pub fn on_named(listener: TcpListener, name: &'static str) -> Self {
        Self::on(listener, move |conversation| {
            while let Some(ReceivedRequest { head, .. }) = conversation.request() {
                conversation.send(format!(
                    "HTTP/1.1 200 OK\r\nX-Upstream: {name}\r\nContent-Length: {}\r\n\r\n{head}",
                    head.len()
                ));
            }
        })
    }

    /// Returns the URL for a rule file.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the bytes of each connection so far.
    pub fn seen(&self) -> Vec<String> {
        let seen = self.seen.lock().expect("sockets and locks work");
        seen.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect()
    }

    /// Returns the number of connections so far.
    pub fn accepted(&self) -> usize {
        self.seen.lock().expect("sockets and locks work").len()
    }

    /// Returns the number of requests on all connections, by their heads.
    pub fn requests(&self) -> usize {
        self.seen().iter().map(|seen| seen.matches(" HTTP/1.1\r\n").count()).sum()
    }
}

impl Conversation {
    /// Waits for more bytes. Returns false at the end of the connection.
    pub fn more(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        let Ok(read) = self.stream.read(&mut buffer) else { return false };
        self.seen.lock().expect("sockets and locks work")[self.number].extend_from_slice(&buffer[..read]);
        self.unread.extend_from_slice(&buffer[..read]);
        read > 0
    }

    /// Returns the bytes after the last request that was read.
    pub fn unread(&self) -> &[u8] {
        &self.unread
    }

    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.unread.len() < count {
            if !self.more() {
                return None;
            }
        }
        Some(self.unread.drain(..count).collect())
    }

    fn until(&mut self, end: &[u8]) -> Option<String> {
        loop {
            if let Some(at) = self.unread.windows(end.len()).position(|window| window == end) {
                let bytes: Vec<u8> = self.unread.drain(..at + end.len()).collect();
                return Some(String::from_utf8_lossy(&bytes).into_owned());
            }
            if !self.more() {
                return None;
            }
        }
    }

    /// Reads the head of the next request.
    pub fn head(&mut self) -> Option<ReceivedRequest> {
        let head = self.until(b"\r\n\r\n")?;
        Some(ReceivedRequest { head, body: Vec::new(), trailers: String::new() })
    }

    /// Reads the next request.
    pub fn request(&mut self) -> Option<ReceivedRequest> {
        let mut asked = self.head()?;
        self.body_of(&mut asked)?;
        Some(asked)
    }

    /// Reads the body of a request whose head was read. Returns `None` if it has no end.
    pub fn body_of(&mut self, asked: &mut ReceivedRequest) -> Option<()> {
        if asked.is_chunked() {
            loop {
                let size = usize::from_str_radix(self.until(b"\r\n")?.trim(), 16).ok()?;
                if size == 0 {
                    break;
                }
                asked.body.extend(self.take(size)?);
                self.take(2)?;
            }
            loop {
                match self.until(b"\r\n")? {
                    line if line == "\r\n" => break,
                    line => asked.trailers.push_str(&line),
                }
            }
        } else if let [length] = asked.values("content-length")[..] {
            let length = length.parse().ok()?;
            asked.body = self.take(length)?;
        }
        Some(())
    }

    /// Sends bytes. Returns false if the gateway does not read any more.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Waits until the gateway closes the connection.
    pub fn await_end(&mut self) {
        while self.more() {}
    }
}

/// Starts an upstream that disconnects on every request while it is not healthy.
pub fn moody(name: &'static str, is_healthy: &Arc<AtomicBool>) -> Raw {
    let is_healthy = Arc::clone(is_healthy);
    Raw::start(move |conversation| {
        while let Some(asked) = conversation.request() {
            if !is_healthy.load(Relaxed) {
                return;
            }
            let status = if asked.head.starts_with("GET /health ") { "204 No Content" } else { "200 OK" };
            conversation.send(format!("HTTP/1.1 {status}\r\nX-Upstream: {name}\r\n"));
            conversation.send(if status.starts_with("204") { "\r\n" } else { "Content-Length: 0\r\n\r\n" });
        }
    })
}

/// The response of a healthy upstream that closes its connections.
pub const HELLO: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";

/// Starts an upstream that answers every request with these bytes and closes the connection.
pub fn upstream(answer: &'static [u8]) -> SocketAddr {
    slow_upstream(answer, Duration::ZERO)
}

/// Starts the same upstream with a delay.
#[expect(clippy::disallowed_methods, reason = "an upstream that takes its time has a thread to wait on")]
pub fn slow_upstream(answer: &'static [u8], after: Duration) -> SocketAddr {
    moody_upstream(move || {
        std::thread::sleep(after);
        answer
    })
}

/// Starts the same upstream, with a response that a closure returns.
pub fn moody_upstream(answer: impl Fn() -> &'static [u8] + Send + Sync + 'static) -> SocketAddr {
    let upstream = Raw::start(move |conversation| {
        if conversation.head().is_some() {
            conversation.send(answer());
            // Closing with unread bytes would reset the connection and lose the response.
            _ = conversation.stream.shutdown(Shutdown::Write);
            conversation.await_end();
        }
    });
    upstream.address
}

/// Returns the runtime of the asynchronous upstreams and clients of all tests.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads can start")
    })
}

/// A body of hyper's upstreams.
pub type AnyBody = BoxBody<Bytes, std::io::Error>;

/// Returns a body of these bytes.
pub fn full(bytes: impl Into<Bytes>) -> AnyBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// An upstream that hyper serves.
pub struct Served {
    /// The address to connect to.
    pub address: SocketAddr,
    accepted: Arc<AtomicUsize>,
}

/// The protocol of an upstream.
#[derive(Clone, Copy)]
pub enum Speaks {
    /// HTTP/1.1
    Http1,
    /// HTTP/2 without TLS
    Http2,
}

impl Served {
    /// Starts an upstream with a response for each request.
    pub fn start<F, A>(speaks: Speaks, answer: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response<AnyBody>> + Send + 'static,
    {
        let (address, accepted) = accepting(move |stream| {
            let answer = answer.clone();
            let service = service_fn(move |request| {
                let answering = answer(request);
                async move { Ok::<_, std::convert::Infallible>(answering.await) }
            });
            async move {
                let io = TokioIo::new(stream);
                _ = match speaks {
                    Speaks::Http1 => hyper::server::conn::http1::Builder::new().serve_connection(io, service).await,
                    Speaks::Http2 => {
                        let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                        builder.serve_connection(io, service).await
                    }
                };
            }
        });
        Self { address, accepted }
    }

    /// Returns the number of connections so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Relaxed)
    }
}

/// Serves every connection in its own task. Returns the address, and the number of connections.
pub fn accepting<S>(serve: impl Fn(tokio::net::TcpStream) -> S + Send + 'static) -> (SocketAddr, Arc<AtomicUsize>)
where
    S: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.set_nonblocking(true).expect("sockets and locks work");
    let (address, accepted) = (listener.local_addr().expect("sockets and locks work"), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&accepted);
    runtime().spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("sockets and locks work");
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Relaxed);
            tokio::spawn(serve(stream));
        }
    });
    (address, accepted)
}
