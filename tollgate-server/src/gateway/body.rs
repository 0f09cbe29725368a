//! Bodies on their way through: nothing of them is kept, and each side goes as fast as the other.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::StatusCode;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::client::Client;
use super::exchange::Ending;

/// What a client sends, as an upstream gets it.
pub(super) enum ToUpstream {
    Nothing,
    Sent(Sent),
}

/// A body that a client sends.
pub(super) struct Sent {
    body: Incoming,
    client: Arc<Client>,
    /// How much more of it is taken.
    room: u64,
}

/// Why a body ended before its end.
#[derive(Debug)]
pub(super) enum Broken {
    Client(hyper::Error),
    TooLong,
}

impl fmt::Display for Broken {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(error) => error.fmt(out),
            Self::TooLong => out.write_str("the body is too long"),
        }
    }
}

impl std::error::Error for Broken {}

impl ToUpstream {
    pub(super) fn new(body: Incoming, client: &Arc<Client>, max_bytes: u64) -> Self {
        if body.is_end_stream() {
            return Self::Nothing;
        }
        Self::Sent(Sent { body, client: Arc::clone(client), room: max_bytes })
    }

    pub(super) fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }
}

impl Body for ToUpstream {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Self::Sent(sent) = &mut *self else {
            return Poll::Ready(None);
        };
        match Pin::new(&mut sent.body).poll_frame(context) {
            Poll::Pending => {
                sent.client.body_awaited();
                Poll::Pending
            }
            Poll::Ready(frame) => {
                sent.client.body_came();
                let Some(frame) = frame else { return Poll::Ready(None) };
                let frame = match frame {
                    Ok(frame) => frame,
                    Err(error) => return Poll::Ready(Some(Err(Broken::Client(error)))),
                };
                let length = frame.data_ref().map_or(0, Bytes::len) as u64;
                match sent.room.checked_sub(length) {
                    Some(room) => sent.room = room,
                    None => {
                        sent.client.body_is_too_long();
                        return Poll::Ready(Some(Err(Broken::TooLong)));
                    }
                }
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Sent(sent) => sent.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Nothing => SizeHint::with_exact(0),
            Self::Sent(sent) => sent.body.size_hint(),
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.client.body_came();
    }
}

/// What a client is answered.
pub(super) struct ToClient {
    kind: Kind,
    /// What is done when the answer is over.
    ending: Ending,
}

enum Kind {
    Written(Bytes),
    Upstream(Incoming),
}

impl ToClient {
    pub(super) fn written(text: Bytes, ending: Ending) -> Self {
        Self { kind: Kind::Written(text), ending }
    }

    pub(super) fn upstream(body: Incoming, ending: Ending) -> Self {
        Self { kind: Kind::Upstream(body), ending }
    }

    /// The head of the answer is about to leave.
    pub(super) fn answers_with(&mut self, status: StatusCode) {
        self.ending.note_status(status);
    }
}

impl Body for ToClient {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        match &mut this.kind {
            Kind::Written(text) => {
                let text = std::mem::take(text);
                this.ending.note_sent(text.len());
                Poll::Ready((!text.is_empty()).then(|| Ok(Frame::data(text))))
            }
            Kind::Upstream(body) => match Pin::new(body).poll_frame(context) {
                Poll::Pending => {
                    this.ending.upstream_awaited();
                    Poll::Pending
                }
                Poll::Ready(frame) => {
                    this.ending.upstream_came(match &frame {
                        None => Came::All,
                        Some(Ok(frame)) => Came::Bytes(frame.data_ref().map_or(0, Bytes::len)),
                        Some(Err(_)) => Came::Error,
                    });
                    Poll::Ready(frame)
                }
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Written(text) => text.is_empty(),
            Kind::Upstream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Written(text) => SizeHint::with_exact(text.len() as u64),
            Kind::Upstream(body) => body.size_hint(),
        }
    }
}

impl Drop for ToClient {
    fn drop(&mut self) {
        if self.is_end_stream() {
            self.ending.upstream_came(Came::All);
        }
    }
}

/// What came of an upstream's body.
pub(super) enum Came {
    Bytes(usize),
    All,
    Error,
}
