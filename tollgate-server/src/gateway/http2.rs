//! HTTP/2, by hyper: connections of clients, their requests, requests to upstreams, and bodies.
//!
//! hyper serves a connection. Its frames are counted on reads, and its deadlines are set on writes.

pub(super) mod body;
pub(super) mod exchange;
mod forward;
pub(crate) mod frames;

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep};

use self::exchange::Exchange;
use self::frames::{Frames, GoawayTrigger};
use super::client::{Client, Expired, LINGER, SEND_BUFFER_BYTES, STREAM_WINDOW_BYTES};
use super::deadline::{Alarm, NEVER, TICK, Tick, Ticks};
use super::failure::Misuse;
use super::stream::{MAX_LINGER_BYTES, Stream};
use super::worker::{Shutdown, Worker};

/// The maximum of concurrent streams of an HTTP/2 connection: the minimum that RFC 9113 recommends, since each stream
/// may hold memory.
const MAX_STREAMS: u32 = 100;

/// Room for all streams at once, so that stalled uploads do not block the others.
const CONNECTION_WINDOW_BYTES: u32 = MAX_STREAMS * STREAM_WINDOW_BYTES;

/// The interval of HTTP/2 keep-alive pings.
const PING_EVERY: Duration = Duration::from_secs(20);

/// The maximum length of a head and body that are copied together before they are written: one write of one buffer is
/// cheaper.
const SMALL_BYTES: usize = 2048;

/// Serves a connection of HTTP/2 with hyper.
pub(super) async fn serve(
    (stream, first): (Stream, Bytes),
    client: Arc<Client>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
) {
    let io = TokioIo::new(ClientIo::new(stream, first, Arc::clone(&client)));
    let ticks = Arc::clone(&worker.ticks);
    let service = Exchange { worker, client: Arc::clone(&client) };
    let mut builder = http2::Builder::new(Streams { ticks });
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(u32::try_from(client.max_head).unwrap_or(u32::MAX))
        .keep_alive_interval(PING_EVERY);
    let connection = builder.serve_connection(io, service);
    // Errors are the client's: it disconnected or did not speak HTTP/2.
    _ = drive(connection, |connection| connection.graceful_shutdown(), &client, &stop).await;
}

/// Drives a connection, checks its deadlines periodically, and calls `end` at shutdown.
async fn drive<Connection: Future<Output = hyper::Result<()>>>(
    connection: Connection,
    end: impl Fn(Pin<&mut Connection>),
    client: &Client,
    stop: &Shutdown,
) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    let mut alarm = pin!(sleep(client.timeouts.check_every));
    let mut stopped = pin!(stop.goaway.notified());
    let (mut is_set, mut is_ending) = (false, false);
    poll_fn(|context| {
        if let Poll::Ready(ended) = connection.as_mut().poll(context) {
            return Poll::Ready(ended);
        }
        let is_first = !std::mem::replace(&mut is_set, true);
        if is_first {
            // A later stop wakes this task; an earlier one is noticed below.
            stopped.as_mut().enable();
            _ = stopped.as_mut().poll(context);
        }
        if !is_ending && stop.is_goaway.load(Relaxed) {
            is_ending = true;
            end(connection.as_mut());
            if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
        }
        // Once set, the timer wakes this task, so it need not be polled every time.
        if !is_first && !alarm.is_elapsed() {
            return Poll::Pending;
        }
        check_deadlines(connection.as_mut(), &end, &mut is_ending, (alarm.as_mut(), client), context)
    })
    .await
}

fn check_deadlines<Connection: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<&mut Connection>,
    end: impl Fn(Pin<&mut Connection>),
    is_ending: &mut bool,
    (mut alarm, client): (Pin<&mut tokio::time::Sleep>, &Client),
    context: &mut Context<'_>,
) -> Poll<hyper::Result<()>> {
    while alarm.as_mut().poll(context).is_ready() {
        let next = match client.check_deadlines() {
            // The client is sent GOAWAY first: requests that it has sent by then are served, and it may send others
            // elsewhere.
            Expired::NoRequest if !std::mem::replace(is_ending, true) => {
                end(connection.as_mut());
                client.note_goaway_sent();
                if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                    return Poll::Ready(ended);
                }
                client.timeouts.check_every.min(LINGER)
            }
            Expired::Close | Expired::NoRequest => return Poll::Ready(Ok(())),
            Expired::NotYet { ticks } => TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX)),
        };
        alarm.as_mut().reset(Instant::now() + next.min(client.timeouts.check_every));
    }
    Poll::Pending
}

tokio::task_local! {
    /// The client's deadline for reading the current part of the response on this task's stream.
    static READ_DEADLINE: Arc<AtomicU64>;
}

/// Sets the client's deadline for reading a part of this task's response.
fn set_read_deadline(read_by: Tick) {
    _ = READ_DEADLINE.try_with(|deadline| deadline.store(read_by, Relaxed));
}

/// The executor of the streams of an HTTP/2 connection: each is a task with its own deadline for the client to read.
///
/// A client can stall one response while it reads the others, so the socket does not show it. hyper does not ask for
/// more of a response until the client has taken the previous part. The sender of a part sets the deadline, and the
/// stream's task checks it. A stream that is late is dropped, which resets it, and the others go on. HTTP/1 needs no
/// such task: a client that does not read blocks the socket.
#[derive(Clone)]
struct Streams {
    ticks: Arc<Ticks>,
}

impl<Stream> Executor<Stream> for Streams
where
    Stream: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, stream: Stream) {
        let ticks = Arc::clone(&self.ticks);
        tokio::spawn(async move {
            let read_by = Arc::new(AtomicU64::new(NEVER));
            let mut stream = pin!(READ_DEADLINE.scope(Arc::clone(&read_by), stream));
            let mut alarm = None::<Alarm>;
            poll_fn(|context| match stream.as_mut().poll(context) {
                Poll::Ready(()) => Poll::Ready(()),
                // Only the stream sets the deadline, so without one there is nothing to wait for.
                Poll::Pending => match read_by.load(Relaxed) {
                    NEVER => Poll::Pending,
                    deadline => alarm.get_or_insert_with(Alarm::new).poll_passed(deadline, &ticks, context),
                },
            })
            .await;
        });
    }
}

/// A connection of HTTP/2 as hyper reads and writes it.
struct ClientIo {
    stream: Stream,
    /// Bytes that were read during protocol detection.
    first: Bytes,
    client: Arc<Client>,
    frames: Frames,
    /// The bytes that are returned once the connection has to end.
    goaway_trigger: Option<GoawayTrigger>,
    at_end: bool,
    lingered: usize,
    is_shut: bool,
}

impl ClientIo {
    fn new(stream: Stream, first: Bytes, client: Arc<Client>) -> Self {
        let frames = Frames::new(client.ticks.now());
        Self { stream, first, client, frames, goaway_trigger: None, at_end: false, lingered: 0, is_shut: false }
    }

    /// Counts HTTP/2 frames that were read. If the connection has to end, replaces the bytes after them.
    fn track_frames(&mut self, buffer: &mut ReadBuf<'_>, before: usize) {
        if let Err(good) = self.frames.received(&buffer.filled()[before..], self.client.ticks.now()) {
            buffer.set_filled(before + good);
            self.end_for(Misuse::ControlFrameFlood);
            self.goaway_trigger(buffer);
        }
    }

    fn end_for(&mut self, misuse: Misuse) {
        self.client.note_closed(misuse);
        self.goaway_trigger = Some(GoawayTrigger::default());
    }

    fn goaway_trigger(&mut self, buffer: &mut ReadBuf<'_>) {
        let Some(goaway_trigger) = &mut self.goaway_trigger else { return };
        while buffer.remaining() > 0
            && let Some(byte) = goaway_trigger.next_byte()
        {
            buffer.put_slice(&[byte]);
        }
    }

    /// Waits until it is this connection's turn, and starts closing it after too many resets.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.frames.ends_turn() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.goaway_trigger.is_none() && self.frames.is_between_frames() && self.client.resets_too_much() {
            self.end_for(Misuse::PrematureResets);
        }
        Poll::Ready(())
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
        if this.goaway_trigger.is_some() {
            this.goaway_trigger(buffer);
            return Poll::Ready(Ok(()));
        }
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
        this.track_frames(buffer, before);
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
        if !this.stream.is_buffered() {
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
