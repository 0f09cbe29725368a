//! One upstream: its address, its health, and its idle connections.

pub(super) mod abandoned;
pub(super) mod addresses;
pub(super) mod conn;
pub(super) mod connect;
pub(super) mod ejection;
pub(super) mod health;
pub(super) mod http2_pool;
pub(super) mod slots;
pub(super) mod tls;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use http::header::HOST;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, StatusCode, Uri, Version};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};
use tollgate_net::deadline::{Tick, Ticks};

use self::addresses::HostAddresses;
use self::conn::{Http1Conn, Origin, Repeatable, ReusePolicy};
use self::ejection::{EjectPolicy, Ejection};
use self::http2_pool::Http2Pool;
use self::slots::Evicted;
use self::tls::{TlsIdentity, UpstreamTls};
use super::failure::{Exhausted, Fault};

/// The maximum number of idle connections of a worker to one upstream. More would hold memory on both sides for
/// nothing.
const MAX_IDLE: usize = 256;

/// The identity of a target. Routes with the same address share a target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct UpstreamAddress {
    pub(super) scheme: UpstreamProtocol,
    pub(super) host: String,
    pub(super) port: u16,
    pub(in crate::gateway) tls: Option<TlsIdentity>,
}

/// The protocol of an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum UpstreamProtocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
    /// TLS with negotiated HTTP version.
    Tls,
}

/// An upstream.
pub(super) struct Target {
    pub(super) address: UpstreamAddress,
    pub(super) authority: Authority,
    pub(super) host: HeaderValue,
    pub(super) addresses: Arc<HostAddresses>,
    pub(super) tls: Option<UpstreamTls>,
    /// Idle HTTP/1 connections by worker, so that none moves between workers.
    #[expect(clippy::vec_box, reason = "every request takes one and returns it")]
    http1_conns: Box<[Mutex<Vec<Box<Http1Conn>>>]>,
    http2_pools: Box<[Http2Pool]>,
    /// Held while a shared connection is opened, so that other requests wait for it.
    opening: Box<[AsyncMutex<()>]>,
    /// Requests in flight.
    active: AtomicU32,
    /// The failures to connect, for requests of all routes.
    pub(super) connecting: Ejection,
    fails_checks: AtomicBool,
    /// Whether the rules no longer name it. Requests that began before a reload still refer to it.
    is_retired: AtomicBool,
    /// The resource that the gateway lacked for a connection, until it is logged.
    exhausted: Mutex<Option<Exhausted>>,
}

impl Target {
    pub(super) fn new(address: UpstreamAddress, tls: Option<UpstreamTls>, workers: usize) -> Option<Self> {
        let is_default = match address.scheme {
            UpstreamProtocol::Tls => address.port == 443,
            UpstreamProtocol::Http1 | UpstreamProtocol::Http2 => address.port == 80,
        };
        let text = if is_default { address.host.clone() } else { format!("{}:{}", address.host, address.port) };
        let (authority, host) = (text.parse().ok()?, HeaderValue::try_from(&text).ok()?);
        let http1_conns = (0..workers).map(|_| Mutex::default()).collect();
        let http2_pools = (0..workers).map(|_| Http2Pool::default()).collect();
        let opening = (0..workers).map(|_| AsyncMutex::default()).collect();
        let addresses = Arc::new(HostAddresses::new(&address.host, address.port));
        Some(Self {
            addresses,
            address,
            authority,
            host,
            tls,
            http1_conns,
            http2_pools,
            opening,
            active: AtomicU32::new(0),
            connecting: Ejection::default(),
            fails_checks: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
            exhausted: Mutex::default(),
        })
    }

    /// Sets the full target that HTTP/2 needs. The host stays the one in the `Host` header.
    pub(super) fn set_http2_target(&self, request: &mut Request<()>) {
        let host = request.headers_mut().remove(HOST);
        let authority = host.and_then(|host| host.to_str().ok()?.parse().ok());
        let mut parts = request.uri().clone().into_parts();
        parts.scheme = Some(if self.address.scheme == UpstreamProtocol::Tls { Scheme::HTTPS } else { Scheme::HTTP });
        parts.authority = Some(authority.unwrap_or_else(|| self.authority.clone()));
        parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
        *request.version_mut() = Version::HTTP_2;
    }

    /// Returns whether there are shared connections, open or not.
    pub(super) fn has_shared(&self, worker: usize) -> bool {
        self.http2_pools[worker].has_connections()
    }

    /// Takes an idle HTTP/1 connection.
    pub(super) fn take_idle(
        &self,
        worker: usize,
        now: Tick,
        policy: &ReusePolicy,
        repeatable: Repeatable,
    ) -> Option<Box<Http1Conn>> {
        let mut http1_conns = self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        // The most recently used one is the least likely to be closed by now.
        let mut last = std::iter::from_fn(|| http1_conns.pop());
        last.find_map(|mut conn| {
            let is_current = conn.usage.is_current(&self.addresses);
            (is_current && conn.can_take_request(now, policy, repeatable)).then_some(conn)
        })
    }

    pub(super) fn keep_idle(&self, worker: usize, mut conn: Box<Http1Conn>, now: Tick, policy: &ReusePolicy) {
        if !conn.become_idle(now, policy) || !conn.usage.is_current(&self.addresses) {
            return;
        }
        let mut http1_conns = self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if http1_conns.len() < MAX_IDLE && !self.is_retired.load(Relaxed) {
            http1_conns.push(conn);
        }
    }

    /// Closes its idle connections, and those in use after their requests.
    pub(super) fn retire(&self) {
        // Before the locks are taken, so that no connection becomes idle afterwards.
        self.is_retired.store(true, Relaxed);
        for http1_conns in &self.http1_conns {
            http1_conns.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
        self.http2_pools.iter().for_each(Http2Pool::retire);
    }

    /// Returns the number of workers that have connections to it.
    pub(super) fn workers(&self) -> usize {
        self.http1_conns.len()
    }

    /// Closes the connection of a worker that has been idle for longest.
    pub(super) fn evict_idle(&self, worker: usize) -> Evicted {
        let mut http1_conns = self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if !http1_conns.is_empty() {
            drop(http1_conns.remove(0));
            return Evicted::Closed;
        }
        drop(http1_conns);
        if self.http2_pools[worker].evict_idle() { Evicted::Closing } else { Evicted::Nothing }
    }

    /// Drops connections that the upstream has closed or that were idle for too long, and resolves the host's name
    /// again while it is in use.
    pub(super) fn sweep(&self, worker: usize, now: Tick) {
        let mut http1_conns = self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        http1_conns.retain_mut(|conn| conn.is_worth_keeping(now) && conn.usage.is_current(&self.addresses));
        let is_in_use = !http1_conns.is_empty() || self.has_shared(worker) || self.active() > 0;
        drop(http1_conns);
        self.http2_pools[worker].sweep(now);
        if is_in_use {
            self.addresses.refresh(now);
        }
    }

    /// Returns the origin of a new connection to that address.
    pub(super) fn origin(&self, ip: IpAddr) -> Origin {
        Origin { ip, generation: self.addresses.generation() }
    }

    /// Returns the HTTP/2 connections of a worker.
    pub(super) fn http2_pool(&self, worker: usize) -> &Http2Pool {
        &self.http2_pools[worker]
    }

    /// Returns whether it is known to use HTTP/2: by its URL, or because it negotiated that with the worker before.
    pub(super) fn speaks_http2(&self, worker: usize) -> bool {
        match self.address.scheme {
            UpstreamProtocol::Http1 => false,
            UpstreamProtocol::Http2 => true,
            UpstreamProtocol::Tls => self.http2_pools[worker].speaks_http2(),
        }
    }

    /// Waits for the turn to open a connection, if it will be shared.
    pub(super) async fn opening_turn(&self, worker: usize) -> Option<MutexGuard<'_, ()>> {
        // Connections to an upstream that the rules no longer name are not shared.
        let is_shared = self.speaks_http2(worker) && !self.is_retired.load(Relaxed);
        if is_shared { Some(self.opening[worker].lock().await) } else { None }
    }

    pub(super) fn active(&self) -> u32 {
        self.active.load(Relaxed)
    }

    pub(super) fn begin(&self) {
        self.active.fetch_add(1, Relaxed);
    }

    pub(super) fn end(&self) {
        self.active.fetch_sub(1, Relaxed);
    }

    /// Returns whether health checks pass.
    pub(super) fn passes_checks(&self) -> bool {
        !self.fails_checks.load(Relaxed)
    }

    pub(super) fn set_passes_checks(&self, passes: bool) {
        self.fails_checks.store(!passes, Relaxed);
    }

    /// Records a resource that the gateway lacked for a connection.
    pub(super) fn note_exhausted(&self, exhausted: Exhausted) {
        *self.exhausted.lock().unwrap_or_else(PoisonError::into_inner) = Some(exhausted);
    }

    /// Returns the resource that the gateway lacked since the last call.
    pub(super) fn take_exhausted(&self) -> Option<Exhausted> {
        self.exhausted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The numbers of ejections that concern a route: for its own failures, and for failures to connect.
pub(super) type EjectionCounts = [u32; 2];

/// An upstream with the settings of one route.
pub(super) struct RouteUpstream {
    pub(super) target: Arc<Target>,
    pub(super) weight: u32,
    /// The path of its URL, which is prepended to the request's. URLs that differ only in the path share a target.
    pub(super) prefix: Option<String>,
    pub(super) eject: EjectPolicy,
    /// The failures of this route's requests, except for those to connect.
    pub(super) ejection: Arc<Ejection>,
}

impl RouteUpstream {
    /// Returns the failures that concern the route.
    fn ejections(&self) -> [&Ejection; 2] {
        [&self.ejection, &self.target.connecting]
    }

    pub(super) fn is_ejected(&self, now: Tick) -> bool {
        self.ejections().into_iter().any(|ejection| ejection.is_ejected(now))
    }

    pub(super) fn is_healthy(&self, now: Tick) -> bool {
        self.target.passes_checks() && !self.is_ejected(now)
    }

    /// Returns whether a request has succeeded since the last ejection, if there was one.
    pub(super) fn is_proven(&self) -> bool {
        self.ejections().into_iter().all(Ejection::is_proven)
    }

    /// Returns whether it is healthy for metrics: after an ejection, a successful request or a passed check is enough,
    /// so that no alert fires for a route that works or gets no requests. Log lines need a successful request, as an
    /// upstream that passes checks and fails requests would fill the log.
    pub(super) fn is_likely_healthy(&self) -> bool {
        self.target.passes_checks() && self.ejections().into_iter().all(Ejection::is_likely_over)
    }

    /// Counts a failure of the upstream. A resource that the gateway lacks is not counted, but logged.
    pub(super) fn note_failure(&self, fault: &Fault, now: Tick) {
        match (fault.exhausted(), fault) {
            (Some(exhausted), _) => self.target.note_exhausted(exhausted),
            (None, Fault::Unreached(_)) => self.target.connecting.note_failure(fault, &self.eject, now),
            (None, _) => self.ejection.note_failure(fault, &self.eject, now),
        }
    }

    /// Records the head of a response, which is a failure if the route counts its status.
    pub(super) fn note_head(&self, status: StatusCode, now: Tick) {
        if self.eject.counts(status) {
            self.note_failure(&Fault::Status(status), now);
        }
    }

    /// Records the end of a response, which is a success unless the route counts its status as a failure.
    pub(super) fn note_end(&self, status: StatusCode, sent_after: EjectionCounts) {
        if !self.eject.counts(status) {
            self.ejections().into_iter().zip(sent_after).for_each(|(ejection, count)| ejection.note_success(count));
        }
    }

    /// Returns the ejections so far, for the attempt of a request.
    pub(super) fn ejection_counts(&self) -> EjectionCounts {
        self.ejections().map(Ejection::count)
    }
}

/// The pool that a connection returns to after its response.
pub(super) struct ConnPool {
    pub(super) target: Arc<Target>,
    pub(super) worker: usize,
    pub(super) policy: ReusePolicy,
    pub(super) ticks: Arc<Ticks>,
}

impl ConnPool {
    /// Keeps a connection for the next request.
    pub(super) fn keep(&self, conn: Box<Http1Conn>) {
        self.target.keep_idle(self.worker, conn, self.ticks.now(), &self.policy);
    }
}
