//! A live reshard of one slot, as `redis-cli --cluster reshard` does it.

use std::time::Duration;

use super::Cluster;
use crate::wait::within;

/// Keys sent at once. Few, so that a move has many steps for clients to come between.
const KEYS_PER_STEP: usize = 10;

const MIGRATE_TIMEOUT_MS: u32 = 5_000;

const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// A slot on its way. Keys still at the old master are answered there; for all others clients are sent on by `ASK`.
#[must_use = "the slot stays between two masters until the move is finished"]
pub struct SlotMove<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl<'a> SlotMove<'a> {
    pub(super) fn begin(cluster: &'a Cluster, slot: u16, to: usize) -> Self {
        let from = cluster.owner(slot).expect("the nodes agree on the slot's owner");
        assert_ne!(from, to, "slot {slot} is there already");
        let this = Self { cluster, slot, from, to };
        // The new master first: once the old one sends clients on, they must find it ready.
        this.set_slot(to, "IMPORTING", from);
        this.set_slot(from, "MIGRATING", to);
        this
    }

    fn set_slot(&self, on: usize, state: &str, node: usize) {
        let id = &self.cluster.ids[node];
        let () = self.cluster.nodes[on].query(redis::cmd("CLUSTER").arg("SETSLOT").arg(self.slot).arg(state).arg(id));
    }

    /// Sends some keys over. Returns how many; none when none are left.
    pub fn step(&self) -> usize {
        let source = &self.cluster.nodes[self.from];
        let keys: Vec<Vec<u8>> =
            source.query(redis::cmd("CLUSTER").arg("GETKEYSINSLOT").arg(self.slot).arg(KEYS_PER_STEP));
        if !keys.is_empty() {
            let target = self.cluster.nodes[self.to].port();
            let mut migrate = redis::cmd("MIGRATE");
            migrate.arg("127.0.0.1").arg(target).arg("").arg(0).arg(MIGRATE_TIMEOUT_MS).arg("KEYS").arg(&keys);
            let () = source.query(&migrate);
        }
        keys.len()
    }

    /// Sends what is left, gives the slot to the new master, and returns once every node that runs knows.
    pub fn finish(self) {
        while self.step() > 0 {}
        // The new master first, for a slot must not be without an owner. Replicas hear of it from the masters.
        self.set_slot(self.to, "NODE", self.to);
        self.set_slot(self.from, "NODE", self.to);
        for other in self.cluster.masters() {
            if other != self.from && other != self.to {
                self.set_slot(other, "NODE", self.to);
            }
        }
        within(SETTLE_LIMIT, "the slot's new owner is known", || self.cluster.owner(self.slot) == Some(self.to));
    }
}
