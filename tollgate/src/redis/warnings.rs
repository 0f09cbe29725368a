//! Problems of a store with which it still decides: see [`StoreStatus`](super::StoreStatus).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A problem of a store with which it still decides for all or most keys: see [`StoreStatus`](super::StoreStatus).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum StoreWarning {
    /// A key of this limit holds data that no limiter wrote, and had a request in the last minute. The failure policy of
    /// the limit decides such requests.
    ForeignData {
        /// The name of the limit.
        limit: String,
    },
    /// Other processes with the same prefix store keys in another [`Layout`](super::Layout), or in another number of hashes.
    /// They and this process do not count together.
    OtherLayout {
        /// The layout of this process.
        own: String,
        /// The other layout.
        other: String,
    },
    /// This process does not receive resets, because it cannot subscribe to their channel. So it takes no leases and
    /// caches no denials, and asks the store about every request.
    NotSubscribed {
        /// The problem, and how to fix it.
        problem: String,
    },
    /// A file of the login or the certificates cannot be used. The last content that could be used stays in use.
    File {
        /// The problem, and how to fix it.
        problem: String,
    },
    /// In the last minute, a server sent a reply that exceeds a bound or that is not one of a Redis. Its connection was
    /// closed before the reply took memory.
    InvalidReply {
        /// The address of the server.
        server: String,
        /// The bound.
        problem: String,
    },
    /// In the last minute, the nodes of a cluster redirected a request again and again, or to too many nodes. The failure
    /// policy of each limit decides such requests.
    Redirects {
        /// What the nodes do.
        problem: String,
    },
}

impl StoreWarning {
    /// The words that [`kind`](Self::kind) returns.
    pub const KINDS: [&'static str; 6] =
        ["foreign_data", "other_layout", "not_subscribed", "file", "invalid_reply", "redirects"];

    /// Returns the kind of the problem as a word, such as `other_layout`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        let [foreign_data, other_layout, not_subscribed, file, invalid_reply, redirects] = Self::KINDS;
        match self {
            Self::ForeignData { .. } => foreign_data,
            Self::OtherLayout { .. } => other_layout,
            Self::NotSubscribed { .. } => not_subscribed,
            Self::File { .. } => file,
            Self::InvalidReply { .. } => invalid_reply,
            Self::Redirects { .. } => redirects,
        }
    }

    /// Returns what the warning is about, besides its kind.
    fn subject(&self) -> &str {
        match self {
            Self::ForeignData { limit } => limit,
            Self::InvalidReply { server, .. } => server,
            _ => "",
        }
    }
}

impl fmt::Display for StoreWarning {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ForeignData { limit } => write!(
                out,
                "a key of limit `{limit}` holds data that no limiter wrote, so on_store_failure decides its requests: \
                 move that data to another key, or set a prefix"
            ),
            Self::OtherLayout { own, other } => write!(
                out,
                "other processes use the layout {other} and this one {own}, so they count apart and a key gets its limit \
                 from each: give all of them the same layout and expected_keys"
            ),
            Self::NotSubscribed { problem } => write!(
                out,
                "this process cannot subscribe to resets, so it takes no leases and caches no denials: {problem}"
            ),
            Self::File { problem } => write!(out, "the last content of a file stays in use: {problem}"),
            Self::InvalidReply { server, problem } => write!(
                out,
                "the connection to {server} was closed because {problem}: make sure that a Redis or Valkey is at this \
                 address, and that nothing else writes to its rate_limit:* keys"
            ),
            Self::Redirects { problem } => {
                write!(out, "{problem}: check `CLUSTER NODES` on each of them, because they disagree about the slots")
            }
        }
    }
}

/// Time for which a warning about an event lasts after the last such event.
const WARN_FOR: Duration = Duration::from_secs(60);
/// Maximum number of such warnings. Names of limits and servers are few, unless a server invents the others.
const MAX_RECENT: usize = 256;

/// Warnings about events, such as a request for a key with foreign data.
#[derive(Default)]
pub(super) struct RecentWarnings(Mutex<BTreeMap<KindAndSubject, (StoreWarning, Instant)>>);

type KindAndSubject = (&'static str, String);

impl RecentWarnings {
    /// Records an event. Returns whether it is the first of its kind and subject in a while.
    pub(super) fn record(&self, warning: StoreWarning) -> bool {
        let (now, mut recent) = (Instant::now(), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        recent.retain(|_, (_, last)| now.duration_since(*last) < WARN_FOR);
        let subject = (warning.kind(), warning.subject().to_owned());
        if recent.len() >= MAX_RECENT && !recent.contains_key(&subject) {
            return false;
        }
        recent.insert(subject, (warning, now)).is_none()
    }

    /// Records an event, and logs it if it is the first of its kind and subject in a while.
    pub(super) fn log(&self, store: &str, warning: StoreWarning) {
        let text = warning.to_string();
        if self.record(warning) {
            tracing::warn!(store, "{text}");
        }
    }

    pub(super) fn current(&self) -> Vec<StoreWarning> {
        let (now, recent) = (Instant::now(), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let recent = recent.values().filter(|(_, last)| now.duration_since(*last) < WARN_FOR);
        recent.map(|(warning, _)| warning.clone()).collect()
    }
}

/// The reason why this process does not receive the resets of a store, if it does not.
#[derive(Default)]
pub(super) struct SubscriptionProblem(Mutex<Option<String>>);

impl SubscriptionProblem {
    /// Records the problem. Returns whether there was none before.
    pub(super) fn found(&self, problem: String) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(problem).is_none()
    }

    /// Ends the warning.
    pub(super) fn solved(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) fn warning(&self) -> Option<StoreWarning> {
        let problem = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some(StoreWarning::NotSubscribed { problem })
    }
}
