//! Responses to requests of the lane whose client has left. They are read to the end and discarded while their permit
//! is held.

use std::time::Duration;

use tokio::time::timeout;

use super::super::abandoned::{self, Abandoned, has_event_stream};
use super::super::body::UpstreamBody;
use super::super::deadline::TICK;
use super::super::reuse::Repeatable;
use super::Lane;
use super::conn::Http1Conn;
use super::forwarding::Forwarding;
use super::http1_client::{ConnPool, Http1Body, ResponseStart, receive};
use super::response::ResponseBody;

/// A response in progress whose client has left, and its permit.
struct AbandonedResponse {
    conn: Box<Http1Conn>,
    is_head: bool,
    abandoned: Abandoned,
    pool: ConnPool,
}

/// The rest of a response, and whether its connection stays open; `None` if the response has not started.
type ResponseProgress = Option<(ResponseBody, bool)>;

impl Lane<'_> {
    /// Abandons a request whose client has left. If it has a permit, that is held until the upstream is done. Otherwise
    /// the connection is closed.
    ///
    /// The connection is also closed in the middle of a body, because an upstream that waits for the rest of one is
    /// blocked. A timer holds the permit then.
    pub(super) fn abandon(&self, conn: Box<Http1Conn>, begun: ResponseProgress, forwarding: &mut Forwarding) {
        if self.body.is_some() {
            return forwarding.guard.hold_permit();
        }
        let Some(abandoned) = forwarding.guard.abandon() else { return };
        let ticks = &self.worker.ticks;
        let left = u32::try_from(self.deadline.saturating_sub(ticks.now())).unwrap_or(u32::MAX);
        let pool = abandoned.attempt().pool(ticks);
        let rest = AbandonedResponse { conn, is_head: forwarding.is_head, abandoned, pool };
        abandoned::spawn(rest.drain(begun, TICK.saturating_mul(left)));
    }
}

impl AbandonedResponse {
    /// Reads the response to its end. The head has to arrive in the time that the upstream had left, and the body
    /// within the route's timeout.
    async fn drain(self, begun: ResponseProgress, head_within: Duration) {
        let Self { conn, is_head, abandoned, pool } = self;
        let body = match begun {
            Some((rest, stays_open)) => Http1Body::resume(conn, ResponseStart::resume(rest, stays_open), pool),
            None => match timeout(head_within, receive(conn, None, (is_head, Repeatable::No), Some(pool))).await {
                // An event stream has no end.
                Ok(Ok(response)) if !has_event_stream(response.headers()) => response.into_body(),
                _ => return,
            },
        };
        abandoned.drain(UpstreamBody::Http1(body)).await;
    }
}
