//! An HTTP/1 connection to an upstream, and the task that drives it.

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

/// The maximum size of a response head, which bounds the memory that an upstream can make us hold.
pub(super) const MAX_HEAD_BYTES: u32 = 64 << 10;

/// A connection for one request at a time.
pub(super) struct Http1Conn {
    sender: http1::SendRequest<ToUpstream>,
    state: Arc<State>,
    usage: Usage,
}

/// The state that the driver checks periodically.
struct State {
    deadline: Arc<UpstreamDeadline>,
    is_late: AtomicBool,
}

impl Http1Conn {
    /// Performs the HTTP/1 handshake and spawns the driver.
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

    /// Returns whether it can take a request.
    pub(super) fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// Returns whether it was idle, so that the upstream may be closing it just now.
    pub(super) fn has_been_idle(&self) -> bool {
        self.usage.has_been_idle(self.state.deadline.now())
    }

    /// Records the keep-alive time that a response announces.
    pub(super) fn note_keep_alive(&mut self, headers: &HeaderMap) {
        self.usage.note_keep_alive(headers.get_all(KEEP_ALIVE).iter().map(HeaderValue::as_bytes));
    }

    /// Marks the connection as idle. Returns whether it can be used again.
    pub(super) fn become_idle(&mut self, now: Tick, policy: &ReusePolicy) -> bool {
        let idle = self.usage.note_idle(now, policy);
        self.state.deadline.set(idle);
        self.usage.allows_another(now, policy)
    }

    /// Returns whether its address still belongs to the host.
    pub(super) fn is_current(&mut self, addresses: &HostAddresses) -> bool {
        self.usage.is_current(addresses)
    }

    /// Prevents further requests on the connection.
    pub(super) fn end(&mut self) {
        self.usage.end();
    }

    /// Returns whether its age and use allow another request.
    pub(super) fn allows_another(&self, now: Tick, policy: &ReusePolicy) -> bool {
        self.usage.allows_another(now, policy)
    }

    /// Sets the upstream's deadline.
    pub(super) fn set_deadline(&self, wait: Wait) {
        self.state.deadline.set(wait);
    }

    /// Clears the upstream's deadline, because the client does not read.
    pub(super) fn clear_deadline(&self) {
        self.state.deadline.clear();
    }

    /// Returns the upstream's deadline.
    pub(super) fn deadline(&self) -> &Arc<UpstreamDeadline> {
        &self.state.deadline
    }

    /// Returns whether the upstream missed its deadline.
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
    /// Drives the connection to its end, or until the upstream misses its deadline.
    async fn drive(&self, connection: impl Future<Output = hyper::Result<()>>) {
        let (mut connection, mut alarm) = (pin!(connection), pin!(sleep(CHECK_EVERY)));
        let mut is_set = false;
        poll_fn(|context| {
            // Its error is reported to the request that waits for a response.
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

/// The interval of checks. A shorter deadline is noticed a little late.
const CHECK_EVERY: Duration = Duration::from_millis(500);
