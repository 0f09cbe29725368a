//! The cluster as one of its nodes sees it: `CLUSTER NODES`, read.

use std::ops::RangeInclusive;

use super::RedisServer;

pub(super) struct View {
    nodes: Vec<Seen>,
}

struct Seen {
    id: String,
    flags: Vec<String>,
    slots: Vec<RangeInclusive<u16>>,
}

impl View {
    pub(super) fn of(node: &RedisServer) -> Self {
        let text: String = node.query(redis::cmd("CLUSTER").arg("NODES"));
        Self { nodes: text.lines().map(Seen::read).collect() }
    }

    /// Before it has shaken hands, a node goes by an id made up for it.
    pub(super) fn has_met_all(&self, ids: &[String]) -> bool {
        ids.iter().all(|id| self.nodes.iter().any(|node| node.id == *id && !node.has_flag("handshake")))
    }

    pub(super) fn replicas(&self) -> usize {
        self.nodes.iter().filter(|node| node.has_flag("slave")).count()
    }

    pub(super) fn owner(&self, slot: u16) -> Option<&str> {
        let owner = self.nodes.iter().find(|node| node.slots.iter().any(|range| range.contains(&slot)))?;
        Some(&owner.id)
    }

    pub(super) fn first_slot_of(&self, id: &str) -> Option<u16> {
        let node = self.nodes.iter().find(|node| node.id == id)?;
        node.slots.first().map(|range| *range.start())
    }
}

impl Seen {
    /// `<id> <address> <flags> <master> <ping> <pong> <epoch> <link> <slot or range> ...`
    fn read(line: &str) -> Self {
        let mut words = line.split(' ');
        let id = words.next().expect("a node has an id").to_owned();
        let flags = words.nth(1).expect("a node has flags").split(',').map(String::from).collect();
        // A slot on the move is in brackets, besides being listed with its owner.
        let slots = words.skip(5).filter(|word| !word.starts_with('[')).map(read_range).collect();
        Self { id, flags, slots }
    }

    fn has_flag(&self, flag: &str) -> bool {
        self.flags.iter().any(|has| has == flag)
    }
}

fn read_range(word: &str) -> RangeInclusive<u16> {
    let (first, last) = word.split_once('-').unwrap_or((word, word));
    let slot = |digits: &str| digits.parse().expect("a slot is a number below 16384");
    slot(first)..=slot(last)
}
