//! Finding an item among those that one request has gathered: usually a few, at most thousands.

use std::collections::HashMap;
use std::hash::Hash;

/// Up to this many items are compared one by one, which is faster than a hash map.
const FEW: usize = 16;

/// Positions by key, maintained once there are more than a few items. Without it, the cost of a request would be
/// quadratic in its hits.
#[expect(clippy::box_collection, reason = "most requests have none, and every slow decision would clear its room")]
pub(crate) struct Positions<K>(Option<Box<HashMap<K, usize>>>);

impl<K> Default for Positions<K> {
    fn default() -> Self {
        Self(None)
    }
}

impl<K: Eq + Hash> Positions<K> {
    /// Returns the position of the item with this key. Among a few items it is the last one that `is_it` accepts.
    pub(crate) fn of<T>(&self, items: &[T], is_it: impl Fn(&T) -> bool, key: impl FnOnce() -> K) -> Option<usize> {
        match &self.0 {
            None => items.iter().rposition(is_it),
            Some(positions) => positions.get(&key()).copied(),
        }
    }

    /// Records the last item, after it was added.
    pub(crate) fn added<T>(&mut self, items: &[T], key: impl Fn(&T) -> K) {
        match &mut self.0 {
            None if items.len() <= FEW => {}
            None => self.0 = Some(Box::new(items.iter().map(key).zip(0..).collect())),
            Some(positions) => positions.extend(items.last().map(|item| (key(item), items.len() - 1))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_found_among_a_few_and_among_many() {
        let mut items: Vec<usize> = Vec::new();
        let mut positions = Positions::default();
        for item in 0..4 * FEW {
            items.push(item * 7);
            positions.added(&items, |item| *item);
            let position_of = |sought: usize| positions.of(&items, |item| *item == sought, || sought);
            assert!((0..=item).all(|item| position_of(item * 7) == Some(item)));
            assert_eq!(position_of(item * 7 + 1), None);
        }
    }
}
