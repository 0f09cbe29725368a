//! Answers to requests of the lane whose client has left: read to their end and thrown away while their permit is held.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::time::timeout;

use super::super::abandoned::{self, Abandoned, MAX_DISCARDED_BYTES, is_event_stream};
use super::super::names::Kind;
use super::super::ticks::{TICK, Ticks};
use super::Lane;
use super::answer::{Body, Head, Read};
use super::link::Link;
use super::passing::Passing;
use super::request::Lines;
use super::scratch::{Scratch, scratch};

/// What a client has left behind: the answer on its way, and the permit.
struct Rest {
    link: Box<Link>,
    is_head: bool,
    abandoned: Abandoned,
    ticks: Arc<Ticks>,
}

/// The rest of an answer, and whether its connection stays open; `None` if the answer has not begun or has no end.
type Rested = Option<(Body, bool)>;

impl Lane<'_> {
    /// The client has left a request that an upstream works on. If it has a permit, that is held until the upstream is
    /// done; or else closing the connection ends it.
    pub(super) fn abandon(&self, link: Box<Link>, begun: Rested, passing: &mut Passing) {
        let Some(abandoned) = passing.ending.abandon() else { return };
        let ticks = Arc::clone(&self.worker.ticks);
        let left = u32::try_from(self.deadline.saturating_sub(ticks.now())).unwrap_or(u32::MAX);
        let rest = Rest { link, is_head: passing.is_head, abandoned, ticks };
        abandoned::spawn(rest.read_out(begun, TICK.saturating_mul(left)));
    }
}

impl Rest {
    /// Reads the answer to its end. Its head has to come in the time that the upstream had left, and its body in the
    /// route's timeout.
    async fn read_out(mut self, begun: Rested, head_within: std::time::Duration) {
        let begun = match begun {
            Some(begun) => Some(begun),
            None => {
                let head = poll_fn(|context| poll_head(&mut self.link, self.is_head, context));
                timeout(head_within, head).await.ok().flatten()
            }
        };
        let Some((mut body, mut stays_open)) = begun else { return };
        let mut left = MAX_DISCARDED_BYTES;
        let read = poll_fn(|context| poll_body(&mut self.link, (&mut body, &mut stays_open), &mut left, context));
        let is_whole = timeout(self.abandoned.held().timeout.duration(), read).await.unwrap_or(false);
        if is_whole && stays_open {
            self.abandoned.held().keep_link(self.link, self.ticks.now());
        }
    }
}

/// Reads the head of an answer. There is none if the upstream hangs up, sends something else, or begins an answer that
/// only closing ends.
fn poll_head(link: &mut Link, is_head: bool, context: &mut Context<'_>) -> Poll<Rested> {
    let sent = link.poll_send(context);
    let mut scratch = scratch();
    let Scratch { input, desk, .. } = &mut *scratch;
    loop {
        let before = link.came.len();
        input[..before].copy_from_slice(&link.came);
        let read = match link.poll_read(&mut input[before..], context) {
            Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(None),
            Poll::Ready(Ok(read)) => read,
            Poll::Pending if matches!(sent, Poll::Ready(Err(_))) => return Poll::Ready(None),
            Poll::Pending => return Poll::Pending,
        };
        let bytes = &input[..before + read];
        let mut lines = Lines::default();
        match Head::read(bytes, &mut lines, is_head) {
            Read::Whole(mut head) => {
                link.usage.note_keep_alive(head.keep_alive(lines.seen()));
                link.came = Vec::new();
                desk.clean();
                let rest = &bytes[head.bytes..];
                let taken = head.body.take(rest, &mut desk.out);
                if lines.seen().values(Kind::ContentType).any(is_event_stream) {
                    return Poll::Ready(None);
                }
                return Poll::Ready(match taken {
                    Ok((taken, _)) => Some((head.body, head.stays_open && taken == rest.len())),
                    Err(_) => None,
                });
            }
            Read::Part if bytes.len() < input.len() => {
                link.came.clear();
                link.came.extend_from_slice(&input[..before + read]);
            }
            Read::Part | Read::TooMany | Read::Bad => return Poll::Ready(None),
        }
    }
}

/// Reads a body to its end, or returns false if there is no end within the bytes that are left.
fn poll_body(
    link: &mut Link,
    (body, stays_open): (&mut Body, &mut bool),
    left: &mut usize,
    context: &mut Context<'_>,
) -> Poll<bool> {
    loop {
        let sent = link.poll_send(context);
        if body.is_over() {
            *stays_open &= matches!(sent, Poll::Ready(Ok(())));
            return Poll::Ready(true);
        }
        let mut scratch = scratch();
        let Scratch { input, desk, .. } = &mut *scratch;
        let Ok(read @ 1..) = ready!(link.poll_read(input, context)) else { return Poll::Ready(false) };
        desk.clean();
        let Ok((taken, _)) = body.take(&input[..read], &mut desk.out) else { return Poll::Ready(false) };
        *stays_open &= taken == read;
        match left.checked_sub(read) {
            Some(rest) => *left = rest,
            None => return Poll::Ready(false),
        }
    }
}
