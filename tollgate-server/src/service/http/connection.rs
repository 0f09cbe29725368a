//! HTTP connections of the decision service: answers simple checks, and leaves the rest of a connection to the router
//! from the first other request on.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use bytes::{Buf, Bytes};
use futures_util::FutureExt as _;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::watch;
use tokio::time::timeout;
use tollgate_telemetry::traces;

use super::ServiceState;
use super::simple_check::{After, SimpleChecks};
use crate::service::connections::{
    Begun, HEAD_DEADLINE, IDLE_DEADLINE, Interrupt, Interrupts, MAX_CONNECTION_AGE, Protocol, Requests, Stage, TICK,
    Usage, WRITE_DEADLINE, refuse_http, serve_http,
};
use crate::service::cross_site::Hosts;
use crate::service::surfaces::{RequestOutcome, Surface, Surfaces};

/// The most bytes that are read at once. A request that is longer is left to the router.
const READ_BYTES: usize = 8 * 1024;

/// HTTP/1.1 and HTTP/2, with a fast path for simple checks.
#[derive(Clone)]
pub(super) struct CheckProtocol {
    pub(super) router: Router,
    pub(super) requests: Requests,
    pub(super) state: ServiceState,
    pub(super) hosts: Hosts,
}

impl Protocol for CheckProtocol {
    async fn serve<Io>(self, mut io: Io, begun: Begun, stage: watch::Receiver<Stage>)
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let checks = SimpleChecks::new(self.state, self.hosts);
        if let Ok(Some(Rest { first, age })) =
            answer_simple(&mut io, checks, (&self.requests.surfaces, &begun.usage), stage.clone()).await
        {
            serve_http(Prefixed { first, io }, Begun { age, ..begun }, (self.router, self.requests), stage).await;
        }
    }

    async fn refuse<Io>(self, io: Io, _peer: SocketAddr)
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        refuse_http(io).await;
    }
}

/// A connection that is left to the router.
struct Rest {
    /// The bytes that were read but not answered.
    first: Bytes,
    age: Duration,
}

/// Answers simple checks until another request arrives or the listener begins to stop. Returns `None` if the connection
/// has to be closed.
async fn answer_simple<Io>(
    io: &mut Io,
    mut checks: SimpleChecks,
    (surfaces, usage): (&Surfaces, &Usage),
    stage: watch::Receiver<Stage>,
) -> io::Result<Option<Rest>>
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let mut wait =
        Wait { interrupts: Interrupts::new(stage), idle: Duration::ZERO, deadline: HEAD_DEADLINE, age: Duration::ZERO };
    let (mut input, mut output) = (Vec::with_capacity(READ_BYTES), Vec::new());
    loop {
        match wait.read(io, &mut input).await? {
            Next::Requests => {}
            Next::Router => return Ok(Some(Rest { first: input.into(), age: wait.age })),
            Next::Close => return Ok(None),
        }
        let after = if wait.age < MAX_CONNECTION_AGE { After::KeepAlive } else { After::Close };
        let (mut at, mut answered) = (0, 0);
        let began = surfaces.now();
        usage.begin();
        // The router makes the spans of requests that are traced.
        while at < input.len()
            && !traces::is_on()
            && let Some(used) = checks.answer(&input[at..], &mut output, after).await
        {
            at += used;
            answered += 1;
            if after == After::Close {
                break;
            }
        }
        if answered > 0 {
            surfaces.observe_all(Surface::Http, (RequestOutcome::Ok, answered), began);
            send(io, &output).await?;
            usage.end();
        } else {
            usage.cancel();
        }
        output.clear();
        if after == After::Close && answered > 0 {
            io.shutdown().await?;
            return Ok(None);
        }
        input.drain(..at);
        if !input.is_empty() {
            return Ok(Some(Rest { first: input.into(), age: wait.age }));
        }
        wait.deadline = IDLE_DEADLINE;
    }
}

async fn send<Io: AsyncWrite + Unpin>(io: &mut Io, output: &[u8]) -> io::Result<()> {
    let mut write = pin!(async {
        io.write_all(output).await?;
        // TLS may hold back the last records otherwise.
        io.flush().await
    });
    // Responses nearly always fit into the socket's buffer, and then no deadline is needed.
    match write.as_mut().now_or_never() {
        Some(written) => written,
        None => timeout(WRITE_DEADLINE, write).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
    }
}

/// Waits for requests.
struct Wait {
    interrupts: Interrupts,
    /// The time without a request.
    idle: Duration,
    /// The longest such time.
    deadline: Duration,
    age: Duration,
}

/// What a connection does next.
enum Next {
    Requests,
    /// The router serves the rest.
    Router,
    Close,
}

impl Wait {
    async fn read<Io: AsyncRead + Unpin>(&mut self, io: &mut Io, input: &mut Vec<u8>) -> io::Result<Next> {
        let mut read = pin!(io.read_buf(input));
        poll_fn(|context| {
            if let Poll::Ready(read) = read.as_mut().poll(context) {
                self.idle = Duration::ZERO;
                return Poll::Ready(read.map(|length| if length == 0 { Next::Close } else { Next::Requests }));
            }
            while let Poll::Ready(interrupt) = self.interrupts.poll(context) {
                match interrupt {
                    Interrupt::Stage(Stage::Serving) => {}
                    Interrupt::Stage(_) => return Poll::Ready(Ok(Next::Router)),
                    Interrupt::Tick => {
                        self.idle += TICK;
                        self.age += TICK;
                    }
                }
            }
            if self.idle >= self.deadline { Poll::Ready(Ok(Next::Close)) } else { Poll::Pending }
        })
        .await
    }
}

/// A stream of which some bytes were already read.
struct Prefixed<Io> {
    first: Bytes,
    io: Io,
}

impl<Io: AsyncRead + Unpin> AsyncRead for Prefixed<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.io).poll_read(context, buffer);
        }
        let taken = self.first.len().min(buffer.remaining());
        buffer.put_slice(&self.first[..taken]);
        self.first.advance(taken);
        Poll::Ready(Ok(()))
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Prefixed<Io> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

/// This test runs on tokio's paused clock, which advances whenever all tasks wait.
#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::routing::get;
    use tokio::time::{Instant, sleep};
    use tollgate::{FixedWindow, HOUR, Limit};
    use tollgate_rules::{Gate, KeyPart, Rule, RuleSet};

    use super::*;

    const CHECK: &[u8] = b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
        content-length: 32\r\n\r\n{\"limit\":\"per-user\",\"key\":\"ann\"}";

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_left_to_the_router_keeps_its_age() {
        let rule = Rule::new(Limit::new("per-user", FixedWindow::new(1000, HOUR)).unwrap());
        let rules = RuleSet::builder().rule(rule.key(KeyPart::header("x-user-id"))).build().unwrap();
        let state = ServiceState { gate: Gate::in_memory(rules).unwrap(), decisions: Arc::default(), tokens: None };
        let protocol = CheckProtocol {
            router: Router::new().route("/", get(|| async { "router" })),
            requests: Requests { surface: Surface::Http, surfaces: Arc::default() },
            state,
            hosts: Hosts::new("service.http.hosts", [], None),
        };
        let (mut client, server) = tokio::io::duplex(8192);
        let (_serving, stage) = watch::channel(Stage::Serving);
        let begun = Begun::new(SocketAddr::from(([127, 0, 0, 1], 1)), Arc::default());
        tokio::spawn(protocol.serve(server, begun, stage));
        let start = Instant::now();
        loop {
            let is_old = start.elapsed() >= MAX_CONNECTION_AGE - Duration::from_secs(20);
            let request = if is_old { b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" } else { CHECK };
            client.write_all(request).await.unwrap();
            let mut response = vec![0; 4096];
            let length = client.read(&mut response).await.unwrap();
            let response = String::from_utf8_lossy(&response[..length]);
            assert!(response.starts_with("HTTP/1.1 200 OK"), "{response}");
            assert_eq!(is_old, response.ends_with("router"), "{response}");
            if response.contains("connection: close") {
                break;
            }
            sleep(Duration::from_secs(7)).await;
        }
        let elapsed = start.elapsed();
        assert!((MAX_CONNECTION_AGE..MAX_CONNECTION_AGE + Duration::from_secs(16)).contains(&elapsed), "{elapsed:?}");
    }
}
