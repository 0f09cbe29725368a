//! The slots of connections to upstreams.
//!
//! One HTTP/2 client can have 100 requests under way, and each needs a connection to an upstream that speaks HTTP/1. So
//! connections to upstreams have their own part of the descriptors (`Plan::upstreams`). A connection holds a slot for
//! as long as its socket is open. When no slot is free, idle connections are closed first; a request for which none can
//! be closed gets 503.
//!
//! The last half of the slots is for clients with few requests: a client with more than an equal share of the other
//! half does not get one of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use crate::gateway::failure::{ConnectError, Exhausted};

/// How long the task of an evicted connection has to close it before another one is evicted.
const CLOSE_WITHIN: Duration = Duration::from_millis(2);

/// The slots of all workers.
pub(in crate::gateway) struct UpstreamSlots {
    free: Arc<Semaphore>,
    max: usize,
    /// Open connections of clients.
    clients: Arc<AtomicI64>,
}

/// The result of an attempt to close an idle connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Evicted {
    Closed,
    /// Its task closes it when it runs next.
    Closing,
    /// No connection is idle.
    Nothing,
}

impl UpstreamSlots {
    pub(in crate::gateway) fn new(max: usize, clients: &Arc<AtomicI64>) -> Self {
        let max = max.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(max)), max, clients: Arc::clone(clients) }
    }

    /// Returns the number of slots in use, by idle connections too.
    pub(in crate::gateway) fn used(&self) -> usize {
        self.max - self.free.available_permits()
    }

    /// Takes a slot for a client that has this many requests under way. Calls `evict` until one is free.
    pub(in crate::gateway) async fn take(
        &self,
        requests: u32,
        mut evict: impl FnMut() -> Evicted,
    ) -> Result<UpstreamSlot, ConnectError> {
        let reserved = if self.is_beyond_share(requests) { self.max / 2 } else { 0 };
        loop {
            if self.free.available_permits() > reserved
                && let Ok(permit) = Arc::clone(&self.free).try_acquire_owned()
            {
                return Ok(UpstreamSlot { permit: Some(permit), free: Arc::clone(&self.free) });
            }
            match evict() {
                Evicted::Closed => {}
                Evicted::Closing => sleep(CLOSE_WITHIN).await,
                Evicted::Nothing => return Err(ConnectError::Exhausted(Exhausted::UpstreamConnections)),
            }
        }
    }

    /// Takes a slot if one is free. Health checks go on without one: their descriptors are set aside.
    pub(super) fn take_for_check(&self) -> UpstreamSlot {
        UpstreamSlot { permit: Arc::clone(&self.free).try_acquire_owned().ok(), free: Arc::clone(&self.free) }
    }

    /// Returns whether a client with this many requests has more than an equal share of half of the slots.
    fn is_beyond_share(&self, requests: u32) -> bool {
        let clients = usize::try_from(self.clients.load(Relaxed)).unwrap_or(0).max(1);
        usize::try_from(requests).unwrap_or(usize::MAX) > (self.max / 2 / clients).max(1)
    }
}

/// A slot, until it is dropped.
pub(in crate::gateway) struct UpstreamSlot {
    permit: Option<OwnedSemaphorePermit>,
    free: Arc<Semaphore>,
}

impl UpstreamSlot {
    /// Takes another slot, if one is free. A health check that goes on without a slot gets none.
    pub(in crate::gateway) fn another(&self) -> Option<Self> {
        self.permit.as_ref()?;
        let permit = Arc::clone(&self.free).try_acquire_owned().ok()?;
        Some(Self { permit: Some(permit), free: Arc::clone(&self.free) })
    }

    #[cfg(test)]
    pub(super) fn for_test(max: usize) -> Self {
        UpstreamSlots::new(max, &Arc::default()).take_for_check()
    }

    #[cfg(test)]
    pub(super) fn is_held(&self) -> bool {
        self.permit.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(max: usize, clients: i64) -> UpstreamSlots {
        UpstreamSlots::new(max, &Arc::new(AtomicI64::new(clients)))
    }

    #[tokio::test]
    async fn client_with_many_requests_leaves_half_of_the_slots_to_others() {
        let slots = slots(8, 2);
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(slots.take(3, || Evicted::Nothing).await.expect("half is for every client"));
        }
        assert!(slots.take(3, || Evicted::Nothing).await.is_err(), "its share is 2");
        for _ in 0..4 {
            held.push(slots.take(2, || Evicted::Nothing).await.expect("the rest is for clients within theirs"));
        }
        assert!(slots.take(1, || Evicted::Nothing).await.is_err());
        assert_eq!(slots.used(), 8);
        drop(held);
        assert_eq!(slots.used(), 0);
    }

    #[tokio::test]
    async fn idle_connection_is_closed_for_a_request() {
        let slots = slots(1, 1);
        let mut idle = Some(slots.take(1, || Evicted::Nothing).await.expect("it is free"));
        let evict = || idle.take().map_or(Evicted::Nothing, |_| Evicted::Closed);
        let taken = slots.take(1, evict).await;
        assert!(taken.is_ok_and(|slot| slot.is_held()));
        let held = slots.take(1, || Evicted::Nothing).await.expect("it is free again");
        assert!(!slots.take_for_check().is_held() && held.another().is_none());
    }
}
