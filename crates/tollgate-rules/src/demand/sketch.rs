//! The clients of one limit: what each needed in the last epochs, and when it was last seen and last denied.
//!
//! Sketches of several nodes, or of several runs of a process, are merged by the maximum of each number. Merging is
//! commutative, associative and idempotent, so it does not matter who merges what, in which order, or how often.

use std::collections::BTreeMap;
use std::time::Duration;

use tollgate::Timestamp;
use tollgate::internal::whole_micros;

use super::needs::{Needs, bucket, largest};
use super::sample::contains;

/// The most clients of a sketch. At a cover of 99.9 %, the need of the eighth largest of them decides.
pub(super) const MAX_CLIENTS: usize = 8192;

/// The epochs that a sketch covers: seven whole ones and the present one.
pub(super) const EPOCHS: usize = 8;

/// Whole epochs in the time that a limit learns from.
const EPOCHS_PER_SPAN: u32 = 7;

/// The time between two evaluations.
pub const TICK: Duration = Duration::from_secs(5 * 60);

/// Ticks after which a client that needed nothing is dropped: one hour.
pub(super) const IDLE_TICKS: u32 = 12;

/// The number of a tick.
pub(super) fn tick(now: Timestamp) -> u32 {
    u32::try_from(now.as_micros() / whole_micros(TICK)).unwrap_or(u32::MAX)
}

/// Returns the length of an epoch of a limit that learns from the last `over`.
pub(super) fn epoch_length(over: Duration) -> Duration {
    (over / EPOCHS_PER_SPAN).max(TICK)
}

/// One client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// The largest need in each epoch, as a bucket of the histogram, indexed by the number of the epoch.
    pub(super) needs: [u16; EPOCHS],
    /// The ticks in which the client was last seen and last denied.
    pub(super) seen: u32,
    pub(super) denied: u32,
}

impl Record {
    /// Forgets the epochs that are too old once `to` begins.
    pub(super) fn advance(&mut self, from: u32, to: u32) {
        for epoch in (from.saturating_add(1)..=to).rev().take(EPOCHS) {
            self.needs[epoch as usize % EPOCHS] = 0;
        }
    }

    fn merge(&mut self, other: &Self) {
        for (need, other) in self.needs.iter_mut().zip(other.needs) {
            *need = (*need).max(other);
        }
        (self.seen, self.denied) = (self.seen.max(other.seen), self.denied.max(other.denied));
    }

    /// Returns whether the client needed something in two epochs or more. A key that is used once is cheap to invent: any
    /// number of them would otherwise move the need of the share of clients that decides.
    fn has_returned(&self) -> bool {
        self.needs.iter().filter(|need| **need > 0).count() > 1
    }

    /// Forgets ticks that are long past.
    fn forget_before(&mut self, newest: u32) {
        for tick in [&mut self.seen, &mut self.denied] {
            if tick.saturating_add(IDLE_TICKS) < newest {
                *tick = 0;
            }
        }
    }

    /// Returns whether the client needed nothing in any epoch, and was not seen lately.
    pub(super) fn is_idle(&self, newest: u32) -> bool {
        let mut record = *self;
        record.forget_before(newest);
        record == Self::default()
    }
}

/// Clients of one limit, at most 8192 of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sketch {
    pub(super) level: u32,
    /// The number of the present epoch.
    pub(super) epoch: u32,
    /// The tick in which a client was last seen.
    pub(super) newest: u32,
    pub(super) clients: BTreeMap<u64, Record>,
}

/// Clients that were seen in the last tick, and those of them that were denied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Clients that were seen.
    pub seen: u64,
    /// Clients that were denied.
    pub denied: u64,
}

impl Sketch {
    /// Adds the clients of another sketch.
    pub fn merge(&mut self, other: &Self) {
        let (before, epoch) = (self.epoch, self.epoch.max(other.epoch));
        self.clients.values_mut().for_each(|record| record.advance(before, epoch));
        for (client, record) in &other.clients {
            let mut record = *record;
            record.advance(other.epoch, epoch);
            self.clients.entry(*client).or_default().merge(&record);
        }
        (self.epoch, self.level) = (epoch, self.level.max(other.level));
        self.newest = self.newest.max(other.newest);
        self.trim();
    }

    /// Drops idle clients, and those that do not belong to the sample.
    pub(super) fn trim(&mut self) {
        let of_clients = self.clients.values().map(|record| record.seen.max(record.denied)).max().unwrap_or(0);
        self.newest = self.newest.max(of_clients);
        let (level, newest) = (self.level, self.newest);
        self.clients.retain(|client, record| {
            record.forget_before(newest);
            contains(level, *client) && *record != Record::default()
        });
        while self.clients.len() > MAX_CLIENTS {
            self.level += 1;
            let level = self.level;
            self.clients.retain(|client, _| contains(level, *client));
        }
    }

    /// Samples more clients from now on, if there is room for them: after an attack with many keys, for example.
    pub fn lower_level(&mut self) {
        if self.level > 0 && self.clients.len() < MAX_CLIENTS / 4 {
            self.level -= 1;
        }
    }

    /// Returns the number of clients, whether they have returned or not.
    #[must_use]
    pub fn clients(&self) -> u64 {
        self.clients.len() as u64
    }

    /// Returns the needs of the clients that have returned, over all epochs.
    #[must_use]
    pub fn needs(&self) -> Needs {
        let returned = self.clients.values().filter(|record| record.has_returned());
        let mut needs = Needs::default();
        returned.filter_map(|record| record.needs.into_iter().max()).for_each(|need| needs.add_bucket(need));
        needs
    }

    /// Returns the clients of the last whole tick, and of the present one so far.
    #[must_use]
    pub fn activity(&self, now: Timestamp) -> Activity {
        let since = tick(now).saturating_sub(1);
        let count = |at: fn(&Record) -> u32| self.clients.values().filter(|record| at(record) >= since).count() as u64;
        Activity { seen: count(|record| record.seen), denied: count(|record| record.denied) }
    }

    /// Appends the sketch in its portable form.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        for number in [self.level, self.epoch, self.newest, self.clients.len() as u32] {
            out.extend(number.to_le_bytes());
        }
        for (client, record) in &self.clients {
            out.extend(client.to_le_bytes());
            record.needs.iter().for_each(|need| out.extend(need.to_le_bytes()));
            out.extend(record.seen.to_le_bytes());
            out.extend(record.denied.to_le_bytes());
        }
    }

    /// Reads a sketch, or returns `None` if the bytes are not one.
    pub(super) fn decode(input: &mut Input<'_>) -> Option<Self> {
        let (level, epoch, newest, count) = (input.u32()?, input.u32()?, input.u32()?, input.u32()?);
        if level > u64::BITS || count as usize > MAX_CLIENTS {
            return None;
        }
        let mut sketch = Self { level, epoch, newest, clients: BTreeMap::new() };
        for _ in 0..count {
            let client = input.u64()?;
            let mut record = Record::default();
            for need in &mut record.needs {
                *need = input.u16()?;
                if bucket(largest(*need)) != *need {
                    return None;
                }
            }
            (record.seen, record.denied) = (input.u32()?, input.u32()?);
            sketch.clients.insert(client, record);
        }
        sketch.trim();
        Some(sketch)
    }
}

/// Reads numbers from bytes.
pub(super) struct Input<'b>(pub(super) &'b [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record() -> impl Strategy<Value = Record> {
        (prop::array::uniform8(0u64..1000), 0u32..40, 0u32..40).prop_map(|(needs, seen, denied)| Record {
            needs: needs.map(bucket),
            seen,
            denied,
        })
    }

    fn sketch() -> impl Strategy<Value = Sketch> {
        let clients = prop::collection::btree_map(any::<u64>().prop_map(|client| client >> 56 << 56), record(), 0..20);
        (0u32..3, 0u32..20, clients).prop_map(|(level, epoch, clients)| {
            let mut sketch = Sketch { level, epoch, newest: 0, clients };
            sketch.trim();
            sketch
        })
    }

    fn merged(one: &Sketch, other: &Sketch) -> Sketch {
        let mut merged = one.clone();
        merged.merge(other);
        merged
    }

    proptest! {
        #[test]
        fn merging_is_commutative_associative_and_idempotent(a in sketch(), b in sketch(), c in sketch()) {
            prop_assert_eq!(merged(&a, &b), merged(&b, &a));
            prop_assert_eq!(merged(&merged(&a, &b), &c), merged(&a, &merged(&b, &c)));
            prop_assert_eq!(merged(&merged(&a, &b), &b), merged(&a, &b));
        }

        #[test]
        fn sketch_survives_its_portable_form(sketch in sketch()) {
            let mut bytes = Vec::new();
            sketch.encode(&mut bytes);
            prop_assert_eq!(Sketch::decode(&mut Input(&bytes)), Some(sketch));
        }

        #[test]
        fn damaged_bytes_are_no_sketch_or_a_bounded_one(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(sketch) = Sketch::decode(&mut Input(&bytes)) {
                prop_assert!(sketch.clients.len() <= MAX_CLIENTS);
            }
        }
    }

    #[test]
    fn needs_of_old_epochs_are_forgotten() {
        let client = Record { needs: [0, 9, 4, 0, 0, 0, 0, 0], seen: 5, denied: 0 };
        let mut sketch = Sketch { epoch: 2, clients: [(1, client)].into(), ..Sketch::default() };
        sketch.merge(&Sketch { epoch: 8, ..Sketch::default() });
        assert_eq!(sketch.needs().max(), Some(9), "epochs 1 to 8 are covered");
        sketch.merge(&Sketch { epoch: 9, ..Sketch::default() });
        assert_eq!(sketch.needs().max(), None, "one epoch is left");
    }

    #[test]
    fn client_counts_once_it_has_returned_in_another_epoch() {
        let once = Record { needs: [0, 0, 0, 7, 0, 0, 0, 0], seen: 5, denied: 0 };
        let returned = Record { needs: [3, 0, 0, 5, 0, 0, 0, 0], ..once };
        let sketch = Sketch { epoch: 3, clients: [(1, once), (2, returned)].into(), ..Sketch::default() };
        assert_eq!((sketch.needs().clients(), sketch.needs().max()), (1, Some(5)));
    }
}
