//! The map of slots to the nodes of a cluster: the map in use, and the map as one node reports it.

use std::collections::HashMap;
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
/// Maximum number of nodes in a reply to `CLUSTER SLOTS`, replicas included: the number for which Redis Cluster is designed.
/// Each master has a connection and a queue.
pub(super) const MAX_NODES: usize = 1_000;
/// Maximum number of nodes that only redirects have named: targets of migrations, and replicas that were just promoted. The
/// next map of slots lists them.
const MAX_UNLISTED: usize = 64;
/// Time for which a node without slots is kept: the target of a migration has none at first.
const KEPT: Duration = Duration::from_secs(60);
/// New nodes that are connected to at once, and the pause before the next ones: hundreds of connections at once would delay
/// the decisions of other nodes.
const PACE: (usize, Duration) = (32, Duration::from_millis(10));

/// The map of slots. It is replaced as a whole.
#[derive(Clone)]
pub(super) struct SlotMap {
    /// The index of the node of each slot.
    owners: Box<[u16]>,
    members: Vec<Entry>,
    /// The index of each member.
    indices: Indices,
    replicas: Arc<[Address]>,
}

type Indices = HashMap<Address, u16, ahash::RandomState>;

#[derive(Clone)]
struct Entry {
    address: Address,
    member: Arc<Member>,
    /// Whether the last map of a node has it.
    is_listed: bool,
    /// The time since which it has had no slots.
    without_slots: Option<Instant>,
}

impl Default for SlotMap {
    fn default() -> Self {
        Self {
            owners: vec![NO_OWNER; SLOTS].into(),
            members: Vec::new(),
            indices: Indices::default(),
            replicas: Arc::default(),
        }
    }
}

/// The map as one node reports it.
#[derive(Default)]
pub(in crate::redis) struct View {
    masters: Vec<Address>,
    /// The first and the last slot of each range, and the index of its master. No slot is in two ranges.
    ranges: Vec<(u16, u16, u16)>,
    replicas: Arc<[Address]>,
}

impl View {
    /// Reads the reply to `CLUSTER SLOTS` of the node at that address.
    pub(in crate::redis) fn read(reply: Value, replied_by: &Address) -> Result<Self, StoreError> {
        let unreadable = || StoreError::invalid_reply("the reply to CLUSTER SLOTS is not in the expected format");
        let Value::Array(entries) = reply else { return Err(unreadable()) };
        let (mut view, mut slots) = (Self::default(), 0);
        let (mut masters, mut replicas) = (Indices::default(), Indices::default());
        for entry in entries {
            let Value::Array(parts) = entry else { return Err(unreadable()) };
            let [Value::Int(first), Value::Int(last), nodes @ ..] = &*parts else { return Err(unreadable()) };
            let slot = |number: i64| u16::try_from(number).ok().filter(|slot| usize::from(*slot) < SLOTS);
            let (Some(first), Some(last)) = (slot(*first), slot(*last)) else { return Err(unreadable()) };
            let length = last.checked_sub(first).ok_or_else(unreadable)?;
            slots += usize::from(length) + 1;
            if slots > SLOTS {
                return Err(StoreError::invalid_reply("the reply to CLUSTER SLOTS has ranges of slots that overlap"));
            }
            let mut addresses = nodes.iter().filter_map(|node| address(node, replied_by));
            let master = addresses.next().ok_or_else(unreadable)?;
            view.ranges.push((first, last, index_of(&mut masters, master)));
            for replica in addresses {
                index_of(&mut replicas, replica);
                if masters.len() + replicas.len() > MAX_NODES {
                    break;
                }
            }
            if masters.len() + replicas.len() > MAX_NODES {
                let problem = format!("the reply to CLUSTER SLOTS names more than {MAX_NODES} nodes");
                return Err(StoreError::invalid_reply(&problem));
            }
        }
        if view.ranges.is_empty() {
            return Err(StoreError::unavailable("the cluster has no slots yet"));
        }
        (view.masters, view.replicas) = (in_order(masters), in_order(replicas).into());
        Ok(view)
    }

    /// Returns the number of its nodes.
    pub(in crate::redis) fn nodes(&self) -> usize {
        self.masters.len() + self.replicas.len()
    }
}

/// Returns the index of an address, which is the next one if it is new.
fn index_of(indices: &mut Indices, address: Address) -> u16 {
    let next = u16::try_from(indices.len()).unwrap_or(NO_OWNER);
    *indices.entry(address).or_insert(next)
}

fn in_order(indices: Indices) -> Vec<Address> {
    let mut addresses: Vec<_> = indices.into_iter().collect();
    addresses.sort_unstable_by_key(|(_, index)| *index);
    addresses.into_iter().map(|(address, _)| address).collect()
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
    if matches!(host, "" | "?") { replied_by.with_port(port) } else { Address::named(host, port) }
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
        self.entry(address).map(|entry| &*entry.member)
    }

    fn entry(&self, address: &Address) -> Option<&Entry> {
        self.members.get(usize::from(*self.indices.get(address)?))
    }

    fn push(&mut self, entry: Entry) {
        self.indices.insert(entry.address.clone(), u16::try_from(self.members.len()).unwrap_or(NO_OWNER));
        self.members.push(entry);
    }

    /// Returns the number of ranges that a view assigns to unavailable nodes.
    pub(super) fn failing(&self, view: &View) -> usize {
        let fails = |address: &Address| self.at(address).is_some_and(|member| !member.node.is_available());
        let failing: Vec<bool> = view.masters.iter().map(fails).collect();
        view.ranges.iter().filter(|(_, _, master)| failing.get(usize::from(*master)) == Some(&true)).count()
    }

    /// Returns the number of masters in a view that are not in this map.
    pub(super) fn missing(&self, view: &View) -> usize {
        view.masters.iter().filter(|address| !self.indices.contains_key(address)).count()
    }

    /// Returns the map of a view. Known nodes are kept; removed nodes stop when the last map that has them is dropped.
    /// `start` starts a node after a delay.
    pub(super) fn updated(&self, view: &View, start: impl Fn(&Address, Duration) -> Arc<Member>) -> Self {
        let mut next = Self { replicas: view.replicas.clone(), ..Self::default() };
        let mut started = 0;
        for address in &view.masters {
            let member = self.entry(address).map(|entry| entry.member.clone()).unwrap_or_else(|| {
                let (at_once, pause) = PACE;
                started += 1;
                start(address, pause * (started - 1) / at_once as u32)
            });
            next.push(Entry { address: address.clone(), member, is_listed: true, without_slots: None });
        }
        for (first, last, master) in &view.ranges {
            next.owners[usize::from(*first)..=usize::from(*last)].fill(*master);
        }
        for entry in &self.members {
            let since = entry.without_slots.unwrap_or_else(Instant::now);
            let is_kept = entry.member.node.is_available() && since.elapsed() < KEPT;
            if is_kept && next.unlisted() < MAX_UNLISTED && !next.indices.contains_key(&entry.address) {
                next.push(Entry { is_listed: false, without_slots: Some(since), ..entry.clone() });
            }
        }
        next
    }

    fn unlisted(&self) -> usize {
        self.members.iter().rev().take_while(|entry| !entry.is_listed).count()
    }

    /// Returns the node at that address, and the map with the slot assigned to it, unless it is already. Returns `None` if
    /// redirects have named too many nodes.
    pub(super) fn moved(
        &self,
        slot: u16,
        to: &Address,
        start: impl FnOnce(&Address) -> Option<Arc<Member>>,
    ) -> Option<(Option<Self>, Arc<Node>)> {
        let (next, node) = self.with(to, start)?;
        let map = next.as_ref().unwrap_or(self);
        let index = map.indices.get(to).copied().unwrap_or(NO_OWNER);
        if map.owners.get(usize::from(slot)).is_none_or(|owner| *owner == index) {
            return Some((next, node));
        }
        let mut next = next.unwrap_or_else(|| self.clone());
        next.owners[usize::from(slot)] = index;
        if let Some(entry) = next.members.get_mut(usize::from(index)) {
            entry.without_slots = None;
        }
        Some((Some(next), node))
    }

    /// Returns the node at that address, and the map with it, unless it was there before. Returns `None` if redirects have
    /// named too many nodes.
    pub(super) fn with(
        &self,
        address: &Address,
        start: impl FnOnce(&Address) -> Option<Arc<Member>>,
    ) -> Option<(Option<Self>, Arc<Node>)> {
        if let Some(member) = self.at(address) {
            return Some((None, member.node.clone()));
        }
        if self.unlisted() >= MAX_UNLISTED {
            return None;
        }
        let member = start(address)?;
        let (mut next, node) = (self.clone(), member.node.clone());
        next.push(Entry { address: address.clone(), member, is_listed: false, without_slots: Some(Instant::now()) });
        Some((Some(next), node))
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
        let shown =
            |(first, last, master): &(u16, u16, u16)| format!("{first}-{last} {}", view.masters[usize::from(*master)]);
        let ranges: Vec<String> = view.ranges.iter().map(shown).collect();
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
            Value::Array(vec![range(5, 4)]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(5)])]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(5), node("a", 70_000)])]),
        ];
        for reply in bad {
            assert!(View::read(reply.clone(), &replied_by).is_err(), "{reply:?}");
        }
    }

    fn masters(count: i64) -> Value {
        let entry = |nth| Value::Array(vec![Value::Int(nth), Value::Int(nth), node("10.0.0.1", nth + 1)]);
        Value::Array((0..count).map(entry).collect())
    }

    #[test]
    fn a_view_with_too_many_nodes_is_refused() {
        let replied_by = Address::tcp("h", 1);
        let read = |reply| View::read(reply, &replied_by);
        assert_eq!(read(masters(1_000)).ok().map(|view| view.masters.len()), Some(MAX_NODES));
        let why = read(masters(1_001)).err().map(|error| error.detail().to_owned());
        let expected = "the reply to CLUSTER SLOTS names more than 1000 nodes";
        assert_eq!(why.as_deref(), Some(expected));
        let nodes = (0..1_001).map(|nth| node("10.0.0.2", nth + 1));
        let replicas = [Value::Int(0), Value::Int(16_383)].into_iter().chain(nodes).collect();
        let why = read(Value::Array(vec![Value::Array(replicas)])).err().map(|error| error.detail().to_owned());
        assert_eq!(why.as_deref(), Some(expected));
    }

    /// Filling the map would take 16,384 times as long.
    #[test]
    fn a_view_whose_ranges_overlap_is_refused() {
        let range = || Value::Array(vec![Value::Int(0), Value::Int(16_383), node("a", 1)]);
        let replied_by = Address::tcp("h", 1);
        assert!(View::read(Value::Array(vec![range()]), &replied_by).is_ok());
        let why = View::read(Value::Array(vec![range(), range()]), &replied_by).err();
        let why = why.map(|error| error.detail().to_owned());
        assert_eq!(why.as_deref(), Some("the reply to CLUSTER SLOTS has ranges of slots that overlap"));
    }

    #[test]
    fn a_replica_is_listed_once_however_many_ranges_it_has() {
        let range = |slot| Value::Array(vec![Value::Int(slot), Value::Int(slot), node("a", 1), node("b", 2)]);
        let view = View::read(Value::Array((0..16_384).map(range).collect()), &Address::tcp("h", 1)).expect("readable");
        assert_eq!((view.masters.len(), view.ranges.len(), view.replicas.len()), (1, 16_384, 1));
    }
}
