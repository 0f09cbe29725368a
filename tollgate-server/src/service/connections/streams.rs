//! The streams of an HTTP/2 connection: each runs in the task of the connection as far as it can, and gets a task only if
//! it has to wait.
//!
//! Nearly all requests are answered as soon as they are polled, because the whole request has arrived and the store is in
//! memory. A task for each would take longer than the decision. New streams are polled after the connection has read
//! everything that has arrived, so that all their responses are sent with one write.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Context;

use hyper::rt::Executor;

type Stream = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The streams that were opened since the last look.
#[derive(Default)]
pub(super) struct NewStreams {
    opened: Arc<Mutex<Vec<Stream>>>,
    /// Keeps its capacity.
    running: Vec<Stream>,
}

/// Adds streams. Streams have a copy of it, so it does not own them.
#[derive(Clone)]
pub(super) struct StreamExecutor(Weak<Mutex<Vec<Stream>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        // Without the list, the connection has ended.
        if let Some(opened) = self.0.upgrade() {
            lock(&opened).push(Box::pin(stream));
        }
    }
}

impl NewStreams {
    pub(super) fn executor(&self) -> StreamExecutor {
        StreamExecutor(Arc::downgrade(&self.opened))
    }

    /// Polls all new streams. Those that have to wait continue in their own tasks.
    ///
    /// A stream that has queued a response wakes the task of the connection, which then sends it.
    pub(super) fn run(&mut self, context: &mut Context<'_>) {
        std::mem::swap(&mut *lock(&self.opened), &mut self.running);
        for mut stream in self.running.drain(..) {
            if stream.as_mut().poll(context).is_pending() {
                tokio::spawn(stream);
            }
        }
    }
}

fn lock(streams: &Mutex<Vec<Stream>>) -> MutexGuard<'_, Vec<Stream>> {
    streams.lock().unwrap_or_else(PoisonError::into_inner)
}
