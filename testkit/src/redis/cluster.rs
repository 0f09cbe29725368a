//! A cluster of three masters with a replica each.

mod slot_move;
mod view;

use std::time::Duration;

pub use slot_move::SlotMove;

use super::tls::{self, ClientCertificates};
use super::{Link, Recipe, RedisServer};
use crate::certificates::Authority;
use crate::wait::{poll, within};
use view::View;

const MASTERS: usize = 3;
const NODES: usize = 2 * MASTERS;
const SLOTS: usize = 16_384;

const START_LIMIT: Duration = Duration::from_secs(60);

/// The time for handshakes. A node drops another that does not complete its handshake within a second, which takes
/// longer on a busy machine.
const MEETINGS: u32 = 5;

/// The timeout below, then an election of one to two seconds, held again where it fails.
const FAILOVER_LIMIT: Duration = Duration::from_secs(20);

const NODE_ARGS: [&str; 6] = [
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "1000",
    // A replica may take over however long its master has been silent.
    "--cluster-replica-validity-factor",
    "0",
];

/// A cluster. Nodes are identified by index: 0 to 2 start as masters, 3 to 5 as the replicas of 0 to 2.
pub struct Cluster {
    nodes: Vec<RedisServer>,
    /// The links that clients use, one for each node, if the nodes announce links.
    links: Vec<Link>,
    ids: Vec<String>,
}

impl Cluster {
    /// Returns when every node sees the cluster whole and every master has its replica in step.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// With extra arguments for every node.
    pub fn with(args: &[&str]) -> Self {
        let args: Vec<&str> = NODE_ARGS.iter().chain(args).copied().collect();
        Self::of((0..NODES).map(|_| RedisServer::with(&args)).collect(), Vec::new())
    }

    /// With TLS everywhere. All nodes require a certificate of one authority: see [`RedisServer::ca_path`] and
    /// [`RedisServer::client_files`] of any node.
    pub fn start_tls() -> Self {
        let authority = Authority::new();
        let between = tls::BETWEEN_SERVERS.iter().chain(&tls::BETWEEN_NODES);
        let args: Vec<&str> = NODE_ARGS.iter().chain(between).copied().collect();
        let node = |_| RedisServer::launch(Recipe::tls(&authority, ClientCertificates::Required, &args));
        Self::of((0..NODES).map(node).collect(), Vec::new())
    }

    /// Clients reach each node through its own link. Nodes talk to each other directly.
    pub fn behind_links(args: &[&str]) -> Self {
        let links: Vec<Link> = (0..NODES).map(|_| Link::to_nobody_yet()).collect();
        let start = |link: &Link| {
            let port = link.port().to_string();
            let announced = ["--cluster-announce-port", &port];
            let args: Vec<&str> = NODE_ARGS.iter().chain(args).chain(&announced).copied().collect();
            let node = RedisServer::with(&args);
            link.lead_to(&node);
            node
        };
        let nodes = links.iter().map(start).collect();
        Self::of(nodes, links)
    }

    fn of(nodes: Vec<RedisServer>, links: Vec<Link>) -> Self {
        let ids = nodes.iter().map(|node| node.query(redis::cmd("CLUSTER").arg("MYID"))).collect();
        let cluster = Self { nodes, links, ids };
        cluster.share_out_slots();
        cluster.introduce();
        for replica in MASTERS..NODES {
            let master = &cluster.ids[replica - MASTERS];
            let () = cluster.nodes[replica].query(redis::cmd("CLUSTER").arg("REPLICATE").arg(master));
        }
        within(START_LIMIT, "the cluster is whole", || {
            cluster.nodes.iter().all(|node| is_ok(node) && View::of(node).replicas() == NODES - MASTERS)
                && cluster.nodes[..MASTERS].iter().all(has_replica_in_step)
        });
        cluster
    }

    fn share_out_slots(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            // Nodes that meet with equal epochs would settle that first, one after the other.
            let () = node.query(redis::cmd("CLUSTER").arg("SET-CONFIG-EPOCH").arg(index + 1));
            if index < MASTERS {
                let (first, end) = (index * SLOTS / MASTERS, (index + 1) * SLOTS / MASTERS);
                let () = node.query(redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(first).arg(end - 1));
            }
        }
    }

    /// Introduces each node to each other, which is faster than gossip.
    fn introduce(&self) {
        let have_met = || self.nodes.iter().all(|node| View::of(node).has_met_all(&self.ids));
        for _ in 0..MEETINGS {
            for (index, node) in self.nodes.iter().enumerate() {
                for other in &self.nodes[index + 1..] {
                    let () = node.query(redis::cmd("CLUSTER").arg("MEET").arg("127.0.0.1").arg(other.port()));
                }
            }
            if poll(START_LIMIT / MEETINGS, || have_met().then_some(())).is_some() {
                return;
            }
        }
        panic!("not within {START_LIMIT:?}: the nodes know each other");
    }

    /// The URL for clients, with the addresses of all nodes or of their links.
    pub fn url(&self) -> String {
        let ports: Vec<u16> = match &*self.links {
            [] => self.nodes.iter().map(RedisServer::port).collect(),
            links => links.iter().map(Link::port).collect(),
        };
        let addresses: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("{}+cluster://{}", self.nodes[0].scheme(), addresses.join(","))
    }

    /// The link of a node for clients.
    pub fn link(&self, index: usize) -> &Link {
        &self.links[index]
    }

    /// The node of that index.
    pub fn node(&mut self, index: usize) -> &mut RedisServer {
        &mut self.nodes[index]
    }

    /// The nodes that run and are masters now.
    pub fn masters(&self) -> Vec<usize> {
        (0..NODES).filter(|&index| self.nodes[index].is_running() && self.nodes[index].is_master()).collect()
    }

    /// The master of a slot according to every running node; `None` while they disagree.
    pub fn owner(&self, slot: u16) -> Option<usize> {
        let mut seen = self.running().map(|node| View::of(node).owner(slot).map(String::from));
        let owner = seen.next()??;
        seen.all(|other| other.as_ref() == Some(&owner)).then_some(())?;
        self.ids.iter().position(|id| *id == owner)
    }

    /// Moves a slot with all its keys to another master, while clients go on.
    pub fn move_slot(&self, slot: u16, to: usize) {
        self.begin_move(slot, to).finish();
    }

    /// Starts a move and stops where clients are redirected with `ASK`.
    pub fn begin_move(&self, slot: u16, to: usize) -> SlotMove<'_> {
        SlotMove::begin(self, slot, to)
    }

    /// Kills a master. Returns the replica that has taken over, once every node that runs knows.
    pub fn failover(&mut self, master: usize) -> usize {
        let slot = self.slot_of(master);
        self.nodes[master].kill();
        self.successor(master, slot)
    }

    /// A slot of a master.
    pub fn slot_of(&self, master: usize) -> u16 {
        View::of(&self.nodes[master]).first_slot_of(&self.ids[master]).expect("only masters have slots")
    }

    /// Waits until a replica has taken over the slot of a master that was killed or stopped. Returns the replica, once
    /// every node that runs knows.
    pub fn successor(&self, master: usize, slot: u16) -> usize {
        let mut successor = master;
        within(FAILOVER_LIMIT, "a replica has taken over", || {
            successor = self.owner(slot).unwrap_or(master);
            successor != master && self.running().all(is_ok)
        });
        successor
    }

    fn running(&self) -> impl Iterator<Item = &RedisServer> {
        self.nodes.iter().filter(|node| node.is_running())
    }
}

fn is_ok(node: &RedisServer) -> bool {
    let info: redis::InfoDict = node.query(redis::cmd("CLUSTER").arg("INFO"));
    info.get::<String>("cluster_state").as_deref() == Some("ok")
}

fn has_replica_in_step(master: &RedisServer) -> bool {
    let replica: Option<String> = master.info("replication").get("slave0");
    replica.is_some_and(|replica| replica.contains("state=online"))
}
