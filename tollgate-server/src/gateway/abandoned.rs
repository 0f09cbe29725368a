//! Requests that an upstream still works on after their client has left.
//!
//! A limit on requests in flight bounds the work of upstreams, and an upstream does not stop because a client does. So a
//! request that holds a permit is not cancelled when its client resets its stream or hangs up: its answer is read and
//! thrown away in the background, and the permit is held until the answer is over, the upstream closes the connection,
//! or the route's `timeout` passes (ADR 15).
//!
//! Deliberately not here: requests without a permit. Their upstream connection is closed at once, so that an upstream
//! that cares can stop early.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tollgate::Place;

use super::answer::Failure;
use super::body::ToUpstream;
use super::exchange::Held;
use super::patience::Patience;
use super::tally::Tally;
use super::wire::Wire;

/// Abandoned requests of one worker. Each may hold a connection to an upstream and some 100 KB of buffers. While there are
/// more, requests that need a permit are answered with 503.
const MAX_ABANDONED: u32 = 256;

/// Bytes that are read of an abandoned answer. An upstream that sends more than this is writing all the time, and
/// closing the connection stops it.
pub(super) const MAX_DISCARDED_BYTES: usize = 1 << 20;

/// A permit, the upstream that its request is at, and its place among abandoned requests.
pub(super) struct Abandoned {
    held: Held,
    _place: Place,
    tally: Arc<Tally>,
}

impl Abandoned {
    pub(super) fn new(held: Held, place: Place, tally: &Arc<Tally>) -> Self {
        tally.abandoned.fetch_add(1, Relaxed);
        Self { held, _place: place, tally: Arc::clone(tally) }
    }

    pub(super) fn held(&self) -> &Held {
        &self.held
    }

    /// Reads an answer to its end in the background.
    pub(super) fn discard(mut self, body: Incoming) {
        spawn(async move { self.read_out(body).await });
    }

    async fn read_out(&mut self, body: Incoming) {
        if let Some(wire) = &self.held.wire {
            wire.forgive();
        }
        let is_whole = timeout(self.held.timeout.duration(), read_all(body)).await.unwrap_or(false);
        if let Some(wire) = self.held.wire.take()
            && is_whole
            && wire.patience().clients_fault().is_none()
        {
            let now = wire.patience().now();
            self.held.keep(wire, now);
        }
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.tally.abandoned.fetch_sub(1, Relaxed);
    }
}

impl Tally {
    /// Whether no further request may be abandoned.
    pub(super) fn has_abandoned_too_many(&self) -> bool {
        self.abandoned.load(Relaxed) >= MAX_ABANDONED
    }
}

/// Reads a body to its end, or returns false if there is no end within [`MAX_DISCARDED_BYTES`].
async fn read_all(mut body: Incoming) -> bool {
    let mut left = MAX_DISCARDED_BYTES;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return false };
        let Some(rest) = left.checked_sub(frame.data_ref().map_or(0, bytes::Bytes::len)) else { return false };
        left = rest;
    }
    true
}

/// Whether an answer ends only when its connection is closed, so that waiting for its end is pointless.
pub(super) fn is_event_stream(content_type: &[u8]) -> bool {
    const EVENT_STREAM: &[u8] = b"text/event-stream";
    let media_type = content_type.split(|byte| *byte == b';').next().unwrap_or_default();
    media_type.trim_ascii().eq_ignore_ascii_case(EVENT_STREAM)
}

pub(super) fn has_event_stream(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| is_event_stream(value.as_bytes()))
}

/// Runs a future to its end, unless the worker is about to end.
pub(super) fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(future);
    }
}

type Answer = Result<Response<Incoming>, TrySendError<Request<ToUpstream>>>;
type Sending = Pin<Box<dyn Future<Output = (Answer, Option<Wire>)> + Send>>;

/// A request with a permit, sent to an upstream. It is abandoned if this is dropped before the answer begins.
pub(super) struct PermittedRequest {
    sending: Option<Sending>,
    held: Option<Held>,
    place: Option<Place>,
    patience: Arc<Patience>,
    tally: Arc<Tally>,
}

/// The first part of an answer, or the reason why the client gets none.
#[expect(clippy::large_enum_variant, reason = "it is matched where it is made, and a box would be an allocation")]
pub(super) enum Begun {
    Answered(Answer, Option<Wire>),
    ClientFailed(Failure),
}

impl PermittedRequest {
    pub(super) fn new(
        sending: Sending,
        (held, place): (Held, Place),
        patience: Arc<Patience>,
        tally: &Arc<Tally>,
    ) -> Self {
        let (held, place, tally) = (Some(held), Some(place), Arc::clone(tally));
        Self { sending: Some(sending), held, place, patience, tally }
    }

    pub(super) fn poll_begun(&mut self, context: &mut Context<'_>) -> Poll<Begun> {
        self.patience.wake_if_body_breaks(context.waker());
        if let Some(failure) = self.patience.clients_fault() {
            return Poll::Ready(Begun::ClientFailed(failure));
        }
        let Some(sending) = &mut self.sending else { return Poll::Pending };
        sending.as_mut().poll(context).map(|(answer, wire)| {
            self.sending = None;
            Begun::Answered(answer, wire)
        })
    }

    /// Takes the upstream and the permit of a request whose answer has begun.
    pub(super) fn into_parts(mut self) -> Option<(Held, Place)> {
        self.held.take().zip(self.place.take())
    }
}

impl Drop for PermittedRequest {
    fn drop(&mut self) {
        let Some(sending) = self.sending.take() else { return };
        let Some((held, place)) = self.held.take().zip(self.place.take()) else { return };
        let mut abandoned = Abandoned::new(held, place, &self.tally);
        let patience = Arc::clone(&self.patience);
        spawn(async move {
            let Some((Ok(response), mut wire)) = patience.outlast(sending).await else { return };
            if let Some(wire) = &mut wire {
                wire.note_keep_alive(response.headers());
            }
            abandoned.held.wire = wire;
            // Neither has an end: the one is a tunnel by now, the other goes on until it is closed.
            if response.status() != StatusCode::SWITCHING_PROTOCOLS && !has_event_stream(response.headers()) {
                abandoned.read_out(response.into_body()).await;
            }
        });
    }
}
