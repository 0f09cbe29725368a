//! Upstreams: some that a test scripts and that keep every byte they got, and some that hyper serves.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::runtime::Runtime;

use crate::process::{PATIENCE, wait_until};

/// A scripted upstream.
pub(crate) struct Raw {
    pub(crate) address: SocketAddr,
    seen: Seen,
}

/// The bytes of each connection, in the order in which they were accepted.
type Seen = Arc<Mutex<Vec<Vec<u8>>>>;

/// One connection of the gateway to an upstream.
pub(crate) struct Conversation {
    pub(crate) number: usize,
    pub(crate) stream: TcpStream,
    unread: Vec<u8>,
    seen: Seen,
}

/// A request as it arrived.
#[derive(Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// The bytes after the last chunk.
    pub(crate) trailers: String,
}

impl ReceivedRequest {
    /// Returns the values of a header.
    pub(crate) fn values(&self, name: &str) -> Vec<&str> {
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
    pub(crate) fn start(serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        Self::at("127.0.0.1:0", serve)
    }

    pub(crate) fn at(address: &str, serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind(address).expect("a port is free"), serve)
    }

    /// Starts an upstream with small socket buffers, as over a network.
    pub(crate) fn far_away(serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.set_tcp_mss(88).unwrap();
        socket.set_recv_buffer_size(2304).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.listen(16).unwrap();
        Self::on(socket.into(), serve)
    }

    fn on(listener: TcpListener, serve: impl Fn(&mut Conversation) + Send + Sync + 'static) -> Self {
        let (address, seen) = (listener.local_addr().expect("it is bound"), Seen::default());
        let (serve, all) = (Arc::new(serve), Arc::clone(&seen));
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let Ok(stream) = stream else { return };
                all.lock().unwrap().push(Vec::new());
                let mut conversation = Conversation { number, stream, unread: Vec::new(), seen: Arc::clone(&all) };
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || {
                    conversation.stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    serve(&mut conversation);
                });
            }
        });
        Self { address, seen }
    }

    /// Starts an upstream that answers every request with these bytes.
    pub(crate) fn answering(answer: impl Into<Vec<u8>>) -> Self {
        let answer = answer.into();
        Self::start(move |conversation| {
            while conversation.request().is_some() {
                conversation.send(&answer);
            }
        })
    }

    /// Starts an upstream that answers every request with its head, and with its own name in a header.
    pub(crate) fn named(name: &'static str) -> Self {
        Self::at_named("127.0.0.1:0", name)
    }

    pub(crate) fn at_named(address: &str, name: &'static str) -> Self {
        Self::at(address, move |conversation| {
            while let Some(ReceivedRequest { head, .. }) = conversation.request() {
                conversation.send(format!(
                    "HTTP/1.1 200 OK\r\nX-Upstream: {name}\r\nContent-Length: {}\r\n\r\n{head}",
                    head.len()
                ));
            }
        })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the bytes of each connection so far.
    pub(crate) fn seen(&self) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        seen.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect()
    }

    pub(crate) fn accepted(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// Returns the number of requests on all connections, by their heads.
    pub(crate) fn requests(&self) -> usize {
        self.seen().iter().map(|seen| seen.matches(" HTTP/1.1\r\n").count()).sum()
    }
}

impl Conversation {
    /// Waits for more bytes. Returns false at the end of the connection.
    pub(crate) fn more(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        let Ok(read) = self.stream.read(&mut buffer) else { return false };
        self.seen.lock().unwrap()[self.number].extend_from_slice(&buffer[..read]);
        self.unread.extend_from_slice(&buffer[..read]);
        read > 0
    }

    /// Returns the bytes after the last request that was read.
    pub(crate) fn unread(&self) -> &[u8] {
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
    pub(crate) fn head(&mut self) -> Option<ReceivedRequest> {
        let head = self.until(b"\r\n\r\n")?;
        Some(ReceivedRequest { head, body: Vec::new(), trailers: String::new() })
    }

    /// Reads the next request.
    pub(crate) fn request(&mut self) -> Option<ReceivedRequest> {
        let mut asked = self.head()?;
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
        Some(asked)
    }

    /// Sends bytes. Returns false if the gateway does not read any more.
    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Waits until the gateway closes the connection.
    pub(crate) fn await_end(&mut self) {
        while self.more() {}
    }
}

/// Starts an upstream that disconnects on every request while it is not healthy.
pub(crate) fn moody(name: &'static str, is_healthy: &Arc<AtomicBool>) -> Raw {
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

/// Returns an address where nothing listens. Its port stays reserved until the tests are over.
pub(crate) fn unused_address() -> SocketAddr {
    let taken = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    taken.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = taken.local_addr().unwrap().as_socket().unwrap();
    std::mem::forget(taken);
    address
}

/// Waits until a condition holds.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    assert!(wait_until(|| is_so().then_some(())).is_some(), "{what} did not come to be");
}

/// Returns the runtime of the asynchronous upstreams and clients of all tests.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads can start")
    })
}

/// A body of hyper's upstreams.
pub(crate) type AnyBody = BoxBody<Bytes, std::io::Error>;

pub(crate) fn full(bytes: impl Into<Bytes>) -> AnyBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// An upstream that hyper serves.
pub(crate) struct Served {
    pub(crate) address: SocketAddr,
    accepted: Arc<AtomicUsize>,
}

#[derive(Clone, Copy)]
pub(crate) enum Speaks {
    Http1,
    Http2,
}

impl Served {
    pub(crate) fn start<F, A>(speaks: Speaks, answer: F) -> Self
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

    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Relaxed)
    }
}

/// Serves every connection in its own task. Returns the address, and the number of connections.
pub(crate) fn accepting<S>(
    serve: impl Fn(tokio::net::TcpStream) -> S + Send + 'static,
) -> (SocketAddr, Arc<AtomicUsize>)
where
    S: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.set_nonblocking(true).unwrap();
    let (address, accepted) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&accepted);
    runtime().spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Relaxed);
            tokio::spawn(serve(stream));
        }
    });
    (address, accepted)
}
