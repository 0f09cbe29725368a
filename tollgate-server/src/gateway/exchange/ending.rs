//! What is done when an answer is over, however it ended.

use std::sync::Arc;

use tollgate::Place;

use super::super::body::Came;
use super::super::client::Client;
use super::super::target::Target;
use super::super::ticks::Wait;
use super::super::wire::Wire;

/// Ends a request when it is dropped.
pub(in super::super) struct Ending {
    client: Arc<Client>,
    upstream: Option<Held>,
    /// Among the requests of its key that are under way.
    place: Option<Place>,
    sent_bytes: u64,
}

/// The upstream that a request is at.
pub(in super::super) struct Held {
    pub(in super::super) target: Arc<Target>,
    /// The connection, if it is this request's alone.
    pub(in super::super) wire: Option<Wire>,
    pub(in super::super) timeout: Wait,
    pub(in super::super) worker: usize,
}

impl Ending {
    pub(in super::super) fn new(client: &Arc<Client>) -> Self {
        Self { client: Arc::clone(client), upstream: None, place: None, sent_bytes: 0 }
    }

    /// Gives the place back when the answer is over.
    pub(in super::super) fn keep_place(&mut self, place: Option<Place>) {
        self.place = place;
    }

    pub(in super::super) fn hold(&mut self, held: Held) {
        self.upstream = Some(held);
    }

    pub(in super::super) fn note_sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
    }

    /// The next part of the answer is the upstream's to send.
    pub(in super::super) fn upstream_awaited(&self) {
        if let Some(Held { wire: Some(wire), timeout, .. }) = &self.upstream {
            wire.expect(*timeout);
        }
    }

    pub(in super::super) fn upstream_came(&mut self, came: Came) {
        let Some(held) = &mut self.upstream else { return };
        match came {
            Came::Bytes(bytes) => {
                self.sent_bytes += bytes as u64;
                if let Some(wire) = &held.wire {
                    wire.forgive();
                }
            }
            Came::All => {
                if let Some(wire) = held.wire.take() {
                    held.target.keep(held.worker, wire);
                }
            }
            Came::Error => held.wire = None,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.target.end();
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.client.request_ended();
    }
}
