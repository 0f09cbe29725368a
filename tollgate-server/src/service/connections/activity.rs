//! Progress of a connection: the stream records what happens, and a watchdog looks at it from time to time.
//!
//! Requests read no clock and set no timer for their deadlines. The watchdog compares two looks at the connection, so a
//! deadline ends a connection up to one [`TICK`] late.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::room::Usage;
use crate::gateway::frames::Frames;

/// The time between two looks at a connection.
pub(crate) const TICK: Duration = Duration::from_secs(2);

/// Reads of one connection before others get their turn. A read has at most a few hundred requests.
const READS_PER_TURN: u32 = 4;

/// What happens on a connection.
#[derive(Debug, Default)]
pub(super) struct Activity {
    usage: Arc<Usage>,
    /// Whether bytes were read since the last request.
    has_bytes: AtomicBool,
    /// Whether the client does not read.
    is_stalled: AtomicBool,
    /// Grows with every successful write.
    writes: AtomicU32,
    /// Whether the next response asks the client to close.
    is_closing: AtomicBool,
    /// The bytes of request bodies that are counted.
    pub(super) body_bytes: AtomicU64,
    /// The number of looks at the connection: its age.
    looks: AtomicU32,
}

/// A request that is not answered yet.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Activity>);

impl Activity {
    pub(super) fn new(usage: Arc<Usage>) -> Self {
        Self { usage, ..Self::default() }
    }

    pub(super) fn begin(self: &Arc<Self>) -> InFlight {
        self.usage.begin();
        self.has_bytes.store(false, Relaxed);
        InFlight(Arc::clone(self))
    }

    pub(super) fn close(&self) {
        self.is_closing.store(true, Relaxed);
    }

    /// Returns the age of the connection in the ticks of [`Frames`], which are a tenth of a second.
    fn now(&self) -> u64 {
        u64::from(self.looks.load(Relaxed)) * 10 * TICK.as_secs()
    }

    fn phase(&self) -> Phase {
        if self.is_stalled.load(Relaxed) {
            Phase::Stalled
        } else if self.usage.is_busy() {
            Phase::Busy
        } else if self.has_bytes.load(Relaxed) {
            Phase::Head
        } else {
            Phase::Idle
        }
    }
}

impl InFlight {
    /// Returns whether the response asks the client to close the connection.
    pub(super) fn is_closing(&self) -> bool {
        self.0.is_closing.load(Relaxed)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.usage.end();
    }
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No request has begun.
    Idle,
    /// A part of a request head was read.
    Head,
    Busy,
    /// The client does not read its responses.
    Stalled,
}

/// The longest time in each phase. A busy connection ends by the deadlines of its requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadlines {
    pub(super) idle: Duration,
    pub(super) head: Duration,
    pub(super) stalled: Duration,
    /// The greatest age of a connection.
    pub(super) age: Duration,
}

/// Notices when a connection makes no progress.
#[derive(Debug)]
pub(super) struct Watchdog {
    deadlines: Deadlines,
    seen: Option<(Phase, u32, u32)>,
    in_phase: Duration,
    age: Duration,
}

/// The result of a look at a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    InTime,
    /// It has reached its greatest age.
    Old,
    /// It was idle for too long.
    Idle,
    /// The client is too slow.
    Late,
}

impl Watchdog {
    /// Creates a watchdog for a connection of this age.
    pub(super) fn new(deadlines: Deadlines, age: Duration) -> Self {
        Self { deadlines, seen: None, in_phase: Duration::ZERO, age }
    }

    /// Looks at the connection. To be called every [`TICK`].
    pub(super) fn look(&mut self, activity: &Activity) -> Finding {
        activity.looks.fetch_add(1, Relaxed);
        let phase = activity.phase();
        let now = (phase, activity.usage.answered(), activity.writes.load(Relaxed));
        self.in_phase = if self.seen.replace(now) == Some(now) { self.in_phase + TICK } else { Duration::ZERO };
        self.age += TICK;
        let Deadlines { idle, head, stalled, age } = self.deadlines;
        match phase {
            Phase::Idle if self.in_phase >= idle => Finding::Idle,
            Phase::Head if self.in_phase >= head => Finding::Late,
            Phase::Stalled if self.in_phase >= stalled => Finding::Late,
            _ if self.age >= age => Finding::Old,
            _ => Finding::InTime,
        }
    }
}

/// The stream of a connection, which records its activity.
pub(super) struct Watched<Io> {
    io: Io,
    /// Bytes that were read to detect the protocol.
    first: Bytes,
    reads: u32,
    activity: Arc<Activity>,
    /// The counts of HTTP/2 frames.
    frames: Option<Box<CountedFrames>>,
}

/// The frames of an HTTP/2 connection.
pub(super) struct CountedFrames {
    frames: Frames,
    /// The bytes that end the connection with GOAWAY, once the client has sent too many frames without effect.
    goaway_trigger: Option<GoawayTrigger>,
    /// Counts and logs such an end.
    closed: Box<dyn Fn() + Send + Sync>,
}

impl CountedFrames {
    pub(super) fn new(closed: impl Fn() + Send + Sync + 'static) -> Self {
        Self { frames: Frames::new(0), goaway_trigger: None, closed: Box::new(closed) }
    }

    /// Counts the frames that were read into the buffer after `before`. If the connection has to end, replaces the
    /// bytes after them.
    fn received(&mut self, buffer: &mut ReadBuf<'_>, before: usize, now: u64) {
        if let Err(good) = self.frames.received(&buffer.filled()[before..], now) {
            buffer.set_filled(before + good);
            (self.closed)();
            self.goaway_trigger = Some(GoawayTrigger::default());
            self.end(buffer);
        }
    }

    /// Fills the buffer with bytes that end the connection. Returns false if it goes on.
    fn end(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let Some(goaway_trigger) = &mut self.goaway_trigger else { return false };
        while buffer.remaining() > 0
            && let Some(byte) = goaway_trigger.next_byte()
        {
            buffer.put_slice(&[byte]);
        }
        true
    }
}

/// Bytes that make hyper end an HTTP/2 connection with `GOAWAY` and `ENHANCE_YOUR_CALM`, for which it has no API: a
/// head whose `CONTINUATION` frames never end.
#[derive(Debug, Default)]
struct GoawayTrigger {
    /// The number of bytes produced.
    written: usize,
}

impl GoawayTrigger {
    /// hyper accepts a number of frames that grows with `max_head`. After this many bytes, the connection just ends.
    const MAX_BYTES: usize = 9 << 20;

    /// Returns the next byte.
    fn next_byte(&mut self) -> Option<u8> {
        if self.written >= Self::MAX_BYTES {
            return None;
        }
        let [headers, continuation] = [1, 9];
        // Length 0, no flags, stream 1.
        let mut frame = [0, 0, 0, headers, 0, 0, 0, 0, 1];
        if self.written >= frame.len() {
            frame[3] = continuation;
        }
        let byte = frame[self.written % frame.len()];
        self.written += 1;
        Some(byte)
    }
}

impl<Io> Watched<Io> {
    pub(super) fn new(io: Io, first: Bytes, activity: Arc<Activity>) -> Self {
        Self { io, first, reads: 0, activity, frames: None }
    }

    /// Counts the frames of an HTTP/2 connection.
    pub(super) fn counting_frames(self, frames: CountedFrames) -> Self {
        Self { frames: Some(Box::new(frames)), ..self }
    }

    fn sent(&mut self, bytes: &[u8]) {
        if let Some(counted) = &mut self.frames {
            counted.frames.sent(bytes);
        }
    }

    fn wrote(&self, written: &Poll<io::Result<usize>>) {
        let activity = &self.activity;
        match written {
            Poll::Ready(_) => {
                activity.writes.fetch_add(1, Relaxed);
                activity.is_stalled.store(false, Relaxed);
            }
            Poll::Pending => activity.is_stalled.store(true, Relaxed),
        }
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Watched<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let is_over = this.frames.as_mut().is_some_and(|counted| counted.frames.ends_turn());
        if is_over || this.reads >= READS_PER_TURN {
            this.reads = 0;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if this.frames.as_mut().is_some_and(|counted| counted.end(buffer)) {
            this.reads += 1;
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        if this.first.is_empty() {
            let read = Pin::new(&mut this.io).poll_read(context, buffer);
            this.reads = if read.is_pending() { 0 } else { this.reads + 1 };
            ready!(read)?;
            if buffer.filled().len() > before {
                this.activity.has_bytes.store(true, Relaxed);
            }
        } else {
            let taken = this.first.len().min(buffer.remaining());
            buffer.put_slice(&this.first[..taken]);
            this.first.advance(taken);
            this.activity.has_bytes.store(true, Relaxed);
        }
        if let Some(counted) = &mut this.frames {
            counted.received(buffer, before, this.activity.now());
        }
        Poll::Ready(Ok(()))
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Watched<Io> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.wrote(&written);
        if let Poll::Ready(Ok(written)) = written {
            self.sent(&bytes[..written]);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.wrote(&written);
        if let Poll::Ready(Ok(mut left)) = written {
            for slice in slices {
                let taken = left.min(slice.len());
                self.sent(&slice[..taken]);
                left -= taken;
            }
        }
        written
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
