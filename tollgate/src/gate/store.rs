//! Where a gate keeps its keys: in this process's memory, or on Redis.

use std::pin::Pin;

use futures_util::future::{join, join_all};

use super::pending::{PendingChecks, decide_now, strike, struck};
use super::{Gate, Outcome};
use crate::decision::Decision;
use crate::error::InvalidLimit;
use crate::limit::LimitId;
use crate::limiter::{FewAsked, Hit, Limiter, LimiterBuilder};
use crate::redis::{AllWanted, ConnectError, RedisLimiter, RedisLimiterBuilder};
use crate::reservation::Settlement;
use crate::rules::RuleSet;
#[cfg(feature = "tower")]
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

#[derive(Clone)]
pub(super) enum Store {
    Memory(Limiter),
    Redis(RedisLimiter),
}

/// What is asked of a store, ready to be asked.
pub(super) enum Wanted {
    Memory(FewAsked),
    // What travels to another machine has time to be allocated, and must not make the other way longer.
    Redis(Box<AllWanted>),
}

impl Wanted {
    /// One of its limits alone, at another cost.
    pub(super) fn only(&self, limit: LimitId, cost: u64) -> Self {
        match self {
            Self::Memory(asked) => Self::Memory(crate::limiter::only(asked, limit, cost)),
            Self::Redis(wanted) => Self::Redis(Box::new(crate::redis::only(wanted, limit, cost))),
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Memory(asked) => asked.len(),
            Self::Redis(wanted) => wanted.len(),
        }
    }

    /// Its limits, each with the cost that is asked of it.
    pub(super) fn costs(&self) -> impl Iterator<Item = (LimitId, u64)> {
        let (here, elsewhere) = match self {
            Self::Memory(asked) => (&asked[..], &[][..]),
            Self::Redis(wanted) => (&[][..], &wanted[..]),
        };
        here.iter().map(|one| (one.limit, one.cost)).chain(elsewhere.iter().map(crate::redis::cost))
    }

    /// That too, of a store in memory.
    #[cfg(feature = "tower")]
    pub(super) fn push(&mut self, one: HashedHit) {
        if let Self::Memory(asked) = self {
            asked.push(one);
        }
    }

    /// Puts its limits in order.
    pub(super) fn sort_by_key<K: Ord>(&mut self, key: impl Fn(LimitId) -> K) {
        match self {
            Self::Memory(asked) => asked.sort_by_key(|one| key(one.limit)),
            Self::Redis(wanted) => wanted.sort_by_key(|one| key(crate::redis::cost(one).0)),
        }
    }

    /// Replaces the hits by the same hits with their receipts.
    fn set_charged(&mut self, charged: AllWanted) {
        if let Self::Redis(wanted) = self {
            **wanted = charged;
        }
    }

    pub(super) fn append(&mut self, other: Self) {
        match (self, other) {
            (Self::Memory(asked), Self::Memory(mut other)) => asked.append(&mut other),
            (Self::Redis(wanted), Self::Redis(mut other)) => wanted.append(&mut other),
            _ => unreachable!("both are of one store"),
        }
    }
}

impl Gate {
    /// A gate whose keys are on Redis. The limits of the rules take the place of any that the builder has.
    ///
    /// # Errors
    ///
    /// When the URL or a setting can never work. Redis need not be there yet.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub async fn on_redis(rules: RuleSet, settings: RedisLimiterBuilder) -> Result<Self, ConnectError> {
        let limiter = settings.limits(rules.limit_set()).connect().await?;
        Ok(Self::with_store(rules, Store::Redis(limiter)))
    }

    /// The limiter in this process's memory, for its [`overflow`](Limiter::overflow) and to count its keys; `None` on
    /// Redis.
    #[must_use]
    pub fn memory(&self) -> Option<Limiter> {
        match &self.0.state.load().store {
            Store::Memory(limiter) => Some(limiter.clone()),
            Store::Redis(_) => None,
        }
    }

    /// The limiter on Redis, for its [`stats`](RedisLimiter::stats) and to return leases; `None` in memory.
    #[must_use]
    pub fn redis(&self) -> Option<RedisLimiter> {
        match &self.0.state.load().store {
            Store::Memory(_) => None,
            Store::Redis(limiter) => Some(limiter.clone()),
        }
    }
}

impl Store {
    pub(super) fn memory(rules: &RuleSet, settings: LimiterBuilder) -> Result<Self, InvalidLimit> {
        rules.limiter(settings).map(Self::Memory)
    }

    /// The store of a limiter with the limits of the rules.
    pub(super) fn of(limiter: Limiter) -> Self {
        Self::Memory(limiter)
    }

    pub(super) fn with_rules(&self, rules: &RuleSet) -> Result<Self, InvalidLimit> {
        match self {
            Self::Memory(limiter) => rules.limiter_after(limiter).map(Self::Memory),
            Self::Redis(limiter) => limiter.with_limits(rules.limit_set()).map(Self::Redis),
        }
    }

    /// The limiter, if it is in this process.
    #[inline(always)]
    pub(super) fn here(&self) -> Option<&Limiter> {
        match self {
            Self::Memory(limiter) => Some(limiter),
            Self::Redis(_) => None,
        }
    }

    /// Returns the wall clock's time, as the limiter knows it.
    pub(super) fn now(&self) -> Timestamp {
        match self {
            Self::Memory(limiter) => limiter.wall_now(),
            Self::Redis(limiter) => limiter.now(),
        }
    }

    pub(super) fn want_nothing(&self) -> Wanted {
        match self {
            Self::Memory(_) => Wanted::Memory(FewAsked::new()),
            Self::Redis(_) => Wanted::Redis(Box::default()),
        }
    }

    /// Asks for that too. No two hits may be of one key of one limit.
    #[inline]
    pub(super) fn want_too(&self, wanted: &mut Wanted, hit: Hit<'_>) {
        match (self, wanted) {
            (Self::Memory(limiter), Wanted::Memory(asked)) => asked.push(limiter.ask_hit(&hit)),
            (Self::Redis(limiter), Wanted::Redis(wanted)) => wanted.extend(limiter.want(&[hit])),
            _ => unreachable!("what is wanted is of this store"),
        }
    }

    /// The denial, if this process knows that one of these hits is denied; otherwise nothing has changed. No other
    /// machine is asked.
    pub(super) fn refuse(&self, wanted: &Wanted) -> Option<Decision> {
        match (self, wanted) {
            (Self::Memory(limiter), Wanted::Memory(asked)) => limiter.refuse_asked(asked),
            (Self::Redis(limiter), Wanted::Redis(wanted)) => limiter.certain_denial(wanted),
            _ => None,
        }
    }

    /// What would be answered now, taking nothing; `None` if the store cannot tell.
    pub(super) async fn look(&self, wanted: &Wanted) -> Option<Decision> {
        match (self, wanted) {
            (Self::Memory(limiter), Wanted::Memory(asked)) => Some(limiter.look_asked(asked)),
            (Self::Redis(limiter), Wanted::Redis(wanted)) => limiter.look_wanted(wanted).await.ok(),
            _ => None,
        }
    }

    /// Brings what a decision has taken for the hit of that position to its actual cost.
    pub(super) async fn settle(&self, wanted: &Wanted, hit: usize, decision: &Decision, actual: u64) -> Settlement {
        match (self, wanted) {
            (Self::Memory(limiter), Wanted::Memory(asked)) => {
                limiter.settle_asked(asked.get(hit..=hit).unwrap_or_default(), decision, actual)
            }
            (Self::Redis(limiter), Wanted::Redis(wanted)) => {
                let wanted = wanted.get(hit..=hit).unwrap_or_default();
                limiter.settle_wanted(wanted, actual).await.unwrap_or(Settlement::Unreachable)
            }
            _ => Settlement::Unreachable,
        }
    }
}

/// What has to be asked elsewhere.
pub(crate) struct RemoteCheck {
    posed: Option<Box<PendingChecks>>,
    limiter: RedisLimiter,
    /// The decision of the rules that are enforced, if it is known.
    denied: Option<Decision>,
}

/// Asks all that a request asks, unless that has to be asked elsewhere.
#[inline(always)]
pub(super) fn ask(outcome: &mut Outcome, posed: Option<Box<PendingChecks>>) -> Option<RemoteCheck> {
    ask_unless_known(outcome, posed, None)
}

/// Goes on with a denial that [`Store::refuse`] gave: the rules that only watch are asked, and the key is struck.
pub(super) fn ask_after_denial(
    outcome: &mut Outcome,
    posed: Option<Box<PendingChecks>>,
    denied: Decision,
) -> Option<RemoteCheck> {
    ask_unless_known(outcome, posed, Some(denied))
}

/// Asks all that is not known already: `denied` is the decision of the rules that are enforced.
#[inline(always)]
fn ask_unless_known(
    outcome: &mut Outcome,
    mut posed: Option<Box<PendingChecks>>,
    denied: Option<Decision>,
) -> Option<RemoteCheck> {
    let decision = match &outcome.state.store {
        Store::Memory(limiter) => {
            let decide = |wanted: &Wanted| match wanted {
                Wanted::Memory(asked) => limiter.decide_asked(asked),
                Wanted::Redis(_) => limiter.decide_asked(&[]),
            };
            decide_now(outcome, posed.as_deref_mut(), denied, decide)
        }
        Store::Redis(limiter) => {
            let watches = posed.as_ref().is_some_and(|posed| !posed.watching.is_empty());
            let asks = match &denied {
                Some(denied) => strike(outcome, denied).is_some(),
                None => outcome.wanted.costs().next().is_some(),
            };
            if watches || asks {
                return Some(RemoteCheck { posed, limiter: limiter.clone(), denied });
            }
            denied.unwrap_or_else(|| Decision::without_limit(limiter.now()))
        }
    };
    outcome.decided(posed, decision);
    None
}

pub(super) fn ask_elsewhere(outcome: Outcome, what: RemoteCheck) -> Pin<Box<dyn Future<Output = Outcome> + Send>> {
    Box::pin(ask_redis(outcome, what))
}

async fn ask_redis(mut outcome: Outcome, what: RemoteCheck) -> Outcome {
    let RemoteCheck { mut posed, limiter, denied } = what;
    let state = outcome.state.clone();
    let decide = |wanted: &Wanted| {
        let mut wanted = match wanted {
            Wanted::Redis(wanted) => (**wanted).clone(),
            Wanted::Memory(_) => AllWanted::new(),
        };
        // A cost that may change later is charged at the store, which knows best what is left for the rest.
        crate::redis::take_from_store(&mut wanted, |limit| state.rules.may_change(state.rules.owner(limit)));
        limiter.clone().decide_wanted(wanted)
    };
    // All at once, so that they travel together.
    let watching = posed.iter().flat_map(|posed| &posed.watching).map(|(rule, wanted)| {
        let decided = decide(wanted);
        async move { (*rule, decided.await) }
    });
    let enforced = async {
        match denied {
            Some(denied) => (denied, None),
            None => {
                let (decision, charged) = decide(&outcome.wanted).await;
                (decision, Some(charged))
            }
        }
    };
    let ((mut decision, charged), watched) = join(enforced, join_all(watching)).await;
    if let Some(charged) = charged {
        outcome.wanted.set_charged(charged);
    }
    if let Some(strike) = strike(&outcome, &decision) {
        // Whoever hangs up before the answer is struck all the same.
        if let Ok((strike, _)) = tokio::spawn(decide(&strike)).await {
            decision = struck(decision, strike);
        }
    }
    if let Some(posed) = &mut posed {
        let watched = watched.into_iter().zip(&mut posed.watching).map(|((rule, (decision, charged)), watching)| {
            watching.1.set_charged(charged);
            (rule, decision)
        });
        posed.watched = watched.collect();
    }
    outcome.decided(posed, decision);
    outcome
}
