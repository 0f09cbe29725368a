//! A master and its replica, watched by three sentinels.

use std::collections::HashMap;
use std::time::Duration;

use super::tls::{self, ClientCertificates};
use super::{CONF_FILE, Link, Recipe, RedisServer, redis_server};
use crate::certificates::Authority;
use crate::wait::within;

const MASTER_NAME: &str = "mymaster";
const SENTINELS: usize = 3;
const QUORUM: usize = 2;

const START_LIMIT: Duration = Duration::from_secs(20);

/// A vote that is split is taken again after twice the failover timeout.
const FAILOVER_LIMIT: Duration = Duration::from_secs(20);

/// How often a sentinel polls, in milliseconds. Its default periods of 1 to 10 s would take most of the test time.
const SENTINEL_PERIODS: [(&str, u32); 3] = [("publish-period", 200), ("info-period", 200), ("ask-period", 200)];

/// A master, its replica and three sentinels.
pub struct Sentinels {
    master: RedisServer,
    replica: RedisServer,
    sentinels: Vec<RedisServer>,
    /// The link of sentinels and clients to the first master.
    link: Link,
}

impl Sentinels {
    /// Returns when every sentinel knows the replica and the other sentinels, so a failover can begin.
    pub fn start() -> Self {
        Self::launch(|args| Recipe::new(redis_server(), args))
    }

    /// The same with TLS everywhere. All servers require a certificate of one authority: see [`RedisServer::ca_path`] and
    /// [`RedisServer::client_files`] of the master.
    pub fn start_tls() -> Self {
        let authority = Authority::new();
        Self::launch(|args| {
            let args: Vec<&str> = args.iter().chain(&tls::BETWEEN_SERVERS).copied().collect();
            Recipe::tls(&authority, ClientCertificates::Required, &args)
        })
    }

    /// Starts servers with a recipe for their arguments.
    fn launch(recipe: impl Fn(&[&str]) -> Recipe) -> Self {
        let [master, replica] = [(); 2].map(|()| RedisServer::launch(recipe(&[])));
        let link = Link::to(&master);
        let () = replica.query(redis::cmd("REPLICAOF").arg("127.0.0.1").arg(link.port()));
        // As after any failover: a replica that restarts is a replica.
        let () = replica.query(redis::cmd("CONFIG").arg("REWRITE"));
        within(START_LIMIT, "the replica has its first copy", || is_in_step(&replica));

        let sentinels = (0..SENTINELS).map(|_| start_sentinel(recipe(&["--sentinel"]), link.port())).collect();
        let all = Self { master, replica, sentinels, link };
        within(START_LIMIT, "the sentinels know all", || all.sentinels.iter().all(knows_all));
        all
    }

    /// The URL for clients, with the addresses of all sentinels.
    pub fn url(&self) -> String {
        let addresses: Vec<String> = self.sentinels.iter().map(|one| format!("127.0.0.1:{}", one.port())).collect();
        format!("{}+sentinel://{}/{MASTER_NAME}", self.master.scheme(), addresses.join(","))
    }

    /// The current master.
    pub fn master(&mut self) -> &mut RedisServer {
        &mut self.master
    }

    /// The link to the first master.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// The current replica.
    pub fn replica(&mut self) -> &mut RedisServer {
        &mut self.replica
    }

    /// The sentinel of that index.
    pub fn sentinel(&mut self, index: usize) -> &mut RedisServer {
        &mut self.sentinels[index]
    }

    /// Makes a sentinel report another master than the others, as after a partition.
    pub fn mislead(&self, index: usize, port: u16) {
        let sentinel = &self.sentinels[index];
        let () = sentinel.query(redis::cmd("SENTINEL").arg("REMOVE").arg(MASTER_NAME));
        let mut monitor = redis::cmd("SENTINEL");
        let () = sentinel.query(monitor.arg("MONITOR").arg(MASTER_NAME).arg("127.0.0.1").arg(port).arg(QUORUM));
    }

    /// After the master was killed or stopped: returns when every sentinel that runs names the replica as master and
    /// the replica agrees. From then on the two are swapped here too. Returns the new master's port.
    pub fn wait_for_failover(&mut self) -> u16 {
        let port = self.replica.port();
        within(FAILOVER_LIMIT, "the sentinels agree on a new master", || {
            let mut running = self.sentinels.iter().filter(|sentinel| sentinel.is_running());
            running.all(|sentinel| master_port(sentinel) == port) && self.replica.is_master()
        });
        std::mem::swap(&mut self.master, &mut self.replica);
        port
    }
}

fn start_sentinel(mut recipe: Recipe, master_port: u16) -> RedisServer {
    let conf = format!(
        "sentinel monitor {MASTER_NAME} 127.0.0.1 {master_port} {QUORUM}\n\
         sentinel down-after-milliseconds {MASTER_NAME} 500\n\
         sentinel failover-timeout {MASTER_NAME} 2000\n"
    );
    recipe.files.retain(|(name, _)| *name != CONF_FILE);
    recipe.files.push((CONF_FILE, conf));
    let sentinel = RedisServer::launch(recipe);
    for (name, period_ms) in SENTINEL_PERIODS {
        let () = sentinel.query(redis::cmd("SENTINEL").arg("DEBUG").arg(name).arg(period_ms));
    }
    sentinel
}

fn is_in_step(replica: &RedisServer) -> bool {
    replica.info("replication").get::<String>("master_link_status").as_deref() == Some("up")
}

fn knows_all(sentinel: &RedisServer) -> bool {
    let flags_of = |whom: &str| -> Vec<String> {
        let seen: Vec<HashMap<String, String>> = sentinel.query(redis::cmd("SENTINEL").arg(whom).arg(MASTER_NAME));
        seen.into_iter().filter_map(|mut one| one.remove("flags")).collect()
    };
    // One in any trouble has a second flag.
    flags_of("SENTINELS") == ["sentinel"; SENTINELS - 1] && flags_of("REPLICAS") == ["slave"]
}

fn master_port(sentinel: &RedisServer) -> u16 {
    let (_, port): (String, u16) =
        sentinel.query(redis::cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(MASTER_NAME));
    port
}
