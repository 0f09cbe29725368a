//! Reads from and writes to the client. Bytes that cannot be written at once are kept.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Lane;
use crate::gateway::http1::scratch::scratch;
use crate::gateway::io::Stream;
use crate::gateway::socket;

impl Lane<'_> {
    pub(super) fn poll_read(&mut self, buffer: &mut [u8], context: &mut Context<'_>) -> io::Result<Poll<usize>> {
        let read = match &mut self.stream {
            Stream::Plain(tcp) => socket::poll_read(tcp, &mut self.has_read, buffer, context),
            Stream::Tls(tls) => {
                let mut buffer = ReadBuf::new(buffer);
                Pin::new(tls).poll_read(context, &mut buffer).map_ok(|()| buffer.filled().len())
            }
        };
        match read {
            Poll::Ready(read) => read.map(Poll::Ready),
            Poll::Pending => Ok(Poll::Pending),
        }
    }

    /// Writes as much of both as possible. [`poll_sent`](Self::poll_sent) writes the rest.
    pub(super) fn put(&mut self, head: &[u8], body: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let written = match (&mut self.stream, body) {
            // Earlier bytes come first.
            _ if !self.unsent.is_empty() => Poll::Pending,
            (Stream::Plain(tcp), []) => socket::poll_write(tcp, head, context),
            (Stream::Plain(tcp), body) => socket::poll_write_both(tcp, (head, body), context),
            (Stream::Tls(tls), []) => Pin::new(tls).poll_write(context, head),
            (Stream::Tls(tls), body) => {
                Pin::new(tls).poll_write_vectored(context, &[IoSlice::new(head), IoSlice::new(body)])
            }
        };
        let written = match written {
            Poll::Ready(written) => written?,
            Poll::Pending => 0,
        };
        self.unsent.extend_from_slice(&head[written.min(head.len())..]);
        self.unsent.extend_from_slice(&body[written.saturating_sub(head.len())..]);
        self.is_flushed = !self.stream.is_buffered();
        // Usually nothing is left.
        if !self.unsent.is_empty() {
            self.unsent_held.set(self.unsent.len()).map_err(|_overloaded| io::ErrorKind::OutOfMemory)?;
        }
        Ok(())
    }

    /// Returns ready once everything is written. Fails if the client does not read in time.
    pub(super) fn poll_sent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !(self.unsent.is_empty() && self.is_flushed) {
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
            self.is_flushed = self.unsent.is_empty();
            self.unsent.drain(..written);
            if self.unsent.is_empty() {
                self.unsent_held.release();
            }
            if std::mem::take(&mut self.is_blocked) {
                self.deadline = self.worker.ticks.after(self.wait);
            }
        }
        Poll::Ready(Ok(()))
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
}
