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
}

impl StoreWarning {
    /// The words that [`kind`](Self::kind) returns.
    pub const KINDS: [&'static str; 4] = ["foreign_data", "other_layout", "not_subscribed", "file"];

    /// Returns the kind of the problem as a word, such as `other_layout`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        let [foreign_data, other_layout, not_subscribed, file] = Self::KINDS;
        match self {
            Self::ForeignData { .. } => foreign_data,
            Self::OtherLayout { .. } => other_layout,
            Self::NotSubscribed { .. } => not_subscribed,
            Self::File { .. } => file,
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
        }
    }
}

/// Time after the last request for foreign data during which there is a warning.
const WARN_FOR: Duration = Duration::from_secs(60);

/// The limits of whose keys some hold foreign data, with the time of the last request for one. The names are those of
/// limits, so there are few.
#[derive(Default)]
pub(super) struct ForeignData(Mutex<BTreeMap<String, Instant>>);

impl ForeignData {
    /// Records a request for a key with foreign data. Returns whether it is the first for that limit in a while.
    pub(super) fn found(&self, limit: &str) -> bool {
        let (now, mut limits) = (Instant::now(), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        limits.retain(|_, last| now.duration_since(*last) < WARN_FOR);
        limits.insert(limit.to_owned(), now).is_none()
    }

    pub(super) fn warnings(&self) -> Vec<StoreWarning> {
        let (now, limits) = (Instant::now(), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let recent = limits.iter().filter(|(_, last)| now.duration_since(**last) < WARN_FOR);
        recent.map(|(limit, _)| StoreWarning::ForeignData { limit: limit.clone() }).collect()
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
