//! The streams of a connection of HTTP/2, each a task with a deadline of its own for the client to read.
//!
//! A client can hold up one answer while it reads the others, so the connection cannot tell by its socket. hyper does
//! not ask for more of an answer while the client has not taken what there is; whoever has given something notes until
//! when that is to be taken, and the task of the stream looks. A stream that is late is dropped, which resets it, and
//! the others go on. With HTTP/1 there is no such task: there a client that does not read holds up the socket.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Poll;

use hyper::rt::Executor;

use super::alarm::Alarm;
use super::ticks::{Tick, Ticks};

/// The client has nothing to take.
const NEVER: Tick = Tick::MAX;

tokio::task_local! {
    /// When the client has to have taken what it was given on the stream of this task.
    static READ_DEADLINE: Arc<AtomicU64>;
}

/// A part of this task's answer is the client's to take until then.
pub(super) fn set_read_deadline(read_by: Tick) {
    _ = READ_DEADLINE.try_with(|deadline| deadline.store(read_by, Relaxed));
}

/// The client has taken what it was given.
pub(super) fn clear_read_deadline() {
    set_read_deadline(NEVER);
}

/// Runs the streams of a connection.
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
                // Only the stream sets the deadline, so nothing has to be waited for where there is none.
                Poll::Pending => match read_by.load(Relaxed) {
                    NEVER => Poll::Pending,
                    deadline => alarm.get_or_insert_with(Alarm::new).poll_passed(deadline, &ticks, context),
                },
            })
            .await;
        });
    }
}
