//! Which table each limit gets: one that a configuration of the same meaning has or had, or a new one in its family.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use super::bucket::{Bucket, Busy, EMPTY, Layout, pause};
use super::family::{Family, Kin, Member, Members, Usage};
use super::holds::Holds;
use super::table::Table;
use crate::algorithm::{Algorithm, Compiled, Rules, with_rules};
use crate::budget::Budget;
use crate::error::InvalidLimit;
use crate::limit::Limit;
use crate::sync::Mutex;

/// Tables of one limit. When a reload needs more, those that are not used any more are emptied into the newest: a key
/// that is not found is looked for in all of them.
const MAX_TABLES: usize = 8;
/// Configurations of one limit that are remembered for refunds: more than a rule file has plans.
const MAX_CONFIGURATIONS: usize = 16;

/// The families of all limits that a store and those before it have had.
#[derive(Default)]
pub(crate) struct Families(pub(super) Mutex<HashMap<Name, Arc<Family>>>);

/// A limit and a ban may have the same name.
pub(super) type Name = (String, bool);

pub(super) fn name_of(limit: &Limit) -> Name {
    (limit.name().to_owned(), matches!(limit.algorithm(), Algorithm::Ban(_)))
}

/// What a store has of each limit, in their order.
pub(super) struct Chosen {
    pub(super) tables: Box<[Arc<Table>]>,
    pub(super) families: Box<[Arc<Family>]>,
    pub(super) usages: Box<[Arc<Usage>]>,
}

/// The family of a table, and the usage of its limit.
type Owner = (Arc<Family>, Arc<Usage>);

/// A family, and the members that it will have.
struct Draft {
    family: Arc<Family>,
    members: Members,
}

/// Chooses a table for every limit. A limit that shares one adopts the layout of the others in it. If it fails, nothing
/// has changed.
pub(super) fn choose(
    limits: &mut [Limit],
    families: &Families,
    budget: &Budget,
    now: u64,
) -> Result<Chosen, InvalidLimit> {
    let mut known = families.0.lock();
    let mut drafts: HashMap<Name, Draft> = HashMap::new();
    for limit in &*limits {
        let name = name_of(limit);
        let draft = drafts.entry(name.clone()).or_insert_with(|| {
            let family = known.get(&name).cloned().unwrap_or_else(|| Arc::new(Family::new()));
            let members = Members::clone(&family.members());
            Draft { family, members }
        });
        draft.members.ceiling = draft.members.ceiling.max(limit.quota());
    }
    for Draft { members, .. } in drafts.values_mut() {
        members.retire(now);
        let ceiling = members.ceiling;
        members.tables.iter_mut().for_each(|member| member.rules = member.rules.raised_to(ceiling));
    }
    let mut tables: Vec<Option<(Arc<Table>, Owner)>> = vec![None; limits.len()];
    // The largest quota first: what has room for it has room for its variants.
    let mut order: Vec<usize> = (0..limits.len()).collect();
    order.sort_by_key(|index| Reverse(limits[*index].quota()));
    let (mut first_words, count) = (0, limits.len());
    for index in order {
        let Some(Draft { family, members }) = drafts.get_mut(&name_of(&limits[index])) else { continue };
        let compiled = limits[index].compiled().with_ceiling(members.ceiling);
        let (compiled, table, usage) = match members.shared_by(&compiled) {
            Some(shared) => shared,
            None => {
                let layout = Layout::new(compiled.words(), compiled.free_bits());
                first_words += Table::first_words(layout);
                let table = (first_words * size_of::<u64>() <= budget.max())
                    .then(|| Table::new(layout, budget.clone()))
                    .flatten();
                let table = Arc::new(table.ok_or_else(|| too_little(budget, count))?);
                members.add(&compiled, table)
            }
        };
        let compiled = compiled.watching_ceiling(&family.ceiling);
        members.remember(&compiled);
        limits[index] = limits[index].with_compiled(compiled);
        tables[index] = Some((table, (family.clone(), usage)));
    }
    for (name, Draft { family, members }) in drafts {
        family.set(members);
        merge_retired(&family, now);
        known.insert(name, family);
    }
    // Limits that are gone stay known while their keys may come back.
    known.retain(|_, family| {
        family.drop_retired(now);
        !family.members().tables.is_empty()
    });
    let (tables, owners): (Vec<_>, Vec<Owner>) = tables.into_iter().flatten().unzip();
    let (families, usages): (Vec<_>, Vec<_>) = owners.into_iter().unzip();
    Ok(Chosen { tables: tables.into(), families: families.into(), usages: usages.into() })
}

fn too_little(budget: &Budget, limits: usize) -> InvalidLimit {
    let problem = format!("max_memory {} is too little for {limits} limits", budget.max());
    InvalidLimit::new("max_memory", problem, "allow more memory or use fewer limits")
}

impl Members {
    /// A table whose words mean the same, and the configuration in its layout.
    fn shared_by(&mut self, compiled: &Compiled) -> Option<(Compiled, Arc<Table>, Arc<Usage>)> {
        let ceiling = self.ceiling;
        self.tables.iter_mut().find_map(|member| {
            let compiled = compiled.laid_out_as(&member.rules, ceiling)?;
            let usage = member.usage.upgrade().unwrap_or_else(|| Arc::new(Usage));
            (member.usage, member.retired_at) = (Arc::downgrade(&usage), None);
            Some((compiled, member.table.clone(), usage))
        })
    }

    fn add(&mut self, compiled: &Compiled, table: Arc<Table>) -> (Compiled, Arc<Table>, Arc<Usage>) {
        let usage = Arc::new(Usage);
        let member =
            Member { table: table.clone(), rules: compiled.clone(), usage: Arc::downgrade(&usage), retired_at: None };
        self.tables.push(member);
        (compiled.clone(), table, usage)
    }

    fn remember(&mut self, compiled: &Compiled) {
        self.configurations.retain(|known| known.meaning() != compiled.meaning());
        self.configurations.insert(0, compiled.clone());
        self.configurations.truncate(MAX_CONFIGURATIONS);
    }
}

/// Empties tables that no store uses any more into the newest one, if there are too many of them.
fn merge_retired(family: &Family, now: u64) {
    loop {
        let members = family.members();
        let Some((newest, older)) = members.tables.split_last().filter(|(_, older)| older.len() >= MAX_TABLES) else {
            return;
        };
        let Some(oldest) = older.iter().position(|member| member.can_be_emptied(now)) else { return };
        let kin = Kin { family, table: &newest.table, rules: &newest.rules, tables: &[] };
        let keys = members.tables[oldest].table.keys();
        if !keys.into_iter().all(|fingerprint| move_key(kin, &members, fingerprint, now)) {
            // There is no room: the table stays until its keys are at rest.
            return;
        }
        let mut left = Members::clone(&members);
        left.tables.remove(oldest);
        family.set(left);
    }
}

impl Member {
    /// Whether no store uses the table, and no key without a slot is charged by its floors: those cannot be moved.
    fn can_be_emptied(&self, now: u64) -> bool {
        self.usage.strong_count() == 0 && with_rules!(&self.rules, rules => self.table.has_idle_floors(rules, now))
    }
}

fn move_key<'a>(kin: Kin<'a>, members: &'a Arc<Members>, fingerprint: u64, now: u64) -> bool {
    let mut attempts = 0;
    loop {
        let mut holds = Holds::default();
        match kin.hold_seat(&mut holds, Some(members), fingerprint, now) {
            Ok(seat) => return seat.is_some(),
            Err(busy) => {
                drop(holds);
                if let Busy::Crowded = busy {
                    kin.make_room(fingerprint, now);
                }
            }
        }
        attempts = pause(attempts);
    }
}

impl Table {
    /// The fingerprints of all keys that have a slot. Nobody adds any.
    fn keys(&self) -> Vec<u64> {
        let fingerprints = |bucket| (0..self.layout.slots).map(move |slot| Bucket::fingerprint(bucket, slot));
        self.buckets().flat_map(fingerprints).filter(|fingerprint| *fingerprint != EMPTY).collect()
    }

    fn has_idle_floors<R: Rules>(&self, rules: &R, now: u64) -> bool {
        self.buckets().all(|bucket| rules.is_idle(&self.shared(bucket), now))
    }

    /// All buckets, also those that were split before it was their turn.
    fn buckets(&self) -> impl Iterator<Item = Bucket<'_>> {
        (0..).take_while(|index| self.has_bucket(*index)).map(|index| self.bucket(index))
    }
}
