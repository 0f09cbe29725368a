//! Subscribes to resets by other processes: a reset ends the cached denials, the slices and the open charges of its key.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::StoreError;
use super::denials::Denials;
use super::dial::Subscription;
use super::leases::Leases;
use super::node::Subscriber;
use super::pending::Open;
use super::script::StoreIndex;
use super::topology::Topology;
use super::warnings::SubscriptionProblem;
use crate::units::Timestamp;

/// The channel on which the script publishes the times and names of keys that were reset, after `rate_limit:`.
const CHANNEL: &str = "changed";

/// The pause before another attempt to subscribe: the first, and the longest.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Time that a subscription must last before the next attempts start again with the shortest pause.
const STEADY: Duration = Duration::from_secs(5);

/// Failed attempts, within a second or two, after which a failure that is no refusal is reported.
const LASTING: u32 = 6;

/// The time without a message after which the connection is probed.
const QUIET_FOR: Duration = Duration::from_secs(5);
/// The longest time for a subscription, once there is a connection, and for the reply to a probe.
const REPLY_LIMIT: Duration = Duration::from_secs(2);

/// The state of this process that a reset on one store ends.
pub(super) struct Resets {
    pub(super) store: StoreIndex,
    pub(super) denials: Arc<Denials>,
    pub(super) leases: Arc<Leases>,
    pub(super) open: Open,
    /// Set while the subscription is up. `None` if denials are not cached.
    pub(super) is_subscribed: Option<Arc<AtomicBool>>,
    pub(super) problem: Arc<SubscriptionProblem>,
    /// The name of the store, for logs.
    pub(super) store_name: Arc<str>,
}

impl Resets {
    fn begin(&self) {
        self.problem.solved();
        self.denials.clear_store(self.store);
        self.leases.subscription_up(self.store);
        self.set_subscribed(true);
    }

    fn end(&self) {
        self.set_subscribed(false);
        self.leases.subscription_lost(self.store);
        self.denials.clear_store(self.store);
    }

    /// Warns of a failure to subscribe if the store decides nevertheless. One that does not is reported as unavailable.
    fn failed(&self, why: &StoreError, attempts: u32, topology: &Topology) {
        if topology.why_unavailable().is_some() {
            self.problem.solved();
        } else if why.is_refused() || attempts >= LASTING {
            let fix = match why.is_no_permission() {
                true => format!("grant its user &{} +subscribe (ACL SETUSER)", topology.names().of("*")),
                false => why.fix().to_owned(),
            };
            if self.problem.found(format!("{}: {fix}", why.detail()))
                && let Some(warning) = self.problem.warning()
            {
                tracing::warn!(store = %self.store_name, "{warning}");
            }
        }
    }

    fn set_subscribed(&self, is_subscribed: bool) {
        if let Some(flag) = &self.is_subscribed {
            flag.store(is_subscribed, Ordering::Relaxed);
        }
    }

    fn apply(&self, message: &[u8]) {
        let (reset_at, name) = parse(message);
        self.denials.forget(name);
        self.leases.forget(name, reset_at);
        self.open.reset(name, reset_at, 0);
    }
}

/// Splits a message into the time of the reset, by the store's clock, and the name of the key. Names have no space
/// before the first brace, and earlier versions sent the name alone.
fn parse(message: &[u8]) -> (Option<Timestamp>, &[u8]) {
    let Some(space) = message.iter().position(|byte| !byte.is_ascii_digit()).filter(|at| message[*at] == b' ') else {
        return (None, message);
    };
    let (time, name) = (&message[..space], &message[space + 1..]);
    let micros = std::str::from_utf8(time).ok().and_then(|digits| digits.parse().ok());
    (micros.map(Timestamp::from_micros), name)
}

/// Keeps a subscription, and never returns. Without a subscription no denial is cached and no slice is taken.
pub(super) async fn listen(topology: Arc<Topology>, resets: Resets) {
    let (mut pause, mut attempts) = (RETRY_AFTER.0, 0);
    loop {
        match subscribe(&topology).await {
            Ok(Subscriber { connection, address }) => {
                resets.begin();
                attempts = 0;
                let began = Instant::now();
                tokio::select! {
                    () = apply_messages(connection, &resets) => {}
                    () = topology.left(&address) => {}
                }
                resets.end();
                if began.elapsed() > STEADY {
                    pause = RETRY_AFTER.0;
                }
            }
            Err(why) => {
                attempts += 1;
                resets.failed(&why, attempts, &topology);
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_AFTER.1);
    }
}

async fn subscribe(topology: &Topology) -> Result<Subscriber, StoreError> {
    let mut subscriber = topology.subscriber().await?;
    match timeout(REPLY_LIMIT, subscriber.connection.subscribe(topology.names().of(CHANNEL))).await {
        Ok(Ok(())) => Ok(subscriber),
        // The server replied.
        Ok(Err(error)) if error.code().is_some() => Err(StoreError::refused_by(&error)),
        Ok(Err(error)) => Err(StoreError::of(&error)),
        Err(_) => Err(StoreError::timed_out()),
    }
}

/// Applies resets until the connection is lost. A server that is gone without closing it is found by a probe.
async fn apply_messages(mut subscription: Subscription, resets: &Resets) {
    loop {
        match timeout(QUIET_FOR, subscription.next()).await {
            Ok(Some(message)) => resets.apply(message.get_payload_bytes()),
            Ok(None) => return,
            Err(_) => match timeout(REPLY_LIMIT, subscription.ping()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return,
            },
        }
    }
}
