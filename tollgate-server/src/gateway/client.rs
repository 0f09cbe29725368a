//! A client's connection, as everything that serves it sees it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::HeaderValue;
use tollgate::rules::{Certificate, Facts};

use super::guard::Ambiguity;
use super::lane::Asked;
use super::streams;
use super::tally::Tally;
use super::ticks::{Tick, Ticks, Wait};
use super::watch::{Looked, Waits, Watch};

/// How long a client may go on sending after it has been answered.
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// A client of HTTP/2 has its time to read for each piece of this size, so that a slow one gets everything: half a
/// kilobyte a second is enough. As long as frames are where nobody has asked for longer ones.
const PIECE_BYTES: usize = 16 << 10;

/// What is known of a connection, and what it waits for.
pub(super) struct Client {
    pub(super) address: SocketAddr,
    /// As headers tell it.
    pub(super) address_text: HeaderValue,
    pub(super) scheme: Scheme,
    pub(super) certificate: Option<Certificate>,
    pub(super) max_head: usize,
    pub(super) is_http2: bool,
    pub(super) waits: Waits,
    watch: Watch,
    upgraded: AtomicBool,
    /// What was decided about the request that hyper is about to read.
    asked: Mutex<Option<Asked>>,
    has_asked: AtomicBool,
    ticks: Arc<Ticks>,
    tally: Arc<Tally>,
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
#[derive(Clone)]
pub(super) struct Arrival {
    pub(super) address: SocketAddr,
    pub(super) scheme: Scheme,
    pub(super) certificate: Option<Certificate>,
    pub(super) max_head: usize,
    pub(super) waits: Waits,
}

impl Client {
    pub(super) fn new(arrival: Arrival, is_http2: bool, ticks: Arc<Ticks>, tally: Arc<Tally>) -> Self {
        let Arrival { address, scheme, certificate, max_head, waits } = arrival;
        // HTTP/2 has frames that are about the connection and begin no head, so there only silence counts.
        let watch = Watch::new(ticks.after(if is_http2 { waits.idle } else { waits.head }));
        let address_text = HeaderValue::try_from(address.ip().to_canonical().to_string());
        Self {
            address,
            // An address has nothing in it that no header has.
            address_text: address_text.unwrap_or(HeaderValue::from_static("unknown")),
            scheme,
            certificate,
            max_head,
            is_http2,
            waits,
            watch,
            upgraded: AtomicBool::new(false),
            asked: Mutex::new(None),
            has_asked: AtomicBool::new(false),
            ticks,
            tally,
        }
    }

    /// A request as it comes from this client.
    pub(super) fn sends<'a>(&'a self, facts: Facts<'a>) -> Facts<'a> {
        let facts = facts.peer(self.address.ip());
        self.certificate.as_ref().map_or(facts, |certificate| facts.certificate(certificate))
    }

    pub(super) fn now(&self) -> Tick {
        self.ticks.now()
    }

    pub(super) fn look_every(&self) -> Duration {
        self.waits.look_every
    }

    pub(super) fn look(&self) -> Looked {
        self.watch.look(self.ticks.now())
    }

    /// A part of a head has come.
    pub(super) fn head_came(&self) {
        self.watch.head_came(|| self.ticks.after(self.waits.head));
    }

    /// The client has been told that the connection ends.
    pub(super) fn told_to_go(&self) {
        self.watch.goes_by(self.ticks.after(Wait::at_least(LINGER)));
    }

    pub(super) fn wrote(&self, some: bool) {
        if some {
            self.watch.written();
        } else {
            self.watch.write_blocked(self.ticks.after(self.waits.write));
        }
    }

    /// A part of an answer is the client's to take.
    pub(super) fn given(&self) {
        if self.is_http2 {
            streams::given(self.ticks.after(self.waits.write));
        }
    }

    pub(super) fn taken(&self) {
        if self.is_http2 {
            streams::taken();
        }
    }

    /// How much of an answer it is given at a time.
    pub(super) fn piece_bytes(&self) -> usize {
        if self.is_http2 { PIECE_BYTES } else { usize::MAX }
    }

    pub(super) fn request_began(&self) {
        self.watch.request_began();
    }

    pub(super) fn request_ended(&self) {
        self.watch.request_ended(self.ticks.after(self.waits.idle));
    }

    /// The next part of a body is the client's to send. Where several bodies share the connection, each has to look at
    /// its own time, which comes back.
    pub(super) fn body_awaited(&self) -> Option<Duration> {
        if self.is_http2 {
            return Some(self.waits.body.duration());
        }
        self.watch.body_awaited(self.ticks.after(self.waits.body));
        None
    }

    pub(super) fn body_came(&self) {
        self.watch.body_came();
    }

    pub(super) fn body_is_late(&self) -> bool {
        self.watch.body_is_late()
    }

    pub(super) fn lingers(&self) {
        self.watch.write_blocked(self.ticks.after(Wait::at_least(LINGER)));
    }

    /// What was decided about the request that hyper is about to read.
    pub(super) fn leave(&self, asked: Asked) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(asked);
        self.has_asked.store(true, Relaxed);
    }

    pub(super) fn take_asked(&self) -> Option<Asked> {
        // Nearly always there is nothing, and the lock is left alone.
        if !self.has_asked.load(Relaxed) {
            return None;
        }
        self.has_asked.store(false, Relaxed);
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// From here on the connection speaks another protocol.
    pub(super) fn upgrade(&self) {
        self.upgraded.store(true, Relaxed);
    }

    pub(super) fn is_upgraded(&self) -> bool {
        self.upgraded.load(Relaxed)
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
    }
}
