//! Refunds and resets by the name of a limit and a key.
//!
//! The caller says which limit and which key, as for [`Gate::check_by_name`]. There is no receipt of an earlier charge,
//! so a refund gives back the newest charges of the key first. [`Outcome::refund`] and reservations know their charge.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::store::Hits;
use super::{Gate, Outcome, State};
use crate::key::Key;
use crate::limiter::Hit;

/// The store did not confirm a refund, a reset or a reservation in time. It may have been executed nevertheless.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreUnavailable {
    /// The reason, for people.
    pub reason: String,
}

impl StoreUnavailable {
    #[cfg(feature = "redis")]
    pub(super) fn new(error: impl fmt::Display) -> Self {
        Self { reason: error.to_string() }
    }
}

impl fmt::Display for StoreUnavailable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the store is unavailable ({}): try again later", self.reason)
    }
}

impl std::error::Error for StoreUnavailable {}

/// A change of a key's state.
#[derive(Clone, Copy)]
enum Change {
    Refund { units: u64 },
    Reset,
    LiftBan,
}

impl Gate {
    /// Gives `units` back to a key of the rule named `rule`, and returns the outcome of a check that costs nothing
    /// afterwards. Returns `None` if there is no such rule.
    ///
    /// No receipt says when the units were taken, so the newest charges are given back first:
    ///
    /// - A bucket gets the units back as tokens.
    /// - A fixed window gets them back in the current window.
    /// - A log loses its newest entries, a counter the counts of its newest segments. Units in the oldest segment of a
    ///   counter, which counts in part, are given back in part.
    /// - A queue gives back nothing, because later requests already have their delays.
    ///
    /// A key never has more than its whole quota. Refund only units that were taken: more would give back the units of
    /// other requests, and on Redis those that nodes hold in [leases](crate::Consistency::Leased). Bans stay.
    ///
    /// In memory, the future is ready at once.
    ///
    /// ```
    /// use tollgate::rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{FixedWindow, Gate, HOUR, Limit};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let per_user = Rule::new(Limit::new("per-user", FixedWindow::new(10, HOUR))?).key(KeyPart::header("x-user-id"));
    /// let gate = Gate::in_memory(RuleSet::builder().rule(per_user).build()?)?;
    /// let taken = gate.check_by_name("per-user", &[b"ann"], 5).expect("the rule exists").outcome().await;
    /// assert!(taken.is_allowed());
    /// let refunded = gate.refund_by_name("per-user", &[b"ann"], 3).expect("the rule exists").await?;
    /// assert_eq!(refunded.decision().map(|decision| decision.remaining()), Some(8));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn refund_by_name(
        &self,
        rule: &str,
        key: &[&[u8]],
        units: u64,
    ) -> Option<impl Future<Output = Result<Outcome, StoreUnavailable>> + Send + use<>> {
        self.change_by_name(rule, key, Change::Refund { units })
    }

    /// Gives a key of the rule named `rule` its whole quota back and lifts its ban, and returns the outcome of a check
    /// that costs nothing afterwards. Returns `None` if there is no such rule.
    ///
    /// A reset in memory has no effect on a key that was evicted for lack of memory if no slot is available; see
    /// [`Limiter::reset`](crate::Limiter::reset). In memory, the future is ready at once.
    #[must_use]
    pub fn reset_by_name(
        &self,
        rule: &str,
        key: &[&[u8]],
    ) -> Option<impl Future<Output = Result<Outcome, StoreUnavailable>> + Send + use<>> {
        self.change_by_name(rule, key, Change::Reset)
    }

    /// Lifts the ban that a rule itself has set on a key, and does not change its quota. Otherwise as
    /// [`reset_by_name`](Self::reset_by_name).
    #[doc(hidden)]
    #[must_use]
    pub fn lift_ban_by_name(
        &self,
        rule: &str,
        key: &[&[u8]],
    ) -> Option<impl Future<Output = Result<Outcome, StoreUnavailable>> + Send + use<>> {
        self.change_by_name(rule, key, Change::LiftBan)
    }

    fn change_by_name(
        &self,
        rule: &str,
        key: &[&[u8]],
        change: Change,
    ) -> Option<impl Future<Output = Result<Outcome, StoreUnavailable>> + Send + use<>> {
        let state = self.0.state.load_full();
        let hits = hits_by_name(&state, rule, key, change)?;
        let (rule, key): (String, Vec<Vec<u8>>) = (rule.to_owned(), key.iter().map(|part| part.to_vec()).collect());
        Some(async move {
            match change {
                Change::Refund { .. } => state.store.credit(&hits).await?,
                Change::Reset | Change::LiftBan => state.store.reset(&hits).await?,
            }
            let key: SmallVec<[&[u8]; 3]> = key.iter().map(Vec::as_slice).collect();
            let mut outcome = Outcome::unlimited(state);
            Ok(match outcome.check_by_name(&rule, &key, 0).flatten() {
                None => outcome,
                Some(remote) => outcome.complete(remote).await,
            })
        })
    }
}

/// Returns the hits on a key of a rule, also if the key is exempt or blocked. `None` if there is no such rule.
fn hits_by_name(state: &Arc<State>, rule: &str, key: &[&[u8]], change: Change) -> Option<Hits> {
    let State { rules, store, .. } = &**state;
    let key = rules.normal_key(rule, key);
    let key: SmallVec<[&[u8]; 3]> = key.iter().map(|part| &**part).collect();
    let (limit, ban) = rules.limits_of_key(rule, &key)?;
    let mut hits = store.no_hits();
    if let Some(limit) = limit.filter(|_| !matches!(change, Change::LiftBan)) {
        let units = if let Change::Refund { units } = change { units } else { 0 };
        store.add_hit(&mut hits, Hit::new(limit, Key::byte_parts(&key)).cost(units));
    }
    if let (Some(ban), Change::Reset | Change::LiftBan) = (ban, change) {
        store.add_hit(&mut hits, Hit::new(ban, Key::byte_parts(&key)).cost(0));
    }
    Some(hits)
}
