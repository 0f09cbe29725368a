//! HTTP/2 connections of a worker to one upstream, each shared by many requests.
//!
//! An upstream announces how many concurrent streams it accepts, and h2 queues requests beyond that. A queued request
//! would time out although the upstream is healthy, and count against it. So another connection is opened once one is
//! full. Opening is not done here.
//!
//! A task drives each connection. The connection is closed once it has no requests and is not in the pool, or if the
//! upstream does not answer a ping while requests are under way.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{self, SendRequest};
use tollgate_net::deadline::{Alarm, NEVER, Tick, Ticks, Wait};
use tollgate_net::stream::INPUT_BYTES;

use super::addresses::HostAddresses;
use super::conn::{ReusePolicy, UpstreamIo, Usage};
use crate::gateway::failure::ConnectError;
use crate::gateway::http2::stream::{KeepAlive, PingWaits, Traffic};

/// The interval of keep-alive pings.
const PING_EVERY: Duration = Duration::from_secs(15);

/// The interval of pings while an upstream responds to nothing else. gRPC servers close a connection after a few pings
/// less than five minutes apart. They reset that count when they send a response.
const QUIET_PING_EVERY: Duration = Duration::from_secs(310);

/// The timeout of an answer to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How much of one response an upstream may send while the client does not read. This is memory that a stalled client
/// holds.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// How much an upstream may send for all streams together. More than all streams can hold, so that stalled clients do
/// not block the others. The maximum of HTTP/2.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// How much of each body is buffered while the upstream does not read, in addition to the client's window: two frames,
/// so that one is available while another is written.
const SEND_BUFFER_BYTES: usize = 32 << 10;

/// The maximum size of a response head, as in HTTP/1.
const MAX_HEAD_BYTES: u32 = INPUT_BYTES as u32;

/// The maximum number of concurrent requests on a connection, whatever its upstream allows: many upstreams serve a
/// connection with one thread. Most allow this number.
const MAX_REQUESTS: usize = 100;

/// The number of cancelled streams whose late frames are ignored. Clients cancel many at once. Frames of streams that h2
/// has forgotten are errors of the upstream to it, and by default, 1,024 of them end the connection.
const MAX_RESET_STREAMS: usize = 1000;

/// The number of streams that h2 assumes until the upstream announces one.
const UNKNOWN_STREAMS: usize = 0;

/// How long a surplus connection may be idle. HTTP/2 announces the end of a connection, and a request that is sent too
/// late is known to be unprocessed, so this need not be shorter than the upstream's timeout.
const SPARE_FOR: Duration = Duration::from_secs(55);

/// The maximum number of connections. When all are full, further requests are queued.
const MAX_CONNECTIONS: usize = 32;

pub(in crate::gateway) type Sender = SendRequest<Bytes>;
type Connection = client::Connection<UpstreamIo, Bytes>;

/// Starts HTTP/2 on a new connection.
pub(super) async fn handshake(io: UpstreamIo) -> Result<(Sender, Connection), h2::Error> {
    let mut builder = client::Builder::new();
    builder
        .initial_max_send_streams(UNKNOWN_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_reset_streams(MAX_RESET_STREAMS)
        .max_local_error_reset_streams(None)
        .enable_push(false);
    builder.handshake(io).await
}

/// The connections of a worker to an upstream.
#[derive(Default)]
pub(in crate::gateway) struct Http2Pool {
    conns: Mutex<Vec<SharedConn>>,
    /// Whether the upstream has chosen HTTP/2 for the last new connection.
    speaks_http2: AtomicBool,
    /// Whether the rules no longer name the upstream.
    is_retired: AtomicBool,
}

/// A connection in the pool. It is closed after its last request once this is dropped.
struct SharedConn {
    sender: Sender,
    load: Arc<Load>,
}

/// The requests on a connection.
struct Load {
    requests: AtomicUsize,
    /// The age and the number of requests, including those in flight.
    usage: Mutex<Usage>,
    /// When it was first seen without requests.
    quiet_since: AtomicU64,
    /// Whether a request was answered on it.
    has_answered: AtomicBool,
    /// When a part of a response arrived. No ping is due for a while then.
    received_at: AtomicU64,
    /// When the last request began.
    began_at: AtomicU64,
    ticks: Arc<Ticks>,
}

/// A stream on a connection, held by a request.
pub(in crate::gateway) struct StreamPermit(Arc<Load>);

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
        conns.retain_mut(|conn| {
            let is_open = conn.is_open();
            let mut usage = conn.load.usage();
            is_open && usage.is_young(now, policy) && usage.is_current(addresses)
        });
        // The first with room, so that surplus connections become idle.
        let found = conns.iter().find(|conn| conn.has_room());
        let found = match found {
            None if conns.len() >= MAX_CONNECTIONS => conns.iter().min_by_key(|conn| conn.load.requests.load(Relaxed)),
            found => found,
        };
        found.map(|conn| (conn.sender.clone(), StreamPermit::on(&conn.load)))
    }

    /// Drives a new connection, and shares it if it is needed. The caller can use it in any case, unless it ends before
    /// the upstream has announced how many streams it accepts.
    pub(in crate::gateway) async fn add(
        &self,
        (sender, mut connection): (Sender, Connection),
        usage: Usage,
        ticks: &Arc<Ticks>,
    ) -> Result<(Sender, StreamPermit), ConnectError> {
        // The announcement is the first frame of an upstream. Requests beyond it would be refused.
        poll_fn(|context| match Pin::new(&mut connection).poll(context) {
            Poll::Ready(Ok(())) => Poll::Ready(Err(io::Error::from(io::ErrorKind::ConnectionAborted).into())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(ConnectError::from(error))),
            Poll::Pending if sender.current_max_send_streams() == UNKNOWN_STREAMS => Poll::Pending,
            Poll::Pending => Poll::Ready(Ok(())),
        })
        .await?;
        let load = Arc::new(Load {
            requests: AtomicUsize::new(0),
            usage: Mutex::new(usage),
            quiet_since: AtomicU64::new(NEVER),
            has_answered: AtomicBool::new(false),
            received_at: AtomicU64::new(ticks.now()),
            began_at: AtomicU64::new(ticks.now()),
            ticks: Arc::clone(ticks),
        });
        tokio::spawn(drive(connection, Arc::clone(&load)));
        self.speaks_http2.store(true, Relaxed);
        let permit = StreamPermit::on(&load);
        let mut conns = self.conns();
        // If several were opened at once, one is enough.
        let is_wanted = !self.is_retired.load(Relaxed);
        if is_wanted
            && conns.len() < MAX_CONNECTIONS
            && !conns.iter_mut().any(|other| other.is_open() && other.has_room())
        {
            conns.push(SharedConn { sender: sender.clone(), load });
        }
        Ok((sender, permit))
    }

    /// Closes connections that have been idle for a while, except for one.
    pub(in crate::gateway) fn sweep(&self, now: Tick) {
        let mut is_first = true;
        self.conns().retain_mut(|conn| conn.is_open() && (std::mem::take(&mut is_first) || !conn.load.is_surplus(now)));
    }

    /// Closes a connection without requests. Returns whether there was one.
    pub(super) fn evict_idle(&self) -> bool {
        let mut conns = self.conns();
        let idle = conns.iter().position(|conn| conn.load.requests.load(Relaxed) == 0);
        idle.map(|at| conns.remove(at)).is_some()
    }

    /// Closes the connections after their requests.
    pub(super) fn retire(&self) {
        // Before the lock is taken, so that no connection is added afterwards.
        self.is_retired.store(true, Relaxed);
        self.conns().clear();
    }

    fn conns(&self) -> MutexGuard<'_, Vec<SharedConn>> {
        self.conns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedConn {
    /// Returns whether it accepts requests: neither side has ended it, as far as its task knows.
    fn is_open(&mut self) -> bool {
        !matches!(self.sender.poll_ready(&mut Context::from_waker(Waker::noop())), Poll::Ready(Err(_)))
    }

    fn has_room(&self) -> bool {
        // If the upstream accepts none any more, another connection would not get more.
        let allowed = self.sender.current_max_send_streams().clamp(1, MAX_REQUESTS);
        self.load.requests.load(Relaxed) < allowed
    }
}

/// Drives a connection. Its error is reported to the requests that wait for a response.
async fn drive(mut connection: Connection, load: Arc<Load>) {
    let Some(pings) = connection.ping_pong() else { return };
    let waits = PingWaits {
        every: Wait::at_least(PING_EVERY),
        quiet: Wait::at_least(QUIET_PING_EVERY),
        timeout: Wait::at_least(PING_TIMEOUT),
    };
    let mut keep_alive = KeepAlive::new(pings, waits, load.ticks.now());
    let mut alarm = Alarm::default();
    poll_fn(|context| {
        loop {
            if Pin::new(&mut connection).poll(context).is_ready() {
                return Poll::Ready(());
            }
            // The next request wakes this task.
            if load.requests.load(Relaxed) == 0 && !keep_alive.awaits_answer() {
                return Poll::Pending;
            }
            let due = keep_alive.check(load.traffic(), load.ticks.now(), context);
            let Some(due) = due else { return Poll::Ready(()) };
            ready!(alarm.poll_passed(due, &load.ticks, context));
        }
    })
    .await;
}

impl Load {
    /// Returns whether it has been idle for long.
    fn is_surplus(&self, now: Tick) -> bool {
        if self.requests.load(Relaxed) > 0 {
            return false;
        }
        let since = self.quiet_since.load(Relaxed).min(now);
        self.quiet_since.store(since, Relaxed);
        Wait::at_least(SPARE_FOR).from(since) <= now
    }

    fn traffic(&self) -> Traffic {
        Traffic { received_at: self.received_at.load(Relaxed), began_at: self.began_at.load(Relaxed) }
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamPermit {
    fn on(load: &Arc<Load>) -> Self {
        load.requests.fetch_add(1, Relaxed);
        load.usage().note_request();
        load.quiet_since.store(NEVER, Relaxed);
        load.began_at.store(load.ticks.now(), Relaxed);
        Self(Arc::clone(load))
    }

    /// Returns whether a request was answered on the connection. The upstream may be closing it just now.
    pub(in crate::gateway) fn has_answered(&self) -> bool {
        self.0.has_answered.load(Relaxed)
    }

    /// Records that the request was answered.
    pub(in crate::gateway) fn note_answered(&self) {
        self.0.has_answered.store(true, Relaxed);
        self.note_received();
    }

    /// Records that a part of the response has arrived.
    pub(in crate::gateway) fn note_received(&self) {
        self.0.received_at.store(self.0.ticks.now(), Relaxed);
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Relaxed);
    }
}
