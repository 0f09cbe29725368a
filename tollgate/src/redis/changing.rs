//! Limits that change while they are in use: what a limiter with other limits goes on with.
//!
//! State on Redis needs no changing: it is kept by name and algorithm, and read by the numbers that ask. What a process
//! keeps for itself goes by terms, the numbers as Redis is told them: a limit that did not change keeps its terms.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::script::{Ask, Terms};
use super::{Inner, RedisLimiter, Wanted, names};
use crate::error::InvalidLimit;
use crate::key::Key;
use crate::limit::{Consistency, Limit, LimitId};
use crate::limit_set::{Checked, LimitSet};
use crate::units::WallOffset;

/// A limit, ready for Redis.
pub(super) struct Prepared {
    pub(super) limit: Limit,
    prefix: String,
    terms: Arc<Terms>,
    /// How long a slice of it lives, if it is leased.
    pub(super) horizon: Option<u64>,
}

impl RedisLimiter {
    /// A limiter with other limits that goes on where this one is: on the same connections, and with the same keys.
    /// This one works on as before, and both count together, so that they can be exchanged while requests are decided.
    ///
    /// The new numbers apply from the next decision on. State on Redis is kept by the name and the algorithm of a
    /// limit, and read by the numbers that ask:
    ///
    /// - Of a bucket, the time at which it is full again survives, at most the time that the new bucket takes to fill.
    /// - Of a window, what was spent in it survives, also if it is more than the new limit: then nothing is left. If
    ///   its length was changed, it counts in that of the new windows in which it began.
    ///
    /// Denials that were remembered are not used by the new limiter. Slices of limits that did not change are spent on;
    /// those of others are given back. Give back what a decision took through the limiter that made it.
    ///
    /// # Errors
    ///
    /// When there is no limit or more than 10 000, when two have the same name, or when a variant has no limit of its
    /// name and algorithm. Then nothing has changed.
    pub fn with_limits(&self, limits: impl Into<LimitSet>) -> Result<Self, InvalidLimit> {
        let inner = &*self.0;
        let limits = limits.into();
        let local = inner.local.with_limits(limits.clone())?;
        let Checked { limits, asked } = limits.checked()?;
        let mut before: HashMap<&str, Vec<&Prepared>> = HashMap::new();
        for prepared in &inner.limits {
            before.entry(prepared.limit.name()).or_default().push(prepared);
        }
        let named = |limit: &Limit| before.get(limit.name()).map_or(&[][..], Vec::as_slice);
        let limits: Box<[Prepared]> = limits
            .into_iter()
            .map(|limit| {
                let before = named(&limit);
                Prepared::new(limit, before)
            })
            .collect();
        let shared = inner.shared.clone();
        let kept: HashSet<*const Terms> = limits.iter().map(|prepared| Arc::as_ptr(&prepared.terms)).collect();
        shared.leases.withdraw_unless(|terms| kept.contains(&Arc::as_ptr(terms)));
        let denials = shared.all_denials.begin();
        Ok(Self(Arc::new(Inner { limits, asked, local, denials, shared })))
    }
}

impl Prepared {
    /// A limit that was there before keeps its terms, so that what goes by them goes on.
    pub(super) fn new(mut limit: Limit, before: &[&Self]) -> Self {
        // Redis's clock is the wall clock, also for limits that have been in a limiter in memory.
        limit.follow_wall_clock(&WallOffset::default());
        let numbers = |limit: &Limit| (*limit.algorithm(), limit.consistency());
        let same = before.iter().find(|old| old.limit.is_namesake_of(&limit) && numbers(&old.limit) == numbers(&limit));
        if let Some(Self { prefix, terms, horizon, .. }) = same {
            return Self { prefix: prefix.clone(), terms: terms.clone(), horizon: *horizon, limit };
        }
        let leased = match limit.consistency() {
            Consistency::Leased => limit.compiled().leased(),
            Consistency::Exact => None,
        };
        let (terms, horizon) = match leased {
            Some(leased) => (Terms::new(&leased.stored), Some(leased.horizon)),
            None => (Terms::new(limit.compiled()), None),
        };
        Self { prefix: names::prefix(&limit), terms: Arc::new(terms), horizon, limit }
    }

    pub(super) fn want(&self, limit: LimitId, key: Key<'_>, cost: u64) -> Wanted {
        Wanted { limit, ask: Ask { terms: self.terms.clone(), name: names::name(&self.prefix, key), cost } }
    }
}
