//! HTTP/2, by the crate h2: connections of clients, their requests, requests to upstreams, and bodies.
//!
//! Frames are counted in both directions. Deadlines are set by reads, writes and ends of requests, and checked whenever
//! the task of the connection is polled.

pub(super) mod exchange;
mod forward;
pub(crate) mod frames;
pub(super) mod response_body;
mod sender;
pub(super) mod stream;

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use h2::Reason;
use h2::server::{self, Connection, Handshake};
use smallvec::SmallVec;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tollgate_net::deadline::{Alarm, NEVER, Tick, Wait};
use tollgate_net::stream::{LINGER, MAX_LINGER_BYTES, Stream};

use self::exchange::Exchange;
use self::frames::Frames;
use self::stream::{KeepAlive, PingWaits, Traffic};
use super::client::{Client, Expired, SEND_BUFFER_BYTES, STREAM_WINDOW_BYTES};
use super::failure::Misuse;
use super::worker::{Shutdown, Worker};

/// The maximum of concurrent streams of an HTTP/2 connection: the minimum that RFC 9113 recommends, since each stream
/// may hold memory.
const MAX_STREAMS: u32 = 100;

/// The maximum number of requests that a client may reset before they are accepted: a browser that leaves a page resets
/// all of them in one read. `Resets` is the stricter bound over time.
const MAX_RESETS_AT_ONCE: usize = 256;

/// The number of streams whose late frames are ignored, after the gateway has reset them: a client may still send the
/// bodies of refused requests.
const MAX_RESET_STREAMS: usize = 4 * MAX_STREAMS as usize;

/// Room for all streams at once, so that stalled uploads do not block the others.
const CONNECTION_WINDOW_BYTES: u32 = MAX_STREAMS * STREAM_WINDOW_BYTES;

/// The interval of HTTP/2 keep-alive pings.
const PING_EVERY: Duration = Duration::from_secs(20);

/// The timeout of an answer to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// The maximum length of a head and body that are copied together before they are written: one write of one buffer is
/// cheaper.
const SMALL_BYTES: usize = 2048;

/// Serves a connection of HTTP/2.
pub(super) async fn serve(
    (stream, first): (Stream, Bytes),
    client: Arc<Client>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
) {
    let mut builder = server::Builder::new();
    builder
        .max_concurrent_streams(MAX_STREAMS)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_pending_accept_reset_streams(MAX_RESETS_AT_ONCE)
        .max_concurrent_reset_streams(MAX_RESET_STREAMS)
        .max_header_list_size(u32::try_from(client.max_head).unwrap_or(u32::MAX));
    let handshake = builder.handshake(ClientIo::new(stream, first, Arc::clone(&client)));
    let mut server = Http2Server {
        state: State::Handshake(handshake),
        is_ending: false,
        is_shut: false,
        check_at: client.ticks.after(client.timeouts.check_every),
        alarm: Alarm::default(),
        exchange: Exchange { worker, client },
    };
    let mut stopped = pin!(stop.goaway.notified());
    let mut is_set = false;
    poll_fn(|context| {
        if !std::mem::replace(&mut is_set, true) {
            // A later stop wakes this task; an earlier one is noticed below.
            stopped.as_mut().enable();
            _ = stopped.as_mut().poll(context);
        }
        if stop.is_goaway.load(Relaxed) && !server.is_ending {
            server.end();
        }
        server.exchange.client.begin_turn();
        match server.poll(context) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => server.poll_deadlines(context),
        }
    })
    .await;
}

/// A connection of HTTP/2.
struct Http2Server {
    state: State,
    exchange: Exchange,
    /// Whether the client was asked to close the connection.
    is_ending: bool,
    /// Whether GOAWAY was sent because of misuse, and nothing more is served.
    is_shut: bool,
    /// When deadlines are checked next.
    check_at: Tick,
    alarm: Alarm,
}

enum State {
    Handshake(Handshake<ClientIo, Bytes>),
    Open(Connection<ClientIo, Bytes>, Option<KeepAlive>),
}

impl Http2Server {
    /// Serves requests. Returns ready at the end of the connection.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let (client, mut served) = (&self.exchange.client, 0);
        loop {
            let connection = match &mut self.state {
                State::Open(connection, _) => connection,
                State::Handshake(handshake) => {
                    // The client has left, or does not speak HTTP/2.
                    let Ok(mut connection) = ready!(Pin::new(handshake).poll(context)) else { return Poll::Ready(()) };
                    if self.is_ending {
                        connection.graceful_shutdown();
                    }
                    let every = Wait::at_least(PING_EVERY);
                    let waits = PingWaits { every, quiet: every, timeout: Wait::at_least(PING_TIMEOUT) };
                    let pings = connection.ping_pong();
                    let keep_alive = pings.map(|pings| KeepAlive::new(pings, waits, client.ticks.now()));
                    self.state = State::Open(connection, keep_alive);
                    continue;
                }
            };
            // All requests that have arrived are served before anything is written, so that one write takes many
            // responses.
            let mut streams = SmallVec::<[_; 4]>::new();
            let is_over = loop {
                match connection.poll_accept(context) {
                    Poll::Ready(Some(Ok(stream))) => streams.push(stream),
                    Poll::Ready(_) => break true,
                    Poll::Pending => break false,
                }
            };
            if is_over {
                return Poll::Ready(());
            }
            if client.is_misusing() {
                if std::mem::replace(&mut self.is_shut, true) {
                    return Poll::Pending;
                }
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                continue;
            }
            if streams.is_empty() {
                return Poll::Pending;
            }
            served += streams.len();
            for (request, respond) in streams {
                self.exchange.serve(request, respond);
            }
            if served >= MAX_STREAMS as usize {
                // Other connections get their turn.
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    /// Sends GOAWAY. Requests that the client has already sent are served.
    fn end(&mut self) {
        self.is_ending = true;
        if let State::Open(connection, _) = &mut self.state {
            connection.graceful_shutdown();
        }
        let client = &self.exchange.client;
        client.note_ending();
        self.check_at = self.check_at.min(client.ticks.after(Wait::at_least(LINGER)));
    }

    /// Checks the deadlines of the client, and sends pings. Returns ready if the connection has to be closed.
    fn poll_deadlines(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let client = &self.exchange.client;
            // The end of the last request, or of the connection, may have set an earlier deadline.
            ready!(self.alarm.poll_passed(self.check_at.min(client.next_deadline()), &client.ticks, context));
            let client = Arc::clone(client);
            let next = match client.check_deadlines() {
                Expired::NoRequest if !self.is_ending => {
                    self.end();
                    if self.poll(context).is_ready() {
                        return Poll::Ready(());
                    }
                    client.ticks.after(Wait::at_least(LINGER))
                }
                Expired::Close | Expired::NoRequest => return Poll::Ready(()),
                Expired::NotYet { at } => at,
            };
            let ping = match &mut self.state {
                State::Open(_, Some(keep_alive)) => keep_alive.check(Traffic::of(&client), client.ticks.now(), context),
                _ => Some(NEVER),
            };
            let Some(ping) = ping else { return Poll::Ready(()) };
            self.check_at = next.min(ping).min(client.ticks.after(client.timeouts.check_every));
        }
    }
}

/// A connection of HTTP/2 as h2 reads and writes it.
struct ClientIo {
    stream: Stream,
    /// Bytes that were read during protocol detection.
    first: Bytes,
    client: Arc<Client>,
    frames: Frames,
    at_end: bool,
    lingered: usize,
    is_shut: bool,
}

impl ClientIo {
    fn new(stream: Stream, first: Bytes, client: Arc<Client>) -> Self {
        let frames = Frames::new(client.ticks.now());
        Self { stream, first, client, frames, at_end: false, lingered: 0, is_shut: false }
    }

    /// Waits until it is this connection's turn. Nothing more is read of a client that misuses the connection.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.client.is_turn_over() {
            // h2 reads again for each request that waits to be accepted.
            return Poll::Pending;
        }
        if self.frames.ends_turn() {
            self.client.end_turn();
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.client.resets_too_much() {
            self.client.note_misuse(Misuse::PrematureResets);
        }
        if self.client.is_misusing() { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.poll_turn(context));
        let before = buffer.filled().len();
        if !this.first.is_empty() {
            let taken = this.first.len().min(buffer.remaining());
            buffer.put_slice(&this.first[..taken]);
            this.first.advance(taken);
            if this.first.is_empty() {
                // Otherwise the used buffer would be kept with the connection.
                this.first = Bytes::new();
            }
        } else {
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        }
        if buffer.filled().len() == before {
            this.at_end = true;
            return Poll::Ready(Ok(()));
        }
        this.client.note_received();
        if let Err(good) = this.frames.received(&buffer.filled()[before..], this.client.ticks.now()) {
            buffer.set_filled(before + good);
            this.client.note_misuse(Misuse::ControlFrameFlood);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.client.wrote(written.is_ready());
        if let Poll::Ready(Ok(written)) = &written {
            this.frames.sent(&bytes[..*written]);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        if length <= SMALL_BYTES && slices.len() > 1 {
            let (mut whole, mut end) = ([0; SMALL_BYTES], 0);
            for slice in slices {
                whole[end..end + slice.len()].copy_from_slice(slice);
                end += slice.len();
            }
            return Pin::new(this).poll_write(context, &whole[..end]);
        }
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.client.wrote(written.is_ready());
        if let Poll::Ready(Ok(written)) = &written {
            let mut left = *written;
            for slice in slices {
                let taken = left.min(slice.len());
                this.frames.sent(&slice[..taken]);
                left -= taken;
            }
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.stream.holds_bytes() {
            return Poll::Ready(Ok(()));
        }
        let flushed = Pin::new(&mut this.stream).poll_flush(context);
        this.client.wrote(flushed.is_ready());
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.is_shut {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
            this.is_shut = true;
            this.client.start_linger();
        }
        if this.at_end {
            return Poll::Ready(Ok(()));
        }
        let mut scratch = [0; 4096];
        while this.lingered < MAX_LINGER_BYTES {
            let mut buffer = ReadBuf::new(&mut scratch);
            // On any error, the response has arrived or is lost.
            if ready!(Pin::new(this.stream.tcp()).poll_read(context, &mut buffer)).is_err() {
                break;
            }
            match buffer.filled().len() {
                0 => break,
                read => this.lingered += read,
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicI64;
    use std::task::Waker;

    use tokio::net::{TcpListener, TcpStream};
    use tollgate_config::internal::TimeoutsRule;

    use super::*;
    use crate::gateway::buffer_budget::BufferBudget;
    use crate::gateway::client::Scheme;
    use crate::gateway::deadline::ClientTimeouts;
    use crate::gateway::tally::{Closings, Tally};
    use tollgate_net::deadline::Ticks;
    use tollgate_net::proxy_protocol::Caller;

    #[tokio::test]
    async fn a_turn_lasts_until_the_task_is_polled_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let connections = Arc::new(AtomicI64::new(1));
        let budget = Arc::new(BufferBudget::new(None, &connections));
        let tally = Arc::new(Tally::new(&connections, &budget, &Arc::new(Closings::default())));
        let timeouts = ClientTimeouts::of(&TimeoutsRule::default());
        let address = stream.peer_addr().unwrap();
        let settings = (false, 1 << 16, timeouts);
        let client = Client::new(
            (Caller::At(address), None),
            (Scheme::Http, None),
            settings,
            (Arc::new(Ticks::default()), tally),
        );
        let client = Arc::new(client);
        let ping = [&[0, 0, 8, 6, 0, 0, 0, 0, 0][..], &[7; 8]].concat();
        let first = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &*ping.repeat(1000)].concat();
        let mut io = ClientIo::new(Stream::Plain(stream), first.into(), Arc::clone(&client));
        let mut context = Context::from_waker(Waker::noop());
        // As h2 reads: until nothing more is available.
        let mut read = || {
            let (mut count, mut bytes) = (0, [0; 1024]);
            while Pin::new(&mut io).poll_read(&mut context, &mut ReadBuf::new(&mut bytes)).is_ready() {
                count += 1;
            }
            count
        };
        client.begin_turn();
        assert_eq!([read(), read(), read()], [5, 0, 0], "requests that wait to be accepted start no new turn");
        client.begin_turn();
        assert_eq!([read(), read()], [5, 0]);
    }
}
