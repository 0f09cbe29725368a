//! One upstream: its address, its health, and its idle connections.

pub(super) mod abandoned;
pub(super) mod addresses;
pub(super) mod conn;
pub(super) mod connect;
pub(super) mod health;
pub(super) mod http2_pool;
pub(super) mod tls;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard as StdMutexGuard, PoisonError};
use std::time::Duration;

use http::header::HOST;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, StatusCode, Uri, Version};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};
use tollgate::rules::file::internal::EjectRule;

use self::addresses::HostAddresses;
use self::conn::{Http1Conn, Origin, Repeatable, ReusePolicy};
use self::connect::Evicted;
use self::http2_pool::Http2Pool;
use self::tls::{TlsIdentity, UpstreamTls};
use super::deadline::{Tick, Ticks, Wait};
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
    health: Health,
}

/// The health of an upstream.
#[derive(Debug, Default)]
struct Health {
    /// Consecutive failures.
    failures: AtomicU32,
    /// The statuses that a route has counted as failures since the last success: one bit for each from 500 on.
    failed_statuses: [AtomicU64; 2],
    /// The end of the ejection.
    ejected_until: AtomicU64,
    /// The cause of the last ejection, until it is logged.
    cause: Mutex<Option<Cause>>,
    /// Whether the ejection was logged, and its end was not.
    ejection_logged: AtomicBool,
    /// Whether no request has succeeded since the last ejection.
    unproven: AtomicBool,
    /// Whether a request was sent during the ejection, because no upstream of its route was healthy.
    tried_while_ejected: AtomicBool,
    /// Whether a health check has succeeded since the end of the ejection.
    rechecked: AtomicBool,
    /// Whether health checks fail.
    fails_checks: AtomicBool,
    /// The resource that the gateway lacked for a connection, until it is logged.
    exhausted: Mutex<Option<Exhausted>>,
}

impl Health {
    /// Returns the word and the bit of a status from 500 on.
    fn status_word(&self, status: StatusCode) -> Option<(&AtomicU64, u64)> {
        let bit = status_bit(status.as_u16())?.trailing_zeros();
        Some((self.failed_statuses.get(bit as usize / 64)?, 1 << (bit % 64)))
    }

    fn has_failed_with(&self, status: StatusCode) -> bool {
        self.status_word(status).is_some_and(|(word, bit)| word.load(Relaxed) & bit != 0)
    }

    fn note_status(&self, status: StatusCode) {
        if let Some((word, bit)) = self.status_word(status) {
            word.fetch_or(bit, Relaxed);
        }
    }

    fn forget_statuses(&self) {
        self.failed_statuses.iter().for_each(|word| word.store(0, Relaxed));
    }
}

/// A change of an ejection, to be logged.
#[derive(Debug)]
pub(super) enum Ejection {
    Began(Cause),
    Ended,
}

/// The ejection settings of a route.
#[derive(Clone, Copy, Debug)]
pub(super) struct Eject {
    pub(super) after: u32,
    pub(super) lasts: Duration,
    /// The statuses that count as failures: one bit for each from 500 on.
    statuses: u128,
}

impl Eject {
    pub(super) fn new(rule: &EjectRule) -> Self {
        let bits = rule.statuses.iter().filter_map(|status| status_bit(*status));
        Self { after: rule.after, lasts: rule.lasts.duration(), statuses: bits.fold(0, |all, bit| all | bit) }
    }

    /// Returns whether a response with that status is a failure of the upstream.
    pub(super) fn counts(&self, status: StatusCode) -> bool {
        status_bit(status.as_u16()).is_some_and(|bit| self.statuses & bit != 0)
    }
}

fn status_bit(status: u16) -> Option<u128> {
    1u128.checked_shl(status.checked_sub(500)?.into())
}

/// The cause of an ejection.
#[derive(Debug)]
pub(super) struct Cause {
    /// The number of failures, and the duration.
    pub(super) rule: Eject,
    /// The description of the last failure.
    pub(super) fault: String,
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
            health: Health::default(),
        })
    }

    /// Sets the full target that HTTP/2 needs. The host stays the one in the `Host` header.
    pub(super) fn set_http2_target<B>(&self, request: &mut Request<B>) {
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
        if http1_conns.len() < MAX_IDLE {
            http1_conns.push(conn);
        }
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
        if self.speaks_http2(worker) { Some(self.opening[worker].lock().await) } else { None }
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

    pub(super) fn is_healthy(&self, now: Tick) -> bool {
        !self.health.fails_checks.load(Relaxed) && !self.is_ejected(now)
    }

    /// Returns whether it is healthy for the log: after an ejection it gets requests again, but one of them has to
    /// succeed first.
    pub(super) fn is_proven_healthy(&self, now: Tick) -> bool {
        self.is_healthy(now) && !self.health.unproven.load(Relaxed)
    }

    /// Returns whether it is healthy for metrics: after an ejection, a successful request or a passed check is enough,
    /// so that no alert fires for a route that works or gets no requests. Log lines need a successful request, as an
    /// upstream that passes checks and fails requests would fill the log.
    pub(super) fn is_likely_healthy(&self, now: Tick) -> bool {
        let Health { unproven, rechecked, .. } = &self.health;
        let answers = !unproven.load(Relaxed) || rechecked.load(Relaxed) && !self.is_ejected(now);
        self.passes_checks() && answers
    }

    /// Returns whether health checks succeed.
    pub(super) fn passes_checks(&self) -> bool {
        !self.health.fails_checks.load(Relaxed)
    }

    pub(super) fn set_healthy(&self, healthy: bool) {
        self.health.fails_checks.store(!healthy, Relaxed);
    }

    /// Records a passed check that started while the upstream was not ejected.
    pub(super) fn passed_check(&self, now: Tick) {
        if self.health.unproven.load(Relaxed) && !self.is_ejected(now) {
            self.health.rechecked.store(true, Relaxed);
        }
    }

    /// Records a response with a status that its route does not count as a failure. Another route may have done so: then it
    /// shows nothing, and that route's count and ejection go on.
    pub(super) fn succeeded(&self, status: StatusCode) {
        if self.health.has_failed_with(status) {
            return;
        }
        // A store that changes nothing would still take the cache line from other processors.
        if self.health.failures.load(Relaxed) != 0 {
            self.health.failures.store(0, Relaxed);
            self.health.forget_statuses();
        }
        if self.health.unproven.load(Relaxed) {
            self.health.forget_statuses();
            // The ejection ends early only if it had no effect: no other upstream was healthy.
            if self.health.tried_while_ejected.load(Relaxed) {
                self.health.ejected_until.store(0, Relaxed);
            }
            self.health.unproven.store(false, Relaxed);
        }
    }

    /// Prepares for other rules, which may count other statuses as failures.
    pub(super) fn forget_failed_statuses(&self) {
        self.health.forget_statuses();
    }

    /// Records that a request is sent to it, chosen among several.
    pub(super) fn note_tried(&self, now: Tick) {
        if self.is_ejected(now) {
            self.health.tried_while_ejected.store(true, Relaxed);
        }
    }

    /// Counts a failure of the upstream. A resource that the gateway lacks is not counted, but logged.
    pub(super) fn failed(&self, fault: &Fault, rule: &Eject, now: Tick) {
        if let Some(exhausted) = fault.exhausted() {
            return self.note_exhausted(exhausted);
        }
        if let Fault::Status(status) = fault {
            self.health.note_status(*status);
        }
        if self.health.failures.fetch_add(1, Relaxed) + 1 >= rule.after {
            self.health.failures.store(0, Relaxed);
            self.health.ejected_until.store(Wait::at_least(rule.lasts).from(now), Relaxed);
            self.health.unproven.store(true, Relaxed);
            self.health.tried_while_ejected.store(false, Relaxed);
            self.health.rechecked.store(false, Relaxed);
            // Otherwise workers whose requests fail all the time would contend for the lock.
            if !self.health.ejection_logged.load(Relaxed) {
                *self.cause() = Some(Cause { rule: *rule, fault: fault.to_string() });
            }
        }
    }

    /// Records a resource that the gateway lacked for a connection.
    pub(super) fn note_exhausted(&self, exhausted: Exhausted) {
        *self.health.exhausted.lock().unwrap_or_else(PoisonError::into_inner) = Some(exhausted);
    }

    /// Returns the resource that the gateway lacked since the last call.
    pub(super) fn take_exhausted(&self) -> Option<Exhausted> {
        self.health.exhausted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn cause(&self) -> StdMutexGuard<'_, Option<Cause>> {
        self.health.cause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_ejected(&self, now: Tick) -> bool {
        self.health.ejected_until.load(Relaxed) > now
    }

    /// Returns the change since the last call. Consecutive ejections without a success are one: a dead upstream is
    /// tried now and then, and the log need not contain every attempt.
    pub(super) fn take_ejection(&self, now: Tick) -> Option<Ejection> {
        let news = self.cause().take();
        if let Some(cause) = news
            && !self.health.ejection_logged.swap(true, Relaxed)
        {
            return Some(Ejection::Began(cause));
        }
        let is_back = !self.health.unproven.load(Relaxed) && !self.is_ejected(now);
        let is_over = is_back && self.health.ejection_logged.load(Relaxed);
        is_over.then(|| {
            self.health.ejection_logged.store(false, Relaxed);
            Ejection::Ended
        })
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
