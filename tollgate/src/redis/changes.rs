//! Subscribes to resets by other processes, so that no remembered denial and no slice outlives one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use redis::aio::PubSub;
use tokio::time::timeout;

use super::denials::Denials;
use super::leases::Leases;
use super::stores::StoreIndex;
use super::topology::Topology;
use crate::units::Timestamp;

/// The channel on which the script publishes the times and names of keys that were reset, after `rate_limit:`.
const CHANNEL: &str = "changed";

/// How soon to listen again after the connection was lost: at first, and at most.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// How long nothing may be heard before it is asked whether anyone is there, and how long for an answer.
const QUIET_FOR: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(2);

/// The state of this process that a reset on one store ends.
pub(super) struct Resets {
    pub(super) store: StoreIndex,
    pub(super) denials: Arc<Denials>,
    pub(super) leases: Arc<Leases>,
    /// Set while resets are heard of, if denials are remembered at all.
    pub(super) hears: Option<Arc<AtomicBool>>,
}

impl Resets {
    fn begin(&self) {
        self.denials.clear_store(self.store);
        self.leases.resets_are_heard(self.store);
        self.set_hears(true);
    }

    fn end(&self) {
        self.set_hears(false);
        self.leases.resets_are_missed(self.store);
        self.denials.clear_store(self.store);
    }

    fn set_hears(&self, hears: bool) {
        if let Some(flag) = &self.hears {
            flag.store(hears, Ordering::Relaxed);
        }
    }

    fn apply(&self, message: &[u8]) {
        let (reset_at, name) = parse(message);
        self.denials.forget(name);
        self.leases.forget(name, reset_at);
    }
}

/// Splits a message into the time of the reset, by the store's clock, and the name of the key. Names have no space before
/// the first brace, and earlier versions sent the name alone.
fn parse(message: &[u8]) -> (Option<Timestamp>, &[u8]) {
    let Some(space) = message.iter().position(|byte| !byte.is_ascii_digit()).filter(|at| message[*at] == b' ') else {
        return (None, message);
    };
    let (time, name) = (&message[..space], &message[space + 1..]);
    let micros = std::str::from_utf8(time).ok().and_then(|digits| digits.parse().ok());
    (micros.map(Timestamp::from_micros), name)
}

/// Listens for ever. While nothing is heard, nothing is certain.
pub(super) async fn listen(topology: Arc<Topology>, resets: Resets) {
    let mut pause = AGAIN_AFTER.0;
    loop {
        let ear = timeout(PATIENCE, async {
            let mut ear = topology.subscriber().await.ok()?;
            ear.subscribe(topology.names().of(CHANNEL)).await.ok()?;
            Some(ear)
        });
        if let Ok(Some(ear)) = ear.await {
            resets.begin();
            pause = AGAIN_AFTER.0;
            hear(ear, &resets).await;
            resets.end();
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(AGAIN_AFTER.1);
    }
}

/// Hears until the connection is gone, also if nobody says so.
async fn hear(ear: PubSub, resets: &Resets) {
    let (mut mouth, mut ear) = ear.split();
    loop {
        match timeout(QUIET_FOR, ear.next()).await {
            Ok(Some(message)) => resets.apply(message.get_payload_bytes()),
            Ok(None) => return,
            Err(_) => match timeout(PATIENCE, mouth.ping::<redis::Value>()).await {
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return,
            },
        }
    }
}
