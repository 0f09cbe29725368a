//! The nodes of a cluster and their slots.
//!
//! Each node has its own connection, queue and breaker, so a node that fails affects only its own slots. The map of
//! slots is requested again when a node replies that a slot has moved, when a call fails, and every few hundred
//! milliseconds while a node with slots is not available. The request goes to nodes that answer.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use redis::aio::PubSub;
use redis::{Cmd, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::StoreError;
use super::dial::Address;
use super::node::{CONNECT_LIMIT, Common, Node, RunError, ServerRole, jittered, unavailable};
use super::slots::{SlotMap, View};
use super::topology::{Member, subscriber};
use super::worker::{Job, ScriptCalls};

/// Time between two requests for the map: while all nodes are available, and while one is not.
const REFRESH_EVERY: (Duration, Duration) = (Duration::from_secs(30), Duration::from_millis(400));
/// Minimum time between two refreshes.
const SPACING: Duration = Duration::from_millis(150);
/// Timeout of a request for the map, once the node is connected.
const REFRESH_LIMIT: Duration = Duration::from_millis(500);
/// Maximum number of nodes whose map is requested at once: connected nodes, seeds, and all nodes without a connection.
const REQUESTS: (usize, usize, usize) = (2, 4, 8);
/// Maximum number of redirects of a call. More than two mean that nodes disagree.
const MAX_REDIRECTS: usize = 6;
/// Pause before the next attempt while the keys of a slot are being moved.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(5);

pub(super) struct Cluster {
    seeds: Vec<Address>,
    common: Common,
    script_calls: Option<Arc<ScriptCalls>>,
    map: ArcSwap<SlotMap>,
    /// Held while the map is changed.
    changing: Mutex<()>,
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
            changing: Mutex::new(()),
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

    /// Runs a command on a slot, first at that node, and follows redirects.
    ///
    /// The command is sent again only after replies that prove that it was not executed.
    pub(super) async fn run(
        &self,
        node: &Arc<Node>,
        slot: u16,
        command: &Cmd,
        deadline: Instant,
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
                Err(RunError::Moved(to)) if redirects < MAX_REDIRECTS => {
                    (node, is_asking) = (self.moved(slot, &to), false);
                    redirects += 1;
                }
                Err(RunError::Ask(to)) if redirects < MAX_REDIRECTS => {
                    (node, is_asking) = (self.at(&to), true);
                    redirects += 1;
                }
                Err(RunError::TryAgain) if Instant::now() < deadline => {
                    tokio::time::sleep_until(deadline.min(Instant::now() + jittered(TRY_AGAIN_AFTER))).await;
                }
                other => return other,
            }
        }
    }

    /// Returns a connection for subscriptions.
    pub(super) async fn subscriber(&self) -> Result<PubSub, StoreError> {
        let map = self.map.load_full();
        let connected = map.listed().filter(|member| member.node.is_connected());
        let connected = connected.filter_map(|member| member.node.last_address());
        let mut last = StoreError::unavailable("no node of the cluster answers");
        for address in connected.chain(self.seeds.iter().cloned()) {
            match subscriber(&self.common.dialer, &address).await {
                Ok(subscriber) => return Ok(subscriber),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Refreshes the map of slots. Never returns.
    pub(super) async fn follow(self: Arc<Self>) {
        loop {
            let result = self.refresh().await;
            *self.why.lock().unwrap_or_else(PoisonError::into_inner) = result.err();
            self.requested.send_replace(true);
            tokio::time::sleep(jittered(SPACING)).await;
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
        let late = soon + CONNECT_LIMIT;
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
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.map.load().updated(&view, |address| self.start(address));
        self.map.store(Arc::new(next));
        Ok(())
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
                View::read(node.run(&slots_command(), deadline).await?, &address)
            }
            .boxed()
        });
        let others = addresses.into_iter().map(|address| {
            async move {
                let connection = self.common.dialer.connect(&address).await.map_err(|error| unavailable(&error))?;
                let reply = connection.run(&slots_command()).await.map_err(|error| unavailable(&error))?;
                View::read(reply, &address)
            }
            .boxed()
        });
        known.chain(others).collect()
    }

    /// Returns the node at that address, and assigns the slot to it.
    fn moved(&self, slot: u16, to: &Address) -> Arc<Node> {
        self.common.trouble.notify_one();
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, node) = self.map.load().moved(slot, to, |address| self.start(address));
        if let Some(next) = next {
            self.map.store(Arc::new(next));
        }
        node
    }

    /// Returns the node at that address, which need not have slots yet.
    fn at(&self, address: &Address) -> Arc<Node> {
        if let Some(member) = self.map.load().at(address) {
            return member.node.clone();
        }
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, node) = self.map.load().with(address, |address| self.start(address));
        if let Some(next) = next {
            self.map.store(Arc::new(next));
        }
        node
    }

    fn start(&self, address: &Address) -> Arc<Member> {
        let role = ServerRole::ClusterNode(address.clone());
        Arc::new(Member::start(role, self.common.clone(), self.script_calls.as_ref(), Some(self.itself.clone())))
    }
}

fn slots_command() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}
