//! Costs that count only after the response: limits with [`Rule::count_after`](crate::Rule::count_after).
//!
//! When a request arrives, such a limit is peeked at the request's cost. If the cost fits, the hit of the limit costs
//! nothing from then on, so that the request is decided with its other limits as usual. If it does not fit, the request is
//! decided as if it took its cost at once: the denial, its strikes and its place in the denial cache are those of any
//! other limit. If it fits by then after all, it has taken its cost, and its response may give it back.
//!
//! A request whose response never comes is charged: dropping the outcome charges all hits that are not settled, unless
//! the service was never called.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;
use tollgate::{Decision, LimitId, Settlement};

use super::State;
use super::outcome::{Outcome, PendingChecks};
use super::store::{Hits, Store};
use crate::RuleSet;

/// A hit that is charged after the response.
pub(super) struct DeferredHit {
    /// The number of the hit among those of the request: those of the enforced rules, then those of the shadow rules.
    number: usize,
    rule: u32,
    /// The hit alone, at its cost.
    hit: Hits,
    cost: u64,
}

/// The hits of a request that are charged after the response. Few requests have any.
pub(super) type DeferredHits = SmallVec<[DeferredHit; 1]>;

/// Returns the hits that count only after the response. `first` is the number of the first one.
fn of_hits(rules: &RuleSet, hits: &Hits, first: usize) -> DeferredHits {
    let is_deferred = |limit: LimitId| {
        let rule = rules.owner(limit);
        (rules.is_deferred(rule) && rules.ban(rule) != Some(limit)).then_some(rule)
    };
    let deferred = hits.costs().enumerate().filter(|(_, (_, cost))| *cost > 0).filter_map(|(index, (limit, cost))| {
        Some(DeferredHit { number: first + index, rule: is_deferred(limit)?, hit: hits.single(index), cost })
    });
    deferred.collect()
}

/// Returns the hits to peek at.
fn together(store: &Store, deferred: &[DeferredHit]) -> Hits {
    let mut hits = store.no_hits();
    deferred.iter().for_each(|one| hits.append(one.hit.clone()));
    hits
}

/// Lets the hits cost nothing when the request is decided.
fn take_nothing(hits: &mut Hits, deferred: &[DeferredHit], first: usize) {
    deferred.iter().for_each(|one| hits.set_cost(one.number - first, 0));
}

/// Peeks at the limits in memory that count only after the response. The enforced ones are left out if the request is
/// denied already.
#[cold]
#[inline(never)]
pub(super) fn defer_in_memory(outcome: &mut Outcome, pending: &mut Option<Box<PendingChecks>>, is_denied: bool) {
    let Outcome { state, hits, .. } = outcome;
    let Some(limiter) = state.store.in_memory() else { return };
    let fits = |deferred: &[DeferredHit]| {
        !deferred.is_empty() && limiter.peek_hashed(together(&state.store, deferred).hashed()).is_allowed()
    };
    let mut all = DeferredHits::new();
    let enforced = of_hits(&state.rules, hits, 0);
    let shadow = hits.len()..;
    if !is_denied && fits(&enforced) {
        take_nothing(hits, &enforced, 0);
        all.extend(enforced);
    }
    for (number, (_, hits)) in shadow.zip(pending.iter_mut().flat_map(|pending| &mut pending.shadow_hits)) {
        let shadow = of_hits(&state.rules, hits, number);
        if fits(&shadow) {
            take_nothing(hits, &shadow, number);
            all.extend(shadow);
        }
    }
    if !all.is_empty() {
        pending.get_or_insert_default().deferred = all;
    }
}

/// Peeks at the limits on Redis that count only after the response, as [`defer_in_memory`] does, unless this process knows
/// a denial. Returns `false` if the store does not reply.
#[cfg(feature = "redis")]
pub(super) async fn defer_on_redis(
    outcome: &mut Outcome,
    pending: &mut Option<Box<PendingChecks>>,
    is_denied: bool,
) -> bool {
    use futures_util::future::join_all;

    let Outcome { state, hits, .. } = outcome;
    let Store::Redis(limiter) = &state.store else { return true };
    let enforced = if is_denied { DeferredHits::new() } else { of_hits(&state.rules, hits, 0) };
    let shadow = pending.iter().flat_map(|pending| &pending.shadow_hits);
    let shadow = (hits.len()..).zip(shadow).map(|(number, (_, hits))| of_hits(&state.rules, hits, number));
    let groups: Vec<DeferredHits> = std::iter::once(enforced).chain(shadow).collect();
    let is_known = |one: &DeferredHit| one.hit.on_redis().iter().any(|hit| limiter.known_denial_of(hit).is_some());
    let peeked = groups.iter().map(|deferred| async {
        if deferred.is_empty() || deferred.iter().any(is_known) {
            return Some(false);
        }
        Some(state.store.peek(&together(&state.store, deferred)).await?.is_allowed())
    });
    let fits = join_all(peeked).await;
    if fits.contains(&None) {
        return false;
    }
    let mut all = DeferredHits::new();
    let shadow = pending.iter_mut().flat_map(|pending| &mut pending.shadow_hits).map(|(_, hits)| hits);
    let enforced = hits.len();
    let places = std::iter::once((0, &mut *hits)).chain((enforced..).zip(shadow));
    for ((deferred, (first, hits)), fits) in groups.into_iter().zip(places).zip(fits) {
        if fits == Some(true) {
            take_nothing(hits, &deferred, first);
            all.extend(deferred);
        }
    }
    if !all.is_empty() {
        pending.get_or_insert_default().deferred = all;
    }
    true
}

/// The charges of an allowed request that follow its response. Hits that are not settled are charged on drop.
pub(super) struct DeferredCharges {
    state: Arc<State>,
    hits: SmallVec<[(DeferredHit, AtomicBool); 1]>,
    /// Whether the service may have been called.
    is_served: AtomicBool,
    #[cfg(feature = "redis")]
    runtime: Option<tokio::runtime::Handle>,
}

impl DeferredCharges {
    pub(super) fn new(state: &Arc<State>, hits: DeferredHits) -> Self {
        Self {
            state: Arc::clone(state),
            hits: hits.into_iter().map(|hit| (hit, AtomicBool::new(true))).collect(),
            is_served: AtomicBool::new(true),
            #[cfg(feature = "redis")]
            runtime: tokio::runtime::Handle::try_current().ok(),
        }
    }

    /// Returns the cost at which the hit of a rule is charged unless its response says otherwise.
    pub(super) fn cost_of(&self, rule: u32) -> Option<u64> {
        self.hits.iter().find(|(hit, _)| hit.rule == rule).map(|(hit, _)| hit.cost)
    }

    /// Charges the hit with this number at its actual cost, once. The charge goes on if the result is dropped. Returns `None`
    /// if the hit is not deferred.
    pub(super) fn charge(&self, number: usize, actual: u64) -> Option<Charging> {
        let (hit, is_open) = self.hits.iter().find(|(hit, _)| hit.number == number)?;
        Some(match is_open.swap(false, Ordering::Relaxed) {
            true => self.begin(hit, actual),
            false => Charging::Done(Settlement::AlreadySettled),
        })
    }

    fn begin(&self, DeferredHit { hit, .. }: &DeferredHit, actual: u64) -> Charging {
        if actual == 0 {
            return Charging::Done(Settlement::Settled);
        }
        let (state, mut hit) = (Arc::clone(&self.state), hit.clone());
        hit.set_cost(0, actual);
        let mut charged = Box::pin(async move { state.store.charge(&hit).await });
        match charged.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            // In memory.
            Poll::Ready(settlement) => Charging::Done(settlement),
            // Spawned, so that a client that disconnects meanwhile is charged too.
            #[cfg(feature = "redis")]
            Poll::Pending => match &self.runtime {
                Some(runtime) => Charging::Task(runtime.spawn(charged)),
                None => Charging::Done(Settlement::Unreachable),
            },
            #[cfg(not(feature = "redis"))]
            Poll::Pending => Charging::Done(Settlement::Unreachable),
        }
    }

    /// Sets whether the service may have been called. Until then, nothing is charged on drop.
    pub(super) fn set_served(&self, is_served: bool) {
        self.is_served.store(is_served, Ordering::Relaxed);
    }

    /// Ends all charges that are not settled.
    pub(super) fn cancel(&self) {
        self.hits.iter().for_each(|(_, is_open)| is_open.store(false, Ordering::Relaxed));
    }
}

impl Drop for DeferredCharges {
    fn drop(&mut self) {
        if self.is_served.load(Ordering::Relaxed) {
            self.hits.iter().for_each(|(hit, is_open)| {
                if is_open.swap(false, Ordering::Relaxed) {
                    drop(self.begin(hit, hit.cost));
                }
            });
        }
    }
}

/// A charge that has begun.
pub(super) enum Charging {
    Done(Settlement),
    #[cfg(feature = "redis")]
    Task(tokio::task::JoinHandle<Settlement>),
}

impl Future for Charging {
    type Output = Settlement;

    fn poll(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<Settlement> {
        match self.get_mut() {
            Self::Done(settlement) => Poll::Ready(*settlement),
            #[cfg(feature = "redis")]
            Self::Task(task) => Pin::new(task).poll(_context).map(|charged| charged.unwrap_or(Settlement::Unreachable)),
        }
    }
}

impl PendingChecks {
    /// Takes the charges that follow the response of an allowed request.
    pub(super) fn take_deferred(&mut self, state: &Arc<State>, decision: &Decision) -> Option<Box<DeferredCharges>> {
        let deferred = std::mem::take(&mut self.deferred);
        (decision.is_allowed() && !deferred.is_empty()).then(|| Box::new(DeferredCharges::new(state, deferred)))
    }
}

impl Outcome {
    fn deferred(&self) -> Option<&DeferredCharges> {
        self.extras.as_ref()?.deferred.as_deref()
    }

    /// Returns the cost at which a rule is charged after the response, if it counts only then.
    pub(super) fn deferred_cost(&self, rule: u32) -> Option<u64> {
        self.deferred()?.cost_of(rule)
    }

    /// Charges a hit that counts after the response.
    pub(super) fn charge_deferred(&self, number: usize, actual: u64) -> Option<Charging> {
        self.deferred()?.charge(number, actual)
    }

    /// Charges nothing after the response, for a request whose service was not called.
    #[doc(hidden)]
    pub fn cancel_deferred(&self) {
        if let Some(deferred) = self.deferred() {
            deferred.cancel();
        }
    }

    /// Charges nothing on drop until [`service_called`](Self::service_called). Limits that count after the response
    /// otherwise charge an outcome that is dropped unsettled.
    #[doc(hidden)]
    pub fn before_service(&self) {
        if let Some(deferred) = self.deferred() {
            deferred.set_served(false);
        }
    }

    /// Charges limits that count after the response if the outcome is dropped unsettled.
    #[doc(hidden)]
    pub fn service_called(&self) {
        if let Some(deferred) = self.deferred() {
            deferred.set_served(true);
        }
    }
}
