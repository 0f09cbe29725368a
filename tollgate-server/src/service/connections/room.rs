//! Room for new connections at the bound of a listener: idle connections are closed for new ones.
//!
//! Clients that connect and send nothing cost an attacker nothing, so they must not keep others out: with 4,096 of them, and
//! a few new ones each second, no health check would get through. As in nginx, the connection that has waited for its first
//! request for longest is closed first. Next come connections that have been idle between two requests. If all are busy, or
//! have been idle for less than a second, the new client is refused.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::Instant;

/// The shortest time without a request after which a connection is closed for another. The request of a client that has just
/// connected may be on its way.
pub(super) const MIN_IDLE: Duration = Duration::from_secs(1);

/// The most connections that are looked at for one new client.
const MAX_LOOKS: usize = 64;

/// The use of a connection, which it records and its listener looks at.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Requests that are not answered yet.
    in_flight: AtomicU32,
    /// Grows with every request that ends.
    answered: AtomicU32,
    /// The slot of the connection, until it ends or is closed for another.
    slot: Mutex<Option<OwnedSemaphorePermit>>,
    is_closed: Notify,
}

impl Usage {
    pub(super) fn new(slot: OwnedSemaphorePermit) -> Self {
        Self { slot: Mutex::new(Some(slot)), ..Self::default() }
    }

    /// Records that a request begins.
    pub(crate) fn begin(&self) {
        self.in_flight.fetch_add(1, Relaxed);
    }

    /// Records that a request ends.
    pub(crate) fn end(&self) {
        self.answered.fetch_add(1, Relaxed);
        self.in_flight.fetch_sub(1, Relaxed);
    }

    /// Records that there is no whole request yet.
    pub(crate) fn cancel(&self) {
        self.in_flight.fetch_sub(1, Relaxed);
    }

    pub(super) fn is_busy(&self) -> bool {
        self.in_flight.load(Relaxed) > 0
    }

    /// Returns a number that grows with every request that ends.
    pub(super) fn answered(&self) -> u32 {
        self.answered.load(Relaxed)
    }

    /// Resolves when the connection is closed for another.
    pub(super) async fn closed(&self) {
        self.is_closed.notified().await;
    }

    /// Returns the slot, unless another connection has it.
    pub(super) fn take_slot(&self) -> Option<OwnedSemaphorePermit> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The connections of a listener, in the order in which they are closed for new ones.
#[derive(Debug)]
pub(super) struct Room {
    /// Connections without a request so far, the oldest first.
    silent: VecDeque<Seen>,
    /// Connections with requests, those that were looked at longest ago first.
    used: VecDeque<Seen>,
    max_connections: usize,
}

/// A connection when it was last looked at.
#[derive(Debug)]
struct Seen {
    usage: Weak<Usage>,
    answered: u32,
    at: Instant,
}

impl Seen {
    fn new(usage: &Arc<Usage>) -> Self {
        Self { usage: Arc::downgrade(usage), answered: usage.answered(), at: Instant::now() }
    }
}

impl Room {
    pub(super) fn new(max_connections: u32) -> Self {
        Self { silent: VecDeque::new(), used: VecDeque::new(), max_connections: max_connections as usize }
    }

    /// Adds a connection that was accepted.
    pub(super) fn add(&mut self, usage: &Arc<Usage>) {
        // Connections that have ended stay until they are as many as the others.
        if self.silent.len() + self.used.len() >= 2 * self.max_connections {
            let is_open = |seen: &Seen| seen.usage.strong_count() > 0;
            self.silent.retain(is_open);
            self.used.retain(is_open);
        }
        self.silent.push_back(Seen::new(usage));
    }

    /// Closes an idle connection, and returns its slot.
    pub(super) fn make(&mut self) -> Option<OwnedSemaphorePermit> {
        for _ in 0..MAX_LOOKS {
            let Some(seen) = self.silent.pop_front() else { break };
            let Some(usage) = seen.usage.upgrade() else { continue };
            if usage.is_busy() || usage.answered() > 0 {
                self.used.push_back(Seen::new(&usage));
            } else if seen.at.elapsed() < MIN_IDLE {
                self.silent.push_front(seen);
                break;
            } else if let Some(slot) = close(&usage) {
                return Some(slot);
            }
        }
        for _ in 0..MAX_LOOKS {
            let seen = self.used.pop_front()?;
            let Some(usage) = seen.usage.upgrade() else { continue };
            if usage.is_busy() || usage.answered() != seen.answered {
                self.used.push_back(Seen::new(&usage));
            } else if seen.at.elapsed() < MIN_IDLE {
                self.used.push_front(seen);
                return None;
            } else if let Some(slot) = close(&usage) {
                return Some(slot);
            }
        }
        None
    }
}

/// Closes a connection, and returns its slot. Returns `None` if it ends already.
fn close(usage: &Usage) -> Option<OwnedSemaphorePermit> {
    let slot = usage.take_slot()?;
    usage.is_closed.notify_one();
    Some(slot)
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;
    use tokio::time::advance;

    use super::*;

    /// Returns the room of a listener that has accepted these connections.
    fn room<const N: usize>(max_connections: u32) -> (Room, [Arc<Usage>; N], Arc<Semaphore>) {
        let slots = Arc::new(Semaphore::new(max_connections as usize));
        let mut room = Room::new(max_connections);
        let all = [(); N].map(|()| {
            let slot = Arc::clone(&slots).try_acquire_owned().expect("a slot is free");
            let usage = Arc::new(Usage::new(slot));
            room.add(&usage);
            usage
        });
        (room, all, slots)
    }

    fn is_closed(usage: &Usage) -> bool {
        usage.take_slot().is_none()
    }

    #[tokio::test(start_paused = true)]
    async fn silent_connections_are_closed_before_idle_ones_and_busy_ones_never() {
        let (mut room, [busy, idle, silent], _slots) = room(3);
        busy.begin();
        idle.begin();
        idle.end();
        assert!(room.make().is_none(), "their requests may be on their way");
        advance(MIN_IDLE).await;
        assert!(room.make().is_some());
        assert!(is_closed(&silent));
        assert!(room.make().is_some());
        assert!(is_closed(&idle) && !is_closed(&busy));
        assert!(room.make().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_is_used_again_is_not_idle() {
        let (mut room, [often, seldom], _slots) = room(2);
        for usage in [&often, &seldom] {
            usage.begin();
            usage.end();
        }
        assert!(room.make().is_none(), "they have just been used");
        advance(MIN_IDLE).await;
        often.begin();
        often.end();
        assert!(room.make().is_some());
        assert!(is_closed(&seldom) && !is_closed(&often));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_have_ended_are_forgotten() {
        let (mut room, [], slots) = room(4);
        for _ in 0..1_000 {
            let slot = Arc::clone(&slots).try_acquire_owned().expect("a slot is free");
            room.add(&Arc::new(Usage::new(slot)));
        }
        assert!(room.silent.len() <= 8);
        assert_eq!(slots.available_permits(), 4);
    }
}
