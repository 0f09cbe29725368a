//! Which table each limit gets: one of its own, one that a limit of its name had before, or one that it shares with
//! its variants.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use super::bucket::Layout;
use super::table::Table;
use crate::budget::Budget;
use crate::error::InvalidLimit;
use crate::limit::Limit;

/// Limits, and the table of each.
pub(super) struct Seated<'a> {
    pub(super) limits: &'a [Limit],
    pub(super) tables: &'a [Arc<Table>],
}

/// Chooses a table for every limit. A limit that shares one takes on the layout of the others in it.
pub(super) fn choose(
    limits: &mut [Limit],
    before: Option<Seated<'_>>,
    budget: &Budget,
) -> Result<Box<[Arc<Table>]>, InvalidLimit> {
    let mut chosen = Choices::new(before);
    let mut tables: Vec<Option<Arc<Table>>> = vec![None; limits.len()];
    // The largest quota first: what has room for it has room for its variants.
    let mut order: Vec<usize> = (0..limits.len()).collect();
    order.sort_by_key(|index| Reverse(limits[*index].quota()));
    let mut first_words = 0;
    for index in order {
        let (limit, table) = match chosen.table_for(&limits[index]) {
            Some(found) => found,
            None => {
                let compiled = limits[index].compiled();
                let layout = Layout::new(compiled.words(), compiled.free_bits());
                first_words += Table::first_words(layout);
                let table = (first_words * size_of::<u64>() <= budget.max())
                    .then(|| Table::new(layout, budget.clone()))
                    .flatten();
                (limits[index].clone(), Arc::new(table.ok_or_else(|| too_little(budget, limits.len()))?))
            }
        };
        chosen.add(&limit, &table);
        (limits[index], tables[index]) = (limit, Some(table));
    }
    Ok(tables.into_iter().flatten().collect())
}

fn too_little(budget: &Budget, limits: usize) -> InvalidLimit {
    let problem = format!("max_memory {} is too little for {limits} limits", budget.max());
    InvalidLimit::new("max_memory", problem, "allow more memory or use fewer limits")
}

/// The tables that there are, by the name of their limits.
struct Choices {
    by_name: HashMap<String, Vec<Choice>>,
}

struct Choice {
    table: Arc<Table>,
    /// A limit with the layout of the table.
    laid_out: Limit,
    /// Those that have it now.
    limits: Vec<Limit>,
}

impl Choices {
    fn new(before: Option<Seated<'_>>) -> Self {
        let mut choices = Self { by_name: HashMap::new() };
        for (limit, table) in before.into_iter().flat_map(|before| before.limits.iter().zip(before.tables)) {
            choices.choice(limit, table);
        }
        choices
    }

    fn choice(&mut self, limit: &Limit, table: &Arc<Table>) -> &mut Choice {
        let named = self.by_name.entry(limit.name().to_owned()).or_default();
        let known = named.iter().position(|choice| Arc::ptr_eq(&choice.table, table));
        let index = known.unwrap_or_else(|| {
            named.push(Choice { table: table.clone(), laid_out: limit.clone(), limits: Vec::new() });
            named.len() - 1
        });
        &mut named[index]
    }

    fn add(&mut self, limit: &Limit, table: &Arc<Table>) {
        self.choice(limit, table).limits.push(limit.clone());
    }

    /// The limit in the layout of a table that is there, and the table.
    fn table_for(&self, limit: &Limit) -> Option<(Limit, Arc<Table>)> {
        self.by_name.get(limit.name())?.iter().find_map(|choice| {
            let limit = limit.laid_out_as(&choice.laid_out)?;
            let rests_alike = choice.limits.iter().all(|other| limit.compiled().rests_like(other.compiled()));
            rests_alike.then(|| (limit, choice.table.clone()))
        })
    }
}
