//! Natural batching: while a trip to Redis is under way, questions gather, and travel together on the next.
//!
//! An idle limiter sends a question at once and alone. A busy one sends as many as have come, up to a bound, in
//! one script call, which decides them in order. All of one node's questions pass through here, so those about
//! one key stay in the order in which they were asked.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::Value;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::StoreError;
use super::breaker::Breaker;
use super::link::{Link, RunError};
use super::names;
use super::script::{self, Answer, Batch, Question};
use crate::clock::TimeSource;
use crate::units::Timestamp;

/// Questions in one script call. More would save Redis little, make the others wait, and leave one side idle while
/// the other works.
pub(super) const MAX_BATCH: usize = 64;
/// Keys in one script call: Lua's stack holds some thousands.
pub(super) const MAX_KEYS: usize = 1024;
/// Questions that may wait for a trip. Beyond that the store is too slow to be waited for.
pub(super) const MAX_WAITING: usize = 16_384;
/// Trips under way at once: while Redis decides one, the next is waiting there and the last is read here.
const TRIPS: usize = 3;
/// On a cluster a trip is slow if any of its nodes is.
const CLUSTER_TRIPS: usize = 16;
/// How long a probe may take. A connection may take longer than a decision: names are resolved, sentinels asked,
/// TLS begun.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// How often to see whether a store that failed is back: at first, and at most.
const PROBE_EVERY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A question, and who waits for the answer.
pub(super) struct Job {
    pub(super) question: Question,
    pub(super) reply: oneshot::Sender<Result<Answer, StoreError>>,
}

/// What the trips of a limiter need, and what they have come to.
pub(super) struct Trips {
    pub(super) link: Link,
    pub(super) breaker: Breaker,
    pub(super) timeout: Duration,
    /// Stands in for Redis's time, for tests.
    pub(super) clock: Option<TimeSource>,
    pub(super) trips: AtomicU64,
    pub(super) asked: AtomicU64,
    /// Trips that found the script gone and are being made again. No other sets out meanwhile: it might find the
    /// script there, and decide on a key before those that asked for it earlier.
    pub(super) made_again: AtomicUsize,
}

/// Runs until nobody can ask any more.
pub(super) async fn work(shared: Arc<Trips>, mut jobs: mpsc::Receiver<Job>) {
    let most = if shared.link.is_cluster() { CLUSTER_TRIPS } else { TRIPS };
    let mut under_way = FuturesUnordered::new();
    let mut gathered = Vec::with_capacity(MAX_BATCH);
    let mut open = true;
    while open || !under_way.is_empty() {
        tokio::select! {
            biased;
            Some(()) = under_way.next(), if !under_way.is_empty() => {}
            count = jobs.recv_many(&mut gathered, MAX_BATCH), if open && under_way.len() < most && !shared.is_making_again() => {
                if count == 0 {
                    open = false;
                    continue;
                }
                // Who has stopped waiting is not charged.
                gathered.retain(|job| !job.reply.is_closed());
                if !gathered.is_empty() {
                    under_way.push(travel(&shared, std::mem::take(&mut gathered)));
                }
            }
        }
    }
}

async fn travel(shared: &Trips, jobs: Vec<Job>) {
    shared.asked.fetch_add(jobs.len() as u64, Ordering::Relaxed);
    if !shared.link.is_cluster() {
        for jobs in in_bounds(jobs) {
            trip(shared, jobs).await;
        }
        return;
    }
    // On a cluster one call stays in one slot.
    let mut by_slot: BTreeMap<u16, Vec<Job>> = BTreeMap::new();
    for job in jobs {
        let slot = job.question.asks().first().map_or(0, |ask| names::slot(&ask.name));
        by_slot.entry(slot).or_default().push(job);
    }
    let calls = by_slot.into_values().flat_map(in_bounds);
    join_all(calls.map(|jobs| trip(shared, jobs))).await;
}

/// The same questions in order, in as many calls as their keys need; nearly always one.
fn in_bounds(jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let keys = |job: &Job| job.question.asks().len();
    if jobs.iter().map(keys).sum::<usize>() <= MAX_KEYS {
        return vec![jobs];
    }
    let (mut calls, mut call, mut count) = (Vec::new(), Vec::new(), 0);
    for job in jobs {
        if count + keys(&job) > MAX_KEYS {
            calls.push(std::mem::take(&mut call));
            count = 0;
        }
        count += keys(&job);
        call.push(job);
    }
    calls.push(call);
    calls
}

async fn trip(shared: &Trips, jobs: Vec<Job>) {
    shared.trips.fetch_add(1, Ordering::Relaxed);
    let mut batch = Batch::default();
    for job in &jobs {
        batch.add(&job.question);
    }
    let began = Instant::now();
    let outcome = match timeout(shared.timeout, decide(shared, &mut batch)).await {
        Ok(outcome) => outcome,
        Err(_) => {
            shared.link.give_up(began).await;
            Err(StoreError::too_late())
        }
    };
    match &outcome {
        Err(error) if error.is_unavailable() => shared.breaker.failed(began, error),
        _ => shared.breaker.succeeded(),
    }
    match outcome {
        Ok(answers) => {
            for (job, answer) in jobs.into_iter().zip(answers) {
                let _ = job.reply.send(answer);
            }
        }
        Err(error) => {
            for job in jobs {
                let _ = job.reply.send(Err(error.clone()));
            }
        }
    }
}

async fn decide(shared: &Trips, batch: &mut Batch) -> Result<Vec<Result<Answer, StoreError>>, StoreError> {
    let now = shared.clock.as_ref().map(TimeSource::now);
    let mut reply = call(shared, batch, now).await?;
    if batch.is_for_the_other(&reply) {
        let _again = MadeAgain::begin(&shared.made_again);
        reply = call(shared, batch, now).await?;
    }
    batch.answers(reply)
}

async fn call(shared: &Trips, batch: &Batch, now: Option<Timestamp>) -> Result<Value, StoreError> {
    match shared.link.run(&batch.command(now)).await {
        Err(RunError::NoScript) => {
            let _again = MadeAgain::begin(&shared.made_again);
            Ok(shared.link.run(&batch.command_in_full(now)).await?)
        }
        other => Ok(other?),
    }
}

impl Trips {
    fn is_making_again(&self) -> bool {
        self.made_again.load(Ordering::Relaxed) > 0
    }
}

/// Counts a trip that is made again, also if that is given up.
struct MadeAgain<'a>(&'a AtomicUsize);

impl<'a> MadeAgain<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for MadeAgain<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether Redis is there and can be written to. One whose memory is full is there.
pub(super) async fn reach(link: &Link) -> Result<(), StoreError> {
    match link.run(&script::probe()).await {
        Ok(_) | Err(RunError::Refused(_)) => {}
        Err(error) => return Err(error.into()),
    }
    // A server without the scripts is given them when it is asked, but two calls that find it so may change places.
    for command in script::load() {
        let _ = link.run(&command).await;
    }
    Ok(())
}

/// While the breaker is open, asks now and then whether Redis is back.
pub(super) async fn probe(shared: Arc<Trips>) {
    loop {
        shared.breaker.opened().await;
        let mut pause = PROBE_EVERY.0;
        while shared.breaker.is_open() {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PROBE_EVERY.1);
            let began = Instant::now();
            match timeout(shared.timeout.max(PATIENCE), reach(&shared.link)).await {
                Ok(Ok(())) => shared.breaker.close(),
                Ok(Err(_)) => {}
                Err(_) => shared.link.give_up(began).await,
            }
        }
    }
}
