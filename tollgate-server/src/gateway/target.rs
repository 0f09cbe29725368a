//! One upstream: where it is, how it fares, and the connections that wait for its next request.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard as StdMutexGuard, PoisonError};
use std::time::Duration;

use http::header::HOST;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, StatusCode, Uri, Version};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};
use tollgate::rules::file::internal::EjectRule;

use super::addresses::HostAddresses;
use super::connect::Exhausted;
use super::fault::Fault;
use super::http1_conn::Http1Conn;
use super::http2_pool::Http2Pool;
use super::lane::LaneConn;
use super::reuse::{Origin, Repeatable, ReusePolicy};
use super::ticks::{Tick, Wait};
use super::upstream_slots::Evicted;
use super::upstream_tls::UpstreamTls;

/// Idle connections that a worker keeps to one upstream. More of them would hold memory on both sides for nothing.
const MAX_IDLE: usize = 256;

/// What tells one target from another: a route that names the same again shares it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct UpstreamAddress {
    pub(super) scheme: UpstreamProtocol,
    pub(super) host: String,
    pub(super) port: u16,
    /// What the file of it said.
    pub(super) ca: Option<Vec<u8>>,
    pub(super) server_name: Option<String>,
}

/// What is spoken with an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum UpstreamProtocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, which the upstream is known to speak.
    Http2,
    /// TLS, and in it what both sides agree on.
    Tls,
}

/// An upstream.
pub(super) struct Target {
    pub(super) address: UpstreamAddress,
    pub(super) authority: Authority,
    pub(super) host: HeaderValue,
    pub(super) addresses: Arc<HostAddresses>,
    pub(super) tls: Option<UpstreamTls>,
    /// For each worker its own, so that no connection is handed from one to another.
    http1_conns: Box<[Mutex<Vec<Http1Conn>>]>,
    /// The same for the lane.
    #[expect(clippy::vec_box, reason = "every request takes one and gives it back")]
    lane_conns: Box<[Mutex<Vec<Box<LaneConn>>>]>,
    http2_pools: Box<[Http2Pool]>,
    /// Whoever opens a connection that is to be shared; others wait for it.
    opening: Box<[AsyncMutex<()>]>,
    /// Requests under way.
    active: AtomicU32,
    health: Health,
}

/// How an upstream fares.
#[derive(Debug, Default)]
struct Health {
    /// In a row.
    failures: AtomicU32,
    /// Until when it is left alone.
    ejected_until: AtomicU64,
    /// What brought that about, until somebody has asked.
    cause: Mutex<Option<Cause>>,
    /// Whether people were told that it is left alone, and not yet that it no longer is.
    ejection_logged: AtomicBool,
    /// Whether no request has succeeded since it was ejected last.
    unproven: AtomicBool,
    /// Whether one was sent there since, because the route had no well one among several.
    tried_while_ejected: AtomicBool,
    /// Whether it has passed a check since the end of that ejection.
    rechecked: AtomicBool,
    /// Whether checks say that it is not well.
    fails_checks: AtomicBool,
    /// What the gateway lacked for a connection to it, until somebody has asked.
    exhausted: Mutex<Option<Exhausted>>,
}

/// What people are to be told of an upstream that requests found bad.
#[derive(Debug)]
pub(super) enum Ejection {
    Began(Cause),
    Ended,
}

/// When an upstream is left alone, as a route sets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Eject {
    pub(super) after: u32,
    pub(super) lasts: Duration,
    /// Statuses that count as failures: one bit for each from 500 on.
    statuses: u128,
}

impl Eject {
    pub(super) fn new(rule: &EjectRule) -> Self {
        let bits = rule.statuses.iter().filter_map(|status| status_bit(*status));
        Self { after: rule.after, lasts: rule.lasts.duration(), statuses: bits.fold(0, |all, bit| all | bit) }
    }

    /// Whether an answer of that status is a failure of the upstream.
    pub(super) fn counts(&self, status: StatusCode) -> bool {
        status_bit(status.as_u16()).is_some_and(|bit| self.statuses & bit != 0)
    }
}

fn status_bit(status: u16) -> Option<u128> {
    1u128.checked_shl(status.checked_sub(500)?.into())
}

/// Why an upstream is left alone.
#[derive(Debug)]
pub(super) struct Cause {
    /// So many failures, and for how long.
    pub(super) rule: Eject,
    /// What the last of them was.
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
        let lane_conns = (0..workers).map(|_| Mutex::default()).collect();
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
            lane_conns,
            http2_pools,
            opening,
            active: AtomicU32::new(0),
            health: Health::default(),
        })
    }

    /// Makes the target of a request whole, as HTTP/2 wants it. Its host stays the one it names.
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

    /// A connection that can take a request at once.
    pub(super) fn take_idle(&self, worker: usize, now: Tick, policy: &ReusePolicy) -> Option<Http1Conn> {
        let mut http1_conns = self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        // The one used last is the least likely to be closed by now. One that is not ready still sends a body that its
        // upstream did not wait for.
        for at in (0..http1_conns.len()).rev() {
            let is_reusable =
                http1_conns[at].allows_another(now, policy) && http1_conns[at].is_current(&self.addresses);
            if !http1_conns[at].is_open() || !is_reusable {
                http1_conns.remove(at);
            } else if http1_conns[at].is_ready() {
                return Some(http1_conns.remove(at));
            }
        }
        None
    }

    /// Whether a connection is kept, open or not.
    pub(super) fn has_kept(&self, worker: usize) -> bool {
        self.http2_pools[worker].has_connections()
            || !self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(super) fn keep_conn(&self, worker: usize, mut conn: Http1Conn, now: Tick, policy: &ReusePolicy) {
        if !conn.is_open() || !conn.become_idle(now, policy) || !conn.is_current(&self.addresses) {
            return;
        }
        let mut http1_conns = self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if http1_conns.len() < MAX_IDLE {
            http1_conns.push(conn);
        }
    }

    /// A connection of the lane that can take a request at once.
    pub(super) fn take_lane_conn(
        &self,
        worker: usize,
        now: Tick,
        policy: &ReusePolicy,
        repeatable: Repeatable,
    ) -> Option<Box<LaneConn>> {
        let mut lane_conns = self.lane_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        // The one used last is the least likely to be closed by now.
        let mut last = std::iter::from_fn(|| lane_conns.pop());
        last.find_map(|mut conn| {
            let is_current = conn.usage.is_current(&self.addresses);
            (is_current && conn.can_take_request(now, policy, repeatable)).then_some(conn)
        })
    }

    pub(super) fn keep_lane_conn(&self, worker: usize, mut conn: Box<LaneConn>, now: Tick, policy: &ReusePolicy) {
        if !conn.become_idle(now, policy) || !conn.usage.is_current(&self.addresses) {
            return;
        }
        let mut lane_conns = self.lane_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if lane_conns.len() < MAX_IDLE {
            lane_conns.push(conn);
        }
    }

    /// Returns the number of workers that have connections to it.
    pub(super) fn workers(&self) -> usize {
        self.lane_conns.len()
    }

    /// Closes the connection of a worker that has been idle for longest, if one is idle.
    pub(super) fn evict_idle(&self, worker: usize) -> Evicted {
        let mut lane_conns = self.lane_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if !lane_conns.is_empty() {
            drop(lane_conns.remove(0));
            return Evicted::Closed;
        }
        drop(lane_conns);
        let mut http1_conns = self.http1_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = http1_conns.iter().position(|conn| conn.is_ready() || !conn.is_open()) {
            drop(http1_conns.remove(at));
            return Evicted::Closing;
        }
        drop(http1_conns);
        if self.http2_pools[worker].evict_idle() { Evicted::Closing } else { Evicted::Nothing }
    }

    /// Closes what the upstream has closed, and what has waited for too long, and resolves the host's name again while
    /// there are connections to it. Connections of hyper for one request at a time close themselves.
    pub(super) fn sweep(&self, worker: usize, now: Tick) {
        let mut lane_conns = self.lane_conns[worker].lock().unwrap_or_else(PoisonError::into_inner);
        lane_conns.retain_mut(|conn| conn.is_worth_keeping(now) && conn.usage.is_current(&self.addresses));
        let is_in_use = !lane_conns.is_empty() || self.has_kept(worker) || self.active() > 0;
        drop(lane_conns);
        self.http2_pools[worker].sweep(now);
        if is_in_use {
            self.addresses.refresh(now);
        }
    }

    /// What a new connection to that address of the host has to remember of it.
    pub(super) fn origin(&self, ip: IpAddr) -> Origin {
        Origin { ip, generation: self.addresses.generation() }
    }

    /// The connections that requests of a worker share, if it is HTTP/2.
    pub(super) fn http2_pool(&self, worker: usize) -> &Http2Pool {
        &self.http2_pools[worker]
    }

    /// The turn to open a connection, where it will be shared.
    pub(super) async fn opening_turn(&self, worker: usize) -> Option<MutexGuard<'_, ()>> {
        let speaks_http2 = || self.http2_pools[worker].speaks_http2();
        if self.address.scheme == UpstreamProtocol::Http2
            || self.address.scheme == UpstreamProtocol::Tls && speaks_http2()
        {
            Some(self.opening[worker].lock().await)
        } else {
            None
        }
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

    /// Whether it is well as people are told: one whose ejection is over gets requests again, but whether it is well is
    /// known once one of them has succeeded.
    pub(super) fn is_proven_healthy(&self, now: Tick) -> bool {
        self.is_healthy(now) && !self.health.unproven.load(Relaxed)
    }

    /// Whether it answers as far as is known: a request that has succeeded since it was ejected will do, and a check that was
    /// passed after the ejection. Nobody need be woken for a route that is served, or that nobody asks for. Lines wait for
    /// more, as those about one that passes its checks and fails requests would never end.
    pub(super) fn is_likely_healthy(&self, now: Tick) -> bool {
        let Health { unproven, rechecked, .. } = &self.health;
        let answers = !unproven.load(Relaxed) || rechecked.load(Relaxed) && !self.is_ejected(now);
        self.passes_checks() && answers
    }

    /// What checks have found.
    pub(super) fn passes_checks(&self) -> bool {
        !self.health.fails_checks.load(Relaxed)
    }

    pub(super) fn set_healthy(&self, healthy: bool) {
        self.health.fails_checks.store(!healthy, Relaxed);
    }

    /// It has passed a check that began when it was not ejected.
    pub(super) fn passed_check(&self, now: Tick) {
        if self.health.unproven.load(Relaxed) && !self.is_ejected(now) {
            self.health.rechecked.store(true, Relaxed);
        }
    }

    pub(super) fn succeeded(&self) {
        // A store that changes nothing would still take the line from other processors.
        if self.health.failures.load(Relaxed) != 0 {
            self.health.failures.store(0, Relaxed);
        }
        if self.health.unproven.load(Relaxed) {
            // Where others are well, and where there are no others, nothing would be better for it.
            if self.health.tried_while_ejected.load(Relaxed) {
                self.health.ejected_until.store(0, Relaxed);
            }
            self.health.unproven.store(false, Relaxed);
        }
    }

    /// A request is about to be sent there, chosen among several.
    pub(super) fn note_tried(&self, now: Tick) {
        if self.is_ejected(now) {
            self.health.tried_while_ejected.store(true, Relaxed);
        }
    }

    /// Counts a failure of the upstream. A failure of the gateway is not counted, but reported.
    pub(super) fn failed(&self, fault: &Fault, rule: &Eject, now: Tick) {
        if let Some(exhausted) = fault.exhausted() {
            return self.note_exhausted(exhausted);
        }
        if self.health.failures.fetch_add(1, Relaxed) + 1 >= rule.after {
            self.health.failures.store(0, Relaxed);
            self.health.ejected_until.store(Wait::at_least(rule.lasts).from(now), Relaxed);
            self.health.unproven.store(true, Relaxed);
            self.health.tried_while_ejected.store(false, Relaxed);
            self.health.rechecked.store(false, Relaxed);
            // Workers whose requests fail all the time need not meet here for what nobody will be told.
            if !self.health.ejection_logged.load(Relaxed) {
                *self.cause() = Some(Cause { rule: *rule, fault: fault.to_string() });
            }
        }
    }

    /// Notes what the gateway lacked for a connection.
    pub(super) fn note_exhausted(&self, exhausted: Exhausted) {
        *self.health.exhausted.lock().unwrap_or_else(PoisonError::into_inner) = Some(exhausted);
    }

    /// What the gateway has lacked for a connection since this was asked last.
    pub(super) fn take_exhausted(&self) -> Option<Exhausted> {
        self.health.exhausted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn cause(&self) -> StdMutexGuard<'_, Option<Cause>> {
        self.health.cause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_ejected(&self, now: Tick) -> bool {
        self.health.ejected_until.load(Relaxed) > now
    }

    /// What is new since this was asked last. Ejections that follow each other without a success are one: one that is dead
    /// is tried now and then, and nobody wants to read of every try.
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
