//! A bound on the bodies of requests that are being received.
//!
//! Each body has its own bound, but a client decides how many it starts: an HTTP/2 connection has many streams, and a
//! listener many connections. So the bodies of a connection share a bound, and those of the process another. The first
//! kilobytes of every body are not counted, so that ordinary requests contend for nothing.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use axum::body::HttpBody;
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use tonic::Status;

use super::activity::Activity;

/// The start of a body that is not counted. A request itself takes more memory than this.
const UNCOUNTED_BYTES: u64 = 4 << 10;

/// The most bytes of all bodies of a connection: four of the longest.
const MAX_CONNECTION_BYTES: u64 = 4 << 20;

/// The most bytes of all bodies of the process.
const MAX_PROCESS_BYTES: u64 = 256 << 20;

static PROCESS_BYTES: AtomicU64 = AtomicU64::new(0);

/// The body of a request, which is counted while it is received.
pub(crate) struct CountedBody {
    body: Incoming,
    received: u64,
    activity: Arc<Activity>,
}

/// A body that ended early.
#[derive(Debug)]
pub(crate) enum BodyError {
    Connection(hyper::Error),
    /// There is no room for the rest. gRPC clients get this status.
    Overloaded(Status),
}

impl fmt::Display for BodyError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connection(error) => error.fmt(out),
            Self::Overloaded(status) => out.write_str(status.message()),
        }
    }
}

impl Error for BodyError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Connection(error) => Some(error),
            Self::Overloaded(status) => Some(status),
        }
    }
}

impl BodyError {
    /// Returns the message for clients if a body could not be received because there was no room for it.
    pub(crate) fn overload<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e str> {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if let Some(Self::Overloaded(status)) = error.downcast_ref() {
                return Some(status.message());
            }
            cause = error.source();
        }
        None
    }
}

impl CountedBody {
    pub(super) fn new(body: Incoming, activity: Arc<Activity>) -> Self {
        Self { body, received: 0, activity }
    }

    fn counted(&self) -> u64 {
        self.received.saturating_sub(UNCOUNTED_BYTES)
    }

    /// Counts bytes of the body. Returns an error if there is no room for them.
    fn count(&mut self, bytes: usize) -> Result<(), BodyError> {
        let before = self.counted();
        self.received += bytes as u64;
        let added = self.counted() - before;
        if added == 0 {
            return Ok(());
        }
        let of_connection = self.activity.body_bytes.fetch_add(added, Relaxed) + added;
        let of_process = PROCESS_BYTES.fetch_add(added, Relaxed) + added;
        let message = if of_connection > MAX_CONNECTION_BYTES {
            "the requests of this connection are too large together: send fewer at a time"
        } else if of_process > MAX_PROCESS_BYTES {
            "the server receives too many large requests: try again later"
        } else {
            return Ok(());
        };
        Err(BodyError::Overloaded(Status::resource_exhausted(message)))
    }
}

impl Drop for CountedBody {
    fn drop(&mut self) {
        let counted = self.counted();
        if counted > 0 {
            self.activity.body_bytes.fetch_sub(counted, Relaxed);
            PROCESS_BYTES.fetch_sub(counted, Relaxed);
        }
    }
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) else { return Poll::Ready(None) };
        let counted = frame.map_err(BodyError::Connection).and_then(|frame| {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            self.count(bytes).map(|()| frame)
        });
        Poll::Ready(Some(counted))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
