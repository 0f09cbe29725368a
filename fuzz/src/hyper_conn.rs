//! hyper's HTTP/1, on a connection in memory, to compare the gateway with.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::service::service_fn;

/// More polls than any input needs.
const MAX_POLLS: usize = 10_000;

/// A message as hyper reads it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) is_http10: bool,
    pub(crate) status: u16,
    pub(crate) fields: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
    /// Whether all of the body has arrived, and was valid.
    pub(crate) is_complete: bool,
}

/// A connection that delivers bytes and then ends.
struct Connection {
    input: Vec<u8>,
    at: usize,
    /// Whether the peer waits for output before it sends anything.
    waits: bool,
}

impl Connection {
    fn new(input: &[u8], waits: bool) -> Self {
        Self { input: input.to_vec(), at: 0, waits }
    }
}

impl Read for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut out: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.waits {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let end = self.input.len().min(self.at + out.remaining());
        out.put_slice(&self.input[self.at..end]);
        self.at = end;
        Poll::Ready(Ok(()))
    }
}

impl Write for Connection {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.waits = false;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Reads the requests in the bytes that arrive on a connection before it is closed.
pub(crate) fn requests(input: &[u8]) -> Vec<Message> {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let service = service_fn(|request: Request<Incoming>| {
        let requests = Arc::clone(&requests);
        async move {
            let message = Message {
                method: request.method().to_string(),
                target: request.uri().to_string(),
                is_http10: request.version() == http::Version::HTTP_10,
                fields: fields(request.headers()),
                ..Message::default()
            };
            let index = {
                let mut requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
                requests.push(message);
                requests.len() - 1
            };
            let (body, is_complete) = collect(request.into_body()).await;
            let mut requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
            (requests[index].body, requests[index].is_complete) = (body, is_complete);
            // A server that has not read a request does not go on with the next.
            if is_complete { Ok(Response::new(Empty::<&[u8]>::new())) } else { Err(io::Error::other("incomplete")) }
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .half_close(true)
        .serve_connection(Connection::new(input, false), service);
    run(pin!(connection));
    let requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
    requests.clone()
}

/// Reads the response to a request with this method. Returns `None` if hyper refuses it.
pub(crate) fn response(input: &[u8], method: &str) -> Option<Message> {
    let exchange = async {
        let connection = Connection::new(input, true);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(connection).await.ok()?;
        let request = Request::builder().method(method).uri("/").header("host", "h").body(Empty::<&[u8]>::new());
        let answered = async {
            let response = sender.send_request(request.ok()?).await.ok()?;
            let message = Message {
                is_http10: response.version() == http::Version::HTTP_10,
                status: response.status().as_u16(),
                fields: fields(response.headers()),
                ..Message::default()
            };
            let (body, is_complete) = collect(response.into_body()).await;
            Some(Message { body, is_complete, ..message })
        };
        let (answered, _) = futures_util::join!(answered, connection);
        answered
    };
    run(pin!(exchange)).flatten()
}

async fn collect(mut body: Incoming) -> (Vec<u8>, bool) {
    let mut content = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return (content, false) };
        if let Ok(data) = frame.into_data() {
            content.extend_from_slice(&data);
        }
    }
    (content, true)
}

fn fields(headers: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    headers.iter().map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec())).collect()
}

/// Runs a future that never waits for anything outside. Returns `None` if it does not end.
fn run<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    let mut context = Context::from_waker(Waker::noop());
    (0..MAX_POLLS).find_map(|_| match future.as_mut().poll(&mut context) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    })
}
