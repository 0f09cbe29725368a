//! The map of slots to the nodes of a cluster: the map in use, and the map as one node reports it.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::Member;
use crate::redis::StoreError;
use crate::redis::dial::Address;
use crate::redis::node::Node;

const SLOTS: usize = 16_384;
const NO_OWNER: u16 = u16::MAX;
/// Time for which a node without slots is kept: the target of a migration has none at first.
const KEPT: Duration = Duration::from_secs(60);

/// The map of slots. It is replaced as a whole.
#[derive(Clone)]
pub(super) struct SlotMap {
    /// The index of the node of each slot.
    owners: Box<[u16]>,
    members: Vec<Entry>,
    replicas: Vec<Address>,
}

#[derive(Clone)]
struct Entry {
    address: Address,
    member: Arc<Member>,
    /// The time since which it has had no slots.
    without_slots: Option<Instant>,
}

impl Default for SlotMap {
    fn default() -> Self {
        Self { owners: vec![NO_OWNER; SLOTS].into(), members: Vec::new(), replicas: Vec::new() }
    }
}

/// The map as one node reports it.
pub(super) struct View {
    ranges: Vec<(u16, u16, Address)>,
    replicas: Vec<Address>,
}

impl View {
    /// Reads the reply to `CLUSTER SLOTS` of the node at that address.
    pub(super) fn read(reply: Value, replied_by: &Address) -> Result<Self, StoreError> {
        let unreadable = || StoreError::unavailable("the reply to CLUSTER SLOTS is not in the expected format");
        let Value::Array(entries) = reply else { return Err(unreadable()) };
        let mut view = Self { ranges: Vec::new(), replicas: Vec::new() };
        for entry in entries {
            let Value::Array(parts) = entry else { return Err(unreadable()) };
            let [Value::Int(first), Value::Int(last), nodes @ ..] = &*parts else { return Err(unreadable()) };
            let slot = |number: i64| u16::try_from(number).ok().filter(|slot| usize::from(*slot) < SLOTS);
            let (Some(first), Some(last)) = (slot(*first), slot(*last)) else { return Err(unreadable()) };
            let mut addresses = nodes.iter().filter_map(|node| address(node, replied_by));
            let master = addresses.next().ok_or_else(unreadable)?;
            view.ranges.push((first, last, master));
            view.replicas.extend(addresses);
        }
        if view.ranges.is_empty() { Err(StoreError::unavailable("the cluster has no slots yet")) } else { Ok(view) }
    }
}

/// Returns the address of a node in the reply. A node without a known host has the host of the node that replied.
fn address(node: &Value, replied_by: &Address) -> Option<Address> {
    let Value::Array(parts) = node else { return None };
    let [host, Value::Int(port), ..] = &**parts else { return None };
    let host = match host {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
        Value::SimpleString(text) => text,
        _ => "",
    };
    let port = u16::try_from(*port).ok()?;
    if matches!(host, "" | "?") { replied_by.with_port(port) } else { Some(Address::tcp(host, port)) }
}

impl SlotMap {
    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(super) fn owner(&self, slot: u16) -> Option<&Member> {
        let index = *self.owners.get(usize::from(slot))?;
        self.members.get(usize::from(index)).map(|entry| &*entry.member)
    }

    /// Returns the nodes that have slots.
    pub(super) fn listed(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|entry| entry.without_slots.is_none()).map(|entry| &*entry.member)
    }

    pub(super) fn replicas(&self) -> &[Address] {
        &self.replicas
    }

    pub(super) fn at(&self, address: &Address) -> Option<&Member> {
        self.members.iter().find(|entry| entry.address == *address).map(|entry| &*entry.member)
    }

    /// Returns the number of ranges that a view assigns to unavailable nodes.
    pub(super) fn failing(&self, view: &View) -> usize {
        let fails = |address: &Address| self.at(address).is_some_and(|member| !member.node.is_available());
        view.ranges.iter().filter(|(_, _, address)| fails(address)).count()
    }

    /// Returns the map of a view. Known nodes are kept; removed nodes stop when the last map that has them is dropped.
    pub(super) fn updated(&self, view: &View, start: impl Fn(&Address) -> Arc<Member>) -> Self {
        let mut next = Self { replicas: view.replicas.clone(), ..Self::default() };
        for (first, last, address) in &view.ranges {
            let index = next.members.iter().position(|entry| entry.address == *address).unwrap_or_else(|| {
                let known = self.members.iter().find(|entry| entry.address == *address);
                let member = known.map_or_else(|| start(address), |entry| entry.member.clone());
                next.members.push(Entry { address: address.clone(), member, without_slots: None });
                next.members.len() - 1
            });
            let index = u16::try_from(index).unwrap_or(NO_OWNER);
            for slot in *first..=*last {
                next.owners[usize::from(slot)] = index;
            }
        }
        for entry in &self.members {
            let since = entry.without_slots.unwrap_or_else(Instant::now);
            let is_listed = next.members.iter().any(|other| other.address == entry.address);
            if !is_listed && entry.member.node.is_available() && since.elapsed() < KEPT {
                next.members.push(Entry { without_slots: Some(since), ..entry.clone() });
            }
        }
        next
    }

    /// Returns the node at that address, and the map with the slot assigned to it, unless it is already.
    pub(super) fn moved(
        &self,
        slot: u16,
        to: &Address,
        start: impl Fn(&Address) -> Arc<Member>,
    ) -> (Option<Self>, Arc<Node>) {
        let (next, node) = self.with(to, start);
        let map = next.as_ref().unwrap_or(self);
        let index = map.members.iter().position(|entry| entry.address == *to);
        let index = index.and_then(|index| u16::try_from(index).ok()).unwrap_or(NO_OWNER);
        if map.owners.get(usize::from(slot)).is_none_or(|owner| *owner == index) {
            return (next, node);
        }
        let mut next = next.unwrap_or_else(|| self.clone());
        next.owners[usize::from(slot)] = index;
        if let Some(entry) = next.members.get_mut(usize::from(index)) {
            entry.without_slots = None;
        }
        (Some(next), node)
    }

    /// Returns the node at that address, and the map with it, unless it was there before.
    pub(super) fn with(&self, address: &Address, start: impl Fn(&Address) -> Arc<Member>) -> (Option<Self>, Arc<Node>) {
        if let Some(member) = self.at(address) {
            return (None, member.node.clone());
        }
        let (mut next, member) = (self.clone(), start(address));
        let node = member.node.clone();
        next.members.push(Entry { address: address.clone(), member, without_slots: Some(Instant::now()) });
        (Some(next), node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: i64) -> Value {
        Value::Array(vec![Value::BulkString(host.into()), Value::Int(port), Value::BulkString("id".into())])
    }

    #[test]
    fn a_reply_is_read_with_hosts_that_are_left_out() {
        let replied_by = Address::tcp("10.0.0.9", 7000);
        let range = |first, last, nodes: [Value; 2]| {
            let [master, replica] = nodes;
            Value::Array(vec![Value::Int(first), Value::Int(last), master, replica])
        };
        let first = range(0, 5460, [node("10.0.0.1", 7001), node("10.0.0.2", 7002)]);
        let unknown = Value::Array(vec![Value::Nil, Value::Int(7003)]);
        let reply = Value::Array(vec![first, range(5461, 16_383, [unknown, node("?", 7004)])]);
        let view = View::read(reply, &replied_by).expect("readable");
        let ranges: Vec<String> =
            view.ranges.iter().map(|(first, last, address)| format!("{first}-{last} {address}")).collect();
        assert_eq!(ranges, ["0-5460 10.0.0.1:7001", "5461-16383 10.0.0.9:7003"]);
        let replicas: Vec<String> = view.replicas.iter().map(Address::to_string).collect();
        assert_eq!(replicas, ["10.0.0.2:7002", "10.0.0.9:7004"]);
    }

    #[test]
    fn a_reply_that_makes_no_sense_is_refused() {
        let replied_by = Address::tcp("h", 1);
        let range = |first, last| Value::Array(vec![Value::Int(first), Value::Int(last), node("a", 1)]);
        let bad = [
            Value::Nil,
            Value::Array(vec![]),
            Value::Array(vec![Value::Nil]),
            Value::Array(vec![range(0, 16_384)]),
            Value::Array(vec![range(-1, 5)]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(5)])]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(5), node("a", 70_000)])]),
        ];
        for reply in bad {
            assert!(View::read(reply.clone(), &replied_by).is_err(), "{reply:?}");
        }
    }
}
