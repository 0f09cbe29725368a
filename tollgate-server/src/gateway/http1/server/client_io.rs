//! Reads from and writes to the client. Bytes that cannot be written at once are kept.
//!
//! Request bodies that did not arrive with their head are received here: for an upstream, for an echo, or to discard them. The client
//! is read only while the upstream accepts bytes, so at most one read is buffered.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::io::AsyncWrite;
use tollgate_http1::{Ambiguity, BodyDecoder, Framing};
use tollgate_net::deadline::Tick;
use tollgate_net::stream::MAX_TLS_BYTES;

use super::Http1Server;
use crate::gateway::client::BufferedBytes;
use crate::gateway::failure::Failure;
use crate::gateway::local_response::MAX_DRAINED_BYTES;
use crate::gateway::splice::{Pipe, WorkerPipe};
use crate::gateway::worker::{Scratch, scratch};

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A body that is being received.
pub(super) struct PendingBody {
    pub(super) rest: BodyDecoder,
    /// The number of content bytes that may still arrive, by `max_body`.
    pub(super) room: u64,
    /// The reason why it cannot be forwarded.
    pub(super) failure: Option<Failure>,
    /// The client's deadline for the next part, while the gateway waits for it.
    pub(super) due: Option<Tick>,
    /// The bytes that the upstream has not read.
    pub(super) buffered: BufferedBytes,
    /// Whether the client waits for `100 Continue`.
    pub(super) awaits_continue: bool,
}

/// The reason why no more of a body is read.
pub(super) enum BodyError {
    ClientGone,
    /// It is malformed.
    Ambiguous(Ambiguity),
    Failed(Failure),
}

impl From<Ambiguity> for BodyError {
    fn from(ambiguity: Ambiguity) -> Self {
        Self::Ambiguous(ambiguity)
    }
}

impl From<Failure> for BodyError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl PendingBody {
    /// Counts content that has arrived. Fails if the body is longer than `max_body` allows.
    pub(super) fn count(&mut self, content: usize) -> Result<(), Failure> {
        self.room = self.room.checked_sub(content as u64).ok_or(Failure::BodyTooLong)?;
        Ok(())
    }

    /// Appends the content of bytes that have arrived. Returns how many belong to the body.
    pub(super) fn take_content(&mut self, bytes: &[u8], content: &mut Vec<u8>) -> Result<usize, BodyError> {
        let part = self.rest.pass(bytes, &Framing::Raw, content)?;
        content.extend_from_slice(part.bytes);
        self.count(part.content)?;
        Ok(part.taken)
    }

    /// Returns whether the rest can be read and discarded, so that the connection stays usable.
    pub(super) fn is_drainable(&self) -> bool {
        let is_short = !matches!(self.rest, BodyDecoder::Length(left) if left > MAX_DRAINED_BYTES as u64);
        // A client that waits for `100 Continue` may omit the body after another response, or send it.
        is_short && self.failure.is_none() && !self.awaits_continue
    }
}

impl Http1Server<'_> {
    pub(super) fn poll_read(&mut self, buffer: &mut [u8], context: &mut Context<'_>) -> io::Result<Poll<usize>> {
        match self.stream.poll_receive(&mut self.has_read, buffer, context) {
            Poll::Ready(read) => read.map(Poll::Ready),
            Poll::Pending => Ok(Poll::Pending),
        }
    }

    /// Writes as much of both as possible. [`poll_sent`](Self::poll_sent) writes the rest.
    pub(super) fn put(&mut self, head: &[u8], body: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let written = if self.unsent.is_empty() {
            self.stream.poll_send(head, body, context)
        } else {
            // Earlier bytes come first.
            Poll::Pending
        };
        let written = match written {
            Poll::Ready(written) => written?,
            Poll::Pending => 0,
        };
        self.unsent.extend_from_slice(&head[written.min(head.len())..]);
        self.unsent.extend_from_slice(&body[written.saturating_sub(head.len())..]);
        self.note_written(written);
        // Usually nothing is left.
        let held = self.unsent_held.set(self.unsent.len() + self.unflushed);
        held.map_err(|_overloaded| io::ErrorKind::OutOfMemory.into())
    }

    fn note_written(&mut self, bytes: usize) {
        let unflushed = self.unflushed.saturating_add(bytes).min(MAX_TLS_BYTES);
        self.unflushed = if self.stream.holds_bytes() { unflushed } else { 0 };
    }

    /// Writes what is in the pipe. [`poll_sent`](Self::poll_sent) writes what the client does not accept at once.
    pub(super) fn put_moved(
        &mut self,
        bytes: usize,
        pipe: &mut WorkerPipe,
        input: &mut [u8],
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let WorkerPipe::Open(open) = pipe else { return Ok(()) };
        let put = self.put_from(open, bytes, input, context);
        if put.is_err() {
            // Bytes of this client may be left in it.
            *pipe = WorkerPipe::Closed;
        }
        put
    }

    fn put_from(&mut self, pipe: &Pipe, bytes: usize, input: &mut [u8], context: &mut Context<'_>) -> io::Result<()> {
        let Some(client) = self.stream.plain() else { return Ok(()) };
        let mut left = pipe.empty_into(client, bytes)?;
        while left > 0 {
            let taken = pipe.take(input)?;
            self.put(&input[..taken], &[], context)?;
            left -= taken;
        }
        Ok(())
    }

    /// Returns ready once everything is written. Fails if the client does not read in time.
    pub(super) fn poll_sent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !(self.unsent.is_empty() && self.unflushed == 0) {
            let stream = Pin::new(&mut self.stream);
            let written = match &*self.unsent {
                [] => stream.poll_flush(context).map_ok(|()| 0),
                unsent => stream.poll_write(context, unsent),
            };
            let Poll::Ready(written) = written? else {
                if !std::mem::replace(&mut self.is_blocked, true) {
                    self.deadline = self.worker.ticks.after(self.client.timeouts.write);
                }
                ready!(self.poll_late(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            };
            self.unsent.drain(..written);
            self.note_written(written);
            if self.unsent.is_empty() {
                if self.unflushed == 0 {
                    self.unsent_held.release();
                }
                // A response that the client did not read fast enough once may go on for long.
                self.unsent = Vec::new();
            }
            self.end_block();
        }
        // The bytes may have been written with others that followed them.
        self.end_block();
        Poll::Ready(Ok(()))
    }

    /// Restores the deadline that applies while the client reads.
    fn end_block(&mut self) {
        if std::mem::take(&mut self.is_blocked) {
            self.deadline = self.worker.ticks.after(self.wait);
        }
    }

    /// Waits for a future. Returns `None` if the client leaves in the meantime.
    pub(super) async fn unless_gone<T>(&mut self, something: impl Future<Output = T>) -> Option<T> {
        let mut something = pin!(something);
        poll_fn(|context| match something.as_mut().poll(context) {
            Poll::Ready(came) => Poll::Ready(Some(came)),
            Poll::Pending if self.reads_end(&mut scratch().input, context) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Returns whether the client has left. While it sends a body, reading that shows it.
    pub(super) fn has_gone(&mut self, input: &mut [u8], context: &mut Context<'_>) -> bool {
        self.body.is_none() && self.reads_end(input, context)
    }

    /// Returns whether the client has closed the connection. Bytes that it sends ahead are kept.
    fn reads_end(&mut self, input: &mut [u8], context: &mut Context<'_>) -> bool {
        if !self.ahead.is_empty() {
            return false;
        }
        match self.poll_read(input, context) {
            Ok(Poll::Ready(0)) | Err(_) => true,
            Ok(Poll::Ready(read)) => {
                self.ahead.extend_from_slice(&input[..read]);
                false
            }
            Ok(Poll::Pending) => false,
        }
    }

    /// Returns whether the connection has to be closed after a response of the gateway, because the rest of the body
    /// cannot be discarded.
    pub(super) fn has_undrainable_body(&self) -> bool {
        self.body.as_ref().is_some_and(|body| !body.is_drainable())
    }

    /// Returns whether the gateway waits for the client to send more of the body.
    fn awaits_body(&self) -> bool {
        self.body.as_ref().is_some_and(|body| body.due.is_some())
    }

    /// Returns ready once the upstream is late. It is not late while it waits for the client.
    pub(super) fn poll_upstream_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.awaits_body() { Poll::Pending } else { self.poll_late(context) }
    }

    /// Returns whether the client is read for more of the body. Once the response has begun, a client that waits for
    /// `100 Continue` gets none: those bytes would become a part of the response.
    pub(super) fn may_read_body(&self, has_begun: bool) -> bool {
        self.body.as_ref().is_some_and(|body| body.failure.is_none() && !(has_begun && body.awaits_continue))
    }

    /// Sends `100 Continue` to a client that waits for it.
    fn send_continue(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if let Some(body) = &mut self.body
            && std::mem::take(&mut body.awaits_continue)
        {
            self.put(CONTINUE, &[], context)?;
        }
        match self.poll_sent(context) {
            Poll::Ready(sent) => sent,
            Poll::Pending => Ok(()),
        }
    }

    /// Returns ready once the client is late with the next part of the body.
    fn poll_body_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(body) = &mut self.body else { return Poll::Pending };
        let ticks = &self.worker.ticks;
        let due = *body.due.get_or_insert_with(|| ticks.after(self.client.timeouts.body));
        self.alarm.poll_passed(due, ticks, context)
    }

    /// Reads and discards the rest of a body, so that the connection stays usable. Returns false if it does not end
    /// soon.
    pub(super) async fn drain_body(&mut self) -> bool {
        let mut left = MAX_DRAINED_BYTES;
        let is_drainable = !self.has_undrainable_body();
        is_drainable && poll_fn(|context| self.poll_drained(&mut left, context)).await
    }

    fn poll_drained(&mut self, left: &mut usize, context: &mut Context<'_>) -> Poll<bool> {
        while self.body.is_some() {
            // A client may read the response only after it has sent the body.
            if let Poll::Ready(Err(_)) = self.poll_sent(context) {
                return Poll::Ready(false);
            }
            let part = self.poll_body_part(context, |body, bytes, _, _| {
                let (taken, _) = body.rest.skip(bytes)?;
                *left = left.checked_sub(taken).ok_or(Failure::BodyTooLong)?;
                Ok(taken)
            });
            if ready!(part).is_err() {
                return Poll::Ready(false);
            }
        }
        Poll::Ready(true)
    }

    /// Reads the next part of the body, and passes it to `take` with a buffer. `take` returns how many of the bytes belong
    /// to the body: those behind its end belong to the next request.
    ///
    /// # Errors
    ///
    /// Fails if the body breaks off.
    pub(super) fn poll_body_part(
        &mut self,
        context: &mut Context<'_>,
        take: impl FnOnce(&mut PendingBody, &[u8], &mut Vec<u8>, &mut Context<'_>) -> Result<usize, BodyError>,
    ) -> Poll<Result<(), BodyError>> {
        let mut scratch = scratch();
        let Scratch { input, buffers, .. } = &mut *scratch;
        let is_ahead = !self.ahead.is_empty();
        let read = match self.poll_read_body(input, context) {
            Ok(Poll::Ready(0)) => return Poll::Ready(Err(BodyError::Failed(Failure::BodyBroken))),
            Ok(Poll::Ready(read)) => read,
            Ok(Poll::Pending) => {
                drop(scratch);
                self.send_continue(context).map_err(|_gone| BodyError::ClientGone)?;
                ready!(self.poll_body_late(context));
                return Poll::Ready(Err(BodyError::Failed(Failure::BodyLate)));
            }
            Err(_) => return Poll::Ready(Err(BodyError::ClientGone)),
        };
        let Some(body) = &mut self.body else { return Poll::Ready(Ok(())) };
        (body.due, body.awaits_continue) = (None, false);
        buffers.clear();
        let taken = take(body, &input[..read], &mut buffers.out, context).map_err(|error| match error {
            BodyError::Ambiguous(ambiguity) => {
                self.client.note_ambiguity(ambiguity);
                BodyError::Failed(Failure::BodyBroken)
            }
            error => error,
        })?;
        if body.rest.is_over() {
            self.body = None;
        }
        if !is_ahead {
            self.ahead.extend_from_slice(&input[taken..read]);
            return Poll::Ready(Ok(()));
        }
        self.served += taken;
        if self.served == self.ahead.len() {
            // An upload may go on for long.
            (self.ahead, self.served) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads more of the body, first the bytes that are here already. These are not yet counted as served.
    fn poll_read_body(&mut self, input: &mut [u8], context: &mut Context<'_>) -> io::Result<Poll<usize>> {
        if self.ahead.is_empty() {
            return self.poll_read(input, context);
        }
        let ahead = &self.ahead[self.served..];
        // Behind a long head, there may be more than fits.
        let read = ahead.len().min(input.len());
        input[..read].copy_from_slice(&ahead[..read]);
        Ok(Poll::Ready(read))
    }
}
