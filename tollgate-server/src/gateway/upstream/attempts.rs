//! The attempts of a request at the upstreams of its route: which one is next, and whether there is another after one
//! has failed.

use std::sync::Arc;

use smallvec::SmallVec;

use super::http2_pool::StreamPermit;
use super::reuse::ReusePolicy;
use super::{ConnPool, Eject, Target};
use crate::gateway::deadline::{Tick, Ticks, UpstreamDeadline, Wait};
use crate::gateway::failure::{Failure, Fault};
use crate::gateway::site::{Route, WeightedUpstream};

/// The attempts of a request.
#[derive(Default)]
pub(in crate::gateway) struct Attempts {
    /// The numbers of upstreams that were tried, or cannot be.
    tried: SmallVec<[usize; 4]>,
    made: usize,
    /// The upstream that is tried next, if that is decided.
    next: Option<usize>,
}

impl Attempts {
    /// Starts without upstreams that cannot serve the request.
    pub(in crate::gateway) fn without(excluded: impl Iterator<Item = usize>) -> Self {
        Self { tried: excluded.collect(), ..Self::default() }
    }

    /// Chooses the next upstream.
    pub(in crate::gateway) fn choose<'r>(
        &mut self,
        route: &'r Route,
        worker: usize,
        now: Tick,
    ) -> Option<(&'r WeightedUpstream, UpstreamAttempt)> {
        let decided = self.next.take().and_then(|number| Some((number, route.upstream(number)?)));
        let (number, upstream) = decided.or_else(|| route.choose(&self.tried, now))?;
        self.tried.push(number);
        self.made += 1;
        Some((upstream, UpstreamAttempt::new(&upstream.target, route, worker)))
    }

    /// Returns the upstream that was chosen last.
    pub(in crate::gateway) fn current<'r>(&self, route: &'r Route) -> Option<&'r WeightedUpstream> {
        self.tried.last().and_then(|number| route.upstream(*number))
    }

    /// Makes the upstream that was chosen last the next one: it was not sent anything.
    pub(in crate::gateway) fn undo_last(&mut self) {
        self.next = self.tried.pop();
        self.made -= usize::from(self.next.is_some());
    }

    /// Records that an attempt has failed. Returns whether another one follows, which it can only if the request is
    /// retryable.
    pub(in crate::gateway) fn note_failed(
        &self,
        (route, target): (&Route, &Target),
        fault: &Fault,
        is_retryable: bool,
        (worker, now): (usize, Tick),
    ) -> bool {
        let failure = fault.failure();
        if failure.is_upstreams() || failure.is_gateways() {
            target.failed(fault, &route.eject, now);
        }
        let tally = route.tally(worker);
        tally.note_failure(failure);
        let retries = is_retryable && self.made <= usize::from(route.retries) && !would_fail_again(failure, route);
        if retries {
            tally.note_retry();
        }
        retries
    }
}

/// Returns whether another attempt is pointless: the route has one upstream, and it cannot be reached.
fn would_fail_again(failure: Failure, route: &Route) -> bool {
    let is_unreached = matches!(failure, Failure::CannotConnect | Failure::BadCertificate | Failure::ConnectTimeout)
        || failure.is_gateways();
    is_unreached && !route.has_several()
}

/// An attempt of a request at an upstream. Counts as a request in flight of the upstream until it is dropped.
pub(in crate::gateway) struct UpstreamAttempt {
    pub(in crate::gateway) target: Arc<Target>,
    /// The stream on a shared connection.
    pub(in crate::gateway) stream_permit: Option<StreamPermit>,
    /// The state of the client's body, unless the lane sends it.
    pub(in crate::gateway) deadline: Option<Arc<UpstreamDeadline>>,
    pub(in crate::gateway) timeout: Wait,
    pub(in crate::gateway) eject: Eject,
    reuse: ReusePolicy,
    worker: usize,
}

impl UpstreamAttempt {
    fn new(target: &Arc<Target>, route: &Route, worker: usize) -> Self {
        target.begin();
        let Route { timeout, eject, reuse, .. } = *route;
        Self { target: Arc::clone(target), stream_permit: None, deadline: None, timeout, eject, reuse, worker }
    }

    /// Returns whether the client's body was cut off, which closes the connection or resets the stream.
    pub(in crate::gateway) fn has_broken_body(&self) -> bool {
        self.body_failure().is_some()
    }

    pub(in crate::gateway) fn body_failure(&self) -> Option<Failure> {
        self.deadline.as_ref()?.body_failure()
    }

    /// Returns the pool of its connection.
    pub(in crate::gateway) fn pool(&self, ticks: &Arc<Ticks>) -> ConnPool {
        let (target, ticks) = (Arc::clone(&self.target), Arc::clone(ticks));
        ConnPool { target, worker: self.worker, policy: self.reuse, ticks }
    }
}

impl Drop for UpstreamAttempt {
    fn drop(&mut self) {
        self.target.end();
    }
}
