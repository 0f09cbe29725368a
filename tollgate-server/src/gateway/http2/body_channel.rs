//! Passes the body of an HTTP/1 request from its connection to the task that sends it to an upstream, piece by piece.
//!
//! The connection adds a piece only once the task waits for one, so at most one read is buffered.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;
use hyper::body::Frame;

use crate::gateway::failure::Failure;

/// Creates a channel for a body. Its length is known if the client announces it.
pub(in crate::gateway) fn channel(length: Option<u64>) -> (BodyWriter, BodyReader) {
    let shared = Arc::new(Mutex::new(Shared::default()));
    (BodyWriter(Arc::clone(&shared)), BodyReader { shared, bytes_left: length })
}

/// The side of the client's connection. Dropping it before the end breaks the body off.
pub(in crate::gateway) struct BodyWriter(Arc<Mutex<Shared>>);

/// The side of the task that sends the body.
pub(in crate::gateway) struct BodyReader {
    shared: Arc<Mutex<Shared>>,
    bytes_left: Option<u64>,
}

#[derive(Default)]
struct Shared {
    pieces: VecDeque<Frame<Bytes>>,
    end: Option<Result<(), Failure>>,
    /// Whether the reader waits for a piece.
    is_awaited: bool,
    is_unwanted: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// Whether the body is still wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Demand {
    Wanted,
    Unwanted,
}

impl BodyWriter {
    /// Returns ready once the reader waits for a piece, or does not want any.
    pub(in crate::gateway) fn poll_demand(&self, context: &mut Context<'_>) -> Poll<Demand> {
        let mut shared = lock(&self.0);
        if shared.is_unwanted {
            return Poll::Ready(Demand::Unwanted);
        }
        if shared.is_awaited {
            return Poll::Ready(Demand::Wanted);
        }
        shared.writer = Some(context.waker().clone());
        Poll::Pending
    }

    pub(in crate::gateway) fn send(&self, data: Bytes) {
        if !data.is_empty() {
            lock(&self.0).add(Frame::data(data));
        }
    }

    /// Ends the body.
    pub(in crate::gateway) fn end(&self, trailers: HeaderMap) {
        let mut shared = lock(&self.0);
        if !trailers.is_empty() {
            shared.add(Frame::trailers(trailers));
        }
        shared.finish(Ok(()));
    }

    /// Breaks the body off.
    pub(in crate::gateway) fn fail(&self, failure: Failure) {
        lock(&self.0).finish(Err(failure));
    }
}

impl BodyReader {
    /// Returns whether nothing is left to read.
    pub(in crate::gateway) fn is_empty(&self) -> bool {
        let shared = lock(&self.shared);
        shared.pieces.is_empty() && shared.end == Some(Ok(()))
    }

    /// Returns the number of bytes left, if it is known.
    pub(in crate::gateway) fn bytes_left(&self) -> Option<u64> {
        self.bytes_left
    }

    pub(in crate::gateway) fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let mut shared = lock(&self.shared);
        if let Some(piece) = shared.pieces.pop_front() {
            drop(shared);
            let bytes = piece.data_ref().map_or(0, Bytes::len) as u64;
            self.bytes_left = self.bytes_left.map(|left| left.saturating_sub(bytes));
            return Poll::Ready(Some(Ok(piece)));
        }
        match shared.end {
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(failure)) => Poll::Ready(Some(Err(failure))),
            None => {
                shared.is_awaited = true;
                shared.reader = Some(context.waker().clone());
                shared.writer.take().into_iter().for_each(Waker::wake);
                Poll::Pending
            }
        }
    }
}

impl Shared {
    fn add(&mut self, piece: Frame<Bytes>) {
        self.pieces.push_back(piece);
        self.wake_reader();
    }

    fn finish(&mut self, end: Result<(), Failure>) {
        self.end.get_or_insert(end);
        self.wake_reader();
    }

    fn wake_reader(&mut self) {
        self.is_awaited = false;
        self.reader.take().into_iter().for_each(Waker::wake);
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for BodyWriter {
    fn drop(&mut self) {
        self.fail(Failure::BodyBroken);
    }
}

impl Drop for BodyReader {
    fn drop(&mut self) {
        let mut shared = lock(&self.shared);
        shared.is_unwanted = true;
        shared.writer.take().into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_arrive_in_order_and_one_at_a_time() {
        let mut context = Context::from_waker(Waker::noop());
        let (writer, mut reader) = channel(Some(6));
        assert!(writer.poll_demand(&mut context).is_pending());
        assert!(reader.poll_frame(&mut context).is_pending());
        assert_eq!(writer.poll_demand(&mut context), Poll::Ready(Demand::Wanted));
        writer.send(Bytes::from_static(b"hello"));
        assert!(writer.poll_demand(&mut context).is_pending());
        let Poll::Ready(Some(Ok(piece))) = reader.poll_frame(&mut context) else { panic!("a piece was sent") };
        assert_eq!(piece.into_data().ok().as_deref(), Some(&b"hello"[..]));
        assert_eq!(reader.bytes_left(), Some(1));
        writer.send(Bytes::from_static(b"!"));
        writer.end(HeaderMap::new());
        assert!(!reader.is_empty());
        assert!(matches!(reader.poll_frame(&mut context), Poll::Ready(Some(Ok(_)))));
        assert!(reader.is_empty() && matches!(reader.poll_frame(&mut context), Poll::Ready(None)));
    }

    #[test]
    fn body_without_an_end_is_broken() {
        let mut context = Context::from_waker(Waker::noop());
        let (writer, mut reader) = channel(None);
        drop(writer);
        let Poll::Ready(Some(Err(failure))) = reader.poll_frame(&mut context) else { panic!("it has no end") };
        assert_eq!(failure, Failure::BodyBroken);
        let (writer, reader) = channel(None);
        drop(reader);
        assert_eq!(writer.poll_demand(&mut context), Poll::Ready(Demand::Unwanted));
    }
}
