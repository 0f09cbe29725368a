//! The state of a client connection, shared by everything that serves it.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use http::HeaderValue;
use hyper::body::Body;
use tollgate_http1::Ambiguity;
use tollgate_net::deadline::{NEVER, Tick, Ticks, Wait};
use tollgate_rules::{Certificate, Facts};

use super::buffer_budget::{Overloaded, STEP_BYTES};
use super::deadline::ClientTimeouts;
use super::failure::Misuse;
use super::per_address;
use super::tally::Tally;
use tollgate_net::proxy_protocol::Caller;
use tollgate_net::stream::{INPUT_BYTES, LINGER};

/// The age after which a reset of a request is not premature: clients end event streams and gRPC watches this way.
/// Envoy's `premature_reset_min_stream_lifetime_seconds` has the same default.
const MIN_MATURE_NANOS: u64 = 1_000_000_000;

/// How much of a request body is received while the upstream does not read: enough for a megabyte per second around the
/// world.
pub(super) const STREAM_WINDOW_BYTES: u32 = 128 << 10;

/// How much of each response is buffered while the client does not read: two frames, so that one is available while
/// another is written.
pub(super) const SEND_BUFFER_BYTES: usize = 32 << 10;

/// How much of an upload is buffered while the upstream does not read: the window and the send buffer.
const MAX_UPLOAD_BYTES: usize = STREAM_WINDOW_BYTES as usize + SEND_BUFFER_BYTES;

/// A client connection and its deadlines.
pub(super) struct Client {
    /// The address of the client, or that of a load balancer that does not name its client, for logs.
    pub(super) nearest: IpAddr,
    /// The address of the client, if it is known.
    pub(super) address: Option<IpAddr>,
    /// The address as text, for headers.
    pub(super) address_text: HeaderValue,
    /// The slot among the connections of its address. Held until nothing refers to the connection.
    #[expect(dead_code, reason = "dropping it frees the slot")]
    entered: Option<per_address::Counted>,
    pub(super) scheme: Scheme,
    /// Boxed, because few clients have one.
    certificate: Option<Box<Certificate>>,
    is_trusted_proxy: bool,
    pub(super) max_head: usize,
    pub(super) timeouts: ClientTimeouts,
    /// Set before the first request.
    is_http2: AtomicBool,
    /// The deadline for the next request.
    request_by: AtomicU64,
    /// The deadline for the client to read.
    read_by: AtomicU64,
    /// Requests in flight. Only the thread of the connection's worker changes it.
    active: AtomicU32,
    resets: Resets,
    is_misusing: AtomicBool,
    /// Whether an HTTP/2 connection has read enough until its task is polled again.
    is_turn_over: AtomicBool,
    /// Whether an HTTP/2 client is asked to close the connection.
    is_ending: AtomicBool,
    /// When the last bytes of HTTP/2 arrived.
    received_at: AtomicU64,
    pub(super) ticks: Arc<Ticks>,
    /// The counters of its worker.
    pub(super) tally: Arc<Tally>,
    /// Bytes of bodies that are buffered for this connection.
    buffered: AtomicI64,
    /// The reason why its bytes were refused, if they were.
    ambiguity: OnceLock<Ambiguity>,
}

/// The result of checking the deadlines.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expired {
    /// The connection has to be closed.
    Close,
    /// No request arrived in time.
    NoRequest,
    /// This is the next deadline.
    NotYet { at: Tick },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    Http,
    Https,
}

impl Scheme {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

impl Client {
    /// Creates the state of a connection. It uses HTTP/1 until [`use_http2`](Self::use_http2).
    pub(super) fn new(
        (caller, entered): (Caller, Option<per_address::Counted>),
        (scheme, certificate): (Scheme, Option<Box<Certificate>>),
        (is_trusted_proxy, max_head, timeouts): (bool, usize, ClientTimeouts),
        (ticks, tally): (Arc<Ticks>, Arc<Tally>),
    ) -> Self {
        let address = match caller {
            Caller::At(address) => Some(address.ip()),
            Caller::Unknown { .. } => None,
        };
        // An IP address is always a valid header value.
        let address_text = address.and_then(|address| HeaderValue::try_from(address.to_canonical().to_string()).ok());
        Self {
            nearest: caller.nearest().ip(),
            address,
            address_text: address_text.unwrap_or(HeaderValue::from_static("unknown")),
            entered,
            scheme,
            certificate,
            is_trusted_proxy,
            max_head,
            timeouts,
            is_http2: AtomicBool::new(false),
            request_by: AtomicU64::new(NEVER),
            read_by: AtomicU64::new(NEVER),
            active: AtomicU32::new(0),
            resets: Resets::default(),
            is_misusing: AtomicBool::new(false),
            is_turn_over: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            received_at: AtomicU64::new(0),
            ticks,
            tally,
            buffered: AtomicI64::new(0),
            ambiguity: OnceLock::new(),
        }
    }

    /// Records that the client uses HTTP/2, and sets the deadline for its first request. HTTP/2 has frames that belong to
    /// no request, so only the idle timeout applies. The server of HTTP/1 has its own deadlines.
    pub(super) fn use_http2(&self) {
        self.is_http2.store(true, Relaxed);
        self.await_request();
    }

    pub(super) fn is_http2(&self) -> bool {
        self.is_http2.load(Relaxed)
    }

    /// Returns its address and certificate, for limits.
    pub(super) fn peer(&self) -> Peer<'_> {
        Peer { address: self.address, certificate: self.certificate.as_deref() }
    }

    /// Checks all deadlines.
    pub(super) fn check_deadlines(&self) -> Expired {
        match self.next_deadline() {
            at if at > self.ticks.now() => Expired::NotYet { at },
            _ if self.read_by.load(Relaxed) == NEVER => Expired::NoRequest,
            _ => Expired::Close,
        }
    }

    /// Returns the deadline in force: that for reading while bytes wait for the client, otherwise that for the next
    /// request. A request ends when h2 takes its response, which may not be written yet.
    pub(super) fn next_deadline(&self) -> Tick {
        match self.read_by.load(Relaxed) {
            NEVER => self.request_by.load(Relaxed),
            read_by => read_by,
        }
    }

    /// Records that the client is asked to close the connection. It has a moment for requests that are on their way.
    pub(super) fn note_ending(&self) {
        self.is_ending.store(true, Relaxed);
        if self.requests() == 0 {
            self.await_request();
        }
    }

    /// Sets the deadline for the next request of a client that has none.
    fn await_request(&self) {
        let wait = if self.is_ending.load(Relaxed) { Wait::at_least(LINGER) } else { self.timeouts.idle };
        self.request_by.store(self.ticks.after(wait), Relaxed);
    }

    /// Records that bytes of HTTP/2 have arrived.
    pub(super) fn note_received(&self) {
        self.received_at.store(self.ticks.now(), Relaxed);
    }

    /// Returns when the last bytes of HTTP/2 arrived.
    pub(super) fn received_at(&self) -> Tick {
        self.received_at.load(Relaxed)
    }

    /// Records whether the client reads.
    pub(super) fn wrote(&self, some: bool) {
        if !some {
            self.set_read_by(self.timeouts.write);
        } else if self.read_by.load(Relaxed) != NEVER {
            self.read_by.store(NEVER, Relaxed);
            if self.requests() == 0 {
                // It gets the last response only now.
                self.await_request();
            }
        }
    }

    /// Sets the deadline for a client that may continue to send after its last response.
    pub(super) fn start_linger(&self) {
        self.set_read_by(Wait::at_least(LINGER));
    }

    fn set_read_by(&self, wait: Wait) {
        if self.read_by.load(Relaxed) == NEVER {
            self.read_by.store(self.ticks.after(wait), Relaxed);
        }
    }

    /// Returns the number of requests in flight on this connection.
    pub(super) fn requests(&self) -> u32 {
        self.active.load(Relaxed)
    }

    /// Records that a head is complete.
    pub(super) fn request_began(&self) {
        self.active.store(self.requests() + 1, Relaxed);
        self.request_by.store(NEVER, Relaxed);
    }

    /// Records the end of a response.
    pub(super) fn request_ended(&self) {
        let left = self.requests().saturating_sub(1);
        self.active.store(left, Relaxed);
        if left == 0 {
            self.await_request();
        }
    }

    /// Counts an HTTP/2 request that ended after `nanos`. Trusted proxies pass on the resets of many clients, so theirs
    /// are not counted.
    pub(super) fn note_request_over(&self, is_reset: bool, nanos: u64) {
        if self.is_http2() && !self.is_trusted_proxy && (!is_reset || nanos < MIN_MATURE_NANOS) {
            self.resets.note(!is_reset, self.ticks.now());
        }
    }

    /// Returns whether the client has reset too many requests.
    pub(super) fn resets_too_much(&self) -> bool {
        self.resets.are_too_many()
    }

    /// Counts and logs, once, that the connection is closed because of misuse.
    pub(super) fn note_misuse(&self, misuse: Misuse) {
        if !self.is_misusing.swap(true, Relaxed) {
            self.tally.note_closed(misuse, self.nearest.to_canonical(), self.ticks.now());
        }
    }

    /// Returns whether the client misuses the connection, which has to be closed.
    pub(super) fn is_misusing(&self) -> bool {
        self.is_misusing.load(Relaxed)
    }

    /// Records that the task of the connection is polled, and may read.
    pub(super) fn begin_turn(&self) {
        self.is_turn_over.store(false, Relaxed);
    }

    /// Records that the connection has read enough, until [`begin_turn`](Self::begin_turn).
    pub(super) fn end_turn(&self) {
        self.is_turn_over.store(true, Relaxed);
    }

    pub(super) fn is_turn_over(&self) -> bool {
        self.is_turn_over.load(Relaxed)
    }

    /// Returns the timeout for the next part of a body of HTTP/2. An HTTP/1 connection enforces its own.
    pub(super) fn body_timeout(&self) -> Option<Wait> {
        self.is_http2().then_some(self.timeouts.body)
    }

    /// Returns the maximum number of bytes that are buffered of a request body while the upstream does not read: at
    /// most the length of the body, if it is known.
    pub(super) fn upload_bytes(&self, body: &impl Body) -> usize {
        let most = if self.is_http2() { MAX_UPLOAD_BYTES } else { INPUT_BYTES };
        body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok()).map_or(most, |bytes| bytes.min(most))
    }

    pub(super) fn note_ambiguity(&self, ambiguity: Ambiguity) {
        self.tally.ambiguous.note(ambiguity);
        _ = self.ambiguity.set(ambiguity);
    }

    /// Returns the reason why its bytes were refused as ambiguous, if they were.
    pub(super) fn ambiguity(&self) -> Option<&'static str> {
        self.ambiguity.get()?.reason()
    }
}

/// Requests that an HTTP/2 client has reset prematurely, in excess of those that it let finish.
///
/// A reset costs a client one small frame, and the gateway and the upstream a request. Clients that cancel now and
/// then, as browsers do, let most requests finish.
#[derive(Debug, Default)]
struct Resets {
    excess: AtomicU64,
    /// The last tick for which a reset was forgiven.
    forgiven_at: AtomicU64,
}

impl Resets {
    /// The number of excess resets that is tolerated. A page that is left cancels all of its requests, a few hundred at
    /// most.
    const MAX: u64 = 200;

    /// One reset is forgiven every second.
    const FORGIVE_EVERY: Tick = 10;

    /// Counts a request. Only the thread of the connection's worker calls this.
    fn note(&self, is_complete: bool, now: Tick) {
        let excess = self.excess.load(Relaxed);
        let forgiven = match excess {
            0 => 0,
            _ => now.saturating_sub(self.forgiven_at.load(Relaxed)) / Self::FORGIVE_EVERY,
        };
        if excess == 0 {
            self.forgiven_at.store(now, Relaxed);
        } else if forgiven > 0 {
            self.forgiven_at.fetch_add(forgiven * Self::FORGIVE_EVERY, Relaxed);
        }
        let excess = excess.saturating_sub(forgiven);
        let excess = if is_complete { excess.saturating_sub(1) } else { excess + 1 };
        self.excess.store(excess, Relaxed);
    }

    fn are_too_many(&self) -> bool {
        self.excess.load(Relaxed) > Self::MAX
    }
}

/// The client of a request, as limits see it.
#[derive(Clone, Copy)]
pub(super) struct Peer<'a> {
    /// `None` if a load balancer does not name its client.
    pub(super) address: Option<IpAddr>,
    pub(super) certificate: Option<&'a Certificate>,
}

impl<'a> Peer<'a> {
    #[inline(always)]
    pub(super) fn add_to<'f>(self, facts: Facts<'f>) -> Facts<'f>
    where
        'a: 'f,
    {
        let facts = self.address.map_or(facts, |address| facts.peer(address));
        self.certificate.map_or(facts, |certificate| facts.certificate(certificate))
    }
}

/// Bytes that a body holds, until this is dropped. Only the task of the body sets their number.
pub(super) struct BufferedBytes {
    client: Arc<Client>,
    bytes: AtomicI64,
}

impl BufferedBytes {
    pub(super) fn none(client: &Arc<Client>) -> Self {
        Self { client: Arc::clone(client), bytes: AtomicI64::new(0) }
    }

    /// Sets the number of bytes. Fails, and changes nothing, if the budget does not allow it.
    pub(super) fn set(&self, bytes: usize) -> Result<(), Overloaded> {
        let bytes = i64::try_from(bytes - bytes % STEP_BYTES).unwrap_or(i64::MAX / 4);
        let before = self.bytes.load(Relaxed);
        if bytes == before {
            return Ok(());
        }
        self.client.tally.buffer_budget.adjust(&self.client.buffered, bytes - before)?;
        self.bytes.store(bytes, Relaxed);
        Ok(())
    }

    pub(super) fn release(&self) {
        // Setting a lower value never fails.
        _ = self.set(0);
    }
}

impl Drop for BufferedBytes {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resets_beyond_the_requests_that_finish_are_too_many_at_some_point() {
        let resets = Resets::default();
        for _ in 0..100_000 {
            resets.note(false, 0);
            resets.note(true, 0);
        }
        for _ in 0..Resets::MAX {
            resets.note(false, 0);
        }
        assert!(!resets.are_too_many());
        resets.note(false, 0);
        assert!(resets.are_too_many());
    }

    #[test]
    fn time_makes_up_for_resets() {
        let resets = Resets::default();
        for tick in 0..100_000 {
            if tick % Resets::FORGIVE_EVERY == 0 {
                resets.note(false, tick);
            }
            assert!(!resets.are_too_many());
        }
    }
}
