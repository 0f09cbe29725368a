//! HTTP/2 connections of a worker to one upstream, each shared by many requests.
//!
//! An upstream announces how many concurrent streams it accepts, and hyper queues requests beyond that. A queued
//! request would time out although the upstream is healthy, and count against it. So another connection is opened once
//! one is full. Opening is not done here.
//!
//! An upstream may respond before it has read the request, and neither read the rest nor reset the stream. hyper sends a body
//! in a task that waits for the upstream and cannot be stopped alone. So such a stream is held until the deadline of the
//! request. Then its connection gets no further requests, and is closed once the others on it are over.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

use hyper::client::conn::http2;
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::addresses::HostAddresses;
use super::conn::{ReusePolicy, UpstreamIo, Usage};
use crate::gateway::deadline::{Tick, UpstreamDeadline, Wait};
use crate::gateway::failure::ConnectError;
use crate::gateway::http2::body::ToUpstream;

/// The maximum number of concurrent requests on a connection, whatever its upstream allows: many upstreams serve a
/// connection with one thread. Most allow this number.
const MAX_REQUESTS: usize = 100;

/// The number of streams that hyper assumes until the upstream announces one.
pub(super) const UNKNOWN_STREAMS: usize = 0;

/// How often a new connection is polled for the announced number. hyper has no notification for it.
const POLL_EVERY: Duration = Duration::from_millis(2);

/// Never.
const NEVER: Tick = Tick::MAX;

/// How long a surplus connection may be idle. HTTP/2 announces the end of a connection, and a request that is sent too
/// late is known to be unprocessed, so this need not be shorter than the upstream's timeout.
const SPARE_FOR: Duration = Duration::from_secs(55);

/// The maximum number of connections. When all are full, further requests are queued.
const MAX_CONNECTIONS: usize = 32;

pub(in crate::gateway) type Sender = http2::SendRequest<ToUpstream>;
pub(in crate::gateway) type Connection = http2::Connection<TokioIo<UpstreamIo>, ToUpstream, ConnTasks>;

/// The connections of a worker to an upstream.
#[derive(Default)]
pub(in crate::gateway) struct Http2Pool {
    conns: Mutex<Vec<(Sender, Arc<Http2Conn>)>>,
    /// Whether the upstream has chosen HTTP/2 for the last new connection.
    speaks_http2: AtomicBool,
    /// Whether the rules no longer name the upstream.
    is_retired: AtomicBool,
}

/// A connection and its load.
struct Http2Conn {
    requests: AtomicUsize,
    /// The age and the number of requests, including those in flight.
    usage: Mutex<Usage>,
    /// When it was first seen without requests.
    quiet_since: AtomicU64,
    /// Whether a request was answered on it.
    has_answered: AtomicBool,
    state: Mutex<ConnState>,
    tasks: ConnTasks,
    /// Whether it is closed after the last request: the upstream does not read a body.
    is_retired: AtomicBool,
}

/// The executor of hyper's tasks of a connection.
#[derive(Clone, Default)]
pub(in crate::gateway) struct ConnTasks(
    /// The first task, which hyper spawns before there are requests. It has the socket, and the others end with it.
    Arc<OnceLock<AbortHandle>>,
);

impl ConnTasks {
    /// Closes the connection.
    fn abort(&self) {
        self.0.get().into_iter().for_each(AbortHandle::abort);
    }
}

impl<F> Executor<F> for ConnTasks
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, future: F) {
        let task = tokio::spawn(future);
        self.0.get_or_init(|| task.abort_handle());
    }
}

/// The state of a connection.
enum ConnState {
    /// Kept here, because only the connection knows how many streams the upstream allows.
    Open(Connection),
    /// Closed, with the error if there was one.
    Closed(Option<hyper::Error>),
}

/// A stream on a connection, held by a request.
pub(in crate::gateway) struct StreamPermit(Arc<Http2Conn>);

impl Http2Pool {
    /// Returns whether there are connections, open or not yet seen to be closed.
    pub(super) fn has_connections(&self) -> bool {
        !self.conns().is_empty()
    }

    /// Returns whether the upstream is known to use HTTP/2.
    pub(in crate::gateway) fn speaks_http2(&self) -> bool {
        self.speaks_http2.load(Relaxed)
    }

    /// Records that the upstream has chosen HTTP/1. It may have been replaced.
    pub(super) fn note_http1(&self) {
        self.speaks_http2.store(false, Relaxed);
    }

    /// Reserves a stream for a request. Returns `None` if another connection should be opened.
    pub(in crate::gateway) fn reserve(
        &self,
        now: Tick,
        policy: &ReusePolicy,
        addresses: &HostAddresses,
    ) -> Option<(Sender, StreamPermit)> {
        let mut conns = self.conns();
        // A connection that accepts no further requests ends with its last one.
        conns.retain(|(sender, conn)| {
            let mut usage = conn.usage();
            !sender.is_closed()
                && !conn.is_retired.load(Relaxed)
                && usage.is_young(now, policy)
                && usage.is_current(addresses)
        });
        // The first with room, so that surplus connections become idle.
        let found = conns.iter().find(|(_, conn)| conn.has_room());
        let found = match found {
            None if conns.len() >= MAX_CONNECTIONS => conns.iter().min_by_key(|(_, conn)| conn.requests.load(Relaxed)),
            found => found,
        };
        found.map(|(sender, conn)| (sender.clone(), StreamPermit::on(conn)))
    }

    /// Drives a new connection, and shares it if it is needed. The caller can use it in any case, unless it ends before
    /// the upstream has announced how many streams it accepts.
    pub(in crate::gateway) async fn add(
        &self,
        sender: Sender,
        (connection, tasks): (Connection, ConnTasks),
        usage: Usage,
    ) -> Result<(Sender, StreamPermit), ConnectError> {
        let conn = Arc::new(Http2Conn {
            requests: AtomicUsize::new(0),
            usage: Mutex::new(usage),
            quiet_since: AtomicU64::new(NEVER),
            has_answered: AtomicBool::new(false),
            state: Mutex::new(ConnState::Open(connection)),
            tasks,
            is_retired: AtomicBool::new(false),
        });
        let state = Arc::clone(&conn);
        tokio::spawn(async move { state.drive().await });
        // The announcement is the first frame of an upstream. Requests beyond it would be refused.
        while conn.allowed().ok_or_else(|| conn.close_error())? == UNKNOWN_STREAMS {
            sleep(POLL_EVERY).await;
        }
        self.speaks_http2.store(true, Relaxed);
        let reserve = StreamPermit::on(&conn);
        let mut conns = self.conns();
        // If several were opened at once, one is enough.
        let is_wanted = !self.is_retired.load(Relaxed);
        if is_wanted && conns.len() < MAX_CONNECTIONS && !conns.iter().any(|(_, other)| other.has_room()) {
            conns.push((sender.clone(), conn));
        }
        Ok((sender, reserve))
    }

    /// Closes connections that have been idle for a while, except for one.
    pub(in crate::gateway) fn sweep(&self, now: Tick) {
        let mut is_first = true;
        self.conns()
            .retain(|(sender, conn)| !sender.is_closed() && (std::mem::take(&mut is_first) || !conn.is_surplus(now)));
    }

    /// Closes a connection without requests. Returns whether there was one.
    pub(super) fn evict_idle(&self) -> bool {
        let mut conns = self.conns();
        let idle = conns.iter().position(|(_, conn)| conn.requests.load(Relaxed) == 0);
        idle.map(|at| conns.remove(at)).is_some()
    }

    /// Closes the connections after their requests.
    pub(super) fn retire(&self) {
        // Before the lock is taken, so that no connection is added afterwards.
        self.is_retired.store(true, Relaxed);
        self.conns().clear();
    }

    fn conns(&self) -> MutexGuard<'_, Vec<(Sender, Arc<Http2Conn>)>> {
        self.conns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Http2Conn {
    /// Returns how many concurrent streams the upstream accepts, while the connection is open.
    fn allowed(&self) -> Option<usize> {
        match &*self.state() {
            ConnState::Open(connection) => Some(connection.current_max_send_streams()),
            ConnState::Closed(_) => None,
        }
    }

    fn close_error(&self) -> ConnectError {
        let why = match &mut *self.state() {
            ConnState::Closed(why) => why.take(),
            ConnState::Open(_) => None,
        };
        why.map_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted).into(), ConnectError::from)
    }

    fn has_room(&self) -> bool {
        // If the upstream accepts none any more, another connection would not get more.
        let has_stream = |allowed: usize| self.requests.load(Relaxed) < allowed.clamp(1, MAX_REQUESTS);
        !self.is_retired.load(Relaxed) && self.allowed().is_some_and(has_stream)
    }

    /// Returns whether it has been idle for long.
    fn is_surplus(&self, now: Tick) -> bool {
        if self.requests.load(Relaxed) > 0 {
            return false;
        }
        let since = self.quiet_since.load(Relaxed).min(now);
        self.quiet_since.store(since, Relaxed);
        Wait::at_least(SPARE_FOR).from(since) <= now
    }

    /// Drives the connection. Its error is reported to the requests that wait for a response.
    async fn drive(&self) {
        let ended = poll_fn(|context| match &mut *self.state() {
            ConnState::Open(connection) => Pin::new(connection).poll(context),
            ConnState::Closed(_) => Poll::Ready(Ok(())),
        });
        let ended = ended.await;
        *self.state() = ConnState::Closed(ended.err());
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, ConnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamPermit {
    fn on(conn: &Arc<Http2Conn>) -> Self {
        conn.requests.fetch_add(1, Relaxed);
        conn.usage().note_request();
        conn.quiet_since.store(NEVER, Relaxed);
        Self(Arc::clone(conn))
    }

    /// Returns whether a request was answered on the connection. The upstream may be closing it just now.
    pub(in crate::gateway) fn has_answered(&self) -> bool {
        self.0.has_answered.load(Relaxed)
    }

    /// Records that a request was answered on the connection.
    pub(in crate::gateway) fn note_answered(&self) {
        // A store that changes nothing would still take the cache line from other processors.
        if !self.has_answered() {
            self.0.has_answered.store(true, Relaxed);
        }
    }

    /// Holds the stream after its response until the upstream has read the request body, or given it up.
    pub(in crate::gateway) async fn hold_for_body(self, deadline: Arc<UpstreamDeadline>) {
        if deadline.await_body().await.is_none() {
            self.0.is_retired.store(true, Relaxed);
        }
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let was_last = self.0.requests.fetch_sub(1, Relaxed) == 1;
        if was_last && self.0.is_retired.load(Relaxed) {
            self.0.tasks.abort();
        }
    }
}
