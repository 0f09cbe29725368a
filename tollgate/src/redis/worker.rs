//! Natural batching: while a trip to Redis is under way, questions gather, and travel together on the next.
//!
//! An idle limiter sends a question at once and alone. A busy one sends as many as have come, up to a bound, in
//! one script call, which decides them in order. All questions of one process for one server pass through here, so
//! those about one key stay in the order in which they were asked. Each server has a queue of its own: one that hangs
//! keeps no question for another waiting.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::StoreError;
use super::cluster::Cluster;
use super::names;
use super::node::{Node, RunError};
use super::script::{Batch, ScriptReply, ScriptRequest};
use super::stats::Calls;
use crate::clock::TimeSource;
use crate::units::Timestamp;

/// Questions in one script call. More would save Redis little, make the others wait, and leave one side idle while
/// the other works.
pub(super) const MAX_BATCH: usize = 64;
/// Keys in one script call: Lua's stack holds some thousands.
pub(super) const MAX_KEYS: usize = 1024;
/// Work in one script call, in that of a request of one bucket: some two milliseconds of Redis, which serves nobody else
/// meanwhile. One question is always a call, however much work it is.
const MAX_WORK: usize = 256;
/// Questions that may wait for a trip to one server. Beyond that it is too slow to be waited for.
pub(super) const MAX_WAITING: usize = 16_384;
/// Trips under way at once: while Redis decides one, the next is waiting there and the last is read here.
const MAX_IN_FLIGHT: usize = 3;
/// On a cluster a trip is slow if any of its slots is.
const CLUSTER_MAX_IN_FLIGHT: usize = 6;

/// A question, and the channel for its answer.
pub(super) struct Job {
    pub(super) request: ScriptRequest,
    /// Nothing is sent for it after that.
    pub(super) deadline: Instant,
    pub(super) reply_to: oneshot::Sender<Result<ScriptReply, StoreError>>,
}

impl Job {
    pub(super) fn slot(&self) -> u16 {
        self.request.hits().first().map_or(0, |hit| names::slot(&hit.name))
    }
}

/// What the trips of a limiter need, and what they have come to.
pub(super) struct ScriptCalls {
    pub(super) timeout: Duration,
    /// Stands in for Redis's time, for tests.
    pub(super) clock: Option<TimeSource>,
    pub(super) calls: Calls,
}

/// Takes the questions for one server there.
pub(super) struct Worker {
    node: Arc<Node>,
    script_calls: Arc<ScriptCalls>,
    /// The cluster that the server is in, if it is in one.
    cluster: Option<Weak<Cluster>>,
    /// Trips that found the script gone and are being made again. No other sets out meanwhile: it might find the
    /// script there, and decide on a key before those that asked for it earlier.
    resending: AtomicUsize,
}

impl Worker {
    pub(super) fn new(node: Arc<Node>, script_calls: Arc<ScriptCalls>, cluster: Option<Weak<Cluster>>) -> Self {
        Self { node, script_calls, cluster, resending: AtomicUsize::new(0) }
    }

    /// Runs until the queue is closed and empty.
    pub(super) async fn work(self, mut jobs: mpsc::Receiver<Job>) {
        let max_in_flight = if self.cluster.is_some() { CLUSTER_MAX_IN_FLIGHT } else { MAX_IN_FLIGHT };
        let mut in_flight = FuturesUnordered::new();
        let mut queued = Vec::with_capacity(MAX_BATCH);
        let mut open = true;
        while open || !in_flight.is_empty() {
            let is_resending = self.resending.load(Ordering::Relaxed) > 0;
            tokio::select! {
                biased;
                Some(()) = in_flight.next(), if !in_flight.is_empty() => {}
                count = jobs.recv_many(&mut queued, MAX_BATCH),
                    if open && in_flight.len() < max_in_flight && !is_resending =>
                {
                    if count == 0 {
                        open = false;
                        continue;
                    }
                    // A caller that has stopped waiting is not charged.
                    let now = Instant::now();
                    queued.retain(|job| now < job.deadline && !job.reply_to.is_closed());
                    if !queued.is_empty() {
                        in_flight.push(self.send_batches(std::mem::take(&mut queued)));
                    }
                }
            }
        }
    }

    async fn send_batches(&self, jobs: Vec<Job>) {
        if self.cluster.is_none() {
            for jobs in split_by_bounds(jobs) {
                self.send_batch(0, jobs).await;
            }
            return;
        }
        // On a cluster one call stays in one slot.
        let mut by_slot: BTreeMap<u16, Vec<Job>> = BTreeMap::new();
        for job in jobs {
            by_slot.entry(job.slot()).or_default().push(job);
        }
        let calls = by_slot
            .into_iter()
            .flat_map(|(slot, jobs)| split_by_bounds(jobs).into_iter().map(move |jobs| (slot, jobs)));
        join_all(calls.map(|(slot, jobs)| self.send_batch(slot, jobs))).await;
    }

    async fn send_batch(&self, slot: u16, jobs: Vec<Job>) {
        self.script_calls.calls.sent(jobs.len());
        let mut batch = Batch::default();
        for job in &jobs {
            batch.add(&job.request);
        }
        match self.decide(slot, &mut batch).await {
            Ok(replies) => {
                for (job, reply) in jobs.into_iter().zip(replies) {
                    let _ = job.reply_to.send(reply);
                }
            }
            Err(error) => {
                for job in jobs {
                    let _ = job.reply_to.send(Err(error.clone()));
                }
            }
        }
    }

    async fn decide(&self, slot: u16, batch: &mut Batch) -> Result<Vec<Result<ScriptReply, StoreError>>, StoreError> {
        let (now, began) = (self.script_calls.clock.as_ref().map(TimeSource::now), Instant::now());
        let deadline = began + self.script_calls.timeout;
        let reply = self.call(slot, batch, now, deadline).await;
        self.script_calls.calls.ended(began.elapsed());
        let mut reply = reply?;
        if batch.needs_full_script(&reply) {
            let _again = Resending::begin(&self.resending);
            reply = self.call(slot, batch, now, deadline).await?;
        }
        let replies = batch.replies(reply).inspect_err(|error| self.node.failed(began, error))?;
        // An error of one key may be one of the whole server.
        for error in replies.iter().filter_map(|reply| reply.as_ref().err()) {
            if error.is_unavailable() {
                self.node.failed(began, error);
                break;
            }
            self.node.refused(error);
        }
        Ok(replies)
    }

    async fn call(
        &self,
        slot: u16,
        batch: &Batch,
        now: Option<Timestamp>,
        deadline: Instant,
    ) -> Result<Value, StoreError> {
        match self.run(slot, &batch.command(now), deadline).await {
            Err(RunError::NoScript) => {
                let _again = Resending::begin(&self.resending);
                Ok(self.run(slot, &batch.command_in_full(now), deadline).await?)
            }
            other => Ok(other?),
        }
    }

    async fn run(&self, slot: u16, command: &Cmd, deadline: Instant) -> Result<Value, RunError> {
        match &self.cluster {
            None => self.node.run(command, deadline).await,
            Some(cluster) => match cluster.upgrade() {
                Some(cluster) => cluster.run(&self.node, slot, command, deadline).await,
                None => Err(RunError::Lost(StoreError::unavailable("the limiter is being dropped"))),
            },
        }
    }
}

/// The same questions in order, in as many calls as their keys and their work need; nearly always one.
fn split_by_bounds(jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let size = |job: &Job| (job.request.hits().len(), job.request.work());
    let add = |(keys, work): (usize, usize), (more_keys, more_work)| (keys + more_keys, work + more_work);
    let fits = |(keys, work)| keys <= MAX_KEYS && work <= MAX_WORK;
    if fits(jobs.iter().map(size).fold((0, 0), add)) {
        return vec![jobs];
    }
    let (mut calls, mut call, mut total) = (Vec::new(), Vec::new(), (0, 0));
    for job in jobs {
        let size = size(&job);
        if !call.is_empty() && !fits(add(total, size)) {
            calls.push(std::mem::take(&mut call));
            total = (0, 0);
        }
        total = add(total, size);
        call.push(job);
    }
    calls.push(call);
    calls
}

/// Counts a trip that is made again, also if that is given up.
struct Resending<'a>(&'a AtomicUsize);

impl<'a> Resending<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Resending<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
