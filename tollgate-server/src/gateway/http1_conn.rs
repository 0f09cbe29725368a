//! One HTTP/1 connection to an upstream, and the task that drives it.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep};

use super::addresses::HostAddresses;
use super::body::ToUpstream;
use super::headers::KEEP_ALIVE;
use super::reuse::{ReusePolicy, Usage};
use super::ticks::{TICK, Tick, Ticks, Wait};
use super::upstream_deadline::UpstreamDeadline;
use super::upstream_slots::UpstreamIo;

/// Answers have heads of a few hundred bytes; this bounds what an upstream can make us hold.
pub(super) const MAX_HEAD_BYTES: u32 = 64 << 10;

/// A connection that takes one request after the other.
pub(super) struct Http1Conn {
    sender: http1::SendRequest<ToUpstream>,
    state: Arc<State>,
    usage: Usage,
}

/// What the driver of a connection looks at now and then.
struct State {
    deadline: Arc<UpstreamDeadline>,
    is_late: AtomicBool,
}

impl Http1Conn {
    /// Greets the upstream and spawns the driver.
    pub(super) async fn new(io: UpstreamIo, usage: Usage, ticks: Arc<Ticks>) -> hyper::Result<Self> {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD_BYTES as usize);
        let (sender, connection) = builder.handshake(TokioIo::new(io)).await?;
        let state =
            Arc::new(State { is_late: AtomicBool::new(false), deadline: Arc::new(UpstreamDeadline::new(ticks)) });
        let driven = Arc::clone(&state);
        tokio::spawn(async move { driven.drive(connection.with_upgrades()).await });
        Ok(Self { sender, state, usage })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    /// Whether it can take a request.
    pub(super) fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// Whether it has rested for so long that the upstream may be closing it just now.
    pub(super) fn has_been_idle(&self) -> bool {
        self.usage.has_been_idle(self.state.deadline.now())
    }

    /// Notes what an answer says of how long the upstream keeps the connection.
    pub(super) fn note_keep_alive(&mut self, headers: &HeaderMap) {
        self.usage.note_keep_alive(headers.get_all(KEEP_ALIVE).iter().map(HeaderValue::as_bytes));
    }

    /// No request is under way. Returns whether it can take another one.
    pub(super) fn become_idle(&mut self, now: Tick, policy: &ReusePolicy) -> bool {
        let idle = self.usage.note_idle(now, policy);
        self.state.deadline.set(idle);
        self.usage.allows_another(now, policy)
    }

    /// Whether its address is still one of the host's.
    pub(super) fn is_current(&mut self, addresses: &HostAddresses) -> bool {
        self.usage.is_current(addresses)
    }

    /// Lets no request follow the one under way.
    pub(super) fn end(&mut self) {
        self.usage.end();
    }

    /// Whether its age and use allow another request.
    pub(super) fn allows_another(&self, now: Tick, policy: &ReusePolicy) -> bool {
        self.usage.allows_another(now, policy)
    }

    /// The upstream has to say something within that time.
    pub(super) fn set_deadline(&self, wait: Wait) {
        self.state.deadline.set(wait);
    }

    /// Nothing is expected of the upstream: it is the client that does not read.
    pub(super) fn clear_deadline(&self) {
        self.state.deadline.clear();
    }

    /// How long the upstream may still take.
    pub(super) fn deadline(&self) -> &Arc<UpstreamDeadline> {
        &self.state.deadline
    }

    /// Whether the upstream was given up.
    pub(super) fn is_late(&self) -> bool {
        self.state.is_late.load(Relaxed)
    }

    pub(super) async fn send(
        &mut self,
        request: Request<ToUpstream>,
    ) -> Result<Response<Incoming>, TrySendError<Request<ToUpstream>>> {
        self.sender.try_send_request(request).await
    }
}

impl State {
    /// Drives the connection to its end, or until the upstream is late.
    async fn drive(&self, connection: impl Future<Output = hyper::Result<()>>) {
        let (mut connection, mut alarm) = (pin!(connection), pin!(sleep(CHECK_EVERY)));
        let mut is_set = false;
        poll_fn(|context| {
            // How it ended is told to whoever waits for an answer.
            if connection.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            if is_set && !alarm.is_elapsed() {
                return Poll::Pending;
            }
            is_set = true;
            while alarm.as_mut().poll(context).is_ready() {
                let left = self.deadline.ticks_left();
                if left == 0 {
                    self.is_late.store(true, Relaxed);
                    return Poll::Ready(());
                }
                let ticks = u32::try_from(left).unwrap_or(u32::MAX);
                alarm.as_mut().reset(Instant::now() + TICK.saturating_mul(ticks).min(CHECK_EVERY));
            }
            Poll::Pending
        })
        .await;
    }
}

/// A deadline that is shorter than this is seen a little late.
const CHECK_EVERY: Duration = Duration::from_millis(500);
