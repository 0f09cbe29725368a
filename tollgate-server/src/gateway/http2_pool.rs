//! Connections of HTTP/2 to one upstream, each of which carries many requests of a worker.
//!
//! An upstream says how many requests it takes on a connection at a time, and hyper lets more of them wait. They would
//! wait while the upstream is well, and count against it when their time is over; so there is another connection once
//! one is full. How connections are opened is not here.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::time::sleep;

use super::addresses::HostAddresses;
use super::body::ToUpstream;
use super::connect::ConnectError;
use super::reuse::{ReusePolicy, Usage};
use super::ticks::{Tick, Wait};
use super::upstream_slots::UpstreamIo;

/// Requests that a connection carries at a time, whatever its upstream would take: many serve a connection with one
/// thread. It is what most allow.
const MAX_REQUESTS: usize = 100;

/// What hyper is to assume until an upstream has said how many requests it takes.
pub(super) const UNKNOWN_STREAMS: usize = 0;

/// How often it is looked whether it has. Nothing tells.
const POLL_EVERY: Duration = Duration::from_millis(2);

/// No moment.
const NEVER: Tick = Tick::MAX;

/// How long a connection that is not the only one may be without requests. HTTP/2 announces the end of a connection, and a
/// request that comes too late is known not to have been served, so this need not be shorter than the upstream's own time.
const SPARE_FOR: Duration = Duration::from_secs(55);

/// Connections that a worker shares to one upstream. Where all are full, more requests wait.
const MAX_CONNECTIONS: usize = 32;

pub(super) type Sender = http2::SendRequest<ToUpstream>;
pub(super) type Connection = http2::Connection<TokioIo<UpstreamIo>, ToUpstream, TokioExecutor>;

/// The connections of a worker to an upstream.
#[derive(Default)]
pub(super) struct Http2Pool {
    conns: Mutex<Vec<(Sender, Arc<Http2Conn>)>>,
    /// There has been one.
    speaks_http2: AtomicBool,
}

/// A connection, and how much it carries.
struct Http2Conn {
    requests: AtomicUsize,
    /// Requests that it was used for, ended or not, are counted in it.
    usage: Mutex<Usage>,
    /// When it was first seen to carry nothing.
    quiet_since: AtomicU64,
    state: Mutex<ConnState>,
}

/// What becomes of a connection.
enum ConnState {
    /// Only the connection knows what the upstream allows.
    Open(Connection),
    /// Why, if it broke.
    Closed(Option<hyper::Error>),
}

/// A request's place on a connection.
pub(super) struct StreamPermit(Arc<Http2Conn>);

impl Http2Pool {
    /// Returns whether there are connections, open or not yet seen to be closed.
    pub(super) fn has_connections(&self) -> bool {
        !self.conns().is_empty()
    }

    /// Whether the upstream is known to speak HTTP/2.
    pub(super) fn speaks_http2(&self) -> bool {
        self.speaks_http2.load(Relaxed)
    }

    /// A place for a request; none if there should be another connection.
    pub(super) fn reserve(
        &self,
        now: Tick,
        policy: &ReusePolicy,
        addresses: &HostAddresses,
    ) -> Option<(Sender, StreamPermit)> {
        let mut conns = self.conns();
        // One that takes no further requests ends with those that it carries.
        conns.retain(|(sender, conn)| {
            let mut usage = conn.usage();
            !sender.is_closed() && usage.is_young(now, policy) && usage.is_current(addresses)
        });
        // The first that has room, so that those that are not needed any more become quiet.
        let found = conns.iter().find(|(_, conn)| conn.has_room());
        let found = match found {
            None if conns.len() >= MAX_CONNECTIONS => conns.iter().min_by_key(|(_, conn)| conn.requests.load(Relaxed)),
            found => found,
        };
        found.map(|(sender, conn)| (sender.clone(), StreamPermit::on(conn)))
    }

    /// Drives a new connection, and shares it if it is needed. It is the caller's to use in any case, unless it
    /// ends before the upstream has said how many requests it takes.
    pub(super) async fn add(
        &self,
        sender: Sender,
        connection: Connection,
        usage: Usage,
    ) -> Result<(Sender, StreamPermit), ConnectError> {
        let conn = Arc::new(Http2Conn {
            requests: AtomicUsize::new(0),
            usage: Mutex::new(usage),
            quiet_since: AtomicU64::new(NEVER),
            state: Mutex::new(ConnState::Open(connection)),
        });
        let state = Arc::clone(&conn);
        tokio::spawn(async move { state.drive().await });
        // It is the first thing that an upstream sends. More requests than that would be refused.
        while conn.allowed().ok_or_else(|| conn.close_error())? == UNKNOWN_STREAMS {
            sleep(POLL_EVERY).await;
        }
        self.speaks_http2.store(true, Relaxed);
        let reserve = StreamPermit::on(&conn);
        let mut conns = self.conns();
        // Where several were opened at once, one is enough.
        if conns.len() < MAX_CONNECTIONS && !conns.iter().any(|(_, other)| other.has_room()) {
            conns.push((sender.clone(), conn));
        }
        Ok((sender, reserve))
    }

    /// Lets go of connections that nobody has needed for a while, but for one.
    pub(super) fn sweep(&self, now: Tick) {
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

    fn conns(&self) -> MutexGuard<'_, Vec<(Sender, Arc<Http2Conn>)>> {
        self.conns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Http2Conn {
    /// How many requests the upstream takes at a time, as long as the connection is there.
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
        // Where none is allowed any more, another connection would not get more.
        self.allowed().is_some_and(|allowed| self.requests.load(Relaxed) < allowed.clamp(1, MAX_REQUESTS))
    }

    /// Whether it has been without requests for long.
    fn is_surplus(&self, now: Tick) -> bool {
        if self.requests.load(Relaxed) > 0 {
            return false;
        }
        let since = self.quiet_since.load(Relaxed).min(now);
        self.quiet_since.store(since, Relaxed);
        Wait::at_least(SPARE_FOR).from(since) <= now
    }

    /// How it ends is told to whoever waits for an answer.
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
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Relaxed);
    }
}
