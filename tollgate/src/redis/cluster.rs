//! Servers with the queue to each, and the cluster that they may form.
//!
//! In a cluster, each node has its own connection, queue and breaker, so a node that fails affects only its own slots.
//! The map of slots is requested again when a node replies that a slot has moved, when a call fails, and every few
//! hundred milliseconds while a node with slots is not available. The request goes to nodes that answer.
//!
//! # Natural batching
//!
//! Requests that arrive while a call to Redis is in flight are sent together in the next one. An idle limiter sends a
//! request at once and alone. A busy one sends all that have arrived, up to a bound, in one script call, which decides
//! them in order. All requests of one process to one server pass through here, so those on one key stay in order. Each
//! server has its own queue, so a server that hangs does not delay requests to others.

mod slots;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use redis::{Cmd, Value};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};

pub(super) use self::slots::View;
use self::slots::{MAX_NODES, SlotMap};
use super::dial::Address;
use super::node::{Common, Node, RunError, ServerRole, Subscriber, jittered, subscriber, unavailable};
use super::script::{Batch, ScriptHits, ScriptReply, ScriptRequest};
use super::stats::Calls;
use super::warnings::StoreWarning;
use super::{StoreError, Tasks, names};
use crate::clock::TimeSource;
use crate::units::Timestamp;

/// Time between two requests for the map: while all nodes are available, and while one is not.
const REFRESH_EVERY: (Duration, Duration) = (Duration::from_secs(30), Duration::from_millis(400));
/// Minimum time between two refreshes: usually, and after a reply that exceeds a bound, because such replies take time to
/// read.
const SPACING: (Duration, Duration) = (Duration::from_millis(150), Duration::from_secs(1));
/// Timeout of a request for the map, once the node is connected.
const REFRESH_LIMIT: Duration = Duration::from_millis(500);
/// Maximum number of nodes whose map is requested at once: connected nodes, seeds, and all nodes without a connection.
const REQUESTS: (usize, usize, usize) = (2, 4, 8);
/// Maximum number of redirects of a call. More than two mean that nodes disagree.
const MAX_REDIRECTS: usize = 6;
/// Maximum number of nodes to which a cluster connects anew within a period: two whole clusters of the largest size. A node
/// that names other nodes each time cannot make this process connect to all of them.
const MAX_STARTS: (usize, Duration) = (2 * MAX_NODES, Duration::from_secs(60));
/// Pause before the next attempt while the keys of a slot are being moved.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(5);

pub(super) struct Cluster {
    seeds: Vec<Address>,
    common: Common,
    script_calls: Option<Arc<ScriptCalls>>,
    map: ArcSwap<SlotMap>,
    /// Held while the map is changed.
    changing: Mutex<Starts>,
    /// Whether the map has been requested once.
    requested: watch::Sender<bool>,
    /// The error of the last request for the map.
    why: Mutex<Option<StoreError>>,
    itself: Weak<Self>,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Address>, common: Common, script_calls: Option<Arc<ScriptCalls>>) -> Arc<Self> {
        Arc::new_cyclic(|itself| Self {
            seeds,
            common,
            script_calls,
            map: ArcSwap::from_pointee(SlotMap::default()),
            changing: Mutex::new(Starts { since: Instant::now(), count: 0 }),
            requested: watch::Sender::new(false),
            why: Mutex::new(None),
            itself: itself.clone(),
        })
    }

    /// Waits until every node has been connected to, or has failed.
    pub(super) async fn settled(&self) {
        self.requested().await;
        let nodes = self.nodes();
        join_all(nodes.iter().map(|node| node.settled())).await;
    }

    /// Waits until the map has been requested once.
    pub(super) async fn requested(&self) {
        let _ = self.requested.subscribe().wait_for(|requested| *requested).await;
    }

    pub(super) fn submit(&self, job: Job) -> Result<(), StoreError> {
        match self.map.load().owner(job.slot()) {
            Some(member) => member.submit(job),
            None => Err(self.uncovered(job.slot())),
        }
    }

    pub(super) fn owner(&self, slot: u16) -> Result<Arc<Node>, StoreError> {
        self.map.load().owner(slot).map(|member| member.node.clone()).ok_or_else(|| self.uncovered(slot))
    }

    fn uncovered(&self, slot: u16) -> StoreError {
        self.common.trouble.notify_one();
        let why = self.why.lock().unwrap_or_else(PoisonError::into_inner).clone();
        why.unwrap_or_else(|| StoreError::unavailable(&format!("no node of the cluster has slot {slot}")))
    }

    /// Returns the nodes that have slots.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.map.load().listed().map(|member| member.node.clone()).collect()
    }

    pub(super) fn why_unavailable(&self) -> Option<StoreError> {
        let map = self.map.load();
        if map.is_empty() {
            let why = self.why.lock().unwrap_or_else(PoisonError::into_inner).clone();
            return Some(why.unwrap_or_else(|| StoreError::unavailable("the cluster has not answered yet")));
        }
        let failed = map.listed().find_map(|member| Some((&member.node, member.node.breaker.why()?)));
        failed.map(|(node, why)| why.at(node))
    }

    /// Returns whether the map is known and every node on it replies, even if with a refusal.
    fn is_whole(&self) -> bool {
        let map = self.map.load();
        !map.is_empty() && map.listed().all(|member| member.node.is_available())
    }

    /// Runs a command on a slot, first at that node, and follows redirects. Calls `on_refusal` with a node that refuses
    /// the command.
    ///
    /// The command is sent again only after replies that prove that it was not executed.
    pub(super) async fn run(
        &self,
        node: &Arc<Node>,
        slot: u16,
        command: &Cmd,
        deadline: Instant,
        on_refusal: fn(&Node, &StoreError),
    ) -> Result<Value, RunError> {
        let (mut node, mut is_asking, mut redirects) = (node.clone(), false, 0);
        loop {
            // A node that hangs must not block the node that redirected to it.
            if redirects > 0 && !node.is_available() {
                return Err(RunError::Refused(StoreError::unavailable(&format!(
                    "{node}, which has the key, is not available"
                ))));
            }
            let result =
                if is_asking { node.run_asking(command, deadline).await } else { node.run(command, deadline).await };
            match result {
                Err(RunError::Moved(_) | RunError::Ask(_)) if redirects == MAX_REDIRECTS => {
                    return Err(self.keeps_redirecting(&format!(
                        "nodes of the cluster redirected a request more than {MAX_REDIRECTS} times, the last time {node}"
                    )));
                }
                Err(RunError::Moved(to)) => {
                    (node, is_asking) = (self.moved(slot, &to).ok_or_else(|| self.names_too_many(&node))?, false);
                    redirects += 1;
                }
                Err(RunError::Ask(to)) => {
                    (node, is_asking) = (self.at(&to).ok_or_else(|| self.names_too_many(&node))?, true);
                    redirects += 1;
                }
                Err(RunError::TryAgain) if Instant::now() < deadline => {
                    tokio::time::sleep_until(deadline.min(Instant::now() + jittered(TRY_AGAIN_AFTER))).await;
                }
                Err(RunError::Refused(why)) => {
                    on_refusal(&node, &why);
                    return Err(RunError::Refused(why));
                }
                other => return other,
            }
        }
    }

    fn names_too_many(&self, node: &Node) -> RunError {
        self.keeps_redirecting(&format!(
            "{node} redirected requests to too many nodes that are not in the map of slots"
        ))
    }

    fn keeps_redirecting(&self, problem: &str) -> RunError {
        self.common.recent.log(&self.common.store, StoreWarning::Redirects { problem: problem.to_owned() });
        RunError::Lost(StoreError::unavailable(problem))
    }

    /// Returns a connection for subscriptions.
    pub(super) async fn subscriber(&self) -> Result<Subscriber, StoreError> {
        let map = self.map.load_full();
        let connected = map.listed().filter(|member| member.node.is_connected());
        let connected = connected.filter_map(|member| member.node.last_address());
        let mut last = StoreError::unavailable("no node of the cluster answers");
        for address in connected.chain(self.seeds.iter().cloned()) {
            match subscriber(&self.common, address).await {
                Ok(subscriber) => return Ok(subscriber),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Returns whether the node at that address is part of the cluster, as far as is known. Seeds may have other names
    /// than the nodes that they lead to, so a seed is no part of it once a node is connected.
    pub(super) fn has(&self, address: &Address) -> bool {
        let map = self.map.load();
        let is_connected = map.listed().any(|member| member.node.is_connected());
        let is_listed = || map.listed().any(|member| member.node.last_address().as_ref() == Some(address));
        !is_connected || is_listed() || map.replicas().contains(address)
    }

    /// Refreshes the map of slots. Never returns.
    pub(super) async fn follow(self: Arc<Self>) {
        loop {
            let why = self.refresh().await.err();
            let (usual, after_invalid) = SPACING;
            let spacing = if why.as_ref().is_some_and(StoreError::is_invalid_reply) { after_invalid } else { usual };
            *self.why.lock().unwrap_or_else(PoisonError::into_inner) = why;
            self.requested.send_replace(true);
            tokio::time::sleep(jittered(spacing)).await;
            let (usually, in_trouble) = REFRESH_EVERY;
            let pause = if self.is_whole() { usually } else { in_trouble };
            tokio::select! {
                () = self.common.trouble.notified() => {}
                () = tokio::time::sleep(jittered(pause)) => {}
            }
        }
    }

    /// Requests the map. The first node to reply is used, unless its map assigns slots to a node that is not available:
    /// then other nodes may know of a replica that was promoted.
    async fn refresh(&self) -> Result<(), StoreError> {
        let map = self.map.load_full();
        let mut replies: FuturesUnordered<_> = self.candidates(&map).into_iter().collect();
        let soon = Instant::now() + REFRESH_LIMIT.max(self.common.timeout);
        // A node that has to be connected to first may be far away.
        let late = soon + self.common.connect_limit();
        let (mut best, mut last) = (None::<(usize, View)>, StoreError::timed_out());
        while let Ok(Some(reply)) = timeout_at(if best.is_some() { soon } else { late }, replies.next()).await {
            match reply {
                Ok(view) => {
                    let failing = map.failing(&view);
                    if best.as_ref().is_none_or(|(least, _)| failing < *least) {
                        best = Some((failing, view));
                    }
                    if failing == 0 {
                        break;
                    }
                }
                Err(error) => last = error,
            }
        }
        let (_, view) = best.ok_or(last)?;
        let mut starts = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let map = self.map.load();
        if !starts.admit(map.missing(&view)) {
            let (most, period) = MAX_STARTS;
            return Err(StoreError::invalid_reply(&format!(
                "the replies to CLUSTER SLOTS named more than {most} new nodes within {} s",
                period.as_secs()
            )));
        }
        let next = map.updated(&view, |address, delay| self.start(address, delay));
        self.map.store(Arc::new(next));
        Ok(())
    }

    /// Reads the map that the node at that address has sent.
    fn read_view(&self, reply: Value, replied_by: &Address) -> Result<View, StoreError> {
        View::read(reply, replied_by).inspect_err(|error| {
            if error.is_invalid_reply() {
                let (server, problem) = (replied_by.to_string(), error.detail().to_owned());
                self.common.recent.log(&self.common.store, StoreWarning::InvalidReply { server, problem });
            }
        })
    }

    /// Returns requests for the map to nodes that are likely to reply.
    fn candidates(&self, map: &SlotMap) -> Vec<BoxFuture<'_, Result<View, StoreError>>> {
        let deadline = Instant::now() + REFRESH_LIMIT.max(self.common.timeout);
        let mut connected: Vec<Arc<Node>> = map.listed().map(|member| member.node.clone()).collect();
        connected.retain(|node| node.is_connected() && node.is_available());
        let random = jittered(Duration::from_secs(1)).subsec_nanos() as usize;
        let from = random % connected.len().max(1);
        connected.rotate_left(from);
        connected.truncate(REQUESTS.0);
        let mut addresses: Vec<Address> = Vec::new();
        if connected.len() < REQUESTS.0 {
            // Use both: all known replicas may be gone, and so may the seeds. Begin with different ones each time.
            for (list, most) in [(&self.seeds[..], REQUESTS.1), (map.replicas(), REQUESTS.2)] {
                let (before, after) = list.split_at(random % list.len().max(1));
                for address in after.iter().chain(before) {
                    if !addresses.contains(address) && addresses.len() < most {
                        addresses.push(address.clone());
                    }
                }
            }
        }
        let known = connected.into_iter().map(|node| {
            async move {
                let address = node.last_address().ok_or_else(StoreError::timed_out)?;
                self.read_view(node.run(&slots_command(), deadline).await?, &address)
            }
            .boxed()
        });
        let others = addresses.into_iter().map(|address| {
            async move {
                let connection = self.common.dialer.connect(&address).await.map_err(|error| unavailable(&error))?;
                let reply = connection.run(&slots_command()).await.map_err(|error| unavailable(&error))?;
                self.read_view(reply, &address)
            }
            .boxed()
        });
        known.chain(others).collect()
    }

    /// Returns the node at that address, and assigns the slot to it. Returns `None` if there are too many new nodes.
    fn moved(&self, slot: u16, to: &Address) -> Option<Arc<Node>> {
        self.common.trouble.notify_one();
        let mut starts = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let start = |address: &Address| starts.admit(1).then(|| self.start(address, Duration::ZERO));
        let (next, node) = self.map.load().moved(slot, to, start)?;
        if let Some(next) = next {
            self.map.store(Arc::new(next));
        }
        Some(node)
    }

    /// Returns the node at that address, which need not have slots yet. Returns `None` if there are too many new nodes.
    fn at(&self, address: &Address) -> Option<Arc<Node>> {
        if let Some(member) = self.map.load().at(address) {
            return Some(member.node.clone());
        }
        let mut starts = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let start = |address: &Address| starts.admit(1).then(|| self.start(address, Duration::ZERO));
        let (next, node) = self.map.load().with(address, start)?;
        if let Some(next) = next {
            self.map.store(Arc::new(next));
        }
        Some(node)
    }

    fn start(&self, address: &Address, delay: Duration) -> Arc<Member> {
        let (role, cluster) = (ServerRole::ClusterNode(address.clone()), Some(self.itself.clone()));
        Arc::new(Member::start(role, self.common.clone(), self.script_calls.as_ref(), cluster, delay))
    }
}

/// Counts the nodes that a cluster has connected to anew.
struct Starts {
    since: Instant,
    count: usize,
}

impl Starts {
    /// Counts nodes, unless they are too many.
    fn admit(&mut self, nodes: usize) -> bool {
        let (most, period) = MAX_STARTS;
        if self.since.elapsed() >= period {
            *self = Self { since: Instant::now(), count: 0 };
        }
        let is_admitted = self.count + nodes <= most;
        self.count += if is_admitted { nodes } else { 0 };
        is_admitted
    }
}

fn slots_command() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// Maximum number of requests in one script call. More would save Redis little, delay the others, and leave one side
/// idle while the other works.
const MAX_BATCH: usize = 64;
/// Maximum number of keys in one script call: Lua's stack holds some thousands.
pub(super) const MAX_KEYS: usize = 1024;
/// Maximum work in one script call, in units of a request with one token bucket: about two milliseconds, during which
/// Redis serves no other client. A single request is never split, however much work it is.
pub(super) const MAX_WORK: usize = 256;
/// Maximum number of queued requests to one server. Beyond that, the server is too slow to reply in time.
const MAX_WAITING: usize = 16_384;
/// Batches in flight at once: Redis decides one while the next is queued there and the reply to the last is read here.
const MAX_IN_FLIGHT: usize = 3;
/// Batches in flight at once on a cluster, where one slow slot delays its batch.
const CLUSTER_MAX_IN_FLIGHT: usize = 6;

/// Maximum number of replies without a caller whose units are still to be given back. The units of further ones stay
/// taken.
pub(super) const MAX_ORPHANS: usize = 4_096;

/// A request, and the channel for its reply.
pub(super) struct Job {
    pub(super) request: ScriptRequest,
    /// The request is not sent after this time.
    pub(super) deadline: Instant,
    pub(super) reply_to: oneshot::Sender<Result<Delivery, StoreError>>,
    pub(super) unclaimed: Unclaimed,
}

/// What happens to the units of a reply that its caller does not receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unclaimed {
    /// They stay taken: they are spent already, or the caller itself takes care of them.
    Keep,
    /// They are given back if the caller went away. After the deadline they stay taken, because the failure policy may
    /// have admitted the request.
    GiveBackIfGone,
    /// They are given back, also after the deadline: the failure policy denies the request.
    GiveBack,
}

impl Job {
    /// Returns whether the caller still waits for the reply. One that has stopped waiting is not charged.
    fn is_wanted(&self, now: Instant) -> bool {
        now < self.deadline && !self.reply_to.is_closed()
    }

    pub(super) fn slot(&self) -> u16 {
        self.request.hits().first().map_or(0, |hit| names::slot(&hit.name))
    }
}

/// A reply on its way to the caller. If it is dropped on the way, it becomes an [`Orphan`], unless its units are to be
/// kept.
pub(super) struct Delivery {
    reply: ScriptReply,
    /// The hits whose units were taken.
    taken: Option<(ScriptHits, Arc<ScriptCalls>)>,
    deadline: Instant,
    unclaimed: Unclaimed,
}

impl Delivery {
    fn new(
        request: ScriptRequest,
        reply: ScriptReply,
        (deadline, unclaimed): (Instant, Unclaimed),
        script_calls: &Arc<ScriptCalls>,
    ) -> Self {
        let taken = match request {
            ScriptRequest::Take(hits) if reply.taken > 0 && unclaimed != Unclaimed::Keep => {
                Some((hits, script_calls.clone()))
            }
            _ => None,
        };
        Self { reply, taken, deadline, unclaimed }
    }

    /// Returns the reply. The caller is responsible for the units from now on.
    pub(super) fn accept(mut self) -> ScriptReply {
        self.taken = None;
        std::mem::take(&mut self.reply)
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let Some((hits, script_calls)) = self.taken.take() else { return };
        if self.unclaimed == Unclaimed::GiveBack || Instant::now() < self.deadline {
            // If there are too many, the units stay taken: too strict, never too lax.
            let _ = script_calls.orphans.try_send(Orphan { hits, reply: std::mem::take(&mut self.reply) });
        }
    }
}

/// A reply that took units, and that no caller received.
pub(super) struct Orphan {
    pub(super) hits: ScriptHits,
    pub(super) reply: ScriptReply,
}

/// The settings and counters of a limiter's script calls.
pub(super) struct ScriptCalls {
    pub(super) timeout: Duration,
    /// Replaces Redis's clock in tests.
    pub(super) clock: Option<TimeSource>,
    pub(super) calls: Calls,
    pub(super) orphans: mpsc::Sender<Orphan>,
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
                    let now = Instant::now();
                    queued.retain(|job| job.is_wanted(now));
                    if !queued.is_empty() {
                        in_flight.push(self.send_batches(std::mem::take(&mut queued)));
                    }
                }
            }
        }
    }

    async fn send_batches(&self, jobs: Vec<Job>) {
        if self.cluster.is_none() {
            for mut jobs in split_by_bounds(jobs) {
                let now = Instant::now();
                jobs.retain(|job| job.is_wanted(now));
                if !jobs.is_empty() {
                    self.send_batch(0, jobs).await;
                }
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
                    let Job { request, deadline, reply_to, unclaimed } = job;
                    let script_calls = &self.script_calls;
                    let delivery =
                        reply.map(|reply| Delivery::new(request, reply, (deadline, unclaimed), script_calls));
                    let _ = reply_to.send(delivery);
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
            if let Some(limit) = error.limit_with_foreign_data() {
                self.node.found_foreign_data(limit);
            }
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
            None => self.node.run(command, deadline).await.inspect_err(|error| {
                if let RunError::Refused(why) = error {
                    self.node.refused(why);
                }
            }),
            Some(cluster) => match cluster.upgrade() {
                Some(cluster) => cluster.run(&self.node, slot, command, deadline, Node::refused).await,
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

/// A server, the queue to it, and the tasks that end with it.
pub(super) struct Member {
    pub(super) node: Arc<Node>,
    jobs: Option<mpsc::Sender<Job>>,
    _keeper: Tasks,
}

impl Member {
    /// Starts to connect to a server after a delay. With `script_calls`, jobs can be submitted to it.
    pub(super) fn start(
        role: ServerRole,
        common: Common,
        script_calls: Option<&Arc<ScriptCalls>>,
        cluster: Option<Weak<Cluster>>,
        delay: Duration,
    ) -> Self {
        let node = Arc::new(Node::new(role, common));
        let jobs = script_calls.map(|script_calls| {
            let (jobs, queue) = mpsc::channel(MAX_WAITING);
            // The task ends once the queue is closed and empty.
            tokio::spawn(Worker::new(node.clone(), script_calls.clone(), cluster).work(queue));
            jobs
        });
        let keeper = Tasks(vec![tokio::spawn(node.clone().keep(delay)).abort_handle()]);
        Self { node, jobs, _keeper: keeper }
    }

    pub(super) fn submit(&self, job: Job) -> Result<(), StoreError> {
        if self.node.breaker.is_open() {
            return Err(StoreError::unavailable("the store has failed and is not back yet"));
        }
        match &self.jobs {
            Some(jobs) => jobs.try_send(job).map_err(|_| StoreError::busy()),
            None => Err(StoreError::busy()),
        }
    }
}
