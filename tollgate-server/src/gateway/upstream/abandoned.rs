//! Requests that an upstream still works on after their client has left.
//!
//! A limit on requests in flight bounds the work of upstreams, and an upstream does not stop because a client does. So
//! a request that holds a permit is not cancelled when its client resets its stream or hangs up: its answer is read and
//! thrown away in the background, and the permit is held until the answer is over, the upstream closes the connection,
//! or the route's `timeout` passes (ADR 15).
//!
//! The number of requests that keep a connection this way is bounded. Beyond the bound the connection is closed at
//! once, and a timer holds the permit for the route's `timeout`. The same happens if the client broke off its body,
//! because an upstream that waits for the rest of a body is blocked.
//!
//! Deliberately not here: requests without a permit. Their upstream connection is closed at once, so that an upstream
//! that cares can stop early.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tollgate_net::deadline::Wait;
use tollgate_rules::InFlightPermit;

use crate::gateway::site::UpstreamAttempt;
use crate::gateway::tally::Tally;

/// Abandoned requests of one worker that keep their connection. Each may hold a socket and some 100 KB of buffers.
const MAX_CONNECTED: u32 = 256;

/// Bytes that are read of an abandoned answer. An upstream that sends more than this is writing all the time, and
/// closing the connection stops it.
const MAX_DISCARDED_BYTES: usize = 1 << 20;

/// A request whose client has left, with a connection to the upstream that works on it.
pub(in crate::gateway) struct Abandoned {
    attempt: UpstreamAttempt,
    permit: AbandonedPermit,
    _connected: Connected,
}

impl Abandoned {
    /// Keeps the connection of a request whose client has left. Returns `None` if the caller has to close it; the
    /// permit is held then, too.
    pub(in crate::gateway) fn new(
        attempt: UpstreamAttempt,
        permit: InFlightPermit,
        tally: &Arc<Tally>,
    ) -> Option<Self> {
        let permit = AbandonedPermit::new(permit, tally);
        match Connected::new(tally) {
            Some(connected) => Some(Self { attempt, permit, _connected: connected }),
            None => {
                permit.hold_for(attempt.timeout);
                None
            }
        }
    }

    pub(in crate::gateway) fn attempt(&self) -> &UpstreamAttempt {
        &self.attempt
    }

    /// Reads an answer to its end in the background.
    pub(in crate::gateway) fn discard(self, body: impl Body<Data = Bytes> + Unpin + Send + 'static) {
        spawn(self.drain(body));
    }

    pub(in crate::gateway) async fn drain(self, body: impl Body<Data = Bytes> + Unpin) {
        let is_whole = timeout(self.attempt.timeout.duration(), read_all(body)).await.unwrap_or(false);
        if !is_whole && self.attempt.has_broken_body() {
            self.close();
        }
    }

    /// Closes the connection. Nothing shows when the upstream is done then, so the permit is held for the route's
    /// timeout.
    pub(in crate::gateway) fn close(self) {
        self.permit.hold_for(self.attempt.timeout);
    }
}

/// The permit of a request whose client has left.
struct AbandonedPermit {
    _permit: InFlightPermit,
    tally: Arc<Tally>,
}

impl AbandonedPermit {
    fn new(permit: InFlightPermit, tally: &Arc<Tally>) -> Self {
        tally.abandoned.fetch_add(1, Relaxed);
        Self { _permit: permit, tally: Arc::clone(tally) }
    }

    fn hold_for(self, timeout: Wait) {
        spawn(async move {
            sleep(timeout.duration()).await;
            drop(self);
        });
    }
}

impl Drop for AbandonedPermit {
    fn drop(&mut self) {
        self.tally.abandoned.fetch_sub(1, Relaxed);
    }
}

/// Holds the permit of a request for the route's timeout, after its connection was closed because its client broke off
/// its body.
pub(in crate::gateway) fn hold_permit(permit: InFlightPermit, timeout: Wait, tally: &Arc<Tally>) {
    AbandonedPermit::new(permit, tally).hold_for(timeout);
}

/// One of the [`MAX_CONNECTED`] requests that keep a connection.
struct Connected(Arc<Tally>);

impl Connected {
    fn new(tally: &Arc<Tally>) -> Option<Self> {
        let connected = tally.connected_abandoned.fetch_add(1, Relaxed);
        let this = Self(Arc::clone(tally));
        (connected < MAX_CONNECTED).then_some(this)
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connected_abandoned.fetch_sub(1, Relaxed);
    }
}

/// Reads a body to its end, or returns false if there is no end within [`MAX_DISCARDED_BYTES`].
async fn read_all(mut body: impl Body<Data = Bytes> + Unpin) -> bool {
    let mut left = MAX_DISCARDED_BYTES;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return false };
        let Some(rest) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { return false };
        left = rest;
    }
    true
}

/// Returns whether a response of this type ends only when its connection is closed, so that waiting for its end is
/// pointless.
pub(in crate::gateway) fn is_event_stream(content_type: &[u8]) -> bool {
    const EVENT_STREAM: &[u8] = b"text/event-stream";
    let media_type = content_type.split(|byte| *byte == b';').next().unwrap_or_default();
    media_type.trim_ascii().eq_ignore_ascii_case(EVENT_STREAM)
}

pub(in crate::gateway) fn has_event_stream(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| is_event_stream(value.as_bytes()))
}

/// Spawns a future, unless the worker's runtime is shutting down.
pub(in crate::gateway) fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(future);
    }
}
