//! Natural batching: requests that arrive while a call to Redis is in flight are sent together in the next one.
//!
//! An idle limiter sends a request at once and alone. A busy one sends all that have arrived, up to a bound, in one
//! script call, which decides them in order. All requests of one process to one server pass through here, so those on
//! one key stay in order. Each server has its own queue, so a server that hangs does not delay requests to others.

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

/// Maximum number of requests in one script call. More would save Redis little, delay the others, and leave one side
/// idle while the other works.
pub(super) const MAX_BATCH: usize = 64;
/// Maximum number of keys in one script call: Lua's stack holds some thousands.
pub(super) const MAX_KEYS: usize = 1024;
/// Maximum work in one script call, in units of a request with one token bucket: about two milliseconds, during which
/// Redis serves no other client. A single request is never split, however much work it is.
const MAX_WORK: usize = 256;
/// Maximum number of queued requests to one server. Beyond that, the server is too slow to reply in time.
pub(super) const MAX_WAITING: usize = 16_384;
/// Batches in flight at once: Redis decides one while the next is queued there and the reply to the last is read here.
const MAX_IN_FLIGHT: usize = 3;
/// Batches in flight at once on a cluster, where one slow slot delays its batch.
const CLUSTER_MAX_IN_FLIGHT: usize = 6;

/// A request, and the channel for its reply.
pub(super) struct Job {
    pub(super) request: ScriptRequest,
    /// The request is not sent after this time.
    pub(super) deadline: Instant,
    pub(super) reply_to: oneshot::Sender<Result<ScriptReply, StoreError>>,
}

impl Job {
    pub(super) fn slot(&self) -> u16 {
        self.request.hits().first().map_or(0, |hit| names::slot(&hit.name))
    }
}

/// The settings and counters of a limiter's script calls.
pub(super) struct ScriptCalls {
    pub(super) timeout: Duration,
    /// Replaces Redis's clock in tests.
    pub(super) clock: Option<TimeSource>,
    pub(super) calls: Calls,
}

/// Sends the requests of one server's queue.
pub(super) struct Worker {
    node: Arc<Node>,
    script_calls: Arc<ScriptCalls>,
    /// The cluster of the server, if it is part of one.
    cluster: Option<Weak<Cluster>>,
    /// Number of calls that are being sent again, with the script's text or with the full script. No other batch is
    /// sent meanwhile: it could overtake earlier requests on the same key.
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
        // On a cluster, a call must stay in one slot.
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
        // The error of one key may affect the whole server.
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

/// Splits requests, in order, into as many calls as their keys and their work need; nearly always one.
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

/// Counts a call that is being sent again, until it is dropped.
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
