//! The streams of an HTTP/2 connection, each a task with its own deadline for the client to read.
//!
//! A client can stall one response while it reads the others, so the socket does not show it. hyper does not ask for
//! more of a response until the client has taken the previous part. The sender of a part sets the deadline, and the
//! stream's task checks it. A stream that is late is dropped, which resets it, and the others go on. HTTP/1 needs no
//! such task: a client that does not read blocks the socket.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Poll;

use hyper::rt::Executor;

use super::deadline::{Alarm, NEVER, Tick, Ticks};

tokio::task_local! {
    /// The client's deadline for reading the current part of the response on this task's stream.
    static READ_DEADLINE: Arc<AtomicU64>;
}

/// Sets the client's deadline for reading a part of this task's response.
pub(super) fn set_read_deadline(read_by: Tick) {
    _ = READ_DEADLINE.try_with(|deadline| deadline.store(read_by, Relaxed));
}

/// Clears the deadline.
pub(super) fn clear_read_deadline() {
    set_read_deadline(NEVER);
}

/// The executor of a connection's streams.
#[derive(Clone)]
pub(super) struct Streams {
    pub(super) ticks: Arc<Ticks>,
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
