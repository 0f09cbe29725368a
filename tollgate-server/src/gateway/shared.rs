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
pub(super) const UNSAID: usize = 0;

/// How often it is looked whether it has. Nothing tells.
const LOOK_EVERY: Duration = Duration::from_millis(2);

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
pub(super) struct Shared {
    carriers: Mutex<Vec<(Sender, Arc<Carrier>)>>,
    /// There has been one.
    is_spoken: AtomicBool,
}

/// A connection, and how much it carries.
struct Carrier {
    requests: AtomicUsize,
    /// Requests that it was used for, ended or not, are counted in it.
    usage: Mutex<Usage>,
    /// When it was first seen to carry nothing.
    quiet_since: AtomicU64,
    driven: Mutex<Driven>,
}

/// What becomes of a connection.
enum Driven {
    /// Only the connection knows what the upstream allows.
    On(Connection),
    /// Why, if it broke.
    Over(Option<hyper::Error>),
}

/// A request's place on a connection.
pub(super) struct Seat(Arc<Carrier>);

impl Shared {
    /// Returns whether there are connections, open or not yet seen to be closed.
    pub(super) fn has_connections(&self) -> bool {
        !self.carriers().is_empty()
    }

    /// Whether the upstream is known to speak HTTP/2.
    pub(super) fn is_spoken(&self) -> bool {
        self.is_spoken.load(Relaxed)
    }

    /// A place for a request; none if there should be another connection.
    pub(super) fn seat(&self, now: Tick, policy: &ReusePolicy, addresses: &HostAddresses) -> Option<(Sender, Seat)> {
        let mut carriers = self.carriers();
        // One that takes no further requests ends with those that it carries.
        carriers.retain(|(sender, carrier)| {
            let mut usage = carrier.usage();
            !sender.is_closed() && usage.is_young(now, policy) && usage.is_current(addresses)
        });
        // The first that has room, so that those that are not needed any more become quiet.
        let found = carriers.iter().find(|(_, carrier)| carrier.has_room());
        let found = match found {
            None if carriers.len() >= MAX_CONNECTIONS => {
                carriers.iter().min_by_key(|(_, carrier)| carrier.requests.load(Relaxed))
            }
            found => found,
        };
        found.map(|(sender, carrier)| (sender.clone(), Seat::on(carrier)))
    }

    /// Drives a new connection, and shares it if it is needed. It is the caller's to use in any case, unless it
    /// ends before the upstream has said how many requests it takes.
    pub(super) async fn add(
        &self,
        sender: Sender,
        connection: Connection,
        usage: Usage,
    ) -> Result<(Sender, Seat), ConnectError> {
        let carrier = Arc::new(Carrier {
            requests: AtomicUsize::new(0),
            usage: Mutex::new(usage),
            quiet_since: AtomicU64::new(NEVER),
            driven: Mutex::new(Driven::On(connection)),
        });
        let driven = Arc::clone(&carrier);
        tokio::spawn(async move { driven.drive().await });
        // It is the first thing that an upstream sends. More requests than that would be refused.
        while carrier.allowed().ok_or_else(|| carrier.why_over())? == UNSAID {
            sleep(LOOK_EVERY).await;
        }
        self.is_spoken.store(true, Relaxed);
        let seat = Seat::on(&carrier);
        let mut carriers = self.carriers();
        // Where several were opened at once, one is enough.
        if carriers.len() < MAX_CONNECTIONS && !carriers.iter().any(|(_, other)| other.has_room()) {
            carriers.push((sender.clone(), carrier));
        }
        Ok((sender, seat))
    }

    /// Lets go of connections that nobody has needed for a while, but for one.
    pub(super) fn sweep(&self, now: Tick) {
        let mut is_first = true;
        self.carriers().retain(|(sender, carrier)| {
            !sender.is_closed() && (std::mem::take(&mut is_first) || !carrier.is_left_over(now))
        });
    }

    /// Closes a connection without requests. Returns whether there was one.
    pub(super) fn evict_idle(&self) -> bool {
        let mut carriers = self.carriers();
        let idle = carriers.iter().position(|(_, carrier)| carrier.requests.load(Relaxed) == 0);
        idle.map(|at| carriers.remove(at)).is_some()
    }

    fn carriers(&self) -> MutexGuard<'_, Vec<(Sender, Arc<Carrier>)>> {
        self.carriers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Carrier {
    /// How many requests the upstream takes at a time, as long as the connection is there.
    fn allowed(&self) -> Option<usize> {
        match &*self.driven() {
            Driven::On(connection) => Some(connection.current_max_send_streams()),
            Driven::Over(_) => None,
        }
    }

    fn why_over(&self) -> ConnectError {
        let why = match &mut *self.driven() {
            Driven::Over(why) => why.take(),
            Driven::On(_) => None,
        };
        why.map_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted).into(), ConnectError::from)
    }

    fn has_room(&self) -> bool {
        // Where none is allowed any more, another connection would not get more.
        self.allowed().is_some_and(|allowed| self.requests.load(Relaxed) < allowed.clamp(1, MAX_REQUESTS))
    }

    /// Whether it has been without requests for long.
    fn is_left_over(&self, now: Tick) -> bool {
        if self.requests.load(Relaxed) > 0 {
            return false;
        }
        let since = self.quiet_since.load(Relaxed).min(now);
        self.quiet_since.store(since, Relaxed);
        Wait::at_least(SPARE_FOR).from(since) <= now
    }

    /// How it ends is told to whoever waits for an answer.
    async fn drive(&self) {
        let ended = poll_fn(|context| match &mut *self.driven() {
            Driven::On(connection) => Pin::new(connection).poll(context),
            Driven::Over(_) => Poll::Ready(Ok(())),
        });
        let ended = ended.await;
        *self.driven() = Driven::Over(ended.err());
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn driven(&self) -> MutexGuard<'_, Driven> {
        self.driven.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    fn on(carrier: &Arc<Carrier>) -> Self {
        carrier.requests.fetch_add(1, Relaxed);
        carrier.usage().note_request();
        carrier.quiet_since.store(NEVER, Relaxed);
        Self(Arc::clone(carrier))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Relaxed);
    }
}
