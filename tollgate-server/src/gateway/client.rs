//! A client's connection, as everything that serves it sees it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::HeaderValue;
use hyper::body::Body;
use tollgate::rules::{Certificate, Facts};

use super::buffer_budget::BufferBudget;
use super::client_deadlines::{ClientDeadlines, ClientTimeouts, Expired};
use super::connection::MAX_UPLOAD_BYTES;
use super::frames::Misuse;
use super::framing::Ambiguity;
use super::io::MAX_READ_BYTES;
use super::lane::CheckedRequest;
use super::tally::{AMBIGUITIES, Tally};
use super::ticks::{Tick, Ticks, Wait};
use super::{per_address, streams};

/// How long a client may go on sending after it has been answered.
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// A client of HTTP/2 has its time to read for each piece of this size, so that a slow one gets everything: half a
/// kilobyte a second is enough. As long as frames are where nobody has asked for longer ones.
const PIECE_BYTES: usize = 16 << 10;

/// A request that the client resets after this time is no premature reset: clients end event streams and gRPC watches this
/// way. Envoy's `premature_reset_min_stream_lifetime_seconds` has the same default.
const MIN_MATURE_NANOS: u64 = 1_000_000_000;

/// What is known of a connection, and what it waits for.
pub(super) struct Client {
    pub(super) address: SocketAddr,
    /// As headers tell it.
    pub(super) address_text: HeaderValue,
    pub(super) scheme: Scheme,
    pub(super) certificate: Option<Certificate>,
    pub(super) max_head: usize,
    pub(super) is_http2: bool,
    is_trusted_proxy: bool,
    pub(super) timeouts: ClientTimeouts,
    /// Its place among the connections of its address, for as long as anything of it is there.
    entered: Option<Arc<per_address::Counted>>,
    deadlines: ClientDeadlines,
    resets: Resets,
    upgraded: AtomicBool,
    /// What was decided about the request that hyper is about to read.
    checked: Mutex<Option<CheckedRequest>>,
    has_checked: AtomicBool,
    ticks: Arc<Ticks>,
    tally: Arc<Tally>,
    /// Bytes of bodies that are held for it.
    buffered: AtomicI64,
    /// The number of the reason for which it was refused as ambiguous, from 1 on.
    ambiguity: AtomicUsize,
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

/// What a connection is made with.
pub(super) struct ConnectionInfo {
    pub(super) address: SocketAddr,
    pub(super) is_trusted_proxy: bool,
    pub(super) scheme: Scheme,
    pub(super) certificate: Option<Certificate>,
    pub(super) max_head: usize,
    pub(super) timeouts: ClientTimeouts,
    pub(super) entered: Option<Arc<per_address::Counted>>,
}

impl Client {
    pub(super) fn new(info: ConnectionInfo, is_http2: bool, ticks: Arc<Ticks>, tally: Arc<Tally>) -> Self {
        let ConnectionInfo { address, is_trusted_proxy, scheme, certificate, max_head, timeouts, entered } = info;
        // HTTP/2 has frames that are about the connection and begin no head, so there only silence counts.
        let deadlines = ClientDeadlines::new(ticks.after(if is_http2 { timeouts.idle } else { timeouts.head }));
        let address_text = HeaderValue::try_from(address.ip().to_canonical().to_string());
        Self {
            address,
            // An address has nothing in it that no header has.
            address_text: address_text.unwrap_or(HeaderValue::from_static("unknown")),
            scheme,
            certificate,
            max_head,
            is_http2,
            is_trusted_proxy,
            timeouts,
            entered,
            deadlines,
            resets: Resets::default(),
            upgraded: AtomicBool::new(false),
            checked: Mutex::new(None),
            has_checked: AtomicBool::new(false),
            ticks,
            tally,
            buffered: AtomicI64::new(0),
            ambiguity: AtomicUsize::new(0),
        }
    }

    /// The same client, that turned out to speak HTTP/2.
    pub(super) fn over_http2(&self) -> Self {
        let info = ConnectionInfo {
            address: self.address,
            is_trusted_proxy: self.is_trusted_proxy,
            scheme: self.scheme,
            certificate: self.certificate.clone(),
            max_head: self.max_head,
            timeouts: self.timeouts,
            entered: self.entered.clone(),
        };
        Self::new(info, true, Arc::clone(&self.ticks), Arc::clone(&self.tally))
    }

    /// A request as it comes from this client.
    pub(super) fn with_client<'a>(&'a self, facts: Facts<'a>) -> Facts<'a> {
        let facts = facts.peer(self.address.ip());
        self.certificate.as_ref().map_or(facts, |certificate| facts.certificate(certificate))
    }

    pub(super) fn now(&self) -> Tick {
        self.ticks.now()
    }

    pub(super) fn check_every(&self) -> Duration {
        self.timeouts.check_every
    }

    pub(super) fn check_deadlines(&self) -> Expired {
        self.deadlines.check(self.ticks.now())
    }

    /// A part of a head has come.
    pub(super) fn head_received(&self) {
        self.deadlines.head_received(|| self.ticks.after(self.timeouts.head));
    }

    /// The client has been told that the connection ends.
    pub(super) fn note_goaway_sent(&self) {
        self.deadlines.goaway_sent(self.ticks.after(Wait::at_least(LINGER)));
    }

    pub(super) fn wrote(&self, some: bool) {
        if some {
            self.deadlines.written();
        } else {
            self.deadlines.write_blocked(self.ticks.after(self.timeouts.write));
        }
    }

    /// A part of an answer is the client's to take.
    pub(super) fn set_read_deadline(&self) {
        if self.is_http2 {
            streams::set_read_deadline(self.ticks.after(self.timeouts.write));
        }
    }

    pub(super) fn clear_read_deadline(&self) {
        if self.is_http2 {
            streams::clear_read_deadline();
        }
    }

    /// Counts an HTTP/2 request that is over, `nanos` after it began. Trusted proxies pass on the resets of many clients,
    /// so theirs are not counted.
    pub(super) fn note_request_over(&self, is_reset: bool, nanos: u64) {
        if self.is_http2 && !self.is_trusted_proxy && (!is_reset || nanos < MIN_MATURE_NANOS) {
            self.resets.note(!is_reset, self.ticks.now());
        }
    }

    /// Whether it has reset more requests than it may.
    pub(super) fn resets_too_much(&self) -> bool {
        self.resets.are_too_many()
    }

    /// The connection is closed for misuse.
    pub(super) fn note_closed(&self, misuse: Misuse) {
        self.tally.note_closed(misuse, self.address.ip().to_canonical(), self.ticks.now());
    }

    /// How much of an answer it is given at a time.
    pub(super) fn piece_bytes(&self) -> usize {
        if self.is_http2 { PIECE_BYTES } else { usize::MAX }
    }

    /// Returns the number of its requests under way.
    pub(super) fn requests(&self) -> u32 {
        self.deadlines.requests()
    }

    pub(super) fn request_began(&self) {
        self.deadlines.request_began();
    }

    pub(super) fn request_ended(&self) {
        self.deadlines.request_ended(self.ticks.after(self.timeouts.idle));
    }

    /// The next part of a body is the client's to send. Where several bodies share the connection, each has to look at
    /// its own time, which comes back.
    pub(super) fn body_awaited(&self) -> Option<Duration> {
        if self.is_http2 {
            return Some(self.timeouts.body.duration());
        }
        self.deadlines.body_awaited(self.ticks.after(self.timeouts.body));
        None
    }

    pub(super) fn body_received(&self) {
        self.deadlines.body_received();
    }

    pub(super) fn body_is_late(&self) -> bool {
        self.deadlines.body_is_late()
    }

    pub(super) fn start_linger(&self) {
        self.deadlines.write_blocked(self.ticks.after(Wait::at_least(LINGER)));
    }

    /// What was decided about the request that hyper is about to read.
    pub(super) fn hand_over(&self, checked: CheckedRequest) {
        *self.checked.lock().unwrap_or_else(PoisonError::into_inner) = Some(checked);
        self.has_checked.store(true, Relaxed);
    }

    pub(super) fn take_checked(&self) -> Option<CheckedRequest> {
        // Nearly always there is nothing, and the lock is left alone.
        if !self.has_checked.load(Relaxed) {
            return None;
        }
        self.has_checked.store(false, Relaxed);
        self.checked.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// From here on the connection speaks another protocol.
    pub(super) fn upgrade(&self) {
        self.upgraded.store(true, Relaxed);
    }

    pub(super) fn is_upgraded(&self) -> bool {
        self.upgraded.load(Relaxed)
    }

    /// What is held of bodies, of all connections and of this one.
    pub(super) fn buffer_budget(&self) -> (&BufferBudget, &AtomicI64) {
        (&self.tally.buffer_budget, &self.buffered)
    }

    /// Returns the most that is held of a body that it sends and the upstream does not read: no more than the body has, if
    /// it says how long it is.
    pub(super) fn upload_bytes(&self, body: &impl Body) -> usize {
        let most = if self.is_http2 { MAX_UPLOAD_BYTES } else { MAX_READ_BYTES };
        body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok()).map_or(most, |bytes| bytes.min(most))
    }

    /// What its worker counts.
    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    pub(super) fn shared_tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    pub(super) fn note_ambiguity(&self, ambiguity: Ambiguity) {
        self.tally.note_ambiguity(ambiguity);
        let number = AMBIGUITIES.iter().position(|(one, _)| *one == ambiguity);
        self.ambiguity.store(number.map_or(0, |number| number + 1), Relaxed);
    }

    /// Returns why its bytes were refused as ambiguous, if they were.
    pub(super) fn ambiguity(&self) -> Option<&'static str> {
        let number = self.ambiguity.load(Relaxed).checked_sub(1)?;
        AMBIGUITIES.get(number).map(|(_, reason)| *reason)
    }
}

/// Requests that a client of HTTP/2 has reset prematurely, beyond those that it let finish.
///
/// A reset costs a client one small frame, and the gateway and the upstream a request. Clients that cancel now and then, as
/// browsers do, let most requests finish.
#[derive(Debug, Default)]
struct Resets {
    excess: AtomicU64,
    /// When one was last forgiven for the time that has passed.
    forgiven_at: AtomicU64,
}

impl Resets {
    /// As many are taken for impatience. A page that is left cancels all of its requests, some hundred at most.
    const MAX: u64 = 200;

    /// Every second makes up for one.
    const FORGIVE_EVERY: Tick = 10;

    /// Only the thread of the connection's worker changes it.
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
