//! Responses to requests of the lane whose client has left. They are read to the end and discarded while their permit
//! is held.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::time::timeout;

use super::super::abandoned::{self, Abandoned, MAX_DISCARDED_BYTES, is_event_stream};
use super::super::header_names::HeaderKind;
use super::super::ticks::{TICK, Ticks};
use super::Lane;
use super::conn::LaneConn;
use super::forwarding::Forwarding;
use super::request_headers::HeaderBuffer;
use super::response::{ResponseBody, ResponseHead, ResponseParse};
use super::scratch::{Scratch, scratch};

/// A response in progress whose client has left, and its permit.
struct AbandonedResponse {
    conn: Box<LaneConn>,
    is_head: bool,
    abandoned: Abandoned,
    ticks: Arc<Ticks>,
}

/// The rest of a response, and whether its connection stays open; `None` if the response has not started or has no end.
type ResponseProgress = Option<(ResponseBody, bool)>;

impl Lane<'_> {
    /// Abandons a request whose client has left. If it has a permit, that is held until the upstream is done. Otherwise
    /// the connection is closed.
    ///
    /// The connection is also closed in the middle of a body, because an upstream that waits for the rest of one is
    /// blocked. A timer holds the permit then.
    pub(super) fn abandon(&self, conn: Box<LaneConn>, begun: ResponseProgress, forwarding: &mut Forwarding) {
        if self.body.is_some() {
            return forwarding.guard.hold_permit();
        }
        let Some(abandoned) = forwarding.guard.abandon() else { return };
        let ticks = Arc::clone(&self.worker.ticks);
        let left = u32::try_from(self.deadline.saturating_sub(ticks.now())).unwrap_or(u32::MAX);
        let rest = AbandonedResponse { conn, is_head: forwarding.is_head, abandoned, ticks };
        abandoned::spawn(rest.drain(begun, TICK.saturating_mul(left)));
    }
}

impl AbandonedResponse {
    /// Reads the response to its end. The head has to arrive in the time that the upstream had left, and the body
    /// within the route's timeout.
    async fn drain(mut self, begun: ResponseProgress, head_within: std::time::Duration) {
        let begun = match begun {
            Some(begun) => Some(begun),
            None => {
                let head = poll_fn(|context| poll_head(&mut self.conn, self.is_head, context));
                timeout(head_within, head).await.ok().flatten()
            }
        };
        let Some((mut body, mut stays_open)) = begun else { return };
        let mut left = MAX_DISCARDED_BYTES;
        let read = poll_fn(|context| poll_body(&mut self.conn, (&mut body, &mut stays_open), &mut left, context));
        let is_whole = timeout(self.abandoned.attempt().timeout.duration(), read).await.unwrap_or(false);
        if is_whole && stays_open {
            self.abandoned.attempt().keep_lane_conn(self.conn, self.ticks.now());
        }
    }
}

/// Reads the head of a response. Returns `None` if the upstream disconnects, sends an invalid response, or starts one
/// that only closing ends.
fn poll_head(conn: &mut LaneConn, is_head: bool, context: &mut Context<'_>) -> Poll<ResponseProgress> {
    let sent = conn.poll_send(context);
    let mut scratch = scratch();
    let Scratch { input, buffers, .. } = &mut *scratch;
    let mut has_unparsed = false;
    loop {
        let before = conn.head_bytes.len();
        input[..before].copy_from_slice(&conn.head_bytes);
        let read = match std::mem::take(&mut has_unparsed) {
            true => 0,
            false => match conn.poll_read(&mut input[before..], context) {
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(None),
                Poll::Ready(Ok(read)) => read,
                Poll::Pending if matches!(sent, Poll::Ready(Err(_))) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            },
        };
        let bytes = &input[..before + read];
        let mut header_buffer = HeaderBuffer::default();
        match ResponseHead::read(bytes, &mut header_buffer, is_head) {
            ResponseParse::Complete(mut head) => {
                conn.usage.note_keep_alive(head.keep_alive(header_buffer.view()));
                conn.head_bytes = Vec::new();
                buffers.clear();
                let rest = &bytes[head.bytes..];
                let taken = head.body.take(rest, &mut buffers.out);
                if header_buffer.view().values(HeaderKind::ContentType).any(is_event_stream) {
                    return Poll::Ready(None);
                }
                return Poll::Ready(match taken {
                    Ok((taken, _)) => Some((head.body, head.stays_open && taken == rest.len())),
                    Err(_) => None,
                });
            }
            ResponseParse::Interim(_) if !conn.note_interim() => return Poll::Ready(None),
            ResponseParse::Interim(head) => {
                let rest = bytes[head.bytes..].to_vec();
                has_unparsed = !rest.is_empty();
                conn.head_bytes = rest;
            }
            ResponseParse::Partial if bytes.len() < input.len() => {
                conn.head_bytes.clear();
                conn.head_bytes.extend_from_slice(&input[..before + read]);
            }
            // A tunnel has no end.
            ResponseParse::Switch(_)
            | ResponseParse::Partial
            | ResponseParse::TooManyHeaders
            | ResponseParse::Invalid => return Poll::Ready(None),
        }
    }
}

/// Reads a body to its end. Returns false if there is no end within `left` bytes.
fn poll_body(
    conn: &mut LaneConn,
    (body, stays_open): (&mut ResponseBody, &mut bool),
    left: &mut usize,
    context: &mut Context<'_>,
) -> Poll<bool> {
    loop {
        let sent = conn.poll_send(context);
        if body.is_over() {
            *stays_open &= matches!(sent, Poll::Ready(Ok(())));
            return Poll::Ready(true);
        }
        let mut scratch = scratch();
        let Scratch { input, buffers, .. } = &mut *scratch;
        let Ok(read @ 1..) = ready!(conn.poll_read(input, context)) else { return Poll::Ready(false) };
        buffers.clear();
        let Ok((taken, _)) = body.take(&input[..read], &mut buffers.out) else { return Poll::Ready(false) };
        *stays_open &= taken == read;
        match left.checked_sub(read) {
            Some(rest) => *left = rest,
            None => return Poll::Ready(false),
        }
    }
}
