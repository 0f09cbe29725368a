//! Hears what other processes give back, so that no denial outlives it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;

use super::denials::Denials;
use super::worker::Trips;

/// Where the script tells the name of a key that something was given back to.
pub(super) const CHANNEL: &str = "rate_limit:changed";

/// How soon to listen again after the connection was lost: at first, and at most.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Listens for ever. While nothing is heard, nothing is certain.
pub(super) async fn listen(trips: Arc<Trips>, denials: Arc<Denials>, hears: Arc<AtomicBool>) {
    let mut pause = AGAIN_AFTER.0;
    loop {
        if let Ok(mut ear) = trips.link.ear().await
            && ear.subscribe(CHANNEL).await.is_ok()
        {
            denials.clear();
            hears.store(true, Ordering::Relaxed);
            pause = AGAIN_AFTER.0;
            let mut messages = ear.on_message();
            while let Some(message) = messages.next().await {
                denials.forget(message.get_payload_bytes());
            }
            hears.store(false, Ordering::Relaxed);
            denials.clear();
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(AGAIN_AFTER.1);
    }
}
