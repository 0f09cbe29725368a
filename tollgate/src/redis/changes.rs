//! Subscribes to resets by other processes, so that no remembered denial outlives one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use redis::aio::PubSub;
use tokio::time::timeout;

use super::denials::AllDenials;
use super::topology::Topology;

/// The channel on which the script publishes the names of keys that were reset, after `rate_limit:`.
const CHANNEL: &str = "changed";

/// How soon to listen again after the connection was lost: at first, and at most.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// How long nothing may be heard before it is asked whether anyone is there, and how long for an answer.
const QUIET_FOR: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(2);

/// Listens for ever. While nothing is heard, nothing is certain.
pub(super) async fn listen(topology: Arc<Topology>, denials: Arc<AllDenials>, hears: Arc<AtomicBool>) {
    let mut pause = AGAIN_AFTER.0;
    loop {
        let ear = timeout(PATIENCE, async {
            let mut ear = topology.subscriber().await.ok()?;
            ear.subscribe(topology.names().of(CHANNEL)).await.ok()?;
            Some(ear)
        });
        if let Ok(Some(ear)) = ear.await {
            denials.clear();
            hears.store(true, Ordering::Relaxed);
            pause = AGAIN_AFTER.0;
            hear(ear, &denials).await;
            hears.store(false, Ordering::Relaxed);
            denials.clear();
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(AGAIN_AFTER.1);
    }
}

/// Hears until the connection is gone, also if nobody says so.
async fn hear(ear: PubSub, denials: &AllDenials) {
    let (mut mouth, mut ear) = ear.split();
    loop {
        match timeout(QUIET_FOR, ear.next()).await {
            Ok(Some(message)) => denials.forget(message.get_payload_bytes()),
            Ok(None) => return,
            Err(_) => match timeout(PATIENCE, mouth.ping::<redis::Value>()).await {
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return,
            },
        }
    }
}
